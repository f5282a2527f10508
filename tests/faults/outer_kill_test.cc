// Processes that use nothing but sotto.h and make outer steps, one of them killed or stopped at a
// seeded moment: while it launches, averages, consumes or merges. The others end with PEER_LOST or
// TIMEOUT that names it, their parameters are those of before the step that failed, or of the local
// step in it, the state that they export then has the anchor of before it, and destroying waits for
// nothing.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>

#include "tests/faults/killed_rank.h"
#include "tests/ranks/capi_outer_model.h"
#include "tests/support/kill_campaign.h"

namespace sotto::test {
namespace {

// Of each kind of ranks: 80 cases in all.
constexpr uint32_t kKills = kSanitized ? 2 : 36;
constexpr uint32_t kStops = kSanitized ? 1 : 4;

using Tensors = std::array<std::vector<float>, 2>;

Tensors values_of(const OuterModel& model) { return {model.weights[0], model.weights[1]}; }

// The anchor in a state: what an optimizer of one rank goes on from, beside the comm that failed.
Tensors anchor_in(const std::string& json, const sotto_outer* failed) {
  uint64_t n = 0;
  OK(sotto_outer_state_export(failed, SOTTO_STATE_EXACT, nullptr, 0, &n));
  std::vector<char> state(n);
  OK(sotto_outer_state_export(failed, SOTTO_STATE_EXACT, state.data(), n, &n));
  require(setenv("SOTTO_TRANSPORT", "inproc", 1) == 0, "setenv");
  sotto_context* const context = new_context();
  sotto_unique_id id = {};
  OK(sotto_unique_id_create(context, &id));
  sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
  config.size = 1;
  config.id = &id;
  Member alone{0, 1, context, nullptr};
  OK(sotto_comm_create(context, &config, &alone.comm));
  OuterModel model(0, 0, {200'000, 777});
  sotto_outer* const outer = new_outer(alone, json, model);
  OK(sotto_outer_state_import(outer, SOTTO_STATE_COMMON, state.data(), n));
  OK(sotto_outer_destroy(outer));
  OK(sotto_comm_destroy(alone.comm));
  OK(sotto_context_destroy(context));
  return values_of(model);
}

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
  Tensors before, anchor = values_of(model);
  for (int k = 0; status == SOTTO_OK; ++k) {
    if (k == 3) self.at("working");
    if (k != 0 && (info_of(outer).events & (SOTTO_OUTER_CONSUMED | SOTTO_OUTER_HELD)) != 0)
      anchor = values_of(model);  // they are reset to it
    model.add(0.25f * static_cast<float>(self.rank));
    before = values_of(model);
    status = sotto_outer_step(outer, nullptr, nullptr);
  }
  const std::string text = sotto_last_error();
  require(values_of(model) == before, "a step that failed has changed parameters: " + text);
  require(anchor_in(task.what, outer) == anchor,
          "a step that failed has changed the anchor: " + text);
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
  Tensors before;
  for (int k = 0; status == SOTTO_OK; ++k) {
    if (k == 3) self.at("working");
    before = values_of(model);
    status = sotto_optim_step(optim, nullptr, nullptr);
  }
  const std::string text = sotto_last_error();
  if (values_of(model) != before) {
    const bool together = std::string_view(task.what).find("gradients") != std::string_view::npos;
    const float gradient =
        together ? 0.5f * static_cast<float>(self.size - 1) : static_cast<float>(self.rank);
    for (std::vector<float>& tensor : before) {
      for (float& x : tensor) x -= kStep * gradient;
    }
  }
  require(values_of(model) == before,
          "a step that failed has made something else than the optimizer's step: " + text);
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
  // Before outer steps begin.
  constexpr char kTogether[] =
      R"({"preset":"co2","period":2,"warmup_steps":1000000,"every_step":"gradients"})";
  const uint32_t cases = GetParam() == SIGSTOP ? kStops : kKills;
  std::vector<KillCase> all;
  for (const bool by_hand : {true, false}) {
    for (uint32_t seed = 1; seed <= cases; ++seed) {
      const bool together = !by_hand && seed % 4 == 2;
      KillCase& c = all.emplace_back(
          KillCase{.rank_main = by_hand ? "outer_kill" : "optim_outer_kill",
                   .what = together ? kTogether : settings[seed % std::size(settings)],
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
