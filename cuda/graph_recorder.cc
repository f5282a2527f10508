#include "cuda/graph_recorder.h"

#include <atomic>

#include "cuda/kernels/kernels.h"

namespace sotto {

Result<std::shared_ptr<GraphRecorder>> CudaGraphRecorder::make(std::shared_ptr<CudaDevice> device,
                                                               cudaStream_t stream) {
  const std::shared_ptr<CudaGraphRecorder> made(new CudaGraphRecorder(std::move(device), stream));
  SOTTO_ASSIGN(void* counts, made->device_->alloc_host(kCountBytes));
  made->counts_ = static_cast<uint32_t*>(counts);
  SOTTO_TRY(made->count_up(kBegun));
  return std::shared_ptr<GraphRecorder>(made);
}

CudaGraphRecorder::CudaGraphRecorder(std::shared_ptr<CudaDevice> device, cudaStream_t stream)
    : device_(std::move(device)), stream_(stream), caps_(device_->caps()) {
  caps_.lanes = 1;
  caps_.records = true;
}

uint32_t CudaGraphRecorder::count(Count which) const {
  return std::atomic_ref(counts_[which]).load(std::memory_order_seq_cst);
}

Status CudaGraphRecorder::count_up(Count which) {
  const DeviceId& id = caps_.id;
  const OnDevice current(id.index);
  SOTTO_TRY(current.status());
  return cuda_status(cuda::launch_count_up(stream_, counts_ + which),
                     "cudaLaunchKernelExC of count_up", id.index);
}

Status CudaGraphRecorder::finish() {
  recording_ = false;
  return count_up(kEnded);
}

Status CudaGraphRecorder::launch(uint32_t lane, const KernelCall& call,
                                 std::span<const FreshRange> fresh) {
  return recording_ ? device_->launch_on(stream_, call) : device_->launch(lane, call, fresh);
}

Status CudaGraphRecorder::copy(uint32_t lane, void* dst, const void* src, uint64_t bytes,
                               const uint32_t* predicate, uint32_t expect) {
  return recording_ ? device_->copy_on(stream_, dst, src, bytes, predicate, expect)
                    : device_->copy(lane, dst, src, bytes, predicate, expect);
}

Result<EventId> CudaGraphRecorder::record(uint32_t lane) {
  return recording_ ? kAtOnce : device_->record(lane);
}

Status CudaGraphRecorder::wait(uint32_t lane, EventId event) {
  return event == kAtOnce ? ok_status() : device_->wait(lane, event);
}

Result<bool> CudaGraphRecorder::query(EventId event) {
  return event == kAtOnce ? true : device_->query(event);
}

void CudaGraphRecorder::release(EventId event) {
  if (event != kAtOnce) device_->release(event);
}

}  // namespace sotto
