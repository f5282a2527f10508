// Handles that can be checked: a process-wide pool of slots that are never freed, so that a stale
// or foreign handle is recognised instead of followed.
//
// The child of a fork() can use no handle of its parent: that is found without a lock, since a
// thread that the child does not have may hold it.
//
// A handle is the address of a 64-byte aligned slot plus the slot's generation modulo 64 in the low
// bits. Free slots are reused first in, first out. A stale handle is thus mistaken for a live one
// only after its slot has been reused a multiple of 64 times, which takes at least 64 *
// kLeastSlots insertions.
//
// Looking a handle up takes no lock: it counts a use in the slot, and then sees whether the slot is
// live with that generation. What a handle stands for goes with the last use after its removal.
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

// T: default-constructible, movable; a default-constructed T holds no resources (a unique_ptr).
// Threads: any.
template <class T>
class HandlePool {
  struct Slot;

 public:
  static constexpr size_t kLeastSlots = 256;
  // Each slab doubles the slots that there are.
  static constexpr size_t kMaxSlabs = 13;
  static constexpr size_t kMaxSlots = kLeastSlots << (kMaxSlabs - 1);

  // What a handle stands for, as long as this lives.
  class Use {
   public:
    Use(Use&& other) noexcept : pool_(other.pool_), slot_(std::exchange(other.slot_, nullptr)) {}
    Use& operator=(Use&&) = delete;
    ~Use() {
      if (slot_ != nullptr) pool_->drop(slot_);
    }
    T& operator*() const { return slot_->value; }
    T* operator->() const { return &slot_->value; }

   private:
    friend class HandlePool;
    Use(HandlePool* pool, Slot* slot) : pool_(pool), slot_(slot) {}
    HandlePool* pool_;
    Slot* slot_;
  };

  // A slot that has no handle yet: given back unless something is put into it.
  class Place {
   public:
    Place(Place&& other) noexcept
        : pool_(other.pool_), slot_(std::exchange(other.slot_, nullptr)) {}
    Place& operator=(Place&&) = delete;
    ~Place() {
      if (slot_ != nullptr) pool_->push_free(slot_);
    }
    // The handle. Once only.
    void* put(T value) {
      Slot* const slot = std::exchange(slot_, nullptr);
      slot->value = std::move(value);
      slot->fork_generation.store(fork_generation(), std::memory_order_relaxed);
      const uint64_t word = slot->word.fetch_or(kLive, std::memory_order_release);
      return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(slot) | tag_of(word));
    }

