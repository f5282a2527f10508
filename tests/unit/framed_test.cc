// Transports that are made of frame carriers, over a carrier in memory: what is sent when, where
// messages go, and how a link ends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <numeric>

#include "tests/support/fake_clock.h"
#include "tests/support/memory_carrier.h"
#include "tests/support/ranks.h"
#include "tests/support/transfers.h"
#include "transports/framed/framed_transport.h"

namespace sotto::test {
namespace {

using framed::FramedTransport;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using wire::FrameHeader;
using wire::FrameKind;

constexpr uint64_t kEager = 4096;
constexpr uint64_t kCredit = 16384;
constexpr TransportCaps kCaps{.name = "memory"};

class TestTransport final : public FramedTransport {
 public:
  using FramedTransport::carry_failures;
  using FramedTransport::FramedTransport;
  using FramedTransport::link;
};

class RecordingFailures final : public framed::FailureListener {
 public:
  Status on_failure_frame(int32_t peer, wire::Bytes payload) override {
    frames.emplace_back(peer, std::string(payload.begin(), payload.end()));
    return {};
  }
  void on_disconnected(int32_t peer) override { disconnected.push_back(peer); }
  std::vector<std::pair<int32_t, std::string>> frames;
  std::vector<int32_t> disconnected;
};

// Calls back for each poll, which takes as long as it may wait.
class StepPoller final : public Poller {
 public:
  explicit StepPoller(FakeClock& clock) : clock_(clock) {}
  bool poll(int64_t wait_us) override {
    clock_.advance_us(wait_us);
    if (on_poll) on_poll();
    return false;
  }
  void wake() override {}
  std::function<void()> on_poll;

 private:
  FakeClock& clock_;
};

// One rank of two.
struct Rank {
  RecordingSink sink;
  std::vector<MemoryCarrier*> carriers;  // to the other rank
  std::unique_ptr<TestTransport> transport;

  // Fills the carriers' owner.
  void make(int32_t rank, size_t number, std::shared_ptr<Poller> poller, const Clock& clock) {
    std::vector<framed::PeerCarriers> peers(2);
    auto& other = peers[static_cast<size_t>(1 - rank)];
    other.name = fmt::format("rank {} (the test)", 1 - rank);
    for (size_t i = 0; i < number; ++i) {
      auto carrier = std::make_unique<MemoryCarrier>(fmt::format("memory:{}", i));
      carriers.push_back(carrier.get());
      other.carriers.push_back(std::move(carrier));
    }
    transport =
        std::make_unique<TestTransport>(kCaps, std::move(poller), clock, rank, std::move(peers),
                                        sink, framed::FlowLimits{kEager, kCredit});
  }
  std::vector<FrameHeader> sent() const { return carriers[0]->sent; }
  TransferCounters counters(uint64_t comm) const {
    return transport->counters(comm, transport->link(0) != nullptr ? 0 : 1);
  }
};

class Framed : public testing::Test {
 protected:
  void SetUp() override { connect(1); }
  void connect(size_t number) {
    for (Rank& rank : ranks_) rank.transport.reset();
    for (int32_t r = 0; r < 2; ++r) {
      ranks_[r].carriers.clear();
      ranks_[r].make(r, number, poller_, clock_);
    }
    for (size_t i = 0; i < number; ++i)
      MemoryCarrier::join(*ranks_[0].carriers[i], *ranks_[1].carriers[i]);
  }
  // Brings everything across.
  void settle() {
    bool moved = true;
    while (moved) {
      moved = false;
      for (const Rank& rank : ranks_) {
        for (MemoryCarrier* carrier : rank.carriers) moved = carrier->step() || moved;
      }
    }
  }
  static std::vector<FrameKind> kinds(const Rank& rank) {
    std::vector<FrameKind> out;
    for (const FrameHeader& h : rank.sent()) out.push_back(h.kind);
    return out;
  }
  void expect_failure(const Rank& rank, Code code, const testing::Matcher<std::string>& text) {
    ASSERT_EQ(rank.sink.failures.size(), 1u);
    EXPECT_EQ(rank.sink.failures[0].status.code(), code) << rank.sink.failures[0].status.text();
    EXPECT_THAT(rank.sink.failures[0].status.text(), text);
  }
  void expect_no_failure() {
    for (const Rank& rank : ranks_) {
      for (const auto& failure : rank.sink.failures) ADD_FAILURE() << failure.status.text();
    }
  }
  // The operation, posted on both ranks.
  void post(TestOp& mine, TestOp& theirs) {
    check(source_.transport->post_op(mine.descriptor));
    check(target_.transport->post_op(theirs.descriptor));
  }
  Transfer& send(TestOp& op, std::vector<uint8_t>& data, uint32_t round = 0, uint32_t segment = 0) {
    Transfer& t = op.add(true, 1, round, segment, data.data(), data.size());
    source_.transport->send(t);
    return t;
  }
  Transfer& recv(TestOp& op, std::vector<uint8_t>& data, uint32_t round = 0, uint32_t segment = 0) {
    Transfer& t = op.add(false, 0, round, segment, data.data(), data.size());
    target_.transport->recv(t);
    return t;
  }
  // Messages on credit until no more are sent; the last one waits.
  void use_up_credit(TestOp& op, std::vector<uint8_t>& data) {
    const size_t fit = kCredit / wire::frame_bytes(data.size());
    for (uint32_t s = 0; s <= fit; ++s) send(op, data, 0, s);
    settle();
    ASSERT_EQ(source_.sent().size(), fit);
  }

