#include "core/cpu/cpu_device.h"

#include <sys/mman.h>
#include <xmmintrin.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "core/base/clock.h"
#include "core/kernels/pieces.h"
#include "core/kernels/registry.h"

namespace sotto {
namespace {

constexpr uint64_t kHugePage = uint64_t{2} << 20;
constexpr uint64_t kSmallAlignment = 128;
// Sockets are served between kernels: 64 Ki elements are 30 to 100 us of one core.
constexpr uint64_t kSplitElements = 65536;
// Waking a thread costs a few microseconds; below this a share is not worth it.
constexpr uint64_t kMinShareElements = 2 * kNormBlock;

uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

// Huge pages from the system, zeroed by it, so that the thread that uses a page first touches it
// first.
void* map_large(uint64_t bytes) {
  const uint64_t size = round_up(bytes, kHugePage);
  void* raw =
      mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  char* begin = static_cast<char*>(raw);
  const uint64_t skip =
      round_up(reinterpret_cast<uintptr_t>(begin), kHugePage) - reinterpret_cast<uintptr_t>(begin);
  if (skip != 0) munmap(begin, skip);
  if (skip != kHugePage) munmap(begin + skip + size, kHugePage - skip);
  madvise(begin + skip, size, MADV_HUGEPAGE);  // advice: refusal changes speed only
  return begin + skip;
}

class BusyTime {
 public:
  explicit BusyTime(std::atomic<uint64_t>* total)
      : total_(total), start_(Clock::monotonic().now_ns()) {}
  ~BusyTime() {
    total_->fetch_add(static_cast<uint64_t>(Clock::monotonic().now_ns() - start_),
                      std::memory_order_relaxed);
  }
  BusyTime(const BusyTime&) = delete;
  BusyTime& operator=(const BusyTime&) = delete;

 private:
  std::atomic<uint64_t>* total_;
  int64_t start_;
};

// Kernels round to nearest, keep denormals and trap nothing, whatever the application has set for
// its threads (PyTorch: set_flush_denormal): the same bits on all ranks, and on every thread that
// may run them. Flags that they raise are not seen by the application.
class KernelArithmetic {
 public:
  KernelArithmetic() : callers_(_mm_getcsr()) { _mm_setcsr(kDefault); }
  ~KernelArithmetic() { _mm_setcsr(callers_); }
  KernelArithmetic(const KernelArithmetic&) = delete;
  KernelArithmetic& operator=(const KernelArithmetic&) = delete;

 private:
  static constexpr unsigned kDefault = 0x1f80;  // of every process: all exceptions are masked
  const unsigned callers_;
};

Status no_events() {
  return unsupported("the CPU device executes at once and has neither events nor streams");
}

}  // namespace

CpuDevice::CpuDevice(uint32_t threads, SimdLevel limit)
    : kernels_(&kernels_of(simd_level_in_use(limit))),
      threads_(std::max(threads, 1u)),
      pool_(threads_),
      shares_(threads_ > 1 ? threads_ : 0) {
  caps_.split_elements = kSplitElements * threads_;
}

Result<void*> CpuDevice::alloc(uint64_t bytes) {
  void* memory = nullptr;
  if (bytes >= kHugePage) {
    // Sizes near 2^64 would wrap around.
    if (bytes <= UINT64_MAX / 2) memory = map_large(bytes);
  } else {
    const uint64_t size = round_up(std::max<uint64_t>(bytes, 1), kSmallAlignment);
    memory = std::aligned_alloc(kSmallAlignment, size);
    if (memory != nullptr) std::memset(memory, 0, size);
  }
  if (memory == nullptr)
    return error(Code::kOutOfMemory, "no memory for {} bytes on the CPU", bytes);
  return memory;
}

void CpuDevice::free(void* memory, uint64_t bytes) {
  if (memory == nullptr) return;
  if (bytes >= kHugePage) {
    munmap(memory, round_up(bytes, kHugePage));
  } else {
    std::free(memory);
  }
}

Status CpuDevice::launch(uint32_t lane, const KernelCall& call, std::span<const DiscardedRange>) {
  const size_t id = static_cast<size_t>(call.id);
  if (lane >= caps_.lanes || id >= kernels_->size()) {
    return error(Code::kInternal, "kernel {} on lane {}: the CPU has {} kernels and {} lanes", id,
                 lane, kernels_->size(), caps_.lanes);
  }
  if (call.predicate != nullptr && *call.predicate != call.expect) return ok_status();
  const BusyTime busy(&busy_ns_);
  const KernelFunction kernel = (*kernels_)[id];
  if (threads_ > 1 && kernel_cuts(call.id) &&
      piece_elements(call.pieces) >= 2 * kMinShareElements) {
    run_shares(kernel, call);
  } else {
    const KernelArithmetic arithmetic;
    kernel(call);
  }
  return ok_status();
}

void CpuDevice::run_shares(KernelFunction kernel, const KernelCall& call) {
  struct Context {
    KernelFunction kernel;
    const KernelCall& call;
    std::vector<std::vector<Piece>>& shares;
    uint32_t count;
  };
  const uint64_t useful = piece_elements(call.pieces) / kMinShareElements;
  Context context{kernel, call, shares_,
                  static_cast<uint32_t>(std::min<uint64_t>(threads_, useful))};
  pool_.run(
      [](void* opaque, uint32_t index) {
        Context& c = *static_cast<Context*>(opaque);
        if (index >= c.count) return;
        std::vector<Piece>& pieces = c.shares[index];
        pieces.clear();
        share_of_pieces(c.call.pieces, index, c.count, &pieces);
        KernelCall part = c.call;
        part.pieces = pieces;
        const KernelArithmetic arithmetic;
        c.kernel(part);
      },
      &context);
}

Status CpuDevice::copy(uint32_t lane, void* dst, const void* src, uint64_t bytes,
                       const uint32_t* predicate, uint32_t expect) {
  if (lane >= caps_.lanes) {
    return error(Code::kInternal, "copy on lane {}: the CPU has {} lanes", lane, caps_.lanes);
  }
  if (predicate != nullptr && *predicate != expect) return ok_status();
  const BusyTime busy(&busy_ns_);
  if (bytes != 0) std::memcpy(dst, src, bytes);
  return ok_status();
}

Result<EventId> CpuDevice::record(uint32_t) { return no_events(); }
Status CpuDevice::wait(uint32_t, EventId) { return no_events(); }
Result<bool> CpuDevice::query(EventId) { return no_events(); }
void CpuDevice::release(EventId) {}
Result<EventId> CpuDevice::record_stream(void*) { return no_events(); }
Status CpuDevice::stream_after_event(void*, EventId) { return no_events(); }
Result<BlockId> CpuDevice::block_stream(void*) { return no_events(); }
void CpuDevice::unblock(BlockId) {}

Result<std::unique_ptr<Device>> make_cpu_device(unsigned threads, SimdLevel limit) {
  if (threads < 1 || threads > 4096) {
    return invalid_argument("CPU threads: {} given, 1 to 4096 allowed", threads);
  }
  return std::unique_ptr<Device>(std::make_unique<CpuDevice>(threads, limit));
}

}  // namespace sotto
