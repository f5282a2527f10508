// Outer optimizers whose peers are lost. The average that was under way, or the step that runs,
// ends with the one cause, which names a rank. Live parameters, anchor and momentum are those of
// before the step that failed, whatever message was the last, and closing waits for nothing. States
// that are exported then, all of one step, go on to what there would have been without the fault,
// bit for bit, or, where a codec's average has come to some ranks alone, alike on all ranks; ranks
// refuse those of different steps. A flush that fails may have been made in part: the next one
// makes the rest. At every message of launches, flights and consumptions, and while ranks launch,
// on ranks that are threads; outer_kill_test.cc has ranks that are processes.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <optional>

#include "core/base/hash.h"
#include "core/outer/outer.h"
#include "tests/emulation/async_device/async_device.h"
#include "tests/support/core_ranks.h"
#include "tests/support/faulty_transport.h"
#include "tests/support/sanitized.h"

namespace sotto::test {
namespace {

struct Kind {
  const char* name;
  const char* json;
  bool momentum = true;
  bool one_anchor = true;  // the same on all ranks
};

// With momentum, so that an update changes everything. Two steps of a period.
constexpr Kind kKinds[] = {
    {"dense_now", R"({"preset": "diloco", "period": 2, "delay": 0})"},
    {"dense_late", R"({"preset": "delayed_diloco", "alpha": 0.1, "period": 2, "delay": 2})"},
    {"dense_between", R"({"preset": "diloco", "period": 2, "delay": 1})"},
    {"params_now", R"({"preset": "slowmo", "period": 2})"},
    {"onebit_now",
     R"({"preset": "diloco", "period": 2, "delay": 0, "codec": "onebit", "dense_rounds": 1})"},
    {"onebit_late",
     R"({"preset": "co2", "period": 2, "delay": 2, "codec": "onebit", "dense_rounds": 1})"},
    {"topk_now",
     R"({"preset": "diloco", "period": 2, "delay": 0, "codec": {"type": "topk", "block": 512}})"},
    {"topk_late", R"({"preset": "co2", "beta": 0.1, "period": 2, "delay": 2, "codec": "topk"})"},
    {"topk_two_phase_late",
     R"({"preset": "co2", "beta": 0.1, "period": 2, "delay": 2,
         "codec": {"type": "topk", "exchange": "two_phase"}})"},
    {"progress_late", R"({"preset": "cocod", "period": 2})", false},
    {"pull_late", R"({"preset": "overlap_local_sgd", "period": 2})"},
    {"fresh_late", R"({"preset": "delta_corrected", "period": 2})"},
    {"fresh_topk_late",
     R"({"preset": "delta_corrected", "period": 2, "codec": "topk", "dense_rounds": 1})", true,
     false},
    {"fragments_between",
     R"({"preset": "streaming_diloco", "period": 2, "delay": 1, "fragments": 2})"},
};

// Further ones that launch before their update.
constexpr Kind kFirst[] = {
    {"lerp_late",
     R"({"preset": "delayed_diloco", "alpha": 0.1, "period": 2, "merge": "lerp", "merge_a": 0.5})"},
    {"params_late", R"({"preset": "slowmo", "period": 2, "delay": 2})"},
    {"paper_late", R"({"preset": "co2_paper", "period": 2})"},
};

constexpr uint64_t kBefore = 6;     // steps before the first fault: three launches
constexpr uint64_t kDisturbed = 4;  // steps whose messages are disturbed
constexpr uint64_t kSteps = kBefore + kDisturbed + 6;
constexpr uint64_t kCount = 5'003;
constexpr auto kClosing = std::chrono::seconds(kSanitized ? 5 : 1);

// Live parameters, anchor and momentum.
struct Hashes {
  uint64_t live = 0, anchor = 0, momentum = 0;
  bool operator==(const Hashes&) const = default;
};

class Model {
 public:
  ~Model() {
    if (outer_) outer_->close();
  }
  explicit Model(int32_t rank) : rank_(rank) {
    for (size_t t = 0; t < 2; ++t) live_[t].assign(t == 0 ? kCount - kCount / 3 : kCount / 3, 0.5f);
  }
  Status create(const std::shared_ptr<Comm>& comm, const Kind& kind) {
    std::vector<ParamSpec> specs(2);
    for (size_t t = 0; t < 2; ++t) {
      specs[t].name = "p" + std::to_string(t);
      specs[t].count = live_[t].size();
      specs[t].param = live_[t].data();
    }
    momentum_ = kind.momentum;
    SOTTO_ASSIGN(outer_, Outer::create(comm, kind.json, std::move(specs)));
    return ok_status();
  }
  // The inner step after `done` others.
  void train(uint64_t done) {
    for (auto& live : live_) {
      for (uint64_t i = 0; i < live.size(); ++i) {
        const uint64_t x = (i * 31 + done * 17 + static_cast<uint64_t>(rank_) * 7) % 23;
        live[i] += 0.01f * (static_cast<float>(x) - 11);
      }
    }
  }
  Status step(int64_t timeout_us) { return ended(outer_->step(within(timeout_us))); }
  Status flush(int64_t timeout_us) { return ended(outer_->flush(within(timeout_us))); }
  Result<Hashes> hashes() const {
    Hashes h;
    for (const auto& live : live_) h.live = mixed(h.live, live);
    SOTTO_ASSIGN(const auto anchor, outer_->values(OuterArray::kAnchor));
    for (const auto& values : anchor) h.anchor = mixed(h.anchor, values);
    if (!momentum_) return h;
    SOTTO_ASSIGN(const auto momentum, outer_->values(OuterArray::kMomentum));
    for (const auto& values : momentum) h.momentum = mixed(h.momentum, values);
    return h;
  }
  Outer& outer() { return *outer_; }

