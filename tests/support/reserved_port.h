// A TCP port of 127.0.0.1 that is kept for one socket of the test: bound here, but not listened at,
// so that a listener with SO_REUSEADDR can have it and no other process is given it.
//
// Threads: any.
#pragma once

#include <cstdint>

namespace sotto::test {

class ReservedPort {
 public:
  ReservedPort();  // throws RankError
  ~ReservedPort();
  ReservedPort(const ReservedPort&) = delete;
  ReservedPort& operator=(const ReservedPort&) = delete;
  uint16_t number() const { return number_; }

 private:
  int fd_ = -1;
  uint16_t number_ = 0;
};

}  // namespace sotto::test
