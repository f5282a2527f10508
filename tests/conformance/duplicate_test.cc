// Duplicates of a comm: operations of the library's own beside the user's.
#include <gtest/gtest.h>
#include <malloc.h>

#include <array>
#include <mutex>
#include <set>
#include <thread>

#include <nlohmann/json.hpp>

#include "tests/support/calls.h"
#include "tests/support/core_ranks.h"
#include "tests/support/ordered_transport.h"
#include "tests/support/small_model.h"

namespace sotto::test {
namespace {

Status check_sum(const std::vector<float>& data, float expected) {
  if (data == std::vector<float>(data.size(), expected)) return ok_status();
  return error(Code::kInternal, "the sum is {} instead of {}", data[0], expected);
}

constexpr int kSteps = 12;
constexpr const char* kOnebit =
    R"({"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 4}}})";

void set_gradients(SmallModel& model, int step) {
  for (size_t i = 0; i < model.g.size(); ++i)
    model.g[i] = std::cos(static_cast<float>(i * 3 + static_cast<size_t>(step)) +
                          static_cast<float>(model.rank));
}

// Parameters after steps on a comm; `beside` runs while each step is in flight.
Result<std::vector<float>> train(const std::shared_ptr<Comm>& comm,
                                 const std::function<Status()>& beside) {
  SmallModel model(comm->rank());
  SOTTO_ASSIGN(const std::shared_ptr<Optimizer> optimizer,
               Optimizer::create(comm, kOnebit, model.specs()));
  for (int step = 0; step < kSteps; ++step) {
    set_gradients(model, step);
    SOTTO_ASSIGN(const OpRef op, optimizer->step({}));
    if (beside) SOTTO_TRY(beside());
    SOTTO_TRY(comm->engine().wait(op, -1));
  }
  return model.p;
}

class Duplicates : public ::testing::TestWithParam<std::string> {
 protected:
  WorldOptions world(int32_t size) const { return world_of(GetParam(), size); }
  // Some messages match by their order.
  bool ordered() const { return GetParam() == "ordered" || GetParam() == "mixed"; }
};

// Without those of duplicates.
uint64_t own_operations(const Comm& comm) {
  return nlohmann::json::parse(comm.report_json("waiting"))["operations_completed"].get<uint64_t>();
}

// The user's collectives go on while an optimizer on a duplicate has steps in flight: with the
// numbers that they would have without it, and results of both to the bit.
TEST_P(Duplicates, AnOptimizerWorksBesideTheUsersCollectives) {
  const Status status = run_world(world(3), [&](const std::shared_ptr<Comm>& comm) -> Status {
    const std::shared_ptr<Comm> own = comm->duplicate();
    const std::shared_ptr<Comm> first = comm->duplicate();
    SOTTO_ASSIGN(const std::vector<float> alone, train(first, nullptr));
    // What duplicates do counts as the user's too; nothing else does.
    if (own_operations(*comm) != 0 ||
        comm->counters().moved.messages_sent != first->counters().moved.messages_sent ||
        comm->counters().ops_completed != first->counters().ops_completed)
      return error(Code::kInternal, "the optimizer used the user's comm");
    std::vector<float> data(5000);
    uint64_t collectives = 0;
    const auto collective = [&]() -> Status {
      std::fill(data.begin(), data.end(), static_cast<float>(1 << comm->rank()));
      ++collectives;
      SOTTO_TRY(comm->run(all_reduce_of(*comm, data)));
      return check_sum(data, 7.0f);
    };
    SOTTO_ASSIGN(const std::vector<float> beside, train(own, collective));
    if (alone != beside) return error(Code::kInternal, "the optimizer has other bits");
    if (own_operations(*comm) != collectives)
      return error(Code::kInternal, "{} operations of the user's comm instead of {}",
                   own_operations(*comm), collectives);
    return comm->barrier();
  });
  EXPECT_TRUE(status.ok()) << status.text();
  EXPECT_TRUE(take_ordered_violations().empty());
}

// Where messages match by key, calls on both comms need no order: two threads make them.
TEST_P(Duplicates, TwoThreadsUseACommAndItsDuplicate) {
  if (ordered()) GTEST_SKIP() << "all calls of a root comm have one order";
  const Status status = run_world(world(3), [&](const std::shared_ptr<Comm>& comm) -> Status {
    const std::shared_ptr<Comm> own = comm->duplicate();
    Status trained;
    std::thread trainer([&] { trained = train(own, nullptr).status(); });
    Status summed;
    for (int i = 0; i < 100 && summed.ok(); ++i) {
      std::vector<float> data(static_cast<size_t>(100 * i + 1),
                              static_cast<float>(1 << comm->rank()));
      summed = comm->run(all_reduce_of(*comm, data));
      if (summed.ok()) summed = check_sum(data, 7.0f);
    }
    trainer.join();
    SOTTO_TRY(summed);
    return trained;
  });
  EXPECT_TRUE(status.ok()) << status.text();
}

