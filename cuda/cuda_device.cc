#include "cuda/cuda_device.h"

#include <algorithm>
#include <chrono>

#include "core/base/log.h"
#include "core/kernels/registry.h"
#include "cuda/calls/blocked_streams.h"
#include "cuda/cuda_device_class.h"
#include "cuda/kernels/prepare.h"
#include "cuda/launch.h"

namespace sotto {
namespace {

constexpr uint64_t kAlignment = 256;  // of what the runtime allocates
constexpr uint32_t kEventsAtOnce = 128;
// How long an allocation waits for streams that are blocked: as operations do by default.
constexpr std::chrono::seconds kBlockPatience{300};
constexpr unsigned kStreamValueVersion = 12000;  // CUDA version of the entry point's signature

uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

// A failure to give something back has no remedy. At the end of the process the
// runtime may be gone before us.
void note(cudaError_t error, const char* call, int32_t device) {
  if (error == cudaErrorCudartUnloading) return;
  if (const Status status = cuda_status(error, call, device); !status.ok())
    log(LogLevel::kError, "{}", status.text());
}

}  // namespace

class CudaDevice::Tables final : public CallTables {
 public:
  explicit Tables(CudaDevice& device) : device_(device) {}
  ~Tables() override { device_.free(memory_, bytes_); }

  Status make(std::span<const KernelCall> calls);
  size_t size() const { return kernels_.size(); }
  const cuda::PreparedKernel& kernel(uint32_t call) const { return kernels_[call]; }
  const void* tables(uint32_t call) const {
    return offsets_[call] == kNone ? nullptr : static_cast<std::byte*>(memory_) + offsets_[call];
  }

 private:
  static constexpr uint64_t kNone = UINT64_MAX;

