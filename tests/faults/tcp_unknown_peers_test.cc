// Ranks as processes whose ports are crowded by thousands of connections that say nothing, who run
// out of descriptors, or who meet a coordinator that announces more than it sends.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>

#include "core/base/log.h"
#include "core/cpu/cpu_device.h"
#include "core/iface/unique_id.h"
#include "tests/conformance/transport_suite.h"
#include "tests/support/core_ranks.h"
#include "tests/support/processes.h"
#include "tests/support/reserved_port.h"
#include "tests/support/sanitized.h"
#include "tests/support/unknown_peer.h"
#include "transports/tcp/tcp_backend.h"

namespace sotto::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;
using wire::FrameKind;

TransportCase tcp_case(uint16_t listen_port) {
  return {"tcp", [listen_port](const Clock& clock) {
            TcpOptions options;
            options.clock = &clock;
            options.heartbeat_ms = 3'600'000;
            options.listen_port = listen_port;
            return make_tcp_backend(options);
          }};
}

std::atomic<int> g_warnings{0};
void count_warning(void* /*user*/, int32_t /*level*/, const char* message) {
  ++g_warnings;
  std::fprintf(stderr, "%s\n", message);
}

void limit_descriptors(rlim_t count) {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = count;
  require(::setrlimit(RLIMIT_NOFILE, &limit) == 0, "setrlimit");
}

// The lowest descriptor that is free.
rlim_t next_descriptor() {
  const int fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  ::close(fd);
  return static_cast<rlim_t>(fd);
}

