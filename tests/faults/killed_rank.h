// Processes of a kill campaign that use nothing but sotto.h.
#pragma once

#include <chrono>

#include "tests/ranks/capi_support.h"
#include "tests/support/kill_campaign.h"

namespace sotto::test {

// What destroying may take on a comm that has failed.
inline constexpr auto kDestroying = std::chrono::seconds(kSanitized ? 5 : 1);

inline sotto_comm* new_comm(sotto_context* context, const ProcessRank& self, const KillTask& task) {
  sotto_unique_id id = {};
  if (self.rank == 0) {
    OK(sotto_unique_id_create(context, &id));
    publish(task.id_file, &id, sizeof id);
  } else {
    require(await_published(task.id_file, &id, sizeof id, task.timeout_us / 1000), "no id");
  }
  sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
  config.rank = self.rank;
  config.size = self.size;
  config.id = &id;
  config.timeout_us = task.timeout_us;
  sotto_comm* comm = nullptr;
  OK(sotto_comm_create(context, &config, &comm));
  return comm;
}

}  // namespace sotto::test
