// A small model for tests of outer optimizers at the C ABI.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "tests/ranks/capi_support.h"

namespace sotto::test {

// The anchor becomes the mean of parameters, `more` says when: every number can be computed by
// hand.
inline std::string mean_json(const std::string& more) {
  return R"({"preset": "co2", "auto_floor": false, "penalty": "none", "clip": "none", "beta": 0, )" +
         more + "}";
}

// Two tensors whose elements are all the same number.
struct OuterModel {
  std::vector<float> weights[2];
  std::vector<uint16_t> copies[2];
  std::vector<sotto_param> params;

  // copy: SOTTO_FLOAT16, SOTTO_BFLOAT16 or 0, without model copies.
  explicit OuterModel(float start = 1, uint32_t copy = 0, std::vector<size_t> counts = {1000, 37}) {
    static const char* const kNames[] = {"w", "b"};
    for (size_t t = 0; t < 2; ++t) {
      weights[t].assign(counts[t], start);
      copies[t].assign(counts[t], 0);
      sotto_param p = SOTTO_PARAM_INIT;
      p.name = kNames[t];
      p.param = buffer(weights[t]);
      if (copy != 0) {
        p.model_copy = buffer(copies[t]);
        p.model_copy.dtype = static_cast<sotto_dtype>(copy);
      }
      params.push_back(p);
    }
  }
  OuterModel(const OuterModel&) = delete;
  OuterModel& operator=(const OuterModel&) = delete;

  size_t elements() const { return weights[0].size() + weights[1].size(); }
  void write(float x) {
    for (std::vector<float>& w : weights) w.assign(w.size(), x);
  }
  void add(float x) {
    for (std::vector<float>& w : weights) {
      for (float& v : w) v += x;
    }
  }
  // The number that all elements have.
  float read() const {
    for (const std::vector<float>& w : weights) {
      for (const float v : w) {
        require(v == weights[0][0],
                "elements differ: " + std::to_string(v) + " and " + std::to_string(weights[0][0]));
      }
    }
    return weights[0][0];
  }
  uint16_t read_copy() const {
    for (const std::vector<uint16_t>& c : copies) {
      for (const uint16_t v : c) require(v == copies[0][0], "elements of model copies differ");
    }
    return copies[0][0];
  }
};

inline sotto_status create_outer(const Member& self, const std::string& json,
                                 const OuterModel& model, sotto_outer** out) {
  return sotto_outer_create(self.comm, json.c_str(), model.params.data(), model.params.size(), out);
}

inline sotto_outer* new_outer(const Member& self, const std::string& json,
                              const OuterModel& model) {
  sotto_outer* outer = nullptr;
  OK(create_outer(self, json, model, &outer));
  return outer;
}

inline sotto_outer_info info_of(const sotto_outer* outer) {
  sotto_outer_info info = SOTTO_OUTER_INFO_INIT;
  OK(sotto_outer_get_info(outer, &info));
  return info;
}

inline sotto_comm_counters counters_of(const Member& self) {
  sotto_comm_counters counters = SOTTO_COMM_COUNTERS_INIT;
  OK(sotto_comm_get_counters(self.comm, &counters));
  return counters;
}

inline void step(sotto_outer* outer) { OK(sotto_outer_step(outer, nullptr, nullptr)); }

template <class A, class B>
void same(const A& found, const B& wanted, const std::string& what) {
  if (found == static_cast<A>(wanted)) return;
  throw RankError(what + " is " + std::to_string(found) + ", not " + std::to_string(wanted));
}

inline void barrier(const Member& self) { OK(sotto_barrier(self.comm, nullptr, nullptr)); }

}  // namespace sotto::test
