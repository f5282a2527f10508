// How plans of a comm cut messages follows from its transports.
#include <gtest/gtest.h>

#include "tests/support/core_ranks.h"

namespace sotto::test {
namespace {

Status check_sizes(WorldOptions world, uint64_t segment_bytes, const HeldWindows& held) {
  return run_world(world, [&](const std::shared_ptr<Comm>& comm) {
    if (comm->sizes().segment_bytes == segment_bytes && comm->sizes().held == held)
      return ok_status();
    return error(Code::kInternal, "segments of {} bytes, {} windows of {} bytes",
                 comm->sizes().segment_bytes, comm->sizes().held.count, comm->sizes().held.bytes);
  });
}

TEST(MessageSizes, AreThoseOfTheTransport) {
  const HeldWindows streams;
  const TransportCaps inside;
  EXPECT_EQ(check_sizes(world_of("tcp", 2), 128 * 1024, streams).text(), "");
  EXPECT_EQ(check_sizes(world_of("inproc", 2), inside.segment_bytes, streams).text(), "");
  EXPECT_EQ(check_sizes(world_of("ordered_async", 2), 0, {.count = 1, .bytes = 128 * 1024}).text(),
            "");
}

// Even and odd ranks are linked by TCP, ranks of one kind by a transport that cuts nothing.
TEST(MessageSizes, OneRouteThatNeedsThemIsEnough) {
  EXPECT_EQ(check_sizes(world_of("mixed", 4), 128 * 1024, {}).text(), "");
}

// Over any transport; windows stay the transport's.
TEST(MessageSizes, OfTheUser) {
  for (const auto& [kind, held] :
       {std::pair{"tcp", HeldWindows{}}, {"ordered_async", {.count = 1, .bytes = 128 * 1024}}}) {
    WorldOptions world = world_of(kind, 2);
    world.params.segment_bytes = 8192;
    EXPECT_EQ(check_sizes(world, 8192, held).text(), "") << kind;
  }
}

}  // namespace
}  // namespace sotto::test
