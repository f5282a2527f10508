// The target of this program's kernel tests: CUDA's kernels in the emulator. The tests are those of
// the CPU (tests/conformance/kernels_*_test.cc).
#include <cstdlib>
#include <cstring>
#include <new>

#include "core/cpu/cpu_device.h"
#include "cuda/kernels/prepare.h"
#include "tests/cuda/pinned_new.h"
#include "tests/emulation/simt/simt.h"
#include "tests/support/kernel_targets.h"

namespace sotto::test {
namespace {

// Memory of the host, kernels of CUDA, executed at once. What a real device could not reach is
// refused, but under sanitizers, which need the heap to be theirs.
class EmulatedDevice : public CpuDevice {
 public:
  EmulatedDevice() : CpuDevice(1, SimdLevel::kScalar) {}

  Status launch(uint32_t lane, const KernelCall& call, std::span<const DiscardedRange>) override {
    if (lane != 0) return error(Code::kInternal, "there is one lane");
    if (pinned_operands != nullptr) SOTTO_TRY(pinned_operands(call));
    Result<cuda::PreparedKernel> prepared = cuda::prepare(call);
    if (!prepared.ok()) return prepared.status();
    // At the end of its memory, so that reading on is found.
    const Tables tables(prepared->tables);
    cuda::Operands operands;
    for (size_t k = 0; k < call.operands.size(); ++k) operands.data[k] = call.operands[k].data;
    return checked(cuda::launch_prepared(nullptr, *prepared, tables.data(), operands,
                                         {call.predicate, call.expect, call.paired_ran}));
  }
  Status copy(uint32_t, void* dst, const void* src, uint64_t bytes, const uint32_t* predicate,
              uint32_t expect) override {
    return checked(cuda::launch_copy(nullptr, dst, src, bytes, {predicate, expect, false}));
  }

 private:
  class Tables {
   public:
    explicit Tables(const std::vector<std::byte>& bytes)
        : data_(bytes.empty() ? nullptr : std::aligned_alloc(cuda::kTableAlignment, bytes.size())) {
      if (data_ != nullptr) std::memcpy(data_, bytes.data(), bytes.size());
    }
    ~Tables() { std::free(data_); }
    Tables(const Tables&) = delete;
    Tables& operator=(const Tables&) = delete;
    const void* data() const { return data_; }

   private:
    void* data_;
  };

  static Status checked(cudaError_t result) {
    if (result == cudaSuccess) return ok_status();
    return error(Code::kInternal, "the launch returned {}", static_cast<int>(result));
  }
};

// Natural order and three random ones, in turn.
std::string next_order() {
  static uint32_t calls = 0;
  const uint32_t seed = calls++ % 4;
  simt::options().seed = seed;
  return seed == 0 ? "natural order" : "order of seed " + std::to_string(seed);
}

}  // namespace

std::vector<KernelTarget> kernel_targets() {
  if (pin_what_this_thread_allocates != nullptr) pin_what_this_thread_allocates();
#if defined(__SANITIZE_THREAD__)
  simt::options().workers = 2;  // blocks of different workers are not ordered
#endif
  std::vector<KernelTarget> made;
  made.push_back(
      {"cuda (emulated)", std::make_unique<EmulatedDevice>(), {0, kNormBlock}, next_order});
  return made;
}

uint64_t kernel_layout_limit() {
#if defined(__SANITIZE_THREAD__)
  return 1100;
#elif defined(__SANITIZE_ADDRESS__)
  return 9000;
#else
  return 0;
#endif
}

}  // namespace sotto::test
