// Counters of a transport over NCCL, per comm epoch and peer. Group headers are of no epoch: 0.
//
// Threads: any.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "core/iface/transport.h"
#include "transports/nccl/group_header.h"

namespace sotto::nccl {

class Counters {
 public:
  void count(const Transfer& transfer) {
    const std::lock_guard lock(mutex_);
    counters_[{transfer.op->key.comm, transfer.peer}].add(transfer);
  }
  void count_header(int32_t peer, bool sent) {
    const std::lock_guard lock(mutex_);
    TransferCounters& c = counters_[{0, peer}];
    (sent ? c.service_bytes_sent : c.service_bytes_received) += sizeof(GroupHeader);
  }
  void drop(uint64_t comm) {
    const std::lock_guard lock(mutex_);
    if (comm == 0) return;
    counters_.erase(counters_.lower_bound({comm, INT32_MIN}),
                    counters_.upper_bound({comm, INT32_MAX}));
  }
  TransferCounters read(uint64_t comm, int32_t peer) const {
    const std::lock_guard lock(mutex_);
    const auto it = counters_.find({comm, peer});
    return it == counters_.end() ? TransferCounters{} : it->second;
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::pair<uint64_t, int32_t>, TransferCounters> counters_;
};

}  // namespace sotto::nccl