  CudaDevice& device_;
  void* memory_ = nullptr;
  uint64_t bytes_ = 0;
  std::vector<cuda::PreparedKernel> kernels_;
  std::vector<uint64_t> offsets_;  // of each kernel's tables; kNone: it has none
};

Status CudaDevice::Tables::make(std::span<const KernelCall> calls) {
  for (const KernelCall& call : calls) {
    SOTTO_ASSIGN(cuda::PreparedKernel kernel, cuda::prepare(call));
    offsets_.push_back(kernel.tables.empty() ? kNone : bytes_);
    bytes_ = round_up(bytes_ + kernel.tables.size(), cuda::kTableAlignment);
    kernels_.push_back(std::move(kernel));
  }
  if (bytes_ == 0) return ok_status();
  std::vector<std::byte> all(bytes_);
  for (size_t i = 0; i < kernels_.size(); ++i) {
    std::vector<std::byte>& tables = kernels_[i].tables;
    if (!tables.empty())
      std::copy(tables.begin(), tables.end(), all.begin() + static_cast<ptrdiff_t>(offsets_[i]));
    tables = {};
  }
  SOTTO_ASSIGN(memory_, device_.alloc(bytes_));
  return device_.upload(memory_, all.data(), bytes_);
}

Status CudaDevice::open() {
  const OnDevice current(index_);
  SOTTO_TRY(current.status());
  SOTTO_TRY(pool_.open());
  int least = 0, greatest = 0;
  SOTTO_TRY(check(cudaDeviceGetStreamPriorityRange(&least, &greatest),
                  "cudaDeviceGetStreamPriorityRange"));
  background_priority_ = least;
  message_priority_ = greatest;
  for (uint32_t i = 0; i < kLanes; ++i) {
    SOTTO_TRY(check(
        cudaStreamCreateWithPriority(&lanes_[i], cudaStreamNonBlocking, i == 0 ? least : greatest),
        "cudaStreamCreateWithPriority"));
  }
  SOTTO_TRY(check(cudaStreamCreateWithPriority(&memory_stream_, cudaStreamNonBlocking, least),
                  "cudaStreamCreateWithPriority"));
  SOTTO_TRY(open_blocks());
  return load_kernels();
}

Status CudaDevice::open_blocks() {
  StreamBlocks::StreamValue wait_value = nullptr, write_value = nullptr;
  for (const auto& [name, function] : {std::pair("cuStreamWaitValue32", &wait_value),
                                       std::pair("cuStreamWriteValue32", &write_value)}) {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    SOTTO_TRY(check(cudaGetDriverEntryPointByVersion(name, &entry, kStreamValueVersion,
                                                     cudaEnableDefault, &found),
                    "cudaGetDriverEntryPointByVersion"));
    if (found == cudaDriverEntryPointSuccess)
      *function = reinterpret_cast<StreamBlocks::StreamValue>(entry);
  }
  void* words = nullptr;
  if (wait_value != nullptr) {
    SOTTO_ASSIGN(words, alloc_host(StreamBlocks::kWords * sizeof(uint32_t)));
  }
  blocks_.open(wait_value, write_value, static_cast<uint32_t*>(words));
  return ok_status();
}

// CUDA loads a kernel when it is first launched, and may then wait until the device stands still,
// which it never does while a stream is blocked.
Status CudaDevice::load_kernels() const {
  for (const void* kernel : cuda::launched_kernels()) {
    cudaFuncAttributes attributes;
    SOTTO_TRY(check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes"));
  }
  return ok_status();
}

CudaDevice::~CudaDevice() {
  const OnDevice current(index_);
  for (cudaStream_t stream : lanes_) {
    if (stream != nullptr) note(cudaStreamDestroy(stream), "cudaStreamDestroy", index_);
  }
  for (cudaEvent_t event : events_) note(cudaEventDestroy(event), "cudaEventDestroy", index_);
  for (const auto& [memory, bytes] : host_sizes_)
    note(cudaFreeHost(memory), "cudaFreeHost", index_);
  if (memory_stream_ == nullptr) return;
  note(cudaStreamSynchronize(memory_stream_), "cudaStreamSynchronize", index_);
  note(cudaStreamDestroy(memory_stream_), "cudaStreamDestroy", index_);
}

// ---- Memory ----

Result<void*> CudaDevice::alloc(uint64_t bytes) {
  const OnDevice current(index_);
  SOTTO_TRY(current.status());
  const uint64_t size = round_up(std::max<uint64_t>(bytes, 1), kAlignment);
  if (size < bytes) return error(Code::kOutOfMemory, "no memory for {} bytes", bytes);
  void* memory = nullptr;
  const Status made =
      pool_.handle() != nullptr
          ? check(cudaMallocFromPoolAsync(&memory, size, pool_.handle(), memory_stream_),
                  "cudaMallocFromPoolAsync")
          : check(cudaMalloc(&memory, size), "cudaMalloc");
  if (!made.ok()) return made.with_prefix(fmt::format("{} bytes", size));
  if (Status zeroed = zero(memory, size); !zeroed.ok()) {
    free(memory, bytes);
    return zeroed;
  }
  return memory;
}

Status CudaDevice::zero(void* memory, uint64_t bytes) {
  SOTTO_TRY(check(cudaMemsetAsync(memory, 0, bytes, memory_stream_), "cudaMemsetAsync"));
  return check(cudaStreamSynchronize(memory_stream_), "cudaStreamSynchronize");
}

Status CudaDevice::upload(void* dst, const void* src, uint64_t bytes) {
  const OnDevice current(index_);
  SOTTO_TRY(current.status());
  SOTTO_TRY(check(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyHostToDevice, memory_stream_),
                  "cudaMemcpyAsync"));
  return check(cudaStreamSynchronize(memory_stream_), "cudaStreamSynchronize");
}

void CudaDevice::free(void* memory, uint64_t) {
  if (memory == nullptr) return;
  const OnDevice current(index_);
  if (pool_.handle() != nullptr) {
    note(cudaFreeAsync(memory, memory_stream_), "cudaFreeAsync", index_);
  } else {
    note(cudaFree(memory), "cudaFree", index_);
  }
}

Result<void*> CudaDevice::alloc_host(uint64_t bytes) {
  const uint64_t size = std::max<uint64_t>(bytes, 1);
  void* memory = take_host(size);
  if (memory == nullptr) {
    const OnDevice current(index_);
    SOTTO_TRY(current.status());
    // It may wait for the device, with locks that the end of a blocked stream needs.
    const NoneBlocked now(index_, kBlockPatience);
    if (!now.holds()) {
      return error(
          Code::kBusy,
          "{} bytes of pinned memory are needed, and a stream of cuda:{} has been blocked "
          "for an operation for {} s (SOTTO_STREAM_BLOCK=1): wait for that operation first",
          size, index_, kBlockPatience.count());
    }
    SOTTO_TRY(check(cudaHostAlloc(&memory, size, cudaHostAllocDefault), "cudaHostAlloc")
                  .with_prefix(fmt::format("{} bytes", size)));
    std::lock_guard lock(mutex_);
    host_sizes_[memory] = size;
  }
  std::fill_n(static_cast<std::byte*>(memory), size, std::byte{0});
  return memory;
}

// Of what has been given back: a block that is not much too large.
void* CudaDevice::take_host(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  const auto found = free_host_.lower_bound(bytes);
  if (found == free_host_.end() || found->first / 2 > bytes) return nullptr;
  void* const memory = found->second;
  free_host_.erase(found);
  return memory;
}

void CudaDevice::free_host(void* memory, uint64_t) {
  if (memory == nullptr) return;
  std::lock_guard lock(mutex_);
  free_host_.emplace(host_sizes_.at(memory), memory);
}

// ---- Queueing ----

Result<std::shared_ptr<const CallTables>> CudaDevice::prepare(std::span<const KernelCall> calls) {
  auto tables = std::make_shared<Tables>(*this);
  SOTTO_TRY(tables->make(calls));
  return std::shared_ptr<const CallTables>(std::move(tables));
}

Status CudaDevice::launch(uint32_t lane, const KernelCall& call, std::span<const DiscardedRange>) {
  SOTTO_ASSIGN(const cudaStream_t stream, stream_of(lane));
  return launch_on(stream, call);
}

// Streams share the few queues of the hardware: those for background work and for messages, which
// many programs have none of, are made when they are first used.
Result<cudaStream_t> CudaDevice::stream_of(uint32_t lane) {
  if (lane >= lanes_.size())
    return error(Code::kInternal, "lane {}: cuda:{} has {}", lane, index_, lanes_.size());
  if (lanes_[lane] != nullptr) return lanes_[lane];
  const OnDevice current(index_);
  SOTTO_TRY(current.status());
  const int priority = lane < caps_.first_message_lane() ? background_priority_ : message_priority_;
  SOTTO_TRY(check(cudaStreamCreateWithPriority(&lanes_[lane], cudaStreamNonBlocking, priority),
                  "cudaStreamCreateWithPriority"));
  return lanes_[lane];
}

Result<void*> CudaDevice::lane_stream(uint32_t lane) {
  SOTTO_ASSIGN(const cudaStream_t stream, stream_of(lane));
  return static_cast<void*>(stream);
}

Status CudaDevice::launch_on(cudaStream_t stream, const KernelCall& call) {
  const auto* tables = static_cast<const Tables*>(call.tables);
  if (tables == nullptr || call.call >= tables->size() ||
      call.operands.size() > cuda::kMaxOperands) {
    return error(Code::kInternal, "launch of {} on cuda:{}: not prepared", kernel_name(call.id),
                 index_);
  }
  cuda::Operands operands;
  for (size_t i = 0; i < call.operands.size(); ++i) operands.data[i] = call.operands[i].data;
  const cuda::Condition condition{call.predicate, call.expect, call.paired_ran};
  const OnDevice current(index_);
  SOTTO_TRY(current.status());
  const cudaError_t launched = cuda::launch_prepared(
      stream, tables->kernel(call.call), tables->tables(call.call), operands, condition);
  if (launched == cudaSuccess) return ok_status();
  return check(launched, fmt::format("cudaLaunchKernelExC of {}", kernel_name(call.id)));
}

Status CudaDevice::copy(uint32_t lane, void* dst, const void* src, uint64_t bytes,
                        const uint32_t* predicate, uint32_t expect) {
  SOTTO_ASSIGN(const cudaStream_t stream, stream_of(lane));
  return copy_on(stream, dst, src, bytes, predicate, expect);
}

Status CudaDevice::copy_on(cudaStream_t stream, void* dst, const void* src, uint64_t bytes,
                           const uint32_t* predicate, uint32_t expect) {
  if (bytes == 0) return ok_status();
  const OnDevice current(index_);
  SOTTO_TRY(current.status());
  if (predicate == nullptr) {
    return check(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
  }
  return check(cuda::launch_copy(stream, dst, src, bytes, {predicate, expect, false}),
               "cudaLaunchKernelExC of copy");
}

// ---- Events ----

cudaEvent_t CudaDevice::event_of(EventId id) {
  std::lock_guard lock(mutex_);
  return id == 0 || id > events_.size() ? nullptr : events_[id - 1];
}

// So many at once that those of the first steps do: how many are in use at a time depends on how
// fast the device is.
Status CudaDevice::add_events() {
  for (uint32_t i = 0; i < kEventsAtOnce; ++i) {
    cudaEvent_t event = nullptr;
    SOTTO_TRY(check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
                    "cudaEventCreateWithFlags"));
    events_.push_back(event);
    free_events_.push_back(events_.size());
  }
  return ok_status();
}

Result<EventId> CudaDevice::record_on(cudaStream_t stream) {
  const OnDevice current(index_);
  SOTTO_TRY(current.status());
  EventId id = 0;
  cudaEvent_t event = nullptr;
  {
    std::lock_guard lock(mutex_);
    if (free_events_.empty()) SOTTO_TRY(add_events());
    id = free_events_.back();
    free_events_.pop_back();
    event = events_[id - 1];
  }
  if (Status recorded = check(cudaEventRecord(event, stream), "cudaEventRecord"); !recorded.ok()) {
    release(id);
    return recorded;
  }
  return id;
}

Result<EventId> CudaDevice::record(uint32_t lane) {
  SOTTO_ASSIGN(const cudaStream_t stream, stream_of(lane));
  return record_on(stream);
}

Status CudaDevice::wait(uint32_t lane, EventId event) {
  SOTTO_ASSIGN(const cudaStream_t stream, stream_of(lane));
  return stream_after_event(stream, event);
}

Result<bool> CudaDevice::query(EventId event) {
  const OnDevice current(index_);
  Status failed = current.status();
  if (failed.ok()) {
    const cudaError_t state = cudaEventQuery(event_of(event));
    if (state == cudaSuccess) return true;
    if (state == cudaErrorNotReady) {
      forget_cuda_error(state);
      return false;
    }
    failed = check(state, "cudaEventQuery");
  }
  drain();
  return failed;
}

// After an error the progress of the lanes is unknown: what they use is given back when they stand
// still.
void CudaDevice::drain() {
  for (cudaStream_t stream : lanes_) {
    if (stream != nullptr) forget_cuda_error(cudaStreamSynchronize(stream));
  }
}

Status CudaDevice::health() {
  const OnDevice current(index_);
  SOTTO_TRY(current.status());
  const cudaError_t state = cudaStreamQuery(lanes_[0]);
  if (state == cudaErrorNotReady) {
    forget_cuda_error(state);
    return ok_status();
  }
  return check(state, "cudaStreamQuery");
}

void CudaDevice::release(EventId event) {
  std::lock_guard lock(mutex_);
  free_events_.push_back(event);
}

std::vector<std::string> cuda_device_texts() {
  int count = 0;
  if (const Status counted = cuda_status(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
      !counted.ok())
    return {fmt::format("no CUDA device: {}", counted.text())};
  std::vector<std::string> texts;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp p{};
    const Status read = cuda_status(cudaGetDeviceProperties(&p, i), "cudaGetDeviceProperties", i);
    texts.push_back(read.ok() ? fmt::format("cuda:{} ({}, sm_{}{}, {} GiB)", i, p.name, p.major,
                                            p.minor, p.totalGlobalMem >> 30)
                              : read.text());
  }
  if (texts.empty()) texts.push_back("no CUDA device: cudaGetDeviceCount found 0");
  return texts;
}

Result<std::shared_ptr<Device>> make_cuda_device(int32_t index) {
  int count = 0;
  if (const Status counted = cuda_status(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
      !counted.ok())
    return counted.with_prefix(fmt::format("there is no cuda:{}", index));
  if (index < 0 || index >= count)
    return error(Code::kDevice, "there is no cuda:{}; this process sees {} CUDA device{}", index,
                 count, count == 1 ? "" : "s");
  auto device = std::make_shared<CudaDevice>(index);
  SOTTO_TRY(device->open());
  return std::shared_ptr<Device>(std::move(device));
}

}  // namespace sotto
