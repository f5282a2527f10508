// Everything the fake runtime knows, and the gate that every call passes.
//
// Threads: any.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tests/emulation/cuda/fake_cuda.h"
#include "tests/emulation/cuda/kernel_registry.h"
#include "tests/emulation/cuda/memory.h"
#include "tests/emulation/cuda/stream.h"

namespace sotto::fake_cuda {

struct Event {
  int device = 0;
  unsigned flags = 0;
  Ref<Marker> last;  // the latest record; null: never recorded
};

struct Pool {
  int device = 0;
  bool is_default = false;
  uint64_t release_threshold = 0;
  std::set<int> peers;  // that may use what it hands out
};

struct Kernel {
  const void* address = nullptr;  // what the binder is called with
  Binder binder = nullptr;
};

// How a call counts, and what is left of it when it is made to fail.
enum class CallKind : uint8_t { kOrdinary, kQuery, kUncounted };

class State {
 public:
  State();

  // Every call begins here. Not cudaSuccess: the call is to return it.
  cudaError_t begin_call(const char* name, CallKind kind = CallKind::kOrdinary);
  void count_host_wait();
  void make_context(int device);
  bool has_context(int device) const;
  // What an execution that failed has left; cudaSuccess: nothing.
  cudaError_t execution_error() const;

  // Around a job of a stream. begin_job: false if it is not to run.
  bool begin_job(uint32_t stream, std::mt19937_64& random);
  void end_job();

  // Handles. Unknown ones end the process.
  Ref<Stream> stream(cudaStream_t handle, const char* call);
  Ref<Event> event(cudaEvent_t handle, const char* call);
  Pool pool(cudaMemPool_t handle, const char* call);
  cudaStream_t add_stream(Ref<Stream> stream);
  cudaEvent_t add_event(Ref<Event> event);
  cudaMemPool_t add_pool(const Pool& pool);
  cudaMemPool_t default_pool(int device);
  void set_pool(cudaMemPool_t handle, const Pool& pool);
  void set_device_pool(int device, cudaMemPool_t handle);
  cudaMemPool_t device_pool(int device);
  // The thread goes on until its queue is empty.
  void remove_stream(cudaStream_t handle);
  void remove_event(cudaEvent_t handle);
  void remove_pool(cudaMemPool_t handle);
  std::vector<Ref<Stream>> streams_of(int device);  // -1: of all; destroyed ones too
  Ref<Stream> default_stream();
  Ref<Stream> new_stream(int device, unsigned flags, int priority);

  // Queues work on a stream, in the order that the legacy default stream asks for.
  void submit(const Ref<Stream>& stream, Job job);
  void order_with_default_stream(const Ref<Stream>& stream);

  // Kernels.
  void register_kernel(const void* address, Kernel kernel);
  void register_name(const std::string& mangled, Kernel kernel);
  void register_stub(const void* stub, const std::string& mangled);
  Kernel find_kernel(const void* function, std::string* name);  // binder null: none
  bool load_kernel(int device, const void* function);           // false: it was loaded already
  // What loading may do: waits for the current device; ends the process if that may be for ever.
  void wait_to_load(const char* call);

  // Streams that wait for a word in memory; `reached` says whether a value lets them go on.
  uint64_t add_hold(int device, uint32_t* word, std::function<bool(uint32_t)> reached);
  void remove_hold(uint64_t hold);
  // A stream will write the word: holds that this ends need no more of the host.
  void queue_end_of_holds(const uint32_t* word, uint32_t value);
  bool is_held(int device) const;  // whether one is blocked

  // Record, under the lock that waits use.
  void record(Event& event, Ref<Marker> marker);
  Ref<Marker> last_record(const Event& event);
  bool wait_is_dropped(const Wait& wait);

  Memory memory;
  Options options;

