// Urgent work beside bulk on real sockets: what is decided is the order of frames and operations,
// never a time. The rate limit only keeps the kernel from taking all of the bulk at once.
#include <gtest/gtest.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "tests/support/calls.h"
#include "tests/support/core_ranks.h"
#include "tests/support/ranks.h"
#include "tests/support/temp_dir.h"

namespace sotto::test {
namespace {

constexpr uint64_t kSegment = 64 * 1024;

WorldOptions slow_world(int32_t size, double mbit) {
  WorldOptions world = world_of("tcp", size);
  world.tcp.rate_limit_mbit = mbit;
  world.params.segment_bytes = kSegment;
  world.params.heartbeat_ms = 3'600'000;
  world.progress_thread = false;  // nothing moves before everybody has started everything
  return world;
}

// An all-reduce in place.
struct Sum {
  std::vector<float> data;
  OpRef op;

  explicit Sum(uint64_t n) : data(n, 1.0f) {}
  Status start(Comm& comm, int32_t priority) {
    CallOptions options;
    options.priority = priority;
    SOTTO_ASSIGN(op, comm.start(all_reduce_of(comm, data), options));
    return ok_status();
  }
  Status check(const Comm& comm) const {
    for (const float x : data) {
      if (x != static_cast<float>(comm.size())) return error(Code::kProtocol, "wrong sum {}", x);
    }
    return ok_status();
  }
};

// A TCP connection of this process: what its path takes and what may lie in its send buffer.
struct Buffer {
  uint64_t sent, packet, bytes;
};

std::vector<Buffer> send_buffers() {
  std::vector<Buffer> found;
  for (int fd = 0; fd < 1024; ++fd) {
    tcp_info info{};
    socklen_t size = sizeof info;
    if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) continue;
    int bytes = 0;
    size = sizeof bytes;
    if (::getsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, &size) != 0) continue;
    found.push_back({info.tcpi_bytes_acked, std::max(info.tcpi_pmtu, info.tcpi_snd_mss),
                     static_cast<uint64_t>(bytes)});
  }
  return found;
}

// Those of two ranks that carry bulk, after operations far apart: what a connection carries in a
// second must not decide how much its buffer holds.
std::vector<Buffer> buffers_of_bulk(const WorldOptions& world) {
  constexpr uint64_t kElements = 150'000;
  constexpr int kRounds = 20;
  std::vector<Buffer> buffers;
  RankBarrier barrier(2);
  const Status status = run_world(world, [&](const std::shared_ptr<Comm>& comm) -> Status {
    Sum sum(kElements);
    for (int round = 0; round < kRounds; ++round) {
      std::fill(sum.data.begin(), sum.data.end(), 1.0f);
      SOTTO_TRY(sum.start(*comm, 0));
      SOTTO_TRY(comm->finish(sum.op));
      SOTTO_TRY(sum.check(*comm));
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
    }
    barrier.wait();
    if (comm->rank() == 0) buffers = send_buffers();
    barrier.wait();
    return ok_status();
  });
  EXPECT_TRUE(status.ok()) << status.text();
  std::erase_if(buffers, [](const Buffer& b) { return b.sent < kRounds * kElements; });
  EXPECT_EQ(buffers.size(), 2u) << "a connection has two ends";
  return buffers;
}

// A receiver holds back the acknowledgement of a packet for 40 ms if nothing comes behind it, so a
// buffer that holds less than two stalls its sender.
TEST(TcpPressure, BuffersHoldSeveralPacketsWhateverConnectionsCarry) {
  WorldOptions world = world_of("tcp", 2);
  world.tcp.congestion_control = "reno";  // which every kernel has
  for (const Buffer& b : buffers_of_bulk(world)) EXPECT_GE(b.bytes, 4 * b.packet);
  // The kernel doubles what it was given, so an odd number of bytes loses one.
  world.tcp.congestion_control = "";  // three packets where it is BBR
  for (const Buffer& b : buffers_of_bulk(world)) EXPECT_GE(b.bytes + 1, 3 * b.packet);
}

// A receiver that is limited leaves in the kernel what it may not read yet. More than its buffer
// takes closes it, and a sender that finds it closed stands still for longer than the limit asks.
TEST(TcpPressure, UnderALimitBuffersHoldWhatIsHandedOverAtOnceAFewTimes) {
  WorldOptions world = world_of("tcp", 2);
  world.tcp.rate_limit_mbit = 100;
  for (const Buffer& b : buffers_of_bulk(world)) {
    EXPECT_GE(b.bytes, 4u * 16 * 1024);
    EXPECT_LT(b.bytes, 4 * b.packet);
  }
}

