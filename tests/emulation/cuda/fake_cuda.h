// A CUDA runtime for tests on machines without a GPU: libcudart.so.13 with the entry points that
// this library uses. Streams are host threads, device memory is guarded host memory, kernels run
// in an emulator (kernel_registry.h). This header is what tests steer it with; the code under test
// sees <cuda_runtime_api.h> alone.
//
// What it does that a GPU would do silently or not at all:
//  - memory is filled with NaN, has guard pages and canaries, and faults after it was freed;
//  - streams lag behind by random times (seeded), so that a missing event wait shows;
//  - illegal use ends the process with a text: unknown or destroyed handles, double frees, copies
//    out of range or of the wrong kind, calls from a host function, work on a device's stream while
//    another device is current;
//  - a kernel that is launched before it was loaded, while a stream of the device waits for a word
//    in memory, ends the process: loading may wait until the device stands still;
//  - on demand streams share hardware queues, and calls that may wait for the device do so with the
//    context's lock;
//  - any call, kernel or wait can be made to fail;
//  - calls that CUDA calls unsafe fail while a stream is captured into a graph, and spoil it
//    (capture.h);
//  - under ThreadSanitizer only the edges of the CUDA model order threads, so that a kernel that
//    runs without having waited for its input is a reported race.
//
// Environment, read at the first call: FAKE_CUDA_DEVICES (2), FAKE_CUDA_MEMORY_MB (4096, of each
// device), FAKE_CUDA_MAX_DELAY_US (0), FAKE_CUDA_SEED (1), FAKE_CUDA_FORBID_DEFAULT_STREAM (0),
// FAKE_CUDA_GUARD_HOST (0), FAKE_CUDA_PAGEABLE_ACCESS (0), FAKE_CUDA_NO_DRIVER (0),
// FAKE_CUDA_HARDWARE_QUEUES (0), FAKE_CUDA_CONTEXT_LOCK (0), FAKE_CUDA_FAIL_CALL (none).
#pragma once

#include <cuda_runtime_api.h>

#include <compare>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace sotto::fake_cuda {

struct Options {
  int devices = 2;
  uint64_t memory_bytes = uint64_t{4} << 30;  // of each device
  int64_t max_delay_us = 0;  // before each kernel, copy, fill and host function of a stream
  uint64_t seed = 1;         // of the delays
  // Ends the process when the default stream is used.
  bool forbid_default_stream = false;
  // There is cudaStreamPerThread. Else its use ends the process.
  bool per_thread_stream = false;
  // Device memory is out of the host's reach while no stream works (and while one does, as luck has
  // it): host code that dereferences a device pointer faults. Costs some 10 us per job.
  bool guard_host = false;
  // Devices reach all memory of the host, in the order of their streams, as if all were pinned.
  bool pageable_access = false;
  // false: every call fails with cudaErrorInsufficientDriver.
  bool driver = true;
  // So many hardware queues of each device, which streams share in turn, as drivers have them
  // (CUDA_DEVICE_MAX_CONNECTIONS, 8 unless set): a wait at the head of one holds up the rest of it.
  // 0: every stream has its own.
  int hardware_queues = 0;
  // Calls that may wait for the device do, with a lock that all other calls take: first launches of
  // kernels (CUDA_MODULE_LOADING=LAZY), allocations, streams that are made, copies to pageable
  // memory. A wait of deadlock_ms ends the process with a text.
  bool context_lock = false;
  int64_t deadlock_ms = 20'000;
};

// Only while nothing is allocated or queued.
void configure(const Options& options);
const Options& options();

// ---- Faults. Numbers count from 0 at the call that sets them. ----

// The k-th call that can fail returns `error` and does nothing, except that free and destroy calls
// do their work. cudaEventQuery and cudaStreamQuery are not counted, since how often they are
// called depends on time, nor is cudaGetDevice, which comes with them; fail_query counts those two
// alone.
void fail_call(uint64_t k, cudaError_t error = cudaErrorUnknown);
void fail_query(uint64_t k, cudaError_t error = cudaErrorUnknown);
// The k-th kernel, copy, fill or host function that is to execute does not, and the runtime is in
// error from then on, as after an illegal address: every call returns `error`, nothing executes.
void fail_execution(uint64_t k, cudaError_t error = cudaErrorIllegalAddress);
// A cudaStreamWaitEvent, known by something else than its number, which depends on how fast streams
// are: which stream waits for which, and for which record of an event on that (from 0). Streams are
// numbered in the order of their creation since the last clear_faults or start.
struct Wait {
  uint32_t stream, awaited;
  uint64_t record;
  auto operator<=>(const Wait&) const = default;
  std::string text() const;  // "stream 9 for record 3 of stream 0"
};
// Each time that it is made it returns success and queues nothing.
void drop_wait(const Wait& wait);
// The stream of this number, or every one, is late by so much before each kernel, copy, fill and
// host function.
inline constexpr uint32_t kAllStreams = UINT32_MAX;
void make_late(uint32_t stream, int64_t us);
// The call that has failed, for example "cudaMallocAsync"; empty: none has.
std::string failed_call();
// No fault is waiting, and the runtime is not in error any more.
void clear_faults();

// ---- What has happened. ----

uint64_t calls();                         // counted calls since the last clear_faults or start
uint64_t calls(const std::string& name);  // of one function, since the start
uint64_t queries();
uint64_t waits();                   // cudaStreamWaitEvent, since the last clear_faults or start
std::vector<Wait> waits_made();     // those, in their order
uint64_t waits_dropped();           // since then
uint64_t records(uint32_t stream);  // of events on a stream that lives, since its creation
uint64_t executions();              // kernels, copies, fills, host functions, since then
// Calls that made the host wait for the device: synchronise, blocking copies, cudaFree.
uint64_t host_waits();
uint64_t launches();        // kernels, since the start
uint64_t copies_to_host();  // from device memory by the functions for copies, since the start
// Devices on which a context was made, since the last configure or start: by making the device
// current, and by every call that needs one while it is.
std::set<int> contexts();
// Calls that may wait until the device stands still, made while a stream of it waited for a word in
// memory (cuStreamWaitValue32), since the last clear_faults or start.
std::vector<std::string> waits_behind_blocks();

struct Live {
  uint64_t streams = 0, events = 0, pools = 0;
  uint64_t device_blocks = 0, device_bytes = 0;
  uint64_t pinned_blocks = 0, pinned_bytes = 0, registered_blocks = 0;
  bool operator==(const Live&) const = default;
  std::string text() const;  // "2 streams, 1 event, 300 bytes in 1 device block"
};
Live live();

// Waits until every stream is idle.
void drain();
// No stream executes anything between the two; what is queued stays queued.
void hold();
void resume();

}  // namespace sotto::fake_cuda

// Whether this thread is in a call of the runtime, which has locks of its own: what it allocates
// now must not be asked of the runtime.
extern "C" bool fake_cuda_in_runtime();

// For other fakes on this runtime: ends the process, naming `call`, unless the range lies in one
// block of live device or pinned memory, or in other memory of the host that devices reach. Also
// from a host function.
extern "C" void fake_cuda_check_reachable(const void* at, size_t bytes, const char* call);
