#include "core/engine/captured_ops.h"

namespace sotto {

Status CapturedOps::check(const CapturedOp& op, int32_t rank) {
  const uint32_t begun = op.capture_->begun();
  if (begun == op.replays_) return ok_status();
  return invalid_state(
      "rank {}: a graph with the operation was launched {} times, but replayed {} times: the "
      "state, error feedback above all, may have changed",
      rank, begun, op.replays_);
}

}  // namespace sotto
