// Tables of CPU kernels: one per SIMD target, all with equal results. A table has an entry for
// every KernelId.
#pragma once

#include <array>
#include <cstddef>

#include "core/iface/kernels.h"

namespace sotto {

// Executes a call whose predicate has been checked already. Never fails: operands and arguments are
// the engine's.
using KernelFunction = void (*)(const KernelCall&);

using KernelTable = std::array<KernelFunction, static_cast<size_t>(KernelId::kCount)>;

inline KernelFunction& kernel_entry(KernelTable& table, KernelId id) {
  return table[static_cast<size_t>(id)];
}

// The reference: plain loops in the order that kernels.h states.
const KernelTable& scalar_kernels();

// The parts it is made of.
namespace scalar {
void fill(const KernelCall& call);
void pack(const KernelCall& call);
void unpack(const KernelCall& call);
void convert(const KernelCall& call);
void accumulate(const KernelCall& call);
void reduce(const KernelCall& call);

void onebit_encode(const KernelCall& call);
void onebit_encode_undo(const KernelCall& call);
void onebit_server(const KernelCall& call);
void onebit_decode(const KernelCall& call);
void norm_finish(const KernelCall& call);
void gate(const KernelCall& call);

void quant_encode(const KernelCall& call);
void quant_encode_undo(const KernelCall& call);
void quant_server(const KernelCall& call);
void quant_decode(const KernelCall& call);

void sum_squares(const KernelCall& call);
void norm_message(const KernelCall& call);
void clip_coefficient(const KernelCall& call);
void count_valid(const KernelCall& call);

void adam(const KernelCall& call);
void adam_narrow(const KernelCall& call);
void lamb_moments(const KernelCall& call);
void lamb_scalars(const KernelCall& call);
void lamb_update(const KernelCall& call);

void onebit_lamb_encode(const KernelCall& call);
void onebit_lamb_encode_undo(const KernelCall& call);
void freeze_variance(const KernelCall& call);
void onebit_lamb_scaling(const KernelCall& call);
void onebit_lamb_factor(const KernelCall& call);
void onebit_lamb_scalars(const KernelCall& call);
void momentum_update(const KernelCall& call);
void momentum_from_bits(const KernelCall& call);

void step_sizes(const KernelCall& call);
void sgd(const KernelCall& call);
void sgd_narrow(const KernelCall& call);

void frozen_adam(const KernelCall& call);
void zeroone_local(const KernelCall& call);
void zeroone_encode(const KernelCall& call);
void zeroone_encode_undo(const KernelCall& call);
void zeroone_sync(const KernelCall& call);
void zeroone_in_place_local(const KernelCall& call);
void zeroone_in_place_sum(const KernelCall& call);
void zeroone_in_place_sync(const KernelCall& call);
}  // namespace scalar

}  // namespace sotto
