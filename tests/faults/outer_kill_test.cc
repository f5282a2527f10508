// Processes that use nothing but sotto.h and make outer steps, one of them killed or stopped at a
// seeded moment. The others end with PEER_LOST or TIMEOUT that names it, their parameters are those
// of before the step that failed, or of the local step in it, and destroying waits for nothing.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <functional>

#include "tests/faults/killed_rank.h"
#include "tests/ranks/capi_outer_model.h"
#include "tests/support/kill_campaign.h"

namespace sotto::test {
namespace {

constexpr uint32_t kKills = kSanitized ? 2 : 6;

// What both kinds of ranks do behind the failure.
void end_with(sotto_status status, std::string text, const std::function<sotto_status()>& step,
              const std::function<void()>& destroy, const Member& member, const ProcessRank& self) {
  text = std::string(sotto_status_name(status)) + " " + text;
  require(step() == status, "the step after it");
  const auto start = std::chrono::steady_clock::now();
  destroy();
  require(std::chrono::steady_clock::now() - start < kDestroying, "destroying has waited");
  sotto_comm_destroy(member.comm);
  OK(sotto_context_destroy(member.context));
  std::replace(text.begin(), text.end(), '\n', ' ');
  self.say(text);
}

SOTTO_RANK_MAIN(outer_kill) {
  const KillTask task = KillTask::parse(self);
  sotto_context* const context = new_context();
  self.at("started");
  const Member member{self.rank, self.size, context, new_comm(context, self, task)};
  OuterModel model(1, 0, {200'000, 777});
  sotto_outer* outer = new_outer(member, task.what, model);
  sotto_status status = SOTTO_OK;
  std::vector<float> before[2];
  for (int k = 0; status == SOTTO_OK; ++k) {
    if (k == 3) self.at("working");
    model.add(0.25f * static_cast<float>(self.rank));
    std::copy(std::begin(model.weights), std::end(model.weights), std::begin(before));
    status = sotto_outer_step(outer, nullptr, nullptr);
  }
  const std::string text = sotto_last_error();
  require(std::equal(std::begin(before), std::end(before), std::begin(model.weights)),
          "a step that failed has changed parameters: " + text);
  end_with(
      status, text, [&] { return sotto_outer_step(outer, nullptr, nullptr); },
      [&] { OK(sotto_outer_destroy(outer)); }, member, self);
  return 0;
}

// Steps of an optimizer that outer steps follow. What failed has made the local step or not, alike
// in all parameters, and can be exported.
SOTTO_RANK_MAIN(optim_outer_kill) {
  constexpr float kStep = 0.25f;
  const KillTask task = KillTask::parse(self);
  sotto_context* const context = new_context();
  self.at("started");
  const Member member{self.rank, self.size, context, new_comm(context, self, task)};
  OuterModel model(1, 0, {200'000, 777});
  std::vector<float> gradients[2];
  for (size_t t = 0; t < 2; ++t) {
    gradients[t].assign(model.weights[t].size(), static_cast<float>(self.rank));
    model.params[t].grad = buffer(gradients[t]);
  }
  const std::string json =
      R"({"optimizer": {"type": "SGD", "params": {"lr": 0.25}}, "sotto": {"outer": )" +
      std::string(task.what) + "}}";
  sotto_optim* optim = nullptr;
  OK(sotto_optim_create(member.comm, json.c_str(), model.params.data(), 2, &optim));
  sotto_status status = SOTTO_OK;
  std::vector<float> before[2];
  for (int k = 0; status == SOTTO_OK; ++k) {
    if (k == 3) self.at("working");
    std::copy(std::begin(model.weights), std::end(model.weights), std::begin(before));
    status = sotto_optim_step(optim, nullptr, nullptr);
  }
  const std::string text = sotto_last_error();
  const auto is_before = [&] {
    return std::equal(std::begin(before), std::end(before), std::begin(model.weights));
  };
  if (!is_before()) {
    for (std::vector<float>& tensor : before) {
      for (float& x : tensor) x -= kStep * static_cast<float>(self.rank);
    }
  }
  require(is_before(), "a step that failed has made something else than the local step: " + text);
  uint64_t n = 0;
  OK(sotto_optim_state_export(optim, SOTTO_STATE_EXACT, nullptr, 0, &n));
  std::vector<char> state(n);
  OK(sotto_optim_state_export(optim, SOTTO_STATE_EXACT, state.data(), n, &n));
  end_with(
      status, text, [&] { return sotto_optim_step(optim, nullptr, nullptr); },
      [&] { OK(sotto_optim_destroy(optim)); }, member, self);
  return 0;
}

class OuterKill : public testing::TestWithParam<int> {};

TEST_P(OuterKill, SurvivorsNameTheRank) {
  const char* const settings[] = {
      R"({"preset":"diloco","period":1})", R"({"preset":"co2","period":1})",
      R"({"preset":"diloco","period":1,"codec":"onebit"})",
      R"({"preset":"co2","period":2,"codec":"onebit"})", R"({"preset":"sparse_loco","period":1})"};
  const uint32_t cases = GetParam() == SIGSTOP ? 1 : kKills;
  std::vector<KillCase> all;
  for (const char* rank_main : {"outer_kill", "optim_outer_kill"}) {
    for (uint32_t seed = 1; seed <= cases; ++seed) {
      KillCase& c = all.emplace_back(KillCase{.rank_main = rank_main,
                                              .what = settings[seed % std::size(settings)],
                                              .signal = GetParam(),
                                              .seed = seed});
      c.environment = {"SOTTO_TRANSPORT=tcp", "SOTTO_HEARTBEAT_MS=100", "SOTTO_CPU_THREADS=1"};
    }
  }
  run_kill_cases(all);
}

INSTANTIATE_TEST_SUITE_P(Signals, OuterKill, testing::Values(SIGKILL, SIGSTOP), [](const auto& p) {
  return std::string(p.param == SIGKILL ? "killed" : "stopped");
});

}  // namespace
}  // namespace sotto::test
