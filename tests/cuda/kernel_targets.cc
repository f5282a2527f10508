// The target of this program's kernel tests: a CUDA device. The tests are those of the CPU
// (tests/conformance/kernels_*_test.cc).
#include <thread>

#include "core/cpu/cpu_device.h"
#include "cuda/cuda_device.h"
#include "tests/cuda/pinned_new.h"
#include "tests/support/kernel_targets.h"

namespace sotto::test {
namespace {

// Pinned memory of the host; calls have executed when they return.
class SettledDevice final : public CpuDevice {
 public:
  explicit SettledDevice(std::shared_ptr<Device> cuda)
      : CpuDevice(1, SimdLevel::kScalar), cuda_(std::move(cuda)) {}

  Result<void*> alloc(uint64_t bytes) override { return cuda_->alloc_host(bytes); }
  void free(void* memory, uint64_t bytes) override { cuda_->free_host(memory, bytes); }
  Status launch(uint32_t lane, const KernelCall& call, std::span<const DiscardedRange>) override {
    SOTTO_TRY(pinned_operands(call));
    SOTTO_ASSIGN(const std::shared_ptr<const CallTables> tables, cuda_->prepare({&call, 1}));
    KernelCall prepared = call;
    prepared.tables = tables.get();
    SOTTO_TRY(cuda_->launch(lane, prepared, {}));
    return settle();
  }
  Status copy(uint32_t lane, void* dst, const void* src, uint64_t bytes, const uint32_t* predicate,
              uint32_t expect) override {
    SOTTO_TRY(cuda_->copy(lane, dst, src, bytes, predicate, expect));
    return settle();
  }

 private:
  Status settle() {
    SOTTO_ASSIGN(const EventId event, cuda_->record(0));
    Result<bool> done = false;
    while (done.ok() && !*done) {
      std::this_thread::yield();
      done = cuda_->query(event);
    }
    cuda_->release(event);
    return done.status();
  }

  std::shared_ptr<Device> cuda_;
};

}  // namespace

std::vector<KernelTarget> kernel_targets() {
  pin_what_this_thread_allocates();
  std::vector<KernelTarget> made;
  made.push_back(
      {"cuda", std::make_unique<SettledDevice>(make_cuda_device(0).take()), {0, kNormBlock}, {}});
  return made;
}

uint64_t kernel_layout_limit() { return 0; }

}  // namespace sotto::test
