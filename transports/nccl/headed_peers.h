// Which ranks each operation has exchanged a header with. One is enough for all of its groups:
// their signature has what the messages of the others follow from.
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

  // True the first time.
  bool add(const OpKey& key, int32_t peer) {
    std::vector<bool>& known = of_[{key.comm, key.number}];
    known.resize(size_);
    const auto place = static_cast<size_t>(peer);
    if (known[place]) return false;
    known[place] = true;
    return true;
  }
  // The operation has no more groups.
  void forget(const OpKey& key) { of_.erase({key.comm, key.number}); }

 private:
  const size_t size_;
  std::map<std::pair<uint64_t, uint64_t>, std::vector<bool>> of_;
};

}  // namespace sotto::nccl
