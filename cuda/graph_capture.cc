#include "cuda/graph_capture.h"

#include <atomic>

#include "cuda/kernels/kernels.h"

namespace sotto {

Result<std::shared_ptr<GraphCapture>> CudaGraphCapture::make(std::shared_ptr<CudaDevice> device,
                                                             cudaStream_t stream) {
  const std::shared_ptr<CudaGraphCapture> made(new CudaGraphCapture(std::move(device), stream));
  SOTTO_ASSIGN(void* counts, made->device_->alloc_host(kCountBytes));
  made->counts_ = static_cast<uint32_t*>(counts);
  SOTTO_TRY(made->count_up(kBegun));
  return std::shared_ptr<GraphCapture>(made);
}

CudaGraphCapture::CudaGraphCapture(std::shared_ptr<CudaDevice> device, cudaStream_t stream)
    : device_(std::move(device)), stream_(stream), caps_(device_->caps()) {
  caps_.lanes = 1;
  caps_.message_lanes = 0;
  caps_.captures = true;
}

uint32_t CudaGraphCapture::count(Count which) const {
  return std::atomic_ref(counts_[which]).load(std::memory_order_seq_cst);
}

Status CudaGraphCapture::count_up(Count which) {
  const DeviceId& id = caps_.id;
  const OnDevice current(id.index);
  SOTTO_TRY(current.status());
  return cuda_status(cuda::launch_count_up(stream_, counts_ + which),
                     "cudaLaunchKernelExC of count_up", id.index);
}

Status CudaGraphCapture::finish() {
  capturing_ = false;
  return count_up(kEnded);
}

Status CudaGraphCapture::launch(uint32_t lane, const KernelCall& call,
                                std::span<const DiscardedRange> discarded) {
  return capturing_ ? device_->launch_on(stream_, call) : device_->launch(lane, call, discarded);
}

Status CudaGraphCapture::copy(uint32_t lane, void* dst, const void* src, uint64_t bytes,
                              const uint32_t* predicate, uint32_t expect) {
  return capturing_ ? device_->copy_on(stream_, dst, src, bytes, predicate, expect)
                    : device_->copy(lane, dst, src, bytes, predicate, expect);
}

Result<EventId> CudaGraphCapture::record(uint32_t lane) {
  return capturing_ ? kAtOnce : device_->record(lane);
}

Status CudaGraphCapture::wait(uint32_t lane, EventId event) {
  return event == kAtOnce ? ok_status() : device_->wait(lane, event);
}

Result<bool> CudaGraphCapture::query(EventId event) {
  return event == kAtOnce ? true : device_->query(event);
}

void CudaGraphCapture::release(EventId event) {
  if (event != kAtOnce) device_->release(event);
}

}  // namespace sotto
