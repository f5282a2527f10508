#include "transports/shm/ring.h"

#include <algorithm>
#include <cstring>

namespace sotto::shm {

Result<uint64_t> RingWriter::write(std::span<const iovec> parts) {
  const uint64_t read = memory_.control->read.load(std::memory_order_acquire);
  const uint64_t used = written_ - read;
  if (used > memory_.bytes) {
    return error(Code::kProtocol,
                 "the ring is broken: its reader is at byte {}, {} of {} were written in {} bytes "
                 "of memory",
                 read, written_ - std::min(written_, memory_.bytes), written_, memory_.bytes);
  }
  uint64_t room = memory_.bytes - used;
  const uint64_t before = written_;
  for (const iovec& part : parts) {
    const auto* from = static_cast<const uint8_t*>(part.iov_base);
    const uint64_t bytes = std::min<uint64_t>(part.iov_len, room);
    const uint64_t at = written_ & (memory_.bytes - 1);
    const uint64_t first = std::min(bytes, memory_.bytes - at);
    if (first > 0) std::memcpy(memory_.data + at, from, first);
    if (bytes > first) std::memcpy(memory_.data, from + first, bytes - first);
    written_ += bytes;
    room -= bytes;
  }
  if (written_ != before) memory_.control->written.store(written_, std::memory_order_seq_cst);
  return written_ - before;
}

bool RingWriter::wait() {
  memory_.control->writer_waits.store(1, std::memory_order_seq_cst);
  return written_ - memory_.control->read.load(std::memory_order_seq_cst) == memory_.bytes;
}

Result<uint64_t> RingReader::read(std::span<const iovec> parts) {
  const uint64_t written = memory_.control->written.load(std::memory_order_acquire);
  uint64_t left = written - read_;
  if (left > memory_.bytes) {
    return error(Code::kProtocol,
                 "the ring is broken: its writer is at byte {}, {} were read, and it has {} bytes "
                 "of memory",
                 written, read_, memory_.bytes);
  }
  const uint64_t before = read_;
  for (const iovec& part : parts) {
    auto* const to = static_cast<uint8_t*>(part.iov_base);
    const uint64_t bytes = std::min<uint64_t>(part.iov_len, left);
    const uint64_t at = read_ & (memory_.bytes - 1);
    const uint64_t first = std::min(bytes, memory_.bytes - at);
    if (first > 0) std::memcpy(to, memory_.data + at, first);
    if (bytes > first) std::memcpy(to + first, memory_.data, bytes - first);
    read_ += bytes;
    left -= bytes;
  }
  if (read_ != before) memory_.control->read.store(read_, std::memory_order_seq_cst);
  return read_ - before;
}

// `closed` is looked at first: what was written before it is then seen as well.
bool RingReader::ended() const {
  return memory_.control->closed.load(std::memory_order_acquire) != 0 &&
         memory_.control->written.load(std::memory_order_acquire) == read_;
}

bool RingReader::wait() {
  memory_.control->reader_waits.store(1, std::memory_order_seq_cst);
  return memory_.control->closed.load(std::memory_order_seq_cst) == 0 &&
         memory_.control->written.load(std::memory_order_seq_cst) == read_;
}

}  // namespace sotto::shm
