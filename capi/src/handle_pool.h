// Handles that can be checked: a process-wide pool of slots that are never freed, so that a stale
// or foreign handle is recognised instead of followed.
//
// The child of a fork() can use no handle of its parent: that is found without a lock, since a
// thread that the child does not have may hold it.
//
// A handle is the address of a 64-byte aligned slot plus the slot's generation modulo 64 in the low
// bits. Free slots are reused first in, first out. A stale handle is thus mistaken for a live one
// only after its slot has been reused a multiple of 64 times, which takes at least 64 *
// kSlotsPerSlab insertions.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <new>
#include <string_view>
#include <utility>

#include "capi/src/guard.h"
#include "core/base/status.h"

namespace sotto::capi {

// T: default-constructible, copyable; a default-constructed T holds no resources (a shared_ptr).
// Threads: any.
template <class T>
class HandlePool {
 public:
  static constexpr size_t kSlotsPerSlab = 256;
  static constexpr size_t kMaxSlabs = 4096;

  // For messages. what: the noun ("operation"); gone: what has become of a stale one ("released").
  HandlePool(std::string_view what, std::string_view gone) : what_(what), gone_(gone) {}
  HandlePool(const HandlePool&) = delete;
  HandlePool& operator=(const HandlePool&) = delete;
  // Slabs stay for the life of the process: pools are static and never destroyed.
  ~HandlePool() = delete;

  // OUT_OF_MEMORY when kMaxSlabs are in use; throws bad_alloc like any allocation.
  Result<void*> insert(T value) {
    SOTTO_ASSIGN(Slot * slot, pop_free());
    std::lock_guard lock(slot->mutex);
    slot->fork_generation.store(fork_generation(), std::memory_order_relaxed);
    slot->live = true;
    slot->value = std::move(value);
    return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(slot) |
                                   (slot->generation & kTagMask));
  }

  // A copy of what the handle stands for. INVALID_ARGUMENT: NULL, never a handle, or stale.
  // INVALID_STATE: made before a fork.
  Result<T> get(const void* handle) const {
    SOTTO_ASSIGN(Slot * slot, find(handle));
    std::lock_guard lock(slot->mutex);
    SOTTO_TRY(check_live(*slot, handle));
    return T(slot->value);
  }

  // Gives a live handle another value.
  Status replace(const void* handle, T value) {
    SOTTO_ASSIGN(Slot * slot, find(handle));
    std::lock_guard lock(slot->mutex);
    SOTTO_TRY(check_live(*slot, handle));
    std::swap(slot->value, value);
    return ok_status();
  }

  // Makes the handle invalid and gives back what it stood for.
  Result<T> remove(const void* handle) {
    SOTTO_ASSIGN(Slot * slot, find(handle));
    T value;
    {
      std::lock_guard lock(slot->mutex);
      SOTTO_TRY(check_live(*slot, handle));
      value = std::exchange(slot->value, T{});
      slot->live = false;
      ++slot->generation;
    }
    push_free(slot);
    return value;
  }

 private:
  static constexpr uintptr_t kTagMask = 63;

  struct alignas(64) Slot {
    std::mutex mutex;
    std::atomic<uint32_t> fork_generation{0};
    uint32_t generation = 0;
    bool live = false;
    T value{};
    Slot* next_free = nullptr;  // guarded by free_mutex_
  };
  using Slab = std::array<Slot, kSlotsPerSlab>;

  Result<Slot*> pop_free() {
    std::lock_guard lock(free_mutex_);
    if (free_head_ == nullptr) SOTTO_TRY(grow());
    Slot* slot = free_head_;
    free_head_ = slot->next_free;
    if (free_head_ == nullptr) free_tail_ = nullptr;
    slot->next_free = nullptr;
    return slot;
  }

  void push_free(Slot* slot) {
    std::lock_guard lock(free_mutex_);
    (free_tail_ != nullptr ? free_tail_->next_free : free_head_) = slot;
    free_tail_ = slot;
  }

  // Needs free_mutex_.
  Status grow() {
    const size_t n = n_slabs_.load(std::memory_order_relaxed);
    if (n == kMaxSlabs) {
      return error(Code::kOutOfMemory, "{} {} handles are in use; release those that are done",
                   kMaxSlabs * kSlotsPerSlab, what_);
    }
    Slab* slab = new Slab;
    for (size_t i = 0; i + 1 < slab->size(); ++i) (*slab)[i].next_free = &(*slab)[i + 1];
    free_head_ = &slab->front();
    free_tail_ = &slab->back();
    slabs_[n].store(slab, std::memory_order_relaxed);
    n_slabs_.store(n + 1, std::memory_order_release);
    return ok_status();
  }

  Result<Slot*> find(const void* handle) const {
    if (handle == nullptr) return invalid_argument("{} is NULL", what_);
    const uintptr_t address = reinterpret_cast<uintptr_t>(handle) & ~kTagMask;
    const size_t n = n_slabs_.load(std::memory_order_acquire);
    for (size_t i = 0; i < n; ++i) {
      Slab* slab = slabs_[i].load(std::memory_order_relaxed);
      const uintptr_t begin = reinterpret_cast<uintptr_t>(slab->data());
      if (address < begin || address >= begin + sizeof(Slab)) continue;
      if ((address - begin) % sizeof(Slot) != 0) break;
      Slot* slot = &(*slab)[(address - begin) / sizeof(Slot)];
      SOTTO_TRY(check_not_forked(slot->fork_generation.load(std::memory_order_relaxed)));
      return slot;
    }
    return invalid_argument("{} {} is not a handle that this library has given out", what_, handle);
  }

  Status check_live(const Slot& slot, const void* handle) const {
    if (slot.live &&
        (slot.generation & kTagMask) == (reinterpret_cast<uintptr_t>(handle) & kTagMask)) {
      return ok_status();
    }
    return invalid_argument("{} {} has been {} before", what_, handle, gone_);
  }

  const std::string_view what_;
  const std::string_view gone_;
  std::array<std::atomic<Slab*>, kMaxSlabs> slabs_{};
  std::atomic<size_t> n_slabs_{0};
  std::mutex free_mutex_;
  Slot* free_head_ = nullptr;
  Slot* free_tail_ = nullptr;
};

}  // namespace sotto::capi
