#include "cuda/kernels/scalars.cuh"

#include "cuda/kernels/families.h"

namespace sotto::cuda {

__global__ void __launch_bounds__(kWideThreads, 1)
    norm_finish(const __grid_constant__ Params params) {
  if (!params.holds()) return;
  const auto& o = params.of<kernels::NormFinish>();
  const auto& a = params.arguments<NormArgs>();
  const float* sums = o.sums.flat<const float>();
  const uint64_t* counts = o.counts.flat<const uint64_t>();
  float* scales = o.scales.flat<float>();
  uint8_t* message = o.message.flat<uint8_t>();
  uint32_t* flags = o.flags.flat<uint32_t>();
  visit_ranges(params.ranges, 0, a.n, [&](const auto& team, uint64_t k) {
    const NormRange& range = params.ranges[k];
    const double sum = sum_blocks(team, sums, range.first_block, range.blocks);
    if (team.rank() != 0) return;
    uint32_t raised = 0;
    const float scale = guard_finite(norm_scale(a.scale, sum, counts[k]), &raised);
    scales[k] = scale;
    std::memcpy(message + 4 * k, &scale, 4);
    raise_on_device(flags, raised);
  });
  __syncthreads();
  if (threadIdx.x != 0) return;
  const uint32_t all = atomicOr(flags, 0u);
  std::memcpy(message + 4 * a.n, &all, 4);
}

__global__ void __launch_bounds__(kThreads) gate(const __grid_constant__ Params params) {
  if (!params.holds()) return;
  const auto& o = params.of<kernels::Gate>();
  const auto& a = params.arguments<GateArgs>();
  const uint8_t* messages = o.messages.flat<const uint8_t>();
  uint32_t flags = 0;
  for (uint64_t s = 0; s < (a.n_sections == 0 ? 1 : a.n_sections); ++s) {
    const uint64_t bytes = a.n_sections == 0 ? a.message_bytes : params.sections[s];
    for (uint32_t r = threadIdx.x; r < a.world; r += kThreads) {
      uint32_t word;
      std::memcpy(&word, messages + (r + 1) * bytes - 4, 4);
      flags |= word;
    }
    messages += a.world * bytes;
  }
  const bool any = __syncthreads_or(flags != 0) != 0;
  if (threadIdx.x != 0) return;
  const uint32_t* prior = o.prior.flat<const uint32_t>();
  const uint32_t before = prior != nullptr ? *prior : kCommit;
  *o.word.flat<uint32_t>() = before != kCommit ? before : any ? a.fail_word : kCommit;
}

__global__ void __launch_bounds__(kWideThreads, 1)
    norm_message(const __grid_constant__ Params params) {
  if (!params.holds()) return;
  const auto& o = params.of<kernels::NormMessage>();
  const double sum =
      sum_blocks(BlockTeam(), o.sums.flat<const float>(), 0, params.arguments<BlocksArgs>().blocks);
  if (threadIdx.x != 0) return;
  const uint32_t* flags = o.flags.flat<const uint32_t>();
  const NormMessage message = norm_message_of(sum, flags != nullptr ? *flags : 0);
  std::memcpy(o.message.data, &message, sizeof message);
}

__global__ void clip_coefficient(const __grid_constant__ Params params) {
  if (!params.holds()) return;
  const auto& o = params.of<kernels::ClipCoefficient>();
  const ClipResult result =
      clip_result(params.arguments<ClipArgs>(), o.messages.flat<const uint8_t>(),
                  o.unscale.flat<const double>(), o.prior.flat<const uint32_t>());
  *o.coefficient.flat<float>() = result.coefficient;
  *o.norm.flat<double>() = result.norm;
  *o.word.flat<uint32_t>() = result.word;
}

// The ranges of this thread block.
template <class Visit>
__device__ inline void visit_share(const Params& params, Visit&& visit) {
  const uint64_t begin = uint64_t{blockIdx.x} * kRangesPerBlock;
  const uint64_t n = params.arguments<TensorArgs>().n;
  const uint64_t end = begin + kRangesPerBlock;
  visit_ranges(params.ranges, begin, end < n ? end : n, visit);
}

__global__ void __launch_bounds__(kThreads) lamb_scalars(const __grid_constant__ Params params) {
  if (!params.holds()) return;
  const auto& o = params.of<kernels::LambScalars>();
  const bool average = params.arguments<TensorArgs>().average;
  const float* p_sums = o.p_sums.flat<const float>();
  const float* u_sums = o.u_sums.flat<const float>();
  visit_share(params, [&](const auto& team, uint64_t k) {
    const NormRange& range = params.ranges[k];
    const double p = sum_blocks(team, p_sums, range.first_block, range.blocks);
    const double u = sum_blocks(team, u_sums, range.first_block, range.blocks);
    if (team.rank() != 0) return;
    const LambGroupScalars& s = o.scalars.flat<const LambGroupScalars>()[range.group];
    TensorState* state = average ? o.states.flat<TensorState>() + range.tensor : nullptr;
    o.steps.flat<TensorStep>()[range.tensor] = lamb_step(s, p, u, average, state);
  });
}

__global__ void __launch_bounds__(kThreads)
    onebit_lamb_scalars(const __grid_constant__ Params params) {
  if (!params.holds()) return;
  const auto& o = params.of<kernels::OnebitLambScalars>();
  const float* u0_sums = o.u0_sums.flat<const float>();
  const float* u_sums = o.u_sums.flat<const float>();
  const float* maxima = o.maxima.flat<const float>();
  visit_share(params, [&](const auto& team, uint64_t k) {
    const NormRange& range = params.ranges[k];
    const double u0 = sum_blocks(team, u0_sums, range.first_block, range.blocks);
    const double u = sum_blocks(team, u_sums, range.first_block, range.blocks);
    const double maximum = max_blocks(team, maxima, range.first_block, range.blocks);
    if (team.rank() != 0) return;
    const OnebitLambGroupScalars& s = o.scalars.flat<const OnebitLambGroupScalars>()[range.group];
    TensorState* state = o.states.flat<TensorState>() + range.tensor;
    o.steps.flat<TensorStep>()[range.tensor] = onebit_lamb_step(s, u0, u, maximum, state);
  });
}

// The scale of a tensor is kept in scaling_coeff until all are known.
__global__ void __launch_bounds__(kWideThreads, 1)
    onebit_lamb_scaling(const __grid_constant__ Params params) {
  if (!params.holds()) return;
  const auto& o = params.of<kernels::OnebitLambScaling>();
  __shared__ double united;
  const auto& a = params.arguments<ScalingArgs>();
  const float* sums = o.sums.flat<const float>();
  const uint64_t* counts = o.counts.flat<const uint64_t>();
  TensorState* states = o.states.flat<TensorState>();
  visit_ranges(params.ranges, 0, a.n, [&](const auto& team, uint64_t k) {
    const NormRange& range = params.ranges[k];
    const double sum = sum_blocks(team, sums, range.first_block, range.blocks);
    if (team.rank() == 0) states[range.tensor].scaling_coeff = tensor_scale(sum, counts[k]);
  });
  __syncthreads();
  if (threadIdx.x == 0) {
    double total = 0;
    uint64_t tensors = 0;
    for (uint64_t k = 0; k < a.n; ++k) {
      const double scale = states[params.ranges[k].tensor].scaling_coeff;
      total += scale;
      tensors += scale != 0;
    }
    united = tensors != 0 ? total / static_cast<double>(tensors) : total;
  }
  __syncthreads();
  for (uint64_t k = threadIdx.x; k < a.n; k += kWideThreads) {
    TensorState* state = states + params.ranges[k].tensor;
    start_compressed(united, state->scaling_coeff, a.debias, state);
  }
}

__global__ void __launch_bounds__(kThreads) step_sizes(const __grid_constant__ Params params) {
  if (!params.holds()) return;
  const auto& o = params.of<kernels::StepSizes>();
  const GroupScalars* groups = o.scalars.flat<const GroupScalars>();
  const uint64_t k = uint64_t{blockIdx.x} * kRangesPerBlock + threadIdx.x;
  if (threadIdx.x >= kRangesPerBlock || k >= params.arguments<TensorArgs>().n) return;
  const NormRange& range = params.ranges[k];
  o.steps.flat<TensorStep>()[range.tensor] = plain_step(groups[range.group]);
}

// One run of at most kNormBlock elements per thread block.
__global__ void __launch_bounds__(kThreads) count_valid(const __grid_constant__ Params params) {
  if (!params.holds()) return;
  const auto& o = params.of<kernels::CountValid>();
  const Work work = params.work[blockIdx.x];
  const Run run = params.runs[work.first_run];
  const uint8_t* valid = o.valid.flat<const uint8_t>();
  const uint64_t flat = params.pieces[run.piece].flat + run.first;
  uint32_t count = 0;
  for (uint32_t at = threadIdx.x * kQuad; at < run.count; at += kThreads * kQuad) {
    const uint32_t n = run.count - at < kQuad ? run.count - at : kQuad;
    count += static_cast<uint32_t>(__popc(load_mask(valid, flat + at, n).word));
  }
  count = WarpTeam().combine(count, [](uint32_t a, uint32_t b) { return a + b; });
  auto* out = reinterpret_cast<unsigned long long*>(o.counts.flat<uint64_t>());
  if (threadIdx.x % kWarpThreads == 0) atomicAdd(out + work.block, count);
}

cudaError_t launch_scalars(cudaStream_t stream, KernelId id, uint32_t blocks,
                           const Params& params) {
  switch (id) {
    case KernelId::kNormFinish: return launch<norm_finish>({1, kWideThreads}, stream, params);
    case KernelId::kGate: return launch<gate>({1, kThreads}, stream, params);
    case KernelId::kNormMessage: return launch<norm_message>({1, kWideThreads}, stream, params);
    case KernelId::kClipCoefficient: return launch<clip_coefficient>({1, 1}, stream, params);
    case KernelId::kLambScalars: return launch<lamb_scalars>({blocks, kThreads}, stream, params);
    case KernelId::kOnebitLambScalars:
      return launch<onebit_lamb_scalars>({blocks, kThreads}, stream, params);
    case KernelId::kOnebitLambScaling:
      return launch<onebit_lamb_scaling>({1, kWideThreads}, stream, params);
    case KernelId::kStepSizes: return launch<step_sizes>({blocks, kThreads}, stream, params);
    case KernelId::kCountValid: return launch<count_valid>({blocks, kThreads}, stream, params);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace sotto::cuda
