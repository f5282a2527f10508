#include "tests/emulation/simt/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <boost/context/detail/fcontext.hpp>
#include <cstdlib>
#include <new>
#include <thread>
#include <utility>

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

constexpr size_t kStackBytes = 128 * 1024;  // sanitizers need more than the kernels do

// Below a stack lies a protected page. Under ThreadSanitizer there is none, and many
// are mapped at once: a process may have 65530 mappings, and fibers have five each there.
#ifdef SIMT_TSAN
constexpr size_t kGuards = 0, kAtOnce = 256;
#else
constexpr size_t kGuards = 1, kAtOnce = 1;
#endif

// Stacks that contexts have left behind, for those to come: ThreadSanitizer never gives back all
// that belongs to a fiber. Its lock is one that ThreadSanitizer does not see, since it must not
// order streams.
class Spares {
 public:
  Stack* take() {
    Stack* stack = take_if_any();
    for (; stack == nullptr; stack = take_if_any()) make();
#ifdef SIMT_TSAN
    if (stack->fiber == nullptr) stack->fiber = __tsan_create_fiber(0);
#endif
    return stack;
  }
  void put(Stack* stack) {
    const Lock lock(*this);
    stack->next = first_;
    first_ = stack;
  }

 private:
  Stack* take_if_any() {
    const Lock lock(*this);
    Stack* stack = first_;
    if (stack != nullptr) first_ = stack->next;
    return stack;
  }
  void make() {
    const size_t guard = kGuards * static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void* memory = mmap(nullptr, guard + kAtOnce * kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || (guard != 0 && mprotect(memory, guard, PROT_NONE) != 0))
      throw std::bad_alloc();
    for (size_t i = 0; i < kAtOnce; ++i)
      put(new Stack{static_cast<char*>(memory) + guard + i * kStackBytes, kStackBytes});
  }
  struct Lock {
    explicit Lock(Spares& s) : spares(s) {
      while (spares.taken_.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
    }
    ~Lock() { spares.taken_.clear(std::memory_order_release); }
    Spares& spares;
  };

  std::atomic_flag taken_;
  Stack* first_ = nullptr;
};

constinit Spares spares;

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
  if (stack_ != &threads_own_) spares.put(stack_);
}

void Context::adopt_thread() {
#ifdef SIMT_TSAN
  stack_->fiber = __tsan_get_current_fiber();
#endif
}

void Context::take_stack() { stack_ = spares.take(); }

void Context::take_stack_of(Context& other) {
  std::swap(stack_, other.stack_);
  std::swap(fake_stack_, other.fake_stack_);
}

void Context::arm(void (*entry)(), size_t colour) {
#if defined(__SANITIZE_ADDRESS__)
  // What ended in the middle of a call left it poisoned.
  __asan_unpoison_memory_region(stack_->memory, stack_->bytes);
  fake_stack_ = nullptr;
#endif
  entry_ = entry;
  position_ = context::make_fcontext(static_cast<char*>(stack_->memory) + stack_->bytes - colour,
                                     stack_->bytes - colour, &ContextEntry::run);
}

void Context::switch_to(Context& other, [[maybe_unused]] bool dies) {
  other.came_from_ = this;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(dies ? nullptr : &fake_stack_, other.stack_->memory,
                                 other.stack_->bytes);
#endif
#ifdef SIMT_TSAN
  __tsan_switch_to_fiber(other.stack_->fiber, 1);
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
  if (came_from_->stack_ == &came_from_->threads_own_) {
    came_from_->stack_->memory = const_cast<void*>(bottom);
    came_from_->stack_->bytes = bytes;
  }
#endif
}

}  // namespace simt
