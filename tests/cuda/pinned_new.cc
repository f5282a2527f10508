#include "tests/cuda/pinned_new.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <string_view>
#include <utility>

// Of the fake runtime alone.
extern "C" __attribute__((weak)) bool fake_cuda_in_runtime();

namespace {

constexpr unsigned char kMark = 0xb5;

// What was written beside a block would be lost in the next one.
void check_marks(const void* marks, size_t n, const void* memory, size_t bytes, const char* side) {
  const auto* const at = static_cast<const unsigned char*>(marks);
  if (std::all_of(at, at + n, [](unsigned char c) { return c == kMark; })) return;
  std::fprintf(stderr, "pinned_new: something was written %s %zu bytes at %p\n", side, bytes,
               memory);
  std::abort();
}

// Blocks of powers of two, each behind a head that names its size, with marks on both sides of what
// was asked for.
class PinnedArena {
 public:
  void* take(size_t bytes) {
    const unsigned kind = std::bit_width(bytes + sizeof(Head) + kTail - 1);
    for (;;) {
      if (void* memory = pop(kind, bytes)) return memory;
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
    Head* const head = static_cast<Head*>(memory) - 1;
    check_marks(head->marks, sizeof head->marks, memory, head->bytes, "in front of");
    check_marks(static_cast<char*>(memory) + head->bytes, tail(*head), memory, head->bytes,
                "behind");
    *static_cast<Head**>(memory) = free_[head->kind];
    free_[head->kind] = head;
    return true;
  }
  bool holds(const void* memory) {
    if (beyond(memory)) return false;
    std::lock_guard lock(mutex_);
    return in_a_chunk(memory);
  }

 private:
  struct Head {
    size_t bytes;
    unsigned kind;
    unsigned char marks[20];
  };
  static_assert(sizeof(Head) == 32 && alignof(Head) <= 16);
  struct Chunk {
    uintptr_t begin, end;
  };
  static constexpr size_t kTail = 16, kMostTail = 256, kChunk = size_t{1} << 20, kMaxChunks = 4096;

  static size_t tail(const Head& head) {
    return std::min((size_t{1} << head.kind) - sizeof(Head) - head.bytes, kMostTail);
  }
  bool beyond(const void* memory) const {
    const auto at = reinterpret_cast<uintptr_t>(memory);
    return at < lowest_.load(std::memory_order_acquire) || at >= highest_.load();
  }
  bool in_a_chunk(const void* memory) const {
    const auto at = reinterpret_cast<uintptr_t>(memory);
    return std::any_of(chunk_.begin(), chunk_.begin() + chunks_,
                       [&](const Chunk& c) { return at >= c.begin && at < c.end; });
  }
  void* pop(unsigned kind, size_t bytes) {
    std::lock_guard lock(mutex_);
    Head* const head = free_[kind];
    if (head == nullptr) return nullptr;
    void* const memory = head + 1;
    free_[kind] = *static_cast<Head**>(memory);
    head->bytes = bytes;
    std::memset(head->marks, kMark, sizeof head->marks);
    std::memset(static_cast<char*>(memory) + bytes, kMark, tail(*head));
    return memory;
  }
  bool add(unsigned kind, char* memory, size_t bytes) {
    const auto begin = reinterpret_cast<uintptr_t>(memory);
    const size_t block = size_t{1} << kind;
    std::lock_guard lock(mutex_);
    if (chunks_ == kMaxChunks) return false;
    chunk_[chunks_++] = {begin, begin + bytes};
    for (size_t offset = 0; offset < bytes; offset += block) {
      Head* const head = new (memory + offset) Head;
      head->kind = kind;
      *reinterpret_cast<Head**>(head + 1) = free_[kind];
      free_[kind] = head;
    }
    highest_ = std::max(highest_.load(), begin + bytes);
    lowest_ = std::min(lowest_.load(), begin);
    return true;
  }

  std::mutex mutex_;
  std::array<Head*, 64> free_{};
  std::array<Chunk, kMaxChunks> chunk_{};
  size_t chunks_ = 0;
  std::atomic<uintptr_t> lowest_ = UINTPTR_MAX, highest_ = 0;
};

// Allocations of the runtime, one for each block, which ends where the allocation ends: tools that
// watch memory see what goes beyond. In front there are marks.
class PinnedBlocks {
 public:
  void* take(size_t bytes) {
    free_dead();
    void* base = nullptr;
    if (cudaHostAlloc(&base, kFront + bytes, cudaHostAllocDefault) != cudaSuccess) return nullptr;
    std::memset(base, kMark, kFront);
    void* const memory = static_cast<char*>(base) + kFront;
    std::lock_guard lock(mutex_);
    if (live_ == nullptr) live_ = new Blocks;
    (*live_)[memory] = bytes;
    any_ = true;
    return memory;
  }
  // False: none of ours.
  bool give(void* memory) {
    if (!any_) return false;
    Blocks::node_type node;  // freed without the lock, which comes back here
    std::lock_guard lock(mutex_);
    node = live_->extract(memory);
    if (node.empty()) return false;
    char* const base = static_cast<char*>(memory) - kFront;
    check_marks(base, kFront, memory, node.mapped(), "in front of");
    *reinterpret_cast<void**>(base) = dead_;
    dead_ = base;
    return true;
  }
  bool holds(const void* memory) {
    if (!any_) return false;
    std::lock_guard lock(mutex_);
    const auto next = live_->upper_bound(const_cast<void*>(memory));
    if (next == live_->begin()) return false;
    const auto& [begin, bytes] = *std::prev(next);
    return static_cast<const char*>(memory) < static_cast<const char*>(begin) + bytes;
  }

