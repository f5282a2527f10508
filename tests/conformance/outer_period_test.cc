// Period "auto": all ranks choose the same one from what the slowest rank's averages took. Exactly,
// with a clock that the test moves; and on every kind of world.
#include <gtest/gtest.h>

#include <barrier>
#include <mutex>

#include "core/outer/outer.h"
#include "core/state/outer_state.h"
#include "tests/support/core_ranks.h"
#include "tests/support/fake_clock.h"
#include "tests/support/faulty_transport.h"
#include "tests/support/ordered_transport.h"
#include "tests/support/ranks.h"

namespace sotto::test {
namespace {

constexpr uint64_t kCount = 5000;

class Model {
 public:
  Model(const std::shared_ptr<Comm>& comm, const std::string& json, size_t tensors = 2)
      : comm_(comm), live_(tensors, std::vector<float>(kCount, 0.5f)) {
    std::vector<ParamSpec> specs(tensors);
    for (size_t t = 0; t < tensors; ++t) {
      specs[t].name = "p" + std::to_string(t);
      specs[t].count = kCount;
      specs[t].param = live_[t].data();
    }
    outer_ = check(Outer::create(comm, json, std::move(specs)));
  }
  ~Model() { outer_->close(); }

  Outer& outer() { return *outer_; }
  void train() {
    for (auto& live : live_) {
      for (float& x : live) x += 0.01f * static_cast<float>(comm_->rank() + 1);
    }
  }
  void wait(const OpRef& op) { check(comm_->engine().wait(op, -1)); }
  void step() { wait(check(outer_->step({}))); }
  OuterInfo info() { return check(outer_->info()); }
  bool launches_next() { return check(outer_->next_traffic()).payload_bytes_sent != 0; }
  const std::vector<std::vector<float>>& live() const { return live_; }

