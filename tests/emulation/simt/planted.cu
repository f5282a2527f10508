#include "tests/emulation/simt/planted.h"

namespace sotto::test {
namespace {

__device__ inline uint32_t global_thread() { return blockIdx.x * blockDim.x + threadIdx.x; }

// Every block reverses its part of a list through shared memory.
template <bool kBarrier>
__global__ void reverse(const PlantedArgs a) {
  __shared__ uint32_t values[1024];
  values[threadIdx.x] = global_thread();
  if constexpr (kBarrier) __syncthreads();
  a.out[global_thread()] = values[blockDim.x - 1 - threadIdx.x];
}

// Within a warp, by __syncwarp.
template <bool kBarrier>
__global__ void neighbours(const PlantedArgs a) {
  __shared__ uint32_t values[1024];
  values[threadIdx.x] = threadIdx.x;
  if constexpr (kBarrier) __syncwarp();
  a.out[global_thread()] = values[threadIdx.x ^ 1];
}

__global__ void uninitialised(const PlantedArgs a) {
  __shared__ uint32_t values[32];
  a.out[global_thread()] = values[threadIdx.x];
  values[threadIdx.x] = 7;
}

__global__ void divergent_barrier(const PlantedArgs a) {
  if (threadIdx.x < 40) {
    __syncthreads();
  } else {
    __shfl_xor_sync(0xffffffffu, 1.0f, 1);
  }
  a.out[global_thread()] = 1;
}

__global__ void different_barriers(const PlantedArgs a) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  a.out[global_thread()] = 1;
}

__global__ void foreign_mask(const PlantedArgs a) {
  if ((threadIdx.x & 1) != 0) a.out[global_thread()] = __ballot_sync(0x55555555u, 1);
}

__global__ void different_masks(const PlantedArgs a) {
  const uint32_t mask = threadIdx.x % 32 < 16 ? 0xffffffffu : 0xfffffff0u;
  a.out[global_thread()] = __ballot_sync(mask, 1);
}

__global__ void different_collectives(const PlantedArgs a) {
  a.out[global_thread()] =
      (threadIdx.x & 1) != 0 ? __ballot_sync(0xffffffffu, 1) : __shfl_xor_sync(0xffffffffu, 3u, 1);
}

__global__ void odd_width(const PlantedArgs a) {
  a.out[global_thread()] = __shfl_xor_sync(0xffffffffu, 3u, 1, 12);
}

// Lanes of the upper half are not in the mask.
__global__ void read_outside_mask(const PlantedArgs a) {
  if (threadIdx.x < 16) a.out[threadIdx.x] = __shfl_sync(0xffffu, threadIdx.x, threadIdx.x + 16);
}

// One element too many.
__global__ void out_of_bounds(const PlantedArgs a) {
  if (global_thread() <= a.n) a.out[global_thread()] = 1;
}

__global__ void beyond_dynamic_shared(const PlantedArgs a) {
  SIMT_DYNAMIC_SHARED(uint32_t, values);
  values[threadIdx.x] = threadIdx.x;
  a.out[threadIdx.x] = values[threadIdx.x];
}

__global__ void misaligned(const PlantedArgs a) {
  const float4 x = *reinterpret_cast<const float4*>(a.in + 1);
  a.out[global_thread()] = static_cast<uint32_t>(x.x);
}

// The last to come stays.
__global__ void last_block(const PlantedArgs a) {
  if (threadIdx.x == 0) a.out[0] = blockIdx.x;
}
__global__ void last_thread(const PlantedArgs a) { a.out[0] = threadIdx.x; }

// Blocks add to one word without an atomic.
template <bool kAtomic>
__global__ void count_blocks(const PlantedArgs a) {
  if constexpr (kAtomic) {
    atomicAdd(a.out, 1u);
  } else {
    ++*a.out;
  }
}

// Half of the threads end; barriers and ballots are for the others.
__global__ void half_ends(const PlantedArgs a) {
  if (threadIdx.x >= blockDim.x / 2) return;
  __syncthreads();
  a.out[threadIdx.x] = static_cast<uint32_t>(__syncthreads_count((threadIdx.x & 1) != 0));
}

// Where a thread is, for three dimensions.
__global__ void positions(const PlantedArgs a) {
  const uint32_t block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const uint32_t thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  atomicAdd(a.out + block * (blockDim.x * blockDim.y * blockDim.z) + thread, 1 + thread);
}

// out: 12 words per thread.
__global__ void collectives(const PlantedArgs a) {
  const uint32_t t = threadIdx.x, all = 0xffffffffu;
  uint32_t* out = a.out + 12 * global_thread();
  out[0] = __ballot_sync(all, t % 3 == 0);
  out[1] = static_cast<uint32_t>(__any_sync(all, t == 5));
  out[2] = static_cast<uint32_t>(__all_sync(all, t < 64));
  out[3] = __shfl_sync(all, t, 3, 8);
  out[4] = __shfl_xor_sync(all, t, 5);
  out[5] = __shfl_up_sync(all, t, 2, 16);
  out[6] = __shfl_down_sync(all, t, 3);
  out[7] = static_cast<uint32_t>(__shfl_xor_sync(all, 1e300 + t, 1) == 1e300 + (t ^ 1));
  out[8] = static_cast<uint32_t>(__syncthreads_count(t % 4 == 0));
  out[9] = static_cast<uint32_t>(__syncthreads_and(t < 1000));
  out[10] = static_cast<uint32_t>(__syncthreads_or(t == 77));
  out[11] = static_cast<uint32_t>(__popc(__brev(t)) + __ffs(static_cast<int>(t)));
}

// Half of a warp first has a collective of its own, while the others wait for all.
__global__ void branches(const PlantedArgs a) {
  uint32_t votes = 0;
  if (threadIdx.x % 32 >= 16) votes = __ballot_sync(0xffff0000u, threadIdx.x % 2);
  a.out[threadIdx.x] = votes | __ballot_sync(0xffffffffu, threadIdx.x % 4 == 0);
}

struct Entry {
  std::string_view name;
  void (*kernel)(PlantedArgs);
};
constexpr Entry kKernels[] = {
    {"reverse", reverse<true>},
    {"reverse_without_barrier", reverse<false>},
    {"neighbours", neighbours<true>},
    {"neighbours_without_barrier", neighbours<false>},
    {"uninitialised", uninitialised},
    {"divergent_barrier", divergent_barrier},
    {"different_barriers", different_barriers},
    {"foreign_mask", foreign_mask},
    {"different_masks", different_masks},
    {"different_collectives", different_collectives},
    {"odd_width", odd_width},
    {"read_outside_mask", read_outside_mask},
    {"out_of_bounds", out_of_bounds},
    {"beyond_dynamic_shared", beyond_dynamic_shared},
    {"misaligned", misaligned},
    {"last_block", last_block},
    {"last_thread", last_thread},
    {"count_blocks", count_blocks<true>},
    {"count_blocks_without_atomic", count_blocks<false>},
    {"half_ends", half_ends},
    {"positions", positions},
    {"branches", branches},
    {"collectives", collectives},
};

}  // namespace

cudaError_t launch_planted(std::string_view name, dim3 grid, dim3 block, size_t dynamic_shared,
                           const PlantedArgs& args) {
  for (const Entry& entry : kKernels) {
    if (entry.name != name) continue;
    simt::register_kernel(entry.kernel);
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = dynamic_shared;
    PlantedArgs copy = args;
    void* arguments[] = {&copy};
    return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(entry.kernel), arguments);
  }
  return cudaErrorInvalidValue;
}

}  // namespace sotto::test
