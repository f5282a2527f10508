// What groups between real processes are made of.
#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "tests/nccl/device_floats.h"
#include "tests/support/temp_dir.h"

namespace sotto::test {
namespace {

constexpr size_t kN = 40'000;

SOTTO_RANK_MAIN(nccl_order) {
  Rank r(self);
  ok(r.created, "sotto_comm_create");
  {
    DeviceFloats x(kN, 1.0f);
    const sotto_buffer b = x.buffer();
    sotto_call call = x.call();
    OK(sotto_codec_create(r.comm, R"({"type": "onebit"})", &b, 1, &call.codec));
    OK(sotto_barrier(r.comm, nullptr, nullptr));
    (void)fake_nccl_sent();
    OK(sotto_all_reduce(r.comm, &b, &b, 1, &call, nullptr));
    self.say(fake_nccl_sent());
    OK(sotto_codec_destroy(call.codec));
  }
  r.leave();
  return 0;
}

// One all-reduce with several windows.
SOTTO_RANK_MAIN(nccl_many_groups) {
  Rank r(self);
  ok(r.created, "sotto_comm_create");
  {
    DeviceFloats x(8'000'000, 1.0f);
    x.expect(1.0f, "ones");
    // Of all peers.
    const auto service_bytes = [&] {
      const std::string report = read_all([&](char* at, uint64_t cap, uint64_t* n) {
        return sotto_comm_report(r.comm, "counters", at, cap, n);
      });
      constexpr std::string_view kName = "\"service_bytes_sent\":";
      uint64_t bytes = 0;
      for (size_t at = report.find(kName); at != std::string::npos; at = report.find(kName, at + 1))
        bytes += std::stoull(report.substr(at + kName.size()));
      return bytes;
    };
    const uint64_t before = service_bytes();
    (void)fake_nccl_sent();
    OK(all_reduce(r, x));
    self.say(fake_nccl_sent());
    const uint64_t headers = 104 * static_cast<uint64_t>(self.size - 1);
    require(service_bytes() - before == headers,
            fmt::format("{} bytes of headers", service_bytes() - before));
  }
  r.leave();
  return 0;
}

// Sizes of the messages of each group.
std::vector<std::vector<uint64_t>> groups_of(const std::string& text) {
  std::vector<std::vector<uint64_t>> all;
  std::istringstream groups(text);
  for (std::string group; std::getline(groups, group, ';');) {
    std::vector<uint64_t>& sizes = all.emplace_back();
    std::istringstream messages(group);
    for (std::string message; messages >> message;)
      sizes.push_back(std::stoull(message.substr(message.find(':') + 1)));
  }
  return all;
}

class NcclGroupContents : public testing::Test {
 protected:
  std::vector<std::string> say(const std::string& main, int size) {
    const TempDir directory;
    Processes ranks(main, size,
                    {.argument = directory.path(), .environment = {"SOTTO_TRANSPORT=nccl"}});
    std::vector<std::string> all;
    for (int r = 0; r < size; ++r) all.push_back(ranks.message(r));
    ranks.wait_all();
    EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
    return all;
  }
};

// Behind the header that the operation has in its first group.
TEST_F(NcclGroupContents, BitsGoBeforeTheirScalesInOneGroup) {
  for (const std::string& text : say("nccl_order", 2)) {
    std::vector<std::vector<uint64_t>> groups = groups_of(text);
    ASSERT_EQ(groups.size(), 2u) << text;
    ASSERT_EQ(groups[0].size(), 3u) << text;
    EXPECT_EQ(groups[0][0], 104u) << text;
    groups[0].erase(groups[0].begin());
    for (const std::vector<uint64_t>& group : groups) {
      ASSERT_EQ(group.size(), 2u) << text;
      EXPECT_GE(group[0], kN / 8 / 2) << text;
      EXPECT_LE(group[1], 16u) << text;
    }
  }
}

// What comes between the ranks is payload, but for one header of each with each in front of all.
TEST_F(NcclGroupContents, AnOperationHasHeadersInItsFirstGroupAlone) {
  for (const int size : {2, 3}) {
    for (const std::string& text : say("nccl_many_groups", size)) {
      const std::vector<std::vector<uint64_t>> groups = groups_of(text);
      const auto headers = [](const std::vector<uint64_t>& group) {
        return std::count(group.begin(), group.end(), 104u);
      };
      ASSERT_GE(groups.size(), 2u) << text;
      EXPECT_EQ(headers(groups[0]), size - 1) << text;
      for (size_t i = 1; i < groups.size(); ++i) EXPECT_EQ(headers(groups[i]), 0) << text;
    }
  }
}

}  // namespace
}  // namespace sotto::test
