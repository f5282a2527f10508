// Two rings as a carrier of frames: sizes and portions, frames that are dropped half way, the end
// of the peer, and a peer that writes nonsense.
#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "transports/shm/carrier.h"

namespace sotto::shm {
namespace {

constexpr uint64_t kRing = 4096;

// Sends what is in its queue, and keeps what arrives.
class Owner final : public framed::FrameOwner {
 public:
  Result<uint8_t*> on_header(const wire::FrameHeader& header) override {
    payload.assign(header.payload_bytes, 0);
    begun = true;
    return payload.data();
  }
  Status on_frame(const wire::FrameHeader& header) override {
    headers.push_back(header);
    payloads.push_back(payload);
    return refuse_frames ? error(Code::kProtocol, "refused") : ok_status();
  }
  bool next_frame(framed::OutFrame& out) override {
    if (queue.empty()) return false;
    out = queue.front();
    queue.pop_front();
    return true;
  }
  void on_sent(const framed::OutFrame& /*out*/) override { ++sent; }
  void on_broken(Status status, bool was_damaged) override {
    broken.push_back(status);
    damaged = was_damaged;
  }
  void add(std::vector<uint8_t>& bytes) {
    framed::OutFrame frame;
    frame.header.kind = wire::FrameKind::kData;
    frame.header.payload_bytes = bytes.size();
    frame.payload = bytes.data();
    queue.push_back(frame);
  }

  std::deque<framed::OutFrame> queue;
  std::vector<uint8_t> payload;
  std::vector<wire::FrameHeader> headers;
  std::vector<std::vector<uint8_t>> payloads;
  std::vector<Status> broken;
  int sent = 0;
  bool begun = false, damaged = false, refuse_frames = false;
};

// One rank of two, whose rings are in one memfd that both have mapped.
struct End {
  End(const Descriptor& memory, bool lower, const Bell& other)
      : poller(std::make_shared<ShmPoller>(Clock::monotonic(), Bell::make().take())) {
    Segment segment = Segment::map(memory, 2 * RingMemory::footprint(kRing)).take();
    const RingMemory first = RingMemory::at(segment.data(), kRing);
    const RingMemory second = RingMemory::at(segment.data() + RingMemory::footprint(kRing), kRing);
    out = lower ? first : second;
    PeerRings rings{std::move(segment), out, lower ? second : first,
                    Bell(Descriptor(::dup(other.descriptor()))), 42};
    carrier = std::make_unique<RingCarrier>(poller, std::move(rings));
    carrier->start(owner, lower ? "rank 1" : "rank 0", false);
  }
  Owner owner;
  std::shared_ptr<ShmPoller> poller;
  RingMemory out;  // what this end writes, as it has mapped it
  std::unique_ptr<RingCarrier> carrier;
};

class ShmCarrier : public testing::Test {
 protected:
  void exchange(int turns = 400) {
    for (int i = 0; i < turns; ++i) {
      one.poller->poll(0);
      two.poller->poll(0);
    }
  }