TEST_P(Duplicates, AreMadeWithoutAMessageAndHaveEpochsOfTheirOwn) {
  std::mutex mutex;
  std::vector<std::vector<uint64_t>> epochs;
  const Status status = run_world(world(2), [&](const std::shared_ptr<Comm>& comm) -> Status {
    std::vector<std::shared_ptr<Comm>> comms{comm, comm->duplicate(), comm->duplicate()};
    comms.push_back(comms[1]->duplicate());
    SOTTO_ASSIGN(const std::shared_ptr<Comm> turned, comm->split(0, -comm->rank()));
    comms.push_back(turned);
    comms.push_back(turned->duplicate());
    if (comms[5]->rank() != turned->rank() || comms[1]->rank() != comm->rank() ||
        comms[1]->size() != 2 || comms[5]->hosts() != turned->hosts())
      return error(Code::kInternal, "a duplicate has other ranks");
    std::vector<uint64_t> mine;
    for (const auto& c : comms) {
      mine.push_back(c->epoch());
      if (c != comm && c != turned && c->counters().moved.messages_sent != 0)
        return error(Code::kInternal, "messages were sent to make a duplicate");
    }
    SOTTO_TRY(comms[5]->barrier());
    const std::lock_guard lock(mutex);
    epochs.push_back(std::move(mine));
    return ok_status();
  });
  ASSERT_TRUE(status.ok()) << status.text();
  EXPECT_EQ(epochs[0], epochs[1]);
  EXPECT_EQ(std::set<uint64_t>(epochs[0].begin(), epochs[0].end()).size(), 6u);
}

// Numbers, chains and counters between pairs: ranks whose user calls differ so far have the same on
// a duplicate, and what a duplicate does shows on no other comm.
TEST_P(Duplicates, HaveNumbersOfTheirOwn) {
  const Status status = run_world(world(2), [&](const std::shared_ptr<Comm>& comm) -> Status {
    SOTTO_TRY(comm->barrier());
    const std::shared_ptr<Comm> own = comm->duplicate();
    const std::shared_ptr<Comm> other = comm->duplicate();
    for (int i = 0; i < 3; ++i) SOTTO_TRY(own->barrier());
    SOTTO_TRY(other->barrier());
    SOTTO_TRY(comm->barrier());
    if (own->counters().ops_completed != 3 || other->counters().ops_completed != 1 ||
        comm->counters().ops_completed < 2)
      return error(Code::kInternal, "operations were counted for another comm");
    // Point to point, crosswise: a send of one comm never meets a receive of the other.
    const auto transfer = [&](Comm& on, bool send, float& value) {
      Call call;
      call.request.kind = OpKind::kSendRecv;
      call.request.rank = on.rank();
      call.request.size = 2;
      call.request.peer = 1 - on.rank();
      call.request.is_send = send;
      call.request.counts = {1};
      call.request.dtypes = {Dtype::kF32};
      call.request.in_place = {0};
      call.in = {send ? &value : nullptr};
      call.out = {send ? nullptr : &value};
      return on.start(std::move(call), {});
    };
    float user = comm->rank() == 0 ? 1.0f : 0.0f, library = comm->rank() == 0 ? 2.0f : 0.0f;
    const bool send = comm->rank() == 0;
    const Result<OpRef> a = transfer(*comm, send, user);
    const Result<OpRef> b = transfer(*own, send, library);
    SOTTO_TRY(comm->finish(a));
    SOTTO_TRY(own->finish(b));
    if (user != 1.0f || library != 2.0f) return error(Code::kInternal, "messages were mixed up");
    return ok_status();
  });
  EXPECT_TRUE(status.ok()) << status.text();
  EXPECT_TRUE(take_ordered_violations().empty());
}

