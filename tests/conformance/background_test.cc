// Operations in the background: lanes of their own on a device that has them, the same results and
// the same undo as any other, and progress while others stand.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <mutex>

#include "core/codec/codec.h"
#include "tests/emulation/async_device/async_device.h"
#include "tests/support/calls.h"
#include "tests/support/core_ranks.h"

namespace sotto::test {
namespace {

constexpr uint64_t kCount = 5000;
constexpr uint32_t kLanes = 2;

CallOptions background() {
  CallOptions options;
  options.priority = kBackgroundPriority;
  return options;
}

// The delayed device with lanes for background work.
class BackgroundLanes : public testing::TestWithParam<bool> {  // whether the host can touch memory
 protected:
  WorldOptions world() {
    WorldOptions world = world_of("inproc", 2);
    world.device = [this](int32_t rank) -> std::shared_ptr<Device> {
      AsyncDeviceOptions options;
      options.seed = static_cast<uint64_t>(rank) + 1;
      options.lanes = kLanes;
      options.background_lanes = true;
      options.host_memory = GetParam();
      const std::lock_guard lock(mutex_);
      return devices_[rank] = std::make_shared<AsyncDevice>(options);
    };
    return world;
  }
  AsyncDevice& device(const Comm& comm) {
    const std::lock_guard lock(mutex_);
    return *devices_.at(comm.rank());
  }

 private:
  std::mutex mutex_;
  std::map<int32_t, std::shared_ptr<AsyncDevice>> devices_;
};

// An array in the memory of the rank's device.
class Elements {
 public:
  Elements(AsyncDevice& device, float value) : device_(device) {
    data_ = device.alloc(kCount * sizeof(float)).take();
    std::fill_n(view(), kCount, value);
  }
  ~Elements() { device_.free(data_, kCount * sizeof(float)); }
  Elements(const Elements&) = delete;
  Elements& operator=(const Elements&) = delete;

  void* data() const { return data_; }
  float* view() const { return static_cast<float*>(device_.host_view(data_)); }
  bool all(float value) const {
    return std::all_of(view(), view() + kCount, [&](float x) { return x == value; });
  }
  // The sum over all ranks, in place.
  Result<OpRef> all_reduce(Comm& comm, const CallOptions& options) const {
    auto* const x = static_cast<float*>(data_);
    return comm.start(all_reduce_of(comm, x, x, kCount), options);
  }

 private:
  AsyncDevice& device_;
  void* data_ = nullptr;
};

TEST_P(BackgroundLanes, GoOnWhileTheOthersStand) {
  const Status status = run_world(world(), [&](const std::shared_ptr<Comm>& comm) -> Status {
    AsyncDevice& device = this->device(*comm);
    const Elements first(device, 1), second(device, 2);
    for (uint32_t lane = 0; lane < kLanes; ++lane) device.hold(lane);
    SOTTO_ASSIGN(const OpRef stands, first.all_reduce(*comm, {}));
    SOTTO_ASSIGN(const OpRef op, second.all_reduce(*comm, background()));
    SOTTO_TRY(comm->engine().wait(op, 20'000'000));
    EXPECT_TRUE(second.all(4));
    EXPECT_FALSE(stands->done());
    EXPECT_EQ(device.executed(0) + device.executed(1), 0u);
    EXPECT_GT(device.executed(kLanes) + device.executed(kLanes + 1), 0u);
    for (uint32_t lane = 0; lane < kLanes; ++lane) device.resume(lane);
    SOTTO_TRY(comm->engine().wait(stands, 20'000'000));
    EXPECT_TRUE(first.all(2));
    return ok_status();
  });
  EXPECT_TRUE(status.ok()) << status.text();
}

TEST_P(BackgroundLanes, StandWhileTheOthersGoOn) {
  const Status status = run_world(world(), [&](const std::shared_ptr<Comm>& comm) -> Status {
    AsyncDevice& device = this->device(*comm);
    const Elements first(device, 1), second(device, 2);
    for (uint32_t lane = kLanes; lane < 2 * kLanes; ++lane) device.hold(lane);
    SOTTO_ASSIGN(const OpRef stands, first.all_reduce(*comm, background()));
    SOTTO_ASSIGN(const OpRef op, second.all_reduce(*comm, {}));
    SOTTO_TRY(comm->engine().wait(op, 20'000'000));
    EXPECT_TRUE(second.all(4));
    EXPECT_FALSE(stands->done());
    for (uint32_t lane = kLanes; lane < 2 * kLanes; ++lane) device.resume(lane);
    SOTTO_TRY(comm->engine().wait(stands, 20'000'000));
    EXPECT_TRUE(first.all(2));
    return ok_status();
  });
  EXPECT_TRUE(status.ok()) << status.text();
}

// What takes back a step that does not commit stands behind that step, on its lanes.
TEST_P(BackgroundLanes, TakeBackWhatDoesNotCommit) {
  const auto reduced = [&](bool fails) {
    std::vector<float> result;
    const Status status = run_world(world(), [&](const std::shared_ptr<Comm>& comm) -> Status {
      AsyncDevice& device = this->device(*comm);
      const Elements data(device, 0.25f);
      SOTTO_ASSIGN(const std::shared_ptr<Codec> codec,
                   Codec::create(comm, R"({"type": "onebit"})", {kCount}, {Dtype::kF32}));
      for (uint32_t lane = 0; lane < kLanes; ++lane) device.hold(lane);
      const uint64_t before = device.executed(0) + device.executed(1);  // the codec was made there
      for (int round = 0; round < 4; ++round) {
        for (uint64_t i = 0; i < kCount; ++i)
          data.view()[i] = std::sin(static_cast<float>(i * (comm->rank() + 2) + round));
        if (round == 2) {
          if (!fails) continue;
          data.view()[kCount / 2] = NAN;
        }
        SOTTO_ASSIGN(const OpRef op, codec->all_reduce({data.data()}, {data.data()}, background()));
        const Status ended = comm->engine().wait(op, 20'000'000);
        if (ended.code() != (round == 2 ? Code::kNonfinite : Code::kOk)) return ended;
      }
      EXPECT_EQ(device.executed(0) + device.executed(1), before);
      if (comm->rank() == 0) result.assign(data.view(), data.view() + kCount);
      for (uint32_t lane = 0; lane < kLanes; ++lane) device.resume(lane);
      return ok_status();
    });
    EXPECT_TRUE(status.ok()) << status.text();
    return result;
  };
  const std::vector<float> with = reduced(true), without = reduced(false);
  ASSERT_EQ(with.size(), kCount);
  EXPECT_EQ(with, without);
}

INSTANTIATE_TEST_SUITE_P(Memory, BackgroundLanes, testing::Bool(),
                         [](const auto& p) { return std::string(p.param ? "host" : "device"); });

}  // namespace
}  // namespace sotto::test
