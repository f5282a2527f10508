// Outer steps on shards whose parameters are on CUDA devices, over NCCL and TCP: the bits of host
// memory. Updates have messages then, between ranks that do not average with each other.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/cuda/device_memory.h"
#include "tests/emulation/cuda/fake_cuda.h"
#include "tests/support/ranks.h"

namespace sotto::test {
namespace {

constexpr int kSteps = 9;

using Ends = std::vector<std::vector<float>>;  // live parameters of every rank, in the end

void make_steps(Member& self, Where where, const char* json, std::vector<float>* x) {
  const int replica = self.rank / 2, shard = self.rank % 2;
  sotto_comm *comm = nullptr, *shards = nullptr;
  OK(sotto_comm_split(self.comm, shard, 0, &comm));
  OK(sotto_comm_split(self.comm, replica, 0, &shards));
  x->assign(shard == 0 ? 9'000 : 500, 1);
  {
    Tensors tensors(where, self.rank);
    sotto_param param = SOTTO_PARAM_INIT;
    param.param = tensors.add(*x);
    sotto_outer* outer = nullptr;
    OK(sotto_outer_create_sharded(comm, shards, json, &param, 1, &outer));
    const sotto_call call = tensors.call();
    for (int step = 0; step < kSteps; ++step) {
      tensors.download();
      for (size_t i = 0; i < x->size(); ++i) {
        const size_t k = (i * 31 + static_cast<size_t>(step * 17 + replica * 7)) % 23;
        (*x)[i] += (shard == 0 ? 0.01f : 0.1f) * (static_cast<float>(k) - 10);
      }
      tensors.upload();
      OK(sotto_outer_step(outer, &call, nullptr));
    }
    OK(sotto_outer_flush(outer, &call, nullptr));
    tensors.download();
    OK(sotto_outer_destroy(outer));
  }
  OK(sotto_comm_destroy(comm));
  OK(sotto_comm_destroy(shards));
}

Ends ends_of(Where where, const char* transport, const char* json) {
  fake_cuda::configure({.devices = 4});
  WorldOptions options;
  options.transport = transport;
  if (where == Where::kCuda) options.on_rank = [](int32_t rank) { CUDA_OK(cudaSetDevice(rank)); };
  Ends ends(4);
  EXPECT_EQ(run_world(4, options,
                      [&](Member& self) {
                        make_steps(self, where, json, &ends[static_cast<size_t>(self.rank)]);
                      }),
            "");
  return ends;
}

TEST(NcclOuterShards, FourRanksHaveTheBitsOfHostMemory) {
  for (const char* json :
       {R"({"preset": "co2", "period": 2})",
        R"({"preset": "co2", "period": 3, "penalty": "gap_inner", "clip": "norm", "phi": 0.2})"}) {
    SCOPED_TRACE(json);
    const Ends wanted = ends_of(Where::kHost, "inproc", json);
    ASSERT_EQ(wanted[0], wanted[2]);
    EXPECT_EQ(ends_of(Where::kCuda, "nccl", json), wanted);
    EXPECT_EQ(ends_of(Where::kCuda, "tcp", json), wanted);
  }
}

}  // namespace
}  // namespace sotto::test
