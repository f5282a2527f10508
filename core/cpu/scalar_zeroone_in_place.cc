// 0/1 Adam as published: for comparison, so there are no vector kernels of these.
#include "core/cpu/elements.h"
#include "core/cpu/kernel_table.h"
#include "core/cpu/ops_zeroone.h"

namespace sotto::scalar {
namespace {

// Operands 0 to 6, which the three kernels share.
struct InPlace {
  explicit InPlace(const KernelCall& call)
      : InPlace(call, call.of<kernels::ZeroOneInPlaceLocal>()) {}
  InPlace(const KernelCall& call, const kernels::InPlaceOperands<Operand>& o)
      : gradients{{&o.g, call.arguments<SourceArgs>().source}, o.clip.flat<const float>(), nullptr},
        m(o.m.flat<float>()),
        b(o.b.flat<float>()),
        den(o.den.flat<const float>()),
        parameters(&o.p),
        groups(o.scalars.flat<const ZeroOneGroupScalars>()) {}

  struct Values {
    float m, b, p;
  };
  // Element j of a piece after a local update; without gradients as it is.
  Values updated(const Piece& piece, uint64_t j) const {
    const ZeroOneGroupScalars& s = groups[piece.group];
    const uint64_t flat = piece.flat + j;
    Values now{m[flat], b[flat], parameter(piece)[j]};
    if (gradients.source.operand->data == nullptr) return now;
    zeroone_in_place_element(s, gradients.at(gradients.source.of(piece), j, flat), &now.m, &now.b,
                             den[flat], &now.p);
    return now;
  }
  float* parameter(const Piece& piece) const {
    return parameters->list<float>(piece.tensor) + piece.offset;
  }

  Gradients gradients;
  float* m;
  float* b;
  const float* den;
  const Operand* parameters;
  const ZeroOneGroupScalars* groups;
};

}  // namespace

void zeroone_in_place_local(const KernelCall& call) {
  const InPlace at(call);
  for (const Piece& piece : call.pieces) {
    for (uint64_t j = 0; j < piece.count; ++j) {
      const InPlace::Values now = at.updated(piece, j);
      at.m[piece.flat + j] = now.m;
      at.b[piece.flat + j] = now.b;
      at.parameter(piece)[j] = now.p;
    }
  }
}

void zeroone_in_place_sum(const KernelCall& call) {
  const auto& o = call.of<kernels::ZeroOneInPlaceSum>();
  const InPlace at(call);
  uint32_t flags = 0;
  for (const Piece& piece : call.pieces) {
    float* x = o.x.list<float>(piece.tensor) + piece.offset;
    for (uint64_t j = 0; j < piece.count; ++j) {
      x[j] = at.updated(piece, j).b * at.den[piece.flat + j];
      guard_finite(x[j], &flags);
    }
  }
  if (uint32_t* out = o.flags.flat<uint32_t>(); out != nullptr) raise_flags(out, flags);
}

void zeroone_in_place_sync(const KernelCall& call) {
  const auto& o = call.of<kernels::ZeroOneInPlaceSync>();
  const InPlace at(call);
  const Operand& floats = o.x;
  const Momentum mean{nullptr, o.bits.flat<const uint8_t>(), o.messages.flat<const uint8_t>()};
  const uint8_t* valid = o.valid.flat<const uint8_t>();
  for (const Piece& piece : call.pieces) {
    const ZeroOneGroupScalars& s = at.groups[piece.group];
    const float* x =
        floats.data == nullptr ? nullptr : floats.list<const float>(piece.tensor) + piece.offset;
    const float magnitude = mean.magnitude(piece, 1.0f);
    for (uint64_t j = 0; j < piece.count; ++j) {
      const uint64_t flat = piece.flat + j;
      InPlace::Values now = at.updated(piece, j);
      float sum = x != nullptr ? x[j] : mean.at(flat, magnitude);
      if (valid != nullptr && !get_bit(valid, flat)) sum = 0.0f;
      zeroone_in_place_sync_element(s, sum, &now.m, &now.b, at.den[flat], &now.p);
      at.parameter(piece)[j] = now.p;
      at.m[flat] = now.m;
      at.b[flat] = now.b;
    }
  }
}

}  // namespace sotto::scalar
