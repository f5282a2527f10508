// The fake NCCL does what NCCL documents, between real processes, and catches illegal use.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <nccl.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "tests/emulation/cuda/fake_cuda.h"
#include "tests/emulation/nccl/fake_nccl.h"
#include "tests/support/processes.h"

namespace sotto::test {
namespace {

using namespace std::chrono_literals;

// In a rank: ends it with a text.
void require(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}
#define OK(call) require((call) == 0, #call)

std::string hex(const ncclUniqueId& id) {
  std::string text;
  for (const char c : id.internal) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", static_cast<unsigned char>(c));
    text += two;
  }
  return text;
}

ncclUniqueId from_hex(const std::string& text) {
  ncclUniqueId id;
  for (size_t i = 0; i < sizeof id.internal; ++i)
    id.internal[i] = static_cast<char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
  return id;
}

std::string new_id() {
  ncclUniqueId id;
  EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  return hex(id);
}

// One rank's communicator, stream and two buffers.
struct World {
  explicit World(const ProcessRank& self, int blocking = 1, size_t count = 1000)
      : rank(self.rank), size(self.size), n(count) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = blocking;
    config.version = NCCL_VERSION(2, 14, 0);
    const ncclResult_t made =
        ncclCommInitRankConfig(&comm, size, from_hex(self.argument), rank, &config);
    require(made == (blocking != 0 ? ncclSuccess : ncclInProgress), "ncclCommInitRankConfig");
    settle();
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    const size_t bytes = n * sizeof(float);
    OK(cudaMalloc(reinterpret_cast<void**>(&a), bytes * static_cast<size_t>(size)));
    OK(cudaMalloc(reinterpret_cast<void**>(&b), bytes * static_cast<size_t>(size)));
  }
  // Until the communicator is no longer in progress.
  ncclResult_t settle() const {
    ncclResult_t state = ncclInProgress;
    while (state == ncclInProgress) {
      OK(ncclCommGetAsyncError(comm, &state));
      std::this_thread::sleep_for(1ms);
    }
    return state;
  }
  void fill(float* at, float value, size_t count) const {
    const std::vector<float> host(count, value);
    OK(cudaMemcpyAsync(at, host.data(), count * 4, cudaMemcpyHostToDevice, stream));
  }
  std::vector<float> read(const float* at, size_t count) const {
    std::vector<float> host(count);
    OK(cudaMemcpyAsync(host.data(), at, count * 4, cudaMemcpyDeviceToHost, stream));
    OK(cudaStreamSynchronize(stream));
    return host;
  }
  void expect(const float* at, size_t count, float value, const char* what) const {
    for (const float x : read(at, count)) require(x == value, what);
  }
  int next() const { return (rank + 1) % size; }
  int before() const { return (rank + size - 1) % size; }

  int rank, size;
  size_t n;
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;
  float *a = nullptr, *b = nullptr;
};

void leave(World& w) {
  OK(cudaFree(w.a));
  OK(cudaFree(w.b));
  OK(cudaStreamDestroy(w.stream));
  OK(ncclCommDestroy(w.comm));
  require(fake_nccl_live_comms() == 0, "a communicator is left");
  const fake_cuda::Live left = fake_cuda::live();
  require(left == fake_cuda::Live{}, "left: " + left.text());
}

