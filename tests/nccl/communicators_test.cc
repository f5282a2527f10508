// The communicators of a root comm, on the fake NCCL: joins, ends, errors and aborts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "core/base/log.h"
#include "tests/emulation/cuda/fake_cuda.h"
#include "tests/emulation/nccl/fake_nccl.h"
#include "tests/nccl/room_control.h"

namespace sotto::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

struct Lines {
  Lines() {
    set_log(
        [](void* to, int32_t, const char* line) { static_cast<Lines*>(to)->all.push_back(line); },
        this);
  }
  ~Lines() { set_log(nullptr, nullptr); }
  std::vector<std::string> all;
};

ncclUniqueId new_id() {
  ncclUniqueId id;
  EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  return id;
}

uint64_t aborts() { return fake_nccl_calls_of("ncclCommAbort"); }
uint64_t destroyed() { return fake_nccl_calls_of("ncclCommDestroy"); }

// One rank, which joins as many comms as a test needs.
class NcclCommunicators : public testing::Test {
 protected:
  void SetUp() override {
    fake_cuda::clear_faults();
    fake_cuda::configure({});
  }
  void TearDown() override {
    fake_nccl_hang_finalize(false);
    if (rank != nullptr) rank->abort();
    rank.reset();
    EXPECT_EQ(fake_nccl_live_comms(), 0u);
  }
  nccl::Communicators& all() { return rank->communicators; }
  bool joined(uint64_t comm) { return &all().of(comm) != &all().all(); }

  ControlRoom room{1};
  std::unique_ptr<NcclRank> rank = std::make_unique<NcclRank>(room, 0);
};

TEST_F(NcclCommunicators, ACommHasItsOwnFromJoinToLeave) {
  EXPECT_FALSE(joined(7));
  check(rank->join(7));
  check(rank->join(8));
  EXPECT_TRUE(joined(7));
  EXPECT_TRUE(joined(8));
  EXPECT_NE(&all().of(7), &all().of(8));
  EXPECT_FALSE(joined(9));
  all().leave(7);
  all().leave(9);  // it has none
  EXPECT_FALSE(joined(7));
  EXPECT_TRUE(joined(8));
  EXPECT_TRUE(all().all().open());
}

TEST_F(NcclCommunicators, RanksOfACommAreThoseOfItsInvitations) {
  rank->abort();
  rank.reset();
  ControlRoom three(3);
  EXPECT_EQ(run_ranks(3,
                      [&](int number) {
                        NcclRank of(three, number);
                        check(of.join(7));
                        require(of.communicators.of(7).size() == 3, "size");
                        require(of.communicators.of(7).rank() == number, "rank");
                        of.barrier();
                        of.communicators.end(NcclRank::in(60'000'000));
                        of.await_end();
                        require(!of.communicators.of(7).open(), "it has ended");
                        require(!of.communicators.all().open(), "all have ended");
                        of.barrier();
                      }),
            "");
}

TEST_F(NcclCommunicators, AnInvitationThatIsNoneLeavesTheCommWithoutOne) {
  const Status status = all().join(7, 0, {"what"}, rank->control, rank->driver, NcclRank::in(1000));
  EXPECT_EQ(status.code(), Code::kProtocol);
  EXPECT_THAT(status.text(), HasSubstr("rank 0 has sent 4 bytes to set up NCCL"));
  EXPECT_FALSE(joined(7));
  check(all().check());
}

