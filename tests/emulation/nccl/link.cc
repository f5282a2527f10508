#include "tests/emulation/nccl/link.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <random>

#include "tests/emulation/cuda/sync_model.h"

namespace sotto::fake_nccl {

using fake_cuda::Quiet;

namespace {

constexpr size_t kNameBytes = 64;
constexpr int kPollMs = 20;
constexpr uint32_t kLeave = 2, kAbort = 3;  // beside the channels

// Connections order nothing that a device does.
bool orders(LinkChannel channel) {
  return channel == LinkChannel::kData || channel == LinkChannel::kSetup;
}

struct Frame {
  uint64_t comm = 0;
  uint32_t kind = 0;  // LinkChannel, kLeave or kAbort
  uint32_t what = 0;
  uint64_t bytes = 0;
};

struct PeerRecord {
  int32_t rank = 0, size = 0;
  char name[kNameBytes] = {};
};

bool read_all(int fd, void* to, size_t n) {
  for (auto* p = static_cast<char*>(to); n > 0;) {
    const ssize_t got = recv(fd, p, n, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    p += got;
    n -= static_cast<size_t>(got);
  }
  return true;
}

bool write_all(int fd, const void* from, size_t n) {
  for (const auto* p = static_cast<const char*>(from); n > 0;) {
    const ssize_t put = ::send(fd, p, n, MSG_NOSIGNAL);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) return false;
    p += put;
    n -= static_cast<size_t>(put);
  }
  return true;
}

// Names without a file: they end with their socket.
sockaddr_un address_of(const std::string& name, socklen_t* bytes) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  *bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

std::string fresh_name() {
  static std::atomic<int> count{0};
  std::random_device random;
  return "fake-nccl-" + std::to_string(getpid()) + "-" + std::to_string(count++) + "-" +
         std::to_string(random());
}

int listen_at(const std::string& name) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  socklen_t bytes = 0;
  const sockaddr_un address = address_of(name, &bytes);
  if (fd < 0 || bind(fd, reinterpret_cast<const sockaddr*>(&address), bytes) != 0 ||
      listen(fd, 128) != 0) {
    if (fd >= 0) close(fd);
    return -1;
  }
  return fd;
}

int connect_to(const std::string& name) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  socklen_t bytes = 0;
  const sockaddr_un address = address_of(name, &bytes);
  if (fd >= 0 && connect(fd, reinterpret_cast<const sockaddr*>(&address), bytes) == 0) return fd;
  if (fd >= 0) close(fd);
  return -1;
}

// Waits until fd is readable; false: stopped.
bool await(int fd, const std::atomic<bool>& stop) {
  for (;;) {
    pollfd p{fd, POLLIN, 0};
    if (poll(&p, 1, kPollMs) > 0) return true;
    if (stop) return false;
  }
}

// Stands, to ThreadSanitizer, for the messages of a channel between two ranks: a receive comes
// after what its sender had done before.
void* edge_of(uint64_t comm, uint64_t channel, int from, int to) {
  static char edges[1024];
  const uint64_t key =
      comm ^ channel << 40 ^ static_cast<uint64_t>(from) << 20 ^ static_cast<uint64_t>(to);
  return &edges[key * 0x9e3779b97f4a7c15u >> 54];
}

// Collects the records of all ranks, then gives each all of them.
void serve_rendezvous(int listener) {
  std::vector<int> fds;
  std::vector<PeerRecord> records;
  for (;;) {
    const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    PeerRecord record;
    if (fd < 0) break;
    if (!read_all(fd, &record, sizeof record)) {
      close(fd);
      continue;
    }
    records.resize(static_cast<size_t>(record.size));
    fds.push_back(fd);
    records[static_cast<size_t>(record.rank)] = record;
    if (fds.size() == records.size()) break;
  }
  for (const int fd : fds) {
    write_all(fd, records.data(), records.size() * sizeof(PeerRecord));
    close(fd);
  }
  close(listener);
}

}  // namespace

std::string Link::make_rendezvous() {
  std::string name = fresh_name();
  const int listener = listen_at(name);
  if (listener < 0) return {};
  std::thread([listener] { serve_rendezvous(listener); }).detach();
  return name;
}