void all_operations(const World& w) {
  const auto size = static_cast<float>(w.size), rank = static_cast<float>(w.rank);
  w.fill(w.a, rank + 1, w.n);
  OK(ncclAllReduce(w.a, w.b, w.n, ncclFloat32, ncclSum, w.comm, w.stream));
  w.expect(w.b, w.n, size * (size + 1) / 2, "all-reduce, sum");
  OK(ncclAllReduce(w.a, w.b, w.n, ncclFloat32, ncclAvg, w.comm, w.stream));
  w.expect(w.b, w.n, (size + 1) / 2, "all-reduce, average");
  OK(ncclAllReduce(w.a, w.b, w.n, ncclFloat32, ncclMax, w.comm, w.stream));
  w.expect(w.b, w.n, size, "all-reduce, maximum");
  // Every rank sends before any receives: without the group this would not end.
  OK(ncclGroupStart());
  OK(ncclSend(w.a, w.n, ncclFloat32, w.next(), w.comm, w.stream));
  OK(ncclRecv(w.b, w.n, ncclFloat32, w.before(), w.comm, w.stream));
  OK(ncclGroupEnd());
  w.expect(w.b, w.n, static_cast<float>(w.before() + 1), "ring exchange");
  OK(ncclAllGather(w.a, w.b, w.n, ncclFloat32, w.comm, w.stream));
  for (int r = 0; r < w.size; ++r)
    w.expect(w.b + w.n * static_cast<size_t>(r), w.n, static_cast<float>(r + 1), "all-gather");
  OK(ncclReduceScatter(w.b, w.a, w.n, ncclFloat32, ncclSum, w.comm, w.stream));
  w.expect(w.a, w.n, size * (rank + 1), "reduce-scatter");
  OK(ncclBroadcast(w.a, w.b, w.n, ncclFloat32, w.size - 1, w.comm, w.stream));
  w.expect(w.b, w.n, size * size, "broadcast");
}

SOTTO_RANK_MAIN(nccl_operations) {
  World w(self);
  all_operations(w);
  ncclComm_t half = nullptr;
  OK(ncclCommSplit(w.comm, w.rank % 2, -w.rank, &half, nullptr));
  int count = 0, place = -1;
  OK(ncclCommCount(half, &count));
  OK(ncclCommUserRank(half, &place));
  require(count == (w.size + 1 - w.rank % 2) / 2, "size of the split");
  require(place == count - 1 - w.rank / 2, "rank in the split: keys are reversed");
  w.fill(w.a, 1, w.n);
  OK(ncclAllReduce(w.a, w.b, w.n, ncclFloat32, ncclSum, half, w.stream));
  w.expect(w.b, w.n, static_cast<float>(count), "all-reduce on the split");
  OK(ncclCommDestroy(half));
  leave(w);
  return 0;
}

SOTTO_RANK_MAIN(nccl_non_blocking) {
  World w(self, 0);
  for (int i = 0; i < 3; ++i) {
    w.fill(w.a, static_cast<float>(i), w.n);
    const ncclResult_t queued =
        ncclAllReduce(w.a, w.b, w.n, ncclFloat32, ncclSum, w.comm, w.stream);
    require(queued == ncclInProgress, "a launch that takes time");
    require(w.settle() == ncclSuccess, "settle");
    w.expect(w.b, w.n, static_cast<float>(i * w.size), "all-reduce");
  }
  leave(w);
  return 0;
}

void queue_exchange(const World& w, ncclResult_t expected, const char* what) {
  OK(ncclGroupStart());
  const ncclResult_t sent = ncclSend(w.a, w.n, ncclFloat32, w.next(), w.comm, w.stream);
  require(sent == ncclSuccess || sent == ncclInProgress, "ncclSend");
  const ncclResult_t received = ncclRecv(w.b, w.n, ncclFloat32, w.before(), w.comm, w.stream);
  require(received == ncclSuccess || received == ncclInProgress, "ncclRecv");
  require(ncclGroupEnd() == expected, what);
}

SOTTO_RANK_MAIN(nccl_first_use) {
  World w(self, 0);
  w.fill(w.a, static_cast<float>(w.rank + 1), w.n);
  if (w.rank == 1) self.at("late");
  queue_exchange(w, ncclInProgress, "the first use of a connection");
  if (w.rank == 0) {
    std::this_thread::sleep_for(50ms);
    ncclResult_t state = ncclSuccess;
    OK(ncclCommGetAsyncError(w.comm, &state));
    require(state == ncclInProgress, "the peer has not come");
    require(cudaStreamQuery(w.stream) == cudaSuccess, "nothing is queued");
    self.at("waiting");
  }
  require(w.settle() == ncclSuccess, "settle");
  w.expect(w.b, w.n, static_cast<float>(w.before() + 1), "exchange");
  require(fake_nccl_connections() == 2, "one to send and one to receive");
  if (w.rank == 1) self.at("late again");
  queue_exchange(w, ncclSuccess, "a connection that is there");
  if (w.rank == 0) {
    std::this_thread::sleep_for(20ms);
    require(cudaStreamQuery(w.stream) == cudaErrorNotReady, "the stream waits");
    self.at("queued");
  }
  w.expect(w.b, w.n, static_cast<float>(w.before() + 1), "exchange");
  require(fake_nccl_connections() == 2, "those that are there");
  leave(w);
  return 0;
}

