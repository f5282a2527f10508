#include "core/overlap/round.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/base/small_vector.h"
#include "core/base/text.h"

namespace sotto {

OverlapRound::OverlapRound(Engine& engine, Device& device, std::span<const OverlapTensor> tensors,
                           std::span<const OverlapBucket> buckets)
    : engine_(engine),
      device_(device),
      tensors_(tensors),
      buckets_(buckets),
      marks_(buckets, tensors.size()),
      places_(tensors.size()),
      pending_(buckets.size()) {}

void OverlapRound::relayout(std::span<const OverlapBucket> buckets) {
  buckets_ = buckets;
  marks_ = RoundMarks(buckets, tensors_.size());
  pending_.assign(buckets.size(), {});
}

Status OverlapRound::start(int64_t now_ns) {
  switch (state_) {
    case State::kIdle: break;
    case State::kStarting:
    case State::kOpen:
      return error(Code::kBusy,
                   "round {} of this overlap is open; call sotto_overlap_finish or "
                   "sotto_overlap_withdraw first",
                   number_);
    default:
      return error(Code::kBusy,
                   "round {} of this overlap is in flight; wait for its operation first", number_);
  }
  state_ = State::kStarting;
  ++number_;
  marks_.reset();
  for (size_t t = 0; t < tensors_.size(); ++t) places_[t] = tensors_[t].data;
  ended_ = {};
  times_ = {.begin_ns = now_ns, .last_mark_ns = now_ns};
  return ok_status();
}

void OverlapRound::drop() {
  state_ = State::kIdle;
  --number_;
}

void OverlapRound::opened(OpRef op, const std::optional<void*>& stream) {
  if (state_ != State::kStarting) return;  // it has ended already
  state_ = State::kOpen;
  op_ = std::move(op);
  stream_ = stream;
}

Status OverlapRound::check_open() const {
  switch (state_) {
    case State::kOpen: return ok_status();
    case State::kFinished:
      return invalid_state(
          "round {} of this overlap has been finished; wait for its operation, then call "
          "sotto_overlap_begin",
          number_);
    case State::kWithdrawn:
      return invalid_state(
          "this rank has withdrawn from round {} of this overlap; wait for its operation, then "
          "call sotto_overlap_begin",
          number_);
    default: break;
  }
  if (!ended_.ok()) return ended_;
  return invalid_state("no round of this overlap is open; call sotto_overlap_begin first");
}

// One event for each bucket, behind the streams of all its gradients.
Status OverlapRound::record(std::span<const uint64_t> indices, void* stream) {
  SOTTO_TRY(device_.check_stream(stream));
  SmallVector<uint32_t> touched;
  for (const uint64_t index : indices) {
    const uint32_t bucket = marks_.bucket_of(index);
    if (std::ranges::find(touched, bucket) == touched.end()) touched.push_back(bucket);
  }
  for (const uint32_t bucket : touched) {
    const Pending& before = pending_[bucket];
    if (before.event != 0 && before.stream != stream)
      SOTTO_TRY(device_.stream_after_event(stream, before.event));
  }
  SmallVector<EventId> events;
  for (size_t i = 0; i < touched.size(); ++i) {
    const Result<EventId> event = device_.record_stream(stream);
    if (!event.ok()) {
      for (const EventId recorded : events) device_.release(recorded);
      return event.status();
    }
    events.push_back(*event);
  }
  for (size_t i = 0; i < touched.size(); ++i) {
    Pending& pending = pending_[touched[i]];
    if (pending.event != 0) device_.release(pending.event);
    pending = {stream, events[i]};
  }
  return ok_status();
}

Status OverlapRound::mark(std::span<const uint64_t> indices, std::span<void* const> places,
                          const std::optional<void*>& stream, int64_t now_ns) {
  if (stream && device_.caps().streams) SOTTO_TRY(record(indices, *stream));
  times_.last_mark_ns = now_ns;
  for (size_t i = 0; i < indices.size(); ++i) {
    if (!places.empty()) places_[indices[i]] = places[i];
    if (const auto bucket = marks_.mark(indices[i])) arrive(*bucket, now_ns);
  }
  return ok_status();
}

// Until `ended` the operation takes inputs.
void OverlapRound::arrive(uint32_t bucket, int64_t now_ns) {
  SmallVector<void*, 32> memory;
  for (const uint32_t t : buckets_[bucket].tensors) memory.push_back(places_[t]);
  const EventId event = std::exchange(pending_[bucket], {}).event;
  const Status status = engine_.arrive(op_, bucket, event, memory);
  if (!status.ok() && event != 0) device_.release(event);
  if (times_.first_bucket_ns == 0) times_.first_bucket_ns = now_ns;
}

void OverlapRound::finish(const std::optional<std::string_view>& reason, int64_t now_ns) {
  RoundMessage message;
  message.withdrawn = reason ? 1 : 0;
  if (reason) {
    const std::string_view told = cut_text(*reason, sizeof message.reason - 1);
    std::memcpy(message.reason, told.data(), told.size());
  }
  std::memcpy(told_, &message, sizeof message);
  if (told_order_ != nullptr) std::ranges::copy(marks_.order(), told_order_);
  state_ = reason ? State::kWithdrawn : State::kFinished;
  times_.finished_ns = now_ns;
  (void)engine_.arrive(op_, static_cast<uint32_t>(buckets_.size()), 0, {});
}

void OverlapRound::ended(const Status& status) {
  for (Pending& pending : pending_) {
    if (pending.event != 0) device_.release(pending.event);
    pending = {};
  }
  const bool open = state_ == State::kStarting || state_ == State::kOpen;
  if (!open) {
    ended_ = check_open();
  } else if (!status.ok()) {
    ended_ = status.with_prefix(fmt::format("round {} of this overlap has ended", number_));
  }
  state_ = State::kIdle;
  op_.reset();
  told_ = nullptr;
  told_order_ = nullptr;
}

}  // namespace sotto
