// Captured operations: their calls are part of a CUDA graph of the user's, and execute when that is
// launched. Driver.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/engine/device_queues.h"

namespace sotto {

// The part of an operation that may be captured.
class CapturedOp : public QueuedOp {
 public:
  bool captured() const { return capture_ != nullptr; }  // threads: any
  // Its capture has not ended.
  bool capturing() const { return captured() && replays_ == 0; }
  bool replayed() const { return replays_ > 0; }

 private:
  friend class CapturedOps;

  std::shared_ptr<GraphCapture> capture_;  // the plan's device; null: not captured
  uint32_t replays_ = 0;                   // launches of its graph that were asked for
};

class CapturedOps {
 public:
  static void bind(CapturedOp& op, std::shared_ptr<GraphCapture> capture) {
    op.capture_ = std::move(capture);
  }
  // The capture has ended.
  static Status finish(CapturedOp& op) { return op.capture_->finish(); }
  // INVALID_STATE if a graph with the operation was launched otherwise than replayed.
  static Status check(const CapturedOp& op, int32_t rank);
  // The next launch of its graph will end.
  static bool launch_begun(const CapturedOp& op) { return op.capture_->begun() >= op.replays_; }

  // One more launch of its graph is awaited, until forget.
  void await_launch(CapturedOp& op) {
    ++op.replays_;
    awaited_.push_back(&op);
  }
  void forget(CapturedOp& op) { std::erase(awaited_, &op); }
  bool empty() const { return awaited_.empty(); }
  // Calls ended(operation) for each whose launch has ended; it is forgotten before. And
  // failed(operation, status) for each whose device reports an error.
  template <class Ended, class Failed>
  bool poll(Ended&& ended, Failed&& failed) {
    bool any = false;
    for (size_t i = 0; i < awaited_.size();) {
      CapturedOp& op = *awaited_[i];
      if (op.capture_->ended() >= op.replays_ && !op.broken()) {
        forget(op);
        ended(op);
        any = true;
        continue;
      }
      ++i;
      if (op.broken()) continue;  // about to fail
      if (const Status health = op.capture_->health(); !health.ok()) {
        failed(op, health);
        any = true;
      }
    }
    return any;
  }

 private:
  std::vector<CapturedOp*> awaited_;
};

}  // namespace sotto
