#include "tests/perf/malloc_count.h"

#include <cerrno>
#include <cstddef>

#include <atomic>

namespace sotto::perf {
namespace {
std::atomic<uint64_t> calls{0};
}  // namespace

uint64_t allocations() { return calls.load(std::memory_order_relaxed); }

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
bool counts_allocations() { return false; }
#else
bool counts_allocations() { return true; }

namespace {
void count() { calls.fetch_add(1, std::memory_order_relaxed); }
}  // namespace
#endif

}  // namespace sotto::perf

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// The C library calls these of the program instead of its own, whose other names remain. free stays
// the C library's.
#define SOTTO_EXPORTED __attribute__((visibility("default")))
extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* memory, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);

SOTTO_EXPORTED void* malloc(size_t bytes) noexcept {
  sotto::perf::count();
  return __libc_malloc(bytes);
}
SOTTO_EXPORTED void* calloc(size_t count, size_t bytes) noexcept {
  sotto::perf::count();
  return __libc_calloc(count, bytes);
}
SOTTO_EXPORTED void* realloc(void* memory, size_t bytes) noexcept {
  sotto::perf::count();
  return __libc_realloc(memory, bytes);
}
SOTTO_EXPORTED void* aligned_alloc(size_t alignment, size_t bytes) noexcept {
  sotto::perf::count();
  return __libc_memalign(alignment, bytes);
}
SOTTO_EXPORTED int posix_memalign(void** out, size_t alignment, size_t bytes) noexcept {
  sotto::perf::count();
  void* const memory = __libc_memalign(alignment, bytes);
  if (memory == nullptr) return ENOMEM;
  *out = memory;
  return 0;
}
}
#endif
