// Device memory of a rank that is a process.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "tests/nccl/process_rank.h"

namespace sotto::test {

// Device memory with a value in each element.
class DeviceFloats {
 public:
  DeviceFloats(size_t n, float value) : n_(n) {
    require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) == cudaSuccess, "stream");
    require(cudaMalloc(&data_, n * 4) == cudaSuccess, "cudaMalloc");
    write(value);
    // What makes objects of tensors reads them at once.
    require(cudaStreamSynchronize(stream_) == cudaSuccess, "cudaStreamSynchronize");
  }
  ~DeviceFloats() {
    (void)cudaFree(data_);
    (void)cudaStreamDestroy(stream_);
  }
  DeviceFloats(const DeviceFloats&) = delete;
  DeviceFloats& operator=(const DeviceFloats&) = delete;

  sotto_buffer buffer(size_t n = 0) const {
    return {data_, n == 0 ? n_ : n, SOTTO_FLOAT32, SOTTO_DEVICE_CUDA, 0, 0};
  }
  sotto_call call() const {
    return call_with([this](sotto_call& c) { c.stream = stream_; });
  }
  void write(float value) { write(std::vector<float>(n_, value)); }
  void write(const std::vector<float>& host) {
    require(
        cudaMemcpyAsync(data_, host.data(), n_ * 4, cudaMemcpyHostToDevice, stream_) == cudaSuccess,
        "copy");
  }
  // Behind all work of the stream.
  std::vector<float> read() const {
    std::vector<float> host(n_);
    require(
        cudaMemcpyAsync(host.data(), data_, n_ * 4, cudaMemcpyDeviceToHost, stream_) == cudaSuccess,
        "copy back");
    return host;
  }
  void expect(float value, const char* what) const {
    for (const float x : read()) require(x == value, what);
  }

 private:
  size_t n_;
  void* data_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

inline sotto_status all_reduce(const Rank& r, const DeviceFloats& x, size_t n = 0) {
  const sotto_buffer b = x.buffer(n);
  const sotto_call call = x.call();
  return sotto_all_reduce(r.comm, &b, &b, 1, &call, nullptr);
}

}  // namespace sotto::test
