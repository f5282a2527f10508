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

Status DeviceAccess::copy_and_wait(void* dst, const void* src, uint64_t bytes) const {
  if (bytes == 0) return ok_status();
  return engine_->drive([&](Driver&) -> Status {
    SOTTO_TRY(device_->copy(0, dst, src, bytes, nullptr, 0));
    return settle(*device_);
  });
}

Status DeviceAccess::run_and_wait(KernelCall call) const {
  SOTTO_ASSIGN(const std::shared_ptr<const CallTables> tables,
               device_->prepare(std::span<const KernelCall>(&call, 1)));
  call.tables = tables.get();
  return engine_->drive([&](Driver&) -> Status {
    SOTTO_TRY(device_->launch(0, call, {}));
    return settle(*device_);
  });
}

}  // namespace sotto
