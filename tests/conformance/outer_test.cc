// Outer optimizers on every kind of world: the exact sequences of the specification (co2-overlap,
// section 15.1), and what holds for every setting.
#include <gtest/gtest.h>

#include <barrier>
#include <cmath>
#include <string>
#include <vector>

#include "core/outer/outer.h"
#include "tests/support/calls.h"
#include "tests/support/core_ranks.h"
#include "tests/support/ordered_transport.h"
#include "tests/support/ranks.h"

namespace sotto::test {
namespace {

// A rank's parameters: every element is the same number, up to a tolerance, so that the numbers of
// one element are those of all.
class Model {
 public:
  Model(const std::shared_ptr<Comm>& comm, const std::string& json, float start,
        std::vector<uint64_t> counts = {1, 9'001, 70'000}, double tolerance = 0)
      : tolerance_(tolerance),
        device_(comm->context()->device()),
        access_(comm->context()->engine(), device_) {
    std::vector<ParamSpec> specs;
    for (const uint64_t count : counts) {
      memory_.push_back(check(DeviceArray::make(device_, count * 4)));
      ParamSpec spec;
      spec.name = "p" + std::to_string(memory_.size());
      spec.count = count;
      spec.param = static_cast<float*>(memory_.back().data());
      specs.push_back(spec);
      counts_.push_back(count);
    }
    write(start);
    outer_ = check(Outer::create(comm, json, std::move(specs)));
    engine_ = &comm->engine();
  }

  ~Model() { outer_->close(); }

  Outer& outer() { return *outer_; }
  void write(float x) {
    for (size_t t = 0; t < memory_.size(); ++t) {
      const std::vector<float> values(counts_[t], x);
      check(access_.upload(memory_[t].data(), std::span<const float>(values)));
    }
  }
  // The number that all elements have; NaN if they differ.
  float read() const {
    float x = 0;
    for (size_t t = 0; t < memory_.size(); ++t) {
      const std::vector<float> values =
          check(access_.download<float>(memory_[t].data(), counts_[t]));
      if (t == 0) x = values[0];
      for (const float v : values) {
        if (!(std::fabs(v - x) <= tolerance_)) return std::nanf("");
      }
    }
    return x;
  }
  // gamma * (x - c) for every element.
  void descend(float c, float gamma) { write(read() - gamma * (read() - c)); }
  Status wait(const Result<OpRef>& op) { return op.ok() ? engine_->wait(*op, -1) : op.status(); }
  void step() { check(wait(outer_->step({}))); }
  void flush() { check(wait(outer_->flush({}))); }

