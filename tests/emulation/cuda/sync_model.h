// What ThreadSanitizer is told. The fake's own locks must not order threads that a GPU would leave
// unordered: they would hide missing events. So they are ignored, and exactly the edges of the CUDA
// model are declared.
#pragma once

#if defined(__SANITIZE_THREAD__)
#define FAKE_CUDA_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define FAKE_CUDA_TSAN 1
#endif
#endif

#include <cstddef>

#ifdef FAKE_CUDA_TSAN
extern "C" {
void AnnotateIgnoreSyncBegin(const char* file, int line);
void AnnotateIgnoreSyncEnd(const char* file, int line);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
void __tsan_acquire(void* at);
void __tsan_release(void* at);
void __tsan_read_range(void* at, unsigned long bytes);
}
#endif

namespace sotto::fake_cuda {

// How many there are of this thread: it is in the runtime and may hold its locks.
inline thread_local int t_quiet = 0;

// While one exists, this thread's locks order nothing and its accesses race with nothing.
class Quiet {
 public:
  Quiet() {
    ++t_quiet;
#ifdef FAKE_CUDA_TSAN
    AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
#endif
  }
  ~Quiet() {
#ifdef FAKE_CUDA_TSAN
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
#endif
    --t_quiet;
  }
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;
};

// Everything before a release of `at` happens before what follows an acquire of it.
inline void acquire_edge([[maybe_unused]] void* at) {
#ifdef FAKE_CUDA_TSAN
  __tsan_acquire(at);
#endif
}
inline void release_edge([[maybe_unused]] void* at) {
#ifdef FAKE_CUDA_TSAN
  __tsan_release(at);
#endif
}
// This thread reads the range, though by means of which ThreadSanitizer is told nothing.
inline void read_range([[maybe_unused]] const void* at, [[maybe_unused]] size_t bytes) {
#ifdef FAKE_CUDA_TSAN
  __tsan_read_range(const_cast<void*>(at), bytes);
#endif
}

}  // namespace sotto::fake_cuda
