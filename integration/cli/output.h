// What ranks print, on its way to the standard output and error of sotto-run.
#pragma once

#include <cstddef>
#include <deque>
#include <string>
#include <string_view>

namespace sotto_cli {

// Writes everything to a descriptor, however long that takes; gives up quietly when no process
// reads any more.
void write_all(int fd, std::string_view text);

// One stream of one rank. Complete lines get a prefix and are written in one piece, so that lines
// of different ranks do not mix; a raw stream is passed on byte for byte as it comes. The last
// lines are remembered.
class Relay {
 public:
  // sink: borrowed.
  Relay(int sink, std::string prefix, bool raw);

  void take(std::string_view bytes);
  // Passes on an unfinished last line.
  void finish();

  const std::deque<std::string>& last_lines() const { return last_lines_; }

 private:
  void finish_line();

  const int sink_;
  const std::string prefix_;
  const bool raw_;
  std::string line_;  // unfinished
  std::deque<std::string> last_lines_;
};

}  // namespace sotto_cli
