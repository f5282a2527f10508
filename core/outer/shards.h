// Outer steps on shards: every rank of `comm` holds the same shard of the parameters, the ranks of
// `shards` hold the shards of one replica, each element once. What ranks of a replica have to have
// alike, and what they tell each other when an outer optimizer is created.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "core/config/outer.h"
#include "core/group/comm.h"
#include "core/optim/parameter_set.h"
#include "core/outer/shape.h"

namespace sotto {

// UNSUPPORTED: shards would decide each for itself. Names the key, and what is allowed.
Status check_shards(const OuterConfig& config);

// What ranks of a replica have alike, as lines "key=value".
std::string settings_of_shards(const OuterConfig& config, const ParameterSet& parameters);
// Whether they have; if not, or if one refuses, the same error on all. Collective.
Status agree_on_shards(Comm& shards, const Result<std::string>& settings);

// By the first tensor of every fragment. Ranks have agreed. Collective.
Result<std::map<uint32_t, OuterShards>> sizes_of_shards(Comm& shards, const OuterConfig& config,
                                                        const ParameterSet& parameters);

}  // namespace sotto
