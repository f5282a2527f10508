#include "tests/emulation/async_device/async_device.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "core/kernels/registry.h"

namespace sotto::test {
namespace {

using Fault = AsyncDevice::Fault;

constexpr uint64_t kElements = 1000;
constexpr uint64_t kBytes = kElements * sizeof(float);

class Kit {
 public:
  explicit Kit(const AsyncDeviceOptions& options = {}) : device(options) {}
  ~Kit() {
    device.drain();
    for (void* m : memory_) device.free(m, kBytes);
    EXPECT_EQ(device.live_bytes(), 0u);
    EXPECT_EQ(device.live_events(), 0u);
  }
  float* floats() {
    memory_.push_back(device.alloc(kBytes).take());
    return static_cast<float*>(memory_.back());
  }
  float* view(const void* m) const { return static_cast<float*>(device.host_view(m)); }
  void set(float* m, float value) const { std::fill_n(view(m), kElements, value); }
  bool all(const float* m, float value) const {
    return std::all_of(view(m), view(m) + kElements, [&](float f) { return f == value; });
  }
  bool none_yet(const float* m) const {
    return std::all_of(view(m), view(m) + kElements, [](float f) { return std::isnan(f); });
  }
  Status copy(uint32_t lane, float* dst, const float* src) {
    return device.copy(lane, dst, src, kBytes, nullptr, 0);
  }
  // Event behind the lane, waited for by another, given back.
  Status order(uint32_t before, uint32_t after) {
    SOTTO_ASSIGN(const EventId event, device.record(before));
    const Status status = device.wait(after, event);
    device.release(event);
    return status;
  }
  AsyncDevice device;

 private:
  std::vector<void*> memory_;
};

TEST(AsyncDevice, NothingIsThereBeforeItHasExecuted) {
  Kit kit;
  float* a = kit.floats();
  float* b = kit.floats();
  kit.set(a, 3);
  kit.set(b, 5);
  kit.device.hold(0);
  ASSERT_TRUE(kit.copy(0, b, a).ok());
  const EventId event = kit.device.record(0).take();
  EXPECT_TRUE(kit.none_yet(b));
  EXPECT_FALSE(*kit.device.query(event));
  kit.device.resume(0);
  kit.device.drain();
  EXPECT_TRUE(*kit.device.query(event));
  EXPECT_TRUE(kit.all(b, 3));
  kit.device.release(event);
}

TEST(AsyncDevice, OneLaneKeepsItsOrder) {
  Kit kit;
  float* x = kit.floats();
  float* y = kit.floats();
  float* z = kit.floats();
  kit.set(x, 1);
  kit.set(z, 2);
  ASSERT_TRUE(kit.copy(0, y, x).ok());
  ASSERT_TRUE(kit.copy(0, x, z).ok());  // must not disturb the copy before it
  kit.device.drain();
  EXPECT_TRUE(kit.all(y, 1));
  EXPECT_TRUE(kit.all(x, 2));
}

// Lane 1 reads what lane 0 writes. Without the wait it reads what is not there yet, whatever the
// old contents were.
TEST(AsyncDevice, AMissingWaitShows) {
  for (const bool forgotten : {false, true}) {
    Kit kit;
    float* source = kit.floats();
    float* middle = kit.floats();
    float* result = kit.floats();
    kit.set(source, 7);
    kit.set(middle, 7);  // stale, and by chance the right answer
    if (forgotten) kit.device.inject(Fault::kWait, 0);
    kit.device.hold(0);
    ASSERT_TRUE(kit.copy(0, middle, source).ok());
    ASSERT_TRUE(kit.order(0, 1).ok());
    ASSERT_TRUE(kit.copy(1, result, middle).ok());
    if (forgotten) {
      const EventId copied = kit.device.record(1).take();
      while (!*kit.device.query(copied)) {
      }
      EXPECT_TRUE(kit.none_yet(result)) << "the mistake was not visible";
      kit.device.release(copied);
    }
    kit.device.resume(0);
    kit.device.drain();
    EXPECT_EQ(kit.all(result, 7), !forgotten);
  }
}

// Lane 1 overwrites what lane 0 still reads.
TEST(AsyncDevice, AMissingWaitForAReaderShows) {
  for (const bool forgotten : {false, true}) {
    Kit kit;
    float* data = kit.floats();
    float* reader = kit.floats();
    float* other = kit.floats();
    kit.set(data, 7);
    kit.set(other, 8);
    if (forgotten) kit.device.inject(Fault::kWait, 0);
    kit.device.hold(0);
    ASSERT_TRUE(kit.copy(0, reader, data).ok());
    ASSERT_TRUE(kit.order(0, 1).ok());
    ASSERT_TRUE(kit.copy(1, data, other).ok());
    if (forgotten) {
      const EventId copied = kit.device.record(1).take();
      while (!*kit.device.query(copied)) {
      }
      kit.device.release(copied);
    }
    kit.device.resume(0);
    kit.device.drain();
    EXPECT_EQ(kit.all(reader, 7), !forgotten);
    EXPECT_TRUE(kit.all(data, 8));
  }
}

// The same mistake without a blocked lane: random delays alone find it.
TEST(AsyncDevice, RandomDelaysFindAMissingWait) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP()
      << "the planted mistake is a data race, which the thread sanitizer reports by itself";
#endif
  int found = 0;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    AsyncDeviceOptions options;
    options.seed = seed;
    Kit kit(options);
    float* source = kit.floats();
    float* middle = kit.floats();
    float* result = kit.floats();
    kit.set(source, 1);
    ASSERT_TRUE(kit.copy(0, middle, source).ok());
    ASSERT_TRUE(kit.copy(1, result, middle).ok());
    kit.device.drain();
    if (!kit.all(result, 1)) ++found;
  }
  EXPECT_GT(found, 0);
}

