// Two root comms of one context: their operations are in flight together, and NCCL queues some of
// their groups late, on each rank others. Ranks are threads on the fake NCCL.
#include <gtest/gtest.h>

#include "tests/cuda/device_memory.h"
#include "tests/emulation/cuda/fake_cuda.h"
#include "tests/emulation/nccl/fake_nccl.h"
#include "tests/support/ranks.h"

namespace sotto::test {
namespace {

constexpr uint32_t kLateUs = 2000;
constexpr int kLaunches = 3;  // each is late or not, on either rank

// Operations on both comms, and what they give.
class BothComms {
 public:
  BothComms(Member& self, const sotto_unique_id& id) : tensors_(Where::kCuda, self.rank + 1) {
    sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
    config.rank = self.rank;
    config.size = self.size;
    config.id = &id;
    config.timeout_us = 5'000'000;
    comms_[0] = self.comm;
    OK(sotto_comm_create(self.context, &config, &comms_[1]));
    for (size_t i = 0; i < 2; ++i) buffers_[i] = tensors_.add(values_[i]);
    tensors_.sync();
  }
  ~BothComms() { sotto_comm_destroy(comms_[1]); }

  void reduce_on_both() {
    for (std::vector<float>& values : values_) values.assign(kCount, 1);
    tensors_.upload();
    sotto_call call = tensors_.call();
    call.timeout_us = 5'000'000;
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
  Tensors tensors_;
  std::vector<float> values_[2] = {std::vector<float>(kCount), std::vector<float>(kCount)};
  sotto_buffer buffers_[2] = {};
  sotto_comm* comms_[2] = {};
};

class NcclRootComms : public testing::TestWithParam<int> {};  // hardware queues

TEST_P(NcclRootComms, AreServedInOneOrderWhateverIsLate) {
  fake_cuda::configure({.devices = 4, .hardware_queues = GetParam()});
  WorldOptions options;
  options.transport = "nccl";
  options.on_rank = [](int32_t rank) { CUDA_OK(cudaSetDevice(rank + 1)); };
  RankBarrier barrier(2);
  sotto_unique_id id = {};
  EXPECT_EQ(run_world(2, options,
                      [&](Member& self) {
                        if (self.rank == 0) OK(sotto_unique_id_create(self.context, &id));
                        barrier.wait();
                        BothComms both(self, id);
                        both.reduce_on_both();
                        for (uint64_t late = 0; late < 1u << (2 * kLaunches); ++late) {
                          barrier.wait();
                          const uint64_t mine = late >> (self.rank * kLaunches);
                          fake_nccl_delay_launches(self.rank + 1, mine & ((1u << kLaunches) - 1),
                                                   kLateUs);
                          both.reduce_on_both();
                        }
                      }),
            "");
  fake_cuda::configure({});
}

INSTANTIATE_TEST_SUITE_P(HardwareQueues, NcclRootComms, testing::Values(1, 32),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace sotto::test
