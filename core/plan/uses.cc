// What a step touches.
#include <algorithm>

#include "core/plan/plan.h"

namespace sotto {

Region resolve(std::span<const Slot> slots, Region region) {
  while (slots[region.slot].alias_of != kNoSlot) {
    region.offset += slots[region.slot].alias_offset;
    region.slot = slots[region.slot].alias_of;
  }
  return region;
}

namespace {

// Appends a region, merged with the previous one if they touch or overlap, as bits of elements do
// that share a byte.
void add_use(std::span<const Slot> slots, Region region, Access access, std::vector<Use>* uses) {
  if (region.bytes == 0) return;
  region = resolve(slots, region);
  if (!uses->empty()) {
    Use& last = uses->back();
    if (last.access == access && last.region.slot == region.slot &&
        last.region.offset <= region.offset &&
        region.offset <= last.region.offset + last.region.bytes) {
      last.region.bytes =
          std::max(last.region.bytes, region.offset + region.bytes - last.region.offset);
      return;
    }
  }
  uses->push_back({region, access});
}

Region unit_range(uint32_t slot, uint64_t offset, uint64_t first, uint64_t count,
                  uint32_t unit_bits) {
  const uint64_t begin = first * unit_bits / 8;
  const uint64_t end = ((first + count) * unit_bits + 7) / 8;
  return {slot, offset + begin, end - begin};
}

Region flat_range(const OperandRef& op, uint64_t offset, const Piece& piece) {
  const uint64_t first = (piece.flat - op.base) / op.unit_elements;
  const uint64_t end =
      (piece.flat - op.base + piece.count + op.unit_elements - 1) / op.unit_elements;
  return unit_range(op.slot, offset, first, end - first, op.unit_bits);
}

void piece_uses(std::span<const Slot> slots, const OperandRef& op, const Piece& piece,
                std::vector<Use>* uses) {
  switch (op.footprint) {
    case Footprint::kWhole: break;
    case Footprint::kFlat: add_use(slots, flat_range(op, op.offset, piece), op.access, uses); break;
    case Footprint::kRows:
      for (uint32_t row = 0; row < op.rows; ++row) {
        add_use(slots, flat_range(op, op.offset + row * op.row_bytes, piece), op.access, uses);
      }
      break;
    case Footprint::kList:
    case Footprint::kTarget: {
      if (piece.tensor == kNoTensor) break;
      const uint64_t first = op.footprint == Footprint::kList ? piece.offset : piece.target;
      add_use(slots,
              unit_range(op.slot + piece.tensor, op.offset, first, piece.count, op.unit_bits),
              op.access, uses);
      break;
    }
    case Footprint::kBlocks: {
      const uint64_t blocks = (piece.lane + piece.count + kNormBlock - 1) / kNormBlock;
      add_use(slots, unit_range(op.slot, op.offset, piece.block, blocks, op.unit_bits), op.access,
              uses);
      break;
    }
    case Footprint::kScale:
      add_use(slots, unit_range(op.slot, op.offset, piece.scale, 1, op.unit_bits), op.access, uses);
      break;
    case Footprint::kMessage:
      add_use(slots, unit_range(op.slot, op.offset, piece.message, 1, op.unit_bits), op.access,
              uses);
      break;
  }
}

}  // namespace

void collect_uses(std::span<const Slot> slots, const Step& step, std::vector<Use>* uses) {
  const auto add = [&](const Region& region, Access access) {
    add_use(slots, region, access, uses);
  };
  if (const MessageStep* message = step.message()) {
    if (message->native != nullptr) {
      add(message->native->in, Access::kRead);
      add(message->native->out, Access::kWrite);
    } else {
      add(message->data, message->is_send ? Access::kRead : Access::kWrite);
    }
  } else if (const CopyStep* copy = step.copy()) {
    add(copy->source, Access::kRead);
    add(copy->destination, Access::kWrite);
  } else if (const AwaitStep* await = step.await()) {
    for (const uint32_t slot : await->slots) add({slot, 0, slots[slot].bytes}, Access::kWrite);
  } else if (const KernelStep* kernel = step.kernel()) {
    for (const OperandRef& op : kernel->operands) {
      if (op.slot == kNoSlot) continue;
      if (op.footprint == Footprint::kWhole) {
        add({op.slot, op.offset, op.bytes}, op.access);
      } else {
        for (const Piece& piece : kernel->pieces) piece_uses(slots, op, piece, uses);
      }
    }
  }
  if (step.predicate.slot != kNoSlot)
    add({step.predicate.slot, step.predicate.offset, 4}, Access::kRead);
}

}  // namespace sotto
