// A recorded optimizer step and its graph.
#pragma once

#include <cuda_runtime_api.h>

#include "tests/cuda/device_memory.h"
#include "tests/support/fake_cuda/fake_cuda.h"

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
  // no graph. fail: this one of the step's CUDA calls fails.
  sotto_status record(sotto_optim* optim, uint64_t fail = UINT64_MAX) {
    const sotto_call call = call_with([this](sotto_call& c) { c.stream = stream_; });
    CUDA_OK(cudaStreamBeginCapture(stream_, mode_));
    if (fail != UINT64_MAX) fake_cuda::fail_call(fail);
    const sotto_status status = sotto_optim_step(optim, &call, &op_);
    if (fail != UINT64_MAX) {
      failed_call_ = fake_cuda::failed_call();
      fake_cuda::clear_faults();
    }
    cudaGraph_t graph = nullptr;
    CUDA_OK(cudaStreamEndCapture(stream_, &graph));  // not spoilt, whatever has failed
    if (status == SOTTO_OK) CUDA_OK(cudaGraphInstantiate(&exec_, graph, 0));
    CUDA_OK(cudaGraphDestroy(graph));
    return status;
  }
  sotto_op* op() const { return op_; }
  const std::string& failed_call() const { return failed_call_; }
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
  std::string failed_call_;
  cudaGraphExec_t exec_ = nullptr;
};

}  // namespace sotto::test
