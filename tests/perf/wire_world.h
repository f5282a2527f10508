// Ranks as threads of this process over TCP, and the loopback interface that carries what they
// send, in a network namespace of its own so that no other packets count.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/group/comm.h"

namespace sotto::perf {

// Runs `work` in a child process inside a user and network namespace of its own, with loopback up
// and tail loss probes off, and returns its text. why_shared: "" there; where the system permits no
// such namespace, the reason, and the network is the machine's. Throws std::runtime_error with the
// text of an exception of `work`, or when the child dies. To be called while this process has one
// thread.
std::string run_isolated(const std::function<std::string(const std::string& why_shared)>& work);

struct InterfaceCount {
  uint64_t bytes = 0;  // IP packets, without a link header
  uint64_t packets = 0;
};
InterfaceCount loopback_sent();
// By TCP, in this network namespace.
uint64_t resent_segments();
// IPv4 and TCP header with the options that every packet of an established connection has here.
uint64_t header_bytes_per_packet();

class WireWorld {
 public:
  // Throws std::runtime_error, as the rest.
  explicit WireWorld(int32_t size);
  int32_t size() const { return static_cast<int32_t>(comms_.size()); }
  const std::shared_ptr<Comm>& comm(int32_t rank) const {
    return comms_[static_cast<size_t>(rank)];
  }
  // f(rank) on a thread per rank.
  void on_all(const std::function<Status(int32_t rank)>& f) const;
  // Sent by a rank beside its operations: flow control and control connections.
  uint64_t service_bytes(int32_t rank) const;
  // Waits until nothing moves any more.
  void settle() const;

 private:
  std::vector<std::shared_ptr<Context>> contexts_;
  std::vector<std::shared_ptr<Comm>> comms_;
};

}  // namespace sotto::perf
