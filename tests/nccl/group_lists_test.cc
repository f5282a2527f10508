// Groups in flight and groups that are part of graphs, between two ranks, below the transport.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <deque>

#include "tests/emulation/cuda/fake_cuda.h"
#include "tests/emulation/nccl/fake_nccl.h"
#include "tests/nccl/room_control.h"
#include "tests/support/transfers.h"
#include "transports/nccl/captured_groups.h"
#include "transports/nccl/in_flight_groups.h"

namespace sotto::test {
namespace {

using nccl::CapturedGroups;
using nccl::Counters;
using nccl::GroupHeader;
using nccl::InFlightGroups;
using nccl::MessageGroup;
using nccl::PeerHeader;
using testing::HasSubstr;

// A rank of two, with messages of 8 bytes to the other one and back, in pinned memory.
struct Side {
  Side(ControlRoom& room, int32_t number) : rank(room, number), groups(rank.communicators) {
    require(cudaMallocHost(&memory, 16) == cudaSuccess, "pinned memory");
    rank.barrier();
  }
  ~Side() {
    rank.abort();
    (void)cudaFreeHost(memory);
  }
  int32_t peer() const { return 1 - rank.control.rank(); }
  TestOp& op(uint64_t number, uint64_t tag = 0) {
    TestOp& made = ops.emplace_back(7, number, tag);
    made.add(true, peer(), 0, 0, memory, 8);
    made.add(false, peer(), 0, 0, static_cast<std::byte*>(memory) + 8, 8);
    return made;
  }
  static std::vector<Transfer*> transfers(TestOp& op) {
    return {&op.transfers[0], &op.transfers[1]};
  }
  // A group that goes into the graph of the operation.
  MessageGroup& capture(TestOp& op) {
    MessageGroup& group = groups.begin(nullptr, false, &op.descriptor);
    check(groups.prepare(group, transfers(op)));
    captured.add(groups.take_last());
    groups.complete(op.descriptor.key);  // it was captured whole
    return group;
  }
  // As if the peer had sent the header of the operation that it means.
  void receive(MessageGroup& group, const OpDescriptor& meant) {
    TestOp theirs(0, 0);
    theirs.descriptor = meant;
    theirs.add(true, 1 - peer(), 0, 0, nullptr, 8);
    theirs.add(false, 1 - peer(), 0, 0, nullptr, 8);
    const GroupHeader header = nccl::make_group_header(transfers(theirs), 1 - peer());
    std::memcpy(group.headers().all()[0].in, &header, sizeof header);
  }
  uint64_t headers_sent() const { return counters.read(0, peer()).service_bytes_sent; }
  uint64_t headers_received() const { return counters.read(0, peer()).service_bytes_received; }