// The least urgent first, all before any byte has moved: they end the other way round.
TEST(TcpPressure, OperationsEndInTheOrderOfTheirPriority) {
  constexpr int32_t kLevels = 4;
  constexpr uint64_t kElements = 1 << 20;
  RankBarrier barrier(2);
  const Status status =
      run_world(slow_world(2, 400), [&](const std::shared_ptr<Comm>& comm) -> Status {
        std::vector<Sum> sums(kLevels, Sum(kElements));
        for (int32_t p = 0; p < kLevels; ++p) {
          SOTTO_TRY(sums[static_cast<size_t>(p)].start(*comm, p));
        }
        barrier.wait();
        for (int32_t p = kLevels - 1; p >= 0; --p) {
          SOTTO_TRY(comm->finish(sums[static_cast<size_t>(p)].op));
          for (int32_t lower = 0; lower < p; ++lower) {
            EXPECT_FALSE(sums[static_cast<size_t>(lower)].op->done())
                << "priority " << lower << " ended before " << p;
          }
        }
        for (const Sum& sum : sums) SOTTO_TRY(sum.check(*comm));
        return ok_status();
      });
  EXPECT_TRUE(status.ok()) << status.text();
}

// How many connections there are to each peer: with one, small messages share it with bulk.
class TcpTraced : public ::testing::TestWithParam<int64_t> {
 protected:
  std::string prefix() const { return directory_.path() + "/job"; }

  // The sizes of the messages of a rank to `peer`, in the order in which they left.
  std::vector<uint64_t> sent(int32_t rank, int32_t peer) const {
    std::ifstream file(fmt::format("{}.rank{}.json", prefix(), rank));
    const nlohmann::json events = nlohmann::json::parse(file, nullptr, false);
    std::vector<uint64_t> bytes;
    for (const auto& e : events) {
      if (e["ph"] == "X" && e["name"] == "send" && e["tid"] == 100 + 2 * peer)
        bytes.push_back(e["args"].value("bytes", uint64_t{0}));
    }
    return bytes;
  }

 private:
  TempDir directory_;
};

// From the moment when a small all-reduce is started, no more than the rest of the segment that is
// on its way goes before its message, whatever else waits and however urgent that is.
TEST_P(TcpTraced, ASmallAllReduceWaitsForOneSegmentOfBulkAtMost) {
  constexpr uint64_t kBulk = 8 << 20;  // bytes
  constexpr size_t kSmall = 10;
  WorldOptions world = slow_world(2, 400);
  world.params.trace = prefix();
  world.tcp.connections = GetParam();
  std::vector<uint64_t> sent_at_start[2];  // per rank and small all-reduce: bytes that had left
  const Status status = run_world(world, [&](const std::shared_ptr<Comm>& comm) -> Status {
    Sum bulk(kBulk / 4);
    SOTTO_TRY(bulk.start(*comm, 1));
    for (size_t i = 0; i < kSmall; ++i) {
      // Bulk has moved since the last one.
      const uint64_t until = comm->counters().moved.payload_bytes_sent + 2 * kSegment;
      const auto moved = [&] {
        return comm->counters().moved.payload_bytes_sent >= until || bulk.op->done();
      };
      comm->engine().wait_until(moved, 20'000'000);
      Sum small(1);
      sent_at_start[comm->rank()].push_back(comm->counters().moved.payload_bytes_sent);
      SOTTO_TRY(small.start(*comm, 0));
      SOTTO_TRY(comm->finish(small.op));
      SOTTO_TRY(small.check(*comm));
    }
    SOTTO_TRY(comm->finish(bulk.op));
    return bulk.check(*comm);
  });
  ASSERT_TRUE(status.ok()) << status.text();
  for (int32_t rank = 0; rank < 2; ++rank) {
    const std::vector<uint64_t> messages = sent(rank, 1 - rank);
    uint64_t before = 0;
    size_t small = 0, beside_bulk = 0;
    for (size_t at = 0; at < messages.size(); before += messages[at++]) {
      if (messages[at] != 4) continue;
      ASSERT_LT(small, sent_at_start[rank].size()) << "rank " << rank;
      EXPECT_LE(before - sent_at_start[rank][small], kSegment)
          << "bytes that went before message " << small << " of rank " << rank;
      ++small;
      if (at + 1 < messages.size() && messages[at + 1] != 4) ++beside_bulk;
    }
    EXPECT_EQ(small, kSmall);
    // Bulk that had been waiting before the small message left after it.
    EXPECT_GE(beside_bulk, 1u) << "rank " << rank;
  }
}

INSTANTIATE_TEST_SUITE_P(Connections, TcpTraced, ::testing::Values(1, 2));

}  // namespace
}  // namespace sotto::test
