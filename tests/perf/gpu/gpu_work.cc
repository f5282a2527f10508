#include "tests/perf/gpu/gpu_work.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <stdexcept>

namespace sotto::perf {
namespace {

constexpr uint64_t kRandomBlock = uint64_t{1} << 22;  // made on the host; longer arrays repeat it
const Options kHost;

void must(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.text());
}

}  // namespace

void cuda_must(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw std::runtime_error(fmt::format("{}: {}", what, cudaGetErrorString(error)));
}

GpuWork::GpuWork(std::shared_ptr<Device> device) : device_(std::move(device)) {
  cuda_must(cudaSetDevice(device_->caps().id.index), "cudaSetDevice");
  Result<void*> stream = device_->lane_stream(0);
  must(stream.status());
  stream_ = static_cast<cudaStream_t>(*stream);
  cuda_must(cudaEventCreate(&begin_), "cudaEventCreate");
  cuda_must(cudaEventCreate(&end_), "cudaEventCreate");
}

GpuWork::~GpuWork() {
  (void)cudaStreamSynchronize(stream_);
  prepared_.clear();
  for (const auto& [memory, bytes] : blocks_) device_->free(memory, bytes);
  (void)cudaEventDestroy(begin_);
  (void)cudaEventDestroy(end_);
}

void* GpuWork::allocate(uint64_t bytes) {
  Result<void*> memory = device_->alloc(bytes);
  must(memory.status());
  blocks_.emplace_back(*memory, bytes);
  return *memory;
}

float* GpuWork::tiled(const float* block, uint64_t block_count, uint64_t count) {
  float* values = zeros<float>(count);
  put(values, block, block_count * 4);
  for (uint64_t have = block_count; have < count; have += std::min(have, count - have))
    copy(values + have, values, std::min(have, count - have) * 4);
  return values;
}

float* GpuWork::random(uint64_t count, uint64_t seed, float sigma) {
  Workload host(kHost, SimdLevel::kAuto);
  const uint64_t block = std::min(count, kRandomBlock);
  return tiled(host.random(block, seed, sigma), block, count);
}

float* GpuWork::positive(uint64_t count, uint64_t seed, float sigma, float low) {
  Workload host(kHost, SimdLevel::kAuto);
  const uint64_t block = std::min(count, kRandomBlock);
  return tiled(host.positive(block, seed, sigma, low), block, count);
}

void* GpuWork::list_of(const std::vector<void*>& tensors) {
  void** list = zeros<void*>(tensors.size());
  put(list, tensors.data(), tensors.size() * sizeof(void*));
  return list;
}

std::vector<std::vector<Piece>> GpuWork::pieces(uint64_t n, uint64_t chunk) const {
  return Workload::pieces(n, chunk, device_->caps().split_elements);
}

void GpuWork::put(void* to, const void* from, uint64_t bytes) {
  cuda_must(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync");
  cuda_must(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
}

void GpuWork::get(void* to, const void* from, uint64_t bytes) {
  cuda_must(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_), "cudaMemcpyAsync");
  cuda_must(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
}

void GpuWork::copy(void* to, const void* from, uint64_t bytes) {
  cuda_must(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_), "cudaMemcpyAsync");
}

double GpuWork::milliseconds(const std::function<void()>& queue) {
  cuda_must(cudaEventRecord(begin_, stream_), "cudaEventRecord");
  queue();
  cuda_must(cudaEventRecord(end_, stream_), "cudaEventRecord");
  cuda_must(cudaEventSynchronize(end_), "cudaEventSynchronize");
  float ms = 0;
  cuda_must(cudaEventElapsedTime(&ms, begin_, end_), "cudaEventElapsedTime");
  return ms;
}

void GpuWork::run(KernelId id, std::initializer_list<void*> operands, const void* args,
                  const std::vector<std::vector<Piece>>& tables) {
  run(id, operands, args, &tables);
}

void GpuWork::run(KernelId id, std::initializer_list<void*> operands, const void* args) {
  run(id, operands, args, nullptr);
}

void GpuWork::run(KernelId id, std::initializer_list<void*> operands, const void* args,
                  const std::vector<std::vector<Piece>>* tables) {
  std::array<Operand, 16> bound;
  std::transform(operands.begin(), operands.end(), bound.begin(),
                 [](void* p) { return Operand{p}; });
  const void* const key = tables != nullptr ? static_cast<const void*>(tables) : args;
  Prepared& prepared = prepared_[{id, key}];
  if (prepared.tables == nullptr) {
    KernelCall call;
    call.id = id;
    call.operands = std::span(bound).first(operands.size());
    call.args = args;
    if (tables == nullptr) prepared.calls.push_back(call);
    for (size_t i = 0; tables != nullptr && i < tables->size(); ++i) {
      call.pieces = (*tables)[i];
      prepared.calls.push_back(call);
    }
    Result<std::shared_ptr<const CallTables>> made = device_->prepare(prepared.calls);
    must(made.status());
    prepared.tables = *made;
  }
  for (size_t i = 0; i < prepared.calls.size(); ++i) {
    KernelCall call = prepared.calls[i];
    call.operands = std::span(bound).first(operands.size());
    call.tables = prepared.tables.get();
    call.call = static_cast<uint32_t>(i);
    must(device_->launch(0, call, {}));
  }
}

}  // namespace sotto::perf
