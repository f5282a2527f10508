#include "core/config/optimizer_types.h"

#include <algorithm>

namespace sotto {
namespace {

constexpr OptimizerType kOptimizerTypes[] = {
    {.kind = OptimizerKind::kSgd,
     .name = "SGD",
     .variance = false,
     .narrow_state = true,
     .has_betas = false},
    {.kind = OptimizerKind::kAdam, .name = "Adam", .narrow_state = true},
    {.kind = OptimizerKind::kAdamW, .name = "AdamW", .narrow_state = true},
    {.kind = OptimizerKind::kLamb, .name = "Lamb"},
    {.kind = OptimizerKind::kOneBitAdam,
     .name = "OneBitAdam",
     .one_bit = true,
     .freezes_at_step = true},
    {.kind = OptimizerKind::kZeroOneAdam, .name = "ZeroOneAdam", .one_bit = true},
    {.kind = OptimizerKind::kOneBitLamb,
     .name = "OneBitLamb",
     .one_bit = true,
     .scales_all = true,
     .freezes_at_step = true},
};
constexpr OptimizerType kNoOptimizer{.name = "none", .variance = false};

}  // namespace

std::span<const OptimizerType> optimizer_types() { return kOptimizerTypes; }

const OptimizerType& optimizer_type(OptimizerKind kind) {
  const auto* const it = std::find_if(std::begin(kOptimizerTypes), std::end(kOptimizerTypes),
                                      [kind](const OptimizerType& t) { return t.kind == kind; });
  return it == std::end(kOptimizerTypes) ? kNoOptimizer : *it;
}

std::string_view optimizer_kind_name(OptimizerKind kind) { return optimizer_type(kind).name; }

bool optimizer_is_one_bit(OptimizerKind kind) { return optimizer_type(kind).one_bit; }

}  // namespace sotto
