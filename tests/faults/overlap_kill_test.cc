// Processes that use nothing but sotto.h and average gradients in rounds of an overlap, one of them
// killed or stopped at a seeded moment. The others end with PEER_LOST or TIMEOUT that names it,
// also calls that mark; error feedback has the bits of before the round, and destroying waits for
// nothing.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>

#include "tests/faults/killed_rank.h"
#include "tests/support/kill_campaign.h"

namespace sotto::test {
namespace {

constexpr uint32_t kKills = kSanitized ? 2 : 8;
constexpr uint64_t kGradients = 6;

// A round; with the text of the first call that failed.
sotto_status round_of(sotto_overlap* overlap, std::vector<std::vector<float>>& gradients,
                      std::string* text) {
  for (size_t t = 0; t < gradients.size(); ++t) {
    for (size_t i = 0; i < gradients[t].size(); ++i)
      gradients[t][i] = static_cast<float>((i * 7 + t) % 23) - 11;
  }
  sotto_status first = SOTTO_OK;
  const auto note = [&](sotto_status status) {
    if (status != SOTTO_OK && first == SOTTO_OK) {
      first = status;
      *text = std::string(sotto_status_name(status)) + " " + sotto_last_error();
    }
  };
  sotto_op* op = nullptr;
  note(sotto_overlap_begin(overlap, nullptr, &op));
  for (uint64_t t = kGradients; t-- > 0 && first == SOTTO_OK;)
    note(sotto_overlap_ready(overlap, &t, nullptr, 1, nullptr));
  if (first == SOTTO_OK) note(sotto_overlap_finish(overlap));
  if (op != nullptr) note(sotto_op_wait(op, -1));
  OK(sotto_op_release(op));
  return first;
}

SOTTO_RANK_MAIN(overlap_kill) {
  const KillTask task = KillTask::parse(self);
  sotto_context* const context = new_context();
  self.at("started");
  sotto_comm* const comm = new_comm(context, self, task);
  std::vector<std::vector<float>> gradients;
  std::vector<sotto_buffer> like;
  for (uint64_t t = 0; t < kGradients; ++t) gradients.emplace_back(40'000 + 1'000 * t);
  for (std::vector<float>& g : gradients) like.push_back(buffer(g));
  sotto_overlap* overlap = nullptr;
  OK(sotto_overlap_create(comm, task.what.c_str(), like.data(), kGradients, &overlap));
  const bool codec = task.what.find("codec") != std::string::npos;
  const auto errors = [&] {
    if (!codec) return std::string();
    return read_all([&](char* buf, uint64_t cap, uint64_t* len) {
      return sotto_overlap_state_export(overlap, SOTTO_STATE_EXACT, buf, cap, len);
    });
  };
  sotto_status status = SOTTO_OK;
  std::string text, before;
  for (int k = 0; status == SOTTO_OK; ++k) {
    if (k == 3) self.at("working");
    before = errors();
    status = round_of(overlap, gradients, &text);
  }
  require(errors() == before, "a round that failed has changed error feedback: " + text);
  sotto_op* op = nullptr;
  require(sotto_overlap_begin(overlap, nullptr, &op) == status, "the round after it");
  const auto start = std::chrono::steady_clock::now();
  OK(sotto_overlap_destroy(overlap));
  require(std::chrono::steady_clock::now() - start < kDestroying, "destroying has waited");
  sotto_comm_destroy(comm);
  OK(sotto_context_destroy(context));
  std::replace(text.begin(), text.end(), '\n', ' ');
  self.say(text);
  return 0;
}

class OverlapKill : public testing::TestWithParam<int> {};

TEST_P(OverlapKill, SurvivorsNameTheRank) {
  const char* const settings[] = {
      R"({"first_bucket_bytes":1000,"bucket_bytes":300000})",
      R"({"first_bucket_bytes":1000,"bucket_bytes":300000,"codec":"onebit"})",
      R"({"first_bucket_bytes":1000,"bucket_bytes":300000,"codec":"int8","order":"observed"})"};
  const uint32_t cases = GetParam() == SIGSTOP ? 1 : kKills;
  std::vector<KillCase> all;
  for (uint32_t seed = 1; seed <= cases; ++seed) {
    KillCase& c = all.emplace_back(KillCase{.rank_main = "overlap_kill",
                                            .what = settings[seed % 3],
                                            .signal = GetParam(),
                                            .seed = seed});
    c.environment = {"SOTTO_TRANSPORT=tcp", "SOTTO_HEARTBEAT_MS=100", "SOTTO_CPU_THREADS=1"};
  }
  run_kill_cases(all);
}

INSTANTIATE_TEST_SUITE_P(Signals, OverlapKill, testing::Values(SIGKILL, SIGSTOP),
                         [](const auto& p) {
                           return std::string(p.param == SIGKILL ? "killed" : "stopped");
                         });

}  // namespace
}  // namespace sotto::test
