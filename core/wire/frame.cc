#include "core/wire/frame.h"

#include <algorithm>
#include <string_view>

#include "core/base/hash.h"
#include "core/base/text.h"
#include "core/wire/bytes.h"

namespace sotto::wire {
namespace {

// Offsets of the header fields; FORMAT.md has the table.
constexpr size_t kMagicAt = 0;
constexpr size_t kVersionAt = 4;
constexpr size_t kKindAt = 6;
constexpr size_t kClassAt = 7;
constexpr size_t kFlagsAt = 8;
constexpr size_t kReservedAt = 12;
constexpr size_t kCommAt = 16;
constexpr size_t kNumberAt = 24;
constexpr size_t kRoundAt = 32;
constexpr size_t kSegmentAt = 36;
constexpr size_t kSignatureAt = 40;
constexpr size_t kPayloadBytesAt = 80;
constexpr size_t kChecksumAt = 88;
static_assert(kChecksumAt + 8 == kHeaderBytes);

constexpr std::string_view kVersionText = "frame of format version";

void put_signature(uint8_t* out, const OpSignature& s) {
  put_at<uint16_t>(out, static_cast<uint16_t>(s.kind));
  put_at<uint16_t>(out + 2, s.reduce);
  put_at<uint32_t>(out + 4, s.dtype);
  put_at<uint64_t>(out + 8, s.count);
  put_at<uint64_t>(out + 16, s.tag);
  put_at<uint32_t>(out + 24, static_cast<uint32_t>(s.root));
  put_at<uint32_t>(out + 28, s.detail);
  put_at<uint64_t>(out + 32, s.chain);
}

OpSignature get_signature(const uint8_t* in) {
  OpSignature s;
  s.kind = static_cast<OpKind>(get_at<uint16_t>(in));
  s.reduce = get_at<uint16_t>(in + 2);
  s.dtype = get_at<uint32_t>(in + 4);
  s.count = get_at<uint64_t>(in + 8);
  s.tag = get_at<uint64_t>(in + 16);
  s.root = static_cast<int32_t>(get_at<uint32_t>(in + 24));
  s.detail = get_at<uint32_t>(in + 28);
  s.chain = get_at<uint64_t>(in + 32);
  return s;
}

bool kind_known(uint8_t kind) {
  return (kind >= static_cast<uint8_t>(FrameKind::kData) &&
          kind <= static_cast<uint8_t>(FrameKind::kHello)) ||
         (kind >= static_cast<uint8_t>(FrameKind::kJoin) &&
          kind <= static_cast<uint8_t>(FrameKind::kService));
}

bool has_payload(FrameKind kind) {
  return kind != FrameKind::kReady && kind != FrameKind::kCredit && kind != FrameKind::kAnnounce &&
         kind != FrameKind::kBye;
}

Status check_fields(const FrameHeader& h, uint8_t message_class, uint32_t reserved) {
  const uint32_t flags_allowed = h.kind == FrameKind::kData ? kFlagCredited : 0;
  if ((h.flags & ~flags_allowed) != 0 || reserved != 0) {
    return error(Code::kProtocol, "{} frame with unknown flags {:#x}, reserved {:#x}",
                 kind_name(h.kind), h.flags, reserved);
  }
  if (message_class > static_cast<uint8_t>(h.kind == FrameKind::kData ? MessageClass::kMetadata
                                                                      : MessageClass::kPayload)) {
    return error(Code::kProtocol, "{} frame with unknown message class {}", kind_name(h.kind),
                 message_class);
  }
  if (h.payload_bytes > kMaxPayloadBytes || (h.payload_bytes > 0 && !has_payload(h.kind))) {
    return error(Code::kProtocol,
                 "{} frame that announces a payload of {} bytes; at most {} are allowed",
                 kind_name(h.kind), h.payload_bytes, has_payload(h.kind) ? kMaxPayloadBytes : 0);
  }
  return {};
}

// What programs that take this port for another one send first.
std::string_view protocol_of(std::span<const uint8_t> bytes) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  // Four bytes may be all that has come.
  const auto starts = [&](std::string_view word) {
    return text.starts_with(word.substr(0, std::max<size_t>(4, text.size())));
  };
  for (const std::string_view word : {"GET ", "HEAD ", "POST ", "PUT ", "DELETE ", "OPTIONS ",
                                      "CONNECT ", "PATCH ", "TRACE ", "PRI * HTTP/2", "HTTP"}) {
    if (starts(word)) return "HTTP";
  }
  if (starts("SSH-")) return "SSH";
  // A TLS record: handshake or alert, version 3.x. An SSL 2 hello has no such sign.
  if ((bytes[0] == 0x16 || bytes[0] == 0x15) && bytes[1] == 3 && bytes[2] <= 4) return "TLS";
  return "";
}

Status not_a_frame(std::span<const uint8_t> bytes, uint32_t magic) {
  const std::string_view protocol = protocol_of(bytes);
  if (!protocol.empty()) {
    return error(
        Code::kProtocol,
        "not a frame: it starts like {} ({:#010x}), so the other side speaks {} and not this "
        "library's protocol",
        protocol, magic, protocol);
  }
  return error(Code::kProtocol,
               "not a frame: it starts with {:#010x}, this library's frames with {:#010x}", magic,
               kMagic);
}

}  // namespace

