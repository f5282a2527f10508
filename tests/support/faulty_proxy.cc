#include "tests/support/faulty_proxy.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>

#include "core/iface/unique_id.h"
#include "tests/support/ranks.h"

namespace sotto::test {
namespace {

sockaddr_in loopback(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  return address;
}

bool write_all(int fd, const std::vector<uint8_t>& data) {
  size_t done = 0;
  while (done < data.size()) {
    const ssize_t n = ::send(fd, data.data() + done, data.size() - done, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    done += static_cast<size_t>(n);
  }
  return true;
}

}  // namespace

struct FaultyProxy::Connection {
  int client = -1;
  int target = -1;
  std::thread forth, back;
  std::atomic<bool> stalled{false};

  // Ends both pumps; the descriptors stay valid until the object ends.
  void shut(bool reset) const {
    for (const int fd : {client, target}) {
      if (reset) {
        const linger abrupt{1, 0};
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &abrupt, sizeof abrupt);
        // An unconnect makes the kernel send a reset at once, which shutdown would not. Called by
        // number: ThreadSanitizer takes connect for the birth of the descriptor, which the other
        // pump reads from.
        sockaddr nobody{};
        nobody.sa_family = AF_UNSPEC;
        ::syscall(SYS_connect, fd, &nobody, sizeof nobody);
      }
      ::shutdown(fd, SHUT_RDWR);
    }
  }
  ~Connection() {
    shut(false);
    if (forth.joinable()) forth.join();
    if (back.joinable()) back.join();
    for (const int fd : {client, target}) {
      if (fd >= 0) ::close(fd);
    }
  }
};

FaultyProxy::FaultyProxy(const ProxyOptions& options) : options_(options) {
  listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = loopback(0);
  socklen_t length = sizeof address;
  if (listener_ < 0 ||
      ::bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 ||
      ::listen(listener_, 64) != 0 ||
      ::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    throw RankError(fmt::format("faulty proxy: {}", std::strerror(errno)));
  }
  port_ = ntohs(address.sin_port);
  acceptor_ = std::thread([this] { accept_main(); });
}

FaultyProxy::~FaultyProxy() {
  stop_ = true;
  ::shutdown(listener_, SHUT_RDWR);
  acceptor_.join();
  ::close(listener_);
  all_.clear();
}

void FaultyProxy::accept_main() noexcept {
  while (!stop_) {
    const int client = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (client < 0) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      return;
    }
    const int target = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const sockaddr_in address = loopback(options_.target_port);
    if (target < 0 ||
        ::connect(target, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
      ::close(client);
      if (target >= 0) ::close(target);
      continue;
    }
    const int on = 1;
    setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(target, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    auto connection = std::make_unique<Connection>();
    connection->client = client;
    connection->target = target;
    Connection& c = *connection;
    const int32_t index = connections_++;
    c.forth = std::thread([this, &c, index] { pump_main(c, index, true); });
    c.back = std::thread([this, &c, index] { pump_main(c, index, false); });
    std::lock_guard lock(mutex_);
    all_.push_back(std::move(connection));
  }
}

FaultyProxy::Verdict FaultyProxy::harm(std::vector<uint8_t>& chunk, uint64_t position,
                                       int32_t index, bool to_target, uint64_t* bit) {
  Verdict verdict = Verdict::kPass;
  uint64_t end = position + chunk.size();
  for (const ProxyFault& f : options_.faults) {
    if (f.to_target != to_target || (f.connection >= 0 && f.connection != index)) continue;
    switch (f.kind) {
      case ProxyFault::Kind::kFlip:
        if (f.at < position || f.at >= end) break;
        chunk[f.at - position] ^= static_cast<uint8_t>(1u << (*bit)++ % 8);
        ++faults_;
        break;
      case ProxyFault::Kind::kSwallow: {
        const uint64_t from = std::max(f.at, position);
        const uint64_t to = std::min(f.at + f.count, end);
        if (from >= to) break;
        const auto begin = chunk.begin() + static_cast<ptrdiff_t>(from - position);
        chunk.erase(begin, begin + static_cast<ptrdiff_t>(to - from));
        ++faults_;
        return verdict;  // positions have moved: one such fault per chunk
      }
      case ProxyFault::Kind::kClose:
      case ProxyFault::Kind::kReset:
      case ProxyFault::Kind::kStall:
        if (f.at < position || f.at >= end) break;
        chunk.resize(f.at - position);
        end = f.at;
        ++faults_;
        verdict = f.kind == ProxyFault::Kind::kClose   ? Verdict::kClose
                  : f.kind == ProxyFault::Kind::kReset ? Verdict::kReset
                                                       : Verdict::kStall;
        break;
    }
  }
  return verdict;
}

void FaultyProxy::strike(const ProxyFault& fault) {
  std::lock_guard lock(mutex_);
  if (fault.kind == ProxyFault::Kind::kFlip || fault.kind == ProxyFault::Kind::kSwallow) {
    strikes_.push_back(fault);
    return;
  }
  for (size_t i = 0; i < all_.size(); ++i) {
    if (fault.connection >= 0 && static_cast<size_t>(fault.connection) != i) continue;
    ++faults_;
    if (fault.kind == ProxyFault::Kind::kStall) {
      all_[i]->stalled = true;
    } else {
      all_[i]->shut(fault.kind == ProxyFault::Kind::kReset);
    }
  }
}

void FaultyProxy::harm_now(std::vector<uint8_t>& chunk, int32_t index, bool to_target,
                           uint64_t random) {
  std::lock_guard lock(mutex_);
  const auto fits = [&](const ProxyFault& f) {
    return f.to_target == to_target && (f.connection < 0 || f.connection == index);
  };
  const auto found = std::find_if(strikes_.begin(), strikes_.end(), fits);
  if (found == strikes_.end()) return;
  // Something of the chunk stays, so that a frame is never left out as a whole.
  const uint64_t at = chunk.size() == 1 ? 0 : 1 + random % (chunk.size() - 1);
  if (found->kind == ProxyFault::Kind::kFlip) {
    chunk[at] ^= static_cast<uint8_t>(1u << (random >> 32) % 8);
  } else {
    const auto begin = chunk.begin() + static_cast<ptrdiff_t>(at);
    chunk.erase(begin, begin + static_cast<ptrdiff_t>(std::min(found->count, chunk.size() - at)));
  }
  ++faults_;
  strikes_.erase(found);
}

void FaultyProxy::pump_main(Connection& connection, int32_t index, bool to_target) noexcept {
  const int from = to_target ? connection.client : connection.target;
  const int to = to_target ? connection.target : connection.client;
  std::mt19937_64 random(options_.seed * 7919 + static_cast<uint64_t>(index) * 2 +
                         (to_target ? 1 : 0));
  uint64_t bit = random() % 8;
  std::vector<uint8_t> chunk;
  for (uint64_t position = 0; !stop_;) {
    chunk.resize(1 + random() % options_.max_chunk);
    const ssize_t n = ::recv(from, chunk.data(), chunk.size(), 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      ::shutdown(to, SHUT_WR);
      return;
    }
    chunk.resize(static_cast<size_t>(n));
    if (options_.max_delay_us > 0) {
      const auto us =
          static_cast<int64_t>(random() % static_cast<uint64_t>(options_.max_delay_us + 1));
      std::this_thread::sleep_for(std::chrono::microseconds(us));
    }
    const Verdict verdict = harm(chunk, position, index, to_target, &bit);
    position += static_cast<uint64_t>(n);
    if (connection.stalled) return;
    if (!chunk.empty()) harm_now(chunk, index, to_target, random());
    bytes_passed_ += chunk.size();
    if (!write_all(to, chunk)) {
      ::shutdown(from, SHUT_RD);
      return;
    }
    if (verdict == Verdict::kStall) return;  // what comes fills the buffers
    if (verdict != Verdict::kPass) {
      connection.shut(verdict == Verdict::kReset);
      return;
    }
  }
}

UniqueId redirected(const UniqueId& id, uint16_t port) {
  UniqueIdFields fields = check(decode_unique_id(id), "redirected");
  fields.port = port;
  fields.addresses = "127.0.0.1";
  return check(encode_unique_id(fields));
}

}  // namespace sotto::test
