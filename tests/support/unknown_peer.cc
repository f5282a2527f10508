#include "tests/support/unknown_peer.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "core/base/clock.h"
#include "core/base/hash.h"
#include "tests/support/ranks.h"

namespace sotto::test {
namespace {

sockaddr_in loopback(uint16_t port) {
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_port = htons(port);
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return at;
}

int64_t now_ns() { return Clock::monotonic().now_ns(); }

bool readable(int fd, int64_t until_ns) {
  const int64_t left_ms = std::max<int64_t>(0, (until_ns - now_ns()) / 1'000'000);
  pollfd one{fd, POLLIN, 0};
  return ::poll(&one, 1, static_cast<int>(left_ms)) > 0;
}

}  // namespace

UnknownPeer::UnknownPeer(uint16_t port) {
  const sockaddr_in to = loopback(port);
  const int64_t until = now_ns() + 60'000'000'000;
  for (;;) {
    fd_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    require(fd_ >= 0, "socket");
    if (::connect(fd_, reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0) return;
    const int number = errno;
    hang_up();
    require(number == ECONNREFUSED && now_ns() < until,
            fmt::format("connect to port {}: {}", port, std::strerror(number)));
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

void UnknownPeer::send(const std::string& bytes) const {
  size_t sent = 0;
  while (sent < bytes.size()) {
    const ssize_t n = ::send(fd_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (n <= 0) return;  // the other side has closed: what it sent before can still be read
    sent += static_cast<size_t>(n);
  }
}

void UnknownPeer::hang_up() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

bool UnknownPeer::receive_some(int64_t until_ns) {
  if (closed_ || !readable(fd_, until_ns)) return false;
  char buffer[65536];
  const ssize_t n = ::recv(fd_, buffer, sizeof buffer, 0);
  closed_ = n <= 0;
  if (n > 0) received_.append(buffer, static_cast<size_t>(n));
  return n > 0;
}

bool UnknownPeer::cut(ReceivedFrame& out) {
  if (received_.size() < wire::kHeaderBytes) return false;
  out.header = check(wire::decode_header(std::span<const uint8_t, wire::kHeaderBytes>(
      reinterpret_cast<const uint8_t*>(received_.data()), wire::kHeaderBytes)));
  const uint64_t bytes = wire::frame_bytes(out.header.payload_bytes);
  if (received_.size() < bytes) return false;
  out.payload = received_.substr(wire::kHeaderBytes, out.header.payload_bytes);
  received_.erase(0, bytes);
  return true;
}

std::vector<ReceivedFrame> UnknownPeer::receive_all(int64_t timeout_ms) {
  const int64_t until = now_ns() + timeout_ms * 1'000'000;
  while (receive_some(until)) {
  }
  std::vector<ReceivedFrame> frames;
  for (ReceivedFrame frame; cut(frame);) frames.push_back(frame);
  return frames;
}

ReceivedFrame UnknownPeer::next(int64_t timeout_ms) {
  const int64_t until = now_ns() + timeout_ms * 1'000'000;
  ReceivedFrame frame;
  while (!cut(frame)) require(receive_some(until), "no further frame has come");
  return frame;
}

std::string UnknownPeer::refusal(int64_t timeout_ms) {
  const std::vector<ReceivedFrame> frames = receive_all(timeout_ms);
  if (frames.empty() || frames.back().header.kind != wire::FrameKind::kFailure) return "";
  const std::string& bytes = frames.back().payload;
  return check(
             wire::Failure::decode({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}))
      .text;
}

IdleCrowd::IdleCrowd(uint16_t port, int count) {
  const sockaddr_in to = loopback(port);
  for (int i = 0; i < count; ++i) {
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    require(fd >= 0, fmt::format("socket {} of a crowd: {}", i, std::strerror(errno)));
    fds_.push_back(fd);
    const int rc = ::connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof to);
    require(rc == 0 || errno == EINPROGRESS, fmt::format("connect {} of a crowd", i));
  }
}

IdleCrowd::~IdleCrowd() {
  for (const int fd : fds_) ::close(fd);
}

int IdleCrowd::open() const {
  return static_cast<int>(std::count_if(fds_.begin(), fds_.end(), [](int fd) {
    char byte;
    return ::recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && errno == EAGAIN;
  }));
}

RogueListener::RogueListener() {
  fd_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in at = loopback(0);
  socklen_t bytes = sizeof at;
  require(::bind(fd_, reinterpret_cast<sockaddr*>(&at), bytes) == 0, "bind");
  require(::listen(fd_, 8) == 0, "listen");
  require(::getsockname(fd_, reinterpret_cast<sockaddr*>(&at), &bytes) == 0, "getsockname");
  port_ = ntohs(at.sin_port);
}

RogueListener::~RogueListener() { ::close(fd_); }

UnknownPeer RogueListener::accept(int64_t timeout_ms) const {
  require(readable(fd_, now_ns() + timeout_ms * 1'000'000), "nobody connects");
  const int fd = ::accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC);
  require(fd >= 0, "accept");
  return UnknownPeer(UnknownPeer::Connected{fd});
}

std::string frame_of(wire::FrameHeader header, const std::string& payload) {
  header.payload_bytes = payload.size();
  const auto head = wire::encode_header(header);
  std::string out(head.begin(), head.end());
  if (payload.empty()) return out;
  const auto trailer = wire::encode_trailer(hash64(payload));
  return out + payload + std::string(trailer.begin(), trailer.end());
}

std::string frame_of(wire::FrameKind kind, const std::string& payload, uint32_t segment) {
  wire::FrameHeader header;
  header.kind = kind;
  header.segment = segment;
  return frame_of(header, payload);
}

std::string header_of(wire::FrameKind kind, uint64_t announced) {
  wire::FrameHeader header;
  header.kind = kind;
  header.payload_bytes = announced;
  const auto head = wire::encode_header(header);
  return {head.begin(), head.end()};
}

std::string in_version(uint16_t version, std::string frame) {
  frame[4] = static_cast<char>(version & 0xff);
  frame[5] = static_cast<char>(version >> 8);
  return frame;
}

std::string allow_descriptors(uint64_t wanted) {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_cur >= wanted) return "";
  if (limit.rlim_max < wanted)
    return fmt::format("{} descriptors are needed, {} are allowed (ulimit -Hn)", wanted,
                       limit.rlim_max);
  limit.rlim_cur = wanted;
  return ::setrlimit(RLIMIT_NOFILE, &limit) == 0 ? "" : "setrlimit failed";
}

}  // namespace sotto::test
