#include "transports/nccl/live_graphs.h"

#include <utility>

#include "cuda/calls/cuda_calls.h"

namespace sotto::nccl {

// On a thread of CUDA's, which may call nothing of it.
void LiveGraphs::destroyed(void* user) {
  const std::unique_ptr<std::shared_ptr<State>> state(static_cast<std::shared_ptr<State>*>(user));
  const std::lock_guard lock((*state)->mutex);
  --(*state)->graphs;
  (*state)->changed.notify_all();
}

Status LiveGraphs::add(cudaStream_t captured) const {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaGraph_t graph = nullptr;
#if CUDART_VERSION >= 13000
  SOTTO_TRY(cuda_status(cudaStreamGetCaptureInfo(captured, &status, nullptr, &graph),
                        "cudaStreamGetCaptureInfo"));
#else
  SOTTO_TRY(cuda_status(cudaStreamGetCaptureInfo_v2(captured, &status, nullptr, &graph),
                        "cudaStreamGetCaptureInfo_v2"));
#endif
  if (status != cudaStreamCaptureStatusActive || graph == nullptr)
    return error(Code::kInternal, "nccl: the stream of a captured group is not being captured");
  auto user = std::make_unique<std::shared_ptr<State>>(state_);
  cudaUserObject_t object = nullptr;
  SOTTO_TRY(cuda_status(
      cudaUserObjectCreate(&object, user.get(), destroyed, 1, cudaUserObjectNoDestructorSync),
      "cudaUserObjectCreate"));
  {
    const std::lock_guard lock(state_->mutex);
    ++state_->graphs;
  }
  (void)user.release();
  Status kept = cuda_status(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove),
                            "cudaGraphRetainUserObject");
  if (!kept.ok()) (void)cudaUserObjectRelease(object, 1);
  return kept;
}

bool LiveGraphs::any() const {
  const std::lock_guard lock(state_->mutex);
  return state_->graphs != 0;
}

void LiveGraphs::wait_for_none(const std::atomic<bool>& enough) const {
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [&] { return state_->graphs == 0 || enough; });
}

void LiveGraphs::wake() const {
  const std::lock_guard lock(state_->mutex);
  state_->changed.notify_all();
}

}  // namespace sotto::nccl
