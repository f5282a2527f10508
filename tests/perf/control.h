// How a rank of a benchmark is told what to do (tests/perf/net/sides.py).
#pragma once

#include <cstdint>
#include <functional>
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

struct ToldRank {
  int32_t number = 0;
  // Does what one line says; its reply is JSON on one line. Throws std::exception.
  std::function<std::string(const std::string& line)> obey;
};

// Tells the socket `path` which rank of which build this is, and then obeys it until it is closed;
// an exception, of `make` too, is the last that it is told. Returns the exit code.
int run_told_rank(const std::string& path, const std::function<ToldRank()>& make);

// std::runtime_error.
[[noreturn]] void refuse_command(const std::string& line);

}  // namespace sotto::perf
