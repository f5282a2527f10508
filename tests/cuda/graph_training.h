// A training whose steps can be launches of graphs.
#pragma once

#include <memory>

#include "tests/cuda/step_graph.h"

namespace sotto::test {

inline constexpr int kGraphSteps = 14;
inline const std::vector<size_t> kGraphCounts = {3000, 17, 700};

struct GraphKind {
  const char* name;
  const char* json;
  size_t graphs;      // recordings that a training of two ranks makes
  bool half = false;  // fp16 gradients, one of which overflows now and then
};
inline constexpr char kFp16[] =
    R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "fp16": {"enabled": true,
        "initial_scale_power": 4, "loss_scale_window": 3}, "gradient_clipping": 0.5,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 9}}})";
inline constexpr GraphKind kGraphKinds[] = {
    {"Sgd", R"({"optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9,
                "dampening": 0.1}}})",
     1},
    {"AdamW", R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "gradient_clipping": 1.0,
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 0.01,
        "warmup_num_steps": 3, "total_num_steps": 20}}})",
     1},
    {"LowPrecisionState", R"({"optimizer": {"type": "Adam", "params": {"lr": 0.01}},
                        "sotto": {"state_dtype": "fp8"}})",
     1},
    {"LossScale", kFp16, 1, true},
    {"Lamb", R"({"optimizer": {"type": "Lamb", "params": {"lr": 0.01, "weight_decay": 0.01}}})", 1},
    {"Int8Gradients", R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
                          "sotto": {"gradient_codec": {"type": "int8"}}})",
     2},
    {"OneBitGradients", R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
                            "sotto": {"gradient_codec": {"type": "onebit"}}})",
     2},
    {"OneBitAdam", R"({"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01,
                       "freeze_step": 3}}})",
     3},
    {"OneBitLamb", R"({"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": 3,
                       "weight_decay": 0.01}}})",
     3},
    {"ZeroOneAdam", R"({"optimizer": {"type": "ZeroOneAdam", "params": {"lr": 0.01,
        "var_freeze_step": 3, "var_update_scaler": 2, "local_step_scaler": 3,
        "local_step_clipper": 4}}})",
     5},
    {"Lion", R"({"optimizer": {"type": "Lion", "params": {"lr": 0.01, "weight_decay": 0.1}}})", 1},
};
inline void PrintTo(const GraphKind& kind, std::ostream* out) { *out << kind.name; }

enum class Steps { kCalled, kReplayed };

// A training on one rank; its result, parameters and state.
class Training {
 public:
  Training(const GraphKind& kind, const Member& self, int device)
      : half_(kind.half),
        rank_(self.rank),
        tensors_(Where::kCuda, device),
        params_(kGraphCounts.size()) {
    p_.resize(kGraphCounts.size());
    g_.resize(kGraphCounts.size());
    h_.resize(kGraphCounts.size());
    for (size_t t = 0; t < kGraphCounts.size(); ++t) {
      for (size_t i = 0; i < kGraphCounts[t]; ++i)
        p_[t].push_back(0.01f * static_cast<float>(i % 97) - 0.3f);
      g_[t].resize(kGraphCounts[t]);
      h_[t].resize(kGraphCounts[t]);
      elsewhere_.emplace_back(kGraphCounts[t]);
      params_[t].struct_size = sizeof(sotto_param);
      params_[t].param = tensors_.add(p_[t]);
      params_[t].grad = half_ ? half_buffer(t) : tensors_.add(g_[t]);
    }
    tensors_.sync();
    OK(sotto_optim_create(self.comm, kind.json, params_.data(), params_.size(), &optim_));
  }
  ~Training() {
    graphs_.clear();
    (void)sotto_optim_destroy(optim_);
  }

  sotto_optim* optim() const { return optim_; }
  Tensors& tensors() { return tensors_; }
  size_t graphs() const { return graphs_.size(); }
  StepGraph& graph() { return *graphs_.front(); }
  int replayed() const { return replayed_; }

  void run(Steps steps) {
    for (int step = 0; step < kGraphSteps; ++step) {
      new_gradients(step);
      if (steps == Steps::kReplayed) {
        next();
      } else {
        call();
      }
    }
  }
  void call() {
    const sotto_call call = tensors_.call();
    OK(sotto_optim_step(optim_, &call, nullptr));
  }
  // The next step with a graph that fits, or one that is recorded for it; or else by a call.
  void next() {
    for (const auto& graph : graphs_) {
      if (!ready(*graph)) continue;
      graph->run();
      ++replayed_;
      return;
    }
    if (!record()) {
      call();
      return;
    }
    require(ready(*graphs_.back()), "a step that was just recorded cannot be replayed");
    graphs_.back()->run();
    ++replayed_;
  }
  // To unused memory of parameters' size.
  void move_gradients() {
    std::vector<sotto_buffer> moved;
    for (std::vector<float>& p : elsewhere_) moved.push_back(tensors_.add(p));
    tensors_.sync();
    OK(sotto_optim_set_grads(optim_, moved.data(), moved.size()));
  }
  bool record() {
    auto graph = std::make_unique<StepGraph>(tensors_.stream());
    const sotto_status status = graph->record(optim_);
    if (status == SOTTO_E_INVALID_STATE) return false;
    require(status == SOTTO_OK, "sotto_optim_step while capturing");
    graphs_.push_back(std::move(graph));
    return true;
  }
  // All of it, also what only rank 0 writes for the gradients of step `step`.
  void new_gradients(int step) {
    tensors_.download();
    for (size_t t = 0; t < kGraphCounts.size(); ++t) {
      for (size_t i = 0; i < kGraphCounts[t]; ++i) {
        const auto place = i * 7 + t * 13 + static_cast<size_t>(rank_ * 5 + step * 3);
        g_[t][i] = static_cast<float>(place % 41) - 20.0f;
        h_[t][i] = static_cast<uint16_t>(0x2c00 + place % 1021);
      }
    }
    if (step % 5 == 3) h_[1][3] = 0x7c00;  // infinite
    tensors_.upload();
  }
  std::string result() {
    tensors_.download();
    std::string all;
    for (const std::vector<float>& p : p_) all += bytes_of(p);
    uint64_t length = 0;
    OK(sotto_optim_state_export(optim_, SOTTO_STATE_EXACT, nullptr, 0, &length));
    std::string blob(length, '\0');
    OK(sotto_optim_state_export(optim_, SOTTO_STATE_EXACT, blob.data(), length, &length));
    return all + blob;
  }
  std::string parameters() {
    tensors_.download();
    std::string all;
    for (const std::vector<float>& p : p_) all += bytes_of(p);
    return all;
  }

 private:
  sotto_buffer half_buffer(size_t t) {
    sotto_buffer b = tensors_.add(h_[t]);
    b.dtype = SOTTO_FLOAT16;
    return b;
  }
  bool ready(StepGraph& graph) {
    const sotto_status status = sotto_optim_replay(optim_, graph.op());
    if (status == SOTTO_E_INVALID_STATE) return false;
    require(status == SOTTO_OK, "sotto_optim_replay: " + std::string(sotto_last_error()));
    return true;
  }

  const bool half_;
  const int rank_;
  Tensors tensors_;
  std::vector<sotto_param> params_;
  std::vector<std::vector<float>> p_, g_, elsewhere_;
  std::vector<std::vector<uint16_t>> h_;
  sotto_optim* optim_ = nullptr;
  std::vector<std::unique_ptr<StepGraph>> graphs_;
  int replayed_ = 0;
};

}  // namespace sotto::test
