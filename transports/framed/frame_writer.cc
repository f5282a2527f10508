#include "transports/framed/frame_writer.h"

#include <algorithm>

namespace sotto::framed {
namespace {

constexpr uint64_t kChunkBytes = 128 * 1024;

}  // namespace

void FrameWriter::begin(const OutFrame& frame) {
  busy_ = true;
  frame_ = frame;
  header_ = wire::encode_header(frame.header);
  sent_ = 0;
  hashed_ = 0;
  const uint64_t bytes = frame.header.payload_bytes;
  if (trailer_of_ == wire::TrailerOf::kHeader) {
    trailer_ = wire::encode_trailer(hash64(header_.data(), header_.size()));
    hashed_ = bytes;
  } else if (bytes > kChunkBytes) {
    hasher_.reset();
  } else if (bytes > 0) {
    trailer_ = wire::encode_trailer(hash64(frame.payload, bytes));
    hashed_ = bytes;
  }
}

// A long payload is hashed just before it is sent, a chunk at a time, so that it is read from
// memory once.
void FrameWriter::hash_ahead() {
  const uint64_t bytes = frame_.header.payload_bytes;
  const uint64_t done = sent_ > wire::kHeaderBytes ? sent_ - wire::kHeaderBytes : 0;
  if (hashed_ == bytes || done < hashed_) return;
  const uint64_t chunk = std::min(kChunkBytes, bytes - hashed_);
  hasher_.update(frame_.payload + hashed_, chunk);
  hashed_ += chunk;
  if (hashed_ == bytes) trailer_ = wire::encode_trailer(hasher_.digest());
}

size_t FrameWriter::parts(uint64_t allowed, Parts& parts) {
  hash_ahead();
  const uint64_t bytes = frame_.header.payload_bytes;
  const uint64_t trailer_at = wire::kHeaderBytes + bytes;
  size_t count = 0;
  uint64_t at = sent_;
  const auto part = [&](const uint8_t* base, uint64_t begin, uint64_t end) {
    end = std::min(end, sent_ + allowed);
    if (at < begin || at >= end) return;
    parts[count++] = {const_cast<uint8_t*>(base) + (at - begin), end - at};
    at = end;
  };
  part(header_.data(), 0, wire::kHeaderBytes);
  part(frame_.payload, wire::kHeaderBytes, wire::kHeaderBytes + hashed_);
  if (hashed_ == bytes) part(trailer_.data(), trailer_at, wire::frame_bytes(bytes));
  return count;
}

bool FrameWriter::sent(uint64_t bytes) {
  sent_ += bytes;
  busy_ = sent_ < wire::frame_bytes(frame_.header.payload_bytes);
  return !busy_;
}

bool FrameWriter::drop() { return std::exchange(busy_, false) && sent_ > 0; }

}  // namespace sotto::framed
