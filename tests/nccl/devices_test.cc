// Tensors of another device than the one that the rank's communicator was made on: calls are
// refused on that rank, creations on all, and the comm goes on.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/cuda/device_memory.h"
#include "tests/emulation/cuda/fake_cuda.h"
#include "tests/support/ranks.h"

namespace sotto::test {
namespace {

std::string run_nccl(const std::function<void(Member&)>& body) {
  fake_cuda::configure({.devices = 4});
  WorldOptions options;
  options.transport = "nccl";
  options.on_rank = [](int32_t rank) { CUDA_OK(cudaSetDevice(rank + 1)); };
  return run_world(2, options, body);
}

// The sum of both ranks, on the communicator's device.
void expect_sum(Member& self) {
  Tensors tensors(Where::kCuda, self.rank + 1);
  std::vector<float> ones(1000, 1);
  const sotto_buffer b = tensors.add(ones);
  const sotto_call call = tensors.call();
  OK(sotto_all_reduce(self.comm, &b, &b, 1, &call, nullptr));
  tensors.download();
  require(ones.front() == 2 && ones.back() == 2, "the sum");
}

TEST(NcclDevices, ACallOnAnotherOneIsRefusedThere) {
  EXPECT_EQ(
      run_nccl([](Member& self) {
        Tensors there(Where::kCuda, 3);
        std::vector<float> ones(1000, 1);
        const sotto_buffer b = there.add(ones);
        const sotto_call call = there.call();
        if (self.rank == 0)
          FAILS(sotto_all_reduce(self.comm, &b, &b, 1, &call, nullptr), SOTTO_E_INVALID_ARGUMENT,
                "the call is on cuda:3; rank 0's communicator of nccl was made on cuda:1, the "
                "device that was current");
        there.download();
        require(ones.front() == 1, "nothing has changed");
        expect_sum(self);
      }),
      "");
}

TEST(NcclDevices, CreationsOnAnotherOneAreRefusedOnAllRanks) {
  constexpr char kWhy[] = "communicator of nccl was made on cuda:1";
  EXPECT_EQ(run_nccl([&](Member& self) {
              Tensors tensors(Where::kCuda, self.rank == 0 ? 3 : 2);
              std::vector<float> p(1000, 1), g(1000, 1);
              sotto_param param = SOTTO_PARAM_INIT;
              param.param = tensors.add(p);
              const sotto_buffer gradient = tensors.add(g);
              sotto_outer* outer = nullptr;
              FAILS(sotto_outer_create(self.comm, "{}", &param, 1, &outer),
                    SOTTO_E_INVALID_ARGUMENT, kWhy);
              param.grad = gradient;
              sotto_optim* optim = nullptr;
              for (const char* outer_steps : {"", R"(, "sotto": {"outer": {}})"}) {
                const std::string json =
                    std::string(R"({"optimizer": {"type": "AdamW"})") + outer_steps + "}";
                FAILS(sotto_optim_create(self.comm, json.c_str(), &param, 1, &optim),
                      SOTTO_E_INVALID_ARGUMENT, kWhy);
              }
              sotto_overlap* overlap = nullptr;
              FAILS(sotto_overlap_create(self.comm, "{}", &gradient, 1, &overlap),
                    SOTTO_E_INVALID_ARGUMENT, kWhy);
              expect_sum(self);
            }),
            "");
}

}  // namespace
}  // namespace sotto::test
