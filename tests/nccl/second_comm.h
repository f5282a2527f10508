// A comm over NCCL beside another one.
#pragma once

#include "tests/ranks/capi_support.h"

namespace sotto::test {

// In the context of the comm that the ranks have. Nothing has been sent through it.
inline sotto_comm* nccl_comm(const Member& self, int64_t timeout_us) {
  sotto_unique_id id = {};
  if (self.rank == 0) OK(sotto_unique_id_create(self.context, &id));
  const sotto_buffer bytes = {&id, sizeof id, SOTTO_UINT8, SOTTO_DEVICE_CPU, 0, 0};
  OK(sotto_broadcast(self.comm, &bytes, &bytes, 1, 0, nullptr, nullptr));
  sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
  config.rank = self.rank;
  config.size = self.size;
  config.id = &id;
  config.transport = "nccl";
  config.timeout_us = timeout_us;
  sotto_comm* comm = nullptr;
  OK(sotto_comm_create(self.context, &config, &comm));
  return comm;
}

}  // namespace sotto::test
