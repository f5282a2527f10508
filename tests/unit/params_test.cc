#include "core/base/params.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "core/base/text.h"

namespace sotto {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

Environment environment_of(std::map<std::string, std::string> variables) {
  Environment environment;
  environment.get = [variables](const std::string& name) -> std::optional<std::string> {
    const auto it = variables.find(name);
    if (it == variables.end()) return std::nullopt;
    return it->second;
  };
  environment.names = [variables] {
    std::vector<std::string> names;
    for (const auto& [name, value] : variables) names.push_back(name);
    return names;
  };
  return environment;
}

Result<Params> read(std::map<std::string, std::string> variables) {
  return Params::read(environment_of(std::move(variables)));
}

TEST(Params, DefaultsOfAnEmptyEnvironment) {
  const Result<Params> p = read({});
  ASSERT_TRUE(p.ok());
  EXPECT_EQ(p->log, "warn");
  EXPECT_EQ(p->transport, "auto");
  EXPECT_EQ(p->timeout_us, 300000000);
  EXPECT_EQ(p->cpu_threads, 0);
  EXPECT_EQ(p->simd, "auto");
  EXPECT_EQ(p->segment_bytes, 0);
  EXPECT_EQ(p->rate_limit_mbit, 0.0);
  EXPECT_EQ(p->listen, "");
  EXPECT_EQ(p->listen_port, 0);
  EXPECT_EQ(p->advertise, "");
  EXPECT_EQ(p->rendezvous, "");
  EXPECT_EQ(p->rank, -1);
  EXPECT_EQ(p->world_size, 0);
  EXPECT_EQ(p->local_rank, -1);
  EXPECT_EQ(p->local_size, 0);
  EXPECT_EQ(p->host_id, "");
  EXPECT_EQ(p->heartbeat_ms, 1000);
  EXPECT_EQ(p->silence_limit_ms, 0);
  EXPECT_EQ(p->tcp_user_timeout_ms, 0);
  EXPECT_EQ(p->spin_us, 30);
  EXPECT_EQ(p->eager_bytes, 65536);
  EXPECT_THAT(p->warnings, IsEmpty());
  EXPECT_THAT(p->from_env, IsEmpty());
}

TEST(Params, EveryVariableReachesItsField) {
  const Result<Params> p = read({{"SOTTO_LOG", "trace"},
                                 {"SOTTO_TRANSPORT", "tcp"},
                                 {"SOTTO_TIMEOUT_US", "5"},
                                 {"SOTTO_CPU_THREADS", "3"},
                                 {"SOTTO_SIMD", "avx2"},
                                 {"SOTTO_SEGMENT_BYTES", "8192"},
                                 {"SOTTO_RATE_LIMIT_MBIT", "12.5"},
                                 {"SOTTO_LISTEN", "any"},
                                 {"SOTTO_LISTEN_PORT", "4001"},
                                 {"SOTTO_ADVERTISE", "203.0.113.5:4002"},
                                 {"SOTTO_RENDEZVOUS", "tcp://127.0.0.1:4000"},
                                 {"SOTTO_RANK", "2"},
                                 {"SOTTO_WORLD_SIZE", "4"},
                                 {"SOTTO_LOCAL_RANK", "1"},
                                 {"SOTTO_LOCAL_SIZE", "2"},
                                 {"SOTTO_HOST_ID", "rack 1, node 7"},
                                 {"SOTTO_HEARTBEAT_MS", "250"},
                                 {"SOTTO_SILENCE_LIMIT_MS", "500"},
                                 {"SOTTO_TCP_USER_TIMEOUT_MS", "4000"},
                                 {"SOTTO_SPIN_US", "0"},
                                 {"SOTTO_EAGER_BYTES", "0"}});
  ASSERT_TRUE(p.ok()) << p.status().text();
  EXPECT_EQ(p->log, "trace");
  EXPECT_EQ(p->transport, "tcp");
  EXPECT_EQ(p->timeout_us, 5);
  EXPECT_EQ(p->cpu_threads, 3);
  EXPECT_EQ(p->simd, "avx2");
  EXPECT_EQ(p->segment_bytes, 8192);
  EXPECT_EQ(p->rate_limit_mbit, 12.5);
  EXPECT_EQ(p->listen, "any");
  EXPECT_EQ(p->listen_port, 4001);
  EXPECT_EQ(p->advertise, "203.0.113.5:4002");
  EXPECT_EQ(p->rendezvous, "tcp://127.0.0.1:4000");
  EXPECT_EQ(p->rank, 2);
  EXPECT_EQ(p->world_size, 4);
  EXPECT_EQ(p->local_rank, 1);
  EXPECT_EQ(p->local_size, 2);
  EXPECT_EQ(p->host_id, "rack 1, node 7");
  EXPECT_EQ(p->heartbeat_ms, 250);
  EXPECT_EQ(p->silence_limit_ms, 500);
  EXPECT_EQ(p->tcp_user_timeout_ms, 4000);
  EXPECT_EQ(p->spin_us, 0);
  EXPECT_EQ(p->eager_bytes, 0);
  EXPECT_EQ(p->from_env.size(), 21u);
}

TEST(Params, EmptyValueCountsAsUnset) {
  const Result<Params> p = read({{"SOTTO_RANK", ""}, {"SOTTO_LOG", ""}});
  ASSERT_TRUE(p.ok());
  EXPECT_EQ(p->rank, -1);
  EXPECT_EQ(p->log, "warn");
  EXPECT_THAT(p->from_env, IsEmpty());
}

struct BadValue {
  const char* name;
  const char* value;
  const char* allowed;
};

class ParamsRefused : public testing::TestWithParam<BadValue> {};

TEST_P(ParamsRefused, NamesVariableValueAndWhatIsAllowed) {
  const BadValue& bad = GetParam();
  const Result<Params> p = read({{bad.name, bad.value}});
  ASSERT_FALSE(p.ok());
  EXPECT_EQ(p.status().code(), Code::kInvalidArgument);
  EXPECT_EQ(p.status().text(), fmt::format("environment variable {} is \"{}\", allowed is {}",
                                           bad.name, printable(bad.value), bad.allowed));
}

INSTANTIATE_TEST_SUITE_P(
    , ParamsRefused,
    testing::Values(
        BadValue{"SOTTO_LOG", "loud", "one of error|warn|info|debug|trace"},
        BadValue{"SOTTO_LOG", "warn|info", "one of error|warn|info|debug|trace"},
        BadValue{"SOTTO_LOG", "WARN", "one of error|warn|info|debug|trace"},
        BadValue{"SOTTO_SIMD", "avx", "one of auto|scalar|sse4|avx2|avx512"},
        BadValue{"SOTTO_TIMEOUT_US", "-2", "a whole number from -1 to 9223372036854775"},
        BadValue{"SOTTO_TIMEOUT_US", "99999999999999999999",
                 "a whole number from -1 to 9223372036854775"},
        BadValue{"SOTTO_SEGMENT_BYTES", "8191", "0 or a whole number from 8192 to 16777216"},
        BadValue{"SOTTO_SEGMENT_BYTES", "16777217", "0 or a whole number from 8192 to 16777216"},
        BadValue{"SOTTO_SEGMENT_BYTES", "64k", "0 or a whole number from 8192 to 16777216"},
        BadValue{"SOTTO_RANK", "1.5", "a whole number from -1 to 1048575"},
        BadValue{"SOTTO_RANK", " 1", "a whole number from -1 to 1048575"},
        BadValue{"SOTTO_RATE_LIMIT_MBIT", "nan", "a number from 0 to 1000000000"},
        BadValue{"SOTTO_RATE_LIMIT_MBIT", "-1", "a number from 0 to 1000000000"},
        BadValue{"SOTTO_RATE_LIMIT_MBIT", "fast", "a number from 0 to 1000000000"},
        BadValue{"SOTTO_SILENCE_LIMIT_MS", "99", "0 or a whole number from 100 to 3600000"},
        BadValue{"SOTTO_SILENCE_LIMIT_MS", "-1", "0 or a whole number from 100 to 3600000"},
        BadValue{"SOTTO_SILENCE_LIMIT_MS", "0.5", "0 or a whole number from 100 to 3600000"},
        BadValue{"SOTTO_SILENCE_LIMIT_MS", "3600001", "0 or a whole number from 100 to 3600000"},
        BadValue{"SOTTO_TCP_USER_TIMEOUT_MS", "50", "0 or a whole number from 100 to 3600000"},
        BadValue{"SOTTO_LISTEN", "eth0\n", "printable ASCII text"},
        BadValue{"SOTTO_HOST_ID", "node\t7", "printable ASCII text"},
        BadValue{"SOTTO_LISTEN_PORT", "65536", "a whole number from 0 to 65535"},
        BadValue{"SOTTO_ADVERTISE", "10.0.0.1\t", "printable ASCII text"}));

TEST(Params, UnknownNamesWarnWithTheNearestKnownOne) {
  const Result<Params> p =
      read({{"SOTTO_TIMEOUT", "1"}, {"SOTTO_SIMDD", ""}, {"OTHER", "x"}, {"SOTTO", "y"}});
  ASSERT_TRUE(p.ok());
  EXPECT_THAT(p->warnings, ElementsAre("environment variable SOTTO_SIMDD is not known and has no "
                                       "effect; the nearest known one is SOTTO_SIMD",
                                       "environment variable SOTTO_TIMEOUT is not known and has no "
                                       "effect; the nearest known one is "
                                       "SOTTO_TIMEOUT_US"));
}

TEST(Params, ListingIsJsonWithSourceAndEscapes) {
  const Result<Params> p = read({{"SOTTO_LISTEN", "a\"b\\c"}, {"SOTTO_RATE_LIMIT_MBIT", "0.5"}});
  ASSERT_TRUE(p.ok());
  const auto json = nlohmann::json::parse(p->to_json());
  ASSERT_EQ(json.size(), 31u);
  std::map<std::string, nlohmann::json> rows;
  for (const auto& row : json) rows[row["name"]] = row;
  EXPECT_EQ(rows["SOTTO_LISTEN"]["value"], "a\"b\\c");
  EXPECT_EQ(rows["SOTTO_LISTEN"]["source"], "env");
  EXPECT_EQ(rows["SOTTO_LISTEN"]["default"], "");
  EXPECT_EQ(rows["SOTTO_RATE_LIMIT_MBIT"]["value"], 0.5);
  EXPECT_EQ(rows["SOTTO_TIMEOUT_US"]["value"], 300000000);
  EXPECT_EQ(rows["SOTTO_TIMEOUT_US"]["source"], "default");
  for (const auto& row : json) EXPECT_FALSE(row["text"].get<std::string>().empty()) << row["name"];
}

TEST(Params, ProcessEnvironmentIsTheRealOne) {
  const Environment environment = process_environment();
  ASSERT_EQ(setenv("SOTTO_TEST_ONLY", "17", 1), 0);
  EXPECT_EQ(environment.get("SOTTO_TEST_ONLY"), "17");
  EXPECT_THAT(environment.names(), testing::Contains("SOTTO_TEST_ONLY"));
  ASSERT_EQ(unsetenv("SOTTO_TEST_ONLY"), 0);
  EXPECT_EQ(environment.get("SOTTO_TEST_ONLY"), std::nullopt);
}

TEST(Text, EditDistance) {
  EXPECT_EQ(edit_distance("", ""), 0u);
  EXPECT_EQ(edit_distance("abc", ""), 3u);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3u);
  EXPECT_EQ(edit_distance("cuda-aware", "cuda_aware"), 1u);
  EXPECT_EQ(edit_distance("ab", "ba"), 2u);
  EXPECT_EQ(edit_distance("A", "a"), 1u);
}

TEST(Text, NearestWord) {
  const std::string_view words[] = {"alpha", "beta", "beth"};
  EXPECT_EQ(nearest_word("bet", words), "beta");
  EXPECT_EQ(nearest_word("alp", words), "alpha");
  EXPECT_EQ(nearest_word("x", {}), "");
}

TEST(Text, PrintableKeepsUtf8AndEscapesTheRest) {
  EXPECT_EQ(printable("plain"), "plain");
  EXPECT_EQ(printable("a\nb\x7f"), "a\\x0ab\\x7f");
  EXPECT_EQ(printable("gr\xc3\xbc\xc3\x9f"), "gr\xc3\xbc\xc3\x9f");
  EXPECT_EQ(printable("\xff\xc3"), "\\xff\\xc3");
  EXPECT_EQ(printable("\xc0\xaf"), "\\xc0\\xaf");           // overlong
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");  // surrogate
  EXPECT_EQ(printable(std::string_view("\0", 1)), "\\x00");
  EXPECT_EQ(printable("abcdef", 3), "abc...");
  EXPECT_EQ(printable("ab\xc3\xbc", 3), "ab...");  // never half a character
  EXPECT_EQ(printable("abc", 3), "abc");
}

}  // namespace
}  // namespace sotto
