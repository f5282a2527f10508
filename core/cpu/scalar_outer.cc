// Outer optimizers.
#include "core/cpu/kernel_table.h"
#include "core/cpu/ops_outer.h"

namespace sotto::scalar {

void outer_delta(const KernelCall& call) { run_elements<OuterDeltaOp>(call); }
void outer_norm(const KernelCall& call) { run_elements<OuterNormOp>(call); }
void outer_step(const KernelCall& call) { run_elements<OuterStepOp>(call); }

void outer_sum(const KernelCall& call) {
  const auto& o = call.of<kernels::OuterSum>();
  *o.sum.flat<double>() =
      add_blocks(o.sums.flat<const float>(), 0, call.arguments<OuterMessageArgs>().blocks);
}

void outer_tell(const KernelCall& call) {
  const auto& o = call.of<kernels::OuterTell>();
  const uint32_t flags = *o.flags.flat<const uint32_t>();
  const double sum =
      add_blocks(o.sums.flat<const float>(), 0, call.arguments<OuterMessageArgs>().blocks);
  const OuterMessage message = outer_message(*o.host.flat<const OuterMessage>(), sum,
                                             o.segments.flat<const OuterSegment>()->gap,
                                             o.inner_sum.flat<const double>(), flags);
  *o.message.flat<OuterMessage>() = message;
  *o.word.flat<uint32_t>() = message.weight == 0 ? kSkipNonfinite : kCommit;
}

void outer_factors(const KernelCall& call) {
  const auto& o = call.of<kernels::OuterFactors>();
  const auto& a = call.arguments<OuterFactorsArgs>();
  const auto* messages = o.messages.flat<const OuterMessage>();
  OuterSegment* segments = o.segments.flat<OuterSegment>();
  OuterFactor* factors = o.factors.flat<OuterFactor>();
  const OuterVotes votes = count_outer_votes(messages, a.world);
  const OuterInputs& inputs = *o.inputs.flat<const OuterInputs>();
  const OuterNumbers numbers = outer_numbers(a, inputs, votes.ranks, segments[0].alpha);
  const uint32_t word = outer_word(a, votes);
  const OuterPenaltyArgs penalty = outer_penalty(a, votes);
  const double of_ranks =
      a.penalty.kind == OuterPenalty::kGapInner ? inner_unit(a, inputs, messages) : 0.0;
  for (uint64_t k = 0; k < a.n; ++k) {
    const NormRange& range = a.ranges[k];
    double unit = of_ranks;
    if (a.penalty.needs_norms()) {
      unit = float_root(add_blocks(o.sums.flat<const float>(), range.first_block, range.blocks));
    }
    OuterSegment segment = segments[k];
    factors[k] = outer_factor(penalty, numbers.gamma, messages, unit, range.count, &segment);
    if (k == 0) segment.alpha = numbers.alpha;
    segments[k] = word == kCommit ? segment : outer_unmoved(segments[k]);
  }
  *o.numbers.flat<OuterNumbers>() = numbers;
  *o.word.flat<uint32_t>() = word;
}

void outer_limit(const KernelCall& call) {
  const auto& o = call.of<kernels::OuterLimit>();
  const auto& a = call.arguments<OuterLimitArgs>();
  limit_momentum(a, add_blocks(o.m_sums.flat<const float>(), 0, a.blocks),
                 o.numbers.flat<OuterNumbers>());
}

void outer_gap(const KernelCall& call) {
  const auto& o = call.of<kernels::OuterGap>();
  const auto& a = call.arguments<OuterGapArgs>();
  const float* clipped = o.clipped.flat<const float>();
  for (uint64_t k = 0; k < a.n; ++k) {
    const NormRange& range = a.ranges[k];
    const double sum = add_blocks(o.step_sums.flat<const float>(), range.first_block, range.blocks);
    keep_change(sum,
                clipped == nullptr ? 0.0 : add_blocks(clipped, range.first_block, range.blocks),
                o.segments.flat<OuterSegment>() + k, o.factors.flat<OuterFactor>() + k);
  }
}

}  // namespace sotto::scalar
