#include "core/base/params.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "core/base/json_text.h"
#include "core/base/text.h"
#include "tests/support/variables.h"
#include "transports/nccl/params.h"
#include "transports/shm/params.h"
#include "transports/tcp/params.h"

namespace sotto {
namespace {

using test::environment_of;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// All lists, as a context reads them.
struct Read {
  explicit Read(std::map<std::string, std::string> variables)
      : reader(environment_of(std::move(variables))) {}
  // Names that were set.
  std::vector<std::string> from_env() const {
    std::vector<std::string> names;
    for (const auto& row : nlohmann::json::parse(reader.to_json())) {
      if (row["source"] == "env") names.push_back(row["name"]);
    }
    return names;
  }
  ParamReader reader;
  const Params common = reader.read<Params>();
  const nccl::Params nccl = reader.read<nccl::Params>();
  const shm::Params shm = reader.read<shm::Params>();
  const tcp::Params tcp = reader.read<tcp::Params>();
};

Read read(std::map<std::string, std::string> variables) { return Read(std::move(variables)); }

TEST(Params, DefaultsOfAnEmptyEnvironment) {
  const Read p = read({});
  ASSERT_TRUE(p.reader.status().ok()) << p.reader.status().text();
  EXPECT_EQ(p.common.log, "warn");
  EXPECT_EQ(p.common.transport, "auto");
  EXPECT_EQ(p.common.timeout_us, 300000000);
  EXPECT_EQ(p.common.cpu_threads, 0);
  EXPECT_EQ(p.common.simd, "auto");
  EXPECT_EQ(p.common.segment_bytes, 0);
  EXPECT_EQ(p.tcp.rate_limit_mbit, 0.0);
  EXPECT_EQ(p.tcp.listen, "");
  EXPECT_EQ(p.tcp.listen_port, 0);
  EXPECT_EQ(p.tcp.advertise, "");
  EXPECT_EQ(p.common.rendezvous, "");
  EXPECT_EQ(p.common.rank, -1);
  EXPECT_EQ(p.common.world_size, 0);
  EXPECT_EQ(p.common.local_rank, -1);
  EXPECT_EQ(p.common.local_size, 0);
  EXPECT_EQ(p.common.host_id, "");
  EXPECT_EQ(p.common.hierarchy, "flat");
  EXPECT_EQ(p.common.heartbeat_ms, 1000);
  EXPECT_EQ(p.common.silence_limit_ms, 0);
  EXPECT_EQ(p.tcp.tcp_user_timeout_ms, 0);
  EXPECT_EQ(p.common.spin_us, 30);
  EXPECT_EQ(p.common.eager_bytes, 65536);
  EXPECT_EQ(p.tcp.connections, 2);
  EXPECT_EQ(p.tcp.send_buffer_bytes, 0);
  EXPECT_EQ(p.tcp.receive_buffer_bytes, 0);
  EXPECT_EQ(p.tcp.congestion_control, "");
  EXPECT_EQ(p.nccl.nccl_library, "");
  EXPECT_EQ(p.shm.shm_ring_bytes, 524288);
  EXPECT_EQ(p.nccl.nccl_native, "exact");
  EXPECT_THAT(p.reader.warnings(), IsEmpty());
  EXPECT_THAT(p.from_env(), IsEmpty());
}

TEST(Params, EveryVariableReachesItsField) {
  const Read p = read({{"SOTTO_LOG", "trace"},
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
                       {"SOTTO_HIERARCHY", "leader"},
                       {"SOTTO_HEARTBEAT_MS", "250"},
                       {"SOTTO_SILENCE_LIMIT_MS", "500"},
                       {"SOTTO_TCP_USER_TIMEOUT_MS", "4000"},
                       {"SOTTO_SPIN_US", "0"},
                       {"SOTTO_EAGER_BYTES", "0"},
                       {"SOTTO_TRACE", "steps"},
                       {"SOTTO_LIBRARY", "/lib/libsotto.so"},
                       {"SOTTO_CONNECTIONS", "4"},
                       {"SOTTO_SEND_BUFFER_BYTES", "1"},
                       {"SOTTO_RECEIVE_BUFFER_BYTES", "2"},
                       {"SOTTO_CONGESTION_CONTROL", "bbr"},
                       {"SOTTO_NCCL_LIBRARY", "/lib/libnccl.so.2"},
                       {"SOTTO_SHM_RING_BYTES", "65536"},
                       {"SOTTO_NCCL_NATIVE", "all"}});
  ASSERT_TRUE(p.reader.status().ok()) << p.reader.status().text();
  EXPECT_EQ(p.common.log, "trace");
  EXPECT_EQ(p.common.transport, "tcp");
  EXPECT_EQ(p.common.timeout_us, 5);
  EXPECT_EQ(p.common.cpu_threads, 3);
  EXPECT_EQ(p.common.simd, "avx2");
  EXPECT_EQ(p.common.segment_bytes, 8192);
  EXPECT_EQ(p.tcp.rate_limit_mbit, 12.5);
  EXPECT_EQ(p.tcp.listen, "any");
  EXPECT_EQ(p.tcp.listen_port, 4001);
  EXPECT_EQ(p.tcp.advertise, "203.0.113.5:4002");
  EXPECT_EQ(p.common.rendezvous, "tcp://127.0.0.1:4000");
  EXPECT_EQ(p.common.rank, 2);
  EXPECT_EQ(p.common.world_size, 4);
  EXPECT_EQ(p.common.local_rank, 1);
  EXPECT_EQ(p.common.local_size, 2);
  EXPECT_EQ(p.shm.shm_ring_bytes, 65536);
  EXPECT_EQ(p.common.host_id, "rack 1, node 7");
  EXPECT_EQ(p.common.hierarchy, "leader");
  EXPECT_EQ(p.common.heartbeat_ms, 250);
  EXPECT_EQ(p.common.silence_limit_ms, 500);
  EXPECT_EQ(p.tcp.tcp_user_timeout_ms, 4000);
  EXPECT_EQ(p.common.spin_us, 0);
  EXPECT_EQ(p.common.eager_bytes, 0);
  EXPECT_EQ(p.common.trace, "steps");
  EXPECT_EQ(p.common.library, "/lib/libsotto.so");
  EXPECT_EQ(p.tcp.connections, 4);
  EXPECT_EQ(p.tcp.send_buffer_bytes, 1);
  EXPECT_EQ(p.tcp.receive_buffer_bytes, 2);
  EXPECT_EQ(p.tcp.congestion_control, "bbr");
  EXPECT_EQ(p.nccl.nccl_library, "/lib/libnccl.so.2");
  EXPECT_EQ(p.nccl.nccl_native, "all");
  EXPECT_EQ(p.from_env().size(), 31u);
}

TEST(Params, EmptyValueCountsAsUnset) {
  const Read p = read({{"SOTTO_RANK", ""}, {"SOTTO_LOG", ""}});
  ASSERT_TRUE(p.reader.status().ok()) << p.reader.status().text();
  EXPECT_EQ(p.common.rank, -1);
  EXPECT_EQ(p.common.log, "warn");
  EXPECT_THAT(p.from_env(), IsEmpty());
}

struct BadValue {
  const char* name;
  const char* value;
  const char* allowed;
};

class ParamsRefused : public testing::TestWithParam<BadValue> {};

TEST_P(ParamsRefused, NamesVariableValueAndWhatIsAllowed) {
  const BadValue& bad = GetParam();
  const Read p = read({{bad.name, bad.value}});
  ASSERT_FALSE(p.reader.status().ok());
  EXPECT_EQ(p.reader.status().code(), Code::kInvalidArgument);
  EXPECT_EQ(p.reader.status().text(),
            fmt::format("environment variable {} is \"{}\", allowed is {}", bad.name,
                        printable(bad.value), bad.allowed));
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
        BadValue{"SOTTO_SHM_RING_BYTES", "4096", "a whole number from 16384 to 268435456"},
        BadValue{"SOTTO_TCP_USER_TIMEOUT_MS", "50", "0 or a whole number from 100 to 3600000"},
        BadValue{"SOTTO_CONNECTIONS", "0", "a whole number from 1 to 64"},
        BadValue{"SOTTO_NCCL_NATIVE", "some", "one of off|exact|all"},
        BadValue{"SOTTO_LISTEN", "eth0\n", "printable ASCII text"},
        BadValue{"SOTTO_HIERARCHY", "shard", "one of flat|sharded|leader|auto"},
        BadValue{"SOTTO_HOST_ID", "node\t7", "printable ASCII text"},
        BadValue{"SOTTO_LISTEN_PORT", "65536", "a whole number from 0 to 65535"},
        BadValue{"SOTTO_ADVERTISE", "10.0.0.1\t", "printable ASCII text"}));

TEST(Params, UnknownNamesWarnWithTheNearestKnownOne) {
  const Read p =
      read({{"SOTTO_TIMEOUT", "1"}, {"SOTTO_SIMDD", ""}, {"OTHER", "x"}, {"SOTTO", "y"}});
  ASSERT_TRUE(p.reader.status().ok()) << p.reader.status().text();
  EXPECT_THAT(p.reader.warnings(),
              ElementsAre("environment variable SOTTO_SIMDD is not known and has no "
                          "effect; the nearest known one is SOTTO_SIMD",
                          "environment variable SOTTO_TIMEOUT is not known and has no "
                          "effect; the nearest known one is "
                          "SOTTO_TIMEOUT_US"));
}

TEST(Params, TheFirstWrongOneOfAllListsIsNamed) {
  const Read p = read({{"SOTTO_RANK", "x"}, {"SOTTO_CONNECTIONS", "65"}, {"SOTTO_SPIN_US", "7"}});
  EXPECT_THAT(p.reader.status().text(), HasSubstr("SOTTO_RANK is \"x\""));
  EXPECT_EQ(p.common.rank, -1) << "wrong values leave the default";
  EXPECT_EQ(p.common.spin_us, 7);
  EXPECT_EQ(p.tcp.connections, 2);
}

TEST(Params, NamesAreThoseOfTheListsThatWereRead) {
  ParamReader reader(environment_of({{"SOTTO_CONNECTIONS", "4"}}));
  reader.read<Params>();
  EXPECT_THAT(reader.warnings(), testing::SizeIs(1));
  const auto before = nlohmann::json::parse(reader.to_json());
  EXPECT_EQ(before.size(), 22u);
  EXPECT_EQ(reader.read<tcp::Params>().connections, 4);
  EXPECT_THAT(reader.warnings(), IsEmpty());
  const auto after = nlohmann::json::parse(reader.to_json());
  EXPECT_EQ(after.size(), before.size() + 9);
  EXPECT_EQ(after[0], before[0]) << "in the order of reading";
  EXPECT_EQ(after[before.size()]["name"], "SOTTO_LISTEN");
}

TEST(Params, AnEnvironmentOfItsOwnIsEmpty) {
  ParamReader reader{Environment()};
  EXPECT_EQ(reader.read<Params>().rank, -1);
  EXPECT_TRUE(reader.status().ok());
  EXPECT_THAT(reader.warnings(), IsEmpty());
}

TEST(Params, ListingIsJsonWithSourceAndEscapes) {
  const Read p = read({{"SOTTO_LISTEN", "a\"b\\c"}, {"SOTTO_RATE_LIMIT_MBIT", "0.5"}});
  ASSERT_TRUE(p.reader.status().ok()) << p.reader.status().text();
  const auto json = nlohmann::json::parse(p.reader.to_json());
  ASSERT_EQ(json.size(), 34u);
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

TEST(Text, IsCutBetweenCharacters) {
  const std::string text = "ab\xe2\x82\xac\xf0\x9f\x98\x80";
  const std::vector<size_t> sizes = {0, 1, 2, 2, 2, 5, 5, 5, 5, 9, 9};
  for (size_t room = 0; room < sizes.size(); ++room)
    EXPECT_EQ(cut_text(text, room), text.substr(0, sizes[room])) << room;
}

TEST(Text, WhatIsNotUtf8IsReplaced) {
  EXPECT_EQ(valid_utf8("a\nb gr\xc3\xbc\xc3\x9f"), "a\nb gr\xc3\xbc\xc3\x9f");
  EXPECT_EQ(valid_utf8("caf\xe9"), "caf\xef\xbf\xbd");
  EXPECT_EQ(valid_utf8("\xc3"), "\xef\xbf\xbd");
  EXPECT_EQ(valid_utf8("\xed\xa0x"), "\xef\xbf\xbd\xef\xbf\xbdx");
  EXPECT_TRUE(is_utf8(dump_text(nlohmann::json{{"text", "caf\xe9"}})));
}

}  // namespace
}  // namespace sotto
