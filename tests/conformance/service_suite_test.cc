// Service messages: the part of the transport suite that is about small messages on the control
// plane.
#include <gmock/gmock.h>

#include "tests/conformance/transport_suite.h"

namespace sotto::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class Recorder final : public ServiceListener {
 public:
  explicit Recorder(ControlPlane& control, uint32_t channel = kTestChannel)
      : control_(control), channel_(channel) {
    control_.set_service_listener(channel_, this);
  }
  ~Recorder() override { control_.set_service_listener(channel_, nullptr); }
  void on_service(int32_t from, std::string_view bytes) noexcept override {
    heard.emplace_back(from, bytes);
    if (then) then(from, bytes);
  }
  std::vector<std::string> of(int32_t rank) const {
    std::vector<std::string> out;
    for (const auto& [from, bytes] : heard) {
      if (from == rank) out.push_back(bytes);
    }
    return out;
  }
  std::vector<std::pair<int32_t, std::string>> heard;
  std::function<void(int32_t, std::string_view)> then;

 private:
  ControlPlane& control_;
  uint32_t channel_;
};

std::string text_of(int32_t from, int32_t to, int number) {
  return fmt::format("{} to {}: {} ", from, to, number) +
         std::string(static_cast<size_t>(number * 97 % 4000), static_cast<char>('a' + number % 26));
}

// Sends as soon as there is room.
void send(RankKit& kit, int32_t to, uint32_t channel, const std::string& bytes) {
  Status status;
  const bool sent = kit.drive([&] {
    status = kit.control->send_service(to, channel, bytes);
    return status.code() != Code::kBusy;
  });
  require(sent, "no room in time");
  check(status, "send_service");
}

TEST_P(TransportSuite, ServiceMessagesOfAPairArriveInOrder) {
  constexpr int kRanks = 4, kMessages = 70;  // more than a window
  EXPECT_EQ(
      run_group(
          GetParam(), kRanks,
          [&](RankKit& kit) {
            kit.control->established();
            Recorder even(*kit.control, 2), odd(*kit.control, 3);
            for (int i = 0; i < kMessages; ++i) {
              for (int32_t to = 0; to < kRanks; ++to) {
                if (to != kit.rank)
                  send(kit, to, 2 + static_cast<uint32_t>(i % 2), text_of(kit.rank, to, i));
              }
            }
            const size_t all = (kRanks - 1) * kMessages / 2;
            require(kit.drive([&] { return even.heard.size() >= all && odd.heard.size() >= all; }),
                    "not all messages came");
            for (int32_t from = 0; from < kRanks; ++from) {
              if (from == kit.rank) continue;
              std::vector<std::string> expected[2];
              for (int i = 0; i < kMessages; ++i)
                expected[i % 2].push_back(text_of(from, kit.rank, i));
              require(even.of(from) == expected[0] && odd.of(from) == expected[1],
                      fmt::format("messages of rank {}", from));
            }
            kit.finish();
          }),
      "");
}

// The sender alone is held up, and only for the rank that does not listen.
TEST_P(TransportSuite, AServiceWindowThatIsFullIsAnErrorOfTheSender) {
  EXPECT_EQ(
      run_group(GetParam(), 3,
                [&](RankKit& kit) {
                  kit.control->established();
                  kit.barrier();
                  if (kit.rank != 2) {
                    for (uint32_t i = 0; i < kServiceWindow; ++i)
                      check(kit.control->send_service(2, kTestChannel, std::to_string(i)));
                    const Status full = kit.control->send_service(2, kTestChannel, "x");
                    EXPECT_EQ(full.code(), Code::kBusy);
                    EXPECT_THAT(full.text(), HasSubstr("rank 2 has not taken 32 service messages"));
                    Recorder other(*kit.control, 1);
                    check(kit.control->send_service(1 - kit.rank, 1, "there"));
                    require(kit.drive([&] { return other.heard.size() == 1; }), "the other one");
                    EXPECT_EQ(kit.control->send_service(2, 1, "x").code(), Code::kBusy);
                  }
                  kit.barrier();
                  Recorder late(*kit.control);
                  if (kit.rank == 2) {
                    require(kit.drive([&] { return late.heard.size() == 2 * kServiceWindow; }),
                            "what had come before the listener");
                    EXPECT_EQ(late.of(0).back(), "31");
                    EXPECT_EQ(late.of(1).size(), kServiceWindow);
                  }
                  kit.barrier();
                  if (kit.rank != 2) {
                    send(kit, 2, kTestChannel, "again");
                  } else {
                    require(kit.drive([&] { return late.heard.size() == 2 * kServiceWindow + 2; }),
                            "later ones");
                  }
                  kit.finish();
                }),
      "");
}

