// The CUDA device itself: memory, copies, events, streams of the caller, errors.
#include "cuda/cuda_device.h"
#include "cuda/device_pool.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "core/iface/device.h"
#include "core/kernels/bytes.h"

namespace sotto {
namespace {

constexpr uint64_t kBytes = 100'000;

// Blocked streams ask for it. The device was opened without: its kernels are loaded nevertheless.
struct AsBlocksNeed {
  AsBlocksNeed() { setenv("CUDA_MODULE_LOADING", "EAGER", 1); }
  ~AsBlocksNeed() { unsetenv("CUDA_MODULE_LOADING"); }
};

class CudaDeviceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    Result<std::shared_ptr<Device>> made = make_cuda_device(0);
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0)
      GTEST_SKIP() << made.status().text();
    ASSERT_TRUE(made.ok()) << made.status().text();
    device_ = made.take();
    host_ = static_cast<unsigned char*>(device_->alloc_host(kBytes).take());
    back_ = static_cast<unsigned char*>(device_->alloc_host(kBytes).take());
  }
  void TearDown() override {
    if (device_ == nullptr) return;
    device_->free_host(host_, kBytes);
    device_->free_host(back_, kBytes);
  }
  Status copy(uint32_t lane, void* dst, const void* src, uint64_t bytes = kBytes) {
    return device_->copy(lane, dst, src, bytes, nullptr, 0);
  }
  // Everything queued on the lane has executed.
  void settle(uint32_t lane) {
    const EventId event = device_->record(lane).take();
    Result<bool> done = false;
    while (done.ok() && !*done) done = device_->query(event);
    EXPECT_TRUE(done.ok()) << done.status().text();
    device_->release(event);
  }
  bool all(const unsigned char* at, unsigned char value) const {
    return std::all_of(at, at + kBytes, [&](unsigned char c) { return c == value; });
  }

  std::shared_ptr<Device> device_;
  unsigned char* host_ = nullptr;
  unsigned char* back_ = nullptr;
};

TEST_F(CudaDeviceTest, MemoryIsZeroedAndCopiesArrive) {
  void* memory = device_->alloc(kBytes).take();
  EXPECT_TRUE(all(host_, 0));
  std::memset(back_, 9, kBytes);
  ASSERT_TRUE(copy(0, back_, memory).ok());
  settle(0);
  EXPECT_TRUE(all(back_, 0));
  std::memset(host_, 5, kBytes);
  ASSERT_TRUE(copy(1, memory, host_).ok());
  ASSERT_TRUE(copy(1, back_, memory).ok());
  settle(1);
  EXPECT_TRUE(all(back_, 5));
  device_->free(memory, kBytes);
  device_->free(nullptr, 0);
  EXPECT_EQ(device_->alloc(UINT64_MAX).status().code(), Code::kOutOfMemory);
}

TEST_F(CudaDeviceTest, CopiesUnderACondition) {
  void* from = device_->alloc(kBytes).take();
  void* to = device_->alloc(kBytes).take();
  void* word = device_->alloc(4).take();
  const uint32_t commit = 1;
  std::memcpy(host_, &commit, 4);
  ASSERT_TRUE(copy(0, word, host_, 4).ok());
  std::memset(back_, 7, kBytes);
  ASSERT_TRUE(copy(0, from, back_).ok());
  settle(0);
  for (const uint32_t expect : {2u, 1u}) {
    ASSERT_TRUE(
        device_->copy(0, to, from, kBytes, static_cast<const uint32_t*>(word), expect).ok());
    ASSERT_TRUE(copy(0, back_, to).ok());
    settle(0);
    EXPECT_TRUE(all(back_, expect == commit ? 7 : 0)) << expect;
  }
  for (void* memory : {from, to, word}) device_->free(memory, kBytes);
}

TEST_F(CudaDeviceTest, KernelsRunFromTablesAndLanesWaitForEvents) {
  void* memory = device_->alloc(kBytes).take();
  const FillArgs args{0x11};
  Operand operand{memory};
  KernelCall call;
  call.args = &args;
  call.bytes = kBytes;
  call.operands = {&operand, 1};
  EXPECT_EQ(device_->launch(0, call, {}).code(), Code::kInternal) << "not prepared";
  const std::shared_ptr<const CallTables> tables = device_->prepare({&call, 1}).take();
  call.tables = tables.get();
  ASSERT_TRUE(device_->launch(0, call, {}).ok());
  const EventId filled = device_->record(0).take();
  ASSERT_TRUE(device_->wait(2, filled).ok());
  device_->release(filled);
  ASSERT_TRUE(copy(2, back_, memory).ok());
  settle(2);
  EXPECT_TRUE(all(back_, 0x11));
  call.call = 1;
  EXPECT_EQ(device_->launch(0, call, {}).code(), Code::kInternal) << "no such call";
  EXPECT_EQ(device_->launch(kMaxLanes, call, {}).code(), Code::kInternal) << "no such lane";
  settle(0);
  device_->free(memory, kBytes);
}

