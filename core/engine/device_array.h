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

// A device, and the engine whose driver uses it. For work outside of plans. Threads: any that may
// drive. Nothing in flight may use the memory.
class DeviceAccess {
 public:
  DeviceAccess() = default;
  DeviceAccess(std::shared_ptr<Engine> engine, std::shared_ptr<Device> device)
      : engine_(std::move(engine)), device_(std::move(device)) {}

  const std::shared_ptr<Device>& device() const { return device_; }

  Status copy_and_wait(void* dst, const void* src, uint64_t bytes) const;
  // Runs one kernel and waits for it. Lists of tensor pointers are not taken.
  Status run_and_wait(KernelCall call) const;

  template <class T>
  Result<std::vector<T>> download(const void* memory, uint64_t count) const {
    std::vector<T> out(count);
    SOTTO_TRY(copy_and_wait(out.data(), memory, count * sizeof(T)));
    return out;
  }
  template <class T>
  Status upload(void* memory, std::span<const T> values) const {
    return copy_and_wait(memory, values.data(), values.size_bytes());
  }

 private:
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Device> device_;
};

}  // namespace sotto