std::shared_ptr<Link> Link::make(const std::string& rendezvous, int rank, int size,
                                 const std::atomic<bool>& stop) {
  std::shared_ptr<Link> link(new Link(rank, size));
  PeerRecord mine;
  mine.rank = rank;
  mine.size = size;
  const std::string name = fresh_name();
  std::memcpy(mine.name, name.data(), name.size());
  const int listener = listen_at(name);
  const int root = connect_to(rendezvous);
  std::vector<PeerRecord> records(static_cast<size_t>(size));
  bool ok = listener >= 0 && root >= 0 && write_all(root, &mine, sizeof mine) &&
            await(root, stop) &&
            read_all(root, records.data(), records.size() * sizeof(PeerRecord));
  if (root >= 0) close(root);
  for (int r = 0; ok && r < rank; ++r) {
    const int fd = connect_to(records[static_cast<size_t>(r)].name);
    ok = fd >= 0 && write_all(fd, &rank, sizeof rank);
    link->peers_[static_cast<size_t>(r)].fd = fd;
  }
  for (int r = rank + 1; ok && r < size; ++r) {
    int from = -1;
    ok = await(listener, stop);
    if (!ok) break;
    const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    ok = fd >= 0 && read_all(fd, &from, sizeof from);
    if (ok) link->peers_[static_cast<size_t>(from)].fd = fd;
  }
  if (listener >= 0) close(listener);
  if (!ok) return nullptr;
  for (int r = 0; r < size; ++r) {
    if (r != rank)
      link->peers_[static_cast<size_t>(r)].reader =
          std::thread([p = link.get(), r] { p->read_from(r); });
  }
  return link;
}

Link::~Link() {
  for (Peer& p : peers_) {
    if (p.fd >= 0) shutdown(p.fd, SHUT_RDWR);
    if (p.reader.joinable()) p.reader.join();
    if (p.fd >= 0) close(p.fd);
  }
}

void Link::read_from(int peer) {
  Quiet quiet;
  Peer& p = peers_[static_cast<size_t>(peer)];
  Frame frame;
  while (read_all(p.fd, &frame, sizeof frame)) {
    Message message{frame.what, std::vector<char>(frame.bytes)};
    if (frame.bytes != 0 && !read_all(p.fd, message.data.data(), frame.bytes)) break;
    std::lock_guard lock(mutex_);
    if (frame.kind == kLeave || frame.kind == kAbort) {
      left_[{frame.comm, peer}] = frame.kind == kAbort;
    } else {
      inbox_[{frame.comm, frame.kind, static_cast<uint64_t>(peer)}].push_back(std::move(message));
    }
    changed_.notify_all();
  }
  std::lock_guard lock(mutex_);
  p.gone = true;
  changed_.notify_all();
}

bool Link::send(int peer, uint64_t comm, LinkChannel channel, uint32_t what, const void* data,
                size_t bytes) {
  fake_cuda::read_range(data, bytes);
  if (orders(channel))
    fake_cuda::release_edge(edge_of(comm, static_cast<uint64_t>(channel), rank_, peer));
  Quiet quiet;
  if (peer == rank_) {
    const auto* from = static_cast<const char*>(data);
    std::lock_guard lock(mutex_);
    inbox_[{comm, static_cast<uint64_t>(channel), static_cast<uint64_t>(peer)}].push_back(
        {what, std::vector<char>(from, from + bytes)});
    changed_.notify_all();
    return true;
  }
  Peer& p = peers_[static_cast<size_t>(peer)];
  const Frame frame{comm, static_cast<uint32_t>(channel), what, bytes};
  std::lock_guard lock(p.sending);
  return write_all(p.fd, &frame, sizeof frame) && write_all(p.fd, data, bytes);
}

Wait Link::receive(int peer, uint64_t comm, LinkChannel channel, const std::atomic<bool>& aborted,
                   Message* message) {
  {
    Quiet quiet;
    std::unique_lock lock(mutex_);
    auto& queue = inbox_[{comm, static_cast<uint64_t>(channel), static_cast<uint64_t>(peer)}];
    const auto gone = [&] {
      return peers_[static_cast<size_t>(peer)].gone || left_.contains({comm, peer});
    };
    changed_.wait(lock, [&] { return aborted || !queue.empty() || gone(); });
    if (aborted) return Wait::kAborted;
    if (queue.empty()) return Wait::kPeerGone;
    *message = std::move(queue.front());
    queue.pop_front();
  }
  if (orders(channel))
    fake_cuda::acquire_edge(edge_of(comm, static_cast<uint64_t>(channel), peer, rank_));
  return Wait::kGot;
}

void Link::leave(uint64_t comm, const std::vector<int>& members, bool abort) {
  Quiet quiet;
  for (const int r : members) {
    if (r == rank_) continue;
    Peer& p = peers_[static_cast<size_t>(r)];
    const Frame frame{comm, abort ? kAbort : kLeave, 0, 0};
    std::lock_guard lock(p.sending);
    write_all(p.fd, &frame, sizeof frame);
  }
}

bool Link::broken(uint64_t comm, const std::vector<int>& members) {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  for (const int r : members) {
    const auto left = left_.find({comm, r});
    if (left != left_.end() ? left->second : peers_[static_cast<size_t>(r)].gone) return true;
  }
  return false;
}

void Link::wake() {
  Quiet quiet;
  std::lock_guard lock(mutex_);
  changed_.notify_all();
}

}  // namespace sotto::fake_nccl
