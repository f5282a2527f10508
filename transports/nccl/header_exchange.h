// The headers of one group: this rank sends one to each peer that needs it (HeadedPeers) and
// receives one from it, in pinned memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "transports/nccl/counters.h"
#include "transports/nccl/group_header.h"
#include "transports/nccl/pools.h"

namespace sotto::nccl {

struct PeerHeader {
  int32_t peer;
  GroupHeader mine;
  std::byte* out;
  std::byte* in;
  Status meant;  // once seen: OK, or the difference from the peer's
  bool seen = false;
};

class HeaderExchange {
 public:
  // Of rank `rank` among `size` ranks.
  HeaderExchange(PinnedPool& pool, int32_t rank, int32_t size)
      : pool_(pool), rank_(rank), size_(size) {}

  // Bytes of pinned memory that the headers of one group take.
  static uint64_t bytes(int32_t size) {
    return 2 * sizeof(GroupHeader) * static_cast<uint64_t>(size - 1);
  }
  // The header of the group's messages with `peer`, if there is none yet.
  Status add(int32_t peer, std::span<Transfer* const> group, GraphUse use = GraphUse::kCalled);
  // For one more execution of the same group, with the numbers that its operations have now.
  void renew(std::span<Transfer* const> group);
  // Compares what has arrived. Null: none of it is meant for something else.
  const PeerHeader* check();
  // Whether check() has seen all headers.
  bool all_seen() const;
  std::span<const PeerHeader> all() const { return headers_; }
  void count(Counters& counters, bool sent) const;
  // Gives the memory back; there are no headers then.
  void release();

 private:
  static void write(const PeerHeader& header);

  PinnedPool& pool_;
  const int32_t rank_, size_;
  std::vector<PeerHeader> headers_;
  std::byte* memory_ = nullptr;  // for all of them
};

}  // namespace sotto::nccl
