// The refusals of a listening port. They are logged once per cause and host, so that a port scanner
// does not fill the log, and summed up in texts of time-outs.
//
// Threads: the driving thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/iface/rendezvous.h"

namespace sotto::tcp {

// Why one connection is refused.
struct Refusal {
  // Name of the cause, a literal; refusals of one cause and one host are logged once.
  std::string_view cause;
  // The peer is a rank, of this group or another one, rather than an unknown peer.
  bool from_rank = false;
  FailureCause told;  // sent to the peer
};

class RefusalLog {
 public:
  static constexpr size_t kMaxEntries = 64;  // largest number that is logged

  // place: the start of every line, "rendezvous at 127.0.0.1:4000".
  explicit RefusalLog(std::string place) : place_(std::move(place)) {}

  // peer: its address with the port. Logged as a warning the first time, else at level debug.
  void add(std::string_view cause, bool from_rank, const std::string& peer,
           const std::string& text);
  uint64_t count() const { return count_; }
  // The first text of some causes, those of ranks first: "A; B; and 3 other causes"; empty: none.
  std::string summary() const;

 private:
  struct LoggedRefusal {
    std::string_view cause;
    bool from_rank;
    std::string host;
    std::string text;
  };

  std::string place_;
  std::vector<LoggedRefusal> entries_;
  uint64_t count_ = 0;
};

// Text from an unknown peer, for logs and errors: one line of at most `most` printable characters.
std::string printable(std::string_view text, size_t most);

}  // namespace sotto::tcp
