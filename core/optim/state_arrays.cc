#include "core/optim/state_arrays.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

namespace sotto {
namespace {

// First state block of an element of a piece, and the element's place in it.
struct BlockPlace {
  uint64_t block = 0, within = 0;
};
BlockPlace place_of(const Piece& p, uint64_t flat) {
  const uint64_t position = p.block * kNormBlock + p.lane + (flat - p.flat);
  return {position / kStateBlock, position % kStateBlock};
}

template <class T>
T* at(void* elements, uint64_t i) {
  return static_cast<T*>(elements) + i;
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

// Exponents from the largest value of each block; values begin with one. Where all values of a
// block are codes of the next exponent but not of this one, they were rounded with that: m's
// largest value may have been rounded down to where the lower one would be enough for it.
std::vector<uint8_t> exponents_of(const StateArray& array, std::span<const float> values) {
  std::vector<uint8_t> exponents;
  for (size_t first = 0; first < values.size(); first += kStateBlock) {
    const auto block = values.subspan(first, std::min<size_t>(kStateBlock, values.size() - first));
    float most = 0;
    for (const float x : block) most = std::max(most, std::fabs(x));
    const uint8_t exponent = array.variance ? fp8_v_exponent(most) : fp8_m_exponent(most);
    const auto keeps = [&](uint32_t e, float x) {
      const uint32_t base = base_of(array, static_cast<uint8_t>(e));
      return value_of(array, nearest_code(array, x, base), base) == x;
    };
    const bool changed =
        !std::all_of(block.begin(), block.end(), [&](float x) { return keeps(exponent, x); });
    const bool of_next =
        std::all_of(block.begin(), block.end(), [&](float x) { return keeps(exponent + 1u, x); });
    exponents.push_back(static_cast<uint8_t>(exponent + (changed && of_next ? 1 : 0)));
  }
  return exponents;
}

Status write_fp8(const DeviceAccess& access, const StateArray& array, const TensorRun& run,
                 std::span<const float> values) {
  std::vector<float> bounded(values.begin(), values.end());
  for (float& x : bounded) x = within(x, kFp8Limit);
  const std::vector<uint8_t> exponents = exponents_of(array, bounded);
  std::vector<uint8_t> codes(bounded.size());
  for (size_t i = 0; i < codes.size(); ++i)
    codes[i] = nearest_code(array, bounded[i], base_of(array, exponents[i / kStateBlock]));
  bool first = true;
  return run.each_part([&](const Piece& p, uint64_t flat, uint64_t i, uint64_t n) -> Status {
    if (std::exchange(first, false)) {
      SOTTO_TRY(access.upload(at<uint8_t>(array.exponents, place_of(p, flat).block),
                              std::span<const uint8_t>(exponents)));
    }
    return access.upload(at<uint8_t>(array.elements, flat),
                         std::span<const uint8_t>(codes).subspan(i, n));
  });
}

Status read_fp8(const DeviceAccess& access, const StateArray& array, const TensorRun& run,
                float* out) {
  return run.each_part([&](const Piece& p, uint64_t flat, uint64_t i, uint64_t n) -> Status {
    const BlockPlace place = place_of(p, flat);
    SOTTO_ASSIGN(const std::vector<uint8_t> codes,
                 access.download<uint8_t>(at<uint8_t>(array.elements, flat), n));
    SOTTO_ASSIGN(const std::vector<uint8_t> exponents,
                 access.download<uint8_t>(at<uint8_t>(array.exponents, place.block),
                                          (place.within + n + kStateBlock - 1) / kStateBlock));
    for (uint64_t j = 0; j < n; ++j) {
      const uint8_t exponent = exponents[(place.within + j) / kStateBlock];
      out[i + j] = value_of(array, codes[j], base_of(array, exponent));
    }
    return ok_status();
  });
}

}  // namespace

Status StateArrays::add(const DeviceAccess& access, const CompressedLayout& layout,
                        const StateArraySpec& spec) {
  Entry entry{spec, {}, {}};
  SOTTO_ASSIGN(entry.elements, DeviceArray::make(access.device(), spec.bytes));
  if (spec.type == StateType::kFp8) {
    SOTTO_ASSIGN(entry.exponents,
                 DeviceArray::make(access.device(), state_exponent_bytes(layout, spec.type)));
  }
  std::erase_if(entries_, [&](const Entry& e) { return e.spec.name == spec.name; });
  entries_.push_back(std::move(entry));
  return ok_status();
}

const StateArrays::Entry* StateArrays::find(std::string_view name) const {
  const auto it = std::find_if(entries_.begin(), entries_.end(),
                               [&](const Entry& e) { return e.spec.name == name; });
  return it == entries_.end() ? nullptr : &*it;
}

StateArray StateArrays::operator[](std::string_view name) const {
  const Entry* entry = find(name);
  if (entry == nullptr) return {};
  return {entry->spec.type, entry->spec.variance, entry->elements.data(), entry->exponents.data()};
}

uint64_t StateArrays::bytes_of(std::string_view name) const {
  const Entry* entry = find(name);
  return entry == nullptr ? 0 : entry->elements.bytes();
}

uint64_t StateArrays::bytes() const {
  uint64_t bytes = 0;
  for (const Entry& entry : entries_) bytes += entry.elements.bytes() + entry.exponents.bytes();
  return bytes;
}

uint64_t state_element_bytes(const CompressedLayout& layout, StateType type) {
  return layout.flat_elements() * state_type_bytes(type);
}

uint64_t state_exponent_bytes(const CompressedLayout& layout, StateType type) {
  return type == StateType::kFp8 ? layout.tensor_blocks() * kStateBlocksPerNormBlock : 0;
}

Status read_state(const DeviceAccess& access, const StateArray& array, const TensorRun& run,
                  float* out) {
  if (array.type == StateType::kFp8) return read_fp8(access, array, run, out);
  return run.each_part([&](const Piece&, uint64_t flat, uint64_t i, uint64_t n) -> Status {
    if (array.type == StateType::kF32)
      return access.copy_and_wait(out + i, at<float>(array.elements, flat), n * sizeof(float));
    SOTTO_ASSIGN(const std::vector<uint16_t> codes,
                 access.download<uint16_t>(at<uint16_t>(array.elements, flat), n));
    std::transform(codes.begin(), codes.end(), out + i, bf16_to_f32);
    return ok_status();
  });
}

Status write_state(const DeviceAccess& access, const StateArray& array, const TensorRun& run,
                   std::span<const float> values) {
  if (array.type == StateType::kFp8) return write_fp8(access, array, run, values);
  std::vector<uint16_t> codes;
  if (array.type == StateType::kBf16) {
    codes.resize(values.size());
    std::transform(values.begin(), values.end(), codes.begin(),
                   [](float x) { return bf16_rounded(within(x, kBf16Limit), 0x8000u); });
  }
  return run.each_part([&](const Piece&, uint64_t flat, uint64_t i, uint64_t n) {
    return array.type == StateType::kF32
               ? access.upload(at<float>(array.elements, flat), values.subspan(i, n))
               : access.upload(at<uint16_t>(array.elements, flat),
                               std::span<const uint16_t>(codes).subspan(i, n));
  });
}

}  // namespace sotto
