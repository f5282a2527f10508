// What tests of optimizers with outer steps share.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "tests/ranks/capi_optim_model.h"

namespace sotto::test {

inline std::string file(const std::string& optimizer, const std::string& outer,
                        const std::string& more = "") {
  return R"({"optimizer": )" + optimizer + R"(, "sotto": {"outer": )" + outer + "}" + more + "}";
}
inline constexpr char kAdamW[] =
    R"({"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}})";
inline constexpr char kCo2[] = R"({"preset": "co2", "period": 3})";

// Gradients of a step, other ones on every rank.
inline void draw(Model& model, int32_t rank, int step) {
  for (std::vector<float>& g : model.gradients) {
    for (size_t i = 0; i < g.size(); ++i)
      g[i] = std::sin(static_cast<float>(i * 3 + 1 + 17 * static_cast<size_t>(step) +
                                         101 * static_cast<size_t>(rank)));
  }
}

inline void expect_same(const Model& found, const Model& wanted, const std::string& what) {
  for (size_t t = 0; t < 2; ++t)
    require(found.weights[t] == wanted.weights[t], what + ": tensor " + std::to_string(t));
}

inline sotto_outer* outer_of(sotto_optim* optim) {
  sotto_outer* outer = nullptr;
  OK(sotto_optim_outer(optim, &outer));
  return outer;
}

inline void train(sotto_optim* optim) { OK(sotto_optim_step(optim, nullptr, nullptr)); }

}  // namespace sotto::test
