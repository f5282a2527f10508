// Which ranks each operation has exchanged a header with. One is enough for all groups that come
// one after the other: their signature has what the messages of the others follow from. What waits
// for inputs of the operation has others in front, which may not be the same on all ranks.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "core/iface/transport.h"

namespace sotto::nccl {

class HeadedPeers {
 public:
  // Of `size` ranks.
  explicit HeadedPeers(int32_t size) : size_(static_cast<size_t>(size)) {}

  // True the first time behind so many inputs.
  bool add(const OpKey& key, uint32_t inputs, int32_t peer) {
    std::vector<uint32_t>& headed = of_[{key.comm, key.number}];
    headed.resize(size_);
    uint32_t& next = headed[static_cast<size_t>(peer)];
    if (inputs < next) return false;
    next = inputs + 1;
    return true;
  }
  // The operation has no more groups.
  void forget(const OpKey& key) { of_.erase({key.comm, key.number}); }

 private:
  const size_t size_;
  std::map<std::pair<uint64_t, uint64_t>, std::vector<uint32_t>> of_;  // inputs of the next header
};

}  // namespace sotto::nccl
