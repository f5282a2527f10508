#include "tests/emulation/cuda/state.h"

#include <signal.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <span>
#include <string_view>
#include <thread>
#include <utility>

#include "tests/emulation/cuda/capture.h"
#include "tests/emulation/cuda/contexts.h"
#include "tests/emulation/cuda/sync_model.h"

namespace sotto::fake_cuda {
namespace {

constexpr uint64_t kHandleStep = 16;  // apart from cudaStreamLegacy and cudaStreamPerThread

// Calls that make no context on the current device. cudaSetDevice makes one on the device it names.
constexpr std::string_view kNeedNoContext[] = {"cudaGetDeviceCount",
                                               "cudaSetDevice",
                                               "cudaGetDevice",
                                               "cudaDeviceGetAttribute",
                                               "cudaGetDeviceProperties",
                                               "cudaDeviceGetPCIBusId",
                                               "cudaDeviceCanAccessPeer",
                                               "cudaGetDriverEntryPointByVersion",
                                               "cuDevicePrimaryCtxGetState"};

// The driver's, which need a context that is bound to the thread.
constexpr std::string_view kOfDriver[] = {"cuStreamWaitValue32", "cuStreamWriteValue32"};

// Calls that may wait until the current device stands still.
constexpr std::string_view kMayWait[] = {"cudaMalloc",
                                         "cudaFree",
                                         "cudaMallocHost",
                                         "cudaHostAlloc",
                                         "cudaFreeHost",
                                         "cudaHostRegister",
                                         "cudaHostUnregister",
                                         "cudaStreamCreate",
                                         "cudaStreamCreateWithFlags",
                                         "cudaStreamCreateWithPriority",
                                         "cudaMemPoolCreate",
                                         "cudaMemPoolDestroy",
                                         "cudaMemPoolTrimTo",
                                         "cudaDeviceSynchronize"};

bool contains(std::span<const std::string_view> names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

thread_local int t_device = 0;
thread_local bool t_bound = false;  // a context to the thread
thread_local cudaError_t t_last_error = cudaSuccess;

int64_t environment(const char* name, int64_t fallback) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == '\0' ? fallback : std::atoll(text);
}

Options options_of_environment() {
  Options o;
  o.devices = static_cast<int>(environment("FAKE_CUDA_DEVICES", o.devices));
  o.memory_bytes = static_cast<uint64_t>(environment("FAKE_CUDA_MEMORY_MB", 4096)) << 20;
  o.max_delay_us = environment("FAKE_CUDA_MAX_DELAY_US", 0);
  o.seed = static_cast<uint64_t>(environment("FAKE_CUDA_SEED", 1));
  o.forbid_default_stream = environment("FAKE_CUDA_FORBID_DEFAULT_STREAM", 0) != 0;
  o.guard_host = environment("FAKE_CUDA_GUARD_HOST", 0) != 0;
  o.pageable_access = environment("FAKE_CUDA_PAGEABLE_ACCESS", 0) != 0;
  o.driver = environment("FAKE_CUDA_NO_DRIVER", 0) == 0;
  o.hardware_queues = static_cast<int>(environment("FAKE_CUDA_HARDWARE_QUEUES", 0));
  o.context_lock = environment("FAKE_CUDA_CONTEXT_LOCK", 0) != 0;
  return o;
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// A fault in guarded memory says what it met; sanitizers have reports of their own.
void on_fault(int signal, siginfo_t* info, void*) {
  const std::string text = state().memory.describe_unlocked(info->si_addr);
  if (text.find(" bytes") != std::string::npos)
    std::fprintf(stderr, "fake CUDA: access to %s\n", text.c_str());
  ::signal(signal, SIG_DFL);  // the access is repeated and ends the process
}

void report_faults() {
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, nullptr);
}
#else
void report_faults() {}
#endif

}  // namespace

State& state() {
  static State* const instance = new State;  // never destroyed: host stubs unregister late
  return *instance;
}

State::State() : options(options_of_environment()) {
  memory.guard_host(options.guard_host);
  memory.reach_host(options.pageable_access);
  const int64_t fail = environment("FAKE_CUDA_FAIL_CALL", -1);
  if (fail >= 0) call_fault_ = {static_cast<uint64_t>(fail), cudaErrorUnknown};
  report_faults();
}

int current_device() { return t_device; }
void set_current_device(int device) {
  t_device = device;
  t_bound = true;
}
bool context_is_bound() { return t_bound; }

cudaError_t note(cudaError_t error) {
  if (error != cudaSuccess) t_last_error = error;
  return error;
}

bool State::hits(Fault& fault, uint64_t number) {
  if (number != fault.at) return false;
  fault.at = UINT64_MAX;
  return true;
}

cudaError_t State::begin_call(const char* name, CallKind kind) {
  if (Stream::on_stream_thread())
    misuse(std::string(name) + " is called from a host function: CUDA forbids it");
  if (!options.driver) return cudaErrorInsufficientDriver;
  const cudaError_t counted = count_call(name, kind);
  if (counted == cudaSuccess && options.context_lock && !contains(kNeedNoContext, name)) {
    if (contains(kMayWait, name)) {
      contexts_of_devices().wait_locked(t_device, streams_of(t_device), name);
    } else {
      contexts_of_devices().pass(t_device);
    }
  }
  return counted;
}

cudaError_t State::count_call(const char* name, CallKind kind) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  ++calls_by_name_[name];
  const bool query = kind == CallKind::kQuery;
  Fault& fault = query ? query_fault_ : call_fault_;
  if (kind != CallKind::kUncounted && hits(fault, query ? queries_++ : calls_++)) {
    failed_call_ = name;
    return fault.error;
  }
  if (sticky_ != cudaSuccess) return sticky_;
  if (captures().forbid(name)) return cudaErrorStreamCaptureUnsupported;
  if (options.devices == 0) return cudaErrorNoDevice;
  if (!contains(kNeedNoContext, name) && !contains(kOfDriver, name)) {
    contexts_.insert(t_device);
    t_bound = true;
  }
  if (contains(kMayWait, name) && is_held_locked(t_device)) waits_behind_blocks_.emplace_back(name);
  return cudaSuccess;
}