SOTTO_RANK_MAIN(nccl_abort_of_first_use) {
  World w(self, 0);
  self.at("ready");
  if (w.rank == 0) {
    queue_exchange(w, ncclInProgress, "nobody answers");
    std::this_thread::sleep_for(20ms);
    OK(ncclCommAbort(w.comm));
    require(cudaStreamQuery(w.stream) == cudaSuccess, "nothing is queued");
    return 0;
  }
  ncclResult_t state = ncclSuccess;
  for (int i = 0; i < 10'000 && state == ncclSuccess; ++i) {
    OK(ncclCommGetAsyncError(w.comm, &state));
    std::this_thread::sleep_for(1ms);
  }
  require(state == ncclRemoteError, "an abort is told");
  OK(ncclCommAbort(w.comm));
  return 0;
}

void wait_for(void* go) {
  while (!static_cast<std::atomic<bool>*>(go)->load()) std::this_thread::sleep_for(1ms);
}

// Rank 0's connections, then both ranks' ends, wait for another stream of the device.
SOTTO_RANK_MAIN(nccl_waits_for_device) {
  World w(self, 0);
  w.fill(w.a, 1, w.n);
  OK(cudaStreamSynchronize(w.stream));
  cudaStream_t busy = nullptr;
  OK(cudaStreamCreateWithFlags(&busy, cudaStreamNonBlocking));
  std::atomic<bool> go{false};
  fake_nccl_wait_for_device(true);
  if (w.rank == 0) OK(cudaLaunchHostFunc(busy, wait_for, &go));
  queue_exchange(w, ncclInProgress, "the first use of a connection");
  std::this_thread::sleep_for(50ms);
  ncclResult_t state = ncclSuccess;
  OK(ncclCommGetAsyncError(w.comm, &state));
  require(w.rank == 1 || state == ncclInProgress, "the device of rank 0 does not stand still");
  go = true;
  require(w.settle() == ncclSuccess, "settle");
  OK(cudaStreamSynchronize(w.stream));

  go = false;
  OK(cudaLaunchHostFunc(busy, wait_for, &go));
  std::atomic<bool> ended{false};
  std::thread end([&] {
    w.rank == 0 ? ncclCommAbort(w.comm) : ncclCommDestroy(w.comm);
    ended = true;
  });
  std::this_thread::sleep_for(50ms);
  const bool waited = !ended;
  go = true;
  end.join();
  require(waited, "the end waits for the device");
  return 0;
}

SOTTO_RANK_MAIN(nccl_survivor) {
  World w(self);
  w.fill(w.a, 1, w.n);
  OK(ncclAllReduce(w.a, w.b, w.n, ncclFloat32, ncclSum, w.comm, w.stream));
  OK(cudaStreamSynchronize(w.stream));
  self.at("ready");
  const ncclResult_t queued = ncclAllReduce(w.a, w.b, w.n, ncclFloat32, ncclSum, w.comm, w.stream);
  require(queued == ncclSuccess || queued == ncclRemoteError, "a call as the rank dies");
  ncclResult_t state = ncclSuccess;
  for (int i = 0; i < 10'000 && state == ncclSuccess; ++i) {
    OK(ncclCommGetAsyncError(w.comm, &state));
    std::this_thread::sleep_for(1ms);
  }
  require(state == ncclRemoteError, "the error of a lost rank");
  require(ncclAllReduce(w.a, w.b, w.n, ncclFloat32, ncclSum, w.comm, w.stream) == ncclRemoteError,
          "calls after it");
  require(queued != ncclSuccess || cudaStreamQuery(w.stream) == cudaErrorNotReady,
          "the operation holds up its stream");
  OK(ncclCommAbort(w.comm));
  OK(cudaStreamSynchronize(w.stream));  // the operation has been released
  return 0;
}

