// A stack of its own and a way to switch to it and back (Boost.Context), known to the sanitizers:
// to TSan every fiber is a thread, and a switch orders nothing.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_THREAD__) || defined(SIMT_THREAD_SANITIZER)
#define SIMT_TSAN 1
extern "C" {
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);  // flags 1: no happens-before
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#endif

namespace simt {

// Edges of happens-before that CUDA's model has; everything else is for TSan to find.
inline void release_edge([[maybe_unused]] void* at) {
#ifdef SIMT_TSAN
  __tsan_release(at);
#endif
}
inline void acquire_edge([[maybe_unused]] void* at) {
#ifdef SIMT_TSAN
  __tsan_acquire(at);
#endif
}

struct Stack {
  void* memory = nullptr;
  size_t bytes = 0;
  void* fiber = nullptr;  // ThreadSanitizer
  Stack* next = nullptr;
};

class Context {
 public:
  Context() = default;
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // This is what the calling OS thread runs; its stack is found at the first switch away from it.
  void adopt_thread();
  void take_stack();
  // The next switch to this context calls entry(), which must never return. `colour` bytes are left
  // free at the stack's top: page-aligned stacks would share one set of the first-level cache.
  void arm(void (*entry)(), size_t colour);
  // Runs on with the stack of `other`, which the caller is on and which is not switched to before
  // it is armed again. Not under ThreadSanitizer, to which both would be one thread.
  void take_stack_of(Context& other);
  // Returns when a fiber switches back. dies: none will.
  void switch_to(Context& other, bool dies);

 private:
  friend struct ContextEntry;
  void arrived();

  void* position_ = nullptr;
  void (*entry_)() = nullptr;
  Stack threads_own_;  // of an OS thread
  Stack* stack_ = &threads_own_;
  void* fake_stack_ = nullptr;  // AddressSanitizer
  Context* came_from_ = nullptr;
};

}  // namespace simt
