// Optimizers, outer optimizers and overlap through sotto.hpp.
#include <array>
#include <csignal>
#include <cstring>
#include <thread>

#include "tests/cpp/world.h"
#include "tests/support/kill_campaign.h"
#include "tests/support/processes.h"
#include "tests/support/temp_dir.h"

namespace cpp_test {
namespace {

struct Model {
  explicit Model(int rank) : weights(300, 1.0f), gradients(300), copies(300) {
    for (size_t i = 0; i < gradients.size(); ++i)
      gradients[i] = static_cast<float>((i * 7 + static_cast<size_t>(rank)) % 23) - 11;
  }
  std::vector<param> params() { return {param(kName, weights).grad(gradients).model_copy(copies)}; }

  static constexpr const char* kName = "w";
  std::vector<float> weights, gradients;
  std::vector<bfloat16> copies;
};

TEST(CppTraining, AnOptimizerStepsSavesAndResumes) {
  EXPECT_EQ(
      on_ranks(2,
               [](comm& ranks) {
                 const int rank = ranks.rank();
                 Model a(rank), b(rank);
                 optim first = optim::create(ranks, kAdam, a.params());
                 wait(first.step());
                 wait(first.accumulate()), wait(first.step());
                 first.set_user_state(std::string("page 7"));
                 require(first.info().step == 2, "steps");
                 std::vector<std::uint8_t> streamed;
                 first.state_write(state_mode::exact, [&](const void* data, std::uint64_t size) {
                   const auto* const p = static_cast<const std::uint8_t*>(data);
                   streamed.insert(streamed.end(), p, p + size);
                   return true;
                 });
                 require(streamed == first.state_export(state_mode::exact), "streams are exports");

                 optim second = optim::create(ranks, kAdam, b.params());
                 second.state_import(state_mode::exact, streamed);
                 require(b.weights == a.weights, "imported");
                 require(std::memcmp(a.copies.data(), b.copies.data(), 600) == 0, "copies");
                 const auto user = second.user_state();
                 require(std::string(user.begin(), user.end()) == "page 7", "user state");
                 second.set("lr", 0.5), second.set("lr", 0.1, 0);
                 std::vector<float> elsewhere = b.weights, grads = b.gradients;
                 second.set_params(elsewhere), second.set_grads(grads);
                 wait(first.step()), wait(second.step());
                 require(elsewhere == a.weights, "goes on");
                 second.set_frozen(std::vector<std::uint8_t>{1});
                 wait(second.step());
                 require(elsewhere == a.weights, "frozen");
                 wait(second.synchronize());
                 require(second.report("config").find("Adam") != std::string::npos, "report");
                 FAILS(second.set("speed", 1), SOTTO_E_INVALID_ARGUMENT, "speed");
                 FAILS(second.outer(), SOTTO_E_INVALID_STATE, "outer");
                 op step = second.step();
                 step.wait();
                 FAILS(second.replay(step), SOTTO_E_INVALID_STATE, "");
                 const std::vector<sotto_buffer> two(2, buffer_of(elsewhere));
                 FAILS(
                     second.set_params(elsewhere, two), SOTTO_E_INVALID_ARGUMENT,
                     "set_params: params are 1 and model_copies are 2; allowed: as many, or none");
               }),
      "");
}

TEST(CppTraining, ArraysOfACheckpoint) {
  Alone alone;
  Model model(0);
  optim adam = optim::create(alone.ranks, kAdam, model.params());
  const std::vector<double> zeros(300), twos(300, 2.0);
  const std::int64_t step[] = {5};
  const std::array<named_array, 4> arrays{
      {named_array("w/exp_avg", zeros), named_array("w/exp_avg_sq", zeros),
       named_array("w/step", step), named_array("w/fp32", twos)}};
  adam.state_import_arrays(arrays);
  EXPECT_EQ(adam.info().step, 5u);
  EXPECT_EQ(model.weights[299], 2.0f);
  FAILS(adam.state_import_arrays(std::array<named_array, 1>{{named_array("w/speed", zeros)}}),
        SOTTO_E_INVALID_ARGUMENT, "w/speed");
}

// What a callback throws passes by the library, which goes on.
TEST(CppTraining, CallbacksMayThrow) {
  Alone alone;
  Model model(0);
  optim adam = optim::create(alone.ranks, kAdam, model.params());
  const auto full = [](const void*, std::uint64_t) -> bool { throw std::range_error("disk full"); };
  try {
    adam.state_write(state_mode::exact, full);
    FAIL() << "nothing was thrown";
  } catch (const std::range_error& e) {
    EXPECT_STREQ(e.what(), "disk full");
  }
  FAILS(adam.state_write(state_mode::exact, [](const void*, std::uint64_t) { return false; }),
        SOTTO_E_CANCELLED, "");
  const auto torn = [](std::uint64_t, void*, std::uint64_t) -> bool {
    throw std::range_error("torn");
  };
  EXPECT_THROW(adam.state_read(state_mode::exact, torn, 1000), std::range_error);
  wait(adam.step());
}

// The mean of 0 and 1 in 16 elements is 2 long, and 1 is allowed.
TEST(CppTraining, OuterStepsOnShards) {
  EXPECT_EQ(
      on_ranks(4,
               [](comm& ranks) {
                 const int replica = ranks.rank() / 2;
                 comm same = ranks.split(ranks.rank() % 2, 0), shards = ranks.split(replica, 0);
                 std::vector<float> x(8);
                 outer steps = outer::create_sharded(
                     same, shards,
                     R"({"preset": "co2", "period": 1, "delay": 0, "penalty": "none", "beta": 0,
                         "auto_floor": false, "clip": "norm", "phi": 1})",
                     std::array<param, 1>{param("x", x)});
                 for (float& v : x) v += static_cast<float>(replica);
                 wait(steps.step());
                 require(x[0] == 0.25f, "the clipped mean");
               }),
      "");
}