SOTTO_RANK_MAIN(nccl_hangs) {
  World w(self);
  w.fill(w.a, 1, w.n);
  if (w.rank == 1) fake_nccl_hang(0);
  OK(ncclAllReduce(w.a, w.b, w.n, ncclFloat32, ncclSum, w.comm, w.stream));
  std::this_thread::sleep_for(100ms);
  require(cudaStreamQuery(w.stream) == cudaErrorNotReady, "one rank hangs, the others wait for it");
  self.at("waiting");
  if (w.rank == 1) {
    OK(ncclCommAbort(w.comm));
    OK(cudaStreamSynchronize(w.stream));
    return 0;
  }
  ncclResult_t state = ncclSuccess;
  for (int i = 0; i < 10'000 && state == ncclSuccess; ++i) {
    OK(ncclCommGetAsyncError(w.comm, &state));
    std::this_thread::sleep_for(1ms);
  }
  require(state == ncclRemoteError, "an abort is told");
  OK(ncclCommAbort(w.comm));
  return 0;
}

SOTTO_RANK_MAIN(nccl_mismatch) {
  World w(self);
  w.fill(w.a, 1, w.n);
  const size_t n = w.n - (w.rank == 1 ? 1 : 0);
  OK(ncclAllReduce(w.a, w.b, n, ncclFloat32, ncclSum, w.comm, w.stream));
  std::this_thread::sleep_for(200ms);
  require(cudaStreamQuery(w.stream) == cudaErrorNotReady, "it hangs");
  self.at("hangs");
  OK(ncclCommAbort(w.comm));
  return 0;
}

void run(const std::string& main, int size, std::vector<std::string> environment = {}) {
  Processes ranks(main, size, {.argument = new_id(), .environment = std::move(environment)});
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
}

TEST(FakeNccl, OperationsOfOneRank) { run("nccl_operations", 1); }
TEST(FakeNccl, OperationsOfTwoRanks) { run("nccl_operations", 2); }
TEST(FakeNccl, OperationsOfFourRanksWithDelays) {
  run("nccl_operations", 4, {"FAKE_NCCL_MAX_DELAY_US=2000", "FAKE_CUDA_MAX_DELAY_US=300"});
}

TEST(FakeNccl, NonBlockingCommunicatorsAreInProgressForAWhile) {
  run("nccl_non_blocking", 2, {"FAKE_NCCL_INIT_DELAY_MS=50", "FAKE_NCCL_LAUNCH_DELAY_US=5000"});
}

TEST(FakeNccl, ConnectionsAreMadeByBothRanksAtTheirFirstUse) {
  Processes ranks("nccl_first_use", 2,
                  {.argument = new_id(), .stop_at = {"1:late", "1:late again"}});
  ranks.await(0, "waiting");
  ranks.go(1);
  ranks.await(0, "queued");
  ranks.go(1);
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
}
TEST(FakeNccl, AnAbortEndsTheFirstUse) { run("nccl_abort_of_first_use", 2); }

TEST(FakeNccl, ConnectionsAndEndsWaitForTheDeviceIfAsked) { run("nccl_waits_for_device", 2); }

TEST(FakeNccl, AKilledRankIsARemoteError) {
  Processes ranks("nccl_survivor", 3, {.argument = new_id(), .stop_at = {"2:ready"}});
  for (const int rank : {0, 1, 2}) ranks.await(rank, "ready");
  ranks.kill(2, SIGKILL);
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
}

