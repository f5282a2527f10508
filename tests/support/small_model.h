// What tests of optimizers train: odd shapes, one tensor without elements, two parameter groups,
// gradients in float32 and in 16 bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "core/optim/optimizer.h"

namespace sotto::test {

struct SmallModel {
  explicit SmallModel(int32_t rank_in) : rank(rank_in) {
    for (size_t i = 0; i < p.size(); ++i) p[i] = std::sin(static_cast<float>(i) * 0.37f);
  }

  struct Options {
    Dtype gradients = Dtype::kF32;  // else those in `half`
    bool copies = false;            // bfloat16 model copies of all tensors but t1
    const uint8_t* mask = nullptr;  // of t1
  };
  std::vector<ParamSpec> specs(const Options& options) {
    std::vector<ParamSpec> out;
    size_t at = 0;
    for (size_t t = 0; t < counts.size(); ++t) {
      ParamSpec spec{fmt::format("t{}", t), counts[t],     static_cast<uint32_t>(t % 2),
                     p.data() + at,         g.data() + at, t == 1 ? options.mask : nullptr};
      if (options.gradients != Dtype::kF32) {
        spec.grad = half.data() + at;
        spec.grad_dtype = options.gradients;
      }
      if (options.copies && t != 1) {
        spec.copy = copy.data() + at;
        spec.copy_dtype = Dtype::kBF16;
      }
      out.push_back(spec);
      at += counts[t];
    }
    return out;
  }
  std::vector<ParamSpec> specs() { return specs(Options()); }

  int32_t rank;
  std::vector<uint64_t> counts{1000, 17, 0, 8193, 1};
  std::vector<float> p = std::vector<float>(9211), g = p;
  std::vector<uint16_t> half = std::vector<uint16_t>(9211), copy = half;
};

// One of every kind, as "optimizer" sections; compressed stages start within a few updates.
inline constexpr const char* kOptimizers[] = {
    R"({"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}})",
    R"({"type": "AdamW", "params": {"lr": 0.01}})",
    R"({"type": "Lamb", "params": {"lr": 0.01, "weight_decay": 0.01}})",
    R"({"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 4}})",
    R"({"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": 4}})",
    R"({"type": "ZeroOneAdam", "params": {"lr": 0.01, "var_freeze_step": 5, "var_update_scaler": 2,
        "local_step_scaler": 3, "local_step_clipper": 4}})",
    R"({"type": "Lion", "params": {"lr": 0.01, "betas": [0.9, 0.99], "weight_decay": 0.01}})"};

inline Status do_step(Optimizer& optimizer) {
  SOTTO_ASSIGN(const OpRef op, optimizer.step({}));
  return optimizer.comm()->engine().wait(op, -1);
}

inline std::string bytes_of(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * 4};
}

}  // namespace sotto::test
