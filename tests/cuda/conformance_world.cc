// The world "cuda" of the conformance tests: operations on a CUDA device, emulated where there is
// none.
#include <cuda_runtime_api.h>

#include "cuda/cuda_device.h"
#include "tests/cuda/pinned_new.h"
#include "tests/support/core_ranks.h"

namespace sotto::test {

void add_cuda_world(WorldOptions* world) {
  world->device = [](int32_t rank) -> std::shared_ptr<Device> {
    int devices = 1;
    (void)cudaGetDeviceCount(&devices);
    return make_cuda_device(rank % devices).take();
  };
  world->on_rank_thread = pin_what_this_thread_allocates;
}

}  // namespace sotto::test
