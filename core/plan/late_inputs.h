// Inputs of an operation that arrive one after the other, and its end: when nothing more comes on
// a rank, it says so, or that it gives the operation up, in a message to all ranks. The decision of
// all follows. So the operation of a rank that gives up has the same messages as any other, and the
// group stays healthy.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/plan/builder.h"

namespace sotto {

struct Levels;

// Of one rank, at the end of a round.
struct RoundMessage {
  char reason[252] = {};   // text that ends with a zero; of a rank that withdraws
  uint32_t withdrawn = 0;  // 0 or 1; last, as Gate has it
};
static_assert(sizeof(RoundMessage) == 256);

// Slots of the last input, and what ranks have of each other.
struct RoundEnd {
  uint32_t told = kNoSlot;   // host, a RoundMessage
  uint32_t order = kNoSlot;  // host, behind it: this rank's order; kNoSlot: ranks do not learn it
  Region messages;           // scratch, a RoundMessage of every rank
  Region first_order;        // scratch, the order of rank 0; no bytes: ranks do not learn it
};

// The last input, which is awaited here, and its exchange. order_bytes: of an order that all ranks
// learn from rank 0; 0: none.
RoundEnd emit_round_end(PlanBuilder& builder, int32_t rank, int32_t size, const Levels* levels,
                        uint64_t order_bytes);

// The decision that no rank has withdrawn, in `word`. prior: an earlier one that must be kCommit
// too; kNoSlot: there is none.
void decide_round(PlanBuilder& builder, const RoundEnd& end, uint32_t prior, uint32_t word);

// Who has withdrawn and why, from the messages of all ranks; nothing: none has.
std::optional<std::string> withdrawn_text(std::span<const std::byte> messages);

// A bound slot for state of a long-lived object that encoders change before the decision. It is
// copied first, and copied back if the operation does not commit, so encoders need no undo. For
// operations whose inputs arrive while they run, which undo cannot read; and the state has the same
// bits as before, where undo leaves what is equal but for rounding.
uint32_t bound_with_copy(PlanBuilder& builder, uint64_t bytes);

// Which of an operation's inputs pieces need, and what makes them be there. For emitters that have
// a choice of what comes first.
struct LateInputs {
  // The number of the last input with elements of these pieces.
  std::function<uint32_t(std::span<const Piece>)> last;
  // Emits that input and all before it, if they are not there.
  std::function<void(std::span<const Piece>)> need;
};

}  // namespace sotto
