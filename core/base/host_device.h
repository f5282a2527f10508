// Functions that the host and CUDA devices share: arithmetic is written once, so that all devices
// give the same bits.
#pragma once

#if defined(__CUDACC__)
#define SOTTO_HOST_DEVICE __host__ __device__
#else
#define SOTTO_HOST_DEVICE
#endif
