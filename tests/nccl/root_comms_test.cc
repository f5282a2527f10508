// Two root comms of one context: their operations are in flight together, and NCCL queues some of
// their groups late, on each rank others. Ranks are threads on the fake NCCL.
#include <gtest/gtest.h>

#include "tests/cuda/device_memory.h"
#include "tests/emulation/cuda/fake_cuda.h"
#include "tests/emulation/nccl/fake_nccl.h"
#include "tests/nccl/second_comm.h"
#include "tests/support/ranks.h"

namespace sotto::test {
namespace {

constexpr uint32_t kLateUs = 2000;
constexpr int kLaunches = 3;  // each is late or not, on either rank

// Operations on both comms, and what they give.
class BothComms {
 public:
  explicit BothComms(Member& self)
      : tensors_(Where::kCuda, self.rank + 1), comms_{self.comm, nccl_comm(self, kTimeoutUs)} {
    for (size_t i = 0; i < 2; ++i) buffers_[i] = tensors_.add(values_[i]);
    tensors_.sync();
  }
  ~BothComms() { sotto_comm_destroy(comms_[1]); }

  void reduce_on_both() {
    for (std::vector<float>& values : values_) values.assign(kCount, 1);
    tensors_.upload();
    sotto_call call = tensors_.call();
    call.timeout_us = kTimeoutUs;
    sotto_op* ops[2] = {};
    for (size_t i = 0; i < 2; ++i)
      OK(sotto_all_reduce(comms_[i], &buffers_[i], &buffers_[i], 1, &call, &ops[i]));
    for (sotto_op* op : ops) OK(sotto_op_stream_wait(op, tensors_.stream()));
    for (sotto_op* op : ops) {
      OK(sotto_op_wait(op, -1));
      OK(sotto_op_release(op));
    }
    tensors_.download();
    for (const std::vector<float>& values : values_)
      require(values.front() == 2 && values.back() == 2, "the sum of both ranks");
  }

 private:
  static constexpr size_t kCount = 3000;
  static constexpr int64_t kTimeoutUs = 5'000'000;
  Tensors tensors_;
  std::vector<float> values_[2] = {std::vector<float>(kCount), std::vector<float>(kCount)};
  sotto_buffer buffers_[2] = {};
  sotto_comm* comms_[2];
};

class NcclRootComms : public testing::TestWithParam<int> {};  // hardware queues

TEST_P(NcclRootComms, AreServedInOneOrderWhateverIsLate) {
  fake_cuda::configure({.devices = 4, .hardware_queues = GetParam()});
  WorldOptions options;
  options.transport = "nccl";
  options.on_rank = [](int32_t rank) { CUDA_OK(cudaSetDevice(rank + 1)); };
  RankBarrier barrier(2);
  EXPECT_EQ(run_world(2, options,
                      [&](Member& self) {
                        BothComms both(self);
                        both.reduce_on_both();
                        for (uint64_t late = 0; late < 1u << (2 * kLaunches); ++late) {
                          barrier.wait();
                          const uint64_t mine = late >> (self.rank * kLaunches);
                          fake_nccl_delay_some(self.rank + 1, mine & ((1u << kLaunches) - 1),
                                               kLateUs);
                          both.reduce_on_both();
                        }
                      }),
            "");
  fake_cuda::configure({});
}

// A device has eight lanes for them; the ninth and tenth share those of others.
TEST_P(NcclRootComms, MayBeMoreThanThereAreLanes) {
  fake_cuda::configure({.devices = 4, .max_delay_us = 100, .hardware_queues = GetParam()});
  WorldOptions options;
  options.transport = "nccl";
  options.on_rank = [](int32_t rank) { CUDA_OK(cudaSetDevice(rank + 1)); };
  EXPECT_EQ(run_world(2, options,
                      [](Member& self) {
                        constexpr size_t kComms = 10, kCount = 500;
                        Tensors tensors(Where::kCuda, self.rank + 1);
                        sotto_comm* comms[kComms] = {self.comm};
                        std::vector<std::vector<float>> values(kComms,
                                                               std::vector<float>(kCount, 1));
                        sotto_buffer at[kComms];
                        for (size_t i = 0; i < kComms; ++i) {
                          if (i != 0) comms[i] = nccl_comm(self, 10'000'000);
                          at[i] = tensors.add(values[i]);
                        }
                        const sotto_call call = tensors.call();
                        for (int round = 0; round < 3; ++round) {
                          sotto_op* ops[kComms] = {};
                          for (size_t i = 0; i < kComms; ++i)
                            OK(sotto_all_reduce(comms[i], &at[i], &at[i], 1, &call, &ops[i]));
                          for (sotto_op* op : ops) {
                            OK(sotto_op_stream_wait(op, tensors.stream()));
                            OK(sotto_op_release(op));
                          }
                        }
                        tensors.download();
                        for (const std::vector<float>& sums : values)
                          require(sums == std::vector<float>(kCount, 8), "three sums");
                        for (size_t i = 1; i < kComms; ++i) OK(sotto_comm_destroy(comms[i]));
                      }),
            "");
  fake_cuda::configure({});
}

INSTANTIATE_TEST_SUITE_P(HardwareQueues, NcclRootComms, testing::Values(1, 32),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace sotto::test
