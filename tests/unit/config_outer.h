// Of the tests of "sotto.outer": what a text is read as, what it is refused with, what is reported.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "core/config/config.h"

namespace sotto {

using Json = nlohmann::json;

inline OuterConfig parse(std::string_view object) {
  Result<OuterConfig> outer = parse_outer(object);
  EXPECT_TRUE(outer.ok()) << object << "\n" << outer.status().text();
  return outer.ok() ? outer.take() : OuterConfig();
}

// What follows the place.
inline std::string error_of(std::string_view object) {
  const Result<OuterConfig> outer = parse_outer(object);
  EXPECT_FALSE(outer.ok()) << object;
  if (outer.ok()) return "";
  EXPECT_EQ(outer.status().code(), Code::kInvalidArgument);
  const std::string text = outer.status().text();
  return text.substr(std::min(text.size(), text.find("outer")));
}

inline Config parse_file(const std::string& outer, const std::string& rest = "") {
  Result<Config> config = parse_config(fmt::format(
      R"({{"optimizer": {{"type": "AdamW"}}, {}"sotto": {{"outer": {}}}}})", rest, outer));
  EXPECT_TRUE(config.ok()) << config.status().text();
  return config.ok() ? config.take() : Config();
}

inline KeyNote note_of(const Config& config, std::string_view path) {
  for (const KeyNote& note : config.keys) {
    if (note.path == path) return note;
  }
  return {"", "", "absent", ""};
}

inline Json report_of(const std::string& text, uint64_t world = 0, uint64_t n = 0) {
  const Result<std::string> report = config_report(text, world, n);
  EXPECT_TRUE(report.ok()) << report.status().text();
  return report.ok() ? Json::parse(*report) : Json();
}

inline Json report_of_outer(const std::string& outer, uint64_t world = 0, uint64_t n = 0) {
  return report_of(
      fmt::format(R"({{"optimizer": {{"type": "AdamW"}}, "sotto": {{"outer": {}}}}})", outer),
      world, n);
}

}  // namespace sotto
