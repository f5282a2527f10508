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
      peer_(name_),
      owner_(&owner),
      last_heard_ns_(reactor.now_ns()),
      window_(reactor.send_shares()) {}

Result<std::unique_ptr<FrameStream>> FrameStream::make(Reactor& reactor, int fd, std::string name,
                                                       StreamOwner& owner) {
  std::unique_ptr<FrameStream> stream(new FrameStream(reactor, fd, std::move(name), owner));
  reactor.sockets().apply(fd);
  stream->window_.start(fd, reactor.sockets().send_buffer_bytes == 0,
                        reactor.egress().limited() ? kLimitedTurnBytes : kTurnBytes);
  // A child process that inherits the socket would keep it open when this process dies.
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
  ::close(fd_);
  fd_ = -1;
}

void FrameStream::shutdown_send() {
  if (fd_ >= 0) ::shutdown(fd_, SHUT_WR);
  out_dead_ = true;
}

void FrameStream::drop_out() {
  if (out_busy_ && out_sent_ > 0) out_dead_ = true;
  out_busy_ = false;
}

bool FrameStream::delivered() const {
  if (fd_ < 0 || out_dead_) return true;
  int unacknowledged = 0;
  return !out_busy_ && (::ioctl(fd_, SIOCOUTQ, &unacknowledged) != 0 || unacknowledged == 0);
}

void FrameStream::fail(Status why) {
  close();
  owner_->on_broken(*this, std::move(why));
}

