#include "tests/cuda/pinned_new.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <mutex>
#include <new>

// Of the fake runtime alone.
extern "C" __attribute__((weak)) bool fake_cuda_in_runtime();

namespace {

// Blocks of powers of two, each behind a head of 16 bytes that names its size.
class PinnedArena {
 public:
  void* take(size_t bytes) {
    const unsigned kind = std::max<unsigned>(5, std::bit_width(bytes + kHead - 1));
    for (;;) {
      if (void* memory = pop(kind)) return memory;
      // Without the lock: the runtime has locks of its own, under which it allocates and frees.
      const size_t chunk = std::max(size_t{1} << kind, kChunk);
      void* memory = nullptr;
      if (cudaHostAlloc(&memory, chunk, cudaHostAllocDefault) != cudaSuccess) return nullptr;
      if (!add(kind, static_cast<char*>(memory), chunk)) return nullptr;
    }
  }
  // False: none of ours.
  bool give(void* memory) {
    if (beyond(memory)) return false;
    std::lock_guard lock(mutex_);
    if (!in_a_chunk(memory)) return false;
    char* block = static_cast<char*>(memory) - kHead;
    const unsigned kind = *reinterpret_cast<unsigned*>(block);
    *reinterpret_cast<char**>(memory) = free_[kind];
    free_[kind] = block;
    return true;
  }
  bool holds(const void* memory) {
    if (beyond(memory)) return false;
    std::lock_guard lock(mutex_);
    return in_a_chunk(memory);
  }

 private:
  static constexpr size_t kHead = 16, kChunk = size_t{1} << 20, kMaxChunks = 4096;

  bool beyond(const void* memory) const {
    const auto at = reinterpret_cast<uintptr_t>(memory);
    return at < lowest_.load(std::memory_order_acquire) || at >= highest_.load();
  }
  bool in_a_chunk(const void* memory) const {
    const auto at = reinterpret_cast<uintptr_t>(memory);
    return std::any_of(chunk_.begin(), chunk_.begin() + chunks_,
                       [&](const Chunk& c) { return at >= c.begin && at < c.end; });
  }
  void* pop(unsigned kind) {
    std::lock_guard lock(mutex_);
    char* block = free_[kind];
    if (block == nullptr) return nullptr;
    free_[kind] = *reinterpret_cast<char**>(block + kHead);
    return block + kHead;
  }
  bool add(unsigned kind, char* memory, size_t bytes) {
    const auto begin = reinterpret_cast<uintptr_t>(memory);
    const size_t block = size_t{1} << kind;
    std::lock_guard lock(mutex_);
    if (chunks_ == kMaxChunks) return false;
    chunk_[chunks_++] = {begin, begin + bytes};
    for (size_t offset = 0; offset < bytes; offset += block) {
      char* at = memory + offset;
      *reinterpret_cast<unsigned*>(at) = kind;
      *reinterpret_cast<char**>(at + kHead) = free_[kind];
      free_[kind] = at;
    }
    highest_ = std::max(highest_.load(), begin + bytes);
    lowest_ = std::min(lowest_.load(), begin);
    return true;
  }

  struct Chunk {
    uintptr_t begin, end;
  };
  std::mutex mutex_;
  std::array<char*, 64> free_{};
  std::array<Chunk, kMaxChunks> chunk_{};
  size_t chunks_ = 0;
  std::atomic<uintptr_t> lowest_ = UINTPTR_MAX, highest_ = 0;
};

constinit PinnedArena g_arena;
thread_local bool t_pinned = false;  // what this thread allocates is pinned
thread_local bool t_inside = false;  // the runtime's own allocations are not

void* allocate(size_t bytes) {
  void* memory = nullptr;
  if (t_pinned && !t_inside && !(fake_cuda_in_runtime != nullptr && fake_cuda_in_runtime())) {
    t_inside = true;
    memory = g_arena.take(bytes);
    t_inside = false;
  }
  if (memory == nullptr) memory = std::malloc(std::max<size_t>(bytes, 1));
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void deallocate(void* memory) {
  if (!g_arena.give(memory)) std::free(memory);
}

}  // namespace

void* operator new(size_t bytes) { return allocate(bytes); }
void* operator new[](size_t bytes) { return allocate(bytes); }
void operator delete(void* memory) noexcept { deallocate(memory); }
void operator delete[](void* memory) noexcept { deallocate(memory); }
void operator delete(void* memory, size_t) noexcept { deallocate(memory); }
void operator delete[](void* memory, size_t) noexcept { deallocate(memory); }

namespace sotto::test {

void pin_what_this_thread_allocates() { t_pinned = true; }
bool is_pinned(const void* memory) { return g_arena.holds(memory); }

}  // namespace sotto::test
