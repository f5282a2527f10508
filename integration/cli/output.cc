#include "integration/cli/output.h"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace sotto_cli {
namespace {

constexpr size_t kRememberedLines = 20;
constexpr size_t kLongestLine = size_t{1} << 20;  // bytes; a longer one is written in parts

bool same_file(int a, int b) {
  struct stat of_a {
  }, of_b{};
  return fstat(a, &of_a) == 0 && fstat(b, &of_b) == 0 && of_a.st_dev == of_b.st_dev &&
         of_a.st_ino == of_b.st_ino;
}

// How much of a text to write at once: what a pipe with room takes without waiting, up to the end
// of a line if there is one.
size_t next_part(std::string_view text) {
  const std::string_view part = text.substr(0, PIPE_BUF);
  const size_t end = part.rfind('\n');
  return end == std::string_view::npos ? part.size() : end + 1;
}

}  // namespace

void hold_standard_streams() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(fd, F_GETFD) >= 0) continue;
    // The lowest free number, so the one that is missing.
    [[maybe_unused]] const int opened = open("/dev/null", O_RDONLY);
  }
}

int write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = write(fd, text.data(), text.size());
    if (n > 0) {
      text.remove_prefix(static_cast<size_t>(n));
    } else if (n < 0 && errno == EAGAIN) {
      pollfd waits{fd, POLLOUT, 0};
      poll(&waits, 1, -1);
    } else if (n < 0 && errno != EINTR) {
      return errno == EPIPE ? 0 : errno;
    }
  }
  return 0;
}

std::string write_failure(std::string_view name, int error) {
  return "cannot write " + std::string(name) + ": " + std::strerror(error);
}

Sink::Sink(int fd, std::string_view name, Sink* other)
    : fd_(fd),
      name_(name),
      other_(other != nullptr && same_file(fd, other->fd_) ? other : nullptr) {}

void Sink::write(std::string_view text) {
  if (other_ != nullptr) return other_->write(text);
  queue_ += text;
  flush();
}

void Sink::flush() {
  size_t done = 0;
  pollfd waits{fd_, POLLOUT, 0};
  while (done < queue_.size() && poll(&waits, 1, 0) > 0) {
    const std::string_view rest = std::string_view(queue_).substr(done);
    const ssize_t n = ::write(fd_, rest.data(), next_part(rest));
    if (n > 0) {
      done += static_cast<size_t>(n);
    } else if (n == 0 || errno == EAGAIN) {
      break;
    } else if (errno != EINTR) {
      if (errno != EPIPE) fail(write_failure(name_, errno));
      done = queue_.size();
    }
  }
  queue_.erase(0, done);
}

void Sink::give_up() {
  if (queue_.empty()) return;
  fail("nothing reads " + std::string(name_) + "; " + std::to_string(queue_.size()) +
       (queue_.size() == 1 ? " byte is lost" : " bytes are lost"));
  queue_.clear();
}

void Sink::fail(const std::string& text) {
  pollfd waits{STDERR_FILENO, POLLOUT, 0};
  if (!failed_ && poll(&waits, 1, 0) > 0) write_all(STDERR_FILENO, "sotto-run: " + text + "\n");
  failed_ = true;
}

Relay::Relay(Sink& sink, std::string prefix, bool raw)
    : sink_(sink), prefix_(std::move(prefix)), raw_(raw) {}

void Relay::take(std::string_view bytes) {
  if (raw_) sink_.write(bytes);
  while (!bytes.empty()) {
    const size_t end = bytes.find('\n');
    line_ += bytes.substr(0, end);
    if (end == std::string_view::npos && line_.size() < kLongestLine) return;
    finish_line();
    bytes.remove_prefix(end == std::string_view::npos ? bytes.size() : end + 1);
  }
}

void Relay::finish() {
  if (!line_.empty()) finish_line();
}

void Relay::finish_line() {
  std::string line = std::exchange(line_, {});
  // As on a terminal, what stands before a carriage return has been overwritten.
  while (!line.empty() && line.back() == '\r') line.pop_back();
  const size_t overwritten = line.rfind('\r');
  if (overwritten != std::string::npos) line.erase(0, overwritten + 1);
  if (!raw_) sink_.write(prefix_ + line + '\n');
  last_lines_.push_back(std::move(line));
  if (last_lines_.size() > kRememberedLines) last_lines_.pop_front();
}

}  // namespace sotto_cli
