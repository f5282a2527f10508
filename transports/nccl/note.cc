#include "transports/nccl/note.h"

#include <cstddef>
#include <cstring>

#include "core/base/hash.h"

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

uint64_t check_of(const Note& note) { return hash64(&note, offsetof(Note, check)); }

}  // namespace

Note make_note(std::span<Transfer* const> group, int32_t peer) {
  Note note;
  bool first = true;
  for (const Transfer* t : group) {
    if (t->peer != peer) continue;
    if (first) {
      note.key = t->op->key;
      note.signature = t->op->signature;
      note.round = t->round;
      first = false;
    }
    const Item item{t->op->key, t->op->signature, t->bytes, t->round, t->segment};
    uint64_t& hash = t->is_send ? note.sent : note.expected;
    hash = hash64(&item, sizeof item, hash);
    (t->is_send ? note.sent_bytes : note.expected_bytes) += t->bytes;
  }
  note.check = check_of(note);
  return note;
}

// The note may be on its way: what is read then does not have its hash. Not an access that
// ThreadSanitizer is to order.
__attribute__((no_sanitize("thread"))) bool has_arrived(const void* at, Note* note) {
  const auto* from = static_cast<const volatile uint64_t*>(at);
  uint64_t words[sizeof(Note) / 8];
  for (size_t i = 0; i < std::size(words); ++i) words[i] = from[i];
  std::memcpy(note, words, sizeof *note);
  return note->check != 0 && note->check == check_of(*note);
}

Status compare(const Note& mine, int32_t rank, const Note& theirs, int32_t peer) {
  if (mine.sent == theirs.expected && mine.expected == theirs.sent) return ok_status();
  if (mine.key == theirs.key && mine.signature == theirs.signature) {
    return error(Code::kProtocol,
                 "{}: rank {} sends {} bytes to rank {} in round {}, which expects {} in round {}, "
                 "and expects {}, where {} are sent",
                 describe(mine.signature), rank, mine.sent_bytes, peer, mine.round,
                 theirs.expected_bytes, theirs.round, mine.expected_bytes, theirs.sent_bytes);
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

Status without_note() {
  return error(Code::kProtocol, "nccl: what a rank has sent does not begin with its note");
}

}  // namespace sotto::nccl
