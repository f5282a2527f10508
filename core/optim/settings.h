// Everything in a configuration that changes what a step does, as lines "key=value": ranks must
// have the same, and where they do not the key is named.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/status.h"
#include "core/config/config.h"
#include "core/group/comm.h"
#include "core/optim/loss_scale.h"

namespace sotto {

// codec: what the compressed steps use; nothing: there are none.
std::string step_settings(const Config& config, const std::vector<OptimizerParams>& groups,
                          const LossScaler& loss_scaler, Dtype gradients,
                          const std::optional<CodecSettings>& codec);

// The PROTOCOL error for ranks with different settings: the first key that differs, and both
// values. Collective; the same text on all ranks. bytes: of every rank's settings.
Status explain_settings(Comm& comm, const std::string& mine, const std::vector<uint64_t>& bytes);

}  // namespace sotto
