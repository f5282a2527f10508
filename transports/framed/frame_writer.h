// A frame into a stream of bytes, for carriers that are one. Bytes are sent from parts(), the
// payload from where it is.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/base/hash.h"
#include "transports/framed/carrier.h"

namespace sotto::framed {

class FrameWriter {
 public:
  using Parts = std::array<iovec, 3>;

  explicit FrameWriter(wire::TrailerOf trailer_of = wire::TrailerOf::kPayload)
      : trailer_of_(trailer_of) {}

  // Takes a frame; the last one is complete, or was dropped.
  void begin(const OutFrame& frame);
  // The frame that is being sent.
  const OutFrame& frame() const { return frame_; }
  bool busy() const { return busy_; }
  // Bytes of it that were not sent yet.
  uint64_t left() const { return wire::frame_bytes(frame_.header.payload_bytes) - sent_; }
  // The next bytes, at most `allowed`; the number of parts.
  size_t parts(uint64_t allowed, Parts& parts);
  // So many bytes of the parts were taken. True: the frame is complete.
  bool sent(uint64_t bytes);
  // Forgets the frame. True: half of it has left, and nothing can follow it.
  bool drop();

 private:
  void hash_ahead();

  const wire::TrailerOf trailer_of_;
  bool busy_ = false;
  OutFrame frame_;
  wire::HeaderBytes header_;
  wire::TrailerBytes trailer_;
  uint64_t sent_ = 0, hashed_ = 0;
  Hasher64 hasher_;
};

}  // namespace sotto::framed
