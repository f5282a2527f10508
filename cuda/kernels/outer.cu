#include "cuda/kernels/outer.cuh"

#include "cuda/kernels/families.h"

namespace sotto::cuda {

__global__ void __launch_bounds__(kWideThreads, 1)
    outer_sum(const __grid_constant__ Params params) {
  if (!params.holds()) return;
  const auto& o = params.of<kernels::OuterSum>();
  const double sum = sum_blocks(BlockTeam(), o.sums.flat<const float>(), 0,
                                params.arguments<OuterMessageArgs>().blocks);
  if (threadIdx.x == 0) *o.sum.flat<double>() = sum;
}

__global__ void __launch_bounds__(kWideThreads, 1)
    outer_tell(const __grid_constant__ Params params) {
  if (!params.holds()) return;
  const auto& o = params.of<kernels::OuterTell>();
  const double sum = sum_blocks(BlockTeam(), o.sums.flat<const float>(), 0,
                                params.arguments<OuterMessageArgs>().blocks);
  if (threadIdx.x != 0) return;
  const uint32_t flags = *o.flags.flat<const uint32_t>();
  const OuterMessage message = outer_message(*o.host.flat<const OuterMessage>(), sum,
                                             o.segments.flat<const OuterSegment>()->gap,
                                             o.inner_sum.flat<const double>(), flags);
  *o.message.flat<OuterMessage>() = message;
  *o.word.flat<uint32_t>() = message.weight == 0 ? kSkipNonfinite : kCommit;
}

// Every thread makes the numbers that segments share.
__global__ void __launch_bounds__(kWideThreads, 1)
    outer_factors(const __grid_constant__ Params params) {
  if (!params.holds()) return;
  const auto& o = params.of<kernels::OuterFactors>();
  const auto& a = params.arguments<OuterFactorsArgs>();
  const auto* messages = o.messages.flat<const OuterMessage>();
  OuterSegment* segments = o.segments.flat<OuterSegment>();
  const float last_alpha = segments[0].alpha;  // before the barriers in count_votes()
  const OuterVotes votes = count_votes(messages, a.world);
  const OuterInputs& inputs = *o.inputs.flat<const OuterInputs>();
  const OuterNumbers numbers = outer_numbers(a, inputs, votes.ranks, last_alpha);
  const uint32_t word = outer_word(a, votes);
  const OuterPenaltyArgs penalty = outer_penalty(a, votes);
  const double of_ranks =
      a.penalty.kind == OuterPenalty::kGapInner ? inner_unit(a, inputs, messages) : 0.0;
  visit_ranges(params.ranges, 0, a.n, [&](const auto& team, uint64_t k) {
    const NormRange& range = params.ranges[k];
    double unit = of_ranks;
    if (a.penalty.needs_norms()) {
      unit =
          float_root(sum_blocks(team, o.sums.flat<const float>(), range.first_block, range.blocks));
    }
    if (team.rank() != 0) return;
    OuterSegment segment = segments[k];
    o.factors.flat<OuterFactor>()[k] =
        outer_factor(penalty, numbers.gamma, messages, unit, range.count, &segment);
    if (k == 0) segment.alpha = numbers.alpha;
    segments[k] = word == kCommit ? segment : outer_unmoved(segments[k]);
  });
  if (threadIdx.x != 0) return;
  *o.numbers.flat<OuterNumbers>() = numbers;
  *o.word.flat<uint32_t>() = word;
}

__global__ void __launch_bounds__(kWideThreads, 1)
    outer_limit(const __grid_constant__ Params params) {
  if (!params.holds()) return;
  const auto& o = params.of<kernels::OuterLimit>();
  const auto& a = params.arguments<OuterLimitArgs>();
  const double sum = sum_blocks(BlockTeam(), o.m_sums.flat<const float>(), 0, a.blocks);
  if (threadIdx.x == 0) limit_momentum(a, sum, o.numbers.flat<OuterNumbers>());
}

__global__ void __launch_bounds__(kWideThreads, 1)
    outer_gap(const __grid_constant__ Params params) {
  if (!params.holds()) return;
  const auto& o = params.of<kernels::OuterGap>();
  const float* clipped = o.clipped.flat<const float>();
  visit_ranges(
      params.ranges, 0, params.arguments<OuterGapArgs>().n, [&](const auto& team, uint64_t k) {
        const NormRange& range = params.ranges[k];
        const double sum =
            sum_blocks(team, o.step_sums.flat<const float>(), range.first_block, range.blocks);
        double count = 0;
        if (clipped != nullptr) count = sum_blocks(team, clipped, range.first_block, range.blocks);
        if (team.rank() != 0) return;
        keep_change(sum, count, o.segments.flat<OuterSegment>() + k,
                    o.factors.flat<OuterFactor>() + k);
      });
}

namespace {

cudaError_t launch_step(cudaStream_t stream, const LaunchShape& shape, const Params& params) {
  switch (params.arguments<OuterStepArgs>().pass) {
    case OuterPass::kMomentum: return launch<run_quads<OuterMomentumKernel>>(shape, stream, params);
    case OuterPass::kMerge: return launch<run_quads<OuterMergeKernel>>(shape, stream, params);
    default: return launch<run_quads<OuterMoveKernel>>(shape, stream, params);
  }
}

}  // namespace

cudaError_t launch_outer(cudaStream_t stream, KernelId id, uint32_t blocks, const Params& params) {
  const LaunchShape shape{blocks, kThreads};
  const LaunchShape wide{1, kWideThreads};
  switch (id) {
    case KernelId::kOuterDelta: return launch<run_quads<OuterDeltaKernel>>(shape, stream, params);
    case KernelId::kOuterNorm: return launch<run_quads<OuterNormKernel>>(shape, stream, params);
    case KernelId::kOuterStep: return launch_step(stream, shape, params);
    case KernelId::kOuterSum: return launch<outer_sum>(wide, stream, params);
    case KernelId::kOuterTell: return launch<outer_tell>(wide, stream, params);
    case KernelId::kOuterFactors: return launch<outer_factors>(wide, stream, params);
    case KernelId::kOuterLimit: return launch<outer_limit>(wide, stream, params);
    case KernelId::kOuterGap: return launch<outer_gap>(wide, stream, params);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace sotto::cuda