void State::make_context(int device) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  contexts_.insert(device);
}

bool State::has_context(int device) const {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  return contexts_.contains(device);
}

void State::count_host_wait() {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  ++host_waits_;
}

cudaError_t State::execution_error() const {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  return sticky_;
}

void State::count_launch() {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  ++launches_;
}

void State::count_copy_to_host() {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  ++copies_to_host_;
}

bool State::begin_job(uint32_t stream, std::mt19937_64& random) {
  int64_t delay_us = 0;
  {
    Quiet quiet;
    std::unique_lock lock(mutex_);
    if (options.max_delay_us > 0)
      delay_us = static_cast<int64_t>(random() % static_cast<uint64_t>(options.max_delay_us + 1));
    if (stream == late_stream_ || late_stream_ == kAllStreams) delay_us += late_us_;
  }
  if (delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
  {
    Quiet quiet;
    std::unique_lock lock(mutex_);
    released_.wait(lock, [this] { return !held_; });
    if (hits(execution_fault_, executions_++)) {
      // The caller that learns of the error may take everything down: nothing executes after it.
      failing_ = true;
      stopped_.wait(lock, [this] { return executing_ == 0; });
      failing_ = false;
      sticky_ = execution_fault_.error;
      failed_call_ = "execution";
    }
    if (failing_ || sticky_ != cudaSuccess) return false;
    ++executing_;
  }
  memory.enter_job();
  return true;
}

void State::end_job() {
  memory.leave_job();
  Quiet quiet;
  std::lock_guard lock(mutex_);
  if (--executing_ == 0) stopped_.notify_all();
}

// ---- Handles ----

namespace {

template <class Handle>
uint64_t number(Handle handle) {
  return reinterpret_cast<uint64_t>(handle);
}

std::string unknown(const char* call, const char* what) {
  return std::string(call) + ": " + what + " that was never made or has been destroyed";
}

}  // namespace

Ref<Stream> State::new_stream(int device, unsigned flags, int priority) {
  uint64_t seed = 0;
  uint32_t stream = 0;
  std::shared_ptr<HardwareQueue> queue;
  {
    Quiet quiet;
    std::lock_guard lock(mutex_);
    seed = options.seed * 1009 + next_seed_++;
    stream = next_stream_++;
    queue = next_queue(device);
  }
  return make_ref<Stream>(stream, device, flags, priority, seed, std::move(queue));
}

std::shared_ptr<HardwareQueue> State::next_queue(int device) {
  if (options.hardware_queues == 0) return nullptr;
  DeviceQueues& queues = queues_[device];
  if (queues.all.empty()) {
    for (int i = 0; i < options.hardware_queues; ++i)
      queues.all.push_back(std::make_shared<HardwareQueue>());
  }
  return queues.all[queues.streams++ % queues.all.size()];
}

// Null: it has not been used yet.
Ref<Stream> State::default_stream() {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  const auto it = default_streams_.find(t_device);
  return it == default_streams_.end() ? Ref<Stream>() : it->second;
}

Ref<Stream> State::stream(cudaStream_t handle, const char* call) {
  if (handle == cudaStreamPerThread) {
    if (!options.per_thread_stream)
      misuse(std::string(call) + ": the fake has no per-thread default stream");
    thread_local std::map<int, Ref<Stream>> of_thread;
    Ref<Stream>& mine = of_thread[t_device];
    if (mine == nullptr) mine = new_stream(t_device, cudaStreamDefault, 0);
    return mine;
  }
  if (handle == nullptr || handle == cudaStreamLegacy) {
    if (options.forbid_default_stream)
      misuse(std::string(call) + ": the default stream is used, which this test forbids");
    Ref<Stream> found = default_stream();
    if (found == nullptr) {
      Ref<Stream> made = new_stream(t_device, cudaStreamDefault, 0);
      default_streams_made_.fetch_add(1, std::memory_order_release);
      {
        Quiet quiet;
        std::lock_guard lock(mutex_);
        default_streams_.try_emplace(t_device, std::move(made));
      }
      found = default_stream();
    }
    (void)default_streams_made_.load(std::memory_order_acquire);
    return found;
  }
  Quiet quiet;
  std::lock_guard lock(mutex_);
  const auto it = streams_.find(number(handle));
  if (it == streams_.end()) misuse(unknown(call, "a stream"));
  return it->second;
}

Ref<Event> State::event(cudaEvent_t handle, const char* call) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  const auto it = events_.find(number(handle));
  if (it == events_.end()) misuse(unknown(call, "an event"));
  return it->second;
}

