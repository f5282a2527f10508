// Everything in a configuration that changes what a step does: ranks must have the same, and where
// they do not the key is named. For that it is text, lines "key=value".
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/status.h"
#include "core/config/config.h"
#include "core/group/comm.h"
#include "core/optim/loss_scale.h"

namespace sotto {

// Of the whole optimizer. codec: what the compressed steps use; nothing: there are none.
std::string common_settings(const Config& config, uint64_t n_groups, const LossScaler& loss_scaler,
                            Dtype gradients, const std::optional<CodecSettings>& codec);
// Of a codec under the key `path`. selection: also what a sparse codec sends, which error feedback
// does not depend on.
std::string codec_settings(std::string_view path, const std::optional<CodecSettings>& codec,
                           bool selection = true);
// Of one parameter group.
uint64_t hash_of_settings(const OptimizerParams& group);

// The PROTOCOL errors for ranks with different settings: the first key that differs, and both
// values. Collectives; the same text on all ranks. bytes: of every rank's settings.
Status explain_common_settings(Comm& comm, OpKind kind, const std::string& mine,
                               const std::vector<uint64_t>& bytes);
// Common settings are the same.
Status explain_groups(Comm& comm, OpKind kind, const std::vector<OptimizerParams>& mine);

}  // namespace sotto