 private:
  using Blocks = std::map<void*, size_t>;
  static constexpr size_t kFront = 64;

  // Not where they are given back, which may be inside the runtime.
  void free_dead() {
    void* next = nullptr;
    {
      std::lock_guard lock(mutex_);
      next = std::exchange(dead_, nullptr);
    }
    while (next != nullptr) {
      void* const base = std::exchange(next, *static_cast<void**>(next));
      (void)cudaFreeHost(base);
    }
  }

  std::mutex mutex_;
  Blocks* live_ = nullptr;
  void* dead_ = nullptr;  // each names the next
  std::atomic<bool> any_ = false;
};

constinit PinnedArena g_arena;
constinit PinnedBlocks g_blocks;
std::atomic<bool> g_own = false;     // each allocation is one of the runtime's
thread_local bool t_pinned = false;  // what this thread allocates is pinned
thread_local bool t_inside = false;  // the runtime's own allocations are not

void* allocate(size_t bytes) {
  void* memory = nullptr;
  if (t_pinned && !t_inside && !(fake_cuda_in_runtime != nullptr && fake_cuda_in_runtime())) {
    t_inside = true;
    memory = g_own ? g_blocks.take(bytes) : g_arena.take(bytes);
    t_inside = false;
  }
  if (memory == nullptr) memory = std::malloc(std::max<size_t>(bytes, 1));
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void deallocate(void* memory) {
  if (!g_arena.give(memory) && !g_blocks.give(memory)) std::free(memory);
}

}  // namespace

void* operator new(size_t bytes) { return allocate(bytes); }
void* operator new[](size_t bytes) { return allocate(bytes); }
void operator delete(void* memory) noexcept { deallocate(memory); }
void operator delete[](void* memory) noexcept { deallocate(memory); }
void operator delete(void* memory, size_t) noexcept { deallocate(memory); }
void operator delete[](void* memory, size_t) noexcept { deallocate(memory); }

namespace sotto::test {

void pin_what_this_thread_allocates() {
  const char* const how = std::getenv("PINNED_ALLOCATIONS");
  g_own = how != nullptr && std::string_view(how) == "own";
  t_pinned = true;
}
bool is_pinned(const void* memory) { return g_arena.holds(memory) || g_blocks.holds(memory); }

}  // namespace sotto::test
