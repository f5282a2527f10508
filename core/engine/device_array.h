// Device memory with an owner, and copies between it and host memory that are done when they
// return.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/base/status.h"
#include "core/engine/engine.h"
#include "core/iface/device.h"

namespace sotto {

class DeviceArray {
 public:
  DeviceArray() = default;
  // Zeroed. bytes may be 0.
  static Result<DeviceArray> make(std::shared_ptr<Device> device, uint64_t bytes);
  ~DeviceArray();
  DeviceArray(DeviceArray&& o) noexcept { *this = std::move(o); }
  DeviceArray& operator=(DeviceArray&& o) noexcept;

  void* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<Device> device_;
  void* data_ = nullptr;
  uint64_t bytes_ = 0;
};

// Threads: any that may drive. Nothing in flight may use the memory.
Status copy_and_wait(Engine& engine, void* dst, const void* src, uint64_t bytes);
// Runs one kernel outside any plan and waits for it.
Status run_and_wait(Engine& engine, const KernelCall& call);

template <class T>
Result<std::vector<T>> download(Engine& engine, const void* memory, uint64_t count) {
  std::vector<T> out(count);
  SOTTO_TRY(copy_and_wait(engine, out.data(), memory, count * sizeof(T)));
  return out;
}
template <class T>
Status upload(Engine& engine, void* memory, std::span<const T> values) {
  return copy_and_wait(engine, memory, values.data(), values.size_bytes());
}

}  // namespace sotto