TEST(AsyncDevice, ThePredicateIsReadWhenTheCallExecutes) {
  Kit kit;
  float* a = kit.floats();
  float* b = kit.floats();
  float* c = kit.floats();
  auto* word = reinterpret_cast<uint32_t*>(kit.floats());
  auto* one = reinterpret_cast<uint32_t*>(kit.floats());
  kit.set(a, 4);
  kit.set(b, 5);
  kit.set(c, 6);
  *reinterpret_cast<uint32_t*>(kit.view(one)) = 1;
  ASSERT_TRUE(kit.device.copy(0, word, one, 4, nullptr, 0).ok());
  ASSERT_TRUE(kit.device.copy(0, b, a, kBytes, word, 1).ok());
  ASSERT_TRUE(kit.device.copy(0, c, a, kBytes, word, 2).ok());
  kit.device.drain();
  EXPECT_TRUE(kit.all(b, 4));
  EXPECT_TRUE(kit.all(c, 6)) << "a call that does not run leaves its output as it was";
}

// A kernel with a list operand, so that the pointers inside the list are translated, too.
Status pack(AsyncDevice& device, void** list, float* flat, const Piece* piece,
            const PackArgs* args) {
  const Operand operands[] = {{list}, {flat}};
  KernelCall call;
  call.id = KernelId::kPack;
  call.operands = operands;
  call.pieces = {piece, 1};
  call.args = args;
  const DiscardedRange discarded[] = {{flat, kBytes}};
  return device.launch(0, call, discarded);
}

