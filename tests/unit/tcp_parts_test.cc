// The parts of the TCP transport that need no connection.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/base/log.h"
#include "transports/tcp/rate_limiter.h"
#include "transports/tcp/refusals.h"
#include "transports/tcp/rendezvous_server.h"
#include "transports/tcp/send_window.h"
#include "transports/tcp/socket_settings.h"

namespace sotto::tcp {
namespace {

TEST(RateLimiter, BoundsWhatPassesInAnyTime) {
  RateLimiter limiter;
  limiter.set_rate(100, 0);  // 12500 bytes a millisecond
  EXPECT_EQ(limiter.available(0), 65536u);
  limiter.take(65536);
  EXPECT_EQ(limiter.available(0), 0u);
  EXPECT_EQ(limiter.available(1'000'000), 12500u);
  EXPECT_EQ(limiter.when_ns(25000, 1'000'000), 2'000'001);
  uint64_t passed = 0;
  int64_t now = 1'000'000;
  limiter.take(limiter.available(now));
  for (; now < 1'001'000'000; now += 137'000) {
    const uint64_t n = limiter.available(now);
    limiter.take(n);
    passed += n;
  }
  EXPECT_NEAR(static_cast<double>(passed), 12.5e6, 0.01 * 12.5e6);
}

TEST(RateLimiter, TimeIsNotLostWhileBytesWait) {
  RateLimiter limiter;
  limiter.set_rate(100, 0);
  limiter.take(limiter.available(0));
  limiter.when_ns(1000, 0);
  EXPECT_EQ(limiter.available(20'000'000), 250'000u) << "20 ms of a busy link";
  limiter.take(200'000);
  EXPECT_EQ(limiter.available(900'000'000), 65536u) << "then it was idle";
}

TEST(RateLimiter, DebtIsPaidBack) {
  RateLimiter limiter;
  limiter.set_rate(8, 0);  // a byte in a microsecond
  limiter.take(65536 + 1000);
  EXPECT_EQ(limiter.available(1'000'000), 0u);
  EXPECT_EQ(limiter.available(1'500'000), 500u);
}

TEST(RateLimiter, WithoutARateNothingIsHeldBack) {
  RateLimiter limiter;
  limiter.set_rate(0, 0);
  limiter.take(1u << 30);
  EXPECT_EQ(limiter.available(0), UINT64_MAX);
}

// What is logged while it lives.
class Lines {
 public:
  Lines() { set_log(&Lines::take, &lines); }
  ~Lines() { set_log(nullptr, nullptr); }
  std::vector<std::string> lines;

 private:
  static void take(void* user, int32_t /*level*/, const char* text) {
    static_cast<std::vector<std::string>*>(user)->emplace_back(text);
  }
};

TEST(RefusalLog, OneLinePerCauseAndHost) {
  const Lines log;
  RefusalLog refusals("rendezvous at 127.0.0.1:4000");
  for (int i = 0; i < 100; ++i) {
    const std::string port = std::to_string(1000 + i);
    refusals.add("size", true, "10.0.0.1:" + port, "sizes differ, " + port);
    refusals.add("garbage", false, "10.0.0.1:" + port, "no frame, " + port);
    refusals.add("garbage", false, "[fd00::1]:" + port, "no frame, " + port);
  }
  ASSERT_EQ(log.lines.size(), 3u);
  EXPECT_EQ(log.lines[0].rfind("rendezvous at 127.0.0.1:4000: connection refused: sizes differ", 0),
            0u)
      << log.lines[0];
  EXPECT_EQ(refusals.count(), 300u);
}

TEST(RefusalLog, ManyHostsFillNeitherMemoryNorLog) {
  const Lines log;
  RefusalLog refusals("here");
  for (int i = 0; i < 10'000; ++i)
    refusals.add("garbage", false, fmt::format("10.0.{}.{}:1", i / 256, i % 256), "noise");
  EXPECT_LT(log.lines.size(), RefusalLog::kMaxEntries);
  EXPECT_LT(refusals.summary().size(), 1000u);
  refusals.add("size", true, "10.1.0.1:1", "sizes differ");
  EXPECT_EQ(refusals.summary().rfind("sizes differ; noise", 0), 0u)
      << "ranks come first: " << refusals.summary();
}

TEST(RefusalLog, WhatAnUnknownPeerSendsIsOneLine) {
  const Lines log;
  RefusalLog refusals("here");
  refusals.add("size", true, "h:1", "host \"a\nsotto[1] error: all is lost\x1b[2J\"");
  EXPECT_EQ(log.lines.at(0).find('\n'), std::string::npos);
  EXPECT_EQ(log.lines.at(0).find('\x1b'), std::string::npos);
  EXPECT_EQ(printable(std::string(1000, 'x'), 10), std::string(10, 'x'));
  EXPECT_EQ(refusals.summary().find('\n'), std::string::npos);
}

TEST(Rendezvous, WhoDidNotCome) {
  EXPECT_EQ(did_not_come("ranks 2, 5 to 7"), "ranks 2, 5 to 7 did not come");
  EXPECT_EQ(did_not_come("rank 2 (turned away: a (b))"),
            "rank 2 did not come (turned away: a (b))");
}

TEST(SocketSettings, ControlSocketsAreWatched) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ASSERT_GE(fd, 0);
  const auto value = [fd](int level, int option) {
    int number = -1;
    socklen_t length = sizeof number;
    EXPECT_EQ(::getsockopt(fd, level, option, &number, &length), 0);
    return number;
  };
  SocketSettings sockets;
  sockets.watch(fd);
  EXPECT_EQ(value(SOL_SOCKET, SO_KEEPALIVE), 0) << "no limit";
  sockets.user_timeout_ms = 30'000;
  sockets.watch(fd);
  EXPECT_EQ(value(IPPROTO_TCP, TCP_USER_TIMEOUT), 30'000);
  EXPECT_EQ(value(SOL_SOCKET, SO_KEEPALIVE), 1);
  EXPECT_EQ(value(IPPROTO_TCP, TCP_KEEPIDLE), 10);
  EXPECT_EQ(value(IPPROTO_TCP, TCP_KEEPINTVL), 10);
  sockets.user_timeout_ms = 100;
  sockets.watch(fd);
  EXPECT_EQ(value(IPPROTO_TCP, TCP_KEEPIDLE), 1);
  ::close(fd);
}

SendWindow::Path path(uint64_t rate, uint64_t rtt_us, uint64_t packet = 1500) {
  SendWindow::Path p;
  p.rate = p.all = rate;
  p.rtt_us = rtt_us;
  p.wait_us = rtt_us + 1000;
  p.packet = packet;
  p.at_once = 256 * 1024;
  return p;
}

TEST(SendWindow, TwiceWhatThePathCarries) {
  // 125 MB/s, 50 ms and half a millisecond that the sender may be away.
  EXPECT_EQ(SendWindow::bytes_for(path(125'000'000, 50'000)), 32768u + 12'625'000);
  EXPECT_EQ(SendWindow::bytes_for(path(0, 50'000)), 32768u);
}

TEST(SendWindow, HoldsSeveralFullPackets) {
  for (const uint64_t packet : {1280, 1500, 9000, 16384, 65535}) {
    for (const uint64_t rate : {0, 1'000, 14'000'000, 140'000'000, 2'000'000'000}) {
      const uint64_t bytes = SendWindow::bytes_for(path(rate, 5, packet));
      EXPECT_GE(bytes, 4 * packet) << rate;
      EXPECT_GE(bytes, SendWindow::bytes_for(path(rate, 5, 1500))) << packet;
    }
  }
  EXPECT_LE(SendWindow::bytes_for(path(14'000'000, 5, 65535)), 425'984u)
      << "what fits without a change of net.core.wmem_max";
}

TEST(SendWindow, HoldsWhatALimitLetsPassAtOnceSeveralTimes) {
  SendWindow::Path p = path(14'000'000, 5, 65535);
  p.at_once = 16384;
  EXPECT_EQ(SendWindow::bytes_for(p), 6u * 16384);
  p.packet = 1500;
  EXPECT_EQ(SendWindow::bytes_for(p), SendWindow::bytes_for(path(14'000'000, 5)));
}

TEST(SendWindow, HoldsMoreWhereBytesWaitForNoLink) {
  SendWindow::Path p = path(300'000'000, 100);
  const uint64_t behind_a_link = SendWindow::bytes_for(p);
  EXPECT_EQ(behind_a_link, 32768u + 2 * 300 * 600);
  p.wait_us = 200;
  EXPECT_EQ(SendWindow::bytes_for(p), 32768u + 2 * 300 * 2100);
  p.packet = 65535;
  EXPECT_EQ(SendWindow::bytes_for(p), std::max<uint64_t>(behind_a_link, 6 * 65535)) << "loopback";
  // A link of 1 Gbit/s, whatever the bytes did not wait for.
  p = path(125'000'000, 100);
  p.wait_us = 0;
  EXPECT_EQ(SendWindow::bytes_for(p), 32768u + 2 * 125 * 600);
}

TEST(SendWindow, HoldsFewPacketsOfLoopbackWhereTheyArePaced) {
  SendWindow::Path p = path(2'000'000'000, 20, 65535);
  const uint64_t unpaced = SendWindow::bytes_for(p);
  EXPECT_EQ(unpaced, 32768u + 2 * 2000 * 520);
  p.paced = true;
  for (const uint64_t rate : {0ull, 1'000'000ull, 2'000'000'000ull}) {
    p.rate = p.all = rate;
    EXPECT_EQ(SendWindow::bytes_for(p), 3u * 65535) << rate;
  }
  // An emulated delay, and a limit that lets less pass at once.
  p.rtt_us = 50'000;
  EXPECT_EQ(SendWindow::bytes_for(p), 32768u + 200'000'000);
  p = path(14'000'000, 5, 65535);
  p.at_once = 16384;
  const uint64_t limited = SendWindow::bytes_for(p);
  p.paced = true;
  EXPECT_EQ(SendWindow::bytes_for(p), limited);
  // Links are paced as they should be.
  p = path(125'000'000, 50'000);
  p.paced = true;
  EXPECT_EQ(SendWindow::bytes_for(p), SendWindow::bytes_for(path(125'000'000, 50'000)));
}

constexpr int64_t kMs = 1'000'000;

// Sends `pieces` pieces of 100 000 bytes, each of which takes `piece_ns` until it is acknowledged;
// the next is handed over while it is on its way.
void burst(PathRate* rate, uint64_t* acked, int64_t* now_ns, int pieces, int64_t piece_ns) {
  for (int i = 0; i < pieces; ++i) {
    rate->sent(100'000, *now_ns);
    *now_ns += piece_ns;
    *acked += 100'000;
    rate->look(*acked, 100'000, *now_ns);
  }
  rate->idle();
}

TEST(PathRate, PausesDoNotCount) {
  // 100 MB/s while there is something to send: 4 ms of it in every 200.
  PathRate rate;
  uint64_t acked = 1;
  int64_t now = 77 * kMs;
  rate.start(acked);
  for (int i = 0; i < 100; ++i) {
    burst(&rate, &acked, &now, 4, kMs);
    now += 196 * kMs;
  }
  EXPECT_NEAR(static_cast<double>(rate.bytes_per_second()), 100e6, 1e6);
}

TEST(PathRate, WhatDrainsInAPauseDoesNotCount) {
  // All but the first of 4 pieces is acknowledged behind the burst, as from a full buffer.
  PathRate rate;
  int64_t now = 0;
  uint64_t handed = 0;
  rate.start(0);
  for (int i = 0; i < 100; ++i) {
    const uint64_t before = handed;
    for (int piece = 0; piece < 4; ++piece) {
      rate.sent(100'000, now);
      handed += 100'000;
    }
    now += kMs;
    rate.look(before + 100'000, 300'000, now);
    rate.idle();
    now += 50 * kMs;
  }
  EXPECT_NEAR(static_cast<double>(rate.bytes_per_second()), 100e6, 1e6);
}

TEST(PathRate, TheHighestCountsAndFades) {
  PathRate rate;
  uint64_t acked = 0;
  int64_t now = 0;
  rate.start(0);
  burst(&rate, &acked, &now, 100, kMs);
  const uint64_t fast = rate.bytes_per_second();
  EXPECT_NEAR(static_cast<double>(fast), 100e6, 1e6);
  burst(&rate, &acked, &now, 4, 10 * kMs);
  EXPECT_GT(rate.bytes_per_second(), fast / 10 * 9);
  burst(&rate, &acked, &now, 400, 10 * kMs);
  EXPECT_NEAR(static_cast<double>(rate.bytes_per_second()), 10e6, 1e6);
}

TEST(PathRate, TellsHowLongBytesAreOnTheWay) {
  // 100 000 bytes on the way at 100 MB/s: a millisecond; at 1 GB/s a tenth of it, at once.
  PathRate rate;
  uint64_t acked = 0;
  int64_t now = 0;
  rate.start(0);
  burst(&rate, &acked, &now, 1000, kMs);
  EXPECT_NEAR(static_cast<double>(rate.wait_us()), 1000, 10);
  burst(&rate, &acked, &now, 400, kMs / 10);
  EXPECT_NEAR(static_cast<double>(rate.wait_us()), 100, 10);
}

TEST(SendShares, ConnectionsThatShareALinkAimAtTheSameRate) {
  SendShares shares;
  EXPECT_EQ(shares.rate_for(40), 40u) << "nothing is known";
  shares.changed(0, 40);
  shares.changed(0, 50);
  shares.changed(0, 60);
  for (const uint64_t own : {40, 50, 60}) EXPECT_EQ(shares.rate_for(own), 50u);
  shares.changed(60, 90);
  EXPECT_EQ(shares.rate_for(90), 60u);
  shares.changed(90, 0);
  EXPECT_EQ(shares.rate_for(50), 45u) << "one is gone";
}

TEST(SendShares, NoPathIsHeldBelowItsRateNorFlooded) {
  SendShares shares;
  shares.changed(0, 1'000'000);
  for (int slow = 0; slow < 7; ++slow) shares.changed(0, 1'000);
  EXPECT_EQ(shares.rate_for(1'000'000), 500'000u);  // windows are twice what the path carries
  EXPECT_EQ(shares.rate_for(1'000), 2'000u);
}

TEST(RankList, Ranges) {
  EXPECT_EQ(rank_list({}), "");
  EXPECT_EQ(rank_list({3}), "3");
  EXPECT_EQ(rank_list({3, 4}), "3, 4");
  EXPECT_EQ(rank_list({0, 2, 3, 4, 7, 9, 10, 11, 12}), "0, 2 to 4, 7, 9 to 12");
}

}  // namespace
}  // namespace sotto::tcp
