// Where the ranks of a run meet: a port of the machine of rank 0.
#pragma once

#include <cstdint>
#include <string>

namespace sotto_cli {

// A TCP port for rank 0: bound here, so that no other process is given it, but not listened at, so
// that a listener with SO_REUSEADDR can have it.
class ReservedPort {
 public:
  ReservedPort() = default;
  ~ReservedPort();
  ReservedPort(const ReservedPort&) = delete;
  ReservedPort& operator=(const ReservedPort&) = delete;

  // The port; 0 if there is none, or if the address (IPv4 or IPv6 in digits) is not one of this
  // machine.
  uint16_t reserve(const std::string& address);

 private:
  int fd_ = -1;
};

// tcp://address:port for rank 0 on this machine, at a port that is reserved for it. host: the name
// or address by which users know this machine. others: whether ranks of other machines have to
// reach it; then an address in digits is taken as it is, else what the name means here, loopback
// excepted, or where sshd was connected to. Throws std::runtime_error if there is no such address.
std::string reserve_for_others(const std::string& host, bool others, ReservedPort& port);

}  // namespace sotto_cli
