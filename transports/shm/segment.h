// Memory that the processes of two ranks map: a memfd, which has no name in any file system and
// ends with the last process that has it. Neither process can resize it, so no access faults.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/base/status.h"
#include "transports/shm/descriptor.h"

namespace sotto::shm {

class Segment {
 public:
  Segment() = default;
  Segment(Segment&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Segment& operator=(Segment&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Segment();

  // A memfd of so many bytes of memory, all zero. TRANSPORT: the system gives none.
  static Result<Descriptor> make(uint64_t bytes);
  // Maps a memfd, which may be one of a peer. TRANSPORT: it has another size, can be resized, or
  // cannot be mapped.
  static Result<Segment> map(const Descriptor& memory, uint64_t bytes);

  uint8_t* data() const { return data_; }

 private:
  Segment(uint8_t* data, uint64_t bytes) : data_(data), bytes_(bytes) {}

  uint8_t* data_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace sotto::shm
