#include "transports/tcp/stream.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transports/tcp/fork_guard.h"

namespace sotto::tcp {
namespace {

// Bytes of one turn, so that one busy connection does not keep the others waiting; with a rate
// limit connections share the bucket in small portions.
constexpr uint64_t kTurnBytes = 1 << 20;
constexpr uint64_t kLimitedTurnBytes = 16 * 1024;

}  // namespace

PayloadPlace StreamOwner::more_room(FrameStream& /*stream*/, const wire::FrameHeader& /*header*/,
                                    uint64_t /*arrived*/) {
  return {};
}

FrameStream::FrameStream(Reactor& reactor, int fd, std::string name, StreamOwner& owner)
    : reactor_(reactor),
      fd_(fd),
      name_(std::move(name)),
      owner_(&owner),
      last_heard_ns_(reactor.now_ns()),
      reader_(name_),
      window_(reactor.send_shares()) {}

Result<std::unique_ptr<FrameStream>> FrameStream::make(Reactor& reactor, int fd, std::string name,
                                                       StreamOwner& owner) {
  std::unique_ptr<FrameStream> stream(new FrameStream(reactor, fd, std::move(name), owner));
  keep_from_children(fd);
  reactor.sockets().apply(fd);
  stream->window_.start(fd, reactor.sockets().send_buffer_bytes == 0,
                        reactor.egress().limited() ? kLimitedTurnBytes : kTurnBytes);
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) {
    return error(Code::kTransport, "fcntl of the connection to {}: {}", stream->name_,
                 std::strerror(errno));
  }
  SOTTO_TRY(reactor.add(fd, *stream));
  return stream;
}

FrameStream::~FrameStream() { close(); }

void FrameStream::close() {
  if (fd_ < 0) return;
  reactor_.remove(fd_, *this);
  close_kept(fd_);
  fd_ = -1;
}

void FrameStream::shutdown_send() {
  if (fd_ >= 0) ::shutdown(fd_, SHUT_WR);
  out_dead_ = true;
}

void FrameStream::drop_out() {
  if (writer_.drop()) out_dead_ = true;
}

bool FrameStream::delivered() const {
  if (fd_ < 0 || out_dead_) return true;
  int unacknowledged = 0;
  return idle() && (::ioctl(fd_, SIOCOUTQ, &unacknowledged) != 0 || unacknowledged == 0);
}

void FrameStream::fail(Status why) {
  close();
  owner_->on_broken(*this, std::move(why));
}

void FrameStream::fail_errno(const char* call, int number) {
  const std::string where = reader_.where();
  unanswered_ = number == ETIMEDOUT || number == EHOSTUNREACH || number == ENETUNREACH;
  if (number == 0) {
    fail(error(Code::kPeerLost, "{} closed the connection{}", name_, where));
  } else {
    fail(error(Code::kPeerLost, "connection to {}: {}: {}{}", name_, call, std::strerror(number),
               where));
  }
}

