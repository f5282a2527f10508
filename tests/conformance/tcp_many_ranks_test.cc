// The rendezvous and the all-gathers of a group of 1024, all its ranks in one thread and on one
// reactor. Every rank sends one frame per phase, whatever the size of the group, and the
// coordinator answers each with one; only notes about who is missing come on top, by the clock.
#include <gtest/gtest.h>

#include <cinttypes>

#include "core/wire/frame.h"
#include "tests/support/ranks.h"
#include "tests/support/sanitized.h"
#include "tests/support/unknown_peer.h"
#include "transports/tcp/control_plane.h"
#include "transports/tcp/rendezvous_server.h"

namespace sotto::test {
namespace {

// Calls of all ranks are on one stack, whose frames are larger under sanitizers.
constexpr int32_t kRanks = kSanitized ? 256 : 1024;
// One data connection per pair is not made here: only the control star.
constexpr uint64_t kDescriptors = 2 * kRanks + 64;
constexpr int64_t kTimeoutUs = 60'000'000;
constexpr uint64_t kToken = 42;
constexpr int64_t kNoteMs = 50;  // at most so often, and only when other ranks are missing

// Runs a blocking call of every rank on one thread: where one of them begins to wait, the next
// one's is begun, and the last one polls for all. Each returns when what it waits for is there. The
// coordinator is the last one, since the others wait for what it does after it has waited.
class Phase {
 public:
  using Body = std::function<void(int32_t rank, Driver& driver)>;
  static void run(Poller& poller, const Body& body) { Phase(poller, body).next(); }

 private:
  class RankDriver final : public Driver {
   public:
    explicit RankDriver(Phase& phase) : phase_(phase) {}
    bool run_until(const std::function<bool()>& done, Deadline deadline) override {
      if (!std::exchange(waiting_, true)) phase_.next();
      while (!done()) {
        if (deadline.passed(clock())) return done();
        phase_.poller_.poll(1000);
      }
      return true;
    }
    const Clock& clock() const override { return Clock::monotonic(); }

   private:
    Phase& phase_;
    bool waiting_ = false;
  };

  Phase(Poller& poller, const Body& body) : poller_(poller), body_(body) {}
  void next() {
    if (begun_ == kRanks) return;
    const int32_t rank = ++begun_ % kRanks;
    RankDriver driver(*this);
    body_(rank, driver);
  }

  Poller& poller_;
  const Body& body_;
  int32_t begun_ = 0;
};

struct Traffic {
  std::vector<uint64_t> to_coordinator, from_coordinator;  // bytes, by rank
};

class ManyRanks : public testing::Test {
 protected:
  static Deadline deadline() { return Deadline::in_us(Clock::monotonic(), kTimeoutUs); }

  void rendezvous() {
    reactor_ = check(tcp::Reactor::make({}));
    auto server = check(
        tcp::RendezvousServer::open(*reactor_, kToken, {tcp::asio::ip::address_v4::loopback(), 0}));
    const tcp::Endpoint at(tcp::asio::ip::address_v4::loopback(), server->port());
    controls_.resize(kRanks);
    joins_.resize(kRanks);
    Phase::run(*reactor_, [&](int32_t rank, Driver& driver) {
      wire::Join& own = joins_[static_cast<size_t>(rank)];
      own = {kToken, rank, kRanks, 1, "here"};
      tcp::Membership group =
          check(rank == 0 ? tcp::RendezvousServer::run(std::move(server), own, driver, deadline())
                          : tcp::join_rendezvous(*reactor_, {at}, false, own, driver, deadline()));
      if (rank == 0) members_ = group.members;
      group_token_ = group.token;
      controls_[static_cast<size_t>(rank)] =
          std::make_unique<tcp::TcpControl>(reactor_, std::move(group), 3'600'000);
    });
  }

  // An all-gather of `bytes` from each rank.
  void gather(const std::string& what, size_t bytes) {
    Phase::run(*reactor_, [&](int32_t rank, Driver& driver) {
      const std::string mine(bytes, static_cast<char>('a' + rank % 26));
      const std::vector<std::string> all =
          check(controls_[static_cast<size_t>(rank)]->all_gather(what, mine, driver, deadline()));
      require(all.size() == kRanks && all[static_cast<size_t>(rank)] == mine, "wrong parts");
    });
  }