TEST(AsyncDevice, KernelsRunOnMemoryThatTheHostCannotReach) {
  for (const bool host_memory : {true, false}) {
    AsyncDeviceOptions options;
    options.host_memory = host_memory;
    Kit kit(options);
    EXPECT_EQ(kit.device.caps().host_memory, host_memory);
    float* tensor = kit.floats();
    float* flat = kit.floats();
    EXPECT_TRUE(kit.all(flat, 0)) << "memory starts as zeros";
    std::iota(kit.view(tensor), kit.view(tensor) + kElements, 1.0f);
    void** list = reinterpret_cast<void**>(kit.floats());
    *static_cast<void**>(kit.device.host_view(list)) = tensor;
    Piece piece;
    piece.count = kElements;
    const PackArgs args{0, 4};
    kit.device.hold(0);
    ASSERT_TRUE(pack(kit.device, list, flat, &piece, &args).ok());
    EXPECT_TRUE(kit.none_yet(flat));
    kit.device.resume(0);
    kit.device.drain();
    EXPECT_EQ(std::memcmp(kit.view(flat), kit.view(tensor), kBytes), 0);
    std::vector<float> host(kElements);
    ASSERT_TRUE(kit.copy(1, host.data(), flat).ok());
    kit.device.drain();
    EXPECT_EQ(host[kElements - 1], static_cast<float>(kElements));
  }
}

TEST(AsyncDeviceDeathTest, TheHostCannotTouchDeviceMemory) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  AsyncDeviceOptions options;
  options.host_memory = false;
  AsyncDevice device(options);
  auto* memory = static_cast<volatile float*>(device.alloc(64).take());
  EXPECT_DEATH(memory[0] = 1, "");
}

// Packs a tensor whose first element is left out.
void pack_rest(AsyncDevice& device, void** list, float* flat) {
  const kernels::PackOperands<Operand> operands{.tensors = {list}, .flat = {flat}};
  Piece piece;
  piece.offset = 1;
  piece.count = kElements - 1;
  const PackArgs args{0, 4};
  KernelCall call = call_of<kernels::Pack>(operands);
  call.pieces = {&piece, 1};
  call.args = &args;
  EXPECT_TRUE(device.launch(0, call, {}).ok());
  device.drain();
}

TEST(AsyncDeviceDeathTest, AnOperandThatIsReadIsNotWritten) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  AsyncDevice device({});
  auto* tensor = static_cast<float*>(device.alloc(kBytes).take());
  auto* flat = static_cast<float*>(device.alloc(kBytes).take());
  std::iota(tensor, tensor + kElements, 1.0f);
  void* list[] = {tensor};
  pack_rest(device, list, flat);
  EXPECT_EQ(flat[0], 2.0f);
  EXPECT_DEATH(pack_rest(device, list, tensor),
               "pack wrote operand 'tensors', which its description says it reads");
}

TEST(AsyncDeviceDeathTest, AnOperandIsAbsentOnlyIfItMayBe) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  AsyncDevice device({});
  void* list[] = {device.alloc(kBytes).take()};
  EXPECT_DEATH(pack_rest(device, list, nullptr), "operand 'flat' of pack is absent");
}

// A launch of a prepared kFill on a lane that is held.
struct HeldFill {
  explicit HeldFill(AsyncDevice& device) : memory(device.alloc(kBytes).take()) {
    call.args = &args;
    call.bytes = kBytes;
    operand.data = memory;
    call.operands = {&operand, 1};
    tables = device.prepare({&call, 1}).take();
    call.tables = tables.get();
    device.hold(0);
    EXPECT_TRUE(device.launch(0, call, {}).ok());
  }
  void* memory;
  const FillArgs args{1};
  Operand operand;
  KernelCall call;
  std::shared_ptr<const CallTables> tables;
};

TEST(AsyncDevice, TablesLiveUntilTheirCallsHaveExecuted) {
  AsyncDevice device({});
  HeldFill fill(device);
  EXPECT_EQ(device.live_tables(), 1u);
  device.resume(0);
  device.drain();
  fill.tables.reset();
  EXPECT_EQ(device.live_tables(), 0u);
  device.free(fill.memory, kBytes);
}

TEST(AsyncDeviceDeathTest, TablesThatAreDestroyedTooEarlyOrDoNotFit) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_DEATH(
      {
        AsyncDevice device({});
        HeldFill fill(device);
        fill.tables.reset();
      },
      "tables are destroyed while calls are queued");
  EXPECT_DEATH(
      {
        AsyncDevice device({});
        HeldFill fill(device);
        fill.call.bytes = kBytes / 2;
        (void)device.launch(0, fill.call, {});
      },
      "another call than the one that was prepared");
}

