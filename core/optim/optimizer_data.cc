#include "core/optim/optimizer_data.h"

namespace sotto {

Status OptimizerData::lay_out(bool masks_zero_variance) {
  std::vector<LayoutTensor> tensors;
  for (const ParamSpec& p : parameters)
    tensors.push_back({p.count, p.group, !groups[p.group].freeze.non_freeze});
  const auto world = static_cast<uint32_t>(comm->size());
  SOTTO_ASSIGN(levels, make_levels(config.sotto.hierarchy, comm->hosts()));
  const bool half = config.half_gradients() || parameters.gradients() != Dtype::kF32;
  codec = config.compression(world, half);
  const CodecSettings settings = codec.value_or(CodecSettings{});
  // One rank averages nothing and needs no padding.
  std::optional<uint32_t> padding_group;
  if (compat() && world > 1) padding_group = static_cast<uint32_t>(groups.size());
  layout = std::make_unique<CompressedLayout>(
      CompressedLayout::of(settings, std::move(tensors), codec ? levels.servers() : 1,
                           codec ? levels.shards() : 1, padding_group));
  masked = parameters.has_masks() || masks_zero_variance;
  return ok_status();
}

Status OptimizerData::allocate(const std::vector<StateArraySpec>& specs) {
  for (const StateArraySpec& spec : specs) SOTTO_TRY(arrays.add(access, *layout, spec));
  const std::vector<TensorState> states(parameters.size() + layout->padding().size());
  SOTTO_TRY(arrays.add(access, *layout, {"tensor_states", states.size() * sizeof(TensorState)}));
  SOTTO_TRY(access.upload(arrays.data("tensor_states"), std::span<const TensorState>(states)));
  if (masked) SOTTO_TRY(arrays.add(access, *layout, {"valid", layout->flat_elements() / 8}));
  if (codec) {
    SOTTO_ASSIGN(compressed, CompressedState::make(*comm, access, *layout, *codec, levels.two()));
  }
  return write_valid_bits(false);
}

StepShape OptimizerData::step_shape(const Comm& ranks) const {
  StepShape shape;
  shape.rank = ranks.rank();
  shape.size = ranks.size();
  shape.layout = layout.get();
  shape.compat = compat();
  shape.groups = groups.size() + (layout->padding().empty() ? 0 : 1);
  shape.clip = config.gradient_clipping;
  shape.gradients = parameters.gradients();
  shape.average.wire = config.communication_data_type.value_or(shape.gradients);
  // Specification 11.2.
  const double world = ranks.size();
  if (config.prescale_gradients) {
    shape.average.prescale = static_cast<float>(1 / world);
  } else if (const double factor = config.gradient_predivide_factor; factor != 1) {
    shape.average.prescale = static_cast<float>(1 / factor);
    shape.average.postscale = static_cast<float>(factor / world);
  }
  for (uint32_t t = 0; t < parameters.size(); ++t) {
    if (parameters[t].copy == nullptr) continue;
    shape.copies.tensors.push_back(t);
    shape.copies.type = parameters[t].copy_dtype;
  }
  shape.frozen = parameters.frozen();
  if (masked) shape.valid = "valid";
  shape.state = arrays["m"].type;
  shape.sizes = ranks.sizes();
  shape.average.native = ranks.native();
  shape.average.levels = ranks.size() == levels.ranks() ? levels.two() : group_levels.two();
  return shape;
}

Status OptimizerData::write_valid_bits(bool frozen_variance) {
  if (!masked) return ok_status();
  std::vector<uint8_t> bits(layout->flat_elements() / 8, 0);
  const auto set = [&bits](uint64_t f) {
    bits[f / 8] = static_cast<uint8_t>(bits[f / 8] | (0x80u >> (f % 8)));
  };
  const StateArray variance = arrays["v"];
  std::vector<float> v;
  const auto write = [&](const TensorRun& run) -> Status {
    const bool padding = run.tensor >= parameters.size();
    const bool by_variance = frozen_variance && !padding && layout->compressed(run.tensor);
    const uint8_t* mask = padding ? nullptr : parameters[run.tensor].mask;
    if (by_variance) {
      v.resize(run.count);
      SOTTO_TRY(read_state(access, variance, run, v.data()));
    }
    return run.each_part([&](const Piece&, uint64_t flat, uint64_t at, uint64_t n) {
      for (uint64_t j = 0; j < n; ++j) {
        const bool valid =
            (mask == nullptr || mask[run.at + at + j] != 0) && !(by_variance && v[at + j] == 0.0f);
        if (valid) set(flat + j);
      }
      return ok_status();
    });
  };
  SOTTO_TRY(for_each_run(*layout, true, write));
  if (!one_bit() && codec && codec->row().scales) SOTTO_TRY(compressed.set_counts(bits));
  return access.upload(arrays.data("valid"), std::span<const uint8_t>(bits));
}

Result<std::vector<uint8_t>> OptimizerData::valid_bits() const {
  const bool scales = codec && codec->row().scales;
  if (!masked || compat() || !scales) return std::vector<uint8_t>();
  return access.download<uint8_t>(arrays.data("valid"), layout->flat_elements() / 8);
}

}  // namespace sotto
