// Frames: the unit of what ranks send over a byte stream. FORMAT.md describes the format, and the
// golden frames in tests/data/frames hold it in place.
//
// Threads: any; nothing here keeps state.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "core/base/status.h"
#include "core/iface/transport.h"

namespace sotto::wire {

inline constexpr uint32_t kMagic = 0x4f544f53u;  // "SOTO" on the wire
inline constexpr uint16_t kVersion = 1;
inline constexpr size_t kHeaderBytes = 96;
inline constexpr size_t kTrailerBytes = 8;
// Longest payload that a header may announce. Receivers have smaller limits of their own.
inline constexpr uint64_t kMaxPayloadBytes = uint64_t{1} << 40;

enum class FrameKind : uint8_t {
  // Data connections.
  kData = 1,      // a message of an operation
  kReady = 2,     // the sender of this frame has its receives up to `round` posted
  kCredit = 3,    // `number` bytes of eager credit are given back
  kAnnounce = 4,  // the sender of this frame waits for a READY of the operation
  kHello = 5,     // first frame in each direction: wire::Hello
  // Control connections.
  kJoin = 16,       // member to coordinator: wire::Join
  kMembers = 17,    // coordinator to member: wire::Members
  kGather = 18,     // member to coordinator: wire::Gather
  kGathered = 19,   // coordinator to member: wire::Gathered
  kFailure = 20,    // wire::Failure
  kHeartbeat = 21,  // wire::Heartbeat
  // Both.
  kBye = 22,  // the connection will be closed on purpose
  // Control connections, once set-up is over.
  kService = 23,  // wire::Service
};
std::string_view kind_name(FrameKind kind);  // "data", "ready", ...

// kData only: sent without a READY; the bytes of the frame count against the credit.
inline constexpr uint32_t kFlagCredited = 1;

struct FrameHeader {
  FrameKind kind = FrameKind::kData;
  MessageClass message_class = MessageClass::kPayload;
  uint32_t flags = 0;
  OpKey key;
  uint32_t round = 0;
  uint32_t segment = 0;
  OpSignature signature{};
  uint64_t payload_bytes = 0;
  bool operator==(const FrameHeader&) const = default;
};

// Bytes of a whole frame. A frame without payload has no trailer.
constexpr uint64_t frame_bytes(uint64_t payload_bytes) {
  return kHeaderBytes + payload_bytes + (payload_bytes > 0 ? kTrailerBytes : 0);
}

using HeaderBytes = std::array<uint8_t, kHeaderBytes>;
using TrailerBytes = std::array<uint8_t, kTrailerBytes>;

// What the trailer's checksum is taken of. kHeader is for memory that both ends share: a copy of it
// within a host is as good as any other copy that a program makes, and the trailer shows alone that
// writer and reader agree on where frames end.
enum class TrailerOf : uint8_t { kPayload, kHeader };

HeaderBytes encode_header(const FrameHeader& header);
// PROTOCOL names what does not fit: magic or version with both sides' numbers, the checksum, an
// unknown kind, flag or class, or payload where the kind has none.
Result<FrameHeader> decode_header(std::span<const uint8_t, kHeaderBytes> bytes);

// bytes: the first ones of a header. PROTOCOL as soon as no frame of this version begins so.
Status check_start(std::span<const uint8_t> bytes);

// Whether decode_header or check_start has refused a frame for its version: the sender is another
// release of this library.
bool is_version_mismatch(const Status& status);

TrailerBytes encode_trailer(uint64_t hash);
uint64_t decode_trailer(std::span<const uint8_t, kTrailerBytes> bytes);

// For errors: "operation 17 of comm 1"; "message of operation 17 of comm 1, barrier(tag 0), round
// 2, segment 3, 0 bytes".
std::string describe(const OpKey& key);
std::string describe(const FrameHeader& header);

}  // namespace sotto::wire
