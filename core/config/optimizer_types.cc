#include "core/config/optimizer_types.h"

#include <fmt/format.h>

#include <algorithm>

namespace sotto {
namespace {

constexpr OptimizerType kNoOptimizer{.name = "none", .variance = false};

}  // namespace

const OptimizerType& optimizer_type(OptimizerKind kind) {
  const auto* const it = std::ranges::find(kOptimizerTypes, kind, &OptimizerType::kind);
  return it == std::end(kOptimizerTypes) ? kNoOptimizer : *it;
}

std::string optimizer_names(bool (*has)(const OptimizerType&), std::string_view last) {
  std::vector<std::string_view> names;
  for (const OptimizerType& type : kOptimizerTypes) {
    if (has(type)) names.push_back(type.name);
  }
  const std::string_view end = names.back();
  names.pop_back();
  return names.empty() ? std::string(end)
                       : fmt::format("{}{}{}", fmt::join(names, ", "), last, end);
}

std::string_view optimizer_kind_name(OptimizerKind kind) { return optimizer_type(kind).name; }

bool optimizer_is_one_bit(OptimizerKind kind) { return optimizer_type(kind).one_bit; }

}  // namespace sotto
