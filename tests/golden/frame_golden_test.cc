// The frames of version 1, byte for byte. The files were not written by this code: it has to read
// them as what they are, and to write the same bytes.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <vector>

#include "core/base/hash.h"
#include "core/wire/control.h"
#include "core/wire/frame.h"

namespace sotto {
namespace {

using wire::FrameHeader;
using wire::FrameKind;
using Bytes = std::vector<uint8_t>;

Bytes read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in.good()) << path;
  return {std::istreambuf_iterator<char>(in), {}};
}

struct Golden {
  const char* name;
  FrameHeader header;
  std::string payload;
};

FrameHeader header_of(FrameKind kind) {
  FrameHeader h;
  h.kind = kind;
  return h;
}

// An all-reduce with every field set.
FrameHeader full_header(FrameKind kind, uint32_t flags, MessageClass message_class) {
  FrameHeader h = header_of(kind);
  h.message_class = message_class;
  h.flags = flags;
  h.key = {0x1122334455667788u, 17};
  h.round = 2;
  h.segment = 3;
  h.signature = {OpKind::kAllReduce, 2, 0x00012002, 1000003, 42, -1, 0xdeadbeefu,
                 0x0123456789abcdefu};
  return h;
}

FrameHeader send_recv_header() {
  FrameHeader h = header_of(FrameKind::kData);
  h.key = {5, p2p_number(2, 7, 11)};
  h.signature = {OpKind::kSendRecv, 0, 0x00014002, 7, 9, -1, 0x11223344u, 0x5566778899aabbccu};
  return h;
}

std::vector<Golden> data_frames() {
  std::string message(300, '\0');
  for (size_t i = 0; i < message.size(); ++i) message[i] = static_cast<char>(i * 7 + 1);
  FrameHeader ready = full_header(FrameKind::kReady, 0, MessageClass::kPayload);
  ready.segment = 0;
  FrameHeader credit = header_of(FrameKind::kCredit);
  credit.key.number = 262144;
  const auto data = [](uint32_t flags, MessageClass c = MessageClass::kPayload) {
    return full_header(FrameKind::kData, flags, c);
  };
  return {
      {"data_eager", data(wire::kFlagCredited), message},
      {"data_bulk", data(0), message},
      {"data_metadata", data(wire::kFlagCredited, MessageClass::kMetadata),
       std::string("\0\0\x80\x3f", 4)},
      {"data_empty", data(wire::kFlagCredited), ""},
      {"data_send_recv", send_recv_header(), "x"},
      {"ready", ready, ""},
      {"credit", credit, ""},
      {"announce", full_header(FrameKind::kAnnounce, 0, MessageClass::kPayload), ""},
      {"hello", header_of(FrameKind::kHello), wire::Hello{0xa1a2a3a4a5a6a7a8u, 1, 4}.encode()},
  };
}

std::vector<Golden> control_frames() {
  const std::string blob = "\x01\x02\x03";
  return {
      {"join", header_of(FrameKind::kJoin),
       wire::Join{0xb1b2b3b4b5b6b7b8u, 3, 4, 4711, "node-3"}.encode()},
      {"members", header_of(FrameKind::kMembers),
       wire::Members{
           0, 0xa1a2a3a4a5a6a7a8u, {{100, "node-0", ""}, {101, "node-1", "10.0.0.1:4242"}}}
           .encode()},
      {"gather", header_of(FrameKind::kGather), wire::Gather{6, "splitting", blob}.encode()},
      {"gathered", header_of(FrameKind::kGathered), wire::Gathered{6, {blob, ""}}.encode()},
      {"failure", header_of(FrameKind::kFailure), wire::Failure{-7, 2, "rank 2 is lost"}.encode()},
      {"heartbeat", header_of(FrameKind::kHeartbeat),
       wire::Heartbeat{"ranks 2 to 5", {0, 15, 2500}}.encode()},
      {"bye", header_of(FrameKind::kBye), ""},
      {"service", header_of(FrameKind::kService), wire::Service{{3, 1, 5, blob}}.encode()},
  };
}

std::vector<Golden> goldens() {
  std::vector<Golden> all = data_frames();
  for (Golden& g : control_frames()) all.push_back(std::move(g));
  for (Golden& g : all) g.header.payload_bytes = g.payload.size();
  return all;
}

std::filesystem::path frames_dir() { return std::filesystem::path(SOTTO_TEST_DATA) / "frames"; }

TEST(GoldenFrames, EncodeToTheseBytes) {
  for (const Golden& g : goldens()) {
    const auto header = wire::encode_header(g.header);
    Bytes frame(header.begin(), header.end());
    frame.insert(frame.end(), g.payload.begin(), g.payload.end());
    if (!g.payload.empty()) {
      const auto trailer = wire::encode_trailer(hash64(g.payload));
      frame.insert(frame.end(), trailer.begin(), trailer.end());
    }
    EXPECT_EQ(frame.size(), wire::frame_bytes(g.payload.size())) << g.name;
    EXPECT_EQ(frame, read_file(frames_dir() / (std::string(g.name) + ".bin"))) << g.name;
  }
}

TEST(GoldenFrames, DecodeFromTheseBytes) {
  for (const Golden& g : goldens()) {
    const Bytes frame = read_file(frames_dir() / (std::string(g.name) + ".bin"));
    ASSERT_EQ(frame.size(), wire::frame_bytes(g.payload.size())) << g.name;
    const auto header = wire::decode_header(
        std::span<const uint8_t, wire::kHeaderBytes>(frame.data(), wire::kHeaderBytes));
    ASSERT_TRUE(header.ok()) << g.name << ": " << header.status().text();
    EXPECT_EQ(*header, g.header) << g.name;
    if (g.payload.empty()) continue;
    EXPECT_EQ(std::memcmp(frame.data() + wire::kHeaderBytes, g.payload.data(), g.payload.size()), 0)
        << g.name;
    const uint64_t trailer = wire::decode_trailer(std::span<const uint8_t, wire::kTrailerBytes>(
        frame.data() + frame.size() - wire::kTrailerBytes, wire::kTrailerBytes));
    EXPECT_EQ(trailer, hash64(g.payload)) << g.name;
  }
}

TEST(GoldenFrames, EveryFileIsTested) {
  std::set<std::string> tested, found;
  for (const Golden& g : goldens()) tested.insert(std::string(g.name) + ".bin");
  for (const auto& entry : std::filesystem::directory_iterator(frames_dir())) {
    found.insert(entry.path().filename());
  }
  EXPECT_EQ(tested, found);
}

}  // namespace
}  // namespace sotto
