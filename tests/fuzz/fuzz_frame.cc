// Any bytes as a stream of frames: each is refused with a text, or decodes, and then encodes to the
// same bytes again.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>

#include "core/base/hash.h"
#include "core/wire/control.h"
#include "core/wire/frame.h"

namespace {

using namespace sotto;

// A broken promise has to stop the fuzzer like a crash does.
void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "broken promise: %s\n", what);
  std::abort();
}

template <class Message>
void check_payload(std::span<const uint8_t> bytes) {
  const auto message = Message::decode(bytes);
  if (!message.ok()) {
    require(message.status().code() == Code::kProtocol && !message.status().text().empty(),
            "a payload is refused as PROTOCOL with a text");
    return;
  }
  const std::string again = message->encode();
  require(
      again.size() == bytes.size() && std::memcmp(again.data(), bytes.data(), again.size()) == 0,
      "a payload encodes to the bytes that it was decoded from");
}

void check_payload_of(wire::FrameKind kind, std::span<const uint8_t> bytes) {
  switch (kind) {
    case wire::FrameKind::kHello: return check_payload<wire::Hello>(bytes);
    case wire::FrameKind::kJoin: return check_payload<wire::Join>(bytes);
    case wire::FrameKind::kMembers: return check_payload<wire::Members>(bytes);
    case wire::FrameKind::kGather: return check_payload<wire::Gather>(bytes);
    case wire::FrameKind::kGathered: return check_payload<wire::Gathered>(bytes);
    case wire::FrameKind::kFailure: return check_payload<wire::Failure>(bytes);
    case wire::FrameKind::kHeartbeat: return check_payload<wire::Heartbeat>(bytes);
    case wire::FrameKind::kService: return check_payload<wire::Service>(bytes);
    default: return;
  }
}

// The header as it is, and with a checksum that fits, so that a fuzzer gets past it.
void check_header(std::span<const uint8_t, wire::kHeaderBytes> bytes) {
  const auto header = wire::decode_header(bytes);
  bool plausible = true;  // as far as the beginning goes
  for (size_t n = 0; n <= bytes.size(); ++n) {
    const bool start = wire::check_start(bytes.first(n)).ok();
    require(plausible || !start, "what is no frame does not become one");
    plausible = start;
  }
  require(plausible || !header.ok(), "the beginning of a frame is one of a frame");
  if (!header.ok()) {
    require(header.status().code() == Code::kProtocol && !header.status().text().empty(),
            "a header is refused as PROTOCOL with a text");
    return;
  }
  require(header->payload_bytes <= wire::kMaxPayloadBytes, "a payload has a limit");
  const auto again = wire::encode_header(*header);
  require(std::memcmp(again.data(), bytes.data(), again.size()) == 0,
          "a header encodes to the bytes that it was decoded from");
  require(!describe(*header).empty(), "a frame can be described");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::span<const uint8_t> left(data, size);
  while (left.size() >= wire::kHeaderBytes) {
    wire::HeaderBytes bytes;
    std::memcpy(bytes.data(), left.data(), bytes.size());
    check_header(bytes);
    const uint64_t sum = hash64(bytes.data(), wire::kHeaderBytes - 8);
    for (size_t i = 0; i < 8; ++i) {
      bytes[wire::kHeaderBytes - 8 + i] = static_cast<uint8_t>(sum >> (8 * i));
    }
    check_header(bytes);
    const auto header = wire::decode_header(bytes);
    left = left.subspan(wire::kHeaderBytes);
    if (!header.ok()) return 0;
    const auto payload = left.first(std::min<uint64_t>(header->payload_bytes, left.size()));
    check_payload_of(header->kind, payload);
    if (left.size() < wire::frame_bytes(header->payload_bytes) - wire::kHeaderBytes) return 0;
    left = left.subspan(wire::frame_bytes(header->payload_bytes) - wire::kHeaderBytes);
  }
  return 0;
}
