// The wires of the network lab, with packets and a clock of the test's own.
#include "integration/netns/wires.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <vector>

#include "integration/netns/frame.h"

namespace sotto_netns {
namespace {

constexpr int64_t kMs = 1'000'000;
constexpr size_t kEthernetHeader = 14;

Address v4(uint8_t host) {
  Address address{};
  address[10] = address[11] = 0xff;
  const uint8_t bytes[] = {10, 79, 0, host};
  std::copy(std::begin(bytes), std::end(bytes), address.begin() + 12);
  return address;
}

Address v6(uint8_t host) {
  Address address{};
  address[0] = 0xfd;
  address[15] = host;
  return address;
}

// What the wires look at: version and destination. The last byte is a number for the test. bytes:
// without the device's header, which stands in front.
std::vector<uint8_t> packet(uint8_t to, uint8_t number = 0, size_t bytes = 100) {
  std::vector<uint8_t> p(Frame::kHeader + bytes);
  p[Frame::kHeader] = 0x45;
  const Address address = v4(to);
  std::copy(address.begin() + 12, address.end(), p.begin() + Frame::kHeader + 16);
  p.back() = number;
  return p;
}

// One piece that becomes packets with gso_size bytes of the payload each.
std::vector<uint8_t> piece(uint8_t to, size_t payload, uint16_t gso_size) {
  constexpr size_t kIp = 20, kTcp = 32;  // with time stamps
  std::vector<uint8_t> p = packet(to, 0, kIp + kTcp + payload);
  OffloadHeader header;
  header.flags = OffloadHeader::kNeedsChecksum;
  header.gso_type = OffloadHeader::kTcpIpv4;
  header.gso_size = gso_size;
  header.csum_start = kIp;
  std::memcpy(p.data(), &header, sizeof header);
  p[Frame::kHeader + kIp + 12] = kTcp / 4 << 4;
  return p;
}

class WiresTest : public testing::Test {
 protected:
  struct Arrival {
    int64_t at = 0;
    size_t host = 0;
    uint8_t number = 0;
  };

  explicit WiresTest() { add_hosts(&wires_); }

  static void add_hosts(Wires* wires) {
    for (uint8_t host = 1; host <= 4; ++host) wires->add_host({v4(host), v6(host)});
  }
  void send(size_t from, const std::vector<uint8_t>& p) { wires_.send(from, p.data(), p.size()); }
  int64_t advance(int64_t now) {
    return wires_.advance(now, [&](size_t host, const uint8_t* p, size_t bytes) {
      arrivals_.push_back({now, host, p[bytes - 1]});
    });
  }
  // As the program does it: whenever something is due.
  void run_from(int64_t now) {
    while (now >= 0) {
      const int64_t next = advance(now);
      ASSERT_TRUE(next < 0 || next > now);
      now = next;
    }
  }

