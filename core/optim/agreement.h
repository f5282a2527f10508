// What ranks must have alike when they create an optimizer.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/group/comm.h"
#include "core/optim/loss_scale.h"
#include "core/optim/optimizer_data.h"

namespace sotto {

// Of one rank. The data outlives it.
struct CreationTerms {
  const OptimizerData* data = nullptr;
  std::string settings;                // lines "key=value"
  std::vector<uint64_t> value_hashes;  // per parameter; empty: values are not compared
};
Result<CreationTerms> creation_terms(const OptimizerData& data, const LossScaler& loss_scaler);

// Whether ranks have made the same; if not, the same error on all, which names the rank, key or
// parameter. mine: this rank's terms, or why it refuses. Collective.
Status agree(Comm& comm, const Result<CreationTerms>& mine);

// "1, 3, 5", and how many more there are than a text has room for.
std::string list_of_ranks(const std::vector<size_t>& ranks);

}  // namespace sotto
