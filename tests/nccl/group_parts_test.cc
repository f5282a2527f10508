// What groups over NCCL are made of: headers, memory and counters, without communicators.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "tests/emulation/cuda/fake_cuda.h"
#include "tests/support/ranks.h"
#include "tests/support/transfers.h"
#include "transports/nccl/header_exchange.h"
#include "transports/nccl/staging.h"

namespace sotto::test {
namespace {

using nccl::Counters;
using nccl::GroupHeader;
using nccl::HeaderExchange;
using nccl::PeerHeader;
using nccl::PinnedPool;
using nccl::Staging;
using testing::AllOf;
using testing::HasSubstr;

class NcclGroupParts : public testing::Test {
 protected:
  void SetUp() override {
    fake_cuda::clear_faults();
    fake_cuda::configure({});
  }
};
class NcclHeaders : public NcclGroupParts {};
class NcclStaging : public NcclGroupParts {};

std::vector<Transfer*> group_of(TestOp& op) {
  std::vector<Transfer*> all;
  for (Transfer& t : op.transfers) all.push_back(&t);
  return all;
}

// A rank's messages of 8 bytes to each of the peers and back.
TestOp exchange(uint64_t number, std::initializer_list<int32_t> peers, uint64_t tag = 0) {
  TestOp op(7, number, tag);
  for (const int32_t peer : peers) {
    op.add(true, peer, 0, 0, nullptr, 8);
    op.add(false, peer, 0, 0, nullptr, 8);
  }
  return op;  // Side makes it the operation of its messages
}

struct Side {
  Side(int32_t rank, TestOp& op, int32_t size = 2)
      : headers(pool, rank, size), group(group_of(op)) {
    for (Transfer* t : group) {
      t->op = &op.descriptor;
      check(headers.add(t->peer, group));
    }
  }
  // NCCL's part.
  void receive(const Side& from, size_t bytes = sizeof(GroupHeader)) {
    std::memcpy(headers.all()[0].in, from.headers.all()[0].out, bytes);
  }
  PinnedPool pool{0};
  HeaderExchange headers;
  std::vector<Transfer*> group;
};

TEST_F(NcclHeaders, ThereIsOneForEachPeer) {
  TestOp op = exchange(3, {1, 2});
  Side side(0, op, 3);
  const std::span<const PeerHeader> all = side.headers.all();
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0].peer, 1);
  EXPECT_EQ(all[1].peer, 2);
  std::set<const std::byte*> places;
  for (const PeerHeader& header : all) {
    places.insert({header.out, header.in});
    EXPECT_EQ(std::memcmp(header.out, &header.mine, sizeof(GroupHeader)), 0);
    EXPECT_EQ(header.mine.key.number, 3u);
    cudaPointerAttributes at{};
    ASSERT_EQ(cudaPointerGetAttributes(&at, header.in), cudaSuccess);
    EXPECT_EQ(at.type, cudaMemoryTypeHost);
  }
  EXPECT_EQ(places.size(), 4u);
  for (const std::byte* a : places) {
    for (const std::byte* b : places)
      EXPECT_TRUE(a == b || static_cast<size_t>(std::abs(a - b)) >= sizeof(GroupHeader));
    EXPECT_LE(a + sizeof(GroupHeader), *places.begin() + HeaderExchange::bytes(3));
  }
}

TEST_F(NcclHeaders, AHeaderIsSeenWhenAllOfItHasArrived) {
  TestOp op = exchange(3, {1}), theirs = exchange(3, {0});
  Side side(0, op), other(1, theirs);
  EXPECT_EQ(side.headers.check(), nullptr);
  EXPECT_FALSE(side.headers.all_seen());
  side.receive(other, sizeof(GroupHeader) - 1);
  EXPECT_EQ(side.headers.check(), nullptr);
  EXPECT_FALSE(side.headers.all_seen());
  side.receive(other);
  EXPECT_FALSE(side.headers.all_seen());  // check() looks
  EXPECT_EQ(side.headers.check(), nullptr);
  EXPECT_TRUE(side.headers.all_seen());
}

