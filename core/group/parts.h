// What a comm has moved and done, with its parts: the comms that it has made for the library's own
// operations. A part that has ended leaves its sums, and nothing else.
//
// Threads: any.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>

#include "core/engine/links.h"
#include "core/engine/op.h"

namespace sotto {

struct CommCounters {
  TransferCounters moved;
  uint64_t payload_bytes_planned = 0;
  uint64_t header_bytes_planned = 0;
  uint64_t kernel_ns = 0;
  uint64_t ops_completed = 0;
  void add(const OpTotals& totals);
};

class Parts {
 public:
  void add(uint64_t epoch, std::shared_ptr<const OpTotals> totals);
  // It has no more operations. `links` know it still. `ranks`: its, in the root comm.
  void end(uint64_t epoch, const LinkTable& links, std::span<const int32_t> ranks);
  // All that were ever made.
  uint64_t made() const;

  // By all parts, with a rank of the root comm.
  TransferCounters moved(const LinkTable& links, int32_t rank) const;
  // Of all parts, without what was moved.
  CommCounters done() const;

 private:
  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<const OpTotals>> there_;  // by epoch
  CommCounters done_;                                                    // of those that have ended
  std::map<int32_t, TransferCounters> moved_;  // the same, by rank in the root comm
  uint64_t made_ = 0;
};

}  // namespace sotto
