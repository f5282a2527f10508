// What a listening port has refused: logged once per cause and host, so that a port scanner fills
// no log, and summed up for the texts of time-outs.
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
  // Names the cause: refusals of one cause from one host are logged once. A literal.
  std::string_view cause;
  // The other side is a rank, of this group or another one, not just anything that connects.
  bool from_rank = false;
  FailureCause told;  // what the other side is told
};

class RefusalLog {
 public:
  static constexpr size_t kMaxEntries = 64;  // what is logged at most

  // place: the beginning of every line, "rendezvous at 127.0.0.1:4000".
  explicit RefusalLog(std::string place) : place_(std::move(place)) {}

  // peer: its address with the port. A warning the first time, later for debugging only.
  void add(std::string_view cause, bool from_rank, const std::string& peer,
           const std::string& text);
  uint64_t count() const { return count_; }
  // The first text of some causes, ranks first: "A; B; and 3 other causes". Empty: none.
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

// What a peer that may be anybody has sent, for logs and texts: one line of printable characters,
// at most `most` of them.
std::string printable(std::string_view text, size_t most);

}  // namespace sotto::tcp