// A list on the host's stack, for a device that reads its own memory alone.
void pack_from_a_list_of_the_host() {
  AsyncDeviceOptions options;
  options.host_memory = false;
  AsyncDevice device(options);
  void* list[] = {device.alloc(kBytes).take()};
  void* flat = device.alloc(kBytes).take();
  Piece piece;
  piece.count = kElements;
  const PackArgs args{0, 4};
  EXPECT_TRUE(pack(device, list, static_cast<float*>(flat), &piece, &args).ok());
  device.drain();
}

TEST(AsyncDeviceDeathTest, AListThatTheDeviceCannotRead) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_DEATH(pack_from_a_list_of_the_host(),
               "a list of tensor pointers that the device cannot read");
}

TEST(AsyncDevice, InjectedFaults) {
  Kit kit;
  float* a = kit.floats();
  float* b = kit.floats();
  kit.set(a, 1);
  kit.set(b, 2);
  kit.device.inject(Fault::kCopy, 1);
  kit.device.inject(Fault::kRecord, 0);
  EXPECT_TRUE(kit.copy(0, b, a).ok());
  EXPECT_EQ(kit.copy(0, b, a).code(), Code::kDevice);
  EXPECT_TRUE(kit.copy(0, b, a).ok());
  EXPECT_EQ(kit.device.record(0).status().code(), Code::kDevice);
  EXPECT_EQ(kit.device.calls(Fault::kCopy), 3u);
  kit.device.inject(Fault::kLaunch, 0);
  Piece piece;
  const PackArgs args{0, 4};
  void* list[] = {a};
  EXPECT_EQ(pack(kit.device, list, b, &piece, &args).code(), Code::kDevice);
}

TEST(AsyncDevice, AnExecutionErrorIsReportedOnceByAnEventBehindIt) {
  Kit kit;
  float* a = kit.floats();
  float* b = kit.floats();
  kit.set(a, 1);
  kit.device.inject(Fault::kExecute, 1);
  ASSERT_TRUE(kit.copy(0, b, a).ok());
  const EventId before = kit.device.record(0).take();
  ASSERT_TRUE(kit.copy(0, b, a).ok());
  const EventId after = kit.device.record(0).take();
  kit.device.drain();
  EXPECT_TRUE(*kit.device.query(before));
  EXPECT_EQ(kit.device.query(after).status().code(), Code::kDevice);
  EXPECT_TRUE(*kit.device.query(after));
  EXPECT_TRUE(kit.none_yet(b));
  kit.device.release(before);
  kit.device.release(after);
}

TEST(AsyncDevice, EventsThatDoNotExistAreRefused) {
  Kit kit;
  EXPECT_EQ(kit.device.wait(0, 12).code(), Code::kDevice);
  EXPECT_EQ(kit.device.query(12).status().code(), Code::kDevice);
  EXPECT_EQ(kit.device.record(2).status().code(), Code::kDevice);
  const EventId event = kit.device.record(0).take();
  EXPECT_EQ(kit.device.live_events(), 1u);
  kit.device.release(event);
}

TEST(AsyncDevice, AnEventMayBeReleasedBeforeItsWaitIsOver) {
  Kit kit;
  float* a = kit.floats();
  float* b = kit.floats();
  float* c = kit.floats();
  kit.set(a, 9);
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(kit.copy(0, b, a).ok());
    ASSERT_TRUE(kit.order(0, 1).ok());
    ASSERT_TRUE(kit.copy(1, c, b).ok());
    ASSERT_TRUE(kit.order(1, 0).ok());
  }
  kit.device.drain();
  EXPECT_TRUE(kit.all(c, 9));
}

}  // namespace
}  // namespace sotto::test
