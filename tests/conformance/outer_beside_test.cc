// Averages of an outer optimizer beside the collectives of its comm, on every kind of world. Calls
// have the same order on all ranks; when an average starts is each rank's own.
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "core/outer/outer.h"
#include "tests/support/calls.h"
#include "tests/support/core_ranks.h"
#include "tests/support/ordered_transport.h"
#include "tests/support/ranks.h"

namespace sotto::test {
namespace {

class OuterBeside : public testing::TestWithParam<std::string> {
  const CallsOutOfOrder slices_;
};

// turned: rank 1 makes its collectives before the steps, the others behind them.
Status train(const std::shared_ptr<Comm>& comm, const std::string& json, bool turned) {
  const auto device = comm->context()->device();
  const DeviceAccess access(comm->context()->engine(), device);
  constexpr uint64_t kCount = 40'000;
  SOTTO_ASSIGN(const DeviceArray memory, DeviceArray::make(device, kCount * 4));
  SOTTO_TRY(access.upload(memory.data(), std::span<const float>(std::vector<float>(kCount, 1.0f))));
  ParamSpec spec;
  spec.name = "p";
  spec.count = kCount;
  spec.param = static_cast<float*>(memory.data());
  SOTTO_ASSIGN(const std::shared_ptr<Outer> outer, Outer::create(comm, json, {spec}));
  Status status;
  for (int n = 0; n < 12 && status.ok(); ++n) {
    if (n % 3 == comm->rank()) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    const bool first = turned && comm->rank() == 1;
    if (first) status = comm->barrier();
    if (!status.ok()) break;
    const Result<OpRef> op = outer->step({});
    status = op.status();
    if (!status.ok()) break;
    if (!first) status = comm->barrier();
    if (status.ok()) status = comm->engine().wait(*op, -1);
  }
  outer->close();
  return status;
}

void expect_trained(const std::string& kind, bool turned) {
  for (const char* schedule :
       {R"("period": 2, "delay": 0)", R"("period": 2, "delay": 1)", R"("period": 2, "delay": 2)",
        R"("period": 6, "delay": 3)", R"("period": 5, "delay": 5)"}) {
    SCOPED_TRACE(schedule);
    WorldOptions world = world_of(kind, 3);
    world.timeout_us = 5'000'000;
    const std::string json = std::string(R"({"preset": "co2", "alpha": 0.5, )") + schedule + "}";
    const Status status =
        run_world(world, [&](const auto& comm) { return train(comm, json, turned); });
    if (turned && kind.starts_with("ordered")) {
      EXPECT_EQ(status.code(), Code::kProtocol) << status.text();
      EXPECT_NE(status.text().find("outer step"), std::string::npos) << status.text();
      EXPECT_NE(status.text().find("barrier"), std::string::npos) << status.text();
    } else {
      EXPECT_TRUE(status.ok()) << status.text();
    }
  }
}

TEST_P(OuterBeside, CollectivesInOneOrder) { expect_trained(GetParam(), false); }

// Over a transport without match keys all ranks are told of the two that do not fit.
TEST_P(OuterBeside, CollectivesInOtherOrders) { expect_trained(GetParam(), true); }

INSTANTIATE_TEST_SUITE_P(Worlds, OuterBeside, testing::ValuesIn(world_kinds()),
                         [](const auto& world) { return world.param; });

}  // namespace
}  // namespace sotto::test