cudaStream_t State::add_stream(Ref<Stream> stream) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  const uint64_t handle = next_handle_ += kHandleStep;
  streams_[handle] = std::move(stream);
  return reinterpret_cast<cudaStream_t>(handle);
}

cudaEvent_t State::add_event(Ref<Event> event) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  const uint64_t handle = next_handle_ += kHandleStep;
  events_[handle] = std::move(event);
  return reinterpret_cast<cudaEvent_t>(handle);
}

void State::remove_stream(cudaStream_t handle) {
  std::vector<Ref<Stream>> ended;  // joined without the lock
  Quiet quiet;
  std::lock_guard lock(mutex_);
  const auto it = streams_.find(number(handle));
  if (it == streams_.end()) misuse(unknown("cudaStreamDestroy", "a stream"));
  std::erase_if(dying_, [&](auto& stream) {
    if (stream->idle()) ended.push_back(std::move(stream));
    return stream == nullptr;
  });
  dying_.push_back(std::move(it->second));
  streams_.erase(it);
}

void State::remove_event(cudaEvent_t handle) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  if (events_.erase(number(handle)) == 0) misuse(unknown("cudaEventDestroy", "an event"));
}

std::vector<Ref<Stream>> State::streams_of(int device) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  std::vector<Ref<Stream>> found;
  for (const auto& [handle, stream] : streams_) {
    if (device < 0 || stream->device() == device) found.push_back(stream);
  }
  for (const auto& [index, stream] : default_streams_) {
    if (device < 0 || index == device) found.push_back(stream);
  }
  for (const auto& stream : dying_) {
    if (device < 0 || stream->device() == device) found.push_back(stream);
  }
  return found;
}

// ---- Pools ----

Pool State::pool(cudaMemPool_t handle, const char* call) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  const auto it = pools_.find(number(handle));
  if (it == pools_.end()) misuse(unknown(call, "a memory pool"));
  return it->second;
}

cudaMemPool_t State::add_pool(const Pool& pool) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  const uint64_t handle = next_handle_ += kHandleStep;
  pools_[handle] = pool;
  return reinterpret_cast<cudaMemPool_t>(handle);
}

void State::set_pool(cudaMemPool_t handle, const Pool& pool) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  pools_[number(handle)] = pool;
}

void State::remove_pool(cudaMemPool_t handle) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  const auto it = pools_.find(number(handle));
  if (it == pools_.end()) misuse(unknown("cudaMemPoolDestroy", "a memory pool"));
  if (it->second.is_default) misuse("cudaMemPoolDestroy of a device's default pool");
  pools_.erase(it);
}

