// The NCCL transport alone, on the fake NCCL: groups of messages in host memory and on lanes of a
// device, ranks as threads, without an engine.
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <deque>
#include <thread>

#include "core/iface/device.h"
#include "tests/conformance/transport_suite.h"
#include "tests/emulation/cuda/fake_cuda.h"
#include "tests/emulation/nccl/fake_nccl.h"
#include "tests/nccl/room_control.h"
#include "transports/nccl/group_header.h"
#include "transports/nccl/nccl_backend.h"

namespace sotto::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// What the transport asks of a device: what it is, and the stream of a lane.
class Lane final : public Device {
 public:
  explicit Lane(DeviceId id) {
    caps_.id = id;
    caps_.synchronous = id.type == DeviceType::kCpu;
    if (caps_.synchronous) return;
    require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) == cudaSuccess, "stream");
  }
  ~Lane() override {
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  }
  const DeviceCaps& caps() const override { return caps_; }
  Result<void*> lane_stream(uint32_t) override { return static_cast<void*>(stream_); }
  cudaStream_t stream() const { return stream_; }

  Result<void*> alloc(uint64_t) override { return unused(); }
  void free(void*, uint64_t) override {}
  Status launch(uint32_t, const KernelCall&, std::span<const DiscardedRange>) override {
    return unused();
  }
  Status copy(uint32_t, void*, const void*, uint64_t, const uint32_t*, uint32_t) override {
    return unused();
  }
  Result<EventId> record(uint32_t) override { return unused(); }
  Status wait(uint32_t, EventId) override { return unused(); }
  Result<bool> query(EventId) override { return unused(); }
  void release(EventId) override {}
  Result<EventId> record_stream(void*) override { return unused(); }
  Status stream_after_event(void*, EventId) override { return unused(); }
  Result<BlockId> block_stream(void*) override { return unused(); }
  void unblock(BlockId) override {}
  uint64_t busy_ns() const override { return 0; }

 private:
  static Status unused() { return unsupported("the transport does not ask for this"); }
  DeviceCaps caps_;
  cudaStream_t stream_ = nullptr;
};

// A microsecond goes by at each look, however long that takes.
class LookingClock final : public Clock {
 public:
  int64_t now_ns() const override {
    std::this_thread::sleep_for(std::chrono::microseconds(real_us_.load()));
    return now_ns_ += 1000;
  }
  // How long a look takes.
  void slow_down(int64_t real_us) { real_us_ = real_us; }

 private:
  std::atomic<int64_t> real_us_{0};
  mutable std::atomic<int64_t> now_ns_{1'000'000'000};
};

struct Kit {
  Kit(ControlRoom& room, int32_t number, const Clock& clock = Clock::monotonic())
      : rank(number),
        size(static_cast<int32_t>(room.blobs.size())),
        control(room, number),
        backend(check(make_nccl_backend({.library = {}, .native = 0}))),
        driver(backend->poller(), clock),
        host({DeviceType::kCpu, 0}),
        device({DeviceType::kCuda, 0}),
        transport(check(backend->connect(control, {all_ranks(control)}, sink, driver,
                                         Deadline::in_us(clock, 60'000'000)))) {
    barrier();  // no rank aborts what others still wait for
  }

  static Deadline in(int64_t us) { return Deadline::in_us(Clock::monotonic(), us); }
  static std::vector<Transfer*> group(TestOp& op) {
    std::vector<Transfer*> all;
    for (Transfer& t : op.transfers) all.push_back(&t);
    return all;
  }
  // As the engine does it.
  void issue(TestOp& op, Device& on) {
    Status status;
    const auto queued = [&] {
      status = queue->issue(group(op), &on, 1);
      return status.code() != Code::kInProgress || !sink.failures.empty();
    };
    driver.run_until(queued, in(60'000'000));
    if (sink.failures.empty()) check(status, "issue");
  }
  // Until the sink has heard of so many transfers in all.
  void await(size_t transfers) {
    driver.run_until([&] { return sink.done.size() >= transfers || !sink.failures.empty(); },
                     in(60'000'000));
    require(sink.failures.empty(), sink.failures.empty() ? "" : sink.failures[0].status.text());
    require(sink.done.size() >= transfers, "transfers were not completed");
  }
  std::string await_failure() {
    driver.run_until([&] { return !sink.failures.empty(); }, in(60'000'000));
    require(!sink.failures.empty(), "nothing has failed");
    const Status& s = sink.failures[0].status;
    return fmt::format("{}: {}", code_name(s.code()), s.text());
  }
  void barrier() { check(control.all_gather("", "", driver, {}).status()); }
  void finish() {
    barrier();
    transport->close(in(5'000'000));
  }
  int32_t next() const { return (rank + 1) % size; }
  int32_t before() const { return (rank + size - 1) % size; }

