#include "core/outer/settings.h"

#include <vector>

#include "core/optim/settings.h"

namespace sotto {

std::string outer_settings_text(const OuterConfig& c, const ParameterSet& parameters, bool all) {
  std::string text;
  const auto add = [&](std::string_view key, const auto& value) {
    text += fmt::format("sotto.outer.{}={}\n", key, value);
  };
  add("parameters", parameters.registration_hash());
  add("payload", outer_word("payload", c.payload));
  const OuterSchedule& s = c.schedule;
  s.automatic ? add("period", "auto") : add("period", s.period);
  s.automatic&& s.follows() ? add("delay", "period") : add("delay", s.delay);
  add("switch_step", s.switch_step);
  add("warmup_steps", s.warmup_steps);
  if (all) add("every_step", outer_word("every_step", s.every_step));
  add("rule", outer_word("rule", c.rule.kind));
  add("form", outer_word("form", c.rule.form));
  if (all) add("alpha", c.rule.alpha);
  if (all) add("beta", c.rule.beta);
  add("freshness", c.rule.freshness);
  add("lr_normalised", c.rule.lr_normalised);
  add("penalty", outer_word("penalty", c.penalty.kind));
  add("granularity", outer_word("granularity", c.penalty.granularity));
  if (all) add("lambda_const", c.penalty.lambda_const);
  if (all) add("lambda_max", c.penalty.lambda_max);
  if (all) add("eps", c.penalty.eps);
  if (all) add("auto_floor", c.penalty.auto_floor);
  add("consensus_scalars", c.penalty.consensus_scalars);
  add("clip", outer_word("clip", c.clip.kind));
  add("clip_units", outer_word("clip_units", c.clip.units));
  if (all) add("phi", c.clip.phi);
  add("merge", outer_word("merge", c.merge.kind));
  add("merge_a", c.merge.a);
  if (all) add("nonfinite", outer_word("nonfinite", c.nonfinite));
  add("dense_rounds", c.dense_rounds);
  if (all) text += fmt::format("sotto.hierarchy={}\n", hierarchy_name(c.hierarchy));
  text += codec_settings("sotto.outer.codec", c.codec, all);
  std::vector<uint64_t> counts;
  for (const ParamSpec& p : parameters) counts.push_back(p.count);
  if (const auto cut = c.cut(counts); cut.ok()) {
    for (const std::vector<uint64_t>& fragment : *cut) {
      std::string numbers;
      for (const uint64_t tensor : fragment)
        numbers += fmt::format("{}{}", numbers.empty() ? "" : ", ", tensor);
      add("fragments", numbers);
    }
  }
  return text;
}

}  // namespace sotto