 private:
  std::shared_ptr<Comm> comm_;
  std::vector<std::vector<float>> live_;
  std::shared_ptr<Outer> outer_;
};

// Two ranks. An inner step takes step_us; an average takes average_us on rank 0, whose peer comes
// that much later.
struct Slow {
  std::atomic<int64_t> step_us{1000}, average_us{19'000};
  FakeClock clock;
  std::barrier<> both{2};
  std::shared_ptr<FaultState> sends = std::make_shared<FaultState>();  // of rank 0

  Status run(const std::function<void(const std::shared_ptr<Comm>&)>& body) {
    WorldOptions world;
    world.size = 2;
    world.clock = &clock;
    world.timeout_us = -1;
    world.wrap_backends = [this](int32_t rank, BackendFactories* backends) {
      if (rank == 0) make_faulty(&backends->at("inproc"), {}, sends);
    };
    return run_world(world, [&](const std::shared_ptr<Comm>& comm) {
      body(comm);
      return ok_status();
    });
  }
  // An inner step and the outer one.
  void step(Model* model, int32_t rank) {
    both.arrive_and_wait();
    if (rank == 0) clock.advance_us(step_us);
    both.arrive_and_wait();
    model->train();
    const bool launches = model->launches_next();
    OpRef op;
    if (rank == 0) {
      const uint64_t before = sends->sends;
      op = check(model->outer().step({}));
      if (launches) {
        while (sends->sends == before) std::this_thread::yield();
        clock.advance_us(average_us);
      }
    }
    both.arrive_and_wait();
    if (rank == 1) {
      if (launches) evaluate(model);
      op = check(model->outer().step({}));
    }
    model->wait(op);
    if (rank == 0 && launches) evaluate(model);
    model->outer().close();  // waits for the average
  }
  // What was beside the steps is no inner step.
  static void evaluate(Model* model) {
    for (int k = 0; k < 2; ++k) model->wait(check(model->outer().swap({})));
  }
};

TEST(OuterPeriodTimes, FollowTheSlowestRank) {
  Slow slow;
  const Status status = slow.run([&](const std::shared_ptr<Comm>& comm) {
    Model model(comm, R"({"preset": "co2", "period": "auto", "codec": "onebit"})");
    const auto until = [&](uint64_t n) {
      while (model.info().step < n) slow.step(&model, comm->rank());
      return model.info();
    };
    const auto is = [&](const OuterInfo& i, uint64_t period, bool measuring, uint64_t next) {
      EXPECT_EQ(i.period, period) << i.step;
      EXPECT_EQ(i.delay, period) << i.step;
      EXPECT_EQ((i.events & kOuterMeasuring) != 0, measuring) << i.step;
      EXPECT_EQ(i.next_boundary, next) << i.step;
    };
    is(model.info(), 4, true, 4);
    // What ranks measured until step 20 is consumed in step 24.
    is(until(23), 4, true, 1);
    const std::vector<std::byte> asked = check(export_outer(model.outer(), StateErrors::kOwn));
    is(until(24), 21, false, 21);  // ceil(1.1 * 19)
    EXPECT_EQ(model.info().events & kOuterLaunched, kOuterLaunched);
    is(until(25), 21, false, 20);
    // One rank asks: the others hear of it with the average of step 45, consumed in step 66. What
    // they tell in step 87, of that average and of steps from 66 on, is consumed in step 108.
    if (comm->rank() == 1) check(model.outer().set("retune", 1));
    slow.both.arrive_and_wait();
    slow.average_us = 40'000;
    slow.both.arrive_and_wait();
    is(until(65), 21, false, 1);
    is(until(66), 21, true, 21);
    is(until(107), 21, true, 1);
    is(until(108), 44, false, 44);
    is(until(152), 44, false, 44);
    EXPECT_EQ(model.info().in_flight, 1u);
    // The average under way in a state has what ranks had told.
    check(model.outer().restore(check(decode_outer(asked))));
    is(model.info(), 4, true, 1);
    model.step();
    is(model.info(), 21, false, 21);
  });
  EXPECT_TRUE(status.ok()) << status.text();
}

// Where steps wait for their average that is no part of an inner step, and where fragments share
// the link a period has room for all of them.
TEST(OuterPeriodTimes, OfOtherDelays) {
  struct Case {
    const char* json;
    uint64_t decided, period;
  };
  const Case cases[] = {
      // 19 inner steps of 1 ms: ceil(1.1 * 19).
      {R"({"preset": "diloco", "period": "auto"})", 20, 21},
      // The first launch of fragment 0 from step 23 on; two averages.
      {R"({"preset": "diloco", "period": "auto", "fragments": 2, "warmup_steps": 3})", 23, 42},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.json);
    Slow slow;
    const Status status = slow.run([&](const std::shared_ptr<Comm>& comm) {
      Model model(comm, c.json);
      for (uint64_t n = 1; n <= c.decided; ++n) {
        EXPECT_NE(model.info().events & kOuterMeasuring, 0u) << n;
        slow.step(&model, comm->rank());
      }
      const OuterInfo info = model.info();
      EXPECT_EQ(info.events & kOuterMeasuring, 0u);
      EXPECT_EQ(info.period, c.period);
      EXPECT_EQ(info.delay, 0u);
    });
    EXPECT_TRUE(status.ok()) << status.text();
  }
}

TEST(OuterPeriodTimes, RetuneIsForAutomaticPeriods) {
  const Status status = run_world(world_of("inproc", 1), [&](const std::shared_ptr<Comm>& comm) {
    Model fixed(comm, R"({"preset": "co2", "period": 6})");
    EXPECT_EQ(fixed.outer().set("retune", 1).text(),
              "retune measures a period \"auto\" anew; the period here is 6");
    EXPECT_EQ(fixed.outer().set("retune", 1).code(), Code::kInvalidState);
    Model automatic(comm, R"({"preset": "co2", "period": "auto"})");
    EXPECT_EQ(automatic.outer().set("retune", 2).text(), "retune is 2; allowed: 1");
    EXPECT_EQ(automatic.outer().set("retune", 0).code(), Code::kInvalidArgument);
    EXPECT_EQ(automatic.outer().set("period", 3).text(),
              "\"period\" cannot be set; allowed: \"lr\", \"loss\", \"weight\", \"retune\"");
    return ok_status();
  });
  EXPECT_TRUE(status.ok()) << status.text();
}

class OuterPeriodWorlds : public testing::TestWithParam<std::string> {
  const CallsOutOfOrder slices_;
};

// With the time that it takes. Behind the choice a state continues bit for bit.
TEST_P(OuterPeriodWorlds, RanksAgreeAndStatesHaveIt) {
  const char* const settings[] = {
      R"({"preset": "co2", "period": "auto"})",
      R"({"preset": "streaming_diloco", "period": "auto", "delay": 3, "fragments": 2, "codec": "int8"})",
      R"({"preset": "co2_paper", "period": "auto", "fragments": 2})",
      R"({"preset": "delta_corrected", "period": "auto"})"};
  for (const char* json : settings) {
    SCOPED_TRACE(json);
    std::mutex mutex;
    std::vector<std::pair<uint64_t, uint64_t>> chosen;  // of ranks: step, period
    const Status status = run_world(world_of(GetParam(), 3), [&](const auto& comm) {
      Model model(comm, json);
      uint64_t step = 0;
      for (; step < 24 || (model.info().events & kOuterMeasuring) != 0; ++step) {
        require(step < 100, "no period is chosen");
        model.train();
        model.step();
      }
      {
        const std::lock_guard lock(mutex);
        chosen.emplace_back(step, model.info().period);
      }
      EXPECT_EQ(model.info().delay,
                std::string(json).find("\"delay\"") != std::string::npos ? 3 : model.info().period);
      const uint64_t steps = 2 * model.info().period + 5;
      const auto end = [&](Model& m) {
        for (uint64_t k = 0; k < steps; ++k) {
          m.train();
          m.step();
        }
        return m.live();
      };
      const std::vector<std::byte> state = check(export_outer(model.outer(), StateErrors::kOwn));
      const auto wanted = end(model);
      Model resumed(comm, json);
      check(resumed.outer().restore(check(decode_outer(state))));
      EXPECT_EQ(resumed.info().period, chosen[0].second);
      EXPECT_EQ(end(resumed), wanted);
      return ok_status();
    });
    EXPECT_TRUE(status.ok()) << status.text();
    for (const auto& c : chosen) EXPECT_EQ(c, chosen[0]);
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, OuterPeriodWorlds, testing::ValuesIn(world_kinds()),
                         [](const auto& world) { return world.param; });

}  // namespace
}  // namespace sotto::test
