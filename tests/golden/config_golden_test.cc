// Configuration files and what has to come of them; see README.md beside this file.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/config/config.h"

namespace sotto {
namespace {

using Json = nlohmann::json;

const std::filesystem::path kConfigs = std::filesystem::path(SOTTO_TEST_DATA) / "configs";
constexpr std::string_view kExpected = ".expected.json";

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::vector<std::string> config_names() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(kConfigs)) {
    const std::string name = entry.path().filename().string();
    if (name.ends_with(kExpected) || !name.ends_with(".json")) continue;
    names.push_back(name.substr(0, name.size() - 5));
  }
  std::sort(names.begin(), names.end());
  return names;
}

// The report with its list of keys as an object by key.
Json by_key(const std::string& report) {
  Json out = Json::parse(report);
  Json keys = Json::object();
  for (const Json& row : out["keys"]) keys[row["key"].get<std::string>()] = row;
  out["keys"] = std::move(keys);
  return out;
}

void expect_report(const Json& expected, const std::string& text) {
  const Result<Config> config = parse_config(text);
  ASSERT_TRUE(config.ok()) << config.status().text();
  const Status supported = check_supported(*config);
  EXPECT_EQ(supported.text(), expected.at("supported").get<std::string>());
  EXPECT_EQ(Json(config->warnings), expected.value("warnings", Json::array()));

  const Result<std::string> report =
      config_report(text, expected.value("world_size", 0), expected.value("n_params", uint64_t{0}));
  ASSERT_TRUE(report.ok()) << report.status().text();
  const Json json = by_key(*report);
  EXPECT_EQ(json["can_run"], supported.ok());
  EXPECT_EQ(json["reasons"].empty(), supported.ok());
  EXPECT_EQ(json["warnings"], Json(config->warnings));
  for (const auto& [pointer, value] : expected.at("report").items()) {
    const Json::json_pointer at(pointer);
    ASSERT_TRUE(json.contains(at)) << pointer;
    EXPECT_EQ(json.at(at), value) << pointer;
  }
}

class ConfigGolden : public testing::TestWithParam<std::string> {};

TEST_P(ConfigGolden, ComesOutAsExpected) {
  const std::string text = read_file(kConfigs / (GetParam() + ".json"));
  const std::string expected_text = read_file(kConfigs / (GetParam() + std::string(kExpected)));
  ASSERT_FALSE(expected_text.empty()) << "no expectation for " << GetParam();
  const Json expected = Json::parse(expected_text);
  if (!expected.contains("error")) return expect_report(expected, text);
  const Result<std::string> report =
      config_report(text, expected.value("world_size", 0), expected.value("n_params", uint64_t{0}));
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.status().code(), Code::kInvalidArgument);
  EXPECT_EQ(report.status().text(), expected["error"].get<std::string>());
}

TEST(ConfigGoldenFiles, AreThere) { EXPECT_GE(config_names().size(), 20u); }

INSTANTIATE_TEST_SUITE_P(, ConfigGolden, testing::ValuesIn(config_names()),
                         [](const auto& param_info) { return param_info.param; });

}  // namespace
}  // namespace sotto
