#include "core/wire/frame.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/hash.h"
#include "core/base/text.h"
#include "core/wire/bytes.h"
#include "core/wire/control.h"

namespace sotto {
namespace {

using testing::HasSubstr;
using wire::FrameHeader;
using wire::FrameKind;
using wire::HeaderBytes;

FrameHeader example() {
  FrameHeader h;
  h.key = {3, 17};
  h.round = 1;
  h.segment = 9;
  h.flags = wire::kFlagCredited;
  h.signature.kind = OpKind::kAllReduce;
  h.signature.reduce = 1;
  h.signature.dtype = 0x00012002;
  h.signature.count = 1000;
  h.payload_bytes = 4000;
  return h;
}

// A header whose checksum fits although `change` was made.
template <class Change>
HeaderBytes changed(const FrameHeader& h, Change change) {
  HeaderBytes bytes = wire::encode_header(h);
  change(bytes.data());
  wire::put_at<uint64_t>(bytes.data() + wire::kHeaderBytes - 8,
                         hash64(bytes.data(), wire::kHeaderBytes - 8));
  return bytes;
}

std::string refused(const HeaderBytes& bytes) {
  const auto header = wire::decode_header(bytes);
  if (header.ok()) return "accepted";
  EXPECT_EQ(header.status().code(), Code::kProtocol);
  return header.status().text();
}

TEST(Frame, RoundTrip) {
  const auto back = wire::decode_header(wire::encode_header(example()));
  ASSERT_TRUE(back.ok()) << back.status().text();
  EXPECT_EQ(*back, example());
}

TEST(Frame, EveryFlippedBitOfAHeaderIsNoticed) {
  const HeaderBytes good = wire::encode_header(example());
  for (size_t bit = 0; bit < good.size() * 8; ++bit) {
    HeaderBytes bad = good;
    bad[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
    EXPECT_FALSE(wire::decode_header(bad).ok()) << "bit " << bit;
  }
}

TEST(Frame, AnotherVersionNamesBothSides) {
  EXPECT_THAT(refused(changed(example(), [](uint8_t* p) { p[4] = 7; })),
              testing::AllOf(HasSubstr("version 7"), HasSubstr("version 1")));
}

TEST(Frame, AnotherMagicNamesBothSides) {
  EXPECT_THAT(refused(changed(example(), [](uint8_t* p) { p[0] = 'G'; })),
              testing::AllOf(HasSubstr("0x4f544f47"), HasSubstr("0x4f544f53")));
}

// What is no frame is known before a whole header has come.
TEST(Frame, TheFirstBytesTellWhatIsNoFrame) {
  const HeaderBytes good = wire::encode_header(example());
  const auto start = [](const HeaderBytes& bytes, size_t n) {
    return wire::check_start(std::span(bytes).first(n));
  };
  for (size_t n = 0; n <= good.size(); ++n) EXPECT_TRUE(start(good, n).ok()) << n;
  HeaderBytes http = good;
  http[0] = 'G';
  EXPECT_TRUE(start(http, 3).ok());
  EXPECT_EQ(start(http, 4).code(), Code::kProtocol);
  HeaderBytes newer = good;
  newer[4] = 2;
  EXPECT_TRUE(start(newer, 5).ok());
  EXPECT_THAT(start(newer, 6).text(),
              testing::AllOf(HasSubstr("version 2"), HasSubstr("version 1")));
  EXPECT_TRUE(wire::is_version_mismatch(start(newer, 6)));
  EXPECT_FALSE(wire::is_version_mismatch(start(http, 6)));
}

TEST(Frame, RefusesWhatItDoesNotKnow) {
  EXPECT_THAT(refused(changed(example(), [](uint8_t* p) { p[6] = 6; })), HasSubstr("kind 6"));
  EXPECT_THAT(refused(changed(example(), [](uint8_t* p) { p[6] = 24; })), HasSubstr("kind 24"));
  EXPECT_THAT(refused(changed(example(), [](uint8_t* p) { p[7] = 2; })), HasSubstr("class 2"));
  EXPECT_THAT(refused(changed(example(), [](uint8_t* p) { p[8] = 3; })), HasSubstr("flags 0x3"));
  EXPECT_THAT(refused(changed(example(), [](uint8_t* p) { p[12] = 1; })), HasSubstr("reserved"));
  FrameHeader ready = example();
  ready.kind = FrameKind::kReady;
  ready.flags = 0;
  EXPECT_THAT(refused(wire::encode_header(ready)), HasSubstr("payload of 4000"));
  ready.payload_bytes = 0;
  EXPECT_EQ(refused(wire::encode_header(ready)), "accepted");
  EXPECT_THAT(refused(changed(ready, [](uint8_t* p) { p[7] = 1; })), HasSubstr("class 1"));
  EXPECT_THAT(refused(changed(ready, [](uint8_t* p) { p[8] = 1; })), HasSubstr("flags 0x1"));
}

TEST(Frame, APayloadHasALimit) {
  FrameHeader h = example();
  h.payload_bytes = wire::kMaxPayloadBytes;
  EXPECT_EQ(refused(wire::encode_header(h)), "accepted");
  ++h.payload_bytes;
  EXPECT_THAT(refused(wire::encode_header(h)), HasSubstr("at most 1099511627776"));
}

TEST(Frame, SizeHasATrailerOnlyWithAPayload) {
  EXPECT_EQ(wire::frame_bytes(0), 96u);
  EXPECT_EQ(wire::frame_bytes(1), 105u);
  EXPECT_EQ(wire::frame_bytes(262144), 262144u + 104u);
}

TEST(Frame, Descriptions) {
  EXPECT_THAT(describe(example()), testing::AllOf(HasSubstr("operation 17"),
                                                  HasSubstr("all_reduce"), HasSubstr("round 1"),
                                                  HasSubstr("segment 9"), HasSubstr("4000 bytes")));
  EXPECT_EQ(wire::describe(OpKey{2, p2p_number(4, 6, 8)}),
            "send/recv 8 from rank 4 to rank 6 of comm 2");
}

wire::Bytes view(const std::string& s) {
  return {reinterpret_cast<const uint8_t*>(s.data()), s.size()};
}

// Every shorter payload and every longer one is refused.
template <class Message>
void expect_strict(const Message& message) {
  const std::string bytes = message.encode();
  ASSERT_TRUE(Message::decode(view(bytes)).ok());
  EXPECT_EQ(Message::decode(view(bytes))->encode(), bytes);
  for (size_t n = 0; n < bytes.size(); ++n) {
    EXPECT_EQ(Message::decode(view(bytes.substr(0, n))).status().code(), Code::kProtocol) << n;
  }
  EXPECT_FALSE(Message::decode(view(bytes + '\0')).ok());
}

TEST(ControlPayload, TruncatedAndLongerOnesAreRefused) {
  expect_strict(wire::Join{1, 2, 3, 4, "host"});
  expect_strict(wire::Members{1, 2, {{3, "a", ""}, {4, "b", "1.2.3.4:5"}}});
  expect_strict(wire::Gather{1, "what", "data"});
  expect_strict(wire::Gathered{1, {"a", "", "ccc"}});
  expect_strict(wire::Failure{-6, -1, "late"});
  expect_strict(wire::Heartbeat{"rank 3", {1, 2, 3}});
  expect_strict(wire::Service{{2, 0, 5, "data"}});
  expect_strict(wire::Service{{0, 1, 16, ""}});
  expect_strict(wire::Hello{1, 2, 3});
}

TEST(ControlPayload, ACountThatCannotBeIsRefusedBeforeMemoryIsTaken) {
  wire::ByteWriter out;
  out.number(uint64_t{1});
  out.number(uint32_t{0xffffffff});
  EXPECT_FALSE(wire::Gathered::decode(view(out.take())).ok());
}

TEST(ControlPayload, NamesOfHostsHaveALimit) {
  const std::string longest(wire::kMaxHostBytes, 'h'), longer(wire::kMaxHostBytes + 1, 'h');
  EXPECT_TRUE(wire::Join::decode(view(wire::Join{1, 2, 3, 4, longest}.encode())).ok());
  EXPECT_EQ(wire::Join::decode(view(wire::Join{1, 2, 3, 4, longer}.encode()))->host, longest);
  const auto read = [](const std::string& host, const std::string& address) {
    return wire::Members::decode(view(wire::Members{0, 1, {{2, host, address}}}.encode())).status();
  };
  EXPECT_TRUE(read(longest, longest).ok());
  EXPECT_EQ(read(longer, "").code(), Code::kProtocol);
  EXPECT_EQ(read("", longer).code(), Code::kProtocol);
  wire::ByteWriter join;
  join.number(uint64_t{0});
  for (int i = 0; i < 3; ++i) join.number(uint32_t{1});
  join.text(longer);
  EXPECT_EQ(wire::Join::decode(view(join.take())).status().code(), Code::kProtocol);
}

TEST(ControlPayload, ServiceMessagesHaveALimit) {
  const std::string longest(kMaxServiceBytes, 'd');
  const auto read = [](const std::string& data) {
    return wire::Service::decode(view(wire::Service{{1, 2, 3, data}}.encode()));
  };
  EXPECT_EQ(read(longest)->message.bytes, longest);
  const Status longer = read(longest + "d").status();
  EXPECT_EQ(longer.code(), Code::kProtocol);
  EXPECT_THAT(longer.text(), HasSubstr("malformed service frame of 4113 bytes"));
}

TEST(ControlPayload, AFailureHasACodeOfAFailure) {
  for (const int32_t code : {0, 1, 5, -15, -1000}) {
    EXPECT_FALSE(wire::Failure::decode(view(wire::Failure{code, 0, "x"}.encode())).ok()) << code;
  }
}

TEST(ControlPayload, AFailureMaySayWhoReportsIt) {
  const wire::Failure plain{-6, 2, "late"}, whole{-6, 2, "late", 3, "waiting for rank 2"};
  const std::string bytes = whole.encode();
  ASSERT_TRUE(bytes.starts_with(plain.encode()));
  const auto back = wire::Failure::decode(view(bytes));
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(back->reporter, 3);
  EXPECT_EQ(back->waits, "waiting for rank 2");
  EXPECT_EQ(wire::Failure::decode(view(plain.encode()))->reporter, -1);
  for (size_t n = plain.encode().size() + 1; n < bytes.size(); ++n)
    EXPECT_FALSE(wire::Failure::decode(view(bytes.substr(0, n))).ok()) << n;
  EXPECT_FALSE(wire::Failure::decode(view(bytes + '\0')).ok());
}

TEST(ControlPayload, LongTextsAreCut) {
  const std::string text(wire::kMaxTextBytes + 5, 'x');
  const auto back = wire::Failure::decode(view(wire::Failure{-9, 1, text}.encode()));
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(back->text.size(), wire::kMaxTextBytes);
  // Between characters.
  std::string euros = "a";
  while (euros.size() <= wire::kMaxTextBytes) euros += "\xe2\x82\xac";
  const auto failure = wire::Failure::decode(view(wire::Failure{-9, 1, euros, 2, euros}.encode()));
  const auto beat = wire::Heartbeat::decode(view(wire::Heartbeat{euros, {}}.encode()));
  ASSERT_TRUE(failure.ok() && beat.ok());
  for (const std::string& cut : {failure->text, failure->waits, beat->waiting}) {
    EXPECT_TRUE(is_utf8(cut));
    EXPECT_GT(cut.size(), wire::kMaxTextBytes - 3);
  }
}

// What programs say first that take the port for another one: the text names their protocol.
TEST(Frame, ForeignProtocolsAreNamed) {
  const auto text_of = [](std::string first) {
    wire::HeaderBytes bytes{};
    std::copy(first.begin(), first.end(), bytes.begin());
    const auto header = wire::decode_header(bytes);
    EXPECT_EQ(header.status().code(), Code::kProtocol);
    return header.status().text();
  };
  for (const char* request : {"GET / HTTP/1.1\r\n", "POST /metrics HTTP/1.0", "HEAD / HTTP/1.1",
                              "PRI * HTTP/2.0", "HTTP/1.1 400 Bad Request"}) {
    EXPECT_THAT(text_of(request), HasSubstr("speaks HTTP")) << request;
  }
  EXPECT_THAT(text_of("SSH-2.0-OpenSSH_9.2"), HasSubstr("speaks SSH"));
  EXPECT_THAT(text_of(std::string("\x16\x03\x01\x02\x00\x01", 6)), HasSubstr("speaks TLS"));
  EXPECT_THAT(text_of("HTTP"), HasSubstr("0x50545448"));
  for (const char* other : {"", "GETTING", "hello"}) {
    EXPECT_THAT(text_of(other), HasSubstr("this library's frames with")) << other;
  }
}

}  // namespace
}  // namespace sotto