 private:
  const double tolerance_;
  std::shared_ptr<Device> device_;
  DeviceAccess access_;
  std::vector<DeviceArray> memory_;
  std::vector<uint64_t> counts_;
  std::shared_ptr<Outer> outer_;
  Engine* engine_ = nullptr;
};

struct Sequence {
  const char* name;
  const char* json;  // beside period and the neutral settings
  std::vector<double> rank0;
  std::vector<double> rank1 = {};  // empty: as rank 0
  // After `flush_after` rounds; 0: there is no flush.
  size_t flush_after = 0;
  double flushed = 0;
  double tolerance = 0;
};

const std::vector<Sequence>& problem_t() {
  static const std::vector<Sequence> all{
      {"S0",
       R"("delay": 0, "beta": 0)",
       {5, 2, 1.25, 1.0625, 1.015625, 1.00390625, 1.0009765625, 1.000244140625, 1.00006103515625}},
      {"S1",
       R"("delay": 0, "beta": 0.5)",
       {5, 2, -0.25, -0.4375, 0.546875, 1.37890625, 1.5107421875, 1.193603515625,
        0.88983154296875}},
      {"S2",
       R"("delay": 0, "rule": "nesterov", "alpha": 0.5, "beta": 0.5)",
       {5, 2.75, 1.390625, 0.8193359375, 11609.0 / 16384, 205319.0 / 262144, 3723929.0 / 4194304}},
      {"C0", R"("beta": 0)", {5, 5, 2, -1, -1.75, -0.25, 1.8125, 2.75, 2.140625}, {}, 8, 0.828125},
      {"C1",
       R"("alpha": 0.5, "beta": 0.25)",
       {5, 5, 3.5, 1.625, 0.21875, -0.3671875, -113.0 / 512, 673.0 / 2048, 7567.0 / 8192}},
      {"C2",
       R"("beta": 0, "penalty": "const", "lambda_const": 2)",
       {5, 5, 3.5, 2, 1.0625, 0.6875, 0.6640625, 0.78125, 0.9072265625}},
      {"C3", R"("beta": 0, "clip": "coord", "phi": 1)", {5, 5, 4, 3, 2, 1, 0.25, 0.25, 0.8125}},
      {"C4",
       R"("beta": 0, "form": "anchor_diff")",
       {5, 5, 2, 2, 1.25, 1.25, 1.0625, 1.0625, 1.015625}},
      {"C5",
       R"("beta": 0.5, "form": "anchor_diff")",
       {5, 5, 2, 0.5, 0.5, 0.875, 1.0625, 1.0625, 1.015625}},
      {"C6",
       R"("rule": "nesterov", "alpha": 0.5, "beta": 0.25)",
       {5, 5, 3.125, 1.15625, 11.0 / 256, -7.0 / 64, 2587.0 / 8192, 27931.0 / 32768,
        315425.0 / 262144}},
      {"C7",
       R"("beta": 0, "penalty": "gap_rel", "eps": 0)",
       {5, 5, 2, 0.5, 0.25, 0.475, 491.0 / 560},
       {},
       0,
       0,
       1e-6},
      {"E1",
       R"("beta": 0, "freshness": 1)",
       {5, 0.5, 7.0 / 8, -5.0 / 32, 55.0 / 128, -29.0 / 512},
       {5, 3.5, 13.0 / 8, 73.0 / 32, 205.0 / 128, 1057.0 / 512},
       4,
       65.0 / 64},
      {"E2",
       R"("beta": 0, "freshness": 0.5)",
       {5, 11.0 / 4, 19.0 / 32, -121.0 / 256, -245.0 / 2048},
       {5, 17.0 / 4, 49.0 / 32, 173.0 / 256, 1945.0 / 2048},
       4,
       385.0 / 512},
      {"E4",
       R"("rule": "nesterov", "alpha": 0.5, "beta": 0.5, "freshness": 0.5)",
       {5, 53.0 / 16, 643.0 / 512, -3595.0 / 16384},
       {5, 71.0 / 16, 1153.0 / 512, 13991.0 / 16384}},
  };
  return all;
}

std::string settings(const std::string& more) {
  return R"({"preset": "co2", "period": 2, "auto_floor": false, "penalty": "none", "clip": "none", )" +
         more + "}";
}

// JSON may name a key once.
std::string merged(std::string more) {
  std::string json = settings(more);
  for (const char* key : {"\"penalty\": \"none\", ", "\"clip\": \"none\", "}) {
    const std::string name = std::string(key).substr(0, std::string(key).find(':'));
    if (more.find(name + ":") != std::string::npos) json.replace(json.find(key), strlen(key), "");
  }
  return json;
}

void expect_near(float found, double wanted, double tolerance, const std::string& where) {
  if (tolerance == 0) {
    EXPECT_EQ(found, static_cast<float>(wanted)) << where;
  } else {
    EXPECT_NEAR(found, wanted, tolerance) << where;
  }
}

class OuterTest : public testing::TestWithParam<std::string> {
  const CallsOutOfOrder slices_;
};

void expect_sequence(const std::string& world, const Sequence& s, const std::string& json,
                     double tolerance) {
  SCOPED_TRACE(json);
  const Status status = run_world(world_of(world, 2), [&](const auto& comm) {
    const bool first = comm->rank() == 0;
    Model model(comm, json, 5, {1, 9'001, 70'000}, tolerance);
    const std::vector<double>& wanted = first || s.rank1.empty() ? s.rank0 : s.rank1;
    for (size_t t = 1; t < wanted.size(); ++t) {
      for (int k = 0; k < 2; ++k) {
        model.descend(first ? -1.0f : 3.0f, 0.5f);
        model.step();
      }
      expect_near(model.read(), wanted[t], tolerance, "round " + std::to_string(t));
      if (t != s.flush_after) continue;
      model.flush();
      expect_near(model.read(), s.flushed, tolerance, "flush");
      return ok_status();
    }
    return ok_status();
  });
  EXPECT_TRUE(status.ok()) << status.text();
}

TEST_P(OuterTest, FollowsTheExactSequences) {
  for (const Sequence& s : problem_t()) expect_sequence(GetParam(), s, merged(s.json), s.tolerance);
}

// Where all elements are alike, what a codec makes of them is what they are.
TEST_P(OuterTest, FreshnessIsOfWhatACodecHasSent) {
  constexpr const char* kCodecs[] = {
      R"("dense_rounds": 0, "codec": {"type": "topk", "block": 8, "k": 8, "bits": 32})",
      R"("dense_rounds": 1, "codec": "onebit")"};
  for (const Sequence& s : problem_t()) {
    if (std::string(s.json).find("freshness") == std::string::npos) continue;
    for (const char* codec : kCodecs)
      expect_sequence(GetParam(), s, merged(std::string(s.json) + ", " + codec), 1e-5);
  }
}

// One rank: gradient descent with the gradient of the round before, or, with all of its own newest
// steps, as it is.
TEST_P(OuterTest, OneRankIsDelayedGradientDescent) {
  struct Case {
    const char* json;
    std::vector<double> wanted;
  };
  const Case cases[] = {
      {R"("beta": 0)", {1, 1, 0.5, 0, -0.25, -0.25, -0.125, 0, 0.0625}},
      {R"("beta": 0, "form": "anchor_diff")", {1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.0625}},
      {R"("beta": 0, "freshness": 1)", {1, 0.5, 0.25, 0.125, 0.0625}}};
  for (const Case& c : cases) {
    SCOPED_TRACE(c.json);
    std::string text = merged(c.json);
    text.replace(text.find("\"period\": 2"), 11, "\"period\": 1");
    const Status status = run_world(world_of(GetParam(), 1), [&](const auto& comm) {
      Model model(comm, text, 1);
      for (size_t t = 1; t < c.wanted.size(); ++t) {
        model.descend(0, 0.5f);
        model.step();
        expect_near(model.read(), c.wanted[t], 0, "round " + std::to_string(t));
      }
      return ok_status();
    });
    EXPECT_TRUE(status.ok()) << status.text();
  }
}

// Parameters behind each of some rounds of two steps; no rank takes part in the third one.
std::vector<float> rounds_with_an_empty_one(const std::string& json) {
  std::vector<float> out;
  const Status status = run_world(world_of("inproc", 2), [&](const auto& comm) {
    const bool first = comm->rank() == 0;
    Model model(comm, json, 5);
    for (int t = 0; t < 8; ++t) {
      check(model.outer().set("weight", t == 2 ? 0 : 1));
      for (int k = 0; k < 2; ++k) {
        model.descend(first ? -1.0f : 3.0f, 0.5f);
        model.step();
      }
      if (first) out.push_back(model.read());
    }
    return ok_status();
  });
  EXPECT_TRUE(status.ok()) << status.text();
  return out;
}

// A pseudo-gradient is taken from the anchor of its launch, also where that has not moved since the
// round before.
TEST(OuterRoundsThatAreEmpty, PayloadsAreAlike) {
  const std::vector<float> deltas = rounds_with_an_empty_one(merged(R"("beta": 0)"));
  EXPECT_EQ(deltas, rounds_with_an_empty_one(merged(R"("beta": 0, "payload": "params")")));
  EXPECT_EQ(deltas[3], deltas[2]);
  EXPECT_NE(deltas[4], deltas[3]);
}

// early: rank 0 flushes before rank 1 has launched the average under way.
float flushed(bool early) {
  float x = 0;
  std::barrier launched(2);
  const Status status = run_world(world_of("inproc", 2), [&](const auto& comm) {
    const bool first = comm->rank() == 0;
    Model model(comm, R"({"preset": "diloco", "period": 4, "delay": 2, "merge": "lerp",
                          "merge_a": 0.5})",
                5);
    const auto inner_step = [&] {
      model.descend(first ? -1.0f : 3.0f, 0.5f);
      model.step();
    };
    for (int k = 0; k < 3; ++k) inner_step();
    if (!first && early) launched.arrive_and_wait();
    for (int k = 3; k < 5; ++k) inner_step();
    if (!early) check(model.outer().snapshot());  // waits for the average
    const Result<OpRef> flush = model.outer().flush({});
    if (first && early) launched.arrive_and_wait();
    check(model.wait(flush));
    if (first) x = model.read();
    return ok_status();
  });
  EXPECT_TRUE(status.ok()) << status.text();
  return x;
}

// What a flush sends is taken behind the merge of the average that comes first.
TEST(OuterFlush, BitsDoNotDependOnWhenAnAverageEnds) { EXPECT_EQ(flushed(true), flushed(false)); }

INSTANTIATE_TEST_SUITE_P(Worlds, OuterTest, testing::ValuesIn(world_kinds()),
                         [](const auto& world) { return world.param; });

}  // namespace
}  // namespace sotto::test
