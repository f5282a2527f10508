// A ring of bytes in memory that two processes share, with one writer and one reader.
//
// Each end keeps its own position and takes from the memory that of the other end alone, which it
// checks before every access: a peer that writes nonsense there makes an error.
//
// An end that is about to sleep says so in the memory (wait), and looks once more. The other end
// takes that word back when it has moved its position, and rings the bell. Both write before they
// read, in one order for all threads, so at least one of them sees what the other has written.
//
// Threads: one for each end.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <span>

#include "core/base/status.h"

namespace sotto::shm {

// In the shared memory, all zero before the first use. Each part has one end that writes it, but
// for the words of waiting.
struct RingControl {
  alignas(64) std::atomic<uint64_t> written;  // bytes since the beginning
  std::atomic<uint32_t> closed;               // by the writer
  alignas(64) std::atomic<uint64_t> read;     // bytes since the beginning
  alignas(64) std::atomic<uint32_t> reader_waits;
  alignas(64) std::atomic<uint32_t> writer_waits;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(RingControl) == 256);

// A ring, seen from either end. bytes: of the data, a power of two.
struct RingMemory {
  RingControl* control = nullptr;
  uint8_t* data = nullptr;
  uint64_t bytes = 0;

  // What a ring takes of a segment, and the ring at a place that has as much.
  static uint64_t footprint(uint64_t bytes) { return sizeof(RingControl) + bytes; }
  static RingMemory at(uint8_t* place, uint64_t bytes) {
    return {reinterpret_cast<RingControl*>(place), place + sizeof(RingControl), bytes};
  }
};

class RingWriter {
 public:
  explicit RingWriter(RingMemory memory) : memory_(memory) {}
  // Writes as many bytes of the parts as there is room for; the number of bytes. PROTOCOL: the
  // reader's position is none.
  Result<uint64_t> write(std::span<const iovec> parts);
  bool has_room() const {
    return written_ - memory_.control->read.load(std::memory_order_acquire) < memory_.bytes;
  }
  // Nothing follows.
  void close() { memory_.control->closed.store(1, std::memory_order_seq_cst); }
  // True: the reader waits, and was not rung for yet.
  bool take_waiting() { return take(memory_.control->reader_waits); }
  // This end waits for room. False: there is some.
  bool wait();
  void stop_waiting() { memory_.control->writer_waits.store(0, std::memory_order_relaxed); }

 private:
  friend class RingReader;
  static bool take(std::atomic<uint32_t>& waits) {
    return waits.load(std::memory_order_seq_cst) != 0 &&
           waits.exchange(0, std::memory_order_seq_cst) != 0;
  }

  RingMemory memory_;
  uint64_t written_ = 0;
};

class RingReader {
 public:
  explicit RingReader(RingMemory memory) : memory_(memory) {}
  // Reads as many bytes into the parts as there are; the number of bytes. PROTOCOL: the writer's
  // position is none.
  Result<uint64_t> read(std::span<const iovec> parts);
  bool has_bytes() const {
    return memory_.control->written.load(std::memory_order_acquire) != read_;
  }
  // All that was written has been read, and nothing follows.
  bool ended() const;
  bool take_waiting() { return RingWriter::take(memory_.control->writer_waits); }
  // This end waits for bytes, or the end. False: there is something.
  bool wait();
  void stop_waiting() { memory_.control->reader_waits.store(0, std::memory_order_relaxed); }

 private:
  RingMemory memory_;
  uint64_t read_ = 0;
};

}  // namespace sotto::shm
