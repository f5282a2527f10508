// Failure frames have to arrive also where one of the carriers ends meanwhile.
#include <gtest/gtest.h>

#include <memory>

#include "tests/support/memory_carrier.h"
#include "transports/framed/sender.h"

namespace sotto::test {
namespace {

TEST(FramedSender, AFailureFrameGoesOnWhenItsCarrierEnds) {
  std::vector<std::unique_ptr<framed::FrameCarrier>> carriers;
  for (const char* name : {"first", "second"})
    carriers.push_back(std::make_unique<MemoryCarrier>(name));
  framed::Sender sender(std::move(carriers), 10);
  sender.send_failure("the cause");
  framed::OutFrame frame;
  ASSERT_TRUE(sender.next(0, frame));
  EXPECT_EQ(frame.header.kind, wire::FrameKind::kFailure);
  EXPECT_FALSE(sender.next(1, frame));  // it is under way
  sender.carrier(0).close();
  EXPECT_FALSE(sender.failure_sent());
  EXPECT_FALSE(sender.delivered());
  ASSERT_TRUE(sender.next(1, frame));
  EXPECT_EQ(frame.header.kind, wire::FrameKind::kFailure);
  EXPECT_EQ(frame.header.payload_bytes, 9u);
  sender.sent(frame);
  EXPECT_TRUE(sender.failure_sent());
}

}  // namespace
}  // namespace sotto::test