 private:
  static CallOptions within(int64_t timeout_us) {
    CallOptions options;
    options.timeout_us = timeout_us;
    return options;
  }
  Status ended(const Result<OpRef>& op) {
    return op.ok() ? outer_->comm()->engine().wait(*op, -1) : op.status();
  }
  static uint64_t mixed(uint64_t hash, const std::vector<float>& values) {
    const uint64_t both[] = {hash, hash64(values.data(), values.size() * sizeof(float))};
    return hash64(both, sizeof both);
  }

  const int32_t rank_;
  std::vector<float> live_[2];
  bool momentum_ = true;
  std::shared_ptr<Outer> outer_;
};

struct Outcome {
  std::vector<Hashes> before, after;   // of every step that was made
  Status status;                       // of the first step that failed
  Status again;                        // of the step after it
  Status cause;                        // of the comm
  std::optional<OuterSnapshot> state;  // behind the failure
  std::chrono::nanoseconds closing{0};
  uint64_t sends = 0;  // of the disturbed steps
};

struct Disturbance {
  int rank = -1;  // none
  FaultKind kind = FaultKind::kLosePeer;
  uint64_t send = 0;
  int64_t timeout_us = 20'000'000;
};

// Step k of the model: outer().step, and what the test does to it.
using MakeStep = std::function<Status(Model* model, uint64_t k)>;

Status train(const std::shared_ptr<Comm>& comm, const Kind& kind, const MakeStep& step,
             Outcome* out) {
  Model model(comm->rank());
  SOTTO_TRY(model.create(comm, kind));
  for (uint64_t k = 0; k < kSteps && out->status.ok(); ++k) {
    model.train(k);
    SOTTO_ASSIGN(const Hashes before, model.hashes());
    out->status = step(&model, k);
    SOTTO_ASSIGN(const Hashes after, model.hashes());
    out->before.push_back(before);
    out->after.push_back(after);
  }
  if (!out->status.ok()) {
    out->again = model.step(0);
    SOTTO_ASSIGN(out->state, model.outer().snapshot());
  }
  out->cause = comm->failure();
  const auto start = std::chrono::steady_clock::now();
  model.outer().close();
  out->closing = std::chrono::steady_clock::now() - start;
  // What was under way has changed nothing.
  SOTTO_ASSIGN(const Hashes closed, model.hashes());
  if (closed != out->after.back()) return error(Code::kInternal, "closing has changed something");
  return ok_status();
}

// What is disturbed: steps, or a flush behind the first of them.
enum class Call : uint8_t { kStep, kFlush };

std::vector<Outcome> run(const Kind& kind, const std::string& transport, int size,
                         const Disturbance& d, Call call = Call::kStep) {
  std::vector<Outcome> outcomes(static_cast<size_t>(size));
  std::vector<std::shared_ptr<FaultState>> states(static_cast<size_t>(size));
  WorldOptions world;
  world.size = size;
  world.transport = transport;
  world.params.segment_bytes = 8 * 1024;
  world.params.heartbeat_ms = 50;
  world.wrap_backends = [&](int32_t rank, BackendFactories* backends) {
    FaultScript script{.seed = d.send + 1, .max_delay_polls = 3};
    if (rank == d.rank) script.faults = {{d.kind, d.send}};
    const auto state = states[static_cast<size_t>(rank)] = std::make_shared<FaultState>();
    state->counts = false;
    make_faulty(&(*backends)[transport], script, state);
  };
  std::barrier all_there(size);
  const Status status = run_world(world, [&](const std::shared_ptr<Comm>& comm) -> Status {
    const auto rank = static_cast<size_t>(comm->rank());
    FaultState& state = *states[rank];
    const auto begin = [&] {
      all_there.arrive_and_wait();
      state.counts = true;
    };
    const auto end = [&] { outcomes[rank].sends = state.sends; };
    const auto step = [&](Model* model, uint64_t k) -> Status {
      if (k == kBefore && call == Call::kFlush) {
        SOTTO_TRY(model->step(d.timeout_us));
        begin();
        const Status made = model->flush(d.timeout_us);
        end();
        return made;
      }
      if (k == kBefore) begin();
      const Status made = model->step(d.timeout_us);
      if (k + 1 == kBefore + kDisturbed && call == Call::kStep) end();
      return made;
    };
    return train(comm, kind, step, &outcomes[rank]);
  });
  EXPECT_TRUE(status.ok()) << status.text();
  return outcomes;
}

AsyncDevice& device_of(const Comm& comm) {
  return static_cast<AsyncDevice&>(*comm.context()->device());
}

// A step of which all that needs nothing but the device is queued there, and stands.
Result<OpRef> begin_standing(const Comm& comm, Outer* outer) {
  AsyncDevice& device = device_of(comm);
  for (uint32_t lane = 0; lane < device.caps().all_lanes(); ++lane) device.hold(lane);
  SOTTO_ASSIGN(OpRef op, outer->step({}));
  // With every turn the driver queues one step of a plan at least.
  int turns = 0;
  Engine& engine = comm.engine();
  engine.drive([&](Driver& driver) {
    return driver.run_until([&] { return ++turns == 1000; },
                            Deadline::in_us(engine.clock(), 20'000'000));
  });
  return op;
}

void resume_device(const Comm& comm) {
  AsyncDevice& device = device_of(comm);
  for (uint32_t lane = 0; lane < device.caps().all_lanes(); ++lane) device.resume(lane);
}

// What an average under way is made of, and what it moves. Of the two payloads that freshness needs
// that of the average before it is over.
void expect_kept(const OuterSnapshot& before, const OuterSnapshot& after) {
  for (size_t f = 0; f < before.fragments.size(); ++f) {
    const OuterFragmentState &old = before.fragments[f], &now = after.fragments[f];
    EXPECT_EQ(now.pending, old.pending);
    EXPECT_EQ(now.launches, old.launches);
    EXPECT_EQ(now.consumed, old.consumed);
    if (old.pending == OuterPending::kNone) continue;
    for (size_t i = 0; i < kOuterArrays; ++i) {
      if (i == static_cast<size_t>(OuterArray::kPrevious)) continue;
      EXPECT_TRUE(now.arrays[i] == old.arrays[i]) << "array " << i << " of fragment " << f;
    }
  }
}

// A step in which an average is launched, and with a delay another one is under way.
constexpr uint64_t kLaunching = kBefore + 1;

// The devices of all ranks stand from before that step until the comm has failed. So it fails
// behind what it takes to send, if that can be done without the update.
std::vector<Outcome> fail_launching(const Kind& kind) {
  std::vector<Outcome> outcomes(2);
  WorldOptions world = world_of("async", 2);
  world.params.segment_bytes = 8 * 1024;
  std::barrier all_there(2);
  const Status status = run_world(world, [&](const std::shared_ptr<Comm>& comm) -> Status {
    Outcome& out = outcomes[static_cast<size_t>(comm->rank())];
    const auto step = [&](Model* model, uint64_t k) -> Status {
      if (k != kLaunching) return model->step(20'000'000);
      SOTTO_ASSIGN(const OuterSnapshot before, model->outer().snapshot());  // waits for the average
      all_there.arrive_and_wait();
      SOTTO_ASSIGN(const OpRef op, begin_standing(*comm, &model->outer()));
      all_there.arrive_and_wait();
      if (comm->rank() == 0) comm->abort("a test");
      const bool failed =
          comm->engine().wait_until([&] { return !comm->failure().ok(); }, 20'000'000);
      resume_device(*comm);
      const Status made = comm->engine().wait(op, -1);
      if (!failed) return error(Code::kInternal, "the comm has not failed");
      if (made.ok()) return made;
      SOTTO_ASSIGN(const OuterSnapshot after, model->outer().snapshot());
      expect_kept(before, after);
      return made;
    };
    return train(comm, kind, step, &out);
  });
  EXPECT_TRUE(status.ok()) << status.text();
  return outcomes;
}

void expect_nothing_between(const Outcome& undisturbed, const Outcome& got) {
  const size_t steps = got.after.size();
  for (size_t k = 0; k < steps; ++k) {
    EXPECT_EQ(got.before[k], undisturbed.before[k]) << "before step " << k;
    const bool made = k + 1 < steps || got.status.ok();
    EXPECT_EQ(got.after[k], (made ? undisturbed.after : undisturbed.before)[k])
        << "after step " << k << ": " << got.status.text();
    if (!made && got.after[k] == undisturbed.after[k] &&
        undisturbed.after[k] != undisturbed.before[k])
      ADD_FAILURE() << "the step has failed, and was made";
  }
}

void expect_one_cause(const std::vector<Outcome>& outcomes, Code code) {
  for (const Outcome& o : outcomes) {
    ASSERT_FALSE(o.status.ok()) << "a rank has not noticed";
    EXPECT_TRUE(o.status.code() == code || o.status.code() == outcomes[0].status.code())
        << o.status.text();
    EXPECT_EQ(o.cause.text(), outcomes[0].cause.text());
    EXPECT_NE(o.cause.text().find("rank "), std::string::npos) << o.cause.text();
    EXPECT_NE(o.status.text().find(o.cause.text()), std::string::npos)
        << o.status.text() << "; but the comm: " << o.cause.text();
    EXPECT_EQ(o.again.code(), o.cause.code()) << o.again.text();
    EXPECT_LT(o.closing, kClosing);
  }
}

// Where ranks have failed in different steps none goes on, and each says why.
Status refuses(Model* model) {
  const Status status = model->step(0);
  if (status.code() == Code::kProtocol) return ok_status();
  return error(Code::kInternal, "states of different steps: {}",
               status.ok() ? "the step was made" : status.text());
}

// What ranks have exported, all together.
struct Restart {
  Restart(const Kind& kind, const std::vector<Outcome>& failed) {
    const bool codec = std::string_view(kind.json).find("codec") != std::string_view::npos;
    const OuterSnapshot& first = *failed[0].state;
    for (const Outcome& o : failed) {
      same_step =
          same_step && o.state->step == first.step && o.state->flushed_at == first.flushed_at;
      for (size_t f = 0; f < first.fragments.size(); ++f) {
        const OuterFragmentState &mine = o.state->fragments[f], &other = first.fragments[f];
        const auto none = [](const OuterFragmentState& s) {
          return s.pending == OuterPending::kNone;
        };
        same_step = same_step && mine.launches == other.launches && none(mine) == none(other);
        // Of an average that has not come to all ranks: what encoders have put into error feedback
        // is taken back up to its rounding, and where it has come it stays.
        const bool whole =
            mine.pending == other.pending && mine.pending == OuterPending::kDelivered;
        exact = exact && (!codec || whole);
      }
    }
  }
  bool same_step = true;
  bool exact = true;  // error feedback has the bits of all ranks' last average
};

// The call that failed, then the steps behind it. end: what that comes to.
Status resume(const std::shared_ptr<Comm>& comm, const Kind& kind, const Outcome& whole,
              const Outcome& failed, const Restart& restart, Call call, Hashes* end) {
  Model model(comm->rank());
  SOTTO_TRY(model.create(comm, kind));
  SOTTO_TRY(model.outer().restore(*failed.state));
  const uint64_t first = failed.after.size() - 1;
  if (!restart.same_step) return refuses(&model);
  for (uint64_t k = first; k < kSteps; ++k) {
    if (k != first) model.train(k);
    const bool flushes = k == kBefore && call == Call::kFlush;
    SOTTO_TRY(flushes ? model.flush(20'000'000) : model.step(20'000'000));
    SOTTO_ASSIGN(*end, model.hashes());
    if (restart.exact && *end != whole.after[k])
      return error(Code::kInternal, "resumed in step {}: step {} differs", first, k);
  }
  return ok_status();
}

// Returns whether they went on.
bool expect_resumes(const Kind& kind, const std::vector<Outcome>& whole,
                    const std::vector<Outcome>& failed, Call call = Call::kStep) {
  WorldOptions world;
  world.size = static_cast<int32_t>(whole.size());
  world.params.segment_bytes = 8 * 1024;
  const Restart restart(kind, failed);
  std::vector<Hashes> ends(failed.size());
  const Status status = run_world(world, [&](const std::shared_ptr<Comm>& comm) -> Status {
    const auto rank = static_cast<size_t>(comm->rank());
    return resume(comm, kind, whole[rank], failed[rank], restart, call, &ends[rank]);
  });
  EXPECT_TRUE(status.ok()) << status.text();
  for (const Hashes& h : ends) {
    EXPECT_TRUE(restart.exact || !kind.one_anchor || h.anchor == ends[0].anchor)
        << "anchors differ";
  }
  return restart.same_step;
}

class OuterAtEveryMessage : public testing::TestWithParam<Kind> {
 protected:
  // Every `stride`th of the disturbances that there are.
  static void expect(const std::string& transport, int size, FaultKind fault, int64_t timeout_us,
                     uint64_t stride, Call call = Call::kStep) {
    const Kind& kind = GetParam();
    const std::vector<Outcome> whole = run(kind, transport, size, {}, call);
    for (const Outcome& rank : whole) ASSERT_TRUE(rank.status.ok()) << rank.status.text();
    uint64_t number = 0, resumed = 0;
    for (int rank = 0; rank < size; ++rank) {
      const uint64_t sends = whole[static_cast<size_t>(rank)].sends;
      // A merge that resets drops steps between a launch and its end: there is nothing to flush.
      if (call == Call::kFlush && sends == 0) continue;
      ASSERT_GT(sends, 0u);
      for (uint64_t send = 0; send < sends; ++send) {
        if (number++ % stride != stride / 2) continue;
        SCOPED_TRACE(fmt::format("{} over {}, {} ranks: send {} of {} of rank {}", kind.name,
                                 transport, size, send, sends, rank));
        const std::vector<Outcome> got =
            run(kind, transport, size, {rank, fault, send, timeout_us}, call);
        for (size_t r = 0; r < got.size() && call == Call::kStep; ++r) {
          SCOPED_TRACE(fmt::format("rank {}", r));
          expect_nothing_between(whole[r], got[r]);
        }
        expect_one_cause(got, fault == FaultKind::kDrop ? Code::kTimeout : Code::kPeerLost);
        if (HasFailure()) return;
        resumed += expect_resumes(kind, whole, got, call) ? 1 : 0;
        if (HasFailure()) return;
      }
    }
    RecordProperty("resumed", static_cast<int>(resumed));
  }
};

TEST_P(OuterAtEveryMessage, ALostPeer) {
  for (const int size : {2, 3})
    expect("inproc", size, FaultKind::kLosePeer, 20'000'000, kSanitized ? 7 : 1);
}

TEST_P(OuterAtEveryMessage, ALostPeerInAFlush) {
  for (const int size : {2, 3})
    expect("inproc", size, FaultKind::kLosePeer, 20'000'000, kSanitized ? 5 : 1, Call::kFlush);
}

TEST_P(OuterAtEveryMessage, ALostPeerOverTcp) {
  for (const int size : {2, 3})
    expect("tcp", size, FaultKind::kLosePeer, 20'000'000, kSanitized ? 17 : 5);
}

// A rank that stands still: what it was to send never comes.
TEST_P(OuterAtEveryMessage, AMessageThatNeverComes) {
  expect("inproc", 2, FaultKind::kDrop, 300'000, kSanitized ? 17 : 7);
}

// All ranks go on from what they have kept, and one of them says that it has not got the average
// which was under way: it is made again of what ranks had sent.
void expect_resumes_behind_launch(const Kind& kind) {
  const std::vector<Outcome> whole = run(kind, "inproc", 2, {});
  std::vector<Outcome> got = fail_launching(kind);
  expect_one_cause(got, Code::kAborted);
  if (testing::Test::HasFatalFailure()) return;
  for (size_t r = 0; r < got.size(); ++r) expect_nothing_between(whole[r], got[r]);
  for (OuterFragmentState& f : got[0].state->fragments) {
    if (f.pending == OuterPending::kDelivered) f.pending = OuterPending::kUndelivered;
  }
  EXPECT_TRUE(expect_resumes(kind, whole, got)) << "ranks have failed in different steps";
}

TEST_P(OuterAtEveryMessage, AFailureWhileARankLaunches) {
  expect_resumes_behind_launch(GetParam());
}

class OuterThatLaunchesFirst : public testing::TestWithParam<Kind> {};

TEST_P(OuterThatLaunchesFirst, AFailureWhileARankLaunches) {
  expect_resumes_behind_launch(GetParam());
}

INSTANTIATE_TEST_SUITE_P(Kinds, OuterThatLaunchesFirst, testing::ValuesIn(kFirst),
                         [](const auto& p) { return std::string(p.param.name); });
INSTANTIATE_TEST_SUITE_P(Kinds, OuterAtEveryMessage, testing::ValuesIn(kKinds),
                         [](const auto& p) { return std::string(p.param.name); });

}  // namespace
}  // namespace sotto::test