// A failure is the root comm's, whichever comm it began on.
TEST_P(Duplicates, FailWithTheirRoot) {
  for (const bool by_duplicate : {false, true}) {
    const Status status = run_world(world(3), [&](const std::shared_ptr<Comm>& comm) -> Status {
      const std::shared_ptr<Comm> own = comm->duplicate();
      std::vector<float> a(100'000, 1.0f), b = a;
      Result<OpRef> on_comm = error(Code::kInternal, "not started"), on_own = on_comm;
      if (comm->rank() != 1) {
        on_own = own->start(all_reduce_of(*own, b), {});
        on_comm = comm->start(all_reduce_of(*comm, a), {});
      } else {
        (by_duplicate ? own : comm)->abort("enough");
      }
      if (comm->rank() != 1) {
        for (const Status& end : {comm->finish(on_comm), own->finish(on_own)}) {
          if (end.code() != Code::kAborted || end.text().find("enough") == std::string::npos)
            return error(Code::kInternal, "ended with {}: {}", code_name(end.code()), end.text());
        }
      }
      for (const std::shared_ptr<Comm>& c : {comm, own}) {
        if (c->failure().code() != Code::kAborted || c->failure().text() != comm->failure().text())
          return error(Code::kInternal, "a comm has not failed");
      }
      return ok_status();
    });
    EXPECT_TRUE(status.ok()) << status.text();
  }
}

TEST_P(Duplicates, OutliveTheComm) {
  const Status status = run_world(world(2), [&](std::shared_ptr<Comm> comm) -> Status {
    const std::shared_ptr<Comm> own = comm->duplicate();
    SOTTO_TRY(comm->barrier());
    comm.reset();
    std::vector<float> data(1000, 1.0f);
    SOTTO_TRY(own->run(all_reduce_of(*own, data)));
    return check_sum(data, 2.0f);
  });
  EXPECT_TRUE(status.ok()) << status.text();
}

// A report says how far the operations of other ranks are.
TEST_P(Duplicates, ReportsSayHowFarOtherRanksAre) {
  const Status status = run_world(world(2), [&](const std::shared_ptr<Comm>& comm) -> Status {
    const std::shared_ptr<Comm> own = comm->duplicate();
    for (int i = 0; i < 5; ++i) SOTTO_TRY(own->barrier());
    SOTTO_TRY(comm->barrier());
    nlohmann::json said;
    const auto answered = [&](Comm& on, uint64_t completed) {
      const Deadline deadline = Deadline::in_us(Clock::monotonic(), 20'000'000);
      while (!deadline.passed(Clock::monotonic())) {
        said = nlohmann::json::parse(on.report_json("waiting"))["peers"][0]["said"];
        if (!said.is_null() && said["operations_completed"] == completed) return true;
        std::this_thread::sleep_for(std::chrono::milliseconds(30));  // in which ranks poll
      }
      return false;
    };
    const uint64_t users = own_operations(*comm);
    if (!answered(*own, 5) || !answered(*comm, users))
      return error(Code::kInternal, "the other rank said {}", said.dump());
    // The other rank may be in the last barrier already.
    if (said["operations_in_flight"] > 1 || said["ms_ago"] > 20'000)
      return error(Code::kInternal, "{}", said.dump());
    return comm->barrier();
  });
  EXPECT_TRUE(status.ok()) << status.text();
}

// Bytes that are allocated in this process.
size_t allocated() { return mallinfo2().uordblks; }

// Comms that have ended leave what they have moved in the sums of the comm that has made them, and
// no memory.
TEST_P(Duplicates, ThatHaveEndedLeaveNoMemory) {
  constexpr int kCycles = 1500;
  constexpr size_t kMostBytes = 100'000;  // of two ranks; one object per comm would be more
  std::array<size_t, 3> bytes{};
  const Status status = run_world(world(2), [&](const std::shared_ptr<Comm>& comm) -> Status {
    for (size_t part = 0; part < 3; ++part) {
      for (int i = 0; i < kCycles; ++i) SOTTO_TRY(comm->duplicate()->barrier());
      for (int i = 0; i < kCycles / 10; ++i) {
        SOTTO_ASSIGN(const std::shared_ptr<Comm> split, comm->split(0, 0));
        SOTTO_TRY(split->barrier());
      }
      SOTTO_TRY(comm->barrier());
      if (comm->rank() == 0) bytes[part] = allocated();
      SOTTO_TRY(comm->barrier());
    }
    const uint64_t made = 3 * kCycles, own = own_operations(*comm);
    const auto counters = nlohmann::json::parse(comm->report_json("counters"))["peers"][0];
    if (comm->counters().ops_completed != made + own ||
        comm->counters().moved.messages_sent < made + own ||
        counters["messages_sent"] != comm->counters().moved.messages_sent)
      return error(Code::kInternal, "{} operations and {} messages of {} duplicates and {} calls",
                   comm->counters().ops_completed, comm->counters().moved.messages_sent, made, own);
    return ok_status();
  });
  EXPECT_TRUE(status.ok()) << status.text();
  EXPECT_LT(bytes[2], bytes[1] + kMostBytes);
}

INSTANTIATE_TEST_SUITE_P(Worlds, Duplicates, ::testing::Values("inproc", "tcp", "ordered", "mixed"),
                         [](const auto& world) { return world.param; });

}  // namespace
}  // namespace sotto::test
