// A recorded optimizer step and its graph.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <utility>

#include "tests/cuda/device_memory.h"

namespace sotto::test {

class StepGraph {
 public:
  // mode: ranks that are threads of one process must not forbid each other's calls.
  explicit StepGraph(cudaStream_t stream,
                     cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal)
      : stream_(stream), mode_(mode) {}
  ~StepGraph() {
    if (exec_ != nullptr) (void)cudaGraphExecDestroy(exec_);
    (void)sotto_op_release(op_);
  }
  StepGraph(const StepGraph&) = delete;
  StepGraph& operator=(const StepGraph&) = delete;

  // What the step returns that is called while the stream is captured; without success there is
  // no graph.
  sotto_status record(const std::function<sotto_status(const sotto_call*, sotto_op**)>& step) {
    const sotto_call call = call_with([this](sotto_call& c) { c.stream = stream_; });
    CUDA_OK(cudaStreamBeginCapture(stream_, mode_));
    const sotto_status status = step(&call, &op_);
    cudaGraph_t graph = nullptr;
    CUDA_OK(cudaStreamEndCapture(stream_, &graph));  // not spoilt, whatever has failed
    if (status == SOTTO_OK) CUDA_OK(cudaGraphInstantiate(&exec_, graph, 0));
    CUDA_OK(cudaGraphDestroy(graph));
    return status;
  }
  sotto_status record(sotto_optim* optim) {
    return record([&](const auto* call, auto* op) { return sotto_optim_step(optim, call, op); });
  }
  // The graph is the caller's to destroy.
  cudaGraphExec_t take() { return std::exchange(exec_, nullptr); }
  sotto_op* op() const { return op_; }
  void launch() { CUDA_OK(cudaGraphLaunch(exec_, stream_)); }
  // Once replayed.
  void run() {
    launch();
    OK(sotto_op_wait(op_, -1));
  }

 private:
  const cudaStream_t stream_;
  const cudaStreamCaptureMode mode_;
  sotto_op* op_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

}  // namespace sotto::test