TEST_P(TransportSuite, ServiceMessagesThatCannotBeSent) {
  EXPECT_EQ(
      run_group(GetParam(), 2,
                [&](RankKit& kit) {
                  const auto refused = [&](int32_t to, uint32_t channel, size_t bytes) {
                    return kit.control->send_service(to, channel, std::string(bytes, 'x'));
                  };
                  const Status early = refused(1 - kit.rank, 0, 1);
                  EXPECT_EQ(early.code(), Code::kInvalidState);
                  EXPECT_THAT(early.text(), HasSubstr("groups that are set up"));
                  kit.control->established();
                  EXPECT_THAT(refused(2, 0, 1).text(), HasSubstr("allowed: 0 to 1"));
                  EXPECT_THAT(refused(1 - kit.rank, 16, 1).text(), HasSubstr("allowed: 0 to 15"));
                  EXPECT_THAT(refused(1 - kit.rank, 0, 4097).text(), HasSubstr("at most 4096"));
                  EXPECT_EQ(refused(1 - kit.rank, 0, 4097).code(), Code::kInvalidArgument);
                  kit.finish();
                  EXPECT_EQ(refused(1 - kit.rank, 0, 1).code(), Code::kInvalidState);
                }),
      "");
}

// Listeners send, and take themselves away.
TEST_P(TransportSuite, AServiceListenerMaySendAndEnd) {
  EXPECT_EQ(
      run_group(GetParam(), 3,
                [&](RankKit& kit) {
                  kit.control->established();
                  Recorder ball(*kit.control);
                  ball.then = [&](int32_t from, std::string_view bytes) {
                    const int count = std::stoi(std::string(bytes));
                    if (count < 100)
                      check(
                          kit.control->send_service(from, kTestChannel, std::to_string(count + 1)));
                    if (count >= 99) kit.control->set_service_listener(kTestChannel, nullptr);
                  };
                  if (kit.rank == 1) check(kit.control->send_service(2, kTestChannel, "0"));
                  const size_t hits = kit.rank == 2 ? 51 : kit.rank == 1 ? 50 : 0;
                  require(kit.drive([&] { return ball.heard.size() == hits; }), "a ball is lost");
                  kit.barrier();
                  if (kit.rank == 1) check(kit.control->send_service(2, kTestChannel, "7"));
                  kit.barrier();
                  kit.drive([] { return false; }, 20'000);
                  EXPECT_EQ(ball.heard.size(), hits);
                  kit.finish();
                }),
      "");
}

TEST_P(TransportSuite, ServiceMessagesEndWithTheGroup) {
  EXPECT_EQ(run_group(GetParam(), 3,
                      [&](RankKit& kit) {
                        kit.control->established();
                        Recorder recorder(*kit.control);
                        kit.barrier();
                        if (kit.rank == 1)
                          kit.control->fail({Code::kAborted, 1, "rank 1 gives up"});
                        require(kit.drive([&] { return !kit.listener.causes.empty(); }),
                                "no failure was heard");
                        const Status status = kit.control->send_service(0, kTestChannel, "late");
                        EXPECT_EQ(status.code(), Code::kAborted);
                        EXPECT_EQ(status.text(), "rank 1 gives up");
                        kit.drive([] { return false; }, 20'000);
                        EXPECT_TRUE(recorder.heard.empty());
                      }),
            "");
}

// A rank that dies in between: what it sent may come or not; what it is sent is lost, and the group
// names it.
TEST_P(TransportSuite, ARankThatDiesBetweenServiceMessages) {
  for (const int32_t dies : {0, 1}) {
    EXPECT_EQ(run_group(GetParam(), 3,
                        [&](RankKit& kit) {
                          kit.control->established();
                          kit.control->set_listener(&kit.listener);
                          auto recorder = std::make_unique<Recorder>(*kit.control);
                          kit.barrier();
                          for (int32_t to = 0; to < 3; ++to)
                            (void)kit.control->send_service(to, kTestChannel, "first");
                          if (kit.rank == dies) {
                            recorder.reset();
                            kit.transport.reset();
                            kit.control.reset();
                            kit.backend.reset();
                            return;
                          }
                          Status status;
                          require(kit.drive([&] {
                            status = kit.control->send_service(dies, kTestChannel, "more");
                            return !status.ok() && status.code() != Code::kBusy;
                          }),
                                  "messages to a dead rank were sent for ever");
                          EXPECT_EQ(status.code(), Code::kPeerLost) << status.text();
                          EXPECT_THAT(status.text(), HasSubstr(fmt::format("rank {}", dies)));
                        }),
              "");
  }
}

}  // namespace
}  // namespace sotto::test