TEST(CppTraining, OuterSteps) {
  EXPECT_EQ(on_ranks(2,
                     [](comm& ranks) {
                       std::vector<float> x(100), moved;
                       outer local = outer::create(ranks, R"({"preset": "local_sgd", "period": 4})",
                                                   std::array<param, 1>{param("x", x)});
                       local.set("lr", 0.1);
                       local.vote(2);
                       for (int step = 0; step < 8; ++step) {
                         for (float& v : x) v += static_cast<float>(ranks.rank());
                         wait(local.step());
                         if (step == 4) require(local.info().votes == 2, "votes");
                       }
                       wait(local.flush());
                       require(x[0] == 4.0f, "the mean of 0 and 8");
                       require(local.info().step == 8, "figures");
                       wait(local.swap()), wait(local.swap());
                       const auto state = local.state_export(state_mode::exact);
                       local.state_import(state_mode::exact, state);
                       moved = x;
                       local.set_params(moved);
                       wait(local.step());
                       FAILS(local.set("speed", 1), SOTTO_E_INVALID_ARGUMENT, "speed");
                     }),
            "");
  Alone alone;
  Model model(0);
  optim whole = optim::create(
      alone.ranks,
      R"({"optimizer": {"type": "Adam", "params": {"lr": 0.1}}, "sotto": {"outer": {"preset": "co2", "period": 2}}})",
      model.params());
  outer handle = whole.outer();
  wait(whole.step());
  EXPECT_EQ(handle.info().step, 1u);
  FAILS(wait(handle.step()), SOTTO_E_INVALID_STATE, "");
}

TEST(CppTraining, Overlap) {
  EXPECT_EQ(
      on_ranks(2,
               [](comm& ranks) {
                 const float rank = static_cast<float>(ranks.rank());
                 std::vector<float> a(10), b(20), c(30);
                 const std::vector<sotto_buffer> like{buffer_of(a), buffer_of(b), buffer_of(c)};
                 overlap averages = overlap::create(ranks, R"({"codec": "bf16"})", like);
                 for (int k = 0; k < 3; ++k) {
                   a.assign(10, rank), b.assign(20, 2 * rank), c.assign(30, 4 * rank);
                   overlap_round round = averages.begin();
                   FAILS(averages.begin(), SOTTO_E_BUSY, "");
                   round.ready(2), round.ready(0, a);
                   FAILS(round.finish(), SOTTO_E_INVALID_STATE, "1");
                   const std::uint64_t one[] = {1};
                   if (k == 2) {
                     round.unused(one);
                   } else {
                     round.ready(one, b);
                   }
                   FAILS(round.ready(one, std::vector<sotto_buffer>(2)), SOTTO_E_INVALID_ARGUMENT,
                         "ready: indices are 1 and grads are 2");
                   round.finish();
                   round.wait();
                   require(round.error().ok(), "ended");
                   require(a[9] == 0.5f && b[0] == (k == 2 ? 0.0f : 1.0f) && c[0] == 2.0f, "means");
                 }
                 require(averages.info().rounds == 3, "rounds");
                 averages.state_import(state_mode::exact, averages.state_export(state_mode::exact));
                 require(averages.report("order").find("2") != std::string::npos, "order");
                 overlap plain = overlap::create(ranks, "{}", a);
                 FAILS(plain.state_export(state_mode::exact), SOTTO_E_INVALID_STATE, "codec");
                 overlap_round left = averages.begin();
                 if (ranks.rank() == 0) {
                   left.withdraw("lunch");
                 } else {
                   const std::uint64_t all[] = {0, 1, 2};
                   left.ready(all), left.finish();
                 }
                 FAILS(left.wait(), SOTTO_E_CANCELLED, "lunch");
               }),
      "");
}

