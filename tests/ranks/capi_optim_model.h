// A small model for tests of optimizers at the C ABI.
#pragma once

#include <cmath>
#include <vector>

#include "tests/ranks/capi_support.h"

namespace sotto::test {

inline constexpr const char* kOneBitLamb =
    R"({"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": 3}}})";
inline constexpr const char* kOneBitAdam =
    R"({"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 3}}})";
inline constexpr const char* kZeroOneAdam =
    R"({"optimizer": {"type": "ZeroOneAdam", "params": {"lr": 0.01, "var_freeze_step": 2,
        "var_update_scaler": 2, "local_step_scaler": 1, "local_step_clipper": 4}}})";
inline constexpr const char* kLamb = R"({"optimizer": {"type": "Lamb", "params": {"lr": 0.01}}})";
inline const WorldOptions kDefault;

// Two tensors and their gradients, different on every rank in the gradients only.
struct Model {
  std::vector<float> weights[2], gradients[2];
  std::vector<sotto_param> params;

  explicit Model(int32_t rank, std::vector<size_t> counts = {1000, 37}) {
    static const char* const kNames[] = {"w", "b"};
    for (size_t t = 0; t < 2; ++t) {
      for (size_t i = 0; i < counts[t]; ++i) {
        weights[t].push_back(0.5f + 0.01f * static_cast<float>(i % 9));
        gradients[t].push_back(std::sin(static_cast<float>(1 + i + 7 * static_cast<size_t>(rank))));
      }
      sotto_param p = {};
      p.struct_size = sizeof p;
      p.name = kNames[t];
      p.param = buffer(weights[t]);
      p.grad = buffer(gradients[t]);
      params.push_back(p);
    }
  }
};

inline sotto_optim* new_optim(const Member& self, const char* json, const Model& model) {
  sotto_optim* optim = nullptr;
  OK(sotto_optim_create(self.comm, json, model.params.data(), model.params.size(), &optim));
  return optim;
}

}  // namespace sotto::test