cudaMemPool_t State::default_pool(int device) {
  {
    Quiet quiet;
    std::lock_guard lock(mutex_);
    const auto it = default_pool_.find(device);
    if (it != default_pool_.end()) return reinterpret_cast<cudaMemPool_t>(it->second);
  }
  const cudaMemPool_t made = add_pool({device, true, 0, {}});
  Quiet quiet;
  std::lock_guard lock(mutex_);
  const auto [it, fresh] = default_pool_.try_emplace(device, number(made));
  if (!fresh) pools_.erase(number(made));
  return reinterpret_cast<cudaMemPool_t>(it->second);
}

void State::set_device_pool(int device, cudaMemPool_t handle) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  device_pool_[device] = number(handle);
}

cudaMemPool_t State::device_pool(int device) {
  {
    Quiet quiet;
    std::lock_guard lock(mutex_);
    const auto it = device_pool_.find(device);
    if (it != device_pool_.end()) return reinterpret_cast<cudaMemPool_t>(it->second);
  }
  return default_pool(device);
}

// ---- Held streams ----

uint64_t State::add_hold(int device, uint32_t* word, std::function<bool(uint32_t)> reached) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  holds_[++next_hold_] = {device, word, std::move(reached)};
  return next_hold_;
}

void State::queue_end_of_holds(const uint32_t* word, uint32_t value) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  for (auto& [number, hold] : holds_) hold.ends |= hold.word == word && hold.reached(value);
}

void State::remove_hold(uint64_t hold) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  holds_.erase(hold);
}

bool State::is_held(int device) const {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  return is_held_locked(device);
}

bool State::is_held_locked(int device) const {
  return std::ranges::any_of(holds_, [device](const auto& entry) {
    const Hold& hold = entry.second;
    return hold.device == device && !hold.ends &&
           !hold.reached(std::atomic_ref(*hold.word).load(std::memory_order_acquire));
  });
}

// ---- Order with the default stream ----

void State::order_with_default_stream(const Ref<Stream>& stream) {
  if ((stream->flags() & cudaStreamNonBlocking) != 0) return;
  Ref<Stream> legacy;
  {
    Quiet quiet;
    std::lock_guard lock(mutex_);
    const auto it = default_streams_.find(stream->device());
    if (it == default_streams_.end()) return;
    legacy = it->second;
  }
  if (legacy != stream) {
    stream->wait_for(legacy->mark());
    return;
  }
  for (const auto& other : streams_of(stream->device())) {
    if (other != stream && (other->flags() & cudaStreamNonBlocking) == 0)
      stream->wait_for(other->mark());
  }
}

void State::submit(const Ref<Stream>& stream, Job job) {
  if (captures().keep(stream->number(), job)) return;
  order_with_default_stream(stream);
  stream->push(std::move(job));
}

// ---- Events ----

void State::record(Event& event, Ref<Marker> marker) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  event.last = std::move(marker);
}

Ref<Marker> State::last_record(const Event& event) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  return event.last;
}

bool State::wait_is_dropped(const Wait& wait) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  const bool dropped = wait_to_drop_ == wait;
  waits_made_.push_back(wait);
  waits_dropped_ += dropped ? 1 : 0;
  return dropped;
}

// ---- Kernels ----

void State::register_kernel(const void* address, Kernel kernel) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  kernels_[address] = kernel;
}

void State::register_name(const std::string& mangled, Kernel kernel) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  kernels_by_name_[mangled] = kernel;
}

void State::register_stub(const void* stub, const std::string& mangled) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  stubs_[stub] = mangled;
}

Kernel State::find_kernel(const void* function, std::string* name) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  if (const auto it = kernels_.find(function); it != kernels_.end()) return it->second;
  const auto stub = stubs_.find(function);
  if (stub == stubs_.end()) return {};
  *name = stub->second;
  const auto it = kernels_by_name_.find(stub->second);
  return it == kernels_by_name_.end() ? Kernel{} : it->second;
}

bool State::load_kernel(int device, const void* function) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  return loaded_.emplace(device, function).second;
}

void State::wait_to_load(const char* call) {
  const std::string what = std::string(call) + " of a kernel that is not loaded";
  if (options.context_lock)
    return contexts_of_devices().wait_locked(t_device, streams_of(t_device), what);
  if (!is_held(t_device)) return;
  misuse(what + ", while a stream of device " + std::to_string(t_device) +
         " waits for a word in memory: loading may wait until the device stands still");
}

}  // namespace sotto::fake_cuda

// ---- The last error: no call of the model, cannot fail ----

extern "C" {
cudaError_t cudaGetLastError() {
  using namespace sotto::fake_cuda;
  return std::exchange(t_last_error, cudaSuccess);
}
cudaError_t cudaPeekAtLastError() { return sotto::fake_cuda::t_last_error; }
}