TEST_F(NcclHeaders, WhatIsMeantForSomethingElseStaysADifference) {
  TestOp op = exchange(3, {1}, 5), theirs = exchange(3, {0}, 6);
  Side side(0, op), other(1, theirs);
  side.receive(other);
  for (int times = 0; times < 2; ++times) {
    const PeerHeader* const differs = side.headers.check();
    ASSERT_NE(differs, nullptr);
    EXPECT_EQ(differs->peer, 1);
    EXPECT_EQ(differs->meant.code(), Code::kProtocol);
    EXPECT_THAT(differs->meant.text(), AllOf(HasSubstr("tag 5"), HasSubstr("tag 6")));
  }
}

TEST_F(NcclHeaders, RenewedHeadersHaveTheNumberOfNowAndAreNotSeen) {
  TestOp op = exchange(3, {1}, 5), theirs = exchange(3, {0}, 6);
  Side side(0, op), other(1, theirs);
  side.receive(other);
  ASSERT_NE(side.headers.check(), nullptr);
  op.descriptor = exchange(9, {}).descriptor;
  side.headers.renew(side.group);
  EXPECT_EQ(side.headers.check(), nullptr);  // neither the difference nor what had arrived
  EXPECT_FALSE(side.headers.all_seen());
  EXPECT_EQ(side.headers.all()[0].mine.key.number, 9u);
  EXPECT_EQ(
      std::memcmp(side.headers.all()[0].out, &side.headers.all()[0].mine, sizeof(GroupHeader)), 0);
  theirs.descriptor = op.descriptor;
  other.headers.renew(other.group);
  side.receive(other);
  EXPECT_EQ(side.headers.check(), nullptr);
  EXPECT_TRUE(side.headers.all_seen());
}

TEST_F(NcclHeaders, ReleasedMemoryIsUsedAgain) {
  TestOp op = exchange(3, {1});
  Side side(0, op);
  const std::byte* const place = side.headers.all()[0].out;
  side.headers.release();
  EXPECT_TRUE(side.headers.all().empty());
  side.headers.release();  // nothing is given back twice
  EXPECT_EQ(check(side.pool.take(HeaderExchange::bytes(2))), place);
  EXPECT_NE(check(side.pool.take(HeaderExchange::bytes(2))), place);
}

TEST_F(NcclHeaders, CountAsServiceBytesOfNoComm) {
  TestOp op = exchange(3, {1, 2});
  Side side(0, op, 3);
  Counters counters;
  side.headers.count(counters, true);
  side.headers.count(counters, true);
  side.headers.count(counters, false);
  for (const int32_t peer : {1, 2}) {
    EXPECT_EQ(counters.read(0, peer).service_bytes_sent, 2 * sizeof(GroupHeader));
    EXPECT_EQ(counters.read(0, peer).service_bytes_received, sizeof(GroupHeader));
    EXPECT_EQ(counters.read(0, peer).messages_sent, 0u);
    EXPECT_EQ(counters.read(7, peer).service_bytes_sent, 0u);
  }
}

TEST(NcclCounters, AreOfACommAndAPeer) {
  Counters counters;
  const auto count = [&](uint64_t comm, int32_t peer, bool is_send, MessageClass of,
                         uint64_t bytes) {
    TestOp op(comm, 0);
    op.add(is_send, peer, 0, 0, nullptr, bytes).message_class = of;
    counters.count(op.transfers[0]);
  };
  count(7, 1, true, MessageClass::kPayload, 100);
  count(7, 1, true, MessageClass::kPayload, 20);
  count(7, 1, true, MessageClass::kMetadata, 3);
  count(7, 1, false, MessageClass::kPayload, 4000);
  count(7, 1, false, MessageClass::kMetadata, 0);
  count(7, 2, false, MessageClass::kPayload, 50);
  count(8, 1, true, MessageClass::kPayload, 60);
  const TransferCounters c = counters.read(7, 1);
  EXPECT_EQ(c.payload_bytes_sent, 120u);
  EXPECT_EQ(c.header_bytes_sent, 3u);
  EXPECT_EQ(c.messages_sent, 3u);
  EXPECT_EQ(c.payload_bytes_received, 4000u);
  EXPECT_EQ(c.header_bytes_received, 0u);
  EXPECT_EQ(c.messages_received, 2u);
  EXPECT_EQ(counters.read(7, 2).payload_bytes_received, 50u);
  EXPECT_EQ(counters.read(7, 2).messages_sent, 0u);
  EXPECT_EQ(counters.read(8, 1).payload_bytes_sent, 60u);
  EXPECT_EQ(counters.read(8, 2).messages_sent, 0u);
}