TEST_F(CudaDeviceTest, StreamsOfTheCallerComeBeforeAndBehind) {
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  void* memory = device_->alloc(kBytes).take();
  std::memset(host_, 3, kBytes);
  ASSERT_EQ(cudaMemcpyAsync(memory, host_, kBytes, cudaMemcpyHostToDevice, stream), cudaSuccess);
  const EventId before = device_->record_stream(stream).take();
  ASSERT_TRUE(device_->wait(0, before).ok());
  device_->release(before);
  ASSERT_TRUE(copy(0, back_, memory).ok());
  const EventId copied = device_->record(0).take();
  ASSERT_TRUE(device_->stream_after_event(stream, copied).ok());
  device_->release(copied);
  ASSERT_EQ(cudaMemsetAsync(memory, 0, kBytes, stream), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_TRUE(all(back_, 3));
  device_->free(memory, kBytes);
  ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

// Several rounds, so that words are used again.
TEST_F(CudaDeviceTest, StreamsAreBlockedUntilTheyAreUnblocked) {
  const AsBlocksNeed environment;
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  for (int round = 0; round < 3; ++round) {
    std::vector<BlockId> blocks;
    for (int i = 0; i < 1100; ++i) blocks.push_back(device_->block_stream(stream).take());
    for (size_t i = 0; i + 1 < blocks.size(); ++i) device_->unblock(blocks[i]);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
    device_->unblock(blocks.back());
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  }
  ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

// Loading a kernel may wait until the device stands still, which a blocked stream keeps it from.
TEST_F(CudaDeviceTest, KernelsAreLoadedBeforeStreamsAreBlocked) {
  const AsBlocksNeed environment;
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  void* memory = device_->alloc(kBytes).take();
  const FillArgs args{0x22};
  Operand operand{memory};
  KernelCall call;
  call.args = &args;
  call.bytes = kBytes;
  call.operands = {&operand, 1};
  const std::shared_ptr<const CallTables> tables = device_->prepare({&call, 1}).take();
  call.tables = tables.get();
  const BlockId block = device_->block_stream(stream).take();
  ASSERT_TRUE(device_->launch(0, call, {}).ok());
  ASSERT_TRUE(copy(0, back_, memory).ok());
  settle(0);
  EXPECT_TRUE(all(back_, 0x22));
  device_->unblock(block);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  device_->free(memory, kBytes);
  ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

TEST_F(CudaDeviceTest, DevicesInUseReachEachOthersMemory) {
  int devices = 0, can[2] = {};
  ASSERT_EQ(cudaGetDeviceCount(&devices), cudaSuccess);
  if (devices < 2) GTEST_SKIP() << "needs two CUDA devices";
  for (int i : {0, 1}) ASSERT_EQ(cudaDeviceCanAccessPeer(&can[i], i, 1 - i), cudaSuccess);
  DevicePool first(0), second(1);
  ASSERT_EQ(first.open().text(), "");
  ASSERT_EQ(second.open().text(), "");
  const auto access = [&](int of, int by) {
    const cudaMemPool_t pool = of == 0 ? first.handle() : second.handle();
    cudaMemLocation location{};
    location.type = cudaMemLocationTypeDevice;
    location.id = by;
    cudaMemAccessFlags flags = cudaMemAccessFlagsProtNone;
    EXPECT_EQ(cudaMemPoolGetAccess(&flags, pool, &location), cudaSuccess);
    return flags;
  };
  for (int i : {0, 1}) {
    EXPECT_EQ(access(1 - i, i),
              can[i] != 0 ? cudaMemAccessFlagsProtReadWrite : cudaMemAccessFlagsProtNone);
    if (devices > 2) {
      EXPECT_EQ(access(i, 2), cudaMemAccessFlagsProtNone) << "nobody uses it here";
    }
  }
}

// Of a thread that has called nothing of the runtime.
TEST_F(CudaDeviceTest, CallsOfTheDriverHaveAContext) {
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  Result<BlockId> block = BlockId{0};
  Status behind;
  std::thread([&] { block = device_->block_stream(stream); }).join();
  ASSERT_TRUE(block.ok()) << block.status().text();
  std::thread([&] { behind = device_->unblock_behind(0, *block); }).join();
  EXPECT_TRUE(behind.ok()) << behind.text();
  if (!behind.ok()) device_->unblock(*block);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  unsetenv("CUDA_MODULE_LOADING");
}

TEST_F(CudaDeviceTest, ErrorsNameTheCallTheDeviceAndTheError) {
  const Status far = make_cuda_device(77).status();
  EXPECT_EQ(far.code(), Code::kDevice);
  EXPECT_NE(far.text().find("there is no cuda:77; this process sees "), std::string::npos);
  const Status large = device_->alloc(uint64_t{1} << 50).status();
  EXPECT_EQ(large.code(), Code::kOutOfMemory);
  for (const char* part : {"1125899906842624 bytes",
                           "cudaMallocFromPoolAsync on cuda:0: ", "(cudaErrorMemoryAllocation, 2)"})
    EXPECT_NE(large.text().find(part), std::string::npos) << large.text();
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "others would take it for theirs";
}

TEST_F(CudaDeviceTest, TextsSayWhatThereIs) {
  const std::vector<std::string> texts = cuda_device_texts();
  ASSERT_FALSE(texts.empty());
  EXPECT_EQ(texts[0].rfind("cuda:0 (", 0), 0u) << texts[0];
}

}  // namespace
}  // namespace sotto
