// What these programs and ranks print, on its way to standard output and error.
#pragma once

#include <cstddef>
#include <deque>
#include <string>
#include <string_view>

namespace sotto_cli {

// Gives standard streams that are closed their numbers back, so that no file, pipe or socket gets
// these: input is at its end, and what is written fails with EBADF. Before anything is opened.
void hold_standard_streams();

// Writes everything to a descriptor, however long that takes. Returns 0, or the errno for which it
// gave up. That no process reads any more is no error: it has seen enough.
int write_all(int fd, std::string_view text);
// "cannot write standard output: No space left on device".
std::string write_failure(std::string_view name, int error);

// Standard output or error of sotto-run. Texts wait for their reader, this process does not. A log
// that cannot be written ends no run: the first failure is told on standard error, and later texts
// are tried again.
class Sink {
 public:
  // other: if it is open on the same file, texts go through its queue, so that lines do not mix.
  Sink(int fd, std::string_view name, Sink* other = nullptr);

  void write(std::string_view text);
  // Writes what can be written without waiting.
  void flush();
  // Bytes that wait.
  size_t queued() const { return queue_.size(); }
  int fd() const { return fd_; }
  // What waits is lost.
  void give_up();
  // Whether some text was lost.
  bool failed() const { return failed_; }

 private:
  void fail(const std::string& text);

  const int fd_;
  const std::string_view name_;
  Sink* const other_;  // null: texts go to fd
  std::string queue_;
  bool failed_ = false;
};

// One stream of one rank. Complete lines get a prefix and are written in one piece, so that lines
// of different ranks do not mix; a raw stream is passed on byte for byte as it comes. The last
// lines are remembered.
class Relay {
 public:
  // sink: borrowed.
  Relay(Sink& sink, std::string prefix, bool raw);

  void take(std::string_view bytes);
  // Passes on an unfinished last line.
  void finish();

  const std::deque<std::string>& last_lines() const { return last_lines_; }

 private:
  void finish_line();

  Sink& sink_;
  const std::string prefix_;
  const bool raw_;
  std::string line_;  // unfinished
  std::deque<std::string> last_lines_;
};

}  // namespace sotto_cli
