#include "core/engine/launch.h"

#include <algorithm>
#include <array>

namespace sotto {
namespace {

constexpr size_t kMaxOperands = 16;
#define SOTTO_KERNEL(type, function, family) \
  static_assert(kOperandCount<kernels::type> <= kMaxOperands);
#include "core/kernels/kernels.def"

// What the call overwrites without reading it.
std::vector<DiscardedRange> discarded_ranges(const Run& run, const Step& s) {
  std::vector<Use> uses;
  std::vector<DiscardedRange> discarded;
  collect_uses(run.plan->slots, s, &uses);
  for (const Use& use : uses) {
    // In place: what the call also reads is not overwritten blindly.
    const auto also_read = [&](const Use& other) {
      return other.access != Access::kWrite && other.region.slot == use.region.slot &&
             other.region.offset < use.region.offset + use.region.bytes &&
             use.region.offset < other.region.offset + other.region.bytes;
    };
    if (use.access != Access::kWrite || std::any_of(uses.begin(), uses.end(), also_read)) continue;
    discarded.push_back({run.at(use.region), use.region.bytes});
  }
  return discarded;
}

}  // namespace

Status launch_step(const PreparedPlan& prepared, const Run& run, const Step& s, uint32_t lane,
                   bool paired_ran) {
  Device& device = *prepared.device();
  const uint32_t* predicate = nullptr;
  if (s.predicate.slot != kNoSlot) {
    predicate = static_cast<const uint32_t*>(run.at({s.predicate.slot, s.predicate.offset, 4}));
  }
  if (const CopyStep* copy = s.copy()) {
    return device.copy(lane, run.at(copy->destination), run.at(copy->source), copy->source.bytes,
                       predicate, s.predicate.expect);
  }
  const KernelStep& kernel = *s.kernel();
  // Lists of tensor pointers: where kernels can read them.
  void* const* const lists = run.plan->addresses.device == kNoSlot
                                 ? run.bases.data()
                                 : static_cast<void* const*>(run.bases[run.plan->addresses.device]);
  std::array<Operand, kMaxOperands> operands;
  for (size_t i = 0; i < kernel.operands.size(); ++i) {
    const OperandRef& ref = kernel.operands[i];
    if (ref.slot == kNoSlot) {
      operands[i].data = nullptr;
    } else if (is_list(ref)) {
      operands[i].data = const_cast<void**>(lists + ref.slot);
    } else {
      operands[i].data = run.at({ref.slot, ref.offset, 0});
    }
  }
  KernelCall call = constant_call(kernel);
  call.operands = std::span<const Operand>(operands.data(), kernel.operands.size());
  call.predicate = predicate;
  call.expect = s.predicate.expect;
  call.paired_ran = paired_ran;
  call.tables = prepared.tables();
  call.call = kernel.call;
  // A predicated kernel may leave its output as it was.
  if (!device.caps().wants_discarded || predicate != nullptr) return device.launch(lane, call, {});
  return device.launch(lane, call, discarded_ranges(run, s));
}

Status check_message(const Run& run, uint32_t step) {
  const Step& s = run.plan->steps[step];
  const Expectation* const expected = expectation(s);
  if (expected == nullptr) return ok_status();
  const Region& region = s.copy() != nullptr ? s.copy()->destination : s.message()->data;
  const std::span got(static_cast<const std::byte*>(run.at(region)), region.bytes);
  if (std::ranges::equal(got, expected->bytes)) return ok_status();
  return Status(Code::kProtocol, expected->explain(got));
}

}  // namespace sotto
