// The note that two ranks send each other in front of the messages of a round. NCCL matches by
// order alone and checks nothing; with notes a difference is found and described, also while the
// messages hang because of it.
//
// 104 bytes each way, in the group of the messages, so it costs no round trip. Counted as service
// bytes.
#pragma once

#include <cstdint>
#include <span>

#include "core/iface/transport.h"

namespace sotto::nccl {

struct Note {
  OpKey key;  // of the first message between the two
  OpSignature signature;
  uint32_t round = 0;
  uint32_t reserved = 0;
  uint64_t sent = 0;        // hash of everything that this rank sends: keys, order, bytes
  uint64_t expected = 0;    // and of what it expects
  uint64_t sent_bytes = 0;  // for the text
  uint64_t expected_bytes = 0;
  uint64_t check = 0;  // hash of the rest: a note that is partly there does not fit
};
static_assert(sizeof(Note) == 104);

// What this rank tells `peer` about its messages with it in the group.
Note make_note(std::span<Transfer* const> group, int32_t peer);
// Whether the note has arrived completely. Memory that a device may be writing to.
bool has_arrived(const void* at, Note* note);
// PROTOCOL if the two ranks mean different messages.
Status compare(const Note& mine, int32_t rank, const Note& theirs, int32_t peer);
// PROTOCOL: all of a group has arrived, but not its note.
Status without_note();

}  // namespace sotto::nccl
