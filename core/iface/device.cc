#include "core/iface/device.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace sotto {

std::string device_name(const DeviceId& id) {
  switch (id.type) {
    case DeviceType::kCpu: return "cpu";
    case DeviceType::kCuda: return fmt::format("cuda:{}", id.index);
  }
  return fmt::format("device {}:{}", static_cast<int32_t>(id.type), id.index);
}

Result<void*> Device::alloc_host(uint64_t bytes) {
  constexpr uint64_t kAlignment = 128;
  const uint64_t size = (std::max<uint64_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  void* memory = size < bytes ? nullptr : std::aligned_alloc(kAlignment, size);
  if (memory == nullptr)
    return error(Code::kOutOfMemory, "no memory for {} bytes on the host", bytes);
  std::memset(memory, 0, size);
  return memory;
}

void Device::free_host(void* memory, uint64_t) { std::free(memory); }

Result<std::shared_ptr<const CallTables>> Device::prepare(std::span<const KernelCall>) {
  return std::shared_ptr<const CallTables>();
}

Status Device::unblock_behind(uint32_t, BlockId) {
  return unsupported("{} does not unblock streams itself", device_name(caps().id));
}

Result<std::shared_ptr<GraphCapture>> Device::capture_graph(void*) {
  return std::shared_ptr<GraphCapture>();
}

}  // namespace sotto
