// Frames into a stream of bytes and out of it, in portions of any size.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "transports/framed/frame_reader.h"
#include "transports/framed/frame_writer.h"

namespace sotto::framed {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using Event = FrameReader::Event;

std::string payload_of(size_t bytes) {
  std::string out(bytes, '\0');
  std::iota(out.begin(), out.end(), 'a');
  return out;
}

OutFrame frame_of(const std::string& payload) {
  OutFrame frame;
  frame.header.key = {7, payload.size()};
  frame.header.payload_bytes = payload.size();
  frame.payload = reinterpret_cast<const uint8_t*>(payload.data());
  return frame;
}

// The bytes of a frame, taken in portions.
std::string written(const std::string& payload, uint64_t allowed, uint64_t taken_at_once,
                    wire::TrailerOf trailer_of = wire::TrailerOf::kPayload) {
  FrameWriter writer(trailer_of);
  writer.begin(frame_of(payload));
  std::string out;
  while (writer.busy()) {
    FrameWriter::Parts parts;
    const size_t count = writer.parts(allowed, parts);
    std::string offered;
    for (size_t i = 0; i < count; ++i)
      offered.append(static_cast<const char*>(parts[i].iov_base), parts[i].iov_len);
    EXPECT_LE(offered.size(), allowed);
    if (offered.empty()) return "nothing is offered";
    offered.resize(std::min<uint64_t>(offered.size(), taken_at_once));
    out += offered;
    const bool complete = writer.sent(offered.size());
    EXPECT_EQ(complete, !writer.busy());
  }
  return out;
}

// Gives the reader what fits into its parts; the number of bytes.
size_t give(FrameReader& reader, std::string_view bytes, uint64_t allowed) {
  FrameReader::Parts parts;
  const size_t count = reader.parts(allowed, parts);
  size_t given = 0;
  for (size_t i = 0; i < count; ++i) {
    const size_t n = std::min(parts[i].iov_len, bytes.size() - given);
    std::memcpy(parts[i].iov_base, bytes.data() + given, n);
    given += n;
  }
  reader.arrived(given);
  return given;
}

TEST(FrameWriter, TheBytesAreThoseOfTheFormatInAnyPortions) {
  for (const size_t size : {0, 1, 1000, 131'072, 131'073, 400'001}) {
    const std::string payload = payload_of(size);
    const auto header = wire::encode_header(frame_of(payload).header);
    std::string expected(header.begin(), header.end());
    if (size > 0) {
      const auto trailer = wire::encode_trailer(hash64(payload));
      expected += payload + std::string(trailer.begin(), trailer.end());
    }
    EXPECT_EQ(written(payload, UINT64_MAX / 2, UINT64_MAX), expected) << size;
    EXPECT_EQ(written(payload, 50'000, 777), expected) << size;
    EXPECT_EQ(written(payload, 97, 97), expected) << size;
    if (size > 1000) continue;
    EXPECT_EQ(written(payload, 1, 1), expected) << size;
  }
}

TEST(FrameWriter, NothingCanFollowHalfAFrame) {
  const std::string payload = payload_of(100);
  FrameWriter writer;
  EXPECT_FALSE(writer.drop()) << "there is none";
  writer.begin(frame_of(payload));
  EXPECT_FALSE(writer.drop()) << "nothing of it has left";
  EXPECT_FALSE(writer.busy());
  writer.begin(frame_of(payload));
  FrameWriter::Parts parts;
  writer.parts(10, parts);
  writer.sent(10);
  EXPECT_TRUE(writer.drop());
  EXPECT_FALSE(writer.busy());
}

class FrameReaderOf : public testing::TestWithParam<wire::TrailerOf> {};

TEST_P(FrameReaderOf, FramesComeOutInAnyPortions) {
  const std::vector<size_t> sizes = {5, 0, 9000, 0, 1, 200'000, 8192};
  std::string stream;
  for (const size_t size : sizes) stream += written(payload_of(size), 1 << 20, 1 << 20, GetParam());
  for (const uint64_t portion : {1, 95, 96, 97, 8192, 1'000'000}) {
    FrameReader reader("the test", GetParam());
    std::vector<std::string> got;
    size_t at = 0;
    std::string memory;
    for (bool more = true; more;) {
      switch (reader.next()) {
        case Event::kStarved:
          more = at < stream.size();
          at += give(reader, std::string_view(stream).substr(at), portion);
          break;
        case Event::kHeader:
          memory.assign(reader.header().payload_bytes, '?');
          reader.place(reinterpret_cast<uint8_t*>(memory.data()), memory.size());
          break;
        case Event::kFrame: got.push_back(memory); break;
        default: FAIL() << reader.why().text();
      }
    }
    ASSERT_EQ(got.size(), sizes.size()) << portion;
    for (size_t i = 0; i < sizes.size(); ++i) EXPECT_EQ(got[i], payload_of(sizes[i]));
    EXPECT_EQ(reader.where(), "");
  }
}

INSTANTIATE_TEST_SUITE_P(Trailers, FrameReaderOf,
                         testing::Values(wire::TrailerOf::kPayload, wire::TrailerOf::kHeader));

// In shared memory the trailer says where the frame ends, and no more.
TEST(FrameReader, ATrailerOfTheHeaderDoesNotDependOnThePayload) {
  const auto of_header = wire::TrailerOf::kHeader;
  const std::string one = written(payload_of(9000), 1 << 20, 1 << 20, of_header);
  const std::string two = written(std::string(9000, 'x'), 1 << 20, 1 << 20, of_header);
  EXPECT_EQ(one.substr(one.size() - wire::kTrailerBytes),
            two.substr(two.size() - wire::kTrailerBytes));
  std::string broken = one;
  broken.back() ^= 1;
  FrameReader reader("rank 3", of_header);
  std::string memory(9000, '?');
  size_t at = 0;
  for (Event event = reader.next(); event != Event::kDamaged; event = reader.next()) {
    if (event == Event::kStarved) at += give(reader, std::string_view(broken).substr(at), 4096);
    if (event == Event::kHeader)
      reader.place(reinterpret_cast<uint8_t*>(memory.data()), memory.size());
    ASSERT_NE(event, Event::kFrame);
    ASSERT_LE(at, broken.size());
  }
  EXPECT_EQ(reader.why().code(), Code::kProtocol);
}

TEST(FrameReader, APayloadIsReadStraightToItsPlace) {
  const std::string payload = payload_of(100'000), bytes = written(payload, 1 << 20, 1 << 20);
  FrameReader reader("the test");
  EXPECT_EQ(reader.next(), Event::kStarved);
  give(reader, bytes.substr(0, wire::kHeaderBytes), 1 << 20);
  ASSERT_EQ(reader.next(), Event::kHeader);
  std::string memory(payload.size(), '?');
  reader.place(reinterpret_cast<uint8_t*>(memory.data()), memory.size());
  ASSERT_EQ(reader.next(), Event::kStarved);
  FrameReader::Parts parts;
  ASSERT_EQ(reader.parts(1 << 20, parts), 2u);
  EXPECT_EQ(parts[0].iov_base, memory.data());
  EXPECT_EQ(parts[0].iov_len, memory.size());
}

TEST(FrameReader, MoreRoomIsAskedForWhenItIsFull) {
  const std::string payload = payload_of(1000), bytes = written(payload, 1 << 20, 1 << 20);
  FrameReader reader("the test");
  std::string memory;
  std::vector<uint64_t> asked;
  const auto grow = [&](size_t room) {
    memory.resize(room);
    reader.place(reinterpret_cast<uint8_t*>(memory.data()), memory.size());
  };
  size_t at = 0;
  Event event;
  while ((event = reader.next()) != Event::kFrame) {
    if (event == Event::kStarved) at += give(reader, std::string_view(bytes).substr(at), 150);
    if (event == Event::kHeader) grow(100);
    if (event == Event::kRoom) {
      asked.push_back(reader.payload_arrived());
      grow(std::min<size_t>(1000, 2 * memory.size()));
    }
    ASSERT_NE(event, Event::kDamaged);
  }
  EXPECT_EQ(memory, payload);
  EXPECT_THAT(asked, testing::ElementsAre(100, 200, 400, 800));
}

TEST(FrameReader, WhatIsDiscardedIsReadOver) {
  const std::string long_one = written(payload_of(50'000), 1 << 20, 1 << 20);
  const std::string stream = long_one + written("next", 1 << 20, 1 << 20);
  FrameReader reader("the test");
  std::string memory(50'000, '?');
  size_t at = 0;
  std::vector<uint64_t> frames;
  for (int i = 0; i < 1000 && frames.size() < 2; ++i) {
    const Event event = reader.next();
    if (event == Event::kStarved) at += give(reader, std::string_view(stream).substr(at), 1000);
    if (event == Event::kHeader) {
      reader.place(reinterpret_cast<uint8_t*>(memory.data()), reader.header().payload_bytes);
    }
    if (event == Event::kFrame) frames.push_back(reader.header().payload_bytes);
    if (at > 10'000 && frames.empty() && !memory.empty()) {
      reader.discard();
      memory.assign(50'000, '!');
    }
  }
  EXPECT_THAT(frames, testing::ElementsAre(50'000, 4));
  EXPECT_EQ(memory.substr(0, 4), "next");
  EXPECT_EQ(memory.substr(4), std::string(49'996, '!')) << "nothing is written behind discard";
}

TEST(FrameReader, DamageIsNamedWithThePeer) {
  for (const size_t size : {10, 20'000}) {
    for (const size_t flipped : {size_t{40}, wire::kHeaderBytes + 5, wire::frame_bytes(size) - 1}) {
      std::string bytes = written(payload_of(size), 1 << 20, 1 << 20);
      bytes[flipped] = static_cast<char>(bytes[flipped] ^ 1);
      FrameReader reader("rank 3");
      std::string memory(size, '?');
      size_t at = 0;
      Event event;
      while ((event = reader.next()) == Event::kStarved || event == Event::kHeader) {
        if (event == Event::kHeader) {
          reader.place(reinterpret_cast<uint8_t*>(memory.data()), size);
        } else {
          at += give(reader, std::string_view(bytes).substr(at), 1 << 20);
        }
      }
      ASSERT_EQ(event, Event::kDamaged) << flipped;
      EXPECT_EQ(reader.why().code(), Code::kProtocol);
      EXPECT_THAT(reader.why().text(), AllOf(HasSubstr("from rank 3"), HasSubstr("checksum")));
    }
  }
}

TEST(FrameReader, WhatIsNoFrameIsSeenAtItsFirstBytes) {
  FrameReader reader("rank 3");
  give(reader, "GET / HTTP", 1 << 20);
  EXPECT_EQ(reader.next(), Event::kDamaged);
  EXPECT_THAT(reader.why().text(), HasSubstr("from rank 3"));
}

TEST(FrameReader, SaysWhereTheStreamEnded) {
  const std::string bytes = written(payload_of(100), 1 << 20, 1 << 20);
  FrameReader reader("rank 3");
  EXPECT_EQ(reader.where(), "");
  give(reader, bytes.substr(0, 50), 1 << 20);
  EXPECT_EQ(reader.next(), Event::kStarved);
  EXPECT_EQ(reader.where(), " in the middle of a frame header");
  give(reader, bytes.substr(50, 100), 1 << 20);
  ASSERT_EQ(reader.next(), Event::kHeader);
  reader.place(nullptr, 0);
  EXPECT_EQ(reader.next(), Event::kStarved);
  EXPECT_THAT(reader.where(), AllOf(HasSubstr(" in the middle of a message"), HasSubstr("100")));
}

}  // namespace
}  // namespace sotto::framed