  const int32_t rank, size;
  RoomControl control;
  std::unique_ptr<Backend> backend;
  PollDriver driver;
  Lane host, device;
  RecordingSink sink;
  std::unique_ptr<Transport> transport;
  QueueTransport* const queue = transport->as_queue_transport();
};

class NcclGroups : public testing::Test {
 protected:
  void SetUp() override {
    fake_cuda::clear_faults();
    fake_cuda::configure({.max_delay_us = 300, .seed = 11});
  }
  void TearDown() override {
    fake_cuda::drain();
    EXPECT_EQ(fake_nccl_live_comms(), 0u);
    EXPECT_EQ(fake_cuda::live(), fake_cuda::Live{}) << fake_cuda::live().text();
  }
  static std::string run(int size, const std::function<void(Kit&)>& body) {
    ControlRoom room(size);
    return run_ranks(size, [&](int rank) {
      Kit kit(room, rank);
      body(kit);
    });
  }
};

TEST_F(NcclGroups, MessagesInHostMemoryBetweenAllPairs) {
  for (const int size : {1, 2, 4}) {
    EXPECT_EQ(run(size,
                  [](Kit& kit) {
                    size_t done = 0;
                    for (uint32_t round = 0; round < 3; ++round) {
                      TestOp op(7, round);
                      std::deque<std::vector<uint8_t>> in, out;
                      for (int32_t peer = 0; peer < kit.size; ++peer) {
                        uint32_t segment = 0;
                        if (peer == kit.rank) continue;
                        for (const uint64_t bytes : {0, 1, 7, 4096, 65537}) {
                          auto& data = out.emplace_back(bytes);
                          fill_message(data, static_cast<uint32_t>(kit.rank),
                                       static_cast<uint32_t>(peer), round, segment);
                          op.add(true, peer, round, segment, data.data(), bytes);
                          op.add(false, peer, round, segment, in.emplace_back(bytes).data(), bytes);
                          ++segment;
                        }
                      }
                      kit.issue(op, kit.host);
                      kit.await(done += op.transfers.size());
                      size_t i = 0;
                      for (const Transfer& t : op.transfers) {
                        if (t.is_send) continue;
                        std::vector<uint8_t> expected(t.bytes);
                        fill_message(expected, static_cast<uint32_t>(t.peer),
                                     static_cast<uint32_t>(kit.rank), round, t.segment);
                        require(in[i++] == expected, "the bytes of a message");
                      }
                    }
                    kit.finish();
                  }),
              "")
        << size << " ranks";
  }
}

// A value goes round the ring on the lane: what is queued in front and behind needs no host. In
// between an operation on the host.
TEST_F(NcclGroups, GroupsOfALaneAndOfTheHostAreInOrder) {
  constexpr size_t kBytes = 40'000;
  EXPECT_EQ(
      run(3,
          [](Kit& kit) {
            uint8_t *a = nullptr, *b = nullptr, *result = nullptr;
            require(cudaMalloc(reinterpret_cast<void**>(&a), kBytes) == cudaSuccess, "a");
            require(cudaMalloc(reinterpret_cast<void**>(&b), kBytes) == cudaSuccess, "b");
            require(cudaMallocHost(reinterpret_cast<void**>(&result), kBytes) == cudaSuccess, "r");
            const cudaStream_t s = kit.device.stream();
            std::deque<TestOp> ops;
            uint8_t host_out = 0, host_in = 0;
            for (uint64_t i = 0; i < 20; ++i) {
              require(cudaMemsetAsync(a, kit.rank + static_cast<int>(i), kBytes, s) == cudaSuccess,
                      "fill");
              TestOp& op = ops.emplace_back(7, 2 * i);
              op.add(true, kit.next(), 0, 0, a, kBytes);
              op.add(false, kit.before(), 0, 0, b, kBytes);
              kit.issue(op, kit.device);
              require(cudaMemcpyAsync(result, b, kBytes, cudaMemcpyDeviceToHost, s) == cudaSuccess,
                      "copy");
              TestOp& on_host = ops.emplace_back(7, 2 * i + 1);
              host_out = static_cast<uint8_t>(kit.rank + 100);
              on_host.add(true, kit.before(), 0, 0, &host_out, 1);
              on_host.add(false, kit.next(), 0, 0, &host_in, 1);
              kit.issue(on_host, kit.host);
              kit.await(2 * (i + 1));  // of the host's operations alone
              require(host_in == kit.next() + 100, "the operation on the host");
              require(cudaStreamSynchronize(s) == cudaSuccess, "synchronise");
              for (size_t k = 0; k < kBytes; ++k)
                require(result[k] == kit.before() + static_cast<int>(i), "the value of the ring");
              check(kit.queue->verify(op.descriptor), "verify");
            }
            kit.finish();
            const TransferCounters sent = kit.transport->counters(7, kit.next());
            require(sent.payload_bytes_sent == 20 * kBytes, "bytes sent");
            const TransferCounters headers = kit.transport->counters(0, kit.next());
            require(headers.service_bytes_sent == 40 * sizeof(nccl::GroupHeader),
                    "bytes of headers");
            require(cudaFree(a) == cudaSuccess && cudaFree(b) == cudaSuccess &&
                        cudaFreeHost(result) == cudaSuccess,
                    "free");
          }),
      "");
}

TEST_F(NcclGroups, ADifferentOperationIsDescribedOnBothRanks) {
  EXPECT_EQ(run(2,
                [](Kit& kit) {
                  TestOp op(7, 0, static_cast<uint64_t>(kit.rank));  // another tag
                  uint8_t in[8] = {}, out[8] = {};
                  op.add(true, 1 - kit.rank, 0, 0, out, sizeof out);
                  op.add(false, 1 - kit.rank, 0, 0, in, sizeof in);
                  kit.issue(op, kit.host);
                  EXPECT_THAT(kit.await_failure(),
                              AllOf(HasSubstr("PROTOCOL"), HasSubstr("do not agree on operation 0"),
                                    HasSubstr("tag 0"), HasSubstr("tag 1")));
                  EXPECT_TRUE(kit.sink.done.empty());
                  kit.transport->cancel(op.descriptor);
                }),
            "");
}

// On a lane the engine may see the end before the transport is polled, or when that was aborted: it
// asks.
TEST_F(NcclGroups, VerifyFindsWhatWasNotMeant) {
  for (const bool given_up : {false, true}) {
    std::barrier executed(2);  // what a rank aborts hangs on the other
    EXPECT_EQ(run(2,
                  [given_up, &executed](Kit& kit) {
                    void* memory = nullptr;
                    require(cudaMalloc(&memory, 16) == cudaSuccess, "memory");
                    auto* const bytes = static_cast<uint8_t*>(memory);
                    TestOp op(7, 0, static_cast<uint64_t>(kit.rank));
                    op.add(true, 1 - kit.rank, 0, 0, bytes, 8);
                    op.add(false, 1 - kit.rank, 0, 0, bytes + 8, 8);
                    kit.issue(op, kit.device);
                    require(cudaStreamSynchronize(kit.device.stream()) == cudaSuccess, "wait");
                    executed.arrive_and_wait();
                    if (given_up) kit.transport->cancel(op.descriptor);
                    EXPECT_EQ(kit.queue->verify(op.descriptor).code(), Code::kProtocol);
                    if (!given_up) kit.transport->cancel(op.descriptor);
                    require(cudaFree(memory) == cudaSuccess, "free");
                  }),
              "");
  }
}

// The thread that issues groups must not wait for the device, and so for a stream that is held
// until it goes on.
TEST_F(NcclGroups, PinNoMemoryWhenTheyAreIssued) {
  EXPECT_EQ(run(2,
                [](Kit& kit) {
                  std::deque<TestOp> ops;
                  void* memory = nullptr;
                  require(cudaMalloc(&memory, 16) == cudaSuccess, "memory");
                  auto* const bytes = static_cast<uint8_t*>(memory);
                  kit.barrier();
                  const uint64_t before = fake_cuda::calls("cudaHostAlloc");
                  for (uint64_t i = 0; i < 100; ++i) {
                    TestOp& op = ops.emplace_back(7, i);
                    op.add(true, 1 - kit.rank, 0, 0, bytes, 8);
                    op.add(false, 1 - kit.rank, 0, 0, bytes + 8, 8);
                    kit.issue(op, kit.device);
                  }
                  EXPECT_EQ(fake_cuda::calls("cudaHostAlloc"), before);
                  require(cudaStreamSynchronize(kit.device.stream()) == cudaSuccess, "wait");
                  kit.barrier();
                  require(cudaFree(memory) == cudaSuccess, "free");
                }),
            "");
}

// NCCL's thread for the group takes some of the 200 us, or more.
TEST_F(NcclGroups, AreWaitedForAMomentWhenTheyAreIssued) {
  for (const int64_t takes_us : {2'000, 100'000'000}) {
    const bool soon = takes_us == 2'000;
    ControlRoom room(2);
    EXPECT_EQ(run_ranks(2,
                        [&](int rank) {
                          LookingClock clock;
                          Kit kit(room, rank, clock);
                          uint8_t in[8] = {}, out[8] = {};
                          TestOp op(7, 0);
                          op.add(true, 1 - kit.rank, 0, 0, out, sizeof out);
                          op.add(false, 1 - kit.rank, 0, 0, in, sizeof in);
                          fake_nccl_delay_launches(takes_us);
                          clock.slow_down(soon ? 1'000 : 0);  // 200 ms in all
                          const auto issue = [&] {
                            return kit.queue->issue(Kit::group(op), &kit.host, 1).code();
                          };
                          const int64_t before = clock.now_ns();
                          EXPECT_EQ(issue(), soon ? Code::kOk : Code::kInProgress);
                          const int64_t first = clock.now_ns() - before;
                          clock.slow_down(0);
                          if (!soon) {
                            EXPECT_GE(first, 200'000);
                            EXPECT_EQ(issue(), Code::kInProgress);
                            EXPECT_LT(clock.now_ns() - before - first, 20'000);
                          }
                          EXPECT_LT(first, 250'000);
                          kit.barrier();
                          kit.transport->cancel(op.descriptor);
                        }),
              "");
    fake_nccl_delay_launches(0);
  }
}

// What is on the stream, and what NCCL has yet to queue there.
TEST_F(NcclGroups, CancelEndsWhatNobodyAnswers) {
  for (const bool queued : {true, false}) {
    EXPECT_EQ(run(2,
                  [queued](Kit& kit) {
                    uint8_t in[8] = {}, out[8] = {};
                    TestOp first(7, 0);
                    first.add(true, 1 - kit.rank, 0, 0, out, sizeof out);
                    first.add(false, 1 - kit.rank, 0, 0, in, sizeof in);
                    if (queued) {
                      kit.issue(first, kit.host);
                      kit.await(2);
                    }
                    kit.barrier();
                    if (!queued) fake_nccl_delay_launches(100'000'000);
                    if (kit.rank == 1) {  // never comes
                      (void)kit.await_failure();
                      kit.transport->cancel(TestOp(7, 1).descriptor);
                      return;
                    }
                    TestOp op(7, 1);
                    op.add(false, 1, 0, 0, in, sizeof in);
                    const auto status = [&] {
                      return kit.queue->issue(Kit::group(op), &kit.host, 0).code();
                    };
                    if (queued) {
                      EXPECT_EQ(status(), Code::kOk);
                    }
                    const Deadline soon = Kit::in(50'000);
                    const size_t done = kit.sink.done.size();
                    while (!soon.passed(Clock::monotonic())) {
                      if (!queued) {
                        EXPECT_EQ(status(), Code::kInProgress);
                      }
                      kit.driver.run_until([] { return false; }, Kit::in(1'000));
                    }
                    EXPECT_EQ(kit.sink.done.size(), done);
                    const int64_t start = Clock::monotonic().now_ns();
                    kit.transport->cancel(op.descriptor);
                    EXPECT_LT(Clock::monotonic().now_ns() - start, 30'000'000'000);
                    EXPECT_EQ(status(), Code::kTransport);
                  }),
              "");
    fake_nccl_delay_launches(0);
  }
}

TEST_F(NcclGroups, MemoryOfAnotherDeviceIsRefused) {
  EXPECT_EQ(run(2,
                [](Kit& kit) {
                  void* memory = nullptr;
                  require(cudaSetDevice(1) == cudaSuccess, "device");
                  require(cudaMalloc(&memory, 8) == cudaSuccess, "memory");
                  require(cudaSetDevice(0) == cudaSuccess, "device");
                  TestOp op(7, 0);
                  op.add(true, 1 - kit.rank, 0, 0, memory, 8);
                  const Status status = kit.queue->issue(Kit::group(op), &kit.device, 1);
                  EXPECT_EQ(status.code(), Code::kInvalidArgument);
                  EXPECT_THAT(status.text(), HasSubstr("memory is on cuda:1, but the communicator "
                                                       "was made on cuda:0"));
                  kit.transport->cancel(op.descriptor);
                  require(cudaFree(memory) == cudaSuccess, "free");
                }),
            "");
}

}  // namespace
}  // namespace sotto::test
