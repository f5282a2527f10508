#include "tests/support/faulty_proxy.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <bit>
#include <future>

#include "core/iface/unique_id.h"

namespace sotto::test {
namespace {

using Kind = ProxyFault::Kind;

sockaddr_in loopback(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  return address;
}

// Takes one connection and gives everything back, until its end.
class Echo {
 public:
  Echo() : listener_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address = loopback(0);
    socklen_t length = sizeof address;
    EXPECT_EQ(::bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    EXPECT_EQ(::listen(listener_, 4), 0);
    EXPECT_EQ(::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &length), 0);
    port = ntohs(address.sin_port);
    thread_ = std::thread([this] { serve(); });
  }
  ~Echo() {
    ::shutdown(listener_, SHUT_RDWR);
    thread_.join();
    ::close(listener_);
  }
  uint16_t port = 0;

 private:
  void serve() const {
    const int fd = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) return;
    char buffer[4096];
    for (ssize_t n; (n = ::recv(fd, buffer, sizeof buffer, 0)) > 0;) {
      if (::send(fd, buffer, static_cast<size_t>(n), MSG_NOSIGNAL) != n) break;
    }
    ::close(fd);
  }
  int listener_;
  std::thread thread_;
};

struct Reply {
  std::vector<uint8_t> data;
  int error = 0;  // how it ended: 0 in order, or an errno
};

// Sends bytes to the echo through the proxy and reads until the end, or for at most so many seconds
// without any byte.
Reply through(FaultyProxy& proxy, const std::vector<uint8_t>& data, int64_t limit_s = 60) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in address = loopback(proxy.port());
  EXPECT_EQ(::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  const timeval limit{limit_s, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  auto writer = std::async(std::launch::async, [&] {
    size_t done = 0;
    while (done < data.size()) {
      const ssize_t n = ::send(fd, data.data() + done, data.size() - done, MSG_NOSIGNAL);
      if (n <= 0) return;
      done += static_cast<size_t>(n);
    }
    ::shutdown(fd, SHUT_WR);
  });
  Reply reply;
  uint8_t buffer[4096];
  for (;;) {
    const ssize_t n = ::recv(fd, buffer, sizeof buffer, 0);
    if (n < 0) reply.error = errno;
    if (n <= 0) break;
    reply.data.insert(reply.data.end(), buffer, buffer + n);
  }
  ::shutdown(fd, SHUT_RDWR);
  writer.wait();
  ::close(fd);
  return reply;
}

std::vector<uint8_t> numbers(size_t n) {
  std::vector<uint8_t> data(n);
  for (size_t i = 0; i < n; ++i) data[i] = static_cast<uint8_t>(i * 7 + i / 256);
  return data;
}

struct Passage {
  explicit Passage(std::vector<ProxyFault> faults, uint64_t max_chunk = 65536, int64_t delay_us = 0)
      : proxy({.target_port = echo.port,
               .seed = 5,
               .max_delay_us = delay_us,
               .max_chunk = max_chunk,
               .faults = std::move(faults)}) {}
  Echo echo;
  FaultyProxy proxy;
};

TEST(FaultyProxy, PassesEverything) {
  Passage p({}, 100, 50);
  const auto data = numbers(20'000);
  const Reply reply = through(p.proxy, data);
  EXPECT_EQ(reply.data, data);
  EXPECT_EQ(reply.error, 0);
  EXPECT_EQ(p.proxy.bytes_passed(), 40'000u);
  EXPECT_EQ(p.proxy.connections(), 1);
  EXPECT_EQ(p.proxy.faults(), 0u);
}

TEST(FaultyProxy, FlipsOneBit) {
  for (const bool to_target : {true, false}) {
    Passage p({{.kind = Kind::kFlip, .to_target = to_target, .at = 777}}, 100);
    const auto data = numbers(2'000);
    const Reply reply = through(p.proxy, data);
    ASSERT_EQ(reply.data.size(), data.size());
    for (size_t i = 0; i < data.size(); ++i) {
      EXPECT_EQ(std::popcount(static_cast<uint8_t>(reply.data[i] ^ data[i])), i == 777 ? 1 : 0)
          << i;
    }
    EXPECT_EQ(p.proxy.faults(), 1u);
  }
}

TEST(FaultyProxy, SwallowsBytes) {
  Passage p({{.kind = Kind::kSwallow, .at = 500, .count = 300}}, 64);
  auto data = numbers(2'000);
  const Reply reply = through(p.proxy, data);
  data.erase(data.begin() + 500, data.begin() + 800);
  EXPECT_EQ(reply.data, data);
  EXPECT_GE(p.proxy.faults(), 1u);
}

TEST(FaultyProxy, ClosesAtAByte) {
  Passage p({{.kind = Kind::kClose, .to_target = false, .at = 1234}}, 100);
  const auto data = numbers(5'000);
  const Reply reply = through(p.proxy, data);
  EXPECT_EQ(reply.data, std::vector<uint8_t>(data.begin(), data.begin() + 1234));
}

TEST(FaultyProxy, ResetsAtAByte) {
  Passage p({{.kind = Kind::kReset, .to_target = false, .at = 10}}, 100);
  const Reply reply = through(p.proxy, numbers(5'000));
  EXPECT_EQ(reply.error, ECONNRESET);
  EXPECT_LE(reply.data.size(), 10u);
}

TEST(FaultyProxy, StallsAtAByte) {
  Passage p({{.kind = Kind::kStall, .to_target = false, .at = 1000}}, 100);
  const auto data = numbers(5'000);
  const Reply reply = through(p.proxy, data, 5);
  EXPECT_EQ(reply.error, EAGAIN) << "the connection stays open";
  EXPECT_EQ(reply.data, std::vector<uint8_t>(data.begin(), data.begin() + 1000));
}

TEST(FaultyProxy, RedirectsAUniqueId) {
  UniqueIdFields fields;
  fields.kind = IdKind::kTcp;
  fields.port = 1;
  fields.token = 99;
  fields.addresses = "10.0.0.1,127.0.0.1";
  const UniqueIdFields other =
      decode_unique_id(redirected(encode_unique_id(fields).take(), 4242)).take();
  EXPECT_EQ(other.port, 4242);
  EXPECT_EQ(other.token, 99u);
  EXPECT_EQ(other.addresses, "127.0.0.1");
}

}  // namespace
}  // namespace sotto::test
