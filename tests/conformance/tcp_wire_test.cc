// The TCP transport against a peer that is played by the test, byte for byte: what breaks the rules
// of the wire ends as PROTOCOL or PEER_LOST, named, and nothing is written where it should not be.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>

#include "core/base/hash.h"
#include "tests/conformance/transport_suite.h"
#include "tests/support/fake_clock.h"
#include "transports/tcp/tcp_transport.h"

namespace sotto::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using wire::FrameHeader;
using wire::FrameKind;

class NoOwner final : public tcp::StreamOwner {
  Result<tcp::PayloadPlace> on_header(tcp::FrameStream&, const FrameHeader&) override {
    return tcp::PayloadPlace{};
  }
  Status on_frame(tcp::FrameStream&, const FrameHeader&) override { return {}; }
  bool next_frame(tcp::FrameStream&, tcp::OutFrame&) override { return false; }
  void on_sent(tcp::FrameStream&, const tcp::OutFrame&) override {}
  void on_broken(tcp::FrameStream&, Status) override {}
};

FrameHeader data_header(const TestOp& op, uint64_t bytes, uint32_t segment = 0,
                        uint32_t flags = wire::kFlagCredited) {
  FrameHeader h;
  h.key = op.descriptor.key;
  h.signature = op.descriptor.signature;
  h.segment = segment;
  h.flags = flags;
  h.payload_bytes = bytes;
  return h;
}

std::string frame(FrameHeader header, const std::string& payload = "") {
  header.payload_bytes = payload.size();
  const auto head = wire::encode_header(header);
  std::string out(head.begin(), head.end());
  if (payload.empty()) return out;
  const auto trailer = wire::encode_trailer(hash64(payload));
  return out + payload + std::string(trailer.begin(), trailer.end());
}

