// Averages of outer steps over NCCL: their messages go in slices, one after the other while inner
// steps go on, so that an inner collective waits for one of them (specification co2-overlap,
// section 11.6). Ranks are processes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "core/base/hash.h"
#include "tests/nccl/device_floats.h"
#include "tests/ranks/capi_outer_model.h"
#include "tests/support/temp_dir.h"

namespace sotto::test {
namespace {

using testing::Each;
using testing::HasSubstr;
using testing::StartsWith;

// 16 MiB: each of two rounds has 4 slices.
constexpr size_t kN = 4 << 20, kInner = 100;
constexpr int kPeriod = 8;
constexpr int64_t kLimitUs = 60'000'000;

// A rank with parameters on its device, which averages over NCCL.
struct Training {
  Training(const ProcessRank& self, const std::string& more, size_t n = kN)
      : rank(self, kLimitUs), x(n, 0), gradient(kInner, 1) {
    ok(rank.created, "sotto_comm_create");
    param.param = x.buffer();
    OK(sotto_outer_create(rank.comm, mean_json(more).c_str(), &param, 1, &outer));
    x.write(2 * static_cast<float>(self.rank));
    (void)fake_nccl_sent();
  }
  void inner() const { ok(all_reduce(rank, gradient), "sotto_all_reduce"); }
  // An inner step with a collective, and what follows it.
  void step() {
    inner();
    const sotto_call call = x.call();
    OK(sotto_outer_step(outer, &call, nullptr));
  }
  void steps(int n) {
    for (int k = 0; k < n; ++k) step();
  }
  void flush() {
    const sotto_call call = x.call();
    OK(sotto_outer_flush(outer, &call, nullptr));
  }
  std::vector<char> state(sotto_state_mode mode) const {
    uint64_t bytes = 0;
    OK(sotto_outer_state_export(outer, mode, nullptr, 0, &bytes));
    std::vector<char> state(bytes);
    OK(sotto_outer_state_export(outer, mode, state.data(), bytes, &bytes));
    return state;
  }
  void leave() {
    OK(sotto_outer_destroy(outer));
    rank.leave();
  }

  Rank rank;
  DeviceFloats x, gradient;
  sotto_param param = SOTTO_PARAM_INIT;
  sotto_outer* outer = nullptr;
};

// Groups, by what fake_nccl_sent says: "slice" for one with a message of 2 MiB, "inner" for the
// inner collective's.
std::string groups_of(const std::string& sent) {
  std::string text;
  for (size_t begin = 0, end = 0; begin < sent.size(); begin = end + 1) {
    end = sent.find(';', begin);
    const std::string group = sent.substr(begin, end - begin);
    if (group.find(":2097152") != std::string::npos) text += "slice ";
    if (group.ends_with(":400")) text += "inner ";
  }
  return text;
}

SOTTO_RANK_MAIN(nccl_outer_slices) {
  Training t(self, std::getenv("TEST_OUTER"));
  std::string sent;
  for (int k = 0; k < 2 * kPeriod; ++k) {
    t.step();
    t.inner();  // behind all that has gone
    sent += groups_of(fake_nccl_sent()) + "| ";
  }
  t.flush();
  t.x.expect(1, "the mean of all ranks");
  self.say(sent);
  t.leave();
  return 0;
}

std::vector<std::string> messages_of(const char* main, const std::string& outer = "",
                                     const std::string& transport = "nccl") {
  const TempDir directory;
  Processes ranks(main, 2,
                  {.argument = directory.path(),
                   .environment = {"SOTTO_TRANSPORT=" + transport, "TEST_OUTER=" + outer,
                                   "FAKE_NCCL_MAX_DELAY_US=200"}});
  std::vector<std::string> texts;
  for (int rank = 0; rank < 2; ++rank) texts.push_back(ranks.message(rank));
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
  return texts;
}

// The first two of eight slices go with the launch, and one behind each of the next six steps. The
// seventh step sends nothing: by the eighth, which consumes the average and launches the next one,
// the last slice has arrived.
TEST(NcclOuterSlices, GoOneByOneWithInnerSteps) {
  std::string wanted;
  for (int k = 1; k < kPeriod; ++k) wanted += "inner inner | ";
  const std::string launch = "inner slice slice inner | ";
  wanted += launch;
  for (int k = 2; k < kPeriod; ++k) wanted += "inner slice inner | ";
  wanted += "inner inner | " + launch;
  for (const std::string& text : messages_of("nccl_outer_slices", R"("period": 8)"))
    EXPECT_EQ(text, wanted);
}

// Half the bytes: two slices in each of the two rounds.
TEST(NcclOuterSlices, OfACodecToo) {
  for (const std::string& text :
       messages_of("nccl_outer_slices", R"("period": 8, "codec": "bf16", "dense_rounds": 0)"))
    EXPECT_THAT(text,
                StartsWith("inner inner | inner inner | inner inner | inner inner | inner inner | "
                           "inner inner | inner inner | inner slice inner | inner slice inner | "
                           "inner inner | inner slice inner | inner inner | inner slice inner | "
                           "inner inner | inner inner | inner slice inner | "));
}

TEST(NcclOuterSlices, GoAtOnceWhereTheNextStepConsumes) {
  for (const std::string& text : messages_of("nccl_outer_slices", R"("period": 8, "delay": 1)"))
    EXPECT_THAT(text, HasSubstr("| inner slice slice slice slice slice slice slice slice inner | "
                                "inner inner | "));
}

// Inner steps whose parameters change by small numbers.
struct RandomSteps {
  RandomSteps(Training& t, int32_t rank) : training(t), random(7 + static_cast<uint32_t>(rank)) {}
  void steps(int n) {
    for (int k = 0; k < n; ++k) {
      std::vector<float> x = training.x.read();
      for (float& value : x) {
        random = random * 1664525 + 1013904223;
        value += static_cast<float>(random >> 8) * 1e-9f;
      }
      training.x.write(x);
      training.step();
    }
  }
  std::string bits_behind_flush() {
    training.flush();
    const std::vector<float> x = training.x.read();
    return std::to_string(hash64(x.data(), x.size() * 4));
  }