TEST_F(NcclCommunicators, OneThatWasLeftIsDestroyedWhenItHasEnded) {
  check(rank->join(7));
  const uint64_t before = destroyed();
  all().leave(7);
  rank->driver.run_until([] { return fake_nccl_live_comms() == 1; }, NcclRank::in(60'000'000));
  EXPECT_EQ(fake_nccl_live_comms(), 1u);
  EXPECT_EQ(destroyed(), before + 1);
  all().reap();

  fake_nccl_hang_finalize(true);
  check(rank->join(8));
  all().leave(8);
  rank->driver.run_until([] { return false; }, NcclRank::in(50'000));
  all().reap();
  EXPECT_EQ(fake_nccl_live_comms(), 2u);
  EXPECT_EQ(destroyed(), before + 1);
}

TEST_F(NcclCommunicators, CheckFindsTheErrorOfEachThatWasNotLeft) {
  check(rank->join(7));
  check(all().check());
  fake_nccl_break(all().of(7).handle(), ncclRemoteError);
  EXPECT_EQ(all().check().code(), Code::kPeerLost);
  all().leave(7);
  check(all().check());
  fake_nccl_break(all().all().handle(), ncclSystemError);
  EXPECT_EQ(all().check().code(), Code::kTransport);
}

TEST_F(NcclCommunicators, AnAbortIsOfAll) {
  for (const uint64_t comm : {7, 8, 9}) check(rank->join(comm));
  fake_nccl_hang_finalize(true);
  all().leave(9);
  const uint64_t before = aborts();
  all().abort();
  EXPECT_FALSE(all().all().open());
  EXPECT_FALSE(all().of(7).open());
  rank->await_end();
  EXPECT_EQ(aborts(), before + 4);
  EXPECT_EQ(fake_nccl_live_comms(), 0u);
  EXPECT_FALSE(all().all().open());
  EXPECT_FALSE(all().of(7).open());
  all().reap();
  all().abort();  // nothing is open any more
  EXPECT_EQ(aborts(), before + 4);
}

TEST_F(NcclCommunicators, TheEndOfAllIsOrderly) {
  for (const uint64_t comm : {7, 8}) check(rank->join(comm));
  const uint64_t aborted = aborts(), before = destroyed();
  all().leave(8);
  Lines log;
  all().end(NcclRank::in(60'000'000));
  rank->await_end();
  EXPECT_EQ(destroyed(), before + 3);
  EXPECT_EQ(aborts(), aborted);
  EXPECT_EQ(fake_nccl_live_comms(), 0u);
  EXPECT_TRUE(log.all.empty());
}

TEST_F(NcclCommunicators, WhatDoesNotEndInTimeIsAborted) {
  check(rank->join(7));
  fake_nccl_hang_finalize(true);
  all().leave(7);
  const uint64_t aborted = aborts();
  Lines log;
  all().end(NcclRank::in(20'000));
  rank->await_end();
  EXPECT_EQ(aborts(), aborted + 2);
  EXPECT_EQ(fake_nccl_live_comms(), 0u);
  EXPECT_FALSE(all().all().open());
  EXPECT_THAT(log.all, ElementsAre("nccl: 2 communicators have not ended in time and are aborted"));
}

// Work of a device that goes on until it is let go.
class BusyDevice {
 public:
  BusyDevice() {
    require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) == cudaSuccess &&
                cudaLaunchHostFunc(stream_, wait, &go_) == cudaSuccess,
            "work");
    fake_nccl_wait_for_device(true);
  }
  ~BusyDevice() {
    fake_nccl_wait_for_device(false);
    let_go();
    (void)cudaStreamSynchronize(stream_);
    (void)cudaStreamDestroy(stream_);
  }
  BusyDevice(const BusyDevice&) = delete;
  BusyDevice& operator=(const BusyDevice&) = delete;
  void let_go() { go_ = true; }

 private:
  static void wait(void* go) {
    while (!static_cast<std::atomic<bool>*>(go)->load())
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::atomic<bool> go_{false};
  cudaStream_t stream_ = nullptr;
};

// What the device does may be another comm's, and be waiting for the thread that drives.
TEST_F(NcclCommunicators, EndWithoutTheDrivingThread) {
  const auto keeps_no_thread = [&](const std::function<void()>& begin) {
    BusyDevice device;
    begin();
    rank->driver.run_until([] { return false; }, NcclRank::in(50'000));
    EXPECT_GT(fake_nccl_live_comms(), 0u);
    EXPECT_FALSE(all().ended(Clock::monotonic()));
    device.let_go();
    rank->await_end();
    EXPECT_EQ(fake_nccl_live_comms(), 0u);
  };
  check(rank->join(7));
  keeps_no_thread([&] {
    all().leave(7);
    all().abort();
  });
  rank = std::make_unique<NcclRank>(room, 0);
  check(rank->join(7));
  keeps_no_thread([&] { all().end(NcclRank::in(60'000'000)); });
}

// Each may wait for what another one ends.
TEST_F(NcclCommunicators, AreAbortedAtOnce) {
  for (const uint64_t comm : {7, 8}) check(rank->join(comm));
  const uint64_t before = aborts();
  BusyDevice device;
  all().abort();
  rank->driver.run_until([&] { return aborts() == before + 3; }, NcclRank::in(60'000'000));
  EXPECT_EQ(aborts(), before + 3);
  device.let_go();
  rank->await_end();
}

TEST(NcclCommunicatorEnd, ThatTakesTooLongIsLeftBehind) {
  ControlRoom room(1);
  const uint64_t live = fake_nccl_live_comms();
  NcclRank rank(room, 0);
  ncclComm_t comm = nullptr;
  ASSERT_EQ(ncclCommInitRank(&comm, 1, new_id(), 0), ncclSuccess);
  Lines log;
  BusyDevice device;
  {
    nccl::CommunicatorEnd end(check(nccl::load("")), comm, 0, {}, std::chrono::milliseconds(30));
    end.abort();
    EXPECT_FALSE(end.over());
  }
  EXPECT_THAT(log.all, ElementsAre("nccl: a communicator on cuda:0 has not ended after 30 ms and "
                                   "is left behind"));
  device.let_go();
  rank.driver.run_until([&] { return fake_nccl_live_comms() == live + 1; },
                        NcclRank::in(60'000'000));
  EXPECT_EQ(fake_nccl_live_comms(), live + 1);
  rank.abort();
}

// In order or by an abort, it is over when the graph is destroyed, and not waited for.
TEST(NcclCommunicatorEnd, IsLeftToGraphs) {
  for (const bool aborts : {false, true}) {
    ControlRoom room(1);
    NcclRank rank(room, 0);
    const uint64_t live = fake_nccl_live_comms();
    ncclComm_t comm = nullptr;
    ASSERT_EQ(ncclCommInitRank(&comm, 1, new_id(), 0), ncclSuccess);
    cudaStream_t stream = nullptr;
    void* memory = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaMalloc(&memory, 4), cudaSuccess);
    const nccl::LiveGraphs graphs;
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    EXPECT_TRUE(graphs.add(stream).ok());
    EXPECT_EQ(ncclAllReduce(memory, memory, 1, ncclFloat32, ncclSum, comm, stream), ncclSuccess);
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    Lines log;
    const auto begun = std::chrono::steady_clock::now();
    {
      nccl::CommunicatorEnd end(check(nccl::load("")), comm, 0, graphs);
      aborts ? end.abort() : end.begin();
      EXPECT_TRUE(end.left_to_graphs());
      EXPECT_FALSE(end.over());
    }
    EXPECT_LT(std::chrono::steady_clock::now() - begun, nccl::CommunicatorEnd::kLimit / 2);
    EXPECT_THAT(log.all, ElementsAre());
    EXPECT_EQ(fake_nccl_live_comms(), live + 1);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
    rank.driver.run_until([&] { return fake_nccl_live_comms() == live; }, NcclRank::in(60'000'000));
    EXPECT_EQ(fake_nccl_live_comms(), live);
    EXPECT_FALSE(graphs.any());
    EXPECT_EQ(cudaFree(memory), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    rank.abort();
  }
}

}  // namespace
}  // namespace sotto::test