  Wires wires_{1};
  std::vector<Arrival> arrivals_;
};

TEST_F(WiresTest, WithoutLimitsEverythingArrivesAtOnce) {
  for (uint8_t i = 0; i < 10; ++i) send(0, packet(2, i));
  EXPECT_EQ(advance(5), -1);
  ASSERT_EQ(arrivals_.size(), 10u);
  for (uint8_t i = 0; i < 10; ++i) {
    EXPECT_EQ(arrivals_[i].host, 1u);
    EXPECT_EQ(arrivals_[i].number, i);
  }
  EXPECT_EQ(wires_.counters().delivered, 10u);
}

TEST_F(WiresTest, BucketLetsABurstPassAndThenItsRate) {
  wires_.set({8e6, 10'000, 100'000, 0, 0}, 0);  // a byte in a microsecond
  for (uint8_t i = 0; i < 50; ++i) send(0, packet(2, i, 1000 - kEthernetHeader));
  run_from(0);
  ASSERT_EQ(arrivals_.size(), 50u);
  for (int i = 0; i < 50; ++i) {
    EXPECT_EQ(arrivals_[i].number, i);
    EXPECT_NEAR(static_cast<double>(arrivals_[i].at), std::max(0, i - 9) * 1e6, 1e3) << i;
  }
}

TEST_F(WiresTest, ReceiversBucketBoundsSendersTogether) {
  wires_.set({8e6, 1000, 100'000, 0, 0}, 0);
  for (uint8_t i = 0; i < 10; ++i) {
    for (const size_t from : {1, 2, 3}) send(from, packet(1, i, 1000 - kEthernetHeader));
  }
  run_from(0);
  ASSERT_EQ(arrivals_.size(), 30u);
  EXPECT_NEAR(static_cast<double>(arrivals_.back().at), 29e6, 1e5);
}

TEST_F(WiresTest, FullQueueDropsWhatComesLast) {
  wires_.set({8e6, 1000, 5'000, 0, 0}, 0);
  for (uint8_t i = 0; i < 50; ++i) send(0, packet(2, i, 1000 - kEthernetHeader));
  run_from(0);
  ASSERT_EQ(arrivals_.size(), 5u);
  EXPECT_EQ(arrivals_.back().number, 4);
  EXPECT_EQ(wires_.counters().queue_full, 45u);
}

TEST_F(WiresTest, RateChangesForWhatWaits) {
  wires_.set({8e6, 1000, 100'000, 0, 0}, 0);
  for (uint8_t i = 0; i < 11; ++i) send(0, packet(2, i, 1000 - kEthernetHeader));
  advance(0);
  wires_.set({16e6, 1000, 100'000, 0, 0}, 0);
  run_from(0);
  ASSERT_EQ(arrivals_.size(), 11u);
  EXPECT_NEAR(static_cast<double>(arrivals_.back().at), 5e6, 1e5);
}

TEST_F(WiresTest, DelayIsExactAndKeepsTheOrderWhenItChanges) {
  wires_.set({0, 0, 0, 5 * kMs, 0}, 0);
  send(0, packet(2, 1));
  EXPECT_EQ(advance(100), 100 + 5 * kMs);
  wires_.set({0, 0, 0, 1 * kMs, 0}, 200);
  send(0, packet(2, 2));
  send(2, packet(2, 3));
  run_from(200);
  ASSERT_EQ(arrivals_.size(), 3u);
  EXPECT_EQ(arrivals_[0].number, 3);
  EXPECT_EQ(arrivals_[0].at, 200 + 1 * kMs);
  EXPECT_EQ(arrivals_[1].number, 1);
  EXPECT_EQ(arrivals_[2].number, 2);
  EXPECT_EQ(arrivals_[2].at, 100 + 5 * kMs);
}

TEST_F(WiresTest, LossFollowsFromSeedAndOwnPacketsAlone) {
  const auto received = [](uint64_t seed, bool others_send) {
    Wires wires(seed);
    add_hosts(&wires);
    wires.set({0, 0, 0, 0, 100'000}, 0);
    std::vector<uint8_t> numbers;
    for (int i = 0; i < 250; ++i) {
      const std::vector<uint8_t> mine = packet(2, static_cast<uint8_t>(i)), other = packet(3);
      if (others_send) wires.send(3, other.data(), other.size());
      wires.send(0, mine.data(), mine.size());
      wires.advance(i, [&](size_t host, const uint8_t* p, size_t bytes) {
        if (host == 1) numbers.push_back(p[bytes - 1]);
      });
    }
    return numbers;
  };
  const std::vector<uint8_t> first = received(1, false);
  EXPECT_GT(first.size(), 200u);  // 225 expected, deviation 5
  EXPECT_LT(first.size(), 245u);
  EXPECT_EQ(received(1, true), first);
  EXPECT_NE(received(2, false), first);
}

TEST_F(WiresTest, PartitionDropsWhatIsUnderWayAndHeals) {
  wires_.set({0, 0, 0, 5 * kMs, 0}, 0);
  send(0, packet(3, 1));  // to the other side of what is to come
  send(0, packet(2, 2));
  advance(0);
  wires_.part({true, true});
  send(2, packet(1, 3));
  send(2, packet(4, 4));
  run_from(0);
  ASSERT_EQ(arrivals_.size(), 2u);
  EXPECT_EQ(arrivals_[0].number, 2);
  EXPECT_EQ(arrivals_[1].number, 4);
  EXPECT_EQ(wires_.counters().cut, 2u);
  wires_.part({});
  send(2, packet(1, 5));
  run_from(10 * kMs);
  EXPECT_EQ(arrivals_.back().number, 5);
}

TEST_F(WiresTest, Ipv6AndWhatIsNoPacketForAHost) {
  std::vector<uint8_t> p(Frame::kHeader + 60);
  p[Frame::kHeader] = 0x60;
  const Address to = v6(3);
  std::copy(to.begin(), to.end(), p.begin() + Frame::kHeader + 24);
  send(0, p);
  EXPECT_EQ(advance(0), -1);
  ASSERT_EQ(arrivals_.size(), 1u);
  EXPECT_EQ(arrivals_[0].host, 2u);

  send(0, packet(99));
  for (const uint8_t first : {0x00, 0x45, 0x60}) {
    std::vector<uint8_t> cut(Frame::kHeader + 3);
    cut[Frame::kHeader] = first;
    send(0, cut);
  }
  send(0, std::vector<uint8_t>(Frame::kHeader - 1));
  wires_.send(0, nullptr, 0);
  EXPECT_EQ(advance(0), -1);
  EXPECT_EQ(arrivals_.size(), 1u);
  EXPECT_EQ(wires_.counters().unknown, 6u);
}

// 3 packets of 1000, 1000 and 500 bytes with headers of 14, 20 and 32 bytes each.
TEST_F(WiresTest, WhatBecomesSeveralPacketsCountsAsThem) {
  wires_.set({8e6, 2698, 100'000, 0, 0}, 0);  // a byte in a microsecond
  for (int i = 0; i < 3; ++i) send(0, piece(2, 2500, 1000));
  run_from(0);
  ASSERT_EQ(arrivals_.size(), 3u);
  for (int i = 0; i < 3; ++i)
    EXPECT_NEAR(static_cast<double>(arrivals_[i].at), i * 2698e3, 1e3) << i;
  EXPECT_EQ(wires_.counters().delivered, 9u);
}

TEST_F(WiresTest, PiecesThatCannotBeAreNotCarried) {
  send(0, piece(2, 0, 1000));  // nothing behind the headers
  send(0, piece(2, 100, 0));   // cut into nothing
  std::vector<uint8_t> p = piece(2, 100, 50);
  p.resize(Frame::kHeader + 30);  // ends within the TCP header
  send(0, p);
  EXPECT_EQ(advance(0), -1);
  EXPECT_TRUE(arrivals_.empty());
  EXPECT_EQ(wires_.counters().unknown, 3u);
}

}  // namespace
}  // namespace sotto_netns