   private:
    friend class HandlePool;
    Place(HandlePool* pool, Slot* slot) : pool_(pool), slot_(slot) {}
    HandlePool* pool_;
    Slot* slot_;
  };

  // For messages. what: the noun ("operation"); gone: what has become of a stale one ("released").
  HandlePool(std::string_view what, std::string_view gone) : what_(what), gone_(gone) {}
  HandlePool(const HandlePool&) = delete;
  HandlePool& operator=(const HandlePool&) = delete;
  // Slabs stay for the life of the process: pools are static and never destroyed.
  ~HandlePool() = delete;

  // OUT_OF_MEMORY when kMaxSlots are in use; throws bad_alloc like any allocation.
  Result<Place> reserve() {
    SOTTO_ASSIGN(Slot * slot, pop_free());
    return Place(this, slot);
  }
  Result<void*> insert(T value) {
    SOTTO_ASSIGN(Place place, reserve());
    return place.put(std::move(value));
  }

  // What the handle stands for. INVALID_ARGUMENT: NULL, never a handle, or stale. INVALID_STATE:
  // made before a fork.
  Result<Use> get(const void* handle) {
    SOTTO_ASSIGN(Slot * slot, find(handle));
    const uint64_t word = slot->word.fetch_add(1, std::memory_order_acquire);
    Use use(this, slot);
    if (!is_live(word, handle)) return stale(handle);
    return use;
  }

  // Makes the handle invalid and gives what it stood for, for the last time.
  Result<Use> remove(const void* handle) {
    SOTTO_ASSIGN(Use use, get(handle));
    uint64_t word = use.slot_->word.load(std::memory_order_relaxed);
    do {
      if (!is_live(word, handle)) return stale(handle);
    } while (!use.slot_->word.compare_exchange_weak(
        word, ((word & ~kLive) | kRemoved) + kGeneration, std::memory_order_acq_rel));
    return use;
  }

 private:
  static constexpr uintptr_t kTagMask = 63;
  // A slot's word: uses in flight (also of stale handles, which see that and go), then its state.
  static constexpr uint64_t kUses = 0xffffffff;
  static constexpr uint64_t kLive = uint64_t{1} << 32;     // a handle of this generation is valid
  static constexpr uint64_t kRemoved = uint64_t{1} << 33;  // the value goes with the last use
  static constexpr uint64_t kGeneration = uint64_t{1} << 34;

  struct alignas(64) Slot {
    std::atomic<uint64_t> word{0};
    std::atomic<uint32_t> fork_generation{0};
    T value{};
    Slot* next_free = nullptr;  // guarded by free_mutex_
  };

  static uintptr_t tag_of(uint64_t word) { return (word / kGeneration) & kTagMask; }
  static bool is_live(uint64_t word, const void* handle) {
    return (word & kLive) != 0 && tag_of(word) == (reinterpret_cast<uintptr_t>(handle) & kTagMask);
  }

  // Ends a use. A user that comes in between takes over what is left to do.
  void drop(Slot* slot) {
    uint64_t word = slot->word.fetch_sub(1, std::memory_order_release) - 1;
    if ((word & kRemoved) == 0 || (word & kUses) != 0 ||
        !slot->word.compare_exchange_strong(word, word & ~kRemoved, std::memory_order_acquire))
      return;
    const T value = std::exchange(slot->value, T{});
    push_free(slot);
  }

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

  static constexpr size_t slots_of(size_t slab) {
    return kLeastSlots << (slab == 0 ? 0 : slab - 1);
  }

  // Needs free_mutex_.
  Status grow() {
    const size_t n = n_slabs_.load(std::memory_order_relaxed);
    if (n == kMaxSlabs) {
      return error(Code::kOutOfMemory, "{} {} handles are in use; release those that are done",
                   kMaxSlots, what_);
    }
    Slot* const slab = new Slot[slots_of(n)];
    for (size_t i = 0; i + 1 < slots_of(n); ++i) slab[i].next_free = &slab[i + 1];
    free_head_ = slab;
    free_tail_ = &slab[slots_of(n) - 1];
    slabs_[n].store(slab, std::memory_order_relaxed);
    n_slabs_.store(n + 1, std::memory_order_release);
    return ok_status();
  }

  Result<Slot*> find(const void* handle) const {
    if (handle == nullptr) return invalid_argument("{} is NULL", what_);
    const uintptr_t address = reinterpret_cast<uintptr_t>(handle) & ~kTagMask;
    const size_t n = n_slabs_.load(std::memory_order_acquire);
    for (size_t i = 0; i < n; ++i) {
      Slot* const slab = slabs_[i].load(std::memory_order_relaxed);
      const uintptr_t offset = address - reinterpret_cast<uintptr_t>(slab);
      if (offset >= slots_of(i) * sizeof(Slot)) continue;
      if (offset % sizeof(Slot) != 0) break;
      Slot* const slot = slab + offset / sizeof(Slot);
      SOTTO_TRY(check_not_forked(slot->fork_generation.load(std::memory_order_relaxed)));
      return slot;
    }
    return invalid_argument("{} {} is not a handle that this library has given out", what_, handle);
  }

  Status stale(const void* handle) const {
    return invalid_argument("{} {} has been {} before", what_, handle, gone_);
  }

  const std::string_view what_;
  const std::string_view gone_;
  std::array<std::atomic<Slot*>, kMaxSlabs> slabs_{};
  std::atomic<size_t> n_slabs_{0};
  std::mutex free_mutex_;
  Slot* free_head_ = nullptr;
  Slot* free_tail_ = nullptr;
};

}  // namespace sotto::capi
