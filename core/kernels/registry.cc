#include "core/kernels/registry.h"

#include <array>

namespace sotto {
namespace {

// Members of a struct of operands, in order.
template <class K>
std::span<const OperandSpec> operands_of() {
  static_assert(sizeof(K::kOperands) == kOperandCount<K> * sizeof(OperandSpec));
  return {reinterpret_cast<const OperandSpec*>(&K::kOperands), kOperandCount<K>};
}

template <class K>
KernelSpec describe(const char* name) {
  KernelSpec spec;
  spec.name = name;
  spec.operands = operands_of<K>();
  spec.division = K::kDivision;
  if constexpr (requires { K::kAlignment; }) spec.alignment = K::kAlignment;
  if constexpr (requires { typename K::Undo; }) spec.undo = kKernelId<typename K::Undo>;
  if constexpr (requires(typename K::Args a) { a.ranges; }) {
    spec.ranges = [](const void* args) {
      const auto& a = *static_cast<const typename K::Args*>(args);
      return std::span(a.ranges, a.n);
    };
  }
  return spec;
}

constexpr size_t kKernels = static_cast<size_t>(KernelId::kCount);

const std::array<KernelSpec, kKernels + 1>& specs() {
  static const std::array<KernelSpec, kKernels + 1> all{
#define SOTTO_KERNEL(type, function, family) describe<kernels::type>(#function),
#include "core/kernels/kernels.def"
      KernelSpec{}};
  return all;
}

uint64_t element_bits(const OperandSpec& spec, const void* args) {
  switch (spec.element) {
    case Element::kByArguments: return spec.bits_of(args);
    case Element::kBit: return 1;
    case Element::kU8: return 8;
    case Element::kU32:
    case Element::kF32: return 32;
    case Element::kU64:
    case Element::kF64: return 64;
    case Element::kTensorState: return 8 * sizeof(TensorState);
    case Element::kTensorStep: return 8 * sizeof(TensorStep);
    case Element::kStateExponents: return 8 * kStateBlocksPerNormBlock;
  }
  return 0;
}

bool is_list(const OperandSpec& spec, const void* args) {
  if (spec.touched != Touched::kList && spec.touched != Touched::kTarget) return false;
  return spec.flat_instead == nullptr || !spec.flat_instead(args);
}

// What one call touches of one operand.
class TouchedList {
 public:
  TouchedList(const KernelCall& call, const OperandSpec& spec, std::vector<TouchedBytes>* out)
      : call_(call),
        spec_(spec),
        bits_(element_bits(spec, call.args)),
        list_(is_list(spec, call.args)),
        out_(out) {}

  bool add_all() {
    switch (spec_.touched) {
      case Touched::kOne: add(0, 1); return true;
      case Touched::kRows: return false;
      case Touched::kBytes: out_->push_back({kNoTensor, 0, call_.bytes}); return true;
      case Touched::kArguments:
        if (spec_.bytes_of == nullptr) return false;
        out_->push_back({kNoTensor, 0, spec_.bytes_of(call_.args)});
        return true;
      default:
        for (const Piece& piece : call_.pieces) add_piece(piece);
        add_ranges();
        return true;
    }
  }

 private:
  void add(uint64_t first, uint64_t count, uint32_t tensor = kNoTensor) {
    const uint64_t begin = first * bits_ / 8;
    const uint64_t end = ((first + count) * bits_ + 7) / 8;
    if (begin != end) out_->push_back({tensor, begin, end - begin});
  }
  void add_piece(const Piece& p) {
    if (p.count == 0) return;
    const bool padding = p.tensor == kNoTensor;
    switch (spec_.touched) {
      case Touched::kList:
      case Touched::kTarget:
        if (padding) return;
        if (!list_) return add_flat(p);
        return add(spec_.touched == Touched::kList ? p.offset : p.target, p.count, p.tensor);
      case Touched::kFlat: return add_flat(p);
      case Touched::kBlocks: return add(p.block, (p.lane + p.count - 1) / kNormBlock + 1);
      case Touched::kCounters: return padding ? void() : add(p.block, 1);
      case Touched::kScales: return padding ? void() : add(p.scale, 1);
      case Touched::kMessages: return padding ? void() : add(p.message, 1);
      case Touched::kGroups: return padding ? void() : add(p.group, 1);
      case Touched::kTensors: return padding ? void() : add(p.tensor, 1);
      default: return;
    }
  }
  void add_flat(const Piece& p) {
    const uint64_t base = spec_.base_of == nullptr ? 0 : spec_.base_of(call_.args);
    add(p.flat - base, p.count);
  }
  void add_ranges() {
    const KernelSpec& kernel = kernel_spec(call_.id);
    if (kernel.ranges == nullptr) return;
    const std::span<const NormRange> ranges = kernel.ranges(call_.args);
    if (spec_.touched == Touched::kRanges) return add(0, ranges.size());
    for (const NormRange& range : ranges) {
      if (spec_.touched == Touched::kRangeBlocks) add(range.first_block, range.blocks);
      if (spec_.touched == Touched::kGroups) add(range.group, 1);
      if (spec_.touched == Touched::kTensors) add(range.tensor, 1);
    }
  }

  const KernelCall& call_;
  const OperandSpec& spec_;
  const uint64_t bits_;
  const bool list_;
  std::vector<TouchedBytes>* out_;
};

}  // namespace

const KernelSpec& kernel_spec(KernelId id) {
  const auto index = static_cast<size_t>(id);
  return specs()[index < kKernels ? index : kKernels];
}

uint32_t list_operands(KernelId id, const void* args) {
  const std::span<const OperandSpec> operands = kernel_spec(id).operands;
  uint32_t mask = 0;
  for (size_t k = 0; k < operands.size(); ++k)
    mask |= static_cast<uint32_t>(is_list(operands[k], args)) << k;
  return mask;
}

bool touched_bytes(const KernelCall& call, size_t operand, std::vector<TouchedBytes>* out) {
  const OperandSpec& spec = kernel_spec(call.id).operands[operand];
  if (spec.access == Access::kNone) return true;
  return TouchedList(call, spec, out).add_all();
}

}  // namespace sotto