// Rank 0 of two; rank 1 is the test.
class TcpWire : public testing::Test {
 protected:
  void SetUp() override {
    int ends[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    peer_ = ends[1];
    reactor_ = check(tcp::Reactor::make({.clock = &clock_, .sockets = {}}), "reactor");
    std::vector<tcp::MeshPeer> peers(2);
    peers[1].streams.push_back(std::make_unique<tcp::StreamCarrier>(
        check(tcp::FrameStream::make(*reactor_, ends[0], "test", no_owner_))));
    peers[1].name = kPeerName;
    transport_ = std::make_unique<tcp::TcpTransport>(reactor_, 0, std::move(peers), sink_,
                                                     framed::FlowLimits{kEager, kCredit});
  }
  void TearDown() override {
    transport_.reset();
    hang_up();
  }
  void hang_up() {
    if (peer_ >= 0) ::close(peer_);
    peer_ = -1;
  }

  // Writes what the peer says, in portions, with polls in between.
  void say(const std::string& bytes, size_t portion = 100'000) {
    for (size_t at = 0; at < bytes.size() && sink_.failures.empty(); at += portion) {
      const std::string part = bytes.substr(at, portion);
      ASSERT_EQ(::send(peer_, part.data(), part.size(), MSG_NOSIGNAL),
                static_cast<ssize_t>(part.size()));
      reactor_->poll(0);
    }
    poll();
  }
  void poll() {
    for (int i = 0; i < 20; ++i) reactor_->poll(0);
  }
  void await_failure() {
    for (int i = 0; sink_.failures.empty() && i < 500; ++i) pass_time();
  }
  // 10 ms, which do not pass by themselves.
  void pass_time() {
    clock_.advance_us(10'000);
    reactor_->poll(1000);
  }
  std::string heard() {
    std::string all(1 << 20, '\0');
    poll();
    const ssize_t n = ::recv(peer_, all.data(), all.size(), MSG_DONTWAIT);
    all.resize(n > 0 ? static_cast<size_t>(n) : 0);
    return all;
  }
  std::vector<FrameHeader> heard_headers() {
    const std::string bytes = heard();
    std::vector<FrameHeader> headers;
    for (size_t at = 0; at + wire::kHeaderBytes <= bytes.size();) {
      headers.push_back(check(wire::decode_header(std::span<const uint8_t, wire::kHeaderBytes>(
          reinterpret_cast<const uint8_t*>(bytes.data()) + at, wire::kHeaderBytes))));
      at += wire::frame_bytes(headers.back().payload_bytes);
    }
    return headers;
  }
  void expect_failure(Code code, const testing::Matcher<std::string>& text) {
    await_failure();
    ASSERT_EQ(sink_.failures.size(), 1u);
    EXPECT_EQ(sink_.failures[0].peer, 1);
    EXPECT_EQ(sink_.failures[0].status.code(), code) << sink_.failures[0].status.text();
    EXPECT_THAT(sink_.failures[0].status.text(), text);
  }

  static constexpr const char* kPeerName = "rank 1 (the test)";
  static constexpr uint64_t kEager = 4096;
  static constexpr uint64_t kCredit = 16384;
  FakeClock clock_;
  NoOwner no_owner_;
  int peer_ = -1;
  std::shared_ptr<tcp::Reactor> reactor_;
  RecordingSink sink_;
  std::unique_ptr<tcp::TcpTransport> transport_;
};

TEST_F(TcpWire, FramesMayArriveInAnyPortions) {
  TestOp op(7, 0);
  std::string bytes;
  std::vector<std::string> sent;
  for (uint32_t s = 0; s < 6; ++s) {
    sent.push_back(std::string(s * 700, static_cast<char>('a' + s)));
    bytes += frame(data_header(op, 0, s), sent.back());
  }
  check(transport_->post_op(op.descriptor));
  std::vector<std::string> got;
  for (const std::string& s : sent) got.emplace_back(s.size(), '?');
  for (uint32_t s = 0; s < 3; ++s) {
    transport_->recv(op.add(false, 1, 0, s, got[s].data(), got[s].size()));
  }
  say(bytes, 1);
  for (uint32_t s = 3; s < 6; ++s) {
    transport_->recv(op.add(false, 1, 0, s, got[s].data(), got[s].size()));
  }
  EXPECT_EQ(sink_.done.size(), 6u);
  EXPECT_TRUE(sink_.failures.empty());
  EXPECT_EQ(got, sent);
  transport_->complete(op.descriptor);
}

TEST_F(TcpWire, AFlippedPayloadIsNamed) {
  TestOp op(7, 12);
  std::vector<uint8_t> memory(3000);
  check(transport_->post_op(op.descriptor));
  transport_->recv(op.add(false, 1, 0, 0, memory.data(), memory.size()));
  std::string bytes = frame(data_header(op, 0), std::string(3000, 'x'));
  bytes[96 + 1500] = 'y';
  say(bytes);
  expect_failure(Code::kProtocol,
                 AllOf(HasSubstr("checksum"), HasSubstr("operation 12"), HasSubstr(kPeerName)));
  EXPECT_TRUE(sink_.done.empty());
}

TEST_F(TcpWire, AFlippedTrailerOfALongMessageIsNamed) {
  TestOp op(7, 12);
  std::vector<uint8_t> memory(300'000);
  check(transport_->post_op(op.descriptor));
  transport_->recv(op.add(false, 1, 0, 0, memory.data(), memory.size()));
  transport_->ready(1, op.descriptor, 0, memory.size());
  std::string bytes = frame(data_header(op, 0, 0, 0), std::string(300'000, 'x'));
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  say(bytes);
  expect_failure(Code::kProtocol,
                 AllOf(HasSubstr("checksum"), HasSubstr("operation 12"), HasSubstr(kPeerName)));
  EXPECT_TRUE(sink_.done.empty());
}

TEST_F(TcpWire, AFlippedHeaderIsNamed) {
  TestOp op(7, 0);
  std::string bytes = frame(data_header(op, 0), "payload");
  bytes[33] = static_cast<char>(bytes[33] ^ 4);
  say(bytes);
  expect_failure(Code::kProtocol, AllOf(HasSubstr("checksum"), HasSubstr(kPeerName)));
}

TEST_F(TcpWire, AnotherVersionNamesBoth) {
  std::string bytes = frame(data_header(TestOp(7, 0), 0));
  bytes[4] = 9;
  say(bytes);
  expect_failure(Code::kProtocol, AllOf(HasSubstr("version 9"), HasSubstr("version 1")));
}

TEST_F(TcpWire, AMissingPieceMakesTheNextFrameUnreadable) {
  TestOp op(7, 0);
  const std::string good = frame(data_header(op, 0), std::string(2000, 'x'));
  say(good.substr(0, 1000) + good.substr(1100) + good);
  expect_failure(Code::kProtocol, AllOf(HasSubstr("checksum"), HasSubstr(kPeerName)));
}

TEST_F(TcpWire, AConnectionThatEndsInAMessageIsALostPeer) {
  TestOp op(7, 3);
  std::vector<uint8_t> memory(3000);
  check(transport_->post_op(op.descriptor));
  transport_->recv(op.add(false, 1, 0, 0, memory.data(), memory.size()));
  say(frame(data_header(op, 0), std::string(3000, 'x')).substr(0, 1500));
  hang_up();
  expect_failure(Code::kPeerLost,
                 AllOf(HasSubstr("rank 1"), HasSubstr("in the middle"), HasSubstr("operation 3")));
}

TEST_F(TcpWire, AByeThenTheEndIsNoFailureForThoseWhoNeedNothing) {
  FrameHeader bye;
  bye.kind = FrameKind::kBye;
  say(frame(bye));
  hang_up();
  poll();
  EXPECT_TRUE(sink_.failures.empty());
  TestOp op(7, 0);
  check(transport_->post_op(op.descriptor));
  char byte;
  transport_->recv(op.add(false, 1, 0, 0, &byte, 1));
  expect_failure(Code::kPeerLost, AllOf(HasSubstr("rank 1"), HasSubstr("has left")));
}

TEST_F(TcpWire, MoreThanTheCreditIsRefused) {
  TestOp op(7, 0);
  std::string bytes;
  for (uint32_t s = 0; s < 3; ++s) bytes += frame(data_header(op, 0, s), std::string(4000, 'x'));
  const uint64_t left = kCredit - bytes.size();
  say(bytes + frame(data_header(op, 0, 3), std::string(left - wire::frame_bytes(0) - 8, 'x')));
  EXPECT_TRUE(sink_.failures.empty()) << "the credit is used to the last byte";
  say(frame(data_header(op, 0, 4)));
  expect_failure(Code::kProtocol, HasSubstr("exceeds its credit"));
}

TEST_F(TcpWire, CreditComesBackWhenMessagesAreTaken) {
  TestOp op(7, 0);
  std::vector<uint8_t> memory(4000);
  check(transport_->post_op(op.descriptor));
  for (uint32_t s = 0; s < 50; ++s) {
    transport_->recv(op.add(false, 1, 0, s, memory.data(), memory.size()));
    say(frame(data_header(op, 0, s), std::string(4000, 'x')));
  }
  EXPECT_TRUE(sink_.failures.empty());
  EXPECT_EQ(sink_.done.size(), 50u);
  uint64_t returned = 0;
  for (const FrameHeader& h : heard_headers()) {
    EXPECT_EQ(h.kind, FrameKind::kCredit);
    returned += h.key.number;
  }
  const uint64_t used = 50 * wire::frame_bytes(4000);
  EXPECT_LE(returned, used);
  EXPECT_GT(returned + kCredit / 4, used);
  transport_->complete(op.descriptor);
}

TEST_F(TcpWire, WhenCreditRunsLowReadyIsSaidForSmallMessages) {
  TestOp busy(7, 0), waiting(7, 1);
  char byte;
  check(transport_->post_op(waiting.descriptor));
  transport_->recv(waiting.add(false, 1, 0, 0, &byte, 1));
  transport_->ready(1, waiting.descriptor, 0, 1);
  EXPECT_TRUE(heard().empty()) << "nobody waits for it";
  for (uint32_t s = 0; s < 2; ++s) say(frame(data_header(busy, 0, s), std::string(4000, 'x')));
  const auto headers = heard_headers();
  ASSERT_EQ(headers.size(), 1u);
  EXPECT_EQ(headers[0].kind, FrameKind::kReady);
  EXPECT_EQ(headers[0].key, waiting.descriptor.key);
  say(frame(data_header(waiting, 0, 0, 0), "!"));  // without credit
  EXPECT_EQ(byte, '!');
  transport_->complete(waiting.descriptor);
}

TEST_F(TcpWire, AMessageWithoutCreditNeedsAReceive) {
  TestOp op(7, 0);
  check(transport_->post_op(op.descriptor));
  say(frame(data_header(op, 0, 0, 0), "x"));
  expect_failure(Code::kProtocol, HasSubstr("has no receive"));
}

TEST_F(TcpWire, AMessageAboveTheEagerLimitOnCreditIsRefused) {
  say(frame(data_header(TestOp(7, 0), 0), std::string(kEager + 1, 'x')));
  expect_failure(Code::kProtocol, HasSubstr("credit"));
}

TEST_F(TcpWire, AMessageThatComesTwiceIsRefused) {
  TestOp op(7, 0);
  say(frame(data_header(op, 0), "x") + frame(data_header(op, 0), "x"));
  expect_failure(Code::kProtocol, HasSubstr("twice"));
}

TEST_F(TcpWire, AMessageOfAnOperationThatIsOverIsRefused) {
  TestOp op(7, 0);
  check(transport_->post_op(op.descriptor));
  transport_->complete(op.descriptor);
  say(frame(data_header(op, 0), "x"));
  expect_failure(Code::kProtocol, HasSubstr("complete"));
}

TEST_F(TcpWire, AnOperationMayNotEndWhileAMessageOfItArrives) {
  TestOp op(7, 4);
  check(transport_->post_op(op.descriptor));
  const std::string bytes = frame(data_header(op, 0), std::string(3000, 'x'));
  say(bytes.substr(0, 1500));
  EXPECT_TRUE(sink_.failures.empty());
  transport_->complete(op.descriptor);
  expect_failure(Code::kProtocol, AllOf(HasSubstr("operation 4"), HasSubstr("did not expect")));
  say(bytes.substr(1500));
}

TEST_F(TcpWire, AMessageThatNobodyReceivedIsNamedAtTheEnd) {
  TestOp op(7, 4);
  check(transport_->post_op(op.descriptor));
  say(frame(data_header(op, 0, 9), "x"));
  EXPECT_TRUE(sink_.failures.empty());
  transport_->complete(op.descriptor);
  expect_failure(Code::kProtocol, AllOf(HasSubstr("operation 4"), HasSubstr("segment 9")));
}

TEST_F(TcpWire, AReadyOfAnOperationThatIsOverIsLate) {
  TestOp op(7, 0);
  check(transport_->post_op(op.descriptor));
  transport_->complete(op.descriptor);
  FrameHeader ready = data_header(op, 0, 0, 0);
  ready.kind = FrameKind::kReady;
  say(frame(ready));
  EXPECT_TRUE(sink_.failures.empty());
  ready.signature.tag = 99;
  say(frame(ready));
  expect_failure(Code::kProtocol, HasSubstr("tag 99"));
}

TEST_F(TcpWire, ALongMessageWaitsForReadyAndIsAnnounced) {
  TestOp op(7, 5);
  std::vector<uint8_t> memory(10'000, 7);
  check(transport_->post_op(op.descriptor));
  transport_->send(op.add(true, 1, 0, 0, memory.data(), memory.size()));
  EXPECT_TRUE(heard().empty());
  std::vector<FrameHeader> headers;
  for (int i = 0; headers.empty() && i < 500; ++i) {
    pass_time();
    headers = heard_headers();
  }
  ASSERT_EQ(headers.size(), 1u);
  EXPECT_EQ(headers[0].kind, FrameKind::kAnnounce);
  EXPECT_EQ(headers[0].key, op.descriptor.key);
  FrameHeader ready = data_header(op, 0, 0, 0);
  ready.kind = FrameKind::kReady;
  say(frame(ready));
  headers = heard_headers();
  ASSERT_EQ(headers.size(), 1u);
  EXPECT_EQ(headers[0].kind, FrameKind::kData);
  EXPECT_EQ(headers[0].flags, 0u);
  EXPECT_EQ(headers[0].payload_bytes, memory.size());
  EXPECT_EQ(sink_.done.size(), 1u);
  transport_->complete(op.descriptor);
}

TEST_F(TcpWire, AnAnnouncedOperationThatIsAnotherHereIsNamed) {
  TestOp mine(7, 5, 1), theirs(7, 5, 2);
  check(transport_->post_op(mine.descriptor));
  FrameHeader announce = data_header(theirs, 0, 0, 0);
  announce.kind = FrameKind::kAnnounce;
  say(frame(announce));
  expect_failure(Code::kProtocol, AllOf(HasSubstr("tag 1"), HasSubstr("tag 2"), HasSubstr("rank 0"),
                                        HasSubstr("rank 1")));
}

TEST_F(TcpWire, RoundsBeyondAReadyWait) {
  TestOp op(7, 0);
  std::vector<uint8_t> memory(10'000);
  check(transport_->post_op(op.descriptor));
  for (uint32_t round = 0; round < 3; ++round) {
    transport_->send(op.add(true, 1, round, 0, memory.data(), memory.size()));
  }
  FrameHeader ready = data_header(op, 0, 0, 0);
  ready.kind = FrameKind::kReady;
  ready.round = 1;
  say(frame(ready));
  EXPECT_EQ(heard_headers().size(), 2u);
  ready.round = 2;
  say(frame(ready));
  EXPECT_EQ(heard_headers().size(), 1u);
  EXPECT_EQ(sink_.done.size(), 3u);
  transport_->complete(op.descriptor);
}

TEST_F(TcpWire, CreditThatWasNotUsedCannotComeBack) {
  FrameHeader credit;
  credit.kind = FrameKind::kCredit;
  credit.key.number = 1;
  say(frame(credit));
  expect_failure(Code::kProtocol, HasSubstr("gives back 1 byte"));
}

TEST_F(TcpWire, ControlFramesDoNotBelongHere) {
  FrameHeader join;
  join.kind = FrameKind::kJoin;
  say(frame(join, "abc"));
  expect_failure(Code::kProtocol, HasSubstr("join"));
}

TEST_F(TcpWire, ACancelledReceiveIsReadOverAndTheConnectionGoesOn) {
  auto op = std::make_unique<TestOp>(7, 0);
  auto memory = std::make_unique<std::vector<uint8_t>>(9000);
  check(transport_->post_op(op->descriptor));
  transport_->recv(op->add(false, 1, 0, 0, memory->data(), memory->size()));
  transport_->ready(1, op->descriptor, 0, memory->size());
  const std::string bytes = frame(data_header(*op, 0, 0, 0), std::string(9000, 'x'));
  say(bytes.substr(0, 5000));
  transport_->cancel(op->descriptor);
  memory.reset();
  op.reset();
  say(bytes.substr(5000));
  TestOp next(7, 1);
  char byte = 0;
  check(transport_->post_op(next.descriptor));
  transport_->recv(next.add(false, 1, 0, 0, &byte, 1));
  say(frame(data_header(next, 0), "!"));
  EXPECT_EQ(byte, '!');
  EXPECT_TRUE(sink_.failures.empty());
  transport_->complete(next.descriptor);
}

}  // namespace
}  // namespace sotto::test
