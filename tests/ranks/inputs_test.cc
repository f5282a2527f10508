// Operations whose inputs arrive while they run, and operations that come after others.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <random>
#include <thread>

#include "core/plan/flat_reduce.h"
#include "tests/emulation/async_device/async_device.h"
#include "tests/support/calls.h"
#include "tests/support/core_ranks.h"
#include "tests/support/ordered_transport.h"

namespace sotto::test {
namespace {

const std::vector<uint64_t> kCounts{5, 70'000, 1, 9'000, 200'003};

float value(int32_t rank, size_t tensor, uint64_t i) {
  return static_cast<float>((i * 7 + static_cast<uint64_t>(rank) * 13 + tensor * 3) % 101) - 50;
}

float sum(int32_t size, size_t tensor, uint64_t i) {
  float all = 0;
  for (int32_t r = 0; r < size; ++r) all += value(r, tensor, i);
  return all;
}

// Sums of tensors, each of which arrives on its own.
class Sums {
 public:
  explicit Sums(const std::shared_ptr<Comm>& comm) : comm_(comm) {
    PlanBuilder b;
    for (const uint64_t count : kCounts) {
      in_slots_.push_back(b.bound_list(std::vector<uint64_t>{count * 4}));
      out_slots_.push_back(b.bound(count * 4));
    }
    std::vector<FlatLayout> layouts;
    for (size_t t = 0; t < kCounts.size(); ++t) {
      EXPECT_EQ(b.await({&in_slots_[t], 1}), t);
      layouts.push_back(FlatLayout::concatenated({&kCounts[t], 1}, std::vector<uint32_t>{0}));
      FlatReduceRequest request;
      request.rank = comm->rank();
      request.size = comm->size();
      request.layout = &layouts.back();
      request.op = ReduceOp::kSum;
      request.in_list = in_slots_[t];
      request.out_flat = out_slots_[t];
      request.round = b.next_round();
      request.segment_bytes = 65536;
      emit_flat_all_reduce(b, request);
    }
    plan_ = check(comm->prepare(b.take(), comm->context()->device()));
    for (size_t t = 0; t < kCounts.size(); ++t) {
      in_.emplace_back(kCounts[t]);
      out_.emplace_back(kCounts[t], -1.0f);
      for (uint64_t i = 0; i < kCounts[t]; ++i) in_[t][i] = value(comm->rank(), t, i);
    }
  }
  // `bound`: inputs are known, not their contents.
  OpRef start(bool bound, const CallOptions& options = {}) {
    OpSignature signature;
    signature.kind = OpKind::kAllReduce;
    const auto bind = [&](sotto::Run& run) {
      for (size_t t = 0; t < kCounts.size(); ++t) {
        run.bases[in_slots_[t]] = bound ? in_[t].data() : nullptr;
        run.bases[out_slots_[t]] = out_[t].data();
      }
    };
    return check(comm_->launch(plan_, signature, bind, nullptr, options));
  }
  Status arrive(const OpRef& op, uint32_t input, bool bound, EventId event = 0) {
    void* memory = in_[input].data();
    return comm_->engine().arrive(op, input, event,
                                  bound ? std::span<void* const>() : std::span(&memory, 1));
  }
  Status check_sums() const {
    for (size_t t = 0; t < kCounts.size(); ++t) {
      for (uint64_t i = 0; i < kCounts[t]; ++i) {
        if (out_[t][i] != sum(comm_->size(), t, i))
          return error(Code::kInternal, "tensor {} [{}] is {}, want {}", t, i, out_[t][i],
                       sum(comm_->size(), t, i));
      }
    }
    return ok_status();
  }
  std::vector<float>& out(size_t tensor) { return out_[tensor]; }
  std::vector<float>& in(size_t tensor) { return in_[tensor]; }
  const std::shared_ptr<PreparedPlan>& plan() const { return plan_; }

 private:
  template <class T>
  static T check(Result<T> result) {
    EXPECT_TRUE(result.ok()) << result.status().text();
    return result.take();
  }
  std::shared_ptr<Comm> comm_;
  std::shared_ptr<PreparedPlan> plan_;
  std::vector<uint32_t> in_slots_, out_slots_;
  std::vector<std::vector<float>> in_, out_;
};

class Inputs : public ::testing::TestWithParam<std::tuple<std::string, int32_t>> {
  const CallsOutOfOrder inputs_;

 protected:
  WorldOptions world() const { return world_of(std::get<0>(GetParam()), std::get<1>(GetParam())); }
  void run(const std::function<Status(const std::shared_ptr<Comm>&)>& body) {
    const Status status = run_world(world(), body);
    EXPECT_TRUE(status.ok()) << status.text();
  }
};

// Every rank in an order of its own, with the memory known before or not.
TEST_P(Inputs, ArriveInAnyOrder) {
  run([](const std::shared_ptr<Comm>& comm) -> Status {
    std::mt19937 random(static_cast<uint32_t>(comm->rank()));
    for (int round = 0; round < 6; ++round) {
      const bool bound = round % 2 == 0;
      Sums sums(comm);
      const OpRef op = sums.start(bound);
      std::vector<uint32_t> order(kCounts.size());
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      for (const uint32_t input : order) {
        if (round > 3) std::this_thread::sleep_for(std::chrono::milliseconds(random() % 3));
        SOTTO_TRY(sums.arrive(op, input, bound));
      }
      SOTTO_TRY(comm->finish(op));
      SOTTO_TRY(sums.check_sums());
    }
    return ok_status();
  });
}

// The plan is used again, with other memory.
TEST_P(Inputs, OfTheNextRunArriveAnew) {
  run([](const std::shared_ptr<Comm>& comm) -> Status {
    Sums sums(comm);
    for (int round = 0; round < 4; ++round) {
      const OpRef op = sums.start(false);
      for (uint32_t t = 0; t < kCounts.size(); ++t) {
        std::vector<float> moved = sums.in(t);
        sums.in(t).swap(moved);
        SOTTO_TRY(sums.arrive(op, t, false));
      }
      SOTTO_TRY(comm->finish(op));
      SOTTO_TRY(sums.check_sums());
      for (uint32_t t = 0; t < kCounts.size(); ++t) std::ranges::fill(sums.out(t), -1.0f);
    }
    return ok_status();
  });
}

// Other collectives take their places between inputs, in the order in which the ranks call.
TEST_P(Inputs, OtherCollectivesGoOnBetweenThem) {
  run([](const std::shared_ptr<Comm>& comm) -> Status {
    for (int round = 0; round < 3; ++round) {
      Sums sums(comm);
      const OpRef op = sums.start(false);
      for (uint32_t t = 0; t < kCounts.size(); ++t) {
        std::vector<float> data(30'000, static_cast<float>(comm->rank()));
        SOTTO_TRY(all_reduce(comm, data));
        const auto size = static_cast<float>(comm->size());
        if (data != std::vector<float>(30'000, size * (size - 1) / 2))
          return error(Code::kInternal, "the collective before input {} is wrong", t);
        if (op->done()) return error(Code::kInternal, "done before input {}", t);
        SOTTO_TRY(sums.arrive(op, t, false));
      }
      SOTTO_TRY(comm->finish(op));
      SOTTO_TRY(sums.check_sums());
    }
    return ok_status();
  });
}

// On a device: what writes the input is queued on a lane, and the input is there behind an event.
TEST_P(Inputs, AreThereBehindAnEvent) {
  if (world().device == nullptr) GTEST_SKIP() << "the device has no events";
  run([](const std::shared_ptr<Comm>& comm) -> Status {
    const std::shared_ptr<Device>& device = comm->context()->device();
    for (int round = 0; round < 4; ++round) {
      Sums sums(comm);
      const OpRef op = sums.start(false);
      std::vector<std::vector<float>> sources;
      for (uint32_t t = 0; t < kCounts.size(); ++t) {
        sources.push_back(sums.in(t));
        std::ranges::fill(sums.in(t), std::numeric_limits<float>::quiet_NaN());
        Result<EventId> event = comm->engine().drive([&](Driver&) -> Result<EventId> {
          const uint32_t lane = device->caps().lanes - 1;
          SOTTO_TRY(
              device->copy(lane, sums.in(t).data(), sources[t].data(), kCounts[t] * 4, nullptr, 0));
          return device->record(lane);
        });
        if (!event.ok()) return event.status();
        SOTTO_TRY(sums.arrive(op, t, false, *event));
      }
      SOTTO_TRY(comm->finish(op));
      SOTTO_TRY(sums.check_sums());
    }
    return ok_status();
  });
}

TEST_P(Inputs, ThatAreWrongAreRefused) {
  run([](const std::shared_ptr<Comm>& comm) -> Status {
    Sums sums(comm);
    const OpRef op = sums.start(false);
    Engine& engine = comm->engine();
    void* memory[2] = {sums.in(0).data(), sums.in(1).data()};
    EXPECT_EQ(engine.arrive(op, 5, 0, {}).text(), "input 5 of an operation that has 5");
    EXPECT_EQ(engine.arrive(op, 1, 0, memory).text(), "input 1 has 1 tensor, not 2");
    if (comm->context()->device()->caps().synchronous) {
      EXPECT_EQ(engine.arrive(op, 1, 7, {memory + 1, 1}).code(), Code::kInvalidArgument);
    }
    for (uint32_t t = 0; t + 1 < kCounts.size(); ++t) SOTTO_TRY(sums.arrive(op, t, false));
    EXPECT_EQ(sums.arrive(op, 2, false).text(), "input 2 has arrived before");
    SOTTO_TRY(sums.arrive(op, 4, false));
    SOTTO_TRY(comm->finish(op));
    SOTTO_TRY(sums.check_sums());
    EXPECT_EQ(sums.arrive(op, 4, false).code(), Code::kInvalidState);
    EXPECT_EQ(op->status().code(), Code::kOk);
    return ok_status();
  });
}

// A failure does not wait for inputs, also of operations that have not begun.
TEST_P(Inputs, AreNotWaitedForByAFailure) {
  run([](const std::shared_ptr<Comm>& comm) -> Status {
    Sums sums(comm), later(comm);
    const OpRef op = sums.start(false);
    SOTTO_TRY(sums.arrive(op, 1, false));
    CallOptions options;
    options.after = {op};
    const OpRef next = later.start(false, options);
    SOTTO_TRY(later.arrive(next, 3, false));
    (void)comm->barrier();  // all have started both, unless the next line was faster
    if (comm->rank() == 0) comm->abort("enough");
    for (const OpRef& each : {op, next}) {
      EXPECT_EQ(comm->finish(each).code(), Code::kAborted);
      EXPECT_EQ(sums.arrive(each, 0, false).code(), Code::kInvalidState);
    }
    return ok_status();
  });
}

// The input of the second is the output of the first; a third one is called meanwhile.
TEST_P(Inputs, OfOneOperationAreResultsOfAnother) {
  run([](const std::shared_ptr<Comm>& comm) -> Status {
    for (int round = 0; round < 3; ++round) {
      Sums sums(comm);
      const OpRef first = sums.start(true);
      CallOptions options;
      options.after = {first};
      Result<OpRef> second = comm->start(all_reduce_of(*comm, sums.out(1)), options);
      if (!second.ok()) return second.status();
      std::vector<float> data(1000, 1.0f);
      SOTTO_TRY(sums.arrive(first, 1, true));
      SOTTO_TRY(all_reduce(comm, data));
      for (const uint32_t t : {4u, 0u, 2u, 3u}) SOTTO_TRY(sums.arrive(first, t, true));
      SOTTO_TRY(comm->finish(second));
      EXPECT_TRUE(first->done());
      EXPECT_GE((*second)->stats().start_ns, first->stats().end_ns);
      const auto size = static_cast<float>(comm->size());
      for (uint64_t i = 0; i < kCounts[1]; ++i) {
        if (sums.out(1)[i] != size * sum(comm->size(), 1, i))
          return error(Code::kInternal, "[{}] is {}", i, sums.out(1)[i]);
      }
      if (data != std::vector<float>(1000, size))
        return error(Code::kInternal, "the third one is wrong");
    }
    return ok_status();
  });
}

// A plan whose decision is never to commit; with messages or without.
LogicalPlan refusing(const Comm& comm, bool messages) {
  PlanBuilder b;
  const uint32_t word = b.scratch(4), host = b.host(4), block = b.scratch(64);
  if (messages) {
    b.fill({block, 0, 64}, 0);
    for (int32_t peer = 0; peer < comm.size(); ++peer) {
      if (peer == comm.rank()) continue;
      b.send(peer, {block, 0, 8}, 0);
      b.recv(peer, {block, 8 + 8 * static_cast<uint64_t>(peer), 8}, 0);
    }
  }
  b.fill({word, 0, 4}, 0xee);
  b.set_verdict(host, word);
  return b.take();
}

TEST_P(Inputs, OneThatDoesNotCommitEndsThoseAfterIt) {
  run([](const std::shared_ptr<Comm>& comm) -> Status {
    SOTTO_ASSIGN(const std::shared_ptr<PreparedPlan> plan,
                 comm->prepare(refusing(*comm, true), comm->context()->device()));
    for (int round = 0; round < 3; ++round) {
      OpSignature signature;
      signature.kind = OpKind::kOptimStep;
      SOTTO_ASSIGN(const OpRef first,
                   comm->launch(plan, signature, [](sotto::Run&) {}, nullptr, {}));
      Sums sums(comm);
      CallOptions options;
      options.after = {first};
      const OpRef second = sums.start(true, options);
      EXPECT_EQ(comm->finish(second).code(), Code::kNonfinite);
      EXPECT_TRUE(second->status().text().starts_with(
          "an operation that this one comes after has failed: "))
          << second->status().text();
      std::vector<float> data(5000, 1.0f);
      SOTTO_TRY(all_reduce(comm, data));
    }
    return ok_status();
  });
}

class Renames final : public OpHooks {
 public:
  void on_complete(Status& status, std::span<const std::byte>) noexcept override {
    status = Status(Code::kCancelled, "its owner says so");
  }
};

// Its messages have been through, whatever its owner calls the end.
TEST_P(Inputs, OneThatItsOwnerCancelsHasSentWhatWasPlanned) {
  run([](const std::shared_ptr<Comm>& comm) -> Status {
    SOTTO_ASSIGN(const std::shared_ptr<PreparedPlan> plan,
                 comm->prepare(refusing(*comm, true), comm->context()->device()));
    OpSignature signature;
    signature.kind = OpKind::kOptimStep;
    SOTTO_ASSIGN(const OpRef op, comm->launch(plan, signature, [](sotto::Run&) {},
                                              std::make_shared<Renames>(), {}));
    EXPECT_EQ(comm->finish(op).code(), Code::kCancelled);
    const CommCounters counters = comm->counters();
    EXPECT_EQ(counters.payload_bytes_planned, 8 * static_cast<uint64_t>(comm->size() - 1));
    EXPECT_EQ(counters.payload_bytes_planned, counters.moved.payload_bytes_sent);
    std::vector<float> data(5000, 1.0f);
    return all_reduce(comm, data);
  });
}

// The other ranks cannot know of it, so the comm fails.
TEST_P(Inputs, ALocalOneThatDoesNotCommitFailsTheComm) {
  run([](const std::shared_ptr<Comm>& comm) -> Status {
    CallOptions options;
    if (comm->rank() == comm->size() - 1) {
      SOTTO_ASSIGN(std::shared_ptr<PreparedPlan> plan,
                   comm->prepare(refusing(*comm, false), comm->context()->device()));
      SOTTO_ASSIGN(const OpRef local,
                   comm->launch_local(std::move(plan), [](sotto::Run&) {}, nullptr, {}));
      options.after = {local};
    }
    std::vector<float> data(5000, 1.0f);
    const Status ended = all_reduce(comm, data, options);
    EXPECT_EQ(ended.code(), Code::kAborted);
    EXPECT_NE(ended.text().find("comes after has failed"), std::string::npos) << ended.text();
    EXPECT_EQ(comm->failure().code(), Code::kAborted);
    return ok_status();
  });
}

INSTANTIATE_TEST_SUITE_P(
    Worlds, Inputs, ::testing::Combine(::testing::ValuesIn(world_kinds()), ::testing::Values(2, 3)),
    [](const auto& named) {
      return fmt::format("{}_{}", std::get<0>(named.param), std::get<1>(named.param));
    });

}  // namespace
}  // namespace sotto::test
