#include "tests/support/simt/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <boost/context/detail/fcontext.hpp>
#include <cstdlib>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
extern "C" {
void __sanitizer_start_switch_fiber(void** fake_stack_save, const void* bottom, size_t size);
void __sanitizer_finish_switch_fiber(void* fake_stack_save, const void** bottom_old,
                                     size_t* size_old);
void __asan_unpoison_memory_region(void const volatile* addr, size_t size);
}
#endif

namespace simt {
namespace {

namespace context = boost::context::detail;

size_t page_bytes() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

}  // namespace

// Where a new context starts.
struct ContextEntry {
  static void run(context::transfer_t from) {
    Context& self = *static_cast<Context*>(from.data);
    self.came_from_->position_ = from.fctx;
    self.arrived();
    self.entry_();
    std::abort();
  }
};

Context::~Context() {
#ifdef SIMT_TSAN
  if (owns_stack_ && fiber_ != nullptr) __tsan_destroy_fiber(fiber_);
#endif
  if (owns_stack_) {
#if defined(__SANITIZE_ADDRESS__)
    // What ended in the middle of a call left it poisoned, and the next mapping may lie here.
    __asan_unpoison_memory_region(stack_, stack_bytes_);
#endif
    munmap(static_cast<char*>(stack_) - page_bytes(), stack_bytes_ + page_bytes());
  }
}

void Context::adopt_thread() {
#ifdef SIMT_TSAN
  fiber_ = __tsan_get_current_fiber();
#endif
}

void Context::make_stack(size_t bytes) {
  void* memory = mmap(nullptr, bytes + page_bytes(), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, page_bytes(), PROT_NONE) != 0)
    throw std::bad_alloc();
  stack_ = static_cast<char*>(memory) + page_bytes();
  stack_bytes_ = bytes;
  owns_stack_ = true;
#ifdef SIMT_TSAN
  fiber_ = __tsan_create_fiber(0);
#endif
}

void Context::arm(void (*entry)(), size_t colour) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(stack_, stack_bytes_);
  fake_stack_ = nullptr;
#endif
  entry_ = entry;
  position_ = context::make_fcontext(static_cast<char*>(stack_) + stack_bytes_ - colour,
                                     stack_bytes_ - colour, &ContextEntry::run);
}

void Context::switch_to(Context& other, [[maybe_unused]] bool dies) {
  other.came_from_ = this;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(dies ? nullptr : &fake_stack_, other.stack_, other.stack_bytes_);
#endif
#ifdef SIMT_TSAN
  __tsan_switch_to_fiber(other.fiber_, 1);
#endif
  const context::transfer_t back = context::jump_fcontext(other.position_, &other);
  came_from_->position_ = back.fctx;
  arrived();
}

// The stack that was left is the one of the thread if it was not made here.
void Context::arrived() {
#if defined(__SANITIZE_ADDRESS__)
  const void* bottom = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(fake_stack_, &bottom, &bytes);
  if (!came_from_->owns_stack_) {
    came_from_->stack_ = const_cast<void*>(bottom);
    came_from_->stack_bytes_ = bytes;
  }
#endif
}

}  // namespace simt
