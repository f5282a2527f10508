#include "core/codec/coding.h"

namespace sotto {

#define SOTTO_CODEC(type, number, words, bits, block, scales, sparse, residual, coding) \
  const Coding& coding##_coding();
#include "core/base/codecs.def"

const Coding& coding_of(CodecKind kind) {
  const Coding* found = nullptr;
#define SOTTO_CODEC(type, number, words, bits, block, scales, sparse, residual, coding) \
  if (kind == CodecKind::k##type) found = &coding##_coding();
#include "core/base/codecs.def"
  return *found;
}

OperandRef payload_operand(uint32_t slot, Access access, PayloadUnit unit, uint64_t base,
                           uint64_t offset) {
  OperandRef op = flat(slot, access, unit.bytes * 8, base, offset);
  op.unit_elements = unit.elements;
  return op;
}

}  // namespace sotto