bool FrameStream::serve(uint32_t events) {
  if ((events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) readable_ = true;
  if ((events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) hung_up_ = true;
  if ((events & EPOLLOUT) != 0) writable_ = true;
  bool more = false;
  if (readable_) more = receive();
  if (open() && writable_) more = send() || more;
  return more && open();
}

// ---- receiving

void FrameStream::resume() {
  paused_ = false;
  readable_ = true;
  reactor_.want_turn(*this);
}

void FrameStream::look() {
  if (!open()) return;
  readable_ = true;
  if (serve(0)) reactor_.want_turn(*this);
}

bool FrameStream::receive() {
  if (paused_ || !parse()) return false;
  const bool limited = reactor_.ingress().limited();
  const uint64_t turn = limited ? kLimitedTurnBytes : kTurnBytes;
  // One time for the whole turn: what may pass by its end is for the next one. A turn that looked
  // again would read crumbs and never end on a slow link.
  const int64_t now = limited ? reactor_.now_ns() : 0;
  uint64_t taken = 0;
  while (readable_ && !paused_ && taken < turn) {
    uint64_t allowed = turn;
    if (limited) {
      allowed = std::min(turn, reactor_.ingress().available(now));
      if (allowed == 0) {
        reactor_.want_turn_at(*this, reactor_.ingress().when_ns(kLimitedTurnBytes / 2, now));
        return false;
      }
    }
    taken += receive_once(allowed);
    if (!open() || !parse()) return false;
  }
  return readable_ && !paused_;
}

uint64_t FrameStream::receive_once(uint64_t allowed) {
  framed::FrameReader::Parts parts;
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = reader_.parts(allowed, parts);
  uint64_t asked = 0;
  for (size_t i = 0; i < message.msg_iovlen; ++i) asked += parts[i].iov_len;
  ssize_t n;
  do {
    n = ::recvmsg(fd_, &message, MSG_DONTWAIT);
  } while (n < 0 && errno == EINTR);
  if (n <= 0) {
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      readable_ = false;
    } else {
      fail_errno("recvmsg", n == 0 ? 0 : errno);
    }
    return 0;
  }
  const auto bytes = static_cast<uint64_t>(n);
  if (bytes < asked && !hung_up_)
    readable_ = false;  // the socket is empty; its next bytes make an event
  last_heard_ns_ = reactor_.now_ns();
  reactor_.ingress().take(bytes);
  reader_.arrived(bytes);
  return bytes;
}

// Consumes what has arrived. False when the connection is closed.
bool FrameStream::parse() {
  using Event = framed::FrameReader::Event;
  while (!paused_) {
    switch (reader_.next()) {
      case Event::kStarved: return true;
      case Event::kHeader:
        if (!begin_frame()) return false;
        break;
      case Event::kRoom: {
        const PayloadPlace more =
            owner_->more_room(*this, reader_.header(), reader_.payload_arrived());
        reader_.place(more.data, more.room);
        break;
      }
      case Event::kFrame:
        if (!settle(owner_->on_frame(*this, reader_.header()))) return false;
        break;
      case Event::kDamaged: return damage();
    }
  }
  return true;
}

bool FrameStream::begin_frame() {
  const auto place = owner_->on_header(*this, reader_.header());
  if (!settle(place.status())) return false;
  reader_.place(place->data, place->room);
  return true;
}

// Whether the connection goes on after a call of the owner.
bool FrameStream::settle(const Status& status) {
  if (open() && !status.ok()) fail(status);
  return open();
}

bool FrameStream::damage() {
  if (wire::is_version_mismatch(reader_.why())) show_version();
  damaged_ = true;
  fail(reader_.why());
  return false;
}

// Any frame tells the other side which version is spoken here.
void FrameStream::show_version() {
  wire::FrameHeader bye;
  bye.kind = wire::FrameKind::kBye;
  const wire::HeaderBytes bytes = wire::encode_header(bye);
  [[maybe_unused]] const ssize_t n =
      ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

// ---- sending

void FrameStream::flush() {
  if (open() && writable_ && !in_send_ && send()) reactor_.want_turn(*this);
}

// True: stopped for the sake of other connections.
bool FrameStream::send() {
  const bool limited = reactor_.egress().limited();
  const uint64_t turn = limited ? kLimitedTurnBytes : kTurnBytes;
  uint64_t taken = 0;
  in_send_ = true;
  while (open() && writable_ && !out_dead_ && (writer_.busy() || begin_out())) {
    if (taken >= turn) {
      in_send_ = false;
      return true;
    }
    uint64_t allowed = turn;
    if (limited) {
      // Not in crumbs, but what is left of a frame goes as soon as it may.
      const uint64_t least = std::min(kLimitedTurnBytes / 2, writer_.left());
      const int64_t now = reactor_.now_ns();
      const uint64_t passes = reactor_.egress().available(now);
      if (passes < least) {
        reactor_.want_turn_at(*this, reactor_.egress().when_ns(least, now));
        break;
      }
      allowed = std::min(turn - taken, passes);
    }
    const int64_t sent = send_once(allowed);
    if (sent < 0) break;
    taken += static_cast<uint64_t>(sent);
  }
  in_send_ = false;
  if (taken > 0 && open() && idle()) window_.idle(fd_, reactor_.now_ns());
  return false;
}

bool FrameStream::begin_out() {
  OutFrame frame;
  if (!owner_->next_frame(*this, frame)) return false;
  writer_.begin(frame);
  return true;
}

// Bytes sent, or -1 when the socket takes no more.
int64_t FrameStream::send_once(uint64_t allowed) {
  framed::FrameWriter::Parts parts;
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = writer_.parts(allowed, parts);
  ssize_t n;
  do {
    n = ::sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (n < 0 && errno == EINTR);
  if (n < 0) {
    writable_ = false;
    if (errno != EAGAIN && errno != EWOULDBLOCK) {
      // What the peer said before it went may still be in the socket: the receiving side finds the
      // end and reports it.
      out_dead_ = readable_ = hung_up_ = true;
      reactor_.want_turn(*this);
    }
    return -1;
  }
  const auto bytes = static_cast<uint64_t>(n);
  reactor_.egress().take(bytes);
  window_.sent(fd_, bytes, reactor_.now_ns());
  if (writer_.sent(bytes)) {
    const OutFrame sent = writer_.frame();
    owner_->on_sent(*this, sent);
  }
  return n;
}

}  // namespace sotto::tcp
