// The header of an NCCL group: two ranks send it to each other in front of the first messages of an
// operation. NCCL matches by order alone and checks nothing. With the header a difference is found
// and described, also while the messages hang because of it. Ranks that mean the same operation
// have the same plan, so its later groups need none, but for the first one behind each of its
// inputs.
//
// 104 bytes each way, in the group of the messages, so it costs no round trip. Counted as control
// traffic (service bytes).
#pragma once

#include <cstdint>
#include <span>

#include "core/iface/transport.h"

namespace sotto::nccl {

// Whether the messages are part of a CUDA graph, and NCCL may have registered their memory then.
// It may do so on both ranks or on none.
enum class GraphUse : uint32_t { kCalled, kReplayed, kReplayedRegistered };

struct GroupHeader {
  OpKey key;  // of the first message between the two
  OpSignature signature;
  uint32_t round = 0;
  GraphUse use = GraphUse::kCalled;
  uint64_t sent = 0;        // hash of everything that this rank sends: keys, order, bytes
  uint64_t expected = 0;    // hash of everything that this rank expects
  uint64_t sent_bytes = 0;  // of messages, for the error text
  uint64_t expected_bytes = 0;
  uint64_t check = 0;  // hash of the rest; does not fit before all of it has arrived
};
static_assert(sizeof(GroupHeader) == 104);

// For `peer`: the messages of the group that this rank sends to it and expects of it.
GroupHeader make_group_header(std::span<Transfer* const> group, int32_t peer,
                              GraphUse use = GraphUse::kCalled);
// Whether the header at `at`, memory that a device may be writing to, has arrived completely.
bool has_arrived(const void* at, GroupHeader* header);
// PROTOCOL if the two ranks mean different messages, or NCCL may have registered those of one
// alone.
Status compare(const GroupHeader& mine, int32_t rank, const GroupHeader& theirs, int32_t peer);
// PROTOCOL: all of a group has arrived, but not its header.
Status missing_group_header();

}  // namespace sotto::nccl
