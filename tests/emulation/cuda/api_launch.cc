// Kernels: launches, attributes, and what the host code that nvcc makes calls when it is loaded.
#include "tests/emulation/cuda/state.h"
#include "tests/emulation/cuda/sync_model.h"

using namespace sotto::fake_cuda;

namespace {

constexpr uint64_t kThreadsPerBlock = 1024;
constexpr size_t kSmemPerBlock = 48 * 1024, kSmemPerBlockOptin = 227 * 1024;

// Dynamic shared memory that a kernel was allowed beyond the default.
class SmemLimits {
 public:
  size_t of(const void* kernel) {
    Quiet quiet;
    std::lock_guard lock(mutex_);
    const auto it = limits_.find(kernel);
    return it == limits_.end() ? kSmemPerBlock : it->second;
  }
  void set(const void* kernel, size_t bytes) {
    Quiet quiet;
    std::lock_guard lock(mutex_);
    limits_[kernel] = std::max(bytes, kSmemPerBlock);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const void*, size_t> limits_;
};

SmemLimits& smem_limits() {
  static auto* const limits = new SmemLimits;
  return *limits;
}

uint64_t volume(const dim3& d) { return uint64_t{d.x} * d.y * d.z; }

Kernel kernel_of(const void* function, const char* call) {
  std::string name;
  const Kernel kernel = state().find_kernel(function, &name);
  if (kernel.binder == nullptr) {
    misuse(std::string(call) + ": no emulated kernel for " +
           (name.empty() ? "a function that nobody has registered" : name));
  }
  return kernel;
}

bool attributes_are_modelled(const cudaLaunchConfig_t& config) {
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& a = config.attrs[i];
    switch (a.id) {
      case cudaLaunchAttributeIgnore:
      case cudaLaunchAttributePriority: break;
      // Allowed to begin early; beginning after its predecessor is always correct.
      case cudaLaunchAttributeProgrammaticStreamSerialization: break;
      case cudaLaunchAttributeClusterDimension:
        if (a.val.clusterDim.x * a.val.clusterDim.y * a.val.clusterDim.z != 1) return false;
        break;
      default: return false;
    }
  }
  return true;
}

cudaError_t launch(const cudaLaunchConfig_t& config, const void* function, void** args,
                   const char* call) {
  const dim3& g = config.gridDim;
  const dim3& b = config.blockDim;
  if (volume(b) == 0 || volume(b) > kThreadsPerBlock || b.z > 64)
    return cudaErrorInvalidConfiguration;
  if (volume(g) == 0 || g.x > INT32_MAX || g.y > 65535 || g.z > 65535)
    return cudaErrorInvalidConfiguration;
  if (config.dynamicSmemBytes > smem_limits().of(function)) return cudaErrorInvalidValue;
  if (!attributes_are_modelled(config)) return cudaErrorNotSupported;
  const auto stream = state().stream(config.stream, call);
  if (stream->device() != current_device()) {
    misuse(std::string(call) + " on a stream of device " + std::to_string(stream->device()) +
           " while device " + std::to_string(current_device()) + " is current");
  }
  const Kernel kernel = kernel_of(function, call);
  if (state().load_kernel(current_device(), function)) state().wait_to_load(call);
  state().count_launch();
  state().submit(stream, kernel.binder(kernel.address, args, {g, b, config.dynamicSmemBytes}));
  return cudaSuccess;
}

struct CallConfiguration {
  dim3 grid, block;
  size_t smem;
  cudaStream_t stream;
};
thread_local std::vector<CallConfiguration> t_configurations;

}  // namespace

extern "C" {

void fake_cuda_register_kernel(const void* kernel, Binder binder) {
  state().register_kernel(kernel, {kernel, binder});
}

void fake_cuda_register_kernel_name(const char* mangled_name, const void* kernel, Binder binder) {
  state().register_name(mangled_name, {kernel, binder});
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                void** args) {
  FAKE_CUDA_BEGIN();
  return note(launch(*config, function, args, __func__));
}

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** args, size_t smem,
                             cudaStream_t stream) {
  FAKE_CUDA_BEGIN();
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = smem;
  config.stream = stream;
  return note(launch(config, function, args, __func__));
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  FAKE_CUDA_BEGIN();
  kernel_of(function, __func__);
  state().load_kernel(current_device(), function);
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    if (value < 0 || static_cast<size_t>(value) > kSmemPerBlockOptin)
      return note(cudaErrorInvalidValue);
    smem_limits().set(function, static_cast<size_t>(value));
  }
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  FAKE_CUDA_BEGIN();
  kernel_of(function, __func__);
  state().load_kernel(current_device(), function);
  *attributes = {};
  attributes->maxThreadsPerBlock = static_cast<int>(kThreadsPerBlock);
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  attributes->maxDynamicSharedSizeBytes = static_cast<int>(smem_limits().of(function));
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks,
                                                                   const void* function,
                                                                   int threads, size_t smem,
                                                                   unsigned) {
  FAKE_CUDA_BEGIN();
  kernel_of(function, __func__);
  if (threads <= 0 || threads > static_cast<int>(kThreadsPerBlock))
    return note(cudaErrorInvalidValue);
  *blocks = std::min(32, 2048 / ((threads + 31) / 32 * 32));
  if (smem > 0) *blocks = std::min(*blocks, static_cast<int>((228 * 1024) / (smem + 1024)));
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function,
                                                          int threads, size_t smem) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, smem, 0);
}

// ---- nvcc's host stubs (crt/host_runtime.h) ----

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 0; }

void __cudaRegisterFunction(void**, const char* stub, char*, const char* mangled, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  state().register_stub(stub, mangled);
}

// Device variables are the emulated kernels' own.
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* stub) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(stub));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** args, size_t smem,
                               cudaStream_t stream) {
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, args, smem, stream);
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t smem, cudaStream_t stream) {
  t_configurations.push_back({grid, block, smem, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* smem, void* stream) {
  if (t_configurations.empty()) return cudaErrorInvalidConfiguration;
  const CallConfiguration c = t_configurations.back();
  t_configurations.pop_back();
  *grid = c.grid;
  *block = c.block;
  *smem = c.smem;
  *static_cast<cudaStream_t*>(stream) = c.stream;
  return cudaSuccess;
}

}  // extern "C"
