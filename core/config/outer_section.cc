// "sotto.outer": from JSON to OuterConfig.
#include "core/config/outer_section.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "core/base/text.h"
#include "core/config/document.h"
#include "core/config/filter.h"
#include "core/config/sections.h"

namespace sotto {
namespace {

constexpr double kUsualRms = 10;

// A key that other libraries and the specification have here, with advice of its own.
Status refuse_chunk_align(const Json& object, const std::string& path, Findings& findings) {
  if (!object.contains("chunk_align")) return ok_status();
  return findings.fail(
      path + ".chunk_align",
      "a key of the codec; write it there: \"codec\": {\"type\": ..., \"chunk_align\": ...}");
}

OuterConfig of_preset(const OuterPreset& preset) {
  OuterConfig c;
  c.preset = preset.name;
  c.payload = preset.payload;
  c.schedule.period = preset.period;
  c.rule = preset.rule;
  c.penalty = preset.penalty;
  c.penalty.lambda_const = c.penalty.lambda_max = kToBeGiven;
  c.clip = preset.clip;
  c.merge = preset.merge;
  c.codec = preset.codec;
  c.dense_rounds = preset.dense_rounds;
  return c;
}

void read_schedule(OuterReading& r) {
  OuterSchedule& s = r.outer.schedule;
  const Json* period = r.reader.find("period");
  s.automatic = period != nullptr && period->is_string();
  if (s.automatic && s.period == 0) s.period = OuterSchedule().period;
  if (!s.automatic) r.reader.get("period", s.period);
  s.delay = r.preset.delayed ? s.period : 0;
  r.reader.get("delay", s.delay);
  if (s.automatic && r.reader.has("delay")) s.period = std::max(s.period, s.delay + 1);
  r.reader.get("switch_step", s.switch_step);
  r.reader.get("warmup_steps", s.warmup_steps);
  read_word(r.reader, "every_step", s.every_step);
}

void read_rule(OuterReading& r) {
  OuterRuleConfig& rule = r.outer.rule;
  read_word(r.reader, "rule", rule.kind);
  read_word(r.reader, "form", rule.form);
  r.reader.get("alpha", rule.alpha);
  r.reader.get("beta", rule.beta);
  r.reader.get("freshness", rule.freshness);
  r.reader.get("lr_normalised", rule.lr_normalised);
  if (r.reader.has("beta")) rule.beta_by_world = false;
  if (r.reader.has("freshness")) rule.freshness_by_world = false;
}

void read_penalty(OuterReading& r) {
  OuterPenaltyConfig& penalty = r.outer.penalty;
  read_word(r.reader, "penalty", penalty.kind);
  read_word(r.reader, "granularity", penalty.granularity);
  r.reader.get("lambda_const", penalty.lambda_const);
  r.reader.get("lambda_max", penalty.lambda_max);
  r.reader.get("eps", penalty.eps);
  r.reader.get("auto_floor", penalty.auto_floor);
  r.reader.get("consensus_scalars", penalty.consensus_scalars);
}

// The preset's limit and weight are those of its own clip and merge.
void read_clip_and_merge(OuterReading& r) {
  OuterClipConfig& clip = r.outer.clip;
  read_word(r.reader, "clip", clip.kind);
  if (clip.kind != r.preset.clip.kind)
    clip.phi = clip.kind == OuterClip::kRms ? kUsualRms : kToBeGiven;
  r.reader.get("phi", clip.phi);
  read_word(r.reader, "clip_units", clip.units);
  OuterMergeConfig& merge = r.outer.merge;
  read_word(r.reader, "merge", merge.kind);
  if (merge.kind != r.preset.merge.kind) merge.a = kToBeGiven;
  r.reader.get("merge_a", merge.a);
}

// A tensor's index; its path is that of an element of `fragments`.
Result<uint64_t> read_tensor(const Json& value, const std::string& path, Findings& findings) {
  if (value.is_number()) {
    const auto number = value.get<double>();
    if (number >= 0 && number <= kMaxInt && std::trunc(number) == number)
      return static_cast<uint64_t>(number);
  }
  return findings.fail(path, fmt::format("found {}, allowed is the index of a tensor, a whole "
                                         "number >= 0",
                                         json_text(value)));
}

Status read_fragment_lists(const Json& lists, const std::string& path, OuterReading& r) {
  std::map<uint64_t, size_t> owners;
  for (size_t f = 0; f < lists.size(); ++f) {
    const std::string list_path = fmt::format("{}[{}]", path, f);
    if (lists[f].empty())
      return r.findings.fail(list_path, "found [], allowed is a list of at least one tensor");
    std::vector<uint64_t>& fragment = r.outer.fragments.lists.emplace_back();
    for (size_t i = 0; i < lists[f].size(); ++i) {
      const std::string tensor_path = fmt::format("{}[{}]", list_path, i);
      SOTTO_ASSIGN(const uint64_t tensor, read_tensor(lists[f][i], tensor_path, r.findings));
      const auto [owner, is_new] = owners.emplace(tensor, f);
      if (!is_new) {
        return r.findings.fail(
            tensor_path, fmt::format("found tensor {}, which is in fragment {} already; a tensor "
                                     "belongs to one fragment",
                                     tensor, owner->second));
      }
      fragment.push_back(tensor);
    }
  }
  return ok_status();
}

Status read_fragments(OuterReading& r) {
  const Json* value = r.reader.find("fragments");
  if (value == nullptr) return ok_status();
  const std::string path = r.reader.path_of("fragments");
  const auto count = value->is_array() ? static_cast<double>(value->size()) : value->get<double>();
  if (!(count >= 1 && count <= static_cast<double>(kMaxOuterFragments))) {
    return r.findings.fail(
        path, fmt::format("found {}{}, allowed are 1 to {} fragments",
                          value->is_array() ? "a list of " : "", count, kMaxOuterFragments));
  }
  r.outer.fragments.count = static_cast<uint64_t>(count);
  return value->is_array() ? read_fragment_lists(*value, path, r) : ok_status();
}

// {"type": word} for a word.
Status read_codec_word(const std::string& word, const std::string& path, OuterReading& r) {
  OuterConfig& c = r.outer;
  c.codec.reset();
  if (word_position("none", word)) return ok_status();
  const std::string_view types = find_key(ConfigSection::kCodec, "type", ~0u)->words;
  if (!word_position(types, word)) {
    return r.findings.fail(path, fmt::format("found {}, allowed is one of none|{}, or an object{}",
                                             json_text(word), types, placeholder_hint(word)));
  }
  Findings of_word;  // the key is noted as a word
  SOTTO_ASSIGN(c.codec, read_codec(Json{{"type", word}}, path, of_word));
  return ok_status();
}

Status read_payload(OuterReading& r) {
  OuterConfig& c = r.outer;
  read_word(r.reader, "payload", c.payload);
  r.reader.get("dense_rounds", c.dense_rounds);
  read_word(r.reader, "nonfinite", c.nonfinite);
  const Json* value = r.reader.find("codec");
  if (value == nullptr) return ok_status();
  const std::string path = r.reader.path_of("codec");
  if (value->is_string()) return read_codec_word(value->get<std::string>(), path, r);
  SOTTO_ASSIGN(c.codec, read_codec(*value, path, r.findings));
  SOTTO_TRY(refuse_hierarchy(*c.codec, path, r.findings));
  if (!c.codec->compat) return ok_status();
  return r.findings.fail(path + ".mode",
                         "found compat, which is the 1-bit optimizers' published arithmetic; "
                         "allowed here is strict");
}

// The object itself, whose keys are known by "outer." here.
Result<OuterConfig> read_alone(const Json& json, const std::string& text) {
  constexpr std::string_view kPath = "outer";
  Findings findings;
  Result<OuterConfig> outer = read_outer(json, std::string(kPath), findings);
  if (outer.ok()) {
    outer->warnings = std::move(findings.warnings);
    return outer;
  }
  const std::string_view at = findings.error_path;
  return outer.status().with_prefix(
      place_of(position_of_path(text, at.substr(std::min(at.size(), kPath.size() + 1)), 0)));
}

// Whether it has keys of a file, none of which is one of outer steps.
bool is_whole_file(const Json& json) {
  for (const auto& [key, value] : json.items()) {
    if (find_key(ConfigSection::kTop, key, ~0u) != nullptr) return true;
  }
  return false;
}

Result<OuterConfig> parse_outer_text(std::string_view text) {
  SOTTO_ASSIGN(const std::string plain, blank_comments(text));
  SOTTO_ASSIGN(const Json json, parse_document(plain));
  if (!is_whole_file(json)) return read_alone(json, plain);
  Findings findings;
  SOTTO_ASSIGN(Config config, read_file(json, plain, findings));
  if (!config.sotto.outer) {
    return invalid_argument(
        "configuration: sotto.outer: missing; add \"sotto\": {{\"outer\": {{\"preset\": "
        "\"co2\"}}}} or hand over such an object itself");
  }
  // Without those of sotto.checkpoint: exports of an outer optimizer of its own are told their
  // mode.
  config.sotto.outer->warnings = std::move(findings.warnings);
  return std::move(*config.sotto.outer);
}

}  // namespace

std::string OuterReading::path_of(std::initializer_list<std::string_view> keys) const {
  const auto* const given =
      std::ranges::find_if(keys, [&](std::string_view key) { return reader.has(key); });
  return reader.path_of(given == keys.end() ? *keys.begin() : *given);
}

std::string_view outer_word(std::string_view key, uint8_t number) {
  std::string_view words = find_key(ConfigSection::kOuter, key, ~0u)->words;
  for (; number > 1; --number) words.remove_prefix(words.find('|') + 1);
  return words.substr(0, words.find('|'));
}

Result<OuterConfig> read_outer(const Json& object, const std::string& path, Findings& findings) {
  SOTTO_TRY(refuse_chunk_align(object, path, findings));
  SOTTO_ASSIGN(const ObjectReader reader,
               ObjectReader::open(object, ConfigSection::kOuter, ~0u, path, findings));
  const OuterPreset& preset = kOuterPresets[reader.word("preset").value_or(0)];
  OuterReading r{reader, preset, findings, of_preset(preset)};
  read_schedule(r);
  read_rule(r);
  read_penalty(r);
  read_clip_and_merge(r);
  SOTTO_TRY(read_fragments(r));
  SOTTO_TRY(read_payload(r));
  SOTTO_TRY(check_outer_schedule(r));
  settle_idle_outer(r);
  SOTTO_TRY(check_outer_numbers(r));
  SOTTO_TRY(check_outer_choices(r));
  SOTTO_TRY(settle_outer_penalty(r));
  warn_of_outer(r);
  return std::move(r.outer);
}

Result<OuterConfig> parse_outer(std::string_view text) {
  return from_source(text, parse_outer_text);
}

}  // namespace sotto
