// The open round of an overlap on one rank: which gradients are there and where, and the operation
// that waits for them.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "core/engine/engine.h"
#include "core/overlap/marks.h"
#include "core/plan/late_inputs.h"

namespace sotto {

// Threads: one at a time. Never waits.
class OverlapRound {
 public:
  enum class State : uint8_t { kIdle, kStarting, kOpen, kFinished, kWithdrawn };

  OverlapRound(Engine& engine, Device& device, std::span<const OverlapTensor> tensors,
               std::span<const OverlapBucket> buckets);

  State state() const { return state_; }
  uint64_t number() const { return number_; }  // of rounds that have begun
  const OpRef& op() const { return op_; }      // null: none is in flight
  RoundMarks& marks() { return marks_; }
  const RoundMarks& marks() const { return marks_; }

  // BUSY: a round is open or in flight.
  Status start(int64_t now_ns);
  // Its operation did not start.
  void drop();
  // Where the operation reads this rank's message, and the order of its gradients if ranks learn
  // that (else null).
  void bound(RoundMessage* told, uint32_t* order) {
    told_ = told;
    told_order_ = order;
  }
  // The buckets have changed. No round is open or in flight.
  void relayout(std::span<const OverlapBucket> buckets);
  void opened(OpRef op, const std::optional<void*>& stream);
  // Where what is not known to be ready is.
  const std::optional<void*>& stream() const { return stream_; }
  // INVALID_STATE: none is open, or its own end if it ended without having been finished. What this
  // rank has finished or withdrawn from keeps its text until the next one starts: when it ends
  // depends on others.
  Status check_open() const;

  // Gradients that were claimed are behind what is queued on the stream; nothing: they are there.
  // places: as many; empty: where they lie in every round. On error nothing has changed.
  Status mark(std::span<const uint64_t> indices, std::span<void* const> places,
              const std::optional<void*>& stream, int64_t now_ns);
  // Nothing more comes. reason: this rank gives the round up.
  void finish(const std::optional<std::string_view>& reason, int64_t now_ns);
  // The operation has ended. Driver.
  void ended(const Status& status);

  // Of the round that began last; 0: not yet.
  struct Times {
    int64_t begin_ns = 0;
    int64_t first_bucket_ns = 0;  // was complete
    int64_t last_mark_ns = 0;
    int64_t finished_ns = 0;
  };
  const Times& times() const { return times_; }

 private:
  // What the gradients of a bucket that are there come after.
  struct Pending {
    void* stream = nullptr;
    EventId event = 0;
  };

  Status record(std::span<const uint64_t> indices, void* stream);
  void arrive(uint32_t bucket, int64_t now_ns);

  Engine& engine_;
  Device& device_;
  const std::span<const OverlapTensor> tensors_;
  std::span<const OverlapBucket> buckets_;
  RoundMarks marks_;
  std::vector<void*> places_;     // by gradient
  std::vector<Pending> pending_;  // by bucket
  State state_ = State::kIdle;
  uint64_t number_ = 0;
  OpRef op_;
  RoundMessage* told_ = nullptr;
  uint32_t* told_order_ = nullptr;
  std::optional<void*> stream_;
  Status ended_;  // check_open's answer until the next round starts; OK: it has none of its own
  Times times_;
};

}  // namespace sotto
