// Where gradients come from: the part of a training that is not Sotto's.
#pragma once

#include <cstdint>
#include <fstream>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

struct Tensor {
  std::string name;
  std::uint32_t group;  // index into "param_groups" of the configuration
  std::size_t offset, count;
};

// Weights, equal at the start on all ranks, and this rank's gradients. Tensors lie one after the
// other in both.
class Task {
 public:
  virtual ~Task() = default;
  // Gradients of the next step; false: there is none any more. loss is this rank's.
  virtual bool next(double* loss) = 0;
  // Whether the training has reached its aim.
  virtual bool reached(double first, double last) const = 0;

  std::vector<Tensor> tensors;
  std::vector<float> weights, gradients;
};

// Linear regression on samples of its own on each rank: finds the weights that made the targets.
class Regression : public Task {
 public:
  explicit Regression(int rank) : random_(static_cast<unsigned>(1 + rank)), truth_(kInputs) {
    tensors.push_back({"weights", 0, 0, kInputs});
    weights.assign(kInputs, 0.01f);
    gradients.resize(kInputs);
    std::mt19937 same_everywhere(12345);
    for (float& w : truth_) w = 0.1f * static_cast<float>(normal_(same_everywhere));
  }

  // Half the mean squared error of a fresh batch.
  bool next(double* loss) override {
    if (step_++ == kSteps) return false;
    gradients.assign(kInputs, 0.0f);
    *loss = 0;
    std::vector<float> x(kInputs);
    for (int sample = 0; sample < kBatch; ++sample) {
      float error = 0;
      for (std::size_t i = 0; i < kInputs; ++i) {
        x[i] = static_cast<float>(normal_(random_));
        error += x[i] * (weights[i] - truth_[i]);
      }
      for (std::size_t i = 0; i < kInputs; ++i) gradients[i] += error * x[i] / kBatch;
      *loss += 0.5 * static_cast<double>(error * error) / kBatch;
    }
    return true;
  }

  bool reached(double first, double last) const override { return last < 0.2 * first; }

 private:
  static constexpr std::size_t kInputs = 512;
  static constexpr int kBatch = 64;  // samples per rank and step
  static constexpr int kSteps = 300;

  std::mt19937 random_;
  std::normal_distribution<double> normal_;
  std::vector<float> truth_;
  int step_ = 0;
};

// What integration/c_trainer has recorded (--record PREFIX; its record.h has the format): the same
// steps, without the model.
class Recorded : public Task {
 public:
  Recorded(const std::string& prefix, int rank)
      : path_(prefix + ".rank" + std::to_string(rank)), file_(path_, std::ios::binary) {
    if (!file_) throw std::runtime_error("cannot open " + path_);
    std::size_t total = 0;
    for (std::uint64_t n = number(); n > 0; --n) {
      Tensor tensor;
      tensor.group = static_cast<std::uint32_t>(number());
      tensor.count = number();
      tensor.name.resize(number());
      get(&tensor.name[0], tensor.name.size());
      tensor.offset = total;
      total += tensor.count;
      tensors.push_back(tensor);
    }
    weights.resize(total);
    gradients.resize(total);
    get(weights.data(), total * sizeof(float));
  }

  bool next(double* loss) override {
    *loss = 0;  // not recorded
    if (file_.peek() == std::ifstream::traits_type::eof()) return false;
    get(gradients.data(), gradients.size() * sizeof(float));
    return true;
  }

  bool reached(double, double) const override { return true; }

 private:
  std::uint64_t number() {
    std::uint64_t value = 0;
    get(&value, sizeof value);
    return value;
  }
  void get(void* data, std::size_t size) {
    file_.read(static_cast<char*>(data), static_cast<std::streamsize>(size));
    if (!file_) throw std::runtime_error(path_ + " ends too early");
  }

  std::string path_;
  std::ifstream file_;
};
