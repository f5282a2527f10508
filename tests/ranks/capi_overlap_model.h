// What tests of overlaps at the C ABI share.
#pragma once

#include <string>
#include <vector>

#include "tests/ranks/capi_support.h"

namespace sotto::test {

// Gradients whose elements are all the same number.
struct Gradients {
  std::vector<std::vector<float>> data;
  std::vector<sotto_buffer> buffers;

  explicit Gradients(const std::vector<size_t>& counts = {1000, 37, 5000, 1, 800, 20}) {
    for (const size_t count : counts) data.emplace_back(count);
    for (std::vector<float>& d : data) buffers.push_back(buffer(d));
  }
  Gradients(const Gradients&) = delete;
  Gradients& operator=(const Gradients&) = delete;
  uint64_t size() const { return data.size(); }
  void write(float x) {
    for (std::vector<float>& d : data) d.assign(d.size(), x);
  }
  void expect(float x, const std::string& what) const {
    for (const std::vector<float>& d : data) {
      for (const float v : d)
        require(v == x, what + ": " + std::to_string(v) + " instead of " + std::to_string(x));
    }
  }
};

inline constexpr const char* kBuckets = R"({"first_bucket_bytes": 2000, "bucket_bytes": 4000})";

inline sotto_overlap* new_overlap(const Member& self, const Gradients& gradients,
                                  const char* json = kBuckets) {
  sotto_overlap* overlap = nullptr;
  OK(sotto_overlap_create(self.comm, json, gradients.buffers.data(), gradients.size(), &overlap));
  return overlap;
}

inline void mark(sotto_overlap* overlap, const std::vector<uint64_t>& indices) {
  OK(sotto_overlap_ready(overlap, indices.data(), nullptr, indices.size(), nullptr));
}

inline sotto_op* begin(sotto_overlap* overlap, const sotto_call* call = nullptr) {
  sotto_op* op = nullptr;
  OK(sotto_overlap_begin(overlap, call, &op));
  return op;
}

inline void finish(sotto_overlap* overlap, sotto_op* op) {
  OK(sotto_overlap_finish(overlap));
  OK(sotto_op_wait(op, -1));
  OK(sotto_op_release(op));
}

inline sotto_overlap_info info_of(const sotto_overlap* overlap) {
  sotto_overlap_info info = SOTTO_OVERLAP_INFO_INIT;
  OK(sotto_overlap_get_info(overlap, &info));
  return info;
}

}  // namespace sotto::test
