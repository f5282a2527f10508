// Any text as a configuration file: an error with a text, or a configuration whose parts agree with
// each other.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "core/config/config.h"
#include "core/config/filter.h"
#include "core/config/schedule.h"

namespace {

// A broken promise has to stop the fuzzer like a crash does.
void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "broken promise: %s\n", what);
  std::abort();
}

void check_filter(std::string_view text) {
  const auto filtered = sotto::blank_comments(text);
  if (!filtered.ok()) return;
  require(filtered->size() == text.size(), "the filter keeps the length");
  for (size_t i = 0; i < text.size(); ++i) {
    require((*filtered)[i] == text[i] || (*filtered)[i] == ' ', "the filter only blanks");
    require((text[i] == '\n') == ((*filtered)[i] == '\n'), "the filter keeps line ends");
  }
  const auto again = sotto::blank_comments(*filtered);
  require(again.ok() && (*again == *filtered ||
                         nlohmann::json::accept(*again) == nlohmann::json::accept(*filtered)),
          "valid JSON passes the filter unchanged");
}

void check_schedule(const sotto::Config& config) {
  const auto groups = config.resolve_groups(config.sotto.param_groups.size() + 1);
  require(groups.ok(), "one more group than the file names can be resolved");
  std::vector<double> base;
  for (const auto& group : *groups) {
    require(group.lamb.min_coeff <= group.lamb.max_coeff, "coefficients in order");
    require(group.beta1 >= 0 && group.beta1 < 1 && group.beta2 >= 0 && group.beta2 < 1,
            "betas in [0, 1)");
    base.push_back(group.lr);
  }
  for (const sotto::Mode mode : {sotto::Mode::kStrict, sotto::Mode::kCompat}) {
    const auto schedule = sotto::LrSchedule::create(config.scheduler, base, mode);
    if (!schedule.ok()) return;
    for (const uint64_t k : {uint64_t{1}, uint64_t{2}, uint64_t{3}, uint64_t{1000000}}) {
      const double rate = schedule->lr_of_update(k, 0);
      require(rate >= 0 && std::isfinite(rate), "a rate is a number and not negative");
      const auto betas = schedule->betas_of_update(k);
      require(!betas || (betas->beta1 >= 0 && betas->beta1 < 1), "a scheduled beta is in [0, 1)");
    }
  }
}

std::string base64url(std::string_view text) {
  constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
  std::string out;
  uint32_t bits = 0;
  int held = 0;
  for (const char c : text) {
    bits = bits << 8 | static_cast<uint8_t>(c);
    for (held += 8; held >= 6; held -= 6) out += kDigits[bits >> (held - 6) & 63];
  }
  if (held > 0) out += kDigits[bits << (6 - held) & 63];
  return out;
}

// An object means the same in both forms.
void check_base64(std::string_view text, bool ok) {
  if (!text.starts_with('{')) return;
  require(sotto::parse_config(base64url(text)).ok() == ok, "base64url changes nothing");
}

// Nothing is replaced: the plain form means the same.
void check_resolve(std::string_view text, bool ok) {
  const auto plain = sotto::config_resolve(text, "");
  if (!plain.ok()) return require(!ok, "a valid file has a plain form");
  require(nlohmann::json::accept(*plain), "the plain form is JSON");
  require(sotto::parse_config(*plain).ok() == ok, "the plain form is as valid as the file");
}

void check_report(std::string_view text, uint64_t world_size, uint64_t n_params, bool supported) {
  const auto report = sotto::config_report(text, world_size, n_params);
  if (!report.ok()) {
    require(!report.status().text().empty(), "an error has a text");
    return;
  }
  const auto json = nlohmann::json::parse(*report, nullptr, false);
  require(json.is_object(), "a report is JSON");
  require(json["can_run"] == supported, "report and check_supported agree");
  require(json["reasons"].empty() == supported, "what cannot run has a reason");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  check_filter(text);
  const auto config = sotto::parse_config(text);
  check_base64(text, config.ok());
  check_resolve(text, config.ok());
  if (!config.ok()) {
    require(config.status().code() == sotto::Code::kInvalidArgument,
            "a bad file is INVALID_ARGUMENT");
    require(config.status().text().starts_with("configuration"), "an error says where");
    require(config.status().text().find('\0') == std::string::npos, "an error is a C string");
    return 0;
  }
  const bool supported = sotto::check_supported(*config).ok();
  check_schedule(*config);
  for (const uint64_t world : {uint64_t{1}, uint64_t{7}, uint64_t{1} << 20}) {
    const auto batch = config->resolve_batch(world);
    if (batch.ok() && *batch) {
      require((*batch)->micro * (*batch)->gas * world == (*batch)->train,
              "the batch equation holds");
    }
    check_report(text, world, uint64_t{1} << 53, supported);
  }
  check_report(text, 0, 0, supported);
  return 0;
}
