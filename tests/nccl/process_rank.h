// Ranks that are processes, over NCCL.
#pragma once

#include <string>

#include "tests/emulation/cuda/fake_cuda.h"
#include "tests/emulation/nccl/fake_nccl.h"
#include "tests/ranks/capi_support.h"
#include "tests/support/kill_campaign.h"
#include "tests/support/processes.h"

namespace sotto::test {

// The context and comm of one; they meet by an id in a file.
struct Rank {
  explicit Rank(const ProcessRank& self, int64_t timeout_us = 60'000'000, void* native = nullptr) {
    sotto_unique_id id = {};
    context = new_context();
    if (self.rank == 0) {
      OK(sotto_unique_id_create(context, &id));
      publish(self.argument + "/id", &id, sizeof id);
    } else {
      require(await_published(self.argument + "/id", &id, sizeof id, 60'000), "no id");
    }
    sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
    config.rank = self.rank;
    config.size = self.size;
    config.id = &id;
    config.timeout_us = timeout_us;
    config.native_comm = native;
    created = sotto_comm_create(context, &config, &comm);
    if (created != SOTTO_OK) error = sotto_last_error();
  }
  void leave() {
    OK(sotto_barrier(comm, nullptr, nullptr));
    OK(sotto_comm_destroy(comm));
    OK(sotto_context_destroy(context));
  }
  sotto_context* context = nullptr;
  sotto_comm* comm = nullptr;
  sotto_status created = SOTTO_OK;
  std::string error;
};

inline void require_nothing_left() {
  fake_cuda::drain();
  require(fake_nccl_live_comms() == 0, "a communicator is left");
  const fake_cuda::Live left = fake_cuda::live();
  require(left == fake_cuda::Live{}, "left: " + left.text());
}

}  // namespace sotto::test
