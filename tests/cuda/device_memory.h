// Tensors of a test, in host memory or copied to a CUDA device, so that one test body serves both.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "tests/ranks/capi_support.h"

namespace sotto::test {

// Ranks have devices of their own as far as there are enough: calls that wait for all of a device
// would wait for other ranks' operations too.
inline int device_of(int32_t rank) {
  int devices = 1;
  (void)cudaGetDeviceCount(&devices);
  return rank % devices;
}

enum class Where { kHost, kCuda };

// Ends the rank unless the runtime call succeeded.
inline void cuda_ok(cudaError_t error, const char* what) {
  require(error == cudaSuccess, std::string(what) + ": " + cudaGetErrorString(error));
}
#define CUDA_OK(call) ::sotto::test::cuda_ok((call), #call)

// Vectors stay where they are; the library sees copies on the device. Everything is ordered by one
// stream of the caller, never by the default stream.
class Tensors {
 public:
  explicit Tensors(Where where, int device = 0) : where_(where), device_(device) {
    if (where_ == Where::kHost) return;
    CUDA_OK(cudaSetDevice(device_));
    CUDA_OK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  ~Tensors() {
    if (where_ == Where::kHost) return;
    (void)cudaSetDevice(device_);
    (void)cudaStreamSynchronize(stream_);
    // cudaFree would wait for everything on the device, and so for operations of other ranks that
    // share it and wait for this one.
    for (const Copy& copy : copies_) (void)cudaFreeAsync(copy.device, stream_);
    (void)cudaStreamSynchronize(stream_);
    (void)cudaStreamDestroy(stream_);
  }
  Tensors(const Tensors&) = delete;
  Tensors& operator=(const Tensors&) = delete;

  cudaStream_t stream() const { return stream_; }

  // The vector as an argument of the library; it must not move from now on.
  template <class T>
  sotto_buffer add(std::vector<T>& host) {
    sotto_buffer b = buffer(host);
    if (where_ == Where::kHost || host.empty()) return b;
    Copy copy{host.data(), nullptr, host.size() * sizeof(T)};
    CUDA_OK(cudaMallocAsync(&copy.device, copy.bytes, stream_));
    copies_.push_back(copy);
    upload(copies_.size() - 1);
    sync();  // what makes objects of tensors reads them at once
    b.data = copy.device;
    b.device_type = SOTTO_DEVICE_CUDA;
    b.device_id = device_;
    return b;
  }
  // All vectors to the device, or back, in the order of the stream; sync: the host waits.
  void upload() {
    for (size_t i = 0; i < copies_.size(); ++i) upload(i);
    sync();
  }
  void download() {
    for (const Copy& c : copies_)
      CUDA_OK(cudaMemcpyAsync(c.host, c.device, c.bytes, cudaMemcpyDeviceToHost, stream_));
    sync();
  }
  // One vector's tensor to another's of the same size, in the order of the stream.
  template <class T>
  void copy(std::vector<T>& to, const std::vector<T>& from) {
    if (where_ == Where::kHost) {
      std::copy(from.begin(), from.end(), to.begin());
      return;
    }
    CUDA_OK(cudaMemcpyAsync(copy_of(to).device, copy_of(from).device, from.size() * sizeof(T),
                            cudaMemcpyDeviceToDevice, stream_));
  }
  void sync() {
    if (where_ == Where::kCuda) CUDA_OK(cudaStreamSynchronize(stream_));
  }
  // Options of a call that comes after what is queued on the stream.
  sotto_call call() const {
    return call_with([this](sotto_call& c) { c.stream = stream_; });
  }

 private:
  struct Copy {
    void* host;
    void* device;
    size_t bytes;
  };
  template <class T>
  const Copy& copy_of(const std::vector<T>& host) const {
    const auto is = [&](const Copy& c) { return c.host == static_cast<const void*>(host.data()); };
    const auto found = std::find_if(copies_.begin(), copies_.end(), is);
    require(found != copies_.end(), "the vector has no tensor");
    return *found;
  }
  void upload(size_t i) {
    const Copy& c = copies_[i];
    CUDA_OK(cudaMemcpyAsync(c.device, c.host, c.bytes, cudaMemcpyHostToDevice, stream_));
  }

  Where where_;
  int device_;
  cudaStream_t stream_ = nullptr;
  std::vector<Copy> copies_;
};

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

}  // namespace sotto::test
