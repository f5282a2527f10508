#include "transports/shm/unix_socket.h"

#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>

namespace sotto::shm {
namespace {

constexpr size_t kControlBytes = CMSG_SPACE(UnixSocket::kMostDescriptors * sizeof(int));

Status socket_error(const char* call) {
  return error(Code::kTransport, "{} of a unix socket: {}", call, std::strerror(errno));
}

Status no_room_for_descriptors() {
  rlimit files{};
  (void)::getrlimit(RLIMIT_NOFILE, &files);
  return error(Code::kTransport,
               "this process has no room for the descriptors of a message on a unix socket: {} "
               "descriptors are allowed (RLIMIT_NOFILE, ulimit -n)",
               static_cast<uint64_t>(files.rlim_cur));
}

Result<Descriptor> new_socket() {
  Descriptor made(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!made.valid()) return socket_error("socket");
  return made;
}

// An abstract name begins with a zero.
socklen_t address_of(const std::string& name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  const size_t bytes = std::min(name.size(), sizeof address.sun_path - 1);
  std::memcpy(address.sun_path + 1, name.data(), bytes);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + bytes);
}

}  // namespace

Result<UnixSocket> UnixSocket::listen(const std::string& name, int backlog) {
  SOTTO_ASSIGN(Descriptor made, new_socket());
  sockaddr_un address;
  const socklen_t bytes = address_of(name, address);
  if (::bind(made.get(), reinterpret_cast<const sockaddr*>(&address), bytes) != 0)
    return socket_error("bind");
  if (::listen(made.get(), backlog) != 0) return socket_error("listen");
  return UnixSocket(std::move(made));
}

Result<UnixSocket> UnixSocket::connect(const std::string& name) {
  SOTTO_ASSIGN(Descriptor made, new_socket());
  sockaddr_un address;
  const socklen_t bytes = address_of(name, address);
  if (::connect(made.get(), reinterpret_cast<const sockaddr*>(&address), bytes) != 0)
    return socket_error("connect");
  return UnixSocket(std::move(made));
}

Result<std::optional<UnixSocket>> UnixSocket::accept() const {
  int fd;
  do {
    fd = ::accept4(descriptor_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  } while (fd < 0 && (errno == EINTR || errno == ECONNABORTED));
  if (fd >= 0) return std::optional<UnixSocket>(UnixSocket(Descriptor(fd)));
  if (errno == EAGAIN || errno == EWOULDBLOCK) return std::optional<UnixSocket>();
  return socket_error("accept");
}

Status UnixSocket::send(const std::string& bytes, const std::vector<int>& descriptors) const {
  alignas(cmsghdr) std::array<char, kControlBytes> control{};
  iovec part{const_cast<char*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  const size_t data = std::min(descriptors.size(), kMostDescriptors) * sizeof(int);
  if (data > 0) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(data);
    cmsghdr* const head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(data);
    std::memcpy(CMSG_DATA(head), descriptors.data(), data);
  }
  if (::sendmsg(descriptor_.get(), &message, MSG_NOSIGNAL) < 0) return socket_error("sendmsg");
  return ok_status();
}

Result<UnixMessage> UnixSocket::receive(size_t max_bytes) const {
  UnixMessage came;
  came.bytes.resize(max_bytes);
  alignas(cmsghdr) std::array<char, kControlBytes> control{};
  iovec part{came.bytes.data(), came.bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t n = ::recvmsg(descriptor_.get(), &message, MSG_CMSG_CLOEXEC);
  if (n < 0) return socket_error("recvmsg");
  for (cmsghdr* head = CMSG_FIRSTHDR(&message); head != nullptr;
       head = CMSG_NXTHDR(&message, head)) {
    if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (head->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(head) + i * sizeof(int), sizeof fd);
      came.descriptors.emplace_back(fd);
    }
  }
  if ((message.msg_flags & MSG_TRUNC) != 0)
    return error(Code::kTransport, "a message on a unix socket is longer than {} bytes", max_bytes);
  if ((message.msg_flags & MSG_CTRUNC) != 0) return no_room_for_descriptors();
  came.bytes.resize(static_cast<size_t>(n));
  return came;
}

int32_t UnixSocket::peer_pid() const {
  ucred peer{};
  socklen_t bytes = sizeof peer;
  return ::getsockopt(descriptor_.get(), SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 ? peer.pid
                                                                                      : 0;
}

}  // namespace sotto::shm
