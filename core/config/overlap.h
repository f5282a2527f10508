// What sotto_overlap_create and "sotto": {"overlap"} take: how gradients are cut into buckets, and
// what they are on the wire.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "core/base/codec.h"
#include "core/base/dtype.h"

namespace sotto {

// In which order buckets are launched: that of registration or its reverse; or, from the round
// behind the first that has ended well on, the one in which gradients became ready on rank 0.
enum class OverlapOrder : uint8_t { kReversed = 1, kRegistered = 2, kObserved = 3 };
// What becomes of gradients that are missing when a round is finished.
enum class OverlapUnused : uint8_t { kError = 1, kZero = 2 };

struct OverlapConfig {
  uint64_t first_bucket_bytes = uint64_t{1} << 20;  // of gradients, >= 1
  uint64_t bucket_bytes = 25 * (uint64_t{1} << 20);
  OverlapOrder order = OverlapOrder::kReversed;
  OverlapUnused unused = OverlapUnused::kError;
  std::optional<Dtype> wire;           // fp32, fp16 or bf16; nothing: each gradient has its own
  std::optional<CodecSettings> codec;  // of each bucket, in place of `wire`
};

std::string_view overlap_order_name(OverlapOrder order);
std::string_view overlap_unused_name(OverlapUnused unused);

}  // namespace sotto
