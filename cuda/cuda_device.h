// A CUDA device of this process behind core/iface/device.h.
//
//  - Lanes are non-blocking streams: 0 and 1 for kernels, 2 for copies to the device, 3 for copies
//    from it; then as many for background work, then those for messages over NCCL. What follows on
//    messages (1, 2, 3) has the higher priority.
//  - Memory comes from a stream-ordered pool (device_pool.h), host memory is pinned. Allocating
//    waits for its own stream alone. Nothing else here makes the host wait; steps allocate nothing.
//  - Tables of prepared kernels lie in one block of device memory per plan.
//  - The thread's current device is what it was before, after every call, unless that has no
//    context.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/iface/device.h"

namespace sotto {

// One text per device, "cuda:0 (NVIDIA H200, sm_90, 139 GiB)", or a single one that says why there
// is none: no driver, no device.
std::vector<std::string> cuda_device_texts();

// DEVICE: no driver, or no such device, with the reason.
Result<std::shared_ptr<Device>> make_cuda_device(int32_t index);

}  // namespace sotto