  FakeClock clock_;
  std::shared_ptr<StepPoller> poller_ = std::make_shared<StepPoller>(clock_);
  Rank ranks_[2];
  Rank &source_ = ranks_[0], &target_ = ranks_[1];
};

std::vector<uint8_t> bytes_of(size_t count) {
  std::vector<uint8_t> out(count);
  std::iota(out.begin(), out.end(), uint8_t{1});
  return out;
}

TEST_F(Framed, ASmallMessageGoesAtOnceAndStraightToItsReceive) {
  TestOp mine(7, 0), theirs(7, 0);
  post(mine, theirs);
  auto data = bytes_of(1000);
  std::vector<uint8_t> got(1000);
  const Transfer& receive = recv(theirs, got);
  const Transfer& message = send(mine, data);
  ASSERT_TRUE(source_.carriers[0]->begin());
  EXPECT_EQ(target_.carriers[0]->place, got.data()) << "no copy in between";
  source_.carriers[0]->finish();
  EXPECT_EQ(got, data);
  EXPECT_EQ(source_.sent()[0].flags, wire::kFlagCredited);
  ASSERT_EQ(source_.sink.done.size(), 1u);
  EXPECT_EQ(source_.sink.done[0].transfer, &message);
  ASSERT_EQ(target_.sink.done.size(), 1u);
  EXPECT_EQ(target_.sink.done[0].transfer, &receive);
  source_.transport->complete(mine.descriptor);
  target_.transport->complete(theirs.descriptor);
  expect_no_failure();
}

TEST_F(Framed, HeaderBytesAreWhatIsCounted) {
  TestOp mine(7, 0), theirs(7, 0);
  post(mine, theirs);
  uint64_t payload = 0, headers = 0;
  std::deque<std::vector<uint8_t>> memory;
  const std::vector<size_t> sizes = {0, 1, 8, 1000, kEager, kEager + 1, 100'000};
  for (uint32_t s = 0; s < sizes.size(); ++s) {
    recv(theirs, memory.emplace_back(sizes[s]), 0, s);
    send(mine, memory.emplace_back(sizes[s]), 0, s);
    payload += sizes[s];
    headers += source_.transport->header_bytes(sizes[s]);
  }
  std::vector<uint8_t> scale(12);
  recv(theirs, scale, 1);
  Transfer& metadata = mine.add(true, 1, 1, 0, scale.data(), scale.size());
  metadata.message_class = MessageClass::kMetadata;
  source_.transport->send(metadata);
  headers += source_.transport->header_bytes(12) + 12;
  target_.transport->ready(0, theirs.descriptor, 1, 100'000);
  settle();
  const TransferCounters out = source_.counters(7), in = target_.counters(7);
  EXPECT_EQ(out.payload_bytes_sent, payload);
  EXPECT_EQ(in.payload_bytes_received, payload);
  EXPECT_EQ(out.header_bytes_sent, headers);
  EXPECT_EQ(in.header_bytes_received, headers);
  EXPECT_EQ(out.messages_sent, sizes.size() + 1);
  EXPECT_EQ(in.messages_received, sizes.size() + 1);
  // All that crossed is in one of the counters.
  for (const Rank* rank : {&source_, &target_}) {
    uint64_t crossed = 0;
    for (const FrameHeader& h : rank->sent()) crossed += wire::frame_bytes(h.payload_bytes);
    const TransferCounters c = rank->counters(7);
    EXPECT_EQ(c.payload_bytes_sent + c.header_bytes_sent + rank->counters(0).service_bytes_sent,
              crossed);
  }
  EXPECT_EQ(source_.transport->route(1), "memory memory:0");
}

TEST_F(Framed, AMessageBeforeItsReceiveWaitsInMemoryWithinTheCredit) {
  TestOp mine(7, 0), theirs(7, 0);
  auto data = bytes_of(1000);
  std::vector<uint8_t> got(1000);
  check(source_.transport->post_op(mine.descriptor));
  send(mine, data);
  settle();
  EXPECT_EQ(source_.sink.done.size(), 1u);
  EXPECT_TRUE(target_.sink.done.empty());
  check(target_.transport->post_op(theirs.descriptor));
  recv(theirs, got);
  EXPECT_EQ(target_.sink.done.size(), 1u);
  EXPECT_EQ(got, data);
  expect_no_failure();
}

TEST_F(Framed, AReceiveMayBePostedWhileItsMessageArrives) {
  TestOp mine(7, 0), theirs(7, 0);
  post(mine, theirs);
  auto data = bytes_of(1000);
  std::vector<uint8_t> got(1000);
  send(mine, data);
  ASSERT_TRUE(source_.carriers[0]->begin());
  recv(theirs, got);
  EXPECT_TRUE(target_.sink.done.empty());
  source_.carriers[0]->finish();
  EXPECT_EQ(target_.sink.done.size(), 1u);
  EXPECT_EQ(got, data);
}

TEST_F(Framed, ALongMessageWaitsForReadyOfItsRound) {
  TestOp mine(7, 0), theirs(7, 0);
  post(mine, theirs);
  auto data = bytes_of(kEager + 1);
  std::vector<uint8_t> got(kEager + 1), second(kEager + 1);
  send(mine, data, 0);
  send(mine, data, 1);
  settle();
  EXPECT_TRUE(source_.sent().empty());
  recv(theirs, got, 0);
  target_.transport->ready(0, theirs.descriptor, 0, kEager + 1);
  settle();
  EXPECT_THAT(kinds(target_), ElementsAre(FrameKind::kReady));
  ASSERT_EQ(source_.sent().size(), 1u);
  EXPECT_EQ(source_.sent()[0].flags, 0u) << "needs no credit";
  EXPECT_EQ(got, data);
  recv(theirs, second, 1);
  target_.transport->ready(0, theirs.descriptor, 1, kEager + 1);
  settle();
  EXPECT_EQ(second, data);
  EXPECT_EQ(target_.sink.done.size(), 2u);
}

TEST_F(Framed, WithTheCreditUsedUpReadyLetsSmallMessagesGo) {
  TestOp busy(7, 0), mine(7, 1), theirs(7, 1);
  check(source_.transport->post_op(busy.descriptor));
  post(mine, theirs);
  auto data = bytes_of(4000);
  use_up_credit(busy, data);
  const size_t before = source_.sent().size();
  std::vector<uint8_t> got(4000);
  send(mine, data);
  settle();
  EXPECT_EQ(source_.sent().size(), before) << "no credit is left";
  recv(theirs, got);
  target_.transport->ready(0, theirs.descriptor, 0, 4000);
  settle();
  EXPECT_EQ(got, data);
  EXPECT_EQ(target_.sent().back().kind, FrameKind::kReady);
  EXPECT_EQ(source_.sent().back().flags, 0u);
  expect_no_failure();
}

TEST_F(Framed, WithCreditLeftNoReadyIsSaidForSmallMessages) {
  TestOp mine(7, 0), theirs(7, 0);
  post(mine, theirs);
  std::vector<uint8_t> got(100);
  recv(theirs, got);
  target_.transport->ready(0, theirs.descriptor, 0, 100);
  settle();
  EXPECT_TRUE(target_.sent().empty());
}

TEST_F(Framed, CreditThatComesBackGoesToTheMostUrgent) {
  TestOp busy(7, 0), busy_there(7, 0);
  post(busy, busy_there);
  auto data = bytes_of(4000);
  use_up_credit(busy, data);
  std::deque<TestOp> waiting;
  for (const int32_t priority : {0, 5, -1}) {
    TestOp& op = waiting.emplace_back(7, 1 + waiting.size());
    op.descriptor.priority = priority;
    check(source_.transport->post_op(op.descriptor));
    send(op, data);
  }
  const size_t before = source_.sent().size();
  std::deque<std::vector<uint8_t>> got;
  for (uint32_t s = 0; s <= kCredit / wire::frame_bytes(4000); ++s)
    recv(busy_there, got.emplace_back(4000), 0, s);
  settle();
  std::vector<uint64_t> order;
  for (size_t i = before; i < source_.sent().size(); ++i)
    order.push_back(source_.sent()[i].key.number);
  EXPECT_THAT(order, ElementsAre(2, 0, 1, 3)) << "by priority, then by time of waiting";
  EXPECT_THAT(kinds(target_), testing::Each(FrameKind::kCredit));
  expect_no_failure();
}

TEST_F(Framed, SmallMessagesAndUrgentOnesGoFirst) {
  TestOp low(7, 0), high(7, 1), low_there(7, 0), high_there(7, 1);
  high.descriptor.priority = 3;
  post(low, low_there);
  post(high, high_there);
  auto bulk = bytes_of(20'000), small = bytes_of(10);
  std::deque<std::vector<uint8_t>> got;
  send(low, bulk, 0, 0);
  send(low, bulk, 0, 1);
  send(low, small, 0, 2);
  send(high, bulk, 0, 0);
  recv(low_there, got.emplace_back(20'000), 0, 0);
  recv(low_there, got.emplace_back(20'000), 0, 1);
  recv(low_there, got.emplace_back(10), 0, 2);
  recv(high_there, got.emplace_back(20'000), 0, 0);
  target_.transport->ready(0, low_there.descriptor, 0, 20'000);
  target_.transport->ready(0, high_there.descriptor, 0, 20'000);
  while (target_.carriers[0]->step()) {
  }
  settle();
  std::vector<std::pair<uint64_t, uint32_t>> order;
  for (const FrameHeader& h : source_.sent()) order.emplace_back(h.key.number, h.segment);
  EXPECT_THAT(order,
              ElementsAre(std::pair(0, 2), std::pair(1, 0), std::pair(0, 0), std::pair(0, 1)));
}

TEST_F(Framed, OfTwoCarriersTheFirstTakesSmallMessagesOnly) {
  connect(2);
  EXPECT_TRUE(source_.carriers[0]->for_small_only);
  EXPECT_FALSE(source_.carriers[1]->for_small_only);
  EXPECT_EQ(source_.carriers[1]->peer_name, "rank 1 (the test)");
  TestOp mine(7, 0), theirs(7, 0);
  post(mine, theirs);
  auto bulk = bytes_of(20'000), small = bytes_of(10);
  std::vector<uint8_t> got(20'000), small_got(10);
  recv(theirs, got);
  recv(theirs, small_got, 0, 1);
  target_.transport->ready(0, theirs.descriptor, 0, 20'000);
  settle();
  send(mine, bulk);
  EXPECT_FALSE(source_.carriers[0]->step());
  ASSERT_TRUE(source_.carriers[1]->begin()) << "bulk is under way";
  send(mine, small, 0, 1);
  EXPECT_TRUE(source_.carriers[0]->step());
  EXPECT_EQ(small_got, small) << "before the end of the bulk";
  source_.carriers[1]->finish();
  EXPECT_EQ(got, bulk);
}

TEST_F(Framed, AnOperationThatWaitsLongIsAnnouncedOnce) {
  TestOp mine(7, 5);
  check(source_.transport->post_op(mine.descriptor));
  auto data = bytes_of(kEager + 1);
  send(mine, data, 2, 3);
  const auto tick_after = [&](int64_t us) {
    clock_.advance_us(us);
    source_.transport->tick();
    settle();
  };
  tick_after(99'999);
  EXPECT_TRUE(source_.sent().empty());
  tick_after(1);
  ASSERT_THAT(kinds(source_), ElementsAre(FrameKind::kAnnounce));
  EXPECT_EQ(source_.sent()[0].key, mine.descriptor.key);
  EXPECT_EQ(source_.sent()[0].round, 2u);
  EXPECT_EQ(source_.sent()[0].segment, 3u);
  tick_after(1'000'000);
  EXPECT_EQ(source_.sent().size(), 1u);
  expect_no_failure();
  TestOp theirs(7, 5, 99);
  check(target_.transport->post_op(theirs.descriptor));
  expect_failure(target_, Code::kProtocol, AllOf(HasSubstr("rank 0"), HasSubstr("tag 99")));
}

TEST_F(Framed, APeerIsRemindedOfReceivesAfterHalfASecond) {
  TestOp mine(7, 0, 1), theirs(7, 0, 2);
  check(target_.transport->post_op(theirs.descriptor));
  std::vector<uint8_t> got(100);
  recv(theirs, got);
  target_.transport->ready(0, theirs.descriptor, 0, 100);
  clock_.advance_us(499'999);
  target_.transport->tick();
  settle();
  EXPECT_TRUE(target_.sent().empty());
  clock_.advance_us(1);
  target_.transport->tick();
  settle();
  EXPECT_THAT(kinds(target_), ElementsAre(FrameKind::kReady));
  check(source_.transport->post_op(mine.descriptor));
  expect_failure(source_, Code::kProtocol, AllOf(HasSubstr("tag 1"), HasSubstr("tag 2")));
}

TEST_F(Framed, AMismatchEndsTheLinkBeforeAnythingIsWritten) {
  TestOp mine(7, 0, 1), theirs(7, 0, 2);
  post(mine, theirs);
  auto data = bytes_of(100);
  std::vector<uint8_t> got(100);
  recv(theirs, got);
  send(mine, data);
  settle();
  expect_failure(target_, Code::kProtocol,
                 AllOf(HasSubstr("rank 0"), HasSubstr("rank 1"), HasSubstr("tag 1"),
                       HasSubstr("tag 2"), HasSubstr("all_reduce")));
  EXPECT_TRUE(target_.sink.done.empty());
  EXPECT_EQ(got, std::vector<uint8_t>(100));
}

TEST_F(Framed, ACancelledSendIsNotReadAnyMore) {
  TestOp mine(7, 0), theirs(7, 0);
  post(mine, theirs);
  auto data = bytes_of(1000), more = bytes_of(1000), waits = bytes_of(kEager + 1);
  send(mine, data);
  send(mine, more, 0, 1);
  send(mine, waits, 0, 2);
  ASSERT_TRUE(source_.carriers[0]->begin());
  source_.transport->cancel(mine.descriptor);
  EXPECT_EQ(source_.carriers[0]->sending(), nullptr);
  EXPECT_FALSE(source_.carriers[0]->can_send()) << "half a frame is out";
  source_.carriers[0]->finish();
  EXPECT_TRUE(source_.sink.done.empty());
  EXPECT_EQ(source_.sent().size(), 1u);
  EXPECT_TRUE(source_.transport->link(1)->delivered());
}

TEST_F(Framed, ACancelledOperationLeavesTheOthersTheirTurn) {
  TestOp gone(7, 0), mine(7, 1), theirs(7, 1);
  check(source_.transport->post_op(gone.descriptor));
  post(mine, theirs);
  auto data = bytes_of(1000), waits = bytes_of(kEager + 1);
  std::vector<uint8_t> got(1000);
  send(gone, data);
  send(gone, waits, 0, 1);
  source_.transport->cancel(gone.descriptor);
  recv(theirs, got);
  send(mine, data);
  settle();
  EXPECT_EQ(got, data);
  ASSERT_EQ(source_.sent().size(), 1u);
  EXPECT_EQ(source_.sent()[0].key, mine.descriptor.key);
}

TEST_F(Framed, ACancelledReceiveIsNotWrittenAnyMore) {
  TestOp mine(7, 0), theirs(7, 0), next(7, 1), next_there(7, 1);
  post(mine, theirs);
  auto data = bytes_of(1000);
  std::vector<uint8_t> got(1000);
  recv(theirs, got);
  send(mine, data);
  ASSERT_TRUE(source_.carriers[0]->begin());
  target_.transport->cancel(theirs.descriptor);
  EXPECT_EQ(target_.carriers[0]->place, nullptr);
  source_.carriers[0]->finish();
  EXPECT_TRUE(target_.sink.done.empty());
  EXPECT_EQ(got, std::vector<uint8_t>(1000));
  post(next, next_there);
  recv(next_there, got);
  send(next, data);
  settle();
  EXPECT_EQ(got, data) << "the carrier goes on";
}

TEST_F(Framed, ByeIsTheLastFrameAndTheEndBehindItIsNoFailure) {
  TestOp mine(7, 0), theirs(7, 0), late(7, 1);
  post(mine, theirs);
  auto data = bytes_of(1000);
  std::vector<uint8_t> got(1000);
  recv(theirs, got);
  send(mine, data);
  poller_->on_poll = [&] { settle(); };
  source_.transport->close(Deadline::in_us(clock_, 1'000'000));
  EXPECT_THAT(kinds(source_), ElementsAre(FrameKind::kData, FrameKind::kBye));
  EXPECT_FALSE(source_.carriers[0]->open());
  EXPECT_EQ(got, data);
  target_.carriers[0]->fail(Status(Code::kPeerLost, "closed"));
  target_.transport->tick();
  clock_.advance_us(1'000'000);
  target_.transport->tick();
  expect_no_failure();
  check(target_.transport->post_op(late.descriptor));
  recv(late, got);
  expect_failure(target_, Code::kPeerLost,
                 AllOf(HasSubstr("rank 0"), HasSubstr("has left"), HasSubstr("operation 1")));
}

TEST_F(Framed, AfterTheEndOfACommFramesOfItAreLate) {
  TestOp mine(7, 0), theirs(7, 0);
  post(mine, theirs);
  auto data = bytes_of(1000);
  std::vector<uint8_t> got(1000);
  send(mine, data);
  recv(theirs, got);
  target_.transport->ready(0, theirs.descriptor, 0, 1000);
  ASSERT_TRUE(source_.carriers[0]->begin());
  clock_.advance_us(1'000'000);
  target_.transport->tick();  // READY, while the message is under way
  source_.carriers[0]->finish();
  source_.transport->complete(mine.descriptor);
  source_.transport->leave(7);
  EXPECT_EQ(source_.counters(7).messages_sent, 0u);
  settle();
  EXPECT_THAT(kinds(target_), ElementsAre(FrameKind::kReady));
  expect_no_failure();
  target_.transport->complete(theirs.descriptor);
  target_.transport->leave(7);
  check(source_.transport->post_op(mine.descriptor));
  send(mine, data);  // one too many
  settle();
  expect_failure(target_, Code::kProtocol, HasSubstr("which is complete on rank 1"));
}

TEST_F(Framed, CloseEndsAtItsDeadline) {
  TestOp mine(7, 0);
  check(source_.transport->post_op(mine.descriptor));
  auto data = bytes_of(1000);
  send(mine, data);
  const int64_t before = clock_.now_ns();
  source_.transport->close(Deadline::in_us(clock_, 5'500));  // nothing moves
  EXPECT_EQ(clock_.now_ns() - before, 5'500'000);
  EXPECT_FALSE(source_.carriers[0]->open());
}

TEST_F(Framed, AFailureFrameGoesBeforeAllElse) {
  RecordingFailures heard;
  target_.transport->carry_failures(heard, "rank 1 (me)");
  TestOp mine(7, 0);
  check(source_.transport->post_op(mine.descriptor));
  auto data = bytes_of(1000);
  send(mine, data);
  source_.transport->link(1)->send_failure("the cause");
  EXPECT_FALSE(source_.transport->link(1)->failure_sent());
  ASSERT_TRUE(source_.carriers[0]->step());
  EXPECT_THAT(kinds(source_), ElementsAre(FrameKind::kFailure));
  EXPECT_TRUE(source_.transport->link(1)->failure_sent());
  EXPECT_THAT(heard.frames, ElementsAre(std::pair(0, std::string("the cause"))));
  settle();
  EXPECT_THAT(kinds(source_), ElementsAre(FrameKind::kFailure, FrameKind::kData));
  expect_no_failure();
}

TEST_F(Framed, WithoutAListenerFailureFramesAreRefused) {
  source_.transport->link(1)->send_failure("the cause");
  settle();
  expect_failure(target_, Code::kProtocol, HasSubstr("failure"));
}

TEST_F(Framed, ALostCarrierIsReportedWhenTheControlPlaneHasNamedNoCause) {
  RecordingFailures heard;
  target_.transport->carry_failures(heard, "rank 1 (me)");
  target_.carriers[0]->fail(Status(Code::kPeerLost, "reset"));
  EXPECT_THAT(heard.disconnected, ElementsAre(0));
  clock_.advance_us(199'999);
  target_.transport->tick();
  expect_no_failure();
  clock_.advance_us(1);
  target_.transport->tick();
  expect_failure(target_, Code::kPeerLost,
                 HasSubstr("between rank 1 (me) and rank 0 (the test) is lost: rank 1: reset"));
}

TEST_F(Framed, DamageOnTheWayNamesBothEnds) {
  target_.carriers[0]->fail(Status(Code::kProtocol, "wrong checksum"), true);
  expect_failure(target_, Code::kProtocol,
                 HasSubstr("between rank 1 and rank 0 (the test) is damaged: rank 1: wrong"));
}

TEST_F(Framed, WhatAPeerDidWrongIsNotCalledDamage) {
  target_.carriers[0]->fail(Status(Code::kProtocol, "sent nonsense"));
  expect_failure(target_, Code::kProtocol, testing::StrEq("sent nonsense"));
}

}  // namespace
}  // namespace sotto::test
