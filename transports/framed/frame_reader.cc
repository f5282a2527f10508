#include "transports/framed/frame_reader.h"

#include <algorithm>
#include <cstring>

namespace sotto::framed {

FrameReader::Event FrameReader::next() {
  switch (stage_) {
    case Stage::kHeader: return read_header();
    case Stage::kPlace: return Event::kHeader;
    case Stage::kPayload: return take_payload();
    case Stage::kTrailer: return check_trailer();
  }
  return Event::kStarved;
}

FrameReader::Event FrameReader::refuse(const Status& why) {
  why_ = why.with_prefix(fmt::format("from {}", peer_));
  return Event::kDamaged;
}

FrameReader::Event FrameReader::read_header() {
  if (end_ - begin_ < wire::kHeaderBytes) {
    // A peer with another protocol may send fewer bytes than a header has, so these are checked as
    // they come.
    const Status start = wire::check_start({unread(), end_ - begin_});
    return start.ok() ? Event::kStarved : refuse(start);
  }
  const auto header = wire::decode_header(
      std::span<const uint8_t, wire::kHeaderBytes>(unread(), wire::kHeaderBytes));
  if (!header.ok()) return refuse(header.status());
  const bool of_header = trailer_of_ == wire::TrailerOf::kHeader;
  if (of_header) header_hash_ = hash64(unread(), wire::kHeaderBytes);
  begin_ += wire::kHeaderBytes;
  header_ = *header;
  done_ = 0;
  streamed_ = !of_header && header_.payload_bytes > kBufferBytes;
  if (streamed_) hasher_.reset();
  stage_ = Stage::kPlace;
  return Event::kHeader;
}

void FrameReader::place(uint8_t* data, uint64_t room) {
  payload_ = data;
  room_ = std::min(room, header_.payload_bytes);
  stage_ = Stage::kPayload;
}

FrameReader::Event FrameReader::take_payload() {
  const uint64_t whole = header_.payload_bytes;
  const uint64_t limit = payload_ == nullptr ? whole : room_;
  if (const uint64_t bytes = std::min<uint64_t>(end_ - begin_, limit - done_); bytes > 0) {
    if (payload_ != nullptr) std::memcpy(payload_ + done_, unread(), bytes);
    if (streamed_) hasher_.update(unread(), bytes);
    begin_ += bytes;
    done_ += bytes;
  }
  if (done_ < limit) return Event::kStarved;
  if (done_ < whole) return Event::kRoom;
  stage_ = whole > 0 ? Stage::kTrailer : Stage::kHeader;
  return whole > 0 ? check_trailer() : Event::kFrame;
}

FrameReader::Event FrameReader::check_trailer() {
  if (end_ - begin_ < wire::kTrailerBytes) return Event::kStarved;
  const uint64_t sent = wire::decode_trailer(
      std::span<const uint8_t, wire::kTrailerBytes>(unread(), wire::kTrailerBytes));
  begin_ += wire::kTrailerBytes;
  stage_ = Stage::kHeader;
  const uint8_t* const payload = std::exchange(payload_, nullptr);
  if (payload == nullptr) return Event::kFrame;  // discarded
  const uint64_t found = trailer_of_ == wire::TrailerOf::kHeader ? header_hash_
                         : streamed_                             ? hasher_.digest()
                                     : hash64(payload, header_.payload_bytes);
  if (found == sent) return Event::kFrame;
  why_ = error(Code::kProtocol, "{} from {} has checksum {:016x}, its bytes have {:016x}",
               describe(header_), peer_, sent, found);
  return Event::kDamaged;
}

size_t FrameReader::parts(uint64_t allowed, Parts& parts) {
  // Starved: less than a header or trailer is in the buffer.
  if (begin_ > 0) {
    std::memmove(buffer_.data(), unread(), end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  size_t count = 0;
  direct_ = 0;
  if (stage_ == Stage::kPayload && payload_ != nullptr) {
    direct_ = std::min(room_ - done_, allowed);
    parts[count++] = {payload_ + done_, direct_};
  }
  const uint64_t room = std::min<uint64_t>(buffer_.size() - end_, allowed - direct_);
  if (room > 0) parts[count++] = {buffer_.data() + end_, room};
  return count;
}

void FrameReader::arrived(uint64_t bytes) {
  const uint64_t direct = std::min(bytes, direct_);
  if (direct > 0) {
    // Hashed while it is in the cache.
    if (streamed_) hasher_.update(payload_ + done_, direct);
    done_ += direct;
  }
  end_ += bytes - direct;
}

std::string FrameReader::where() const {
  if (stage_ != Stage::kHeader) return fmt::format(" in the middle of a {}", describe(header_));
  return begin_ != end_ ? " in the middle of a frame header" : "";
}

}  // namespace sotto::framed