// A rank that dies or stops: the others' exceptions name it, and their handles go without waiting.
SOTTO_RANK_MAIN(cpp_training) {
  const KillTask task = KillTask::parse(self);
  context ctx = context::create(context_config().cpu_threads(1));
  self.at("started");
  sotto_unique_id id = {};
  if (self.rank == 0) {
    id = ctx.unique_id();
    publish(task.id_file, &id, sizeof id);
  } else {
    require(await_published(task.id_file, &id, sizeof id, task.timeout_us / 1000), "no id");
  }
  const comm_config config =
      comm_config().rank(self.rank, self.size).id(id).timeout(microseconds(task.timeout_us));
  comm ranks = comm::create(ctx, config);
  Model model(self.rank);
  std::string text;
  std::chrono::steady_clock::time_point failed;
  try {
    optim adam = optim::create(ranks, kAdam, model.params());
    for (int k = 0;; ++k) {
      if (k == 3) self.at("working");
      op step = adam.step();
      step.wait();
    }
  } catch (const error& e) {
    failed = std::chrono::steady_clock::now();
    text = std::string(status_name(e.code())) + " " + e.text();
  }
  require(ranks.error().code() != SOTTO_OK, "the comm has failed");
  ranks = comm();
  require(std::chrono::steady_clock::now() - failed < std::chrono::seconds(kSanitized ? 5 : 1),
          "destroying has waited");
  self.say(text);
  return 0;
}

TEST(CppTraining, RoundsAreSteps) {
  EXPECT_EQ(on_ranks(2,
                     [](comm& ranks) {
                       Model a(ranks.rank()), b(ranks.rank());
                       optim plain = optim::create(ranks, kAdam, a.params());
                       optim late = optim::create(ranks, kAdam, b.params());
                       overlap rounds = overlap::create_step(late);
                       for (int step = 0; step < 3; ++step) {
                         wait(plain.step());
                         overlap_round round = rounds.begin();
                         FAILS(late.set("lr", 0.5), SOTTO_E_BUSY, "in flight");
                         round.ready(0), round.finish(), round.wait();
                         require(a.weights == b.weights, "other bits");
                       }
                       { overlap_round dropped = rounds.begin(); }
                       require(a.weights == b.weights && late.info().step == 3, "withdrawn");
                       FAILS(overlap::create_step(late, R"({"speed": 1})"),
                             SOTTO_E_INVALID_ARGUMENT, "speed");
                     }),
            "");
}

TEST(CppTraining, ARankThatDies) {
  std::vector<KillCase> cases;
  for (std::uint32_t seed = 1; seed <= 3; ++seed)
    cases.push_back({.rank_main = "cpp_training", .what = "adam", .signal = SIGKILL, .seed = seed});
  run_kill_cases(cases);
}

// Rank 0 waits for a message of rank 1, which waits for the test. argument: the id's file, and
// whether there is a handler.
volatile std::sig_atomic_t interrupted = 0;

SOTTO_RANK_MAIN(cpp_interrupted) {
  const bool handled = self.argument.back() == '1';
  const std::string file = self.argument.substr(0, self.argument.size() - 1);
  std::signal(SIGINT, SIG_DFL);
  if (handled) std::signal(SIGINT, [](int) { interrupted = 1; });
  context ctx = context::create(context_config().cpu_threads(1));
  sotto_unique_id id = {};
  if (self.rank == 0) {
    id = ctx.unique_id();
    publish(file, &id, sizeof id);
  } else {
    require(await_published(file, &id, sizeof id, 60'000), "no id");
  }
  comm ranks = comm::create(ctx, comm_config().rank(self.rank, self.size).id(id));
  std::vector<float> data(1, 7.0f * static_cast<float>(self.rank));
  if (self.rank == 1) {
    self.at("sending");
    ranks.send(data, 0).wait();
    return 0;
  }
  op received = ranks.recv(data, 1);
  self.at("waiting");
  if (!handled) received.wait();
  while (interrupted == 0 && !received.wait_for(std::chrono::milliseconds(50))) {
  }
  self.say(received.test() ? "too late" : "interrupted");
  received.wait();  // it went on
  self.say(data[0] == 7 ? "completed" : "wrong");
  return 0;
}

TEST(CppTraining, AnInterruptGetsThroughAWait) {
  for (const bool handled : {false, true}) {
    const TempDir folder;
    ProcessOptions options{.argument = folder.path() + "/id" + (handled ? "1" : "0"),
                           .stop_at = {"1:sending"}};
    Processes ranks("cpp_interrupted", 2, options);
    ranks.await(0, "waiting");
    ranks.await(1, "sending");
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    ranks.kill(0, SIGINT);
    if (handled) {
      EXPECT_EQ(ranks.message(0), "interrupted");
      ranks.go(1);
      EXPECT_EQ(ranks.message(0), "completed");
    } else {
      EXPECT_EQ(ranks.wait(0).signal, SIGINT);
      ranks.kill(1, SIGKILL);
    }
    ranks.wait_all();
    EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
  }
}

}  // namespace
}  // namespace cpp_test
