#include "core/optim/step_operands.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

#include "core/optim/state_arrays.h"

namespace sotto {

std::vector<uint32_t> tensor_numbers(uint64_t n) {
  std::vector<uint32_t> out(n);
  std::iota(out.begin(), out.end(), 0u);
  return out;
}

std::vector<Piece> pieces_of(const CompressedLayout& layout, std::span<const uint32_t> tensors) {
  std::vector<Piece> out;
  for (const uint32_t t : tensors) {
    const std::vector<Piece> pieces = layout.tensor_pieces(t);
    out.insert(out.end(), pieces.begin(), pieces.end());
  }
  return out;
}

std::vector<Piece> all_tensor_pieces(const CompressedLayout& layout) {
  return pieces_of(layout, tensor_numbers(layout.tensors().size()));
}

std::vector<Piece> compressed_pieces(const CompressedLayout& layout, bool padding) {
  std::vector<uint32_t> tensors =
      tensor_numbers(layout.tensors().size() + (padding ? layout.padding().size() : 0));
  std::erase_if(tensors, [&](uint32_t t) { return !layout.compressed(t); });
  return pieces_of(layout, tensors);
}

StepOperands::StepOperands(const StepShape& shape) : shape_(shape) {
  const CompressedLayout& layout = *shape.layout;
  const auto bytes_of = [&](Dtype type) {
    std::vector<uint64_t> bytes;
    for (const LayoutTensor& t : layout.tensors()) bytes.push_back(t.count * dtype_bytes(type));
    return bytes;
  };
  StepSlots& s = slots_;
  s.params = b_.bound_list(bytes_of(Dtype::kF32));
  s.grads = add_padded_list(b_, layout, shape.gradients);
  if (!shape.copies.tensors.empty()) s.copies = b_.bound_list(bytes_of(shape.copies.type));
  states_ = bound_states_ = array("tensor_states", state_bytes());
  b_.committed(s.params, layout.tensors().size());
  if (s.copies != kNoSlot) b_.committed(s.copies, layout.tensors().size());
  b_.committed(bound_states_);
  if (!shape.valid.empty()) valid_ = bit_array(shape.valid);
  tensor_steps_ = b_.scratch(tensors() * sizeof(TensorStep));
}

uint32_t StepOperands::array(std::string_view name, uint64_t bytes) {
  std::vector<ArrayBinding>& arrays = slots_.arrays;
  for (const ArrayBinding& a : arrays) {
    if (a.name == name) return a.elements;
  }
  return arrays.emplace_back(ArrayBinding{name, b_.bound(bytes)}).elements;
}

ArrayBinding StepOperands::moment(std::string_view name) {
  std::vector<ArrayBinding>& arrays = slots_.arrays;
  for (const ArrayBinding& a : arrays) {
    if (a.name == name) return a;
  }
  const CompressedLayout& layout = *shape_.layout;
  ArrayBinding out{name, b_.bound(state_element_bytes(layout, shape_.state))};
  b_.committed(out.elements);
  if (shape_.state == StateType::kFp8) {
    out.exponents = b_.bound(state_exponent_bytes(layout, shape_.state));
    b_.committed(out.exponents);
  }
  return arrays.emplace_back(out);
}

OperandRef StepOperands::moment_operand(std::string_view name) {
  return flat(moment(name).elements, Access::kReadWrite,
              static_cast<uint32_t>(state_type_bytes(shape_.state) * 8));
}

OperandRef StepOperands::exponents_operand(std::string_view name) {
  const uint32_t slot = moment(name).exponents;
  if (slot == kNoSlot) return absent();
  return blocks(slot, Access::kReadWrite, 8 * static_cast<uint32_t>(kStateBlocksPerNormBlock));
}

OperandRef StepOperands::state_step_operand() {
  return step_scalar(offsetof(StepScalars, state_step));
}

OperandRef StepOperands::scalars_of(const ScalarsType& type) {
  const uint64_t bytes = shape_.groups * type.bytes;
  for (const ScalarsArray& array : slots_.scalars) {
    if (array.type == &type) return whole(array.device, Access::kRead, 0, bytes);
  }
  const uint32_t host = b_.host(bytes);
  slots_.scalars.push_back({&type, host, copied(host, bytes)});
  return whole(slots_.scalars.back().device, Access::kRead, 0, bytes);
}

OperandRef StepOperands::step_scalar(uint64_t offset) {
  if (slots_.step_scalars == kNoSlot) {
    slots_.step_scalars = b_.host(sizeof(StepScalars));
    step_scalars_ = copied(slots_.step_scalars, sizeof(StepScalars));
  }
  return whole(step_scalars_, Access::kRead, offset, 8);
}

uint32_t StepOperands::copied(uint32_t host, uint64_t bytes) {
  const uint32_t device = b_.scratch(bytes);
  b_.copy({device, 0, bytes}, {host, 0, bytes});
  return device;
}

OperandRef StepOperands::valid_operand(Access access, uint64_t begin) const {
  if (shape_.valid.empty() || shape_.compat) return absent();
  return whole(valid_, access, begin / 8, (shape_.layout->flat_elements() - begin) / 8);
}

OperandRef StepOperands::mask_operand() const {
  if (shape_.valid.empty()) return absent();
  return whole(valid_, Access::kRead, 0, shape_.layout->flat_elements() / 8);
}

uint64_t StepOperands::state_bytes() const {
  return (tensors() + shape_.layout->padding().size()) * sizeof(TensorState);
}

OperandRef StepOperands::coefficient_operand(const GradientStage& stage) const {
  return stage.coefficient == kNoSlot ? absent() : whole(stage.coefficient, Access::kRead, 0, 4);
}

OperandRef StepOperands::states_operand(Access access) const {
  return whole(states_, access, 0, state_bytes());
}

OperandRef StepOperands::steps_operand(Access access) const {
  return whole(tensor_steps_, access, 0, tensors() * sizeof(TensorStep));
}

OperandRef StepOperands::blocks_operand(uint32_t slot, const TensorBatch& batch) {
  return whole(slot, Access::kRead, batch.first_block * 4, batch.blocks * 4);
}

TensorArgs StepOperands::tensor_args(const TensorBatch& batch, bool average) {
  return {b_.keep_array(std::span<const NormRange>(batch.ranges)), batch.ranges.size(), average};
}

void StepOperands::copy_states() {
  const uint64_t bytes = state_bytes();
  states_ = b_.scratch(bytes);
  b_.copy({states_, 0, bytes}, {bound_states_, 0, bytes});
}

void StepOperands::keep_states(uint32_t word) {
  const uint64_t bytes = state_bytes();
  b_.copy({bound_states_, 0, bytes}, {states_, 0, bytes}, committing(word));
}

KernelOptions StepOperands::committing(uint32_t word) {
  KernelOptions options;
  options.phase = Phase::kCommitting;
  options.predicate = {word, 0, kCommit};
  return options;
}

StepOperands::ScratchList StepOperands::scratch_list(Dtype type, std::span<const uint32_t> tensors,
                                                     uint64_t at_least, uint32_t list) {
  const std::vector<LayoutTensor>& all = shape_.layout->tensors();
  const uint64_t element = dtype_bytes(type);
  uint64_t bytes = 0;
  for (const uint32_t t : tensors) bytes += all[t].count * element;
  ScratchList out;
  out.flat = b_.scratch(std::max({uint64_t{1}, bytes, at_least}));
  out.list = list == kNoSlot ? add_padded_list(b_, *shape_.layout, type) : list;
  uint64_t offset = 0;
  for (const uint32_t t : tensors) {
    b_.alias(out.list + t, out.flat, offset);
    offset += all[t].count * element;
  }
  return out;
}

uint32_t StepOperands::scratch_list(Dtype type) {
  return scratch_list(type, tensor_numbers(tensors())).list;
}

std::vector<TensorBatch> StepOperands::batches() const {
  std::vector<NormRange> ranges = shape_.layout->tensor_ranges();
  std::erase_if(ranges, [this](const NormRange& r) { return r.count == 0 || frozen(r.tensor); });
  std::ranges::stable_sort(ranges, {}, &NormRange::group);
  std::vector<TensorBatch> out;
  uint64_t elements = 0;  // of the last batch
  for (NormRange& range : ranges) {
    elements += range.count;
    const bool fits = shape_.batch_elements == 0 || elements <= shape_.batch_elements;
    if (out.empty() || !fits || out.back().ranges.back().group != range.group) {
      out.emplace_back().first_block = range.first_block;
      elements = range.count;
    }
    TensorBatch& batch = out.back();
    range.first_block -= batch.first_block;
    batch.blocks = range.first_block + range.blocks;
    batch.ranges.push_back(range);
    const std::vector<Piece> pieces = shape_.layout->tensor_pieces(range.tensor);
    batch.pieces.insert(batch.pieces.end(), pieces.begin(), pieces.end());
  }
  return out;
}

std::vector<Piece> StepOperands::updated(std::vector<Piece> pieces) const {
  std::erase_if(pieces, [this](const Piece& p) { return frozen(p.tensor); });
  return pieces;
}

}  // namespace sotto
