// Frames out of a stream of bytes, for carriers that are one. Bytes are read into parts(); next()
// says what they amount to. A payload arrives where its reader was told, without a copy but for
// what came together with the header.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/base/hash.h"
#include "core/base/status.h"
#include "core/wire/frame.h"

namespace sotto::framed {

class FrameReader {
 public:
  using Parts = std::array<iovec, 2>;
  enum class Event : uint8_t {
    kStarved,  // more bytes are needed
    kHeader,   // a frame begins: place() has to say where its payload goes
    kRoom,     // the place is full and the payload longer: place() has to say where the whole goes
    kFrame,    // the frame is complete, and as it was sent
    kDamaged,  // no frame, or not as it was sent: why()
  };

  // peer: its name, for errors about what it sent.
  explicit FrameReader(std::string peer, wire::TrailerOf trailer_of = wire::TrailerOf::kPayload)
      : peer_(std::move(peer)), trailer_of_(trailer_of) {}
  void set_peer(std::string peer) { peer_ = std::move(peer); }

  Event next();
  // data: null: discard. room: bytes that have a place now, with those that have arrived.
  void place(uint8_t* data, uint64_t room);
  // Forgets the place: the rest of the payload is discarded.
  void discard() { payload_ = nullptr; }

  // Where the next bytes go, at most `allowed`; the number of parts. When starved.
  size_t parts(uint64_t allowed, Parts& parts);
  // So many bytes were read into the parts.
  void arrived(uint64_t bytes);

  // Of the frame that began last.
  const wire::FrameHeader& header() const { return header_; }
  uint64_t payload_arrived() const { return done_; }
  const Status& why() const { return why_; }
  // Where the stream is, for errors: " in the middle of a ..."; empty between two frames.
  std::string where() const;

 private:
  enum class Stage : uint8_t { kHeader, kPlace, kPayload, kTrailer };
  static constexpr size_t kBufferBytes = 8192;

  Event read_header();
  Event take_payload();
  Event check_trailer();
  Event refuse(const Status& why);
  const uint8_t* unread() const { return buffer_.data() + begin_; }

  std::string peer_;
  const wire::TrailerOf trailer_of_;
  Status why_;
  Stage stage_ = Stage::kHeader;
  wire::FrameHeader header_;
  uint64_t header_hash_ = 0;    // for TrailerOf::kHeader
  uint8_t* payload_ = nullptr;  // null: discard
  uint64_t room_ = 0;           // of payload_
  uint64_t done_ = 0;
  uint64_t direct_ = 0;    // bytes of the parts that are payload
  bool streamed_ = false;  // hash in pieces, while the payload arrives
  Hasher64 hasher_;
  size_t begin_ = 0, end_ = 0;  // unread bytes of buffer_
  std::array<uint8_t, kBufferBytes> buffer_;
};

}  // namespace sotto::framed