TEST(FakeNccl, AnOperationThatHangsEndsWithAnAbort) {
  Processes ranks("nccl_hangs", 2, {.argument = new_id(), .stop_at = {"1:waiting"}});
  ranks.await(0, "waiting");
  ranks.go(1);
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
}
TEST(FakeNccl, AMismatchHangsIfAsked) {
  Processes ranks("nccl_mismatch", 2,
                  {.argument = new_id(),
                   .environment = {"FAKE_NCCL_MISMATCH=hang"},
                   .stop_at = {"0:hangs", "1:hangs"}});
  for (const int rank : {0, 1}) ranks.await(rank, "hangs");
  for (const int rank : {0, 1}) ranks.go(rank);
  ranks.wait_all();
  EXPECT_EQ(ranks.failure(), "") << ranks.prefixed_output();
}

TEST(FakeNccl, AMismatchEndsTheProcessOtherwise) {
  Processes ranks("nccl_mismatch", 2, {.argument = new_id(), .stop_at = {"0:hangs", "1:hangs"}});
  ranks.wait(0);
  EXPECT_NE(ranks.prefixed_output().find("fake NCCL: rank 0 expects 4000 bytes of operation"),
            std::string::npos)
      << ranks.prefixed_output();
}

// ---- One rank, in this process ----

TEST(FakeNccl, AFinalizeThatHangsEndsWithAnAbort) {
  const auto settled = [](ncclComm_t comm) {
    ncclResult_t state = ncclInProgress;
    const auto end = std::chrono::steady_clock::now() + 60s;
    while (state == ncclInProgress && std::chrono::steady_clock::now() < end)
      EXPECT_EQ(ncclCommGetAsyncError(comm, &state), ncclSuccess);
    return state;
  };
  for (const bool hangs : {false, true}) {
    ncclUniqueId id;
    ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t comm = nullptr;
    ASSERT_EQ(ncclCommInitRankConfig(&comm, 1, id, 0, &config), ncclInProgress);
    ASSERT_EQ(settled(comm), ncclSuccess);
    fake_nccl_hang_finalize(hangs);
    EXPECT_EQ(ncclCommFinalize(comm), hangs ? ncclInProgress : ncclSuccess);
    fake_nccl_hang_finalize(false);  // for those from now on
    ncclResult_t state = ncclSuccess;
    ASSERT_EQ(ncclCommGetAsyncError(comm, &state), ncclSuccess);
    EXPECT_EQ(state, hangs ? ncclInProgress : ncclSuccess);
    EXPECT_EQ(hangs ? ncclCommAbort(comm) : ncclCommDestroy(comm), ncclSuccess);
    EXPECT_EQ(fake_nccl_live_comms(), 0u);
  }
}

// Since 2.22: what it has on the device ends at once, the rest with the group.
TEST(FakeNccl, AnAbortInAGroupFreesAtItsEnd) {
  ncclUniqueId id;
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;
  float* x = nullptr;
  ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  ASSERT_EQ(ncclCommInitRank(&comm, 1, id, 0), ncclSuccess);
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&x), sizeof *x), cudaSuccess);
  fake_nccl_hang(0);
  EXPECT_EQ(ncclAllReduce(x, x, 1, ncclFloat32, ncclSum, comm, stream), ncclSuccess);
  std::this_thread::sleep_for(50ms);
  EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
  EXPECT_EQ(ncclGroupStart(), ncclSuccess);
  EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(fake_nccl_live_comms(), 1u);
  EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
  EXPECT_EQ(fake_nccl_live_comms(), 0u);
  EXPECT_EQ(cudaFree(x), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

class FakeNcclDeathTest : public testing::Test {
 protected:
  void SetUp() override {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    ncclUniqueId id;
    ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
    ASSERT_EQ(ncclCommInitRank(&comm, 1, id, 0), ncclSuccess);
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaMalloc(&buffer, 400), cudaSuccess);
  }
  void TearDown() override {
    if (comm != nullptr) {
      EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
    }
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    EXPECT_EQ(cudaFree(buffer), cudaSuccess);
  }
  ncclResult_t all_reduce(size_t n) {
    return ncclAllReduce(buffer, buffer, n, ncclFloat32, ncclSum, comm, stream);
  }
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;
  void* buffer = nullptr;
};