  Traffic traffic() const {
    Traffic t;
    for (int32_t r = 1; r < kRanks; ++r) {
      const auto bytes = controls_[static_cast<size_t>(r)]->link_bytes(0);
      t.to_coordinator.push_back(bytes->sent);
      t.from_coordinator.push_back(bytes->received);
    }
    return t;
  }

  // What came to a rank beside the answer: notes, one per tick at most, each with the numbers of
  // the ranks that are missing.
  static uint64_t most_notes(int64_t since_ns) {
    constexpr uint64_t kLongest = 32 + 6 * kRanks;
    return note_count(since_ns) * wire::frame_bytes(kLongest);
  }
  static uint64_t note_count(int64_t since_ns) {
    const int64_t ms = (Clock::monotonic().now_ns() - since_ns) / 1'000'000;
    return static_cast<uint64_t>(ms / kNoteMs + 1);
  }

  std::shared_ptr<tcp::Reactor> reactor_;
  std::vector<std::unique_ptr<tcp::TcpControl>> controls_;
  std::vector<wire::Join> joins_;
  std::vector<wire::Members::Member> members_;
  uint64_t group_token_ = 0;
};

TEST_F(ManyRanks, EveryPhaseIsOneFrameToTheCoordinatorAndOneBack) {
  if (const std::string why = allow_descriptors(kDescriptors); !why.empty()) GTEST_SKIP() << why;
  const Clock& clock = Clock::monotonic();
  int64_t begin = clock.now_ns();
  rendezvous();
  int64_t ms = (clock.now_ns() - begin) / 1'000'000;
  std::printf("rendezvous of %d ranks: %" PRId64 " ms\n", kRanks, ms);
  Traffic before = traffic();
  uint64_t answer = wire::frame_bytes(wire::Members{0, group_token_, members_}.encode().size());
  for (size_t i = 0; i + 1 < kRanks; ++i) {
    ASSERT_EQ(before.to_coordinator[i], wire::frame_bytes(joins_[i + 1].encode().size())) << i + 1;
    ASSERT_GE(before.from_coordinator[i], answer);
    ASSERT_LE(before.from_coordinator[i] - answer, most_notes(begin)) << i + 1;
  }
  constexpr size_t kCard = 60;  // bytes that a rank tells of its data connections
  uint64_t sequence = 0;
  for (const auto& [what, bytes] :
       {std::pair<std::string, size_t>{"addresses of data connections", kCard},
        {"data connections are made", 0}}) {
    begin = clock.now_ns();
    gather(what, bytes);
    ms = (clock.now_ns() - begin) / 1'000'000;
    std::printf("all-gather of %zu bytes each: %" PRId64 " ms\n", bytes, ms);
    const Traffic after = traffic();
    const uint64_t asked =
        wire::frame_bytes(wire::Gather{sequence, what, std::string(bytes, 'a')}.encode().size());
    answer = wire::frame_bytes(
        wire::Gathered{sequence, std::vector<std::string>(kRanks, std::string(bytes, 'a'))}
            .encode()
            .size());
    for (size_t i = 0; i + 1 < kRanks; ++i) {
      // Beside what is asked, a sign of life for each note.
      const uint64_t sent = after.to_coordinator[i] - before.to_coordinator[i];
      const uint64_t sign = wire::frame_bytes(wire::Heartbeat{}.encode().size());
      ASSERT_GE(sent, asked) << what << i + 1;
      ASSERT_EQ((sent - asked) % sign, 0u) << what << i + 1;
      ASSERT_LE((sent - asked) / sign, note_count(begin)) << what << i + 1;
      const uint64_t received = after.from_coordinator[i] - before.from_coordinator[i];
      ASSERT_GE(received, answer);
      ASSERT_LE(received - answer, most_notes(begin)) << what << i + 1;
    }
    before = after;
    ++sequence;
  }
}

}  // namespace
}  // namespace sotto::test
