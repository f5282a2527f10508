// Streams that are captured into graphs: what is queued on them is kept, and runs when the graph is
// launched. One stream per capture: that others join it through events is not modelled and ends the
// process.
//
// Threads: any.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "tests/emulation/cuda/kernel_registry.h"

namespace sotto::fake_cuda {

struct Graph {
  std::vector<Job> jobs;
  // Given back with the graph, what was instantiated from it and the last launch of that.
  std::vector<std::shared_ptr<void>> user_objects;
};

class Captures {
 public:
  cudaError_t begin(uint32_t stream, cudaStreamCaptureMode mode);
  // The graph; null, with the error, if the capture was spoilt.
  cudaError_t end(uint32_t stream, std::shared_ptr<Graph>* graph);
  cudaStreamCaptureStatus status(uint32_t stream);
  // Whether the stream is captured; the job is kept then.
  bool keep(uint32_t stream, const Job& job);
  // A call that makes no sense in a capture spoils it.
  void spoil(uint32_t stream);
  // Whether the call may make other threads' or this thread's captures wrong, so that it is
  // refused; it spoils them.
  bool forbid(const char* call);

  // What the stream is captured into; null: it is not.
  cudaGraph_t graph_of(uint32_t stream);
  cudaGraph_t add(std::shared_ptr<Graph> graph);
  // Also one that is being captured.
  std::shared_ptr<Graph> graph(cudaGraph_t handle, const char* call);
  void remove(cudaGraph_t handle, const char* call);
  uint64_t live();

 private:
  struct Capture {
    std::thread::id thread;
    cudaStreamCaptureMode mode;
    std::shared_ptr<Graph> graph = std::make_shared<Graph>();
    bool spoilt = false;
  };
  std::mutex mutex_;
  std::map<uint32_t, Capture> captures_;  // by the stream's number
  std::map<cudaGraph_t, std::shared_ptr<Graph>> graphs_;
  uintptr_t next_handle_ = 0x10;
};

Captures& captures();

}  // namespace sotto::fake_cuda
