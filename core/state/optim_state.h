// Optimizer and codec state as blobs.
#pragma once

#include <span>
#include <vector>

#include "core/base/status.h"
#include "core/codec/codec.h"
#include "core/optim/optimizer.h"
#include "core/state/blob.h"

namespace sotto {

// exact: everything, continues bit for bit on the same ranks. reset: without error feedback, any
// number of ranks. mean: error feedback averaged over ranks, any number of ranks. common: exported
// as exact, and imported by all ranks, of any number, without error feedback.
enum class StateMode : int32_t { kExact = 1, kReset = 2, kMean = 3, kCommon = 4 };
// In descriptions of states and in texts.
constexpr const char* mode_name(StateMode mode) {
  constexpr const char* kNames[] = {"exact", "reset", "mean", "common"};
  return kNames[static_cast<int>(mode) - 1];
}
// An export of the mode is made by a rank alone, with what only this rank has.
constexpr bool made_by_one_rank(StateMode mode) {
  return mode == StateMode::kExact || mode == StateMode::kCommon;
}

// Error feedback in an export of the mode.
StateErrors exported_errors(StateMode mode);

// All parts are in the snapshot's vectors.
std::vector<std::byte> encode_optim(const OptimSnapshot& snapshot);
// INVALID_ARGUMENT or UNSUPPORTED on any blob that encode_optim cannot have made; never reads out
// of bounds.
Result<OptimSnapshot> decode_optim(std::span<const std::byte> bytes);

// Changes nothing of the optimizer. kMean is a collective; so is kReset with 0/1 Adam between
// synchronisations. Memory does not depend on the state's size, but for a bit per element of the
// 1-bit types.
Status export_state(Optimizer& optimizer, StateMode mode, const ByteSink& sink);
Result<std::vector<std::byte>> export_state(Optimizer& optimizer, StateMode mode);
// Bytes of what export_state would give now. Local.
Result<uint64_t> state_bytes(Optimizer& optimizer, StateMode mode);
// Reads everything two times: to check it, and to apply it. See Optimizer::restore.
Status import_state(Optimizer& optimizer, StateMode mode, const ByteSource& source, uint64_t bytes);
Status import_state(Optimizer& optimizer, StateMode mode, std::span<const std::byte> bytes);

// kMean: a collective of the codec's comm, and equal on all ranks.
Result<std::vector<std::byte>> export_state(Codec& codec, StateMode mode);
uint64_t mean_state_bytes(const Codec& codec);
Status import_state(Codec& codec, StateMode mode, std::span<const std::byte> bytes);

}  // namespace sotto
