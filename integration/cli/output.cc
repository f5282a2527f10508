#include "integration/cli/output.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace sotto_cli {
namespace {

constexpr size_t kRememberedLines = 20;
constexpr size_t kLongestLine = size_t{1} << 20;  // bytes; a longer one is written in parts

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

void Sink::write(std::string_view text) {
  const int error = write_all(fd_, text);
  if (error == 0) return;
  if (!failed_) write_all(STDERR_FILENO, "sotto-run: " + write_failure(name_, error) + "\n");
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
