#include "core/engine/device_array.h"

#include <thread>

namespace sotto {
namespace {

// Waits for everything queued on lane 0.
Status settle(Device& device) {
  if (device.caps().synchronous) return ok_status();
  SOTTO_ASSIGN(const EventId event, device.record(0));
  while (true) {
    const Result<bool> done = device.query(event);
    if (!done.ok() || *done) {
      device.release(event);
      return done.status();
    }
    std::this_thread::yield();
  }
}

}  // namespace

Result<DeviceArray> DeviceArray::make(std::shared_ptr<Device> device, uint64_t bytes) {
  DeviceArray array;
  const uint64_t held = bytes == 0 ? 1 : bytes;
  SOTTO_ASSIGN(array.data_, device->alloc(held));
  array.bytes_ = held;
  array.device_ = std::move(device);
  return array;
}

DeviceArray::~DeviceArray() {
  if (data_ != nullptr) device_->free(data_, bytes_);
}

DeviceArray& DeviceArray::operator=(DeviceArray&& o) noexcept {
  std::swap(device_, o.device_);
  std::swap(data_, o.data_);
  std::swap(bytes_, o.bytes_);
  return *this;
}

Status copy_and_wait(Engine& engine, void* dst, const void* src, uint64_t bytes) {
  if (bytes == 0) return ok_status();
  return engine.drive([&](Driver&) -> Status {
    SOTTO_TRY(engine.device()->copy(0, dst, src, bytes, nullptr, 0));
    return settle(*engine.device());
  });
}

Status run_and_wait(Engine& engine, const KernelCall& call) {
  return engine.drive([&](Driver&) -> Status {
    SOTTO_TRY(engine.device()->launch(0, call, {}));
    return settle(*engine.device());
  });
}

}  // namespace sotto
