// A connected socket that carries lines of text, with a deadline for each.
//
// Threads: one at a time.
#pragma once

#include <string>

#include "core/base/clock.h"
#include "core/base/status.h"

namespace sotto {

class LineSocket {
 public:
  // A descriptor of the process, which stays open at the end. INVALID_ARGUMENT: it is no connected
  // socket.
  static Result<LineSocket> lent(int fd);
  // A connection to the first address of the host that takes it. Resolving the name may block in
  // the system's resolver. TRANSPORT: none does, with the reason; TIMEOUT.
  static Result<LineSocket> connect(const std::string& host, const std::string& port,
                                    const Clock& clock, Deadline deadline);
  ~LineSocket();
  LineSocket(LineSocket&& other) noexcept;
  LineSocket& operator=(LineSocket&&) = delete;

  // The connection lasts as long as the process.
  void leave_open() { owned_ = false; }

  // TRANSPORT: closed or reset; TIMEOUT.
  Status send(const std::string& text, const Clock& clock, Deadline deadline);
  // The next line, without its end. PROTOCOL: it is too long; errors as send.
  Result<std::string> line(const Clock& clock, Deadline deadline);

 private:
  LineSocket(int fd, bool owned) : fd_(fd), owned_(owned) {}

  int fd_;
  bool owned_;
  std::string read_;  // behind the last line
};

}  // namespace sotto
