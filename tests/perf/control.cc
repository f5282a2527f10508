#include "tests/perf/control.h"

#include <fmt/core.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace sotto::perf {
namespace {

std::runtime_error system_error(const std::string& what) {
  return std::runtime_error(fmt::format("{}: {}", what, std::strerror(errno)));
}

}  // namespace

Control::Control(const std::string& path) : fd_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path)
    throw std::runtime_error(fmt::format("the path of the control socket has {} bytes; at most {}",
                                         path.size(), sizeof address.sun_path - 1));
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  if (fd_ < 0 || ::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0)
    throw system_error("cannot connect to the control socket " + path);
}

Control::~Control() { ::close(fd_); }

bool Control::read(std::string* line) {
  for (;;) {
    const size_t end = buffer_.find('\n');
    if (end != std::string::npos) {
      *line = buffer_.substr(0, end);
      buffer_.erase(0, end + 1);
      return true;
    }
    char part[512];
    const ssize_t n = ::read(fd_, part, sizeof part);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    buffer_.append(part, static_cast<size_t>(n));
  }
}

void Control::write(const std::string& text) {
  const std::string line = text + "\n";
  for (size_t at = 0; at < line.size();) {
    const ssize_t n = ::send(fd_, line.data() + at, line.size() - at, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) throw system_error("the control socket is gone");
    at += static_cast<size_t>(n);
  }
}

int run_told_rank(const std::string& path, const std::function<ToldRank()>& make) {
  using Json = nlohmann::ordered_json;
  Control control(path);
  try {
    const ToldRank rank = make();
    control.write(Json{{"rank", rank.number},
                       {"pid", ::getpid()},
                       {"version", SOTTO_PERF_VERSION},
                       {"build", SOTTO_PERF_BUILD}}
                      .dump());
    for (std::string line; control.read(&line);) control.write(rank.obey(line));
    return 0;
  } catch (const std::exception& e) {
    control.write(Json{{"error", e.what()}}.dump());
    return 1;
  }
}

void refuse_command(const std::string& line) {
  throw std::runtime_error("a command that this rank does not know: " + line);
}

}  // namespace sotto::perf
