#include "tests/support/access_check.h"

#include <fmt/core.h>

#include <cstring>

namespace sotto::test {
namespace {

bool reads_alone(const OperandSpec& spec) { return spec.access == Access::kRead && !spec.replaced; }

// Takes back what has not been: it does not look at what that would have read.
bool takes_nothing_back(const KernelCall& call) {
  if (call.paired_ran) return false;
  for (uint16_t id = 0; id < static_cast<uint16_t>(KernelId::kCount); ++id) {
    if (kernel_spec(KernelId{id}).undo == call.id) return true;
  }
  return false;
}

const std::byte* address(const Operand& operand, const TouchedBytes& touched) {
  const auto* base = static_cast<const std::byte*>(operand.data);
  if (touched.tensor != kNoTensor) base = operand.list<const std::byte>(touched.tensor);
  return base + touched.offset;
}

}  // namespace

AccessCheck::AccessCheck(const KernelCall& call) : kernel_(kernel_name(call.id)) {
  const std::span<const OperandSpec> specs = kernel_spec(call.id).operands;
  if (specs.size() != call.operands.size()) {
    missing_ = fmt::format("{} operands for {}, which has {}", call.operands.size(), kernel_,
                           specs.size());
    return;
  }
  for (size_t k = 0; k < specs.size(); ++k) {
    const Operand& operand = call.operands[k];
    std::vector<TouchedBytes> touched;
    if (operand.data == nullptr) {
      if (!specs[k].optional)
        missing_ = fmt::format("operand '{}' of {} is absent", specs[k].name, kernel_);
      continue;
    }
    if (!reads_alone(specs[k]) || takes_nothing_back(call)) continue;
    if (!touched_bytes(call, k, &touched)) continue;
    for (const TouchedBytes& t : touched) {
      const std::byte* at = address(operand, t);
      copies_.push_back({specs[k].name, at, std::vector<std::byte>(at, at + t.bytes)});
    }
  }
}

std::string AccessCheck::changed() const {
  for (const Copy& copy : copies_) {
    if (std::memcmp(copy.at, copy.bytes.data(), copy.bytes.size()) != 0)
      return fmt::format("{} wrote operand '{}', which its description says it reads", kernel_,
                         copy.operand);
  }
  return "";
}

bool written_bytes(const KernelCall& call, std::vector<WrittenBytes>* out) {
  const std::span<const OperandSpec> specs = kernel_spec(call.id).operands;
  bool all = true;
  for (size_t k = 0; k < specs.size(); ++k) {
    if (specs[k].access < Access::kWrite || call.operands[k].data == nullptr) continue;
    std::vector<TouchedBytes> touched;
    all = touched_bytes(call, k, &touched) && all;
    for (const TouchedBytes& t : touched) out->push_back({address(call.operands[k], t), t.bytes});
  }
  return all;
}

}  // namespace sotto::test
