#include "tests/emulation/cuda/capture.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>

#include "tests/emulation/cuda/state.h"
#include "tests/emulation/cuda/sync_model.h"

namespace sotto::fake_cuda {
namespace {

// What CUDA calls potentially unsafe.
constexpr std::string_view kUnsafe[] = {"cudaMalloc",
                                        "cudaFree",
                                        "cudaMallocHost",
                                        "cudaHostAlloc",
                                        "cudaFreeHost",
                                        "cudaMemcpy",
                                        "cudaMemset",
                                        "cudaEventQuery",
                                        "cudaStreamQuery",
                                        "cudaEventSynchronize",
                                        "cudaStreamSynchronize",
                                        "cudaDeviceSynchronize"};

thread_local cudaStreamCaptureMode t_mode = cudaStreamCaptureModeGlobal;

struct UserObject {
  void* user;
  cudaHostFn_t destroy;
};

void give_back(UserObject* object) {
  const std::unique_ptr<UserObject> last(object);
  last->destroy(last->user);
}

// A graph and what is instantiated from it have the same handles here.
cudaGraph_t graph_of(cudaGraphExec_t exec) { return reinterpret_cast<cudaGraph_t>(exec); }

}  // namespace

Captures& captures() {
  static auto* const instance = new Captures;
  return *instance;
}

cudaError_t Captures::begin(uint32_t stream, cudaStreamCaptureMode mode) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  const bool begun =
      captures_.try_emplace(stream, Capture{std::this_thread::get_id(), mode}).second;
  return begun ? cudaSuccess : cudaErrorIllegalState;
}

cudaError_t Captures::end(uint32_t stream, std::shared_ptr<Graph>* graph) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  const auto it = captures_.find(stream);
  if (it == captures_.end()) return cudaErrorIllegalState;
  const Capture capture = std::move(it->second);
  captures_.erase(it);
  const bool other = capture.thread != std::this_thread::get_id();
  if (other && capture.mode != cudaStreamCaptureModeRelaxed)
    return cudaErrorStreamCaptureWrongThread;
  if (capture.spoilt) return cudaErrorStreamCaptureInvalidated;
  *graph = capture.graph;
  return cudaSuccess;
}

cudaStreamCaptureStatus Captures::status(uint32_t stream) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  const auto it = captures_.find(stream);
  if (it == captures_.end()) return cudaStreamCaptureStatusNone;
  return it->second.spoilt ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

bool Captures::keep(uint32_t stream, const Job& job) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  const auto it = captures_.find(stream);
  if (it == captures_.end()) return false;
  it->second.graph->jobs.push_back(job);
  return true;
}

void Captures::spoil(uint32_t stream) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  if (const auto it = captures_.find(stream); it != captures_.end()) it->second.spoilt = true;
}

bool Captures::forbid(const char* call) {
  if (t_mode == cudaStreamCaptureModeRelaxed) return false;
  if (std::ranges::find(kUnsafe, std::string_view(call)) == std::end(kUnsafe)) return false;
  Quiet quiet;
  std::lock_guard lock(mutex_);
  bool any = false;
  for (auto& [stream, c] : captures_) {
    const bool mine = c.thread == std::this_thread::get_id();
    const bool disturbed =
        mine ? c.mode != cudaStreamCaptureModeRelaxed
             : c.mode == cudaStreamCaptureModeGlobal && t_mode == cudaStreamCaptureModeGlobal;
    c.spoilt = c.spoilt || disturbed;
    any = any || disturbed;
  }
  return any;
}

cudaGraph_t Captures::add(std::shared_ptr<Graph> graph) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  const auto handle = reinterpret_cast<cudaGraph_t>(next_handle_ += 0x10);
  graphs_[handle] = std::move(graph);
  return handle;
}

cudaGraph_t Captures::graph_of(uint32_t stream) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  const auto it = captures_.find(stream);
  return it == captures_.end() ? nullptr : reinterpret_cast<cudaGraph_t>(it->second.graph.get());
}