std::string_view kind_name(FrameKind kind) {
  switch (kind) {
    case FrameKind::kData: return "data";
    case FrameKind::kReady: return "ready";
    case FrameKind::kCredit: return "credit";
    case FrameKind::kAnnounce: return "announce";
    case FrameKind::kHello: return "hello";
    case FrameKind::kJoin: return "join";
    case FrameKind::kMembers: return "members";
    case FrameKind::kGather: return "gather";
    case FrameKind::kGathered: return "gathered";
    case FrameKind::kFailure: return "failure";
    case FrameKind::kHeartbeat: return "heartbeat";
    case FrameKind::kBye: return "bye";
    case FrameKind::kService: return "service";
  }
  return "unknown";
}

HeaderBytes encode_header(const FrameHeader& h) {
  HeaderBytes out{};
  uint8_t* p = out.data();
  put_at<uint32_t>(p + kMagicAt, kMagic);
  put_at<uint16_t>(p + kVersionAt, kVersion);
  p[kKindAt] = static_cast<uint8_t>(h.kind);
  p[kClassAt] = static_cast<uint8_t>(h.message_class);
  put_at<uint32_t>(p + kFlagsAt, h.flags);
  put_at<uint64_t>(p + kCommAt, h.key.comm);
  put_at<uint64_t>(p + kNumberAt, h.key.number);
  put_at<uint32_t>(p + kRoundAt, h.round);
  put_at<uint32_t>(p + kSegmentAt, h.segment);
  put_signature(p + kSignatureAt, h.signature);
  put_at<uint64_t>(p + kPayloadBytesAt, h.payload_bytes);
  put_at<uint64_t>(p + kChecksumAt, hash64(p, kChecksumAt));
  return out;
}

// Magic and version come first and stay where they are in all versions, so that the text can name
// both sides.
Status check_start(std::span<const uint8_t> bytes) {
  const uint8_t* p = bytes.data();
  if (bytes.size() < kMagicAt + 4) return {};
  if (const auto magic = get_at<uint32_t>(p + kMagicAt); magic != kMagic) {
    return not_a_frame(bytes, magic);
  }
  if (bytes.size() < kVersionAt + 2) return {};
  if (const auto version = get_at<uint16_t>(p + kVersionAt); version != kVersion) {
    return error(Code::kProtocol, "frame of format version {}, this library speaks version {}",
                 version, kVersion);
  }
  return {};
}

Result<FrameHeader> decode_header(std::span<const uint8_t, kHeaderBytes> bytes) {
  const uint8_t* p = bytes.data();
  SOTTO_TRY(check_start(bytes));
  if (const auto sum = get_at<uint64_t>(p + kChecksumAt); sum != hash64(p, kChecksumAt)) {
    return error(Code::kProtocol, "frame header with checksum {:016x}, its bytes have {:016x}", sum,
                 hash64(p, kChecksumAt));
  }
  if (!kind_known(p[kKindAt]))
    return error(Code::kProtocol, "frame of unknown kind {}", p[kKindAt]);
  FrameHeader h;
  h.kind = static_cast<FrameKind>(p[kKindAt]);
  h.message_class = static_cast<MessageClass>(p[kClassAt]);
  h.flags = get_at<uint32_t>(p + kFlagsAt);
  h.key = {get_at<uint64_t>(p + kCommAt), get_at<uint64_t>(p + kNumberAt)};
  h.round = get_at<uint32_t>(p + kRoundAt);
  h.segment = get_at<uint32_t>(p + kSegmentAt);
  h.signature = get_signature(p + kSignatureAt);
  h.payload_bytes = get_at<uint64_t>(p + kPayloadBytesAt);
  SOTTO_TRY(check_fields(h, p[kClassAt], get_at<uint32_t>(p + kReservedAt)));
  return h;
}

bool is_version_mismatch(const Status& status) {
  return status.code() == Code::kProtocol && status.text().find(kVersionText) != std::string::npos;
}

TrailerBytes encode_trailer(uint64_t hash) {
  TrailerBytes out;
  put_at<uint64_t>(out.data(), hash);
  return out;
}

uint64_t decode_trailer(std::span<const uint8_t, kTrailerBytes> bytes) {
  return get_at<uint64_t>(bytes.data());
}

std::string describe(const OpKey& key) {
  return fmt::format("{} of comm {:x}", name_of(key), key.comm);
}

std::string describe(const FrameHeader& h) {
  if (h.kind == FrameKind::kCredit) return "credit frame";
  if (h.kind >= FrameKind::kHello)
    return fmt::format("{} frame of {}", kind_name(h.kind), counted(h.payload_bytes, "byte"));
  const std::string_view what = h.kind == FrameKind::kData ? "message" : kind_name(h.kind);
  return fmt::format("{} of {}, {}, round {}, segment {}, {}", what, describe(h.key),
                     describe(h.signature), h.round, h.segment, counted(h.payload_bytes, "byte"));
}

}  // namespace sotto::wire
