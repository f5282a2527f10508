// Memory of objects that come and go all the time, operations for example: what is given back is
// used again, so that only the first ones allocate.
#pragma once

#include <cstddef>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <utility>

namespace sotto {

// Threads: any. Lives until the last of its objects is gone.
class ObjectPool : public std::enable_shared_from_this<ObjectPool> {
 public:
  // As std::make_shared.
  template <class T, class... Args>
  std::shared_ptr<T> make(Args&&... args) {
    return std::allocate_shared<T>(Allocator<T>{shared_from_this()}, std::forward<Args>(args)...);
  }

 private:
  template <class T>
  struct Allocator {
    using value_type = T;
    std::shared_ptr<ObjectPool> pool;

    explicit Allocator(std::shared_ptr<ObjectPool> p) : pool(std::move(p)) {}
    template <class U>
    Allocator(const Allocator<U>& other) : pool(other.pool) {}  // NOLINT: as allocators have to
    T* allocate(size_t n) { return static_cast<T*>(pool->allocate(n * sizeof(T), alignof(T))); }
    void deallocate(T* memory, size_t n) noexcept {
      pool->deallocate(memory, n * sizeof(T), alignof(T));
    }
    template <class U>
    bool operator==(const Allocator<U>& other) const {
      return pool == other.pool;
    }
  };

  void* allocate(size_t bytes, size_t align) {
    const std::lock_guard lock(mutex_);
    return memory_.allocate(bytes, align);
  }
  void deallocate(void* memory, size_t bytes, size_t align) noexcept {
    const std::lock_guard lock(mutex_);
    memory_.deallocate(memory, bytes, align);
  }

  std::mutex mutex_;
  std::pmr::unsynchronized_pool_resource memory_;
};

}  // namespace sotto
