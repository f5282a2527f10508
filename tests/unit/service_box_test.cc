// One rank's end of service messages: what it may send, and what it refuses.
#include "core/iface/service.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace sotto {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class Listener final : public ServiceListener {
 public:
  void on_service(int32_t from, std::string_view bytes) noexcept override {
    heard.push_back(std::to_string(from) + ":" + std::string(bytes));
  }
  std::vector<std::string> heard;
};

constexpr int32_t kMe = 1, kSize = 3;

// Delivers all that has a listener; how many these are.
size_t deliver_all(ServiceBox& box) {
  size_t count = 0;
  while (const std::optional<ServiceMessage> message = box.next()) {
    box.deliver(*message);
    ++count;
  }
  return count;
}

TEST(ServiceBox, WhatMayBeSent) {
  ServiceBox box(kMe, kSize);
  const auto refused = [&](const ServiceMessage& m) {
    const Status status = box.admit(m);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    return status.text();
  };
  EXPECT_THAT(refused({kMe, 3, 0, ""}), HasSubstr("to rank 3; allowed: 0 to 2"));
  EXPECT_THAT(refused({kMe, -1, 0, ""}), HasSubstr("to rank -1; allowed: 0 to 2"));
  EXPECT_THAT(refused({kMe, kMe, 0, ""}), HasSubstr("of rank 1 to itself"));
  EXPECT_THAT(refused({kMe, 0, kServiceChannels, ""}), HasSubstr("channel 16; allowed: 0 to 15"));
  EXPECT_THAT(refused({kMe, 0, 0, std::string(kMaxServiceBytes + 1, 'x')}),
              HasSubstr("4097 bytes; at most 4096 are allowed"));
  EXPECT_TRUE(box.admit({kMe, 0, 15, std::string(kMaxServiceBytes, 'x')}).ok());
}

TEST(ServiceBox, AWindowOfEachRankIsFullUntilMessagesAreDelivered) {
  ServiceBox box(kMe, kSize);
  const ServiceMessage message{kMe, 2, 0, "x"};
  for (uint32_t i = 0; i < kServiceWindow; ++i) ASSERT_TRUE(box.admit(message).ok());
  const Status full = box.admit(message);
  EXPECT_EQ(full.code(), Code::kBusy);
  EXPECT_THAT(full.text(), HasSubstr("rank 2 has not taken 32 service messages of rank 1"));
  EXPECT_TRUE(box.admit({kMe, 0, 0, "x"}).ok());
  ASSERT_TRUE(box.arrived(ServiceBox::delivered({kMe, 2, 0, "x"})).ok());
  EXPECT_TRUE(box.admit(message).ok());
  EXPECT_EQ(box.admit(message).code(), Code::kBusy);
}

TEST(ServiceBox, MessagesWaitForTheListenerOfTheirChannel) {
  ServiceBox box(kMe, kSize);
  for (const char* text : {"a", "b"}) {
    ASSERT_TRUE(box.arrived({0, kMe, 3, text}).ok());
    ASSERT_TRUE(box.arrived({2, kMe, 4, text}).ok());
  }
  EXPECT_EQ(deliver_all(box), 0u);
  Listener three, four;
  box.listen(4, &four);
  EXPECT_EQ(deliver_all(box), 2u);
  box.listen(3, &three);
  EXPECT_EQ(deliver_all(box), 2u);
  EXPECT_THAT(four.heard, ElementsAre("2:a", "2:b"));
  EXPECT_THAT(three.heard, ElementsAre("0:a", "0:b"));
  box.listen(3, nullptr);
  ASSERT_TRUE(box.arrived({0, kMe, 3, "c"}).ok());
  EXPECT_EQ(deliver_all(box), 0u);
}

TEST(ServiceBox, RefusesWhatNoRankSends) {
  ServiceBox box(kMe, kSize);
  const auto refused = [&](ServiceMessage m) {
    const Status status = box.arrived(std::move(m));
    EXPECT_EQ(status.code(), Code::kProtocol);
    return status.text();
  };
  EXPECT_THAT(refused({3, kMe, 0, ""}), HasSubstr("from rank 3 to rank 1 came to rank 1 of 3"));
  EXPECT_THAT(refused({-1, kMe, 0, ""}), HasSubstr("from rank -1"));
  EXPECT_THAT(refused({kMe, kMe, 0, ""}), HasSubstr("from rank 1 to rank 1"));
  EXPECT_THAT(refused({0, 2, 0, ""}), HasSubstr("from rank 0 to rank 2 came to rank 1 of 3"));
  EXPECT_THAT(refused({0, kMe, 17, "x"}), HasSubstr("of rank 0 on channel 17 with 1 byte"));
  EXPECT_THAT(refused({0, kMe, kServiceDelivered, "x"}), HasSubstr("channel 16 with 1 byte"));
  EXPECT_THAT(refused({0, kMe, 0, std::string(kMaxServiceBytes + 1, 'x')}),
              HasSubstr("4097 bytes"));
  EXPECT_THAT(refused({0, kMe, kServiceDelivered, ""}),
              HasSubstr("rank 0 has taken more service messages than it may"));
  for (uint32_t i = 0; i < kServiceWindow; ++i) ASSERT_TRUE(box.arrived({0, kMe, 0, "x"}).ok());
  EXPECT_THAT(refused({0, kMe, 0, "x"}),
              HasSubstr("rank 0 sends more service messages than it may"));
  EXPECT_TRUE(box.arrived({2, kMe, 0, "x"}).ok());
}

}  // namespace
}  // namespace sotto
