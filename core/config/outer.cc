#include "core/config/outer.h"

#include <algorithm>

#include "core/base/text.h"

namespace sotto {
namespace {

// Outer momentum of co2_paper: up to `ranks` ranks, more: the last one.
struct BetaOfWorld {
  uint64_t ranks;
  double beta;
};
constexpr BetaOfWorld kPublishedBetas[] = {{16, 0.0}, {32, 0.2}, {64, 0.5}, {UINT64_MAX, 0.6}};

// `count` runs of tensors, none empty. A run ends with the tensor whose middle is the last one
// before its share of all elements.
std::vector<std::vector<uint64_t>> cut_evenly(std::span<const uint64_t> elements, uint64_t count) {
  uint64_t total = 0;
  for (const uint64_t n : elements) total += n;
  std::vector<std::vector<uint64_t>> fragments(count);
  uint64_t next = 0, done = 0;
  for (uint64_t f = 0; f < count; ++f) {
    const uint64_t end = total / count * (f + 1) + total % count * (f + 1) / count;
    const uint64_t last = elements.size() - (count - 1 - f);  // the others need one each
    while (next < last &&
           (fragments[f].empty() || f + 1 == count || done + elements[next] / 2 < end)) {
      done += elements[next];
      fragments[f].push_back(next++);
    }
  }
  return fragments;
}

}  // namespace

bool OuterConfig::late() const {
  return schedule.delay == schedule.period &&
         (merge.kind == OuterMerge::kReset || merge.kind == OuterMerge::kLerp);
}

bool OuterConfig::averages_parameters() const {
  return rule.kind == OuterRule::kNone && payload == OuterPayload::kParams;
}

double OuterConfig::floor() const {
  return penalty.auto_floor ? 1.25 * rule.alpha / (1 - rule.beta) : 0;
}

std::optional<double> OuterConfig::gain() const {
  if (averages_parameters()) return std::nullopt;
  const double alpha = rule.alpha / penalty.lambda_const;
  const double damping = rule.form == OuterForm::kAnchorDiff ? alpha : 0;
  return alpha / (1 + damping - rule.beta);
}

uint64_t OuterConfig::spacing() const {
  return std::max<uint64_t>(schedule.period / fragments.count, 1);
}

uint64_t OuterConfig::offset(uint64_t fragment) const { return fragment * spacing(); }

OuterConfig OuterConfig::resolved(uint64_t world) const {
  OuterConfig c = *this;
  if (c.rule.beta_by_world) {
    const auto* const row = std::ranges::find_if(
        kPublishedBetas, [&](const BetaOfWorld& b) { return world <= b.ranks; });
    c.rule.beta = row->beta;
  }
  if (c.rule.freshness_by_world) c.rule.freshness = 1.0 / static_cast<double>(world);
  c.rule.beta_by_world = c.rule.freshness_by_world = false;
  return c;
}

Result<std::vector<std::vector<uint64_t>>> OuterConfig::cut(
    std::span<const uint64_t> elements) const {
  if (fragments.count > elements.size()) {
    return invalid_argument(
        "sotto.outer.fragments: found {}, allowed is at most the number of tensors, {}",
        counted(fragments.count, "fragment"), elements.size());
  }
  if (fragments.lists.empty()) return cut_evenly(elements, fragments.count);
  std::vector<std::vector<uint64_t>> lists = fragments.lists;
  std::vector<bool> named(elements.size());
  for (uint64_t f = 0; f < lists.size(); ++f) {
    std::ranges::sort(lists[f]);
    if (lists[f].back() >= elements.size()) {
      return invalid_argument(
          "sotto.outer.fragments[{}]: found tensor {}, allowed is 0 to {}, the last one", f,
          lists[f].back(), elements.size() - 1);
    }
    for (const uint64_t tensor : lists[f]) named[tensor] = true;
  }
  const auto left_out = std::ranges::find(named, false);
  if (left_out == named.end()) return lists;
  return invalid_argument(
      "sotto.outer.fragments: tensor {} is in no fragment; one that is never averaged would "
      "differ between ranks, so add it to a list",
      left_out - named.begin());
}

}  // namespace sotto
