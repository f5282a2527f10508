// What ranks must have alike when they create an optimizer, inner or outer.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/group/comm.h"
#include "core/optim/loss_scale.h"
#include "core/optim/optimizer_data.h"

namespace sotto {

// Of one rank. What it points to outlives it.
struct CreationTerms {
  const ParameterSet* parameters = nullptr;
  const ParamGroups* groups = nullptr;  // null: there are none
  uint64_t elements = 0;
  std::string settings;                // lines "key=value"
  std::vector<uint64_t> value_hashes;  // per parameter; empty: values are not compared
  // The key about values that differ; empty: there is none.
  std::string_view policy = "sotto.initial_parameters";
};
// ranks: that create it.
Result<CreationTerms> creation_terms(const OptimizerData& data, const LossScaler& loss_scaler,
                                     int32_t ranks);

// Whether ranks have made the same; if not, the same error on all, which names the rank, key or
// parameter. mine: this rank's terms, or why it refuses. kind: what ranks take the exchange for.
// Collective.
Status agree(Comm& comm, OpKind kind, const Result<CreationTerms>& mine);

}  // namespace sotto
