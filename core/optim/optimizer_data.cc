#include "core/optim/optimizer_data.h"

namespace sotto {

Status OptimizerData::lay_out(bool masks_zero_variance) {
  std::vector<LayoutTensor> tensors;
  for (const ParamSpec& p : parameters)
    tensors.push_back({p.count, p.group, !groups[p.group].non_freeze});
  const auto world = static_cast<uint32_t>(comm->size());
  const bool half = config.half_gradients() || parameters.gradients() != Dtype::kF32;
  codec = config.compression(world, half);
  const CodecSettings settings = codec.value_or(CodecSettings{});
  // One rank averages nothing and needs no padding.
  std::optional<uint32_t> padding_group;
  if (compat() && world > 1) padding_group = static_cast<uint32_t>(groups.size());
  layout = std::make_unique<CompressedLayout>(
      std::move(tensors), codec ? world : 1, settings.chunk_align, settings.granularity,
      settings.bucket_elements, settings.row().scales, padding_group);
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
    SOTTO_ASSIGN(compressed, CompressedState::make(*comm, access, *layout, *codec));
  }
  return write_valid_bits(false);
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