  NcclRank rank;
  InFlightGroups groups;
  CapturedGroups captured;
  Counters counters;
  std::deque<TestOp> ops;
  void* memory = nullptr;
};

class NcclSides : public testing::Test {
 protected:
  void SetUp() override {
    fake_cuda::clear_faults();
    fake_cuda::configure({});
  }
  void TearDown() override {
    fake_cuda::drain();
    EXPECT_EQ(fake_nccl_live_comms(), 0u);
    EXPECT_EQ(fake_cuda::live(), fake_cuda::Live{}) << fake_cuda::live().text();
  }
  static std::string run(const std::function<void(Side&)>& body) {
    ControlRoom room(2);
    return run_ranks(2, [&](int rank) {
      Side side(room, rank);
      body(side);
      side.rank.barrier();
    });
  }
};
class NcclCapturedGroups : public NcclSides {};
class NcclInFlightGroups : public NcclSides {};

TEST_F(NcclCapturedGroups, ExecuteFromRestartToCompletion) {
  EXPECT_EQ(run([](Side& side) {
              TestOp& op = side.op(3);
              MessageGroup& group = side.capture(op);
              EXPECT_TRUE(side.groups.empty());
              EXPECT_FALSE(side.captured.executing());
              EXPECT_EQ(side.headers_sent(), 0u);
              side.captured.complete(op.descriptor, side.counters);  // no launch was awaited
              EXPECT_EQ(side.headers_received(), 0u);
              for (uint64_t launch = 1; launch <= 2; ++launch) {
                op.descriptor.key.number = 10 * launch;
                side.captured.restart(op.descriptor, side.counters);
                EXPECT_TRUE(side.captured.executing());
                EXPECT_EQ(group.headers().all()[0].mine.key.number, 10 * launch);
                EXPECT_EQ(side.headers_sent(), launch * sizeof(GroupHeader));
                EXPECT_EQ(side.counters.read(7, side.peer()).payload_bytes_sent, 8 * launch);
                EXPECT_EQ(side.counters.read(7, side.peer()).messages_received, launch);
                for (int times = 0; times < 2; ++times) {
                  side.captured.complete(op.descriptor, side.counters);
                  EXPECT_FALSE(side.captured.executing());
                  EXPECT_EQ(side.headers_received(), launch * sizeof(GroupHeader));
                }
              }
            }),
            "");
}

TEST_F(NcclCapturedGroups, ALaunchIsVerifiedByItsHeaders) {
  EXPECT_EQ(run([](Side& side) {
              TestOp& op = side.op(3);
              MessageGroup& group = side.capture(op);
              check(side.captured.verify(op.descriptor, true));  // nothing is executing
              side.captured.restart(op.descriptor, side.counters);
              check(side.captured.verify(op.descriptor, false));
              const Status missing = side.captured.verify(op.descriptor, true);
              EXPECT_EQ(missing.code(), Code::kProtocol);
              EXPECT_THAT(missing.text(), HasSubstr("does not begin with its group header"));

              side.receive(group, op.descriptor);
              EXPECT_EQ(side.captured.check(), nullptr);
              check(side.captured.verify(op.descriptor, true));

              side.captured.restart(op.descriptor, side.counters);
              side.receive(group, side.op(3, 6).descriptor);
              EXPECT_EQ(side.captured.verify(op.descriptor, false).code(), Code::kProtocol);
              const PeerHeader* const differs = side.captured.check();
              require(differs != nullptr, "the difference is found");
              EXPECT_EQ(differs->peer, side.peer());
              EXPECT_THAT(differs->meant.text(), HasSubstr("tag 6"));
              side.captured.complete(op.descriptor, side.counters);
              EXPECT_EQ(side.captured.check(), nullptr);
            }),
            "");
}

TEST_F(NcclCapturedGroups, AreThoseOfTheirOperation) {
  EXPECT_EQ(run([](Side& side) {
              TestOp &one = side.op(3), &other = side.op(4);
              side.capture(one);
              MessageGroup& of_other = side.capture(other);
              side.capture(one);
              side.captured.restart(one.descriptor, side.counters);
              EXPECT_FALSE(of_other.executing());
              EXPECT_EQ(side.headers_sent(), 2 * sizeof(GroupHeader));
              check(side.captured.verify(other.descriptor, true));
              EXPECT_EQ(side.captured.verify(one.descriptor, true).code(), Code::kProtocol);

              EXPECT_EQ(side.captured.forget(one.descriptor).size(), 2u);
              EXPECT_FALSE(side.captured.executing());
              check(side.captured.verify(one.descriptor, true));
              side.captured.restart(other.descriptor, side.counters);
              EXPECT_TRUE(of_other.executing());
              EXPECT_EQ(side.captured.forget(other.descriptor).size(), 1u);
              EXPECT_TRUE(side.captured.forget(other.descriptor).empty());
            }),
            "");
}

TEST_F(NcclCapturedGroups, ThatAreForgottenAreUsedAgain) {
  EXPECT_EQ(run([](Side& side) {
              TestOp& op = side.op(3);
              const MessageGroup* const group = &side.capture(op);
              side.captured.restart(op.descriptor, side.counters);
              const std::byte* const place = group->headers().all()[0].out;
              side.groups.reuse(side.captured.forget(op.descriptor));
              std::deque<std::vector<std::byte>> others;  // where the group was, if it was freed
              for (int i = 0; i < 20; ++i) others.emplace_back(sizeof(MessageGroup) + 16);
              MessageGroup& again = side.groups.begin(nullptr, true, nullptr);
              EXPECT_EQ(&again, group);
              EXPECT_FALSE(again.executing());
              EXPECT_EQ(again.captured(), nullptr);
              check(side.groups.prepare(again, Side::transfers(side.op(4))));
              EXPECT_EQ(again.headers().all().size(), 1u);
              EXPECT_EQ(again.headers().all()[0].out, place);
              EXPECT_TRUE(again.has({7, 4}));
              EXPECT_FALSE(again.has({7, 3}));
              side.rank.abort();
              EXPECT_FALSE(side.groups.working());
              side.groups.forget();
              EXPECT_TRUE(side.groups.empty());
            }),
            "");
}

TEST_F(NcclInFlightGroups, AnOperationHasAHeaderForEachRankOnce) {
  EXPECT_EQ(run([](Side& side) {
              TestOp &op = side.op(3), &other = side.op(4);
              const auto headers = [&](TestOp& of) {
                MessageGroup& group = side.groups.begin(nullptr, false, &of.descriptor);
                check(side.groups.prepare(group, Side::transfers(of)));
                const size_t count = group.headers().all().size();
                EXPECT_TRUE(count == 1 || group.headers().all_seen());
                side.captured.add(side.groups.take_last());
                return count;
              };
              EXPECT_EQ(headers(op), 1u);
              EXPECT_EQ(headers(op), 0u);
              EXPECT_EQ(headers(other), 1u);
              EXPECT_EQ(headers(op), 0u);
              side.groups.complete(op.descriptor.key);
              EXPECT_EQ(headers(op), 1u);
              EXPECT_EQ(headers(other), 0u);
            }),
            "");
}

// Until it is queued.
void launch(Side& side, MessageGroup& group) {
  Status status;
  const auto queued = [&] {
    status = side.groups.launch(group);
    return status.code() != Code::kInProgress;
  };
  side.rank.driver.run_until(queued, NcclRank::in(60'000'000));
  check(status, "launch");
}

TEST_F(NcclInFlightGroups, AGroupOnAnotherStreamComesBehindTheLast) {
  EXPECT_EQ(run([](Side& side) {
              cudaStream_t one = nullptr, other = nullptr;
              require(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking) == cudaSuccess &&
                          cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking) == cudaSuccess,
                      "streams");
              std::vector<uint64_t> waits;
              for (const cudaStream_t stream : {one, one, other, one}) {
                side.rank.barrier();
                const uint64_t before = fake_cuda::waits();
                side.rank.barrier();
                MessageGroup& group = side.groups.begin(stream, true, nullptr);
                EXPECT_EQ(side.groups.unqueued(), &group);
                check(side.groups.prepare(group, Side::transfers(side.op(waits.size()))));
                launch(side, group);
                EXPECT_EQ(side.groups.unqueued(), nullptr);
                side.rank.barrier();
                waits.push_back(fake_cuda::waits() - before);
              }
              EXPECT_EQ(waits, (std::vector<uint64_t>{0, 0, 2, 2}));  // of both ranks
              require(cudaStreamSynchronize(one) == cudaSuccess, "synchronise");
              while (MessageGroup* const oldest = side.groups.oldest_queued()) {
                EXPECT_EQ(oldest->headers().check(), nullptr);
                EXPECT_TRUE(oldest->headers().all_seen());
                side.groups.release(*oldest);
                side.groups.pop_oldest();
              }
              EXPECT_TRUE(side.groups.empty());
              // The last one is complete: there is nothing to wait for.
              side.rank.barrier();
              const uint64_t before = fake_cuda::waits();
              side.rank.barrier();
              MessageGroup& group = side.groups.begin(other, true, nullptr);
              check(side.groups.prepare(group, Side::transfers(side.op(9))));
              launch(side, group);
              side.rank.barrier();
              EXPECT_EQ(fake_cuda::waits(), before);
              require(cudaStreamSynchronize(other) == cudaSuccess, "synchronise");
              side.rank.barrier();
              side.rank.abort();
              EXPECT_FALSE(side.groups.working());
              side.groups.forget();
              require(
                  cudaStreamDestroy(one) == cudaSuccess && cudaStreamDestroy(other) == cudaSuccess,
                  "destroy");
            }),
            "");
}

TEST_F(NcclInFlightGroups, WhatWasStoppedIsStillVerified) {
  EXPECT_EQ(run([](Side& side) {
              TestOp& op = side.op(3, 5);
              MessageGroup& group = side.groups.begin(nullptr, false, nullptr);
              check(side.groups.prepare(group, Side::transfers(op)));
              check(side.groups.verify({7, 3}));
              side.receive(group, side.op(3, 6).descriptor);
              side.rank.abort();
              EXPECT_FALSE(side.groups.working());
              side.groups.forget();
              EXPECT_TRUE(side.groups.empty());
              EXPECT_EQ(side.groups.verify({7, 3}).code(), Code::kProtocol);
              check(side.groups.verify({7, 4}));
            }),
            "");
}

}  // namespace
}  // namespace sotto::test
