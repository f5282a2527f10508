#include "core/plan/late_inputs.h"

#include <cstring>

#include "core/base/text.h"
#include "core/plan/collectives.h"

namespace sotto {
namespace {

// The order of rank 0 on all ranks.
Region share_order(PlanBuilder& b, int32_t rank, int32_t size, uint32_t own, uint64_t bytes,
                   uint32_t round) {
  const Region order{b.scratch(bytes), 0, bytes};
  if (rank != 0) {
    b.recv(0, order, round, MessageClass::kMetadata);
    return order;
  }
  b.copy(order, {own, 0, bytes});
  for (int32_t peer = 1; peer < size; ++peer) b.send(peer, order, round, MessageClass::kMetadata);
  return order;
}

}  // namespace

RoundEnd emit_round_end(PlanBuilder& b, int32_t rank, int32_t size, const Levels* levels,
                        uint64_t order_bytes) {
  constexpr uint64_t kBytes = sizeof(RoundMessage);
  RoundEnd end;
  std::vector<uint32_t> input{end.told = b.host(kBytes)};
  if (order_bytes != 0) input.push_back(end.order = b.host(order_bytes));
  b.await(input);
  const uint64_t all = static_cast<uint64_t>(size) * kBytes;
  end.messages = {b.scratch(all), 0, all};
  const uint32_t rows = end.messages.slot;
  b.copy({rows, static_cast<uint64_t>(rank) * kBytes, kBytes}, {end.told, 0, kBytes});
  const uint32_t round = b.next_round();
  emit_message_exchange(b, rank, size, levels, rows, kBytes, round);
  if (order_bytes != 0) end.first_order = share_order(b, rank, size, end.order, order_bytes, round);
  return end;
}

void decide_round(PlanBuilder& b, const RoundEnd& end, uint32_t prior, uint32_t word) {
  b.kernel<kernels::Gate>(
      {.messages = whole(end.messages.slot, Access::kRead, 0, end.messages.bytes),
       .prior = prior == kNoSlot ? absent() : whole(prior, Access::kRead, 0, 4),
       .word = whole(word, Access::kWrite, 0, 4)},
      {},
      GateArgs{sizeof(RoundMessage),
               static_cast<uint32_t>(end.messages.bytes / sizeof(RoundMessage)), kSkipNonfinite});
}

uint32_t bound_with_copy(PlanBuilder& b, uint64_t bytes) {
  const Region state{b.bound(bytes), 0, bytes}, copy{b.scratch(bytes), 0, bytes};
  UndoStep back;
  back.only_if_paired_ran = true;
  back.pair_first = back.pair_last = b.copy(copy, state);
  back.step.work = CopyStep{copy, state};
  b.undo(std::move(back));
  return state.slot;
}

std::optional<std::string> withdrawn_text(std::span<const std::byte> messages) {
  std::vector<size_t> who;
  std::string reason;
  for (size_t r = 0; r < messages.size() / sizeof(RoundMessage); ++r) {
    RoundMessage message;
    std::memcpy(&message, messages.data() + r * sizeof message, sizeof message);
    if (message.withdrawn == 0) continue;
    message.reason[sizeof message.reason - 1] = 0;
    if (who.empty()) reason = message.reason;
    who.push_back(r);
  }
  if (who.empty()) return std::nullopt;
  return fmt::format("{} {} {} withdrawn: {}", who.size() == 1 ? "rank" : "ranks",
                     list_of_ranks(who), who.size() == 1 ? "has" : "have",
                     printable(reason, sizeof RoundMessage::reason));
}

}  // namespace sotto
