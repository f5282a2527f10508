// A trainer in C++ in one page: linear regression with 1-bit LAMB on several ranks.
//
//   sotto-run -n 4 -- cpp-trainer [CONFIG.json]
//
// Every rank has samples of its own; Sotto averages what they learn from them. Ranks find each
// other through the environment that sotto-run sets.
#include <sotto/sotto.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

void check(sotto_status status) {
  if (status != SOTTO_OK) throw std::runtime_error(sotto_last_error());
}

// Handles that destroy themselves.
struct Destroy {
  void operator()(sotto_context* p) const { sotto_context_destroy(p); }
  void operator()(sotto_comm* p) const { sotto_comm_destroy(p); }
  void operator()(sotto_optim* p) const { sotto_optim_destroy(p); }
  void operator()(sotto_op* p) const { sotto_op_release(p); }
};
template <class T>
using Handle = std::unique_ptr<T, Destroy>;

// make(nullptr-terminated arguments..., &out): the last argument of a create function is its
// result.
template <class T, class Make>
Handle<T> create(Make make) {
  T* raw = nullptr;
  check(make(&raw));
  return Handle<T>(raw);
}

constexpr int kInputs = 512;
constexpr int kBatch = 64;  // samples per rank and step
constexpr int kSteps = 300;
constexpr const char* kConfig = R"({
  "optimizer": {"type": "OneBitLamb", "params": {"lr": 0.02, "freeze_step": 60, "weight_decay": 0.0}},
  "gradient_clipping": 10.0
})";

sotto_buffer floats(std::vector<float>& v) {
  return {v.data(), v.size(), SOTTO_FLOAT32, SOTTO_DEVICE_CPU, 0, 0};
}

// The task: find the weights that made the targets.
struct Task {
  explicit Task(int rank) : random(static_cast<unsigned>(1 + rank)) {
    std::mt19937 same_everywhere(12345);
    for (float& w : truth) w = 0.1f * static_cast<float>(normal(same_everywhere));
  }

  // Half the mean squared error of a fresh batch; its gradient goes to `gradient`.
  double loss_and_gradient(const std::vector<float>& weights, std::vector<float>* gradient) {
    std::fill(gradient->begin(), gradient->end(), 0.0f);
    double loss = 0;
    std::vector<float> x(kInputs);
    for (int sample = 0; sample < kBatch; ++sample) {
      float error = 0;
      for (int i = 0; i < kInputs; ++i) {
        x[i] = static_cast<float>(normal(random));
        error += x[i] * (weights[i] - truth[i]);
      }
      for (int i = 0; i < kInputs; ++i) (*gradient)[i] += error * x[i] / kBatch;
      loss += 0.5 * error * error / kBatch;
    }
    return loss;
  }

  std::mt19937 random;
  std::normal_distribution<double> normal;
  std::vector<float> truth = std::vector<float>(kInputs);
};

// Mean over ranks, the same number on all of them.
double average(sotto_comm* comm, double value) {
  const sotto_buffer b = {&value, 1, SOTTO_FLOAT64, SOTTO_DEVICE_CPU, 0, 0};
  sotto_call call = SOTTO_CALL_INIT;
  call.reduce = SOTTO_REDUCE_MEAN;
  check(sotto_all_reduce(comm, &b, &b, 1, &call, nullptr));
  return value;
}

bool same_on_all_ranks(sotto_comm* comm, std::vector<float>& weights) {
  std::vector<float> low = weights, high = weights;
  sotto_call call = SOTTO_CALL_INIT;
  const sotto_buffer l = floats(low), h = floats(high);
  call.reduce = SOTTO_REDUCE_MIN;
  check(sotto_all_reduce(comm, &l, &l, 1, &call, nullptr));
  call.reduce = SOTTO_REDUCE_MAX;
  check(sotto_all_reduce(comm, &h, &h, 1, &call, nullptr));
  return std::memcmp(low.data(), high.data(), low.size() * sizeof(float)) == 0;
}

int train(const std::string& config) {
  const auto context =
      create<sotto_context>([](auto out) { return sotto_context_create(nullptr, out); });
  const auto comm =
      create<sotto_comm>([&](auto out) { return sotto_comm_create(context.get(), nullptr, out); });
  int32_t rank = 0;
  check(sotto_comm_rank(comm.get(), &rank));

  std::vector<float> weights(kInputs, 0.01f), gradient(kInputs);  // equal at the start on all ranks
  sotto_param param = {};
  param.struct_size = sizeof param;
  param.name = "weights";
  param.param = floats(weights);
  param.grad = floats(gradient);
  const auto optim = create<sotto_optim>(
      [&](auto out) { return sotto_optim_create(comm.get(), config.c_str(), &param, 1, out); });

  Task task(rank);
  double first = 0, last = 0;
  for (int step = 0; step < kSteps; ++step) {
    const double loss = task.loss_and_gradient(weights, &gradient);
    const auto op =
        create<sotto_op>([&](auto out) { return sotto_optim_step(optim.get(), nullptr, out); });
    check(sotto_op_wait(op.get(), -1));
    if (step % 50 != 0 && step != kSteps - 1) continue;
    last = average(comm.get(), loss);
    if (step == 0) first = last;
    if (rank == 0) std::printf("step %3d  loss %.4f\n", step, last);
  }
  sotto_comm_counters counters = {};
  counters.struct_size = sizeof counters;
  check(sotto_comm_get_counters(comm.get(), &counters));
  const bool same = same_on_all_ranks(comm.get(), weights);
  if (rank == 0) {
    std::printf("sent %llu bytes, planned %llu; weights are %s on all ranks\n",
                static_cast<unsigned long long>(counters.payload_bytes_sent),
                static_cast<unsigned long long>(counters.payload_bytes_planned),
                same ? "equal" : "DIFFERENT");
  }
  return same && last < 0.2 * first ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    std::string config = kConfig;
    if (argc > 1) {
      std::ifstream file(argv[1]);
      if (!file) throw std::runtime_error(std::string("cannot open ") + argv[1]);
      config.assign(std::istreambuf_iterator<char>(file), {});
    }
    return train(config);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "cpp-trainer: %s\n", e.what());
    return 1;
  }
}
