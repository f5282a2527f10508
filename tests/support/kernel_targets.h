// What kernel calls are compared on (kernel_cases.h).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/iface/device.h"

namespace sotto::test {

struct KernelTarget {
  std::string name;
  std::unique_ptr<Device> device;
  std::vector<uint64_t> cuts;  // calls are cut after so many elements; 0: whole
  // Before a call, if the target has several ways to execute one. The text names the way.
  std::function<std::string()> next_way;
};

// Every SIMD level of this processor, with one and three threads. Programs that test another device
// bring a definition of their own.
std::vector<KernelTarget> kernel_targets();

// Elements beyond which cases on these targets would take too long and are left out; 0: no limit.
uint64_t kernel_layout_limit();

}  // namespace sotto::test
