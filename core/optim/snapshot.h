// Everything that a run must keep of an optimizer.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/codec/compressed_state.h"
#include "core/optim/algorithms/zeroone_schedule.h"
#include "core/optim/loss_scale.h"

namespace sotto {

// Longest state of the trainer's own.
inline constexpr uint64_t kMaxUserState = uint64_t{1} << 26;

// The large parts of a state: float32, the tensors one after the other in order of registration.
enum class StatePart : uint8_t {
  kParams,
  kM,
  kV,
  kVf,
  kPaddingM,
  kLocalSum,
  kAnchor,
  kWorkerError,
  kServerError,
  kMeanWorkerError,
  kMeanServerError,
};
inline constexpr size_t kStateParts = 11;
// Opens a part for reading, from its beginning.
using PartSource = std::function<Result<FloatSource>(StatePart)>;

// Which error feedback belongs to a state.
enum class StateErrors : uint8_t { kNone, kOwn, kMean };

// Everything that a run must keep, on the host, independent of how it lies in memory. Parts are in
// the vectors, or elsewhere: then `outside` has their numbers of values.
struct OptimSnapshot {
  std::string algorithm;        // "Adam", "AdamW", "Lamb", "OneBitLamb"
  std::string mode = "strict";  // or "compat"
  uint64_t step = 0;
  uint32_t step_offset = 0;
  bool compressed = false;
  bool stage_started = false;  // the compressed stage has vf and scaling coefficients
  int64_t scheduler_iteration = -1;
  LossScale loss_scale;
  std::vector<std::string> names;
  std::vector<uint64_t> counts;
  std::vector<float> params, m, v, vf;
  std::vector<TensorState> tensor_states;
  // 0/1 Adam. With a frozen variance, of this rank: params are what the last synchronisation gave
  // plus the sum of local updates.
  ZeroOneCounters zeroone;
  uint64_t skipped_steps = 0;
  std::vector<std::byte> user;                 // the trainer's own
  std::vector<double> lr_sums, anchor_decays;  // per group
  std::vector<float> local_sum, anchor;
  uint64_t average_since = 0;  // 1-bit LAMB: updates before the average trust ratios started
  // 1-bit types: what is exchanged in place of the momentum of frozen parameters; empty: zeros.
  std::vector<float> frozen_m;
  std::vector<float> padding_m;           // 1-bit LAMB in mode compat, on the same number of ranks
  bool local_sum_is_common = false;       // all ranks have the same (never so in a blob)
  std::optional<ErrorFeedback> residual;  // error feedback of this rank; empty: none stored
  std::optional<MeanErrorFeedback> mean;  // error feedback of all ranks; empty: none stored
  std::array<uint64_t, kStateParts> outside{};

  // The vector of a part; null: of error feedback that is not stored.
  std::vector<float>* part(StatePart part);
  const std::vector<float>* part(StatePart which) const {
    return const_cast<OptimSnapshot*>(this)->part(which);
  }
  uint64_t values(StatePart which) const {
    const std::vector<float>* vector = part(which);
    return vector != nullptr && !vector->empty() ? vector->size()
                                                 : outside[static_cast<size_t>(which)];
  }
};

// INVALID_ARGUMENT unless a state has as many values as the optimizer.
Status check_size(const char* what, uint64_t values, uint64_t want);

}  // namespace sotto