  // What fake_cuda.h hands out.
  friend void configure(const Options&);
  friend void fail_call(uint64_t, cudaError_t);
  friend void fail_query(uint64_t, cudaError_t);
  friend void fail_execution(uint64_t, cudaError_t);
  friend void drop_wait(const Wait&);
  friend void make_late(uint32_t, int64_t);
  friend std::vector<Wait> waits_made();
  friend uint64_t waits_dropped();
  friend std::string failed_call();
  friend void clear_faults();
  friend uint64_t calls();
  friend uint64_t calls(const std::string&);
  friend uint64_t queries();
  friend uint64_t waits();
  friend uint64_t executions();
  friend uint64_t host_waits();
  friend uint64_t launches();
  friend uint64_t copies_to_host();
  friend std::set<int> contexts();
  friend std::vector<std::string> waits_behind_blocks();
  friend Live live();
  friend void hold();
  friend void resume();

  void count_launch();
  void count_copy_to_host();

 private:
  struct Fault {
    uint64_t at = UINT64_MAX;  // number of the call that fails
    cudaError_t error = cudaSuccess;
  };
  struct DeviceQueues {
    std::vector<std::shared_ptr<HardwareQueue>> all;
    uint64_t streams = 0;  // that were made
  };
  cudaError_t count_call(const char* name, CallKind kind);
  std::shared_ptr<HardwareQueue> next_queue(int device);  // with mutex_ locked
  bool hits(Fault& fault, uint64_t number);               // once
  bool is_held_locked(int device) const;

  mutable std::mutex mutex_;
  std::map<uint64_t, Ref<Stream>> streams_;
  std::map<uint64_t, Ref<Event>> events_;
  std::map<uint64_t, Pool> pools_;
  std::map<int, uint64_t> device_pool_, default_pool_;
  std::map<int, Ref<Stream>> default_streams_;
  // Counted before a stream is in the map: who finds it there comes behind its making, and behind
  // nothing else of the thread that made it.
  std::atomic<uint32_t> default_streams_made_{0};
  std::vector<Ref<Stream>> dying_;  // destroyed, perhaps with work left
  std::map<int, DeviceQueues> queues_;
  uint64_t next_handle_ = 0x1000;  // never used twice
  uint64_t next_seed_ = 0;
  std::unordered_map<const void*, Kernel> kernels_;
  std::unordered_map<std::string, Kernel> kernels_by_name_;
  std::unordered_map<const void*, std::string> stubs_;

  Fault call_fault_, query_fault_, execution_fault_;
  std::optional<Wait> wait_to_drop_;
  uint32_t late_stream_ = 0;
  int64_t late_us_ = 0;
  std::vector<Wait> waits_made_;
  uint64_t waits_dropped_ = 0;
  uint32_t next_stream_ = 0;
  std::string failed_call_;
  cudaError_t sticky_ = cudaSuccess;
  uint64_t calls_ = 0, queries_ = 0, executions_ = 0, host_waits_ = 0, launches_ = 0;
  uint64_t copies_to_host_ = 0;
  std::map<std::string, uint64_t> calls_by_name_;
  std::set<int> contexts_;
  std::set<std::pair<int, const void*>> loaded_;  // device, kernel
  struct Hold {
    int device;
    uint32_t* word;
    std::function<bool(uint32_t)> reached;
    bool ends = false;  // the device ends it
  };
  std::map<uint64_t, Hold> holds_;
  uint64_t next_hold_ = 0;
  std::vector<std::string> waits_behind_blocks_;
  bool held_ = false;
  std::condition_variable released_;
  uint64_t executing_ = 0;  // jobs
  bool failing_ = false;    // one has failed, and others have not ended
  std::condition_variable stopped_;
};

State& state();

// The device that is current on this thread.
int current_device();
void set_current_device(int device);
// A context was bound to this thread, by cudaSetDevice or a call that needs one.
bool context_is_bound();
// Remembers the error for cudaGetLastError and returns it.
cudaError_t note(cudaError_t error);
#define FAKE_CUDA_BEGIN()                                         \
  do {                                                            \
    const cudaError_t begin_error = state().begin_call(__func__); \
    if (begin_error != cudaSuccess) return note(begin_error);     \
  } while (0)

}  // namespace sotto::fake_cuda