void FrameStream::fail_errno(const char* call, int number) {
  std::string where;
  if (in_stage_ != ReceiveStage::kHeader) {
    where = fmt::format(" in the middle of a {}", describe(in_header_));
  } else if (in_begin_ != in_end_) {
    where = " in the middle of a frame header";
  }
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
  uint64_t taken = 0;
  while (readable_ && !paused_ && taken < turn) {
    uint64_t allowed = turn;
    if (limited) {
      const int64_t now = reactor_.now_ns();
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
  // parse() leaves less than a header or trailer in the buffer.
  if (in_begin_ > 0) {
    std::memmove(in_buffer_.data(), in_buffer_.data() + in_begin_, in_end_ - in_begin_);
    in_end_ -= in_begin_;
    in_begin_ = 0;
  }
  iovec parts[2];
  int count = 0;
  uint64_t direct = 0;
  if (in_stage_ == ReceiveStage::kPayload && in_payload_ != nullptr) {
    make_room();
    direct = std::min(in_room_ - in_done_, allowed);
    parts[count++] = {in_payload_ + in_done_, direct};
  }
  const uint64_t room = std::min<uint64_t>(in_buffer_.size() - in_end_, allowed - direct);
  if (room > 0) parts[count++] = {in_buffer_.data() + in_end_, room};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = static_cast<size_t>(count);
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
  if (bytes < direct + room && !hung_up_)
    readable_ = false;  // the socket is empty; its next bytes make an event
  last_heard_ns_ = reactor_.now_ns();
  reactor_.ingress().take(bytes);
  if (direct > 0) take_direct(std::min(bytes, direct));
  if (bytes > direct) in_end_ += bytes - direct;
  return bytes;
}

// Payload bytes that recvmsg has put in place; hashed while they are in the cache.
void FrameStream::take_direct(uint64_t bytes) {
  if (in_streamed_) in_hasher_.update(in_payload_ + in_done_, bytes);
  in_done_ += bytes;
}

// Consumes what has arrived. False when the connection is closed.
bool FrameStream::parse() {
  while (!paused_) {
    switch (in_stage_) {
      case ReceiveStage::kHeader:
        if (in_end_ - in_begin_ < wire::kHeaderBytes) return plausible_start();
        if (!begin_frame()) return false;
        break;
      case ReceiveStage::kPayload:
        if (!take_payload()) return true;
        break;
      case ReceiveStage::kTrailer:
        if (in_end_ - in_begin_ < wire::kTrailerBytes) return true;
        if (!end_payload()) return false;
        break;
    }
  }
  return true;
}

// Any frame tells the other side which version is spoken here.
void FrameStream::show_version() {
  wire::FrameHeader bye;
  bye.kind = wire::FrameKind::kBye;
  const wire::HeaderBytes bytes = wire::encode_header(bye);
  [[maybe_unused]] const ssize_t n =
      ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

// A peer with another protocol may send fewer bytes than a header has, so these are checked as they
// come.
bool FrameStream::plausible_start() {
  const Status start = wire::check_start({in_buffer_.data() + in_begin_, in_end_ - in_begin_});
  return start.ok() || refuse_start(start);
}

bool FrameStream::refuse_start(const Status& why) {
  if (wire::is_version_mismatch(why)) show_version();
  damaged_ = true;
  fail(why.with_prefix(fmt::format("from {}", peer_)));
  return false;
}

bool FrameStream::begin_frame() {
  auto header = wire::decode_header(std::span<const uint8_t, wire::kHeaderBytes>(
      in_buffer_.data() + in_begin_, wire::kHeaderBytes));
  if (!header.ok()) return refuse_start(header.status());
  in_begin_ += wire::kHeaderBytes;
  in_header_ = *header;
  auto place = owner_->on_header(*this, in_header_);
  if (!open()) return false;
  if (!place.ok()) {
    fail(place.status());
    return false;
  }
  in_payload_ = place->data;
  in_room_ = std::min(place->room, in_header_.payload_bytes);
  in_done_ = 0;
  if (in_header_.payload_bytes == 0) return finish_frame();
  in_stage_ = ReceiveStage::kPayload;
  in_streamed_ = in_header_.payload_bytes > kInBufferBytes;
  if (in_streamed_) in_hasher_.reset();
  return true;
}

void FrameStream::make_room() {
  if (in_done_ < in_room_ || in_done_ == in_header_.payload_bytes) return;
  const PayloadPlace place = owner_->more_room(*this, in_header_, in_done_);
  in_payload_ = place.data;
  in_room_ = std::min(place.room, in_header_.payload_bytes);
}

// True when the payload is complete.
bool FrameStream::take_payload() {
  uint64_t left = std::min<uint64_t>(in_end_ - in_begin_, in_header_.payload_bytes - in_done_);
  while (left > 0) {
    if (in_payload_ != nullptr) make_room();
    const uint64_t bytes = in_payload_ == nullptr ? left : std::min(left, in_room_ - in_done_);
    const uint8_t* from = in_buffer_.data() + in_begin_;
    if (in_payload_ != nullptr) std::memcpy(in_payload_ + in_done_, from, bytes);
    if (in_streamed_) in_hasher_.update(from, bytes);
    in_begin_ += bytes;
    in_done_ += bytes;
    left -= bytes;
  }
  if (in_done_ < in_header_.payload_bytes) return false;
  in_stage_ = ReceiveStage::kTrailer;
  return true;
}

bool FrameStream::end_payload() {
  const uint64_t sent = wire::decode_trailer(std::span<const uint8_t, wire::kTrailerBytes>(
      in_buffer_.data() + in_begin_, wire::kTrailerBytes));
  in_begin_ += wire::kTrailerBytes;
  if (in_payload_ != nullptr) {  // not discarded
    const uint64_t found =
        in_streamed_ ? in_hasher_.digest() : hash64(in_payload_, in_header_.payload_bytes);
    if (found != sent) {
      damaged_ = true;
      fail(error(Code::kProtocol, "{} from {} has checksum {:016x}, its bytes have {:016x}",
                 describe(in_header_), peer_, sent, found));
      return false;
    }
  }
  return finish_frame();
}

bool FrameStream::finish_frame() {
  in_stage_ = ReceiveStage::kHeader;
  in_payload_ = nullptr;
  const Status status = owner_->on_frame(*this, in_header_);
  if (!open()) return false;
  if (!status.ok()) {
    fail(status);
    return false;
  }
  return true;
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
  while (open() && writable_ && !out_dead_ && (out_busy_ || begin_out())) {
    if (taken >= turn) {
      in_send_ = false;
      return true;
    }
    uint64_t allowed = turn;
    if (limited) {
      const int64_t now = reactor_.now_ns();
      allowed = std::min(turn - taken, reactor_.egress().available(now));
      if (allowed == 0) {
        reactor_.want_turn_at(*this, reactor_.egress().when_ns(kLimitedTurnBytes / 2, now));
        break;
      }
    }
    const int64_t sent = send_once(allowed);
    if (sent < 0) break;
    taken += static_cast<uint64_t>(sent);
  }
  in_send_ = false;
  if (taken > 0 && open() && !out_busy_) window_.idle(fd_, reactor_.now_ns());
  return false;
}

bool FrameStream::begin_out() {
  if (!owner_->next_frame(*this, out_)) return false;
  out_busy_ = true;
  out_header_ = wire::encode_header(out_.header);
  out_sent_ = 0;
  out_hashed_ = 0;
  const uint64_t bytes = out_.header.payload_bytes;
  if (bytes > kChunkBytes) {
    out_hasher_.reset();
  } else if (bytes > 0) {
    out_trailer_ = wire::encode_trailer(hash64(out_.payload, bytes));
    out_hashed_ = bytes;
  }
  return true;
}

// A long payload is hashed just before it is sent, a chunk at a time, so that it is read from
// memory once.
void FrameStream::hash_ahead() {
  const uint64_t bytes = out_.header.payload_bytes;
  const uint64_t done = out_sent_ > wire::kHeaderBytes ? out_sent_ - wire::kHeaderBytes : 0;
  if (out_hashed_ == bytes || done < out_hashed_) return;
  const uint64_t chunk = std::min(kChunkBytes, bytes - out_hashed_);
  out_hasher_.update(out_.payload + out_hashed_, chunk);
  out_hashed_ += chunk;
  if (out_hashed_ == bytes) out_trailer_ = wire::encode_trailer(out_hasher_.digest());
}

// Bytes sent, or -1 when the socket takes no more.
int64_t FrameStream::send_once(uint64_t allowed) {
  hash_ahead();
  const uint64_t bytes = out_.header.payload_bytes;
  const uint64_t trailer_at = wire::kHeaderBytes + bytes;
  const uint64_t total = wire::frame_bytes(bytes);
  iovec parts[3];
  int count = 0;
  uint64_t at = out_sent_;
  const auto part = [&](const uint8_t* base, uint64_t begin, uint64_t end) {
    end = std::min(end, out_sent_ + allowed);
    if (at < begin || at >= end) return;
    parts[count++] = {const_cast<uint8_t*>(base) + (at - begin), end - at};
    at = end;
  };
  part(out_header_.data(), 0, wire::kHeaderBytes);
  part(out_.payload, wire::kHeaderBytes, wire::kHeaderBytes + out_hashed_);
  if (out_hashed_ == bytes) part(out_trailer_.data(), trailer_at, total);
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = static_cast<size_t>(count);
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
  reactor_.egress().take(static_cast<uint64_t>(n));
  out_sent_ += static_cast<uint64_t>(n);
  window_.sent(fd_, static_cast<uint64_t>(n), reactor_.now_ns());
  if (out_sent_ == total) {
    out_busy_ = false;
    const OutFrame sent = out_;
    owner_->on_sent(*this, sent);
  }
  return n;
}

}  // namespace sotto::tcp
