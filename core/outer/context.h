// What the fragments of one outer optimizer share.
#pragma once

#include <cstdint>
#include <map>
#include <memory>

#include "core/config/outer.h"
#include "core/engine/device_array.h"
#include "core/group/comm.h"
#include "core/optim/parameter_set.h"
#include "core/outer/shape.h"

namespace sotto {

struct OuterContext {
  std::shared_ptr<Comm> comm;        // of what has no messages
  std::shared_ptr<Comm> reductions;  // its duplicate, on which averages travel
  std::shared_ptr<Comm> shards;      // of the ranks with the shards of a replica; null: no shards
  std::map<uint32_t, OuterShards> sizes;  // of fragments, by their first tensor; with shards
  DeviceAccess access;
  OuterConfig config;  // resolved
  Levels levels;       // of averages
  const ParameterSet* parameters = nullptr;

  // Of a comm that operations use. The other one fails with it, so that none of its ranks waits.
  Status failure() const;
  // Of a call; 0: the comm's.
  int64_t timeout_us(const CallOptions& options) const;
  // Room for the operations of a call, before it changes anything. BUSY: as Engine::admit.
  Status admit(const CallOptions& options) const;
};

}  // namespace sotto
