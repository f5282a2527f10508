#include "core/optim/state_arrays.h"

#include <algorithm>
#include <cmath>

#include "core/group/compressed_state.h"

namespace sotto {
namespace {

// Calls f(flat, element in the order of the tensors, state block) for every element.
template <class F>
void for_each_element(const CompressedLayout& layout, F&& f) {
  uint64_t first = 0;
  for (uint32_t t = 0; t < layout.tensors().size(); ++t) {
    for (const Piece& p : layout.tensor_pieces(t)) {
      const uint64_t position = p.block * kNormBlock + p.lane;
      for (uint64_t j = 0; j < p.count; ++j)
        f(p.flat + j, first + p.offset + j, (position + j) / kStateBlock);
    }
    first += layout.tensors()[t].count;
  }
}

uint32_t base_of(const StateArray& array, uint8_t exponent) {
  return fp8_base(exponent, array.variance ? kFp8LargestV : kFp8LargestM);
}
uint8_t nearest_code(const StateArray& array, float x, uint32_t base) {
  constexpr uint32_t kHalf = 1u << 19;
  return array.variance ? fp8_v_code(x, base, kHalf) : fp8_m_code(x, base, kHalf);
}
float value_of(const StateArray& array, uint8_t code, uint32_t base) {
  return array.variance ? fp8_v_value(code, base) : fp8_m_value(code, base);
}

// Exponents from the largest value of each block. Where all values of a block are codes of the next
// exponent but not of this one, they were rounded with that: m's largest value may have been
// rounded down to where the lower one would be enough for it.
std::vector<uint8_t> exponents_of(const CompressedLayout& layout, const StateArray& array,
                                  const std::vector<float>& values) {
  std::vector<float> most(state_exponent_bytes(layout, array.type), 0.0f);
  for_each_element(layout, [&](uint64_t, uint64_t i, uint64_t block) {
    most[block] = std::max(most[block], std::fabs(values[i]));
  });
  std::vector<uint8_t> exponents(most.size());
  std::transform(most.begin(), most.end(), exponents.begin(),
                 array.variance ? fp8_v_exponent : fp8_m_exponent);
  std::vector<uint8_t> changed(most.size(), 0), of_next(most.size(), 1);
  for_each_element(layout, [&](uint64_t, uint64_t i, uint64_t block) {
    const auto keeps = [&](uint32_t exponent) {
      const uint32_t base = base_of(array, static_cast<uint8_t>(exponent));
      return value_of(array, nearest_code(array, values[i], base), base) == values[i];
    };
    if (!keeps(exponents[block])) changed[block] = 1;
    if (!keeps(exponents[block] + 1u)) of_next[block] = 0;
  });
  for (size_t b = 0; b < exponents.size(); ++b)
    exponents[b] = static_cast<uint8_t>(exponents[b] + (changed[b] & of_next[b]));
  return exponents;
}

Status write_fp8(const DeviceAccess& access, const CompressedLayout& layout,
                 const StateArray& array, const std::vector<float>& values) {
  std::vector<float> bounded(values);
  for (float& x : bounded) x = within(x, kFp8Limit);
  const std::vector<uint8_t> exponents = exponents_of(layout, array, bounded);
  std::vector<uint8_t> codes(layout.flat_elements(), 0);
  for_each_element(layout, [&](uint64_t flat, uint64_t i, uint64_t block) {
    codes[flat] = nearest_code(array, bounded[i], base_of(array, exponents[block]));
  });
  SOTTO_TRY(access.upload(array.exponents, std::span<const uint8_t>(exponents)));
  return access.upload(array.elements, std::span<const uint8_t>(codes));
}

Result<std::vector<float>> read_fp8(const DeviceAccess& access, const CompressedLayout& layout,
                                    const StateArray& array) {
  SOTTO_ASSIGN(const std::vector<uint8_t> codes,
               access.download<uint8_t>(array.elements, layout.flat_elements()));
  SOTTO_ASSIGN(const std::vector<uint8_t> exponents,
               access.download<uint8_t>(array.exponents, state_exponent_bytes(layout, array.type)));
  std::vector<float> out(layout.elements());
  for_each_element(layout, [&](uint64_t flat, uint64_t i, uint64_t block) {
    out[i] = value_of(array, codes[flat], base_of(array, exponents[block]));
  });
  return out;
}

}  // namespace

uint64_t state_element_bytes(const CompressedLayout& layout, StateType type) {
  return layout.flat_elements() * state_type_bytes(type);
}

uint64_t state_exponent_bytes(const CompressedLayout& layout, StateType type) {
  return type == StateType::kFp8 ? layout.tensor_blocks() * kStateBlocksPerNormBlock : 0;
}

Result<std::vector<float>> read_state(const DeviceAccess& access, const CompressedLayout& layout,
                                      const StateArray& array) {
  switch (array.type) {
    case StateType::kF32: {
      SOTTO_ASSIGN(const std::vector<float> flat,
                   access.download<float>(array.elements, layout.flat_elements()));
      return to_tensors(layout, flat);
    }
    case StateType::kBf16: {
      SOTTO_ASSIGN(const std::vector<uint16_t> flat,
                   access.download<uint16_t>(array.elements, layout.flat_elements()));
      std::vector<float> out(layout.elements());
      for_each_element(layout,
                       [&](uint64_t f, uint64_t i, uint64_t) { out[i] = bf16_to_f32(flat[f]); });
      return out;
    }
    case StateType::kFp8: return read_fp8(access, layout, array);
  }
  return std::vector<float>();
}

Status write_state(const DeviceAccess& access, const CompressedLayout& layout,
                   const StateArray& array, const std::vector<float>& values) {
  switch (array.type) {
    case StateType::kF32: {
      const std::vector<float> flat = to_flat(layout, values);
      return access.upload(array.elements, std::span<const float>(flat));
    }
    case StateType::kBf16: {
      std::vector<uint16_t> flat(layout.flat_elements(), 0);
      for_each_element(layout, [&](uint64_t f, uint64_t i, uint64_t) {
        flat[f] = bf16_rounded(within(values[i], kBf16Limit), 0x8000u);
      });
      return access.upload(array.elements, std::span<const uint16_t>(flat));
    }
    case StateType::kFp8: return write_fp8(access, layout, array, values);
  }
  return ok_status();
}

}  // namespace sotto
