// How a rank of a benchmark is told what to do (tests/perf/net/sides.py).
#pragma once

#include <string>

namespace sotto::perf {

// A stream of lines to and from the process that measures. Reading blocks without using the
// processor. Errors are std::runtime_error.
class Control {
 public:
  // path: of a Unix socket.
  explicit Control(const std::string& path);
  ~Control();
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  // False at the end.
  bool read(std::string* line);
  void write(const std::string& text);

 private:
  int fd_;
  std::string buffer_;
};

}  // namespace sotto::perf