TEST_F(NcclStaging, MemoryThatNcclReachesIsUsedAsItIs) {
  PinnedPool pool(0);
  Staging staging(pool, 0);
  void *device = nullptr, *pinned = nullptr;
  char pageable = 0;
  ASSERT_EQ(cudaMalloc(&device, 16), cudaSuccess);
  ASSERT_EQ(cudaMallocHost(&pinned, 16), cudaSuccess);
  for (const bool captured : {false, true}) {
    for (const bool received : {false, true}) {
      EXPECT_EQ(check(staging.reachable(device, 16, received, captured)), device);
      EXPECT_EQ(check(staging.reachable(pinned, 16, received, captured)), pinned);
      EXPECT_EQ(check(staging.reachable(&pageable, 0, received, captured)), &pageable);
    }
  }
  EXPECT_EQ(cudaFree(device), cudaSuccess);
  EXPECT_EQ(cudaFreeHost(pinned), cudaSuccess);
}

TEST_F(NcclStaging, OtherHostMemoryGoesThroughPinnedBlocks) {
  PinnedPool pool(0);
  Staging staging(pool, 0);
  std::vector<uint8_t> sent(5000), expected(5000, 1);
  std::iota(sent.begin(), sent.end(), uint8_t{0});
  auto* const out =
      static_cast<uint8_t*>(check(staging.reachable(sent.data(), 5000, false, false)));
  auto* const in =
      static_cast<uint8_t*>(check(staging.reachable(expected.data(), 5000, true, false)));
  ASSERT_NE(out, sent.data());
  ASSERT_NE(in, expected.data());
  EXPECT_EQ(std::memcmp(out, sent.data(), 5000), 0);
  std::memset(in, 42, 5000);
  std::memset(out, 43, 5000);  // what was sent is not delivered
  EXPECT_EQ(expected, std::vector<uint8_t>(5000, 1));
  const std::vector<uint8_t> unchanged = sent;
  staging.deliver();
  EXPECT_EQ(expected, std::vector<uint8_t>(5000, 42));
  EXPECT_EQ(sent, unchanged);

  const uint64_t pinned = fake_cuda::live().pinned_blocks;
  staging.release();
  staging.deliver();
  std::memset(in, 44, 5000);
  EXPECT_EQ(expected, std::vector<uint8_t>(5000, 42));
  std::set<void*> again;
  for (int i = 0; i < 2; ++i)
    again.insert(check(staging.reachable(sent.data(), 5000, false, false)));
  EXPECT_EQ(again, (std::set<void*>{out, in}));
  EXPECT_EQ(fake_cuda::live().pinned_blocks, pinned);
}

TEST_F(NcclStaging, RefusesWhatNcclCannotReach) {
  PinnedPool pool(0);
  Staging staging(pool, 0);
  char pageable = 0;
  const Status in_graph = staging.reachable(&pageable, 1, false, true).status();
  EXPECT_EQ(in_graph.code(), Code::kInternal);
  EXPECT_THAT(in_graph.text(), HasSubstr("memory in a graph that NCCL cannot reach"));

  void* memory = nullptr;
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  ASSERT_EQ(cudaMalloc(&memory, 8), cudaSuccess);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  const Status elsewhere = staging.reachable(memory, 8, true, false).status();
  EXPECT_EQ(elsewhere.code(), Code::kInvalidArgument);
  EXPECT_THAT(elsewhere.text(), HasSubstr("memory is on cuda:1"));
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
}

}  // namespace
}  // namespace sotto::test