TEST_F(FakeNcclDeathTest, IllegalUse) {
  EXPECT_DEATH(all_reduce(101), "ncclAllReduce of 404 bytes at offset 0 runs out of 400 bytes");
  EXPECT_DEATH(ncclGroupEnd(), "ncclGroupEnd without ncclGroupStart");
  EXPECT_DEATH(
      {
        ncclCommDestroy(comm);
        all_reduce(100);
      },
      "ncclAllReduce: a communicator that was never made or has been destroyed");
  EXPECT_DEATH(
      {
        ncclCommFinalize(comm);
        all_reduce(100);
      },
      "the communicator is finalized");
  EXPECT_DEATH(
      {
        fake_cuda::hold();
        cudaLaunchHostFunc(
            stream, [](void*) {}, nullptr);
        all_reduce(100);
        cudaStream_t other = nullptr;
        cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
        cudaFreeAsync(buffer, other);
        while (fake_cuda::live().device_blocks != 0) std::this_thread::yield();
        fake_cuda::resume();
        fake_cuda::drain();
      },
      "ncclAllReduce of 400 bytes of memory that the device cannot reach: within 400 bytes");
  EXPECT_DEATH(
      {
        float host[100] = {};
        ncclSend(host, 100, ncclFloat32, 0, comm, stream);
      },
      "ncclSend of 400 bytes of memory that the device cannot reach");
  EXPECT_DEATH(
      {
        ncclGroupStart();
        all_reduce(100);
        std::thread([this] { all_reduce(100); }).join();
      },
      "another thread has operations of the communicator in a group");
  EXPECT_DEATH(
      {
        cudaSetDevice(1);
        cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
        all_reduce(100);
      },
      "on a stream of device 1, but the communicator is of device 0");
}

SOTTO_RANK_MAIN(nccl_version) {
  int version = 0;
  OK(ncclGetVersion(&version));
  std::fprintf(stderr, "plays %d\n", version);
  void* p = nullptr;
  ncclMemAlloc(&p, 16);
  return 0;
}

TEST(FakeNccl, OldVersionsLackWhatCameLater) {
  Processes one("nccl_version", 1, {.environment = {"FAKE_NCCL_VERSION=21805"}});
  one.wait_all();
  EXPECT_NE(one.output(0).find("plays 21805"), std::string::npos) << one.output(0);
  EXPECT_NE(one.output(0).find("ncclMemAlloc is called, but NCCL 21805 has no such function"),
            std::string::npos)
      << one.output(0);
}

TEST_F(FakeNcclDeathTest, MemoryIsFreedInTheOrderOfItsStream) {
  fake_cuda::hold();
  ASSERT_EQ(all_reduce(100), ncclSuccess);
  ASSERT_EQ(cudaFreeAsync(std::exchange(buffer, nullptr), stream), cudaSuccess);
  fake_cuda::resume();
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
}

// NCCL polls until all graphs with its plans are destroyed, also in an abort.
TEST_F(FakeNcclDeathTest, GraphsKeepCommunicatorsFromEnding) {
  const uint64_t live = fake_nccl_live_comms();
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  ASSERT_EQ(all_reduce(100), ncclSuccess);
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  std::thread end([this] { EXPECT_EQ(ncclCommAbort(comm), ncclSuccess); });
  std::this_thread::sleep_for(50ms);
  EXPECT_EQ(fake_nccl_live_comms(), live);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  end.join();
  comm = nullptr;
  EXPECT_EQ(fake_nccl_live_comms(), live - 1);
}

TEST_F(FakeNcclDeathTest, AnyCallCanFail) {
  fake_nccl_fail_call(1, ncclSystemError);
  EXPECT_EQ(ncclGroupStart(), ncclSuccess);
  EXPECT_EQ(all_reduce(100), ncclSystemError);
  EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
  EXPECT_STREQ(fake_nccl_failed_call(), "ncclAllReduce");
  fake_nccl_break(comm, ncclRemoteError);
  ncclResult_t state = ncclSuccess;
  EXPECT_EQ(ncclCommGetAsyncError(comm, &state), ncclSuccess);
  EXPECT_EQ(state, ncclRemoteError);
}

}  // namespace
}  // namespace sotto::test