  const Descriptor memory_ = Segment::make(2 * RingMemory::footprint(kRing)).take();
  const Bell bell_ = Bell::make().take();
  End one{memory_, true, bell_}, two{memory_, false, bell_};
};

std::vector<uint8_t> bytes_of(size_t count, uint8_t seed) {
  std::vector<uint8_t> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<uint8_t>(seed + 7 * i);
  return bytes;
}

TEST_F(ShmCarrier, FramesOfEverySizeArriveInOrder) {
  std::vector<std::vector<uint8_t>> payloads;
  for (const size_t bytes : {0, 1, 95, 4000, 4096, 4097, 8192, 300'001})
    payloads.push_back(bytes_of(bytes, static_cast<uint8_t>(bytes)));
  for (auto& payload : payloads) one.owner.add(payload), two.owner.add(payload);
  one.carrier->flush();
  exchange();
  EXPECT_EQ(two.owner.payloads, payloads);
  EXPECT_EQ(one.owner.payloads, payloads);
  EXPECT_EQ(one.owner.sent, 8);
  EXPECT_TRUE(one.carrier->delivered());
  EXPECT_EQ(one.carrier->address(), "pid 42");
}

TEST_F(ShmCarrier, ADroppedFrameIsNotReadAnyMoreAndNothingFollows) {
  std::vector<uint8_t> payload = bytes_of(10'000, 1), next = bytes_of(5, 2);
  one.owner.add(payload);
  one.carrier->flush();
  one.owner.add(next);
  two.poller->poll(0);
  EXPECT_TRUE(two.owner.begun);
  one.carrier->drop_out();
  payload.assign(payload.size(), 0);
  payload.shrink_to_fit();
  EXPECT_FALSE(one.carrier->can_send());
  EXPECT_TRUE(one.carrier->delivered());
  exchange();
  EXPECT_TRUE(two.owner.payloads.empty());
  EXPECT_EQ(one.owner.sent, 0);
  one.carrier->close();
  exchange();
  ASSERT_EQ(two.owner.broken.size(), 1u);
  EXPECT_EQ(two.owner.broken[0].code(), Code::kPeerLost);
  EXPECT_NE(two.owner.broken[0].text().find("rank 0 has closed the shared memory in the middle"),
            std::string::npos)
      << two.owner.broken[0].text();
}

TEST_F(ShmCarrier, ThePlaceOfADroppedArrivalIsNotWritten) {
  std::vector<uint8_t> payload = bytes_of(10'000, 1), next = bytes_of(5, 2);
  one.owner.add(payload), one.owner.add(next);
  one.carrier->flush();
  two.poller->poll(0);
  two.carrier->drop_in();
  const std::vector<uint8_t> before = two.owner.payload;
  exchange(1);
  EXPECT_EQ(two.owner.payload, before);
  exchange();
  ASSERT_EQ(two.owner.payloads.size(), 2u);
  EXPECT_EQ(two.owner.payloads[1], next);
}

TEST_F(ShmCarrier, WhatWasTakenBeforeTheEndArrives) {
  std::vector<uint8_t> payload = bytes_of(3000, 1);
  one.owner.add(payload);
  one.carrier->flush();
  one.carrier->close();
  EXPECT_TRUE(one.owner.broken.empty());
  exchange();
  EXPECT_EQ(two.owner.payloads.size(), 1u);
  ASSERT_EQ(two.owner.broken.size(), 1u);
  EXPECT_EQ(two.owner.broken[0].text(), "rank 0 has closed the shared memory");
  EXPECT_FALSE(two.owner.damaged);
  EXPECT_FALSE(two.carrier->open());
}

TEST_F(ShmCarrier, ABrokenPositionOfThePeerEndsTheCarrier) {
  one.out.control->written.store(uint64_t{1} << 60);
  exchange(1);
  ASSERT_EQ(two.owner.broken.size(), 1u);
  EXPECT_EQ(two.owner.broken[0].code(), Code::kProtocol);
  EXPECT_TRUE(two.owner.damaged);
  EXPECT_NE(two.owner.broken[0].text().find("from rank 0: the ring is broken"), std::string::npos)
      << two.owner.broken[0].text();
}

class ShmCarrierDamage : public ShmCarrier, public testing::WithParamInterface<size_t> {};

TEST_P(ShmCarrierDamage, BytesThatAreNotTheSendersEndTheCarrier) {
  std::vector<uint8_t> payload = bytes_of(100, 1);
  one.owner.add(payload);
  one.carrier->flush();
  one.out.data[GetParam()] ^= 1;
  exchange(1);
  ASSERT_EQ(two.owner.broken.size(), 1u);
  EXPECT_EQ(two.owner.broken[0].code(), Code::kProtocol);
  EXPECT_TRUE(two.owner.damaged);
}

// The header, and the trailer behind 100 bytes.
INSTANTIATE_TEST_SUITE_P(At, ShmCarrierDamage,
                         testing::Values(8, wire::kHeaderBytes - 1, wire::kHeaderBytes + 100,
                                         wire::kHeaderBytes + 107));

TEST_F(ShmCarrier, AnErrorOfTheOwnerEndsTheCarrierUndamaged) {
  two.owner.refuse_frames = true;
  std::vector<uint8_t> payload = bytes_of(100, 1);
  one.owner.add(payload);
  one.carrier->flush();
  exchange(1);
  ASSERT_EQ(two.owner.broken.size(), 1u);
  EXPECT_EQ(two.owner.broken[0].text(), "refused");
  EXPECT_FALSE(two.owner.damaged);
}

// A poller that sleeps says so, and what the peer then writes rings once.
TEST_F(ShmCarrier, OnlyARankThatSleepsIsRungFor) {
  std::vector<uint8_t> payload = bytes_of(100, 1);
  const auto ring_of = [&] {
    uint64_t count = 0;
    return ::read(bell_.descriptor(), &count, sizeof count) == sizeof count ? count : 0;
  };
  one.owner.add(payload);
  one.carrier->flush();
  EXPECT_EQ(ring_of(), 0u);
  EXPECT_FALSE(two.poller->arm());  // the frame is there
  exchange(2);
  EXPECT_TRUE(two.poller->arm());
  one.owner.add(payload), one.owner.add(payload);
  one.carrier->flush();
  EXPECT_EQ(ring_of(), 1u);
}

}  // namespace
}  // namespace sotto::shm
