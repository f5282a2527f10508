#include "transports/nccl/group_header.h"

#include <cstddef>
#include <cstring>

#include "core/base/hash.h"
#include "core/base/text.h"

namespace sotto::nccl {
namespace {

// Equal on both ranks for the same message. Fixed layout, no padding.
struct Item {
  OpKey key;
  OpSignature signature;
  uint64_t bytes;
  uint32_t round, segment;
};
static_assert(sizeof(Item) == 72);

uint64_t check_of(const GroupHeader& header) {
  return hash64(&header, offsetof(GroupHeader, check));
}

}  // namespace

GroupHeader make_group_header(std::span<Transfer* const> group, int32_t peer, GraphUse use) {
  GroupHeader header;
  header.use = use;
  bool first = true;
  for (const Transfer* t : group) {
    if (t->peer != peer) continue;
    if (first) {
      header.key = t->op->key;
      header.signature = t->op->signature;
      header.round = t->round;
      first = false;
    }
    const Item item{t->op->key, t->op->signature, t->bytes, t->round, t->segment};
    uint64_t& hash = t->is_send ? header.sent : header.expected;
    hash = hash64(&item, sizeof item, hash);
    (t->is_send ? header.sent_bytes : header.expected_bytes) += t->bytes;
  }
  header.check = check_of(header);
  return header;
}

// While the header arrives its hash does not fit. ThreadSanitizer need not order this access.
__attribute__((no_sanitize("thread"))) bool has_arrived(const void* at, GroupHeader* header) {
  const auto* from = static_cast<const volatile uint64_t*>(at);
  uint64_t words[sizeof(GroupHeader) / 8];
  for (size_t i = 0; i < std::size(words); ++i) words[i] = from[i];
  std::memcpy(header, words, sizeof *header);
  return header->check != 0 && header->check == check_of(*header);
}

Status compare(const GroupHeader& mine, int32_t rank, const GroupHeader& theirs, int32_t peer) {
  if (mine.sent == theirs.expected && mine.expected == theirs.sent) {
    const bool registered = mine.use == GraphUse::kReplayedRegistered;
    if (registered == (theirs.use == GraphUse::kReplayedRegistered)) return ok_status();
    return error(
        Code::kProtocol,
        "{}: rank {} replays a graph in which NCCL may have registered its memory, and rank "
        "{} does not; replay on all ranks, or set NCCL_GRAPH_REGISTER=0 on all before NCCL "
        "is loaded",
        describe(mine.signature), registered ? rank : peer, registered ? peer : rank);
  }
  if (mine.key == theirs.key && mine.signature == theirs.signature) {
    return error(Code::kProtocol,
                 "{}: rank {} sends {} to rank {} in round {}, which expects {} in round {}, "
                 "and expects {}, where rank {} sends {}",
                 describe(mine.signature), rank, counted(mine.sent_bytes, "byte"), peer, mine.round,
                 theirs.expected_bytes, theirs.round, mine.expected_bytes, peer, theirs.sent_bytes);
  }
  if (mine.key == theirs.key || mine.key.comm != theirs.key.comm)
    return Status(Code::kProtocol,
                  describe_mismatch(mine.key, rank, mine.signature, peer, theirs.signature));
  return error(Code::kProtocol,
               "ranks are in different operations: rank {} in operation {} {}, rank {} in "
               "operation {} {}",
               rank, mine.key.number & ~(uint64_t{1} << 63), describe(mine.signature), peer,
               theirs.key.number & ~(uint64_t{1} << 63), describe(theirs.signature));
}

Status missing_group_header() {
  return error(Code::kProtocol, "nccl: what a rank has sent does not begin with its group header");
}

}  // namespace sotto::nccl