std::shared_ptr<Graph> Captures::graph(cudaGraph_t handle, const char* call) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  if (const auto it = graphs_.find(handle); it != graphs_.end()) return it->second;
  for (const auto& [stream, capture] : captures_) {
    if (reinterpret_cast<cudaGraph_t>(capture.graph.get()) == handle) return capture.graph;
  }
  misuse(std::string(call) + ": a graph that was never made or has been destroyed");
}

void Captures::remove(cudaGraph_t handle, const char* call) {
  const std::shared_ptr<Graph> last = graph(handle, call);  // given back without the lock
  Quiet quiet;
  std::lock_guard lock(mutex_);
  graphs_.erase(handle);
}

uint64_t Captures::live() {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  return graphs_.size() + captures_.size();
}

}  // namespace sotto::fake_cuda

using namespace sotto::fake_cuda;

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  FAKE_CUDA_BEGIN();
  if (stream == nullptr || stream == cudaStreamLegacy)
    return note(cudaErrorStreamCaptureUnsupported);
  return note(captures().begin(state().stream(stream, __func__)->number(), mode));
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  FAKE_CUDA_BEGIN();
  *graph = nullptr;
  std::shared_ptr<Graph> made;
  const cudaError_t ended = captures().end(state().stream(stream, __func__)->number(), &made);
  if (ended == cudaSuccess) *graph = captures().add(std::move(made));
  return note(ended);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  FAKE_CUDA_BEGIN();
  *status = captures().status(state().stream(stream, __func__)->number());
  return cudaSuccess;
}

#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long*, cudaGraph_t* graph,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
#else
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                        unsigned long long*, cudaGraph_t* graph,
                                        const cudaGraphNode_t**, size_t*) {
#endif
  FAKE_CUDA_BEGIN();
  const uint32_t number = state().stream(stream, __func__)->number();
  *status = captures().status(number);
  if (graph != nullptr) *graph = captures().graph_of(number);
  return cudaSuccess;
}

cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* user, cudaHostFn_t destroy,
                                 unsigned references, unsigned flags) {
  FAKE_CUDA_BEGIN();
  if (references != 1 || flags != cudaUserObjectNoDestructorSync)
    return note(cudaErrorInvalidValue);
  *object = reinterpret_cast<cudaUserObject_t>(new UserObject{user, destroy});
  return cudaSuccess;
}

cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned) {
  const cudaError_t begun = state().begin_call(__func__);
  give_back(reinterpret_cast<UserObject*>(object));
  return note(begun);
}

cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned count,
                                      unsigned flags) {
  FAKE_CUDA_BEGIN();
  if (count != 1 || flags != cudaGraphUserObjectMove)
    misuse("cudaGraphRetainUserObject of what the caller keeps too is not modelled");
  captures()
      .graph(graph, __func__)
      ->user_objects.emplace_back(reinterpret_cast<UserObject*>(object),
                                  [](UserObject* last) { give_back(last); });
  return cudaSuccess;
}

// Cannot fail, and is no call of the model.
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  state().make_context(current_device());
  std::swap(t_mode, *mode);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  FAKE_CUDA_BEGIN();
  *exec = reinterpret_cast<cudaGraphExec_t>(captures().add(captures().graph(graph, __func__)));
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  FAKE_CUDA_BEGIN();
  const auto s = state().stream(stream, __func__);
  const std::shared_ptr<Graph> graph = captures().graph(graph_of(exec), __func__);
  for (size_t i = 0; i < graph->jobs.size(); ++i)
    state().submit(s, [graph, i] { graph->jobs[i](); });
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  FAKE_CUDA_BEGIN();
  captures().remove(graph_of(exec), __func__);
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  FAKE_CUDA_BEGIN();
  captures().remove(graph, __func__);
  return cudaSuccess;
}

}  // extern "C"