int64_t cpu_ms() {
  rusage used{};
  ::getrusage(RUSAGE_SELF, &used);
  return (used.ru_utime.tv_sec + used.ru_stime.tv_sec) * 1000 +
         (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1000;
}

Status join_at(RankKit& kit, uint16_t port, int64_t timeout_us) {
  JoinRequest request;
  request.rank = kit.rank;
  request.size = kit.size;
  request.address = fmt::format("tcp://127.0.0.1:{}", port);
  request.deadline = kit.in(timeout_us);
  auto joined = kit.backend->join(request, kit.driver);
  if (joined.ok()) kit.control = joined.take();
  return joined.status();
}

struct Ports {
  uint16_t rendezvous = 0, data = 0;
  static Ports parse(const std::string& text) {
    const size_t comma = text.find(',');
    return {static_cast<uint16_t>(std::stoi(text)),
            static_cast<uint16_t>(std::stoi(text.substr(comma + 1)))};
  }
};

// Two ranks with 1024 descriptors each meet and exchange messages.
SOTTO_RANK_MAIN(unknown_peers_at_set_up) {
  const Ports ports = Ports::parse(self.argument);
  limit_descriptors(1024);
  set_log(count_warning, nullptr);
  RankKit kit(tcp_case(self.rank == 1 ? ports.data : 0), self.rank, self.size);
  if (self.rank == 1) self.at("before join");
  check(join_at(kit, ports.rendezvous, 40'000'000));
  // Rank 1 listens for data connections now; the other one connects when it is told to.
  if (self.rank == 0) self.at("before connect");
  kit.connect();
  run_messages(kit, {{0, 0, 1, 0, 0, 100'000}, {0, 1, 0, 0, 0, 100'000}}, 1, 1);
  kit.finish();
  self.say(fmt::format("{} warnings", g_warnings.load()));
  return 0;
}

TEST(TcpUnknownPeersFault, TwoThousandSilentConnectionsAtEachPort) {
  constexpr int kCrowd = 2000;
  if (const std::string why = allow_descriptors(2 * kCrowd + 200); !why.empty())
    GTEST_SKIP() << why;
  const ReservedPort rendezvous, data;
  Processes ranks("unknown_peers_at_set_up", 2,
                  {.argument = fmt::format("{},{}", rendezvous.number(), data.number()),
                   .stop_at = {"1:before join", "0:before connect"}});
  UnknownPeer(rendezvous.number()).hang_up();  // it listens
  const IdleCrowd first(rendezvous.number(), kCrowd);
  ranks.await(1, "before join");
  ranks.go(1);
  ranks.await(0, "before connect");
  UnknownPeer(data.number()).hang_up();
  const IdleCrowd second(data.number(), kCrowd);
  ranks.go(0);
  for (const int rank : {0, 1}) {
    const int warnings = std::stoi(ranks.message(rank));
    EXPECT_LE(warnings, 4) << ranks.prefixed_output();
  }
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
}

// What says nothing is closed by itself; what comes and goes as fast as it can is let in so slowly
// that it costs next to nothing.
SOTTO_RANK_MAIN(unknown_peers_late) {
  set_log(count_warning, nullptr);
  RankKit kit(tcp_case(0), self.rank, self.size);
  UniqueId id{};
  if (self.rank == 0) {
    id = check(kit.backend->make_unique_id(Reach::kHost));
    self.say(fmt::format("{}", check(decode_unique_id(id)).port));
  }
  JoinRequest request;
  request.rank = 0;
  request.size = 1;
  request.id = id;
  request.deadline = kit.in(10'000'000);
  kit.control = check(kit.backend->join(request, kit.driver));
  self.at("alone");
  const int64_t before = cpu_ms();
  kit.drive([] { return false; }, 8'000'000);
  self.say(fmt::format("{} ms; {} warnings; {}", cpu_ms() - before, g_warnings.load(),
                       next_descriptor()));
  return 0;
}

TEST(TcpUnknownPeersFault, AfterTheSetUpACrowdCostsLittle) {
  Processes rank("unknown_peers_late", 1, {.stop_at = {"0:alone"}});
  const auto port = static_cast<uint16_t>(std::stoi(rank.message(0)));
  rank.await(0, "alone");
  const IdleCrowd crowd(port, 40);
  UnknownPeer half(port);  // begins to say something
  half.send(frame_of(FrameKind::kJoin, wire::Join{}.encode()).substr(0, 100));
  rank.go(0);
  std::jthread scanner([port](const std::stop_token& stop) {
    try {
      while (!stop.stop_requested()) const IdleCrowd scan(port, 20);
    } catch (const RankError&) {  // the rank has ended
    }
  });
  const std::string said = rank.message(0);
  scanner.request_stop();
  std::printf("while unknown peers came: %s\n", said.c_str());
  EXPECT_LT(std::stoi(said), kSanitized ? 4000 : 800) << said << " of CPU in 8 s";
  EXPECT_EQ(crowd.open(), 0) << "those who say nothing are closed after some seconds";
  half.receive_all(0);
  EXPECT_TRUE(half.closed());
  EXPECT_THAT(said, testing::ContainsRegex("; [0-3] warnings")) << rank.prefixed_output();
  rank.wait_all();
  EXPECT_EQ(rank.failure(), "") << rank.prefixed_output();
}

// Some descriptors are left when others connect.
SOTTO_RANK_MAIN(unknown_peers_few_descriptors) {
  const Ports ports = Ports::parse(self.argument);
  RankKit kit(tcp_case(0), self.rank, self.size);
  if (self.rank == 0) {
    // One for the listener, one for the resolver of names, and little more.
    limit_descriptors(next_descriptor() + 5);
    set_log(count_warning, nullptr);
  } else {
    self.at("before join");
  }
  check(join_at(kit, ports.rendezvous, 40'000'000));
  self.say(fmt::format("{} warnings", g_warnings.load()));
  kit.barrier();
  kit.control->leave(kit.in(5'000'000));
  return 0;
}

// What cannot run where no descriptor is left.
constexpr bool kNeedsSpareDescriptors = kSanitized && !kThreadSanitizer;
constexpr const char* kWhySpareDescriptors =
    "UBSan opens a pipe to see whether memory is there, and takes none for a bad object";

TEST(TcpUnknownPeersFault, WithoutDescriptorsTheOldestMakeRoom) {
  if (kNeedsSpareDescriptors) GTEST_SKIP() << kWhySpareDescriptors;
  const ReservedPort port;
  Processes ranks("unknown_peers_few_descriptors", 2,
                  {.argument = fmt::format("{},0", port.number()), .stop_at = {"1:before join"}});
  ranks.await(1, "before join");
  UnknownPeer(port.number()).hang_up();
  const IdleCrowd crowd(port.number(), 12);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  ranks.go(1);
  EXPECT_LE(std::stoi(ranks.message(0)), 4) << ranks.prefixed_output();
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
  EXPECT_THAT(ranks.output(0), HasSubstr("Too many open files"));
}

// Ranks connect where hardly a descriptor is left, or none: the set-up ends, whatever its end is.
SOTTO_RANK_MAIN(unknown_peers_last_descriptor) {
  const Ports ports = Ports::parse(self.argument);
  RankKit kit(tcp_case(0), self.rank, self.size);
  if (self.rank == 0) {
    limit_descriptors(next_descriptor() + ports.data);
  } else {
    self.at("before join");
  }
  const Status joined = join_at(kit, ports.rendezvous, 1'500'000);
  self.say(fmt::format("{} {}", cpu_ms(), joined.text()));
  if (!joined.ok()) return 0;
  kit.barrier();
  kit.control->leave(kit.in(5'000'000));
  return 0;
}

TEST(TcpUnknownPeersFault, TheLastDescriptorIsOfferedOnce) {
  if (kNeedsSpareDescriptors) GTEST_SKIP() << kWhySpareDescriptors;
  for (int spare = 0; spare < 5; ++spare) {
    SCOPED_TRACE(spare);
    const ReservedPort port;
    Processes ranks(
        "unknown_peers_last_descriptor", 2,
        {.argument = fmt::format("{},{}", port.number(), spare), .stop_at = {"1:before join"}});
    ranks.await(1, "before join");
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    ranks.go(1);
    const std::string said = ranks.message(0);
    std::printf("%d spare: %s\n", spare, said.c_str());
    EXPECT_LT(std::stoi(said), kSanitized ? 1400 : 700) << said;
    ranks.wait_all();
    EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
  }
}

// Rank 2 has descriptors to meet the others, and too few for the data connections that they make.
SOTTO_RANK_MAIN(unknown_peers_no_descriptors) {
  const Ports ports = Ports::parse(self.argument);
  TransportCase which = tcp_case(0);
  which.make = [](const Clock& clock) {
    TcpOptions options;
    options.clock = &clock;
    options.connections = 16;
    return make_tcp_backend(options);
  };
  RankKit kit(which, self.rank, self.size);
  check(join_at(kit, ports.rendezvous, 40'000'000));
  if (self.rank == 2) limit_descriptors(next_descriptor() + 6);
  const Status status = kit.connected(40'000'000).status();
  self.say(fmt::format("{}: {}", code_name(status.code()), status.text()));
  self.at("told");
  return 0;
}

TEST(TcpUnknownPeersFault, WithoutDescriptorsForDataConnectionsTheGroupFailsWithTheReason) {
  if (kNeedsSpareDescriptors) GTEST_SKIP() << kWhySpareDescriptors;
  const ReservedPort port;
  Processes ranks(
      "unknown_peers_no_descriptors", 3,
      {.argument = fmt::format("{},0", port.number()), .stop_at = {"0:told", "1:told", "2:told"}});
  for (const int rank : {0, 1, 2}) {
    EXPECT_THAT(ranks.message(rank),
                AllOf(StartsWith("TRANSPORT: rank 2 (pid"), HasSubstr("from rank(s) 0, 1"),
                      HasSubstr("Too many open files"), HasSubstr("descriptors are allowed")));
  }
  for (const int rank : {0, 1, 2}) ranks.go(rank);
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
}

// ---- a coordinator that announces more than it sends

int64_t peak_kib() {
  rusage used{};
  ::getrusage(RUSAGE_SELF, &used);
  return used.ru_maxrss;
}

constexpr int64_t kRogueUs = 10'000'000;

// Rank 1 of so many joins, and takes part in an exchange if that succeeds. Says how much its memory
// has grown at most, and how it ended.
SOTTO_RANK_MAIN(unknown_peers_rogue) {
  const Ports ports = Ports::parse(self.argument);  // port, size
  RankKit kit(tcp_case(0), 1, ports.data);
  const int64_t before = peak_kib();
  Status status = join_at(kit, ports.rendezvous, kRogueUs);
  if (status.ok())
    status = kit.control->all_gather("agreement", "mine", kit.driver, kit.in(kRogueUs)).status();
  self.say(
      fmt::format("{} KiB; {}: {}", peak_kib() - before, code_name(status.code()), status.text()));
  return 0;
}

// The same with a whole comm.
SOTTO_RANK_MAIN(unknown_peers_rogue_comm) {
  ContextOptions options;
  options.params.transport = "tcp";
  options.params.rendezvous =
      fmt::format("tcp://127.0.0.1:{}", Ports::parse(self.argument).rendezvous);
  options.environment = process_environment();
  options.device = std::make_shared<CpuDevice>(1, SimdLevel::kAuto);
  options.backends = standard_backends();
  const auto context = std::make_shared<Context>(std::move(options));
  CommConfig config;
  config.rank = 1;
  config.size = 2;
  config.timeout_us = 60'000'000;
  const Status status = Comm::create(context, config).status();
  self.say(fmt::format("{}: {}", code_name(status.code()), status.text()));
  return 0;
}

class TcpRogue : public testing::Test {
 protected:
  // How rank 1 of 2 ends whose coordinator takes part in the agreement with rank 1's own bytes, and
  // a change.
  static std::string agree(const std::function<void(std::string&)>& change) {
    const RogueListener coordinator;
    Processes rank("unknown_peers_rogue_comm", 1,
                   {.argument = fmt::format("{},0", coordinator.port())});
    UnknownPeer link = coordinator.accept();
    link.next();
    wire::Members members;
    members.token = 7;
    members.members.resize(2);
    link.send(frame_of(FrameKind::kMembers, members.encode()));
    const std::string part = link.next().payload;
    const wire::Gather theirs =
        check(wire::Gather::decode({reinterpret_cast<const uint8_t*>(part.data()), part.size()}));
    std::string mine = theirs.data;
    change(mine);
    link.send(frame_of(FrameKind::kGathered, wire::Gathered{0, {mine, theirs.data}}.encode()));
    const std::string said = rank.message(0);
    link.hang_up();
    rank.wait_all();
    return said;
  }
  // How rank 1 of `size` ends to which the coordinator says `answer` after its join, and `gathered`
  // after its part of an exchange.
  std::string join_with(int32_t size, const std::string& answer, const std::string& gathered = "") {
    const RogueListener coordinator;
    Processes rank("unknown_peers_rogue", 1,
                   {.argument = fmt::format("{},{}", coordinator.port(), size)});
    UnknownPeer link = coordinator.accept();
    EXPECT_EQ(link.next().header.kind, FrameKind::kJoin);
    link.send(answer);
    if (!gathered.empty()) {
      EXPECT_EQ(link.next().header.kind, FrameKind::kGather);
      link.send(gathered);
    }
    const std::string said = rank.message(0);
    std::printf("grown by %s\n", said.c_str());
    // A sanitizer's own memory grows, too.
    EXPECT_LT(std::stoll(said), (kSanitized ? 24 : 8) * 1024) << said;
    rank.wait_all();
    EXPECT_EQ(rank.failure(), "");
    return said.substr(said.find("; ") + 2);
  }
};

TEST_F(TcpRogue, MembersOfAGibibyteAreRefusedAtOnce) {
  EXPECT_THAT(join_with(2, header_of(FrameKind::kMembers, uint64_t{1} << 30)),
              AllOf(StartsWith("PROTOCOL"), HasSubstr("members frame of 1073741824 bytes"),
                    HasSubstr("bytes are allowed")));
}

TEST_F(TcpRogue, MembersThatAreAnnouncedButDoNotComeTakeNoMemory) {
  // As many as there can be, and some of them.
  EXPECT_THAT(
      join_with(65535, header_of(FrameKind::kMembers, 33'000'000) + std::string(100'000, 'x')),
      AllOf(StartsWith("TIMEOUT"), HasSubstr("did not answer in time")));
}

TEST_F(TcpRogue, AFailureWithoutItsTextIsATimeOut) {
  EXPECT_THAT(join_with(65535, header_of(FrameKind::kFailure, 33'000'000)), StartsWith("TIMEOUT"));
}

TEST_F(TcpRogue, PartsThatAreAnnouncedButDoNotComeTakeNoMemory) {
  wire::Members members;
  members.token = 7;
  members.members.resize(2000);
  EXPECT_THAT(join_with(2000, frame_of(FrameKind::kMembers, members.encode()),
                        header_of(FrameKind::kGathered, 2'000'000'000) + std::string(100'000, 'x')),
              AllOf(StartsWith("TIMEOUT"), HasSubstr("agreement")));
}

TEST_F(TcpRogue, SegmentsOfAByteAreRefused) {
  EXPECT_THAT(
      agree([](std::string& blob) { blob.replace(8, 8, std::string("\1\0\0\0\0\0\0\0", 8)); }),
      AllOf(StartsWith("PROTOCOL"), HasSubstr("rank 0 wants messages of at most 1 byte")));
}

TEST_F(TcpRogue, ANameWithoutAnEndIsCut) {
  EXPECT_THAT(agree([](std::string& blob) { blob.replace(24, 16, std::string(16, 'x')); }),
              AllOf(StartsWith("PROTOCOL"),
                    HasSubstr("transport \"" + std::string(15, 'x') + "\", rank 1 \"tcp\"")));
}

TEST_F(TcpRogue, ACountThatTheBytesCannotHoldIsRefused) {
  std::string payload = wire::Members{}.encode();
  payload.replace(12, 4, "\xff\xff\xff\xff");
  EXPECT_THAT(join_with(2, frame_of(FrameKind::kMembers, payload)),
              AllOf(StartsWith("PROTOCOL"), HasSubstr("malformed members frame of 16 bytes")));
}

}  // namespace
}  // namespace sotto::test