  Training& training;
  uint32_t random;
};

// What each rank's parameters become in 13 steps, some of them beside averages.
SOTTO_RANK_MAIN(nccl_outer_slices_bits) {
  Training t(self, std::getenv("TEST_OUTER"));
  RandomSteps random(t, self.rank);
  random.steps(13);
  self.say(random.bits_behind_flush());
  t.leave();
  return 0;
}

TEST(NcclOuterSlices, LeaveTheBitsOfOtherTransports) {
  for (const char* outer :
       {R"("period": 6)", R"("period": 6, "delay": 4, "codec": "int8", "dense_rounds": 0)"}) {
    const std::vector<std::string> bits = messages_of("nccl_outer_slices_bits", outer);
    EXPECT_EQ(bits[0], bits[1]) << outer;
    EXPECT_EQ(messages_of("nccl_outer_slices_bits", outer, "tcp"), bits) << outer;
  }
}

// Rank 0 exports its state while slices are kept back on all ranks, and does not wait for them.
// Then all of them do, import and go on.
SOTTO_RANK_MAIN(nccl_outer_slices_state) {
  Training t(self, R"("period": 8)");
  t.steps(kPeriod + 2);
  if (self.rank == 0) (void)t.state(SOTTO_STATE_COMMON);
  t.step();
  const std::vector<char> state = t.state(SOTTO_STATE_EXACT);
  t.steps(2);
  const sotto_outer_info before = info_of(t.outer);
  OK(sotto_outer_state_import(t.outer, SOTTO_STATE_EXACT, state.data(), state.size()));
  same(info_of(t.outer).step + 2, before.step, "steps of the state");
  t.steps(kPeriod - 3);  // to the boundary that consumes it
  same(info_of(t.outer).round, 1, "averages consumed");
  t.flush();
  t.x.expect(1, "the mean of all ranks");
  self.say("done");
  t.leave();
  return 0;
}

TEST(NcclOuterSlices, AreNotWaitedForByExports) {
  EXPECT_THAT(messages_of("nccl_outer_slices_state"), Each("done"));
}

// States that are made while the second round of an average is kept back, which was launched, and
// launched again. Each goes on as training did without a state.
SOTTO_RANK_MAIN(nccl_outer_slices_resumed) {
  Training t(self, std::getenv("TEST_OUTER"), 100'000);
  RandomSteps random(t, self.rank);
  random.steps(kPeriod + 1);
  const std::vector<char> first = t.state(SOTTO_STATE_EXACT);
  const uint32_t then = random.random;
  random.steps(4);
  const std::string wanted = random.bits_behind_flush();
  const auto import = [&](const std::vector<char>& state) {
    OK(sotto_outer_state_import(t.outer, SOTTO_STATE_EXACT, state.data(), state.size()));
  };
  import(first);
  random.random = then;
  random.steps(1);
  import(t.state(SOTTO_STATE_EXACT));
  random.steps(3);
  self.say(random.bits_behind_flush() == wanted ? "the same bits" : "other bits");
  t.leave();
  return 0;
}

TEST(NcclOuterSlices, StatesGoOnBitForBit) {
  for (const char* codec :
       {R"("onebit")", R"("int8")", R"({"type": "topk", "exchange": "two_phase"})"}) {
    const std::string outer =
        R"("period": 8, "delay": 6, "dense_rounds": 0, "codec": )" + std::string(codec);
    EXPECT_THAT(messages_of("nccl_outer_slices_resumed", outer), Each("the same bits")) << codec;
  }
}

// Rank 1 ends in the middle of an average.
SOTTO_RANK_MAIN(nccl_outer_slices_lost) {
  Training t(self, R"("period": 8)");
  t.steps(kPeriod + 2);
  if (self.rank == 1) std::_Exit(0);
  sotto_status status = SOTTO_OK;
  for (int k = 0; k < kPeriod && status == SOTTO_OK; ++k) {
    status = all_reduce(t.rank, t.gradient);
    const sotto_call call = t.x.call();
    if (status == SOTTO_OK) status = sotto_outer_step(t.outer, &call, nullptr);
  }
  self.say(std::string(sotto_status_name(status)) + ": " + sotto_last_error());
  (void)t.state(SOTTO_STATE_EXACT);
  OK(sotto_outer_destroy(t.outer));
  (void)sotto_comm_destroy(t.rank.comm);
  OK(sotto_context_destroy(t.rank.context));
  return 0;
}

TEST(NcclOuterSlices, ARankThatEndsIsNamed) {
  const TempDir directory;
  Processes ranks("nccl_outer_slices_lost", 2,
                  {.argument = directory.path(), .environment = {"SOTTO_TRANSPORT=nccl"}});
  EXPECT_THAT(ranks.message(0), HasSubstr("rank 1"));
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
}

}  // namespace
}  // namespace sotto::test
