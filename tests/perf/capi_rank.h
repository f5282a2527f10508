// Ranks that use nothing but sotto.h, and operations of theirs to repeat. Errors are
// std::runtime_error with the library's text.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "sotto/sotto.h"

namespace sotto::perf {

void must(sotto_status status, const char* what);

struct CapiRank {
  int32_t rank = 0;
  int32_t size = 1;
  sotto_context* context = nullptr;
  sotto_comm* comm = nullptr;
};

// One context with one thread for kernels.
sotto_context* new_context();
// body(rank) on a thread per rank of a new group over TCP.
void capi_world(int32_t size, const std::function<void(CapiRank&)>& body);

struct CapiKind {
  std::string name;
  uint64_t elements;
  std::string codec;      // JSON, of an all-reduce; empty: as it is
  std::string optimizer;  // JSON members of "optimizer"; empty: an all-reduce
};

// One rank's side of an operation that is run again and again.
class CapiWork {
 public:
  CapiWork(const CapiRank& rank, const CapiKind& kind);
  ~CapiWork();
  CapiWork(const CapiWork&) = delete;
  CapiWork& operator=(const CapiWork&) = delete;
  void run();
  // What it has to hold: arrays, and residuals or the optimizer's state.
  uint64_t held_bytes() const;

 private:
  const CapiRank& rank_;
  std::vector<float> in_, out_;  // of an optimizer: gradients, parameters
  sotto_codec* codec_ = nullptr;
  sotto_optim* optim_ = nullptr;
};

}  // namespace sotto::perf
