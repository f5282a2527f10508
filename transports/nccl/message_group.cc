#include "transports/nccl/message_group.h"

#include <algorithm>
#include <utility>

#include "cuda/calls/cuda_calls.h"

namespace sotto::nccl {

MessageGroup::MessageGroup(const Communicators& communicators, PinnedPool& pinned,
                           EventPool& events)
    : communicators_(communicators),
      events_(events),
      headers_(pinned, communicators.all().rank(), communicators.all().size()),
      staging_(pinned, communicators.all().device()),
      calls_(communicators) {}

void MessageGroup::begin(cudaStream_t stream, bool reports, const OpDescriptor* captured) {
  stream_ = stream;
  reports_ = reports;
  captured_ = captured;
  keys_.clear();
  transfers_.clear();
  calls_.clear();
  queued_ = false;
  in_progress_ = false;
  executing_ = false;
}

Status MessageGroup::prepare(std::span<Transfer* const> transfers, HeadedPeers& headed) {
  const int32_t rank = communicators_.all().rank(), size = communicators_.all().size();
  const GraphUse replayed = communicators_.all().api().registers_captured
                                ? GraphUse::kReplayedRegistered
                                : GraphUse::kReplayed;
  const GraphUse use = captured_ == nullptr ? GraphUse::kCalled : replayed;
  transfers_.assign(transfers.begin(), transfers.end());
  for (const Transfer* t : transfers) {
    if (keys_.empty() || !(keys_.back() == t->op->key)) keys_.push_back(t->op->key);
    if (t->peer < 0 || t->peer >= size || t->peer == rank) {
      return error(Code::kInternal, "nccl: message of rank {} to or from rank {} of {}", rank,
                   t->peer, size);
    }
    if (headed.add(t->op->key, t->inputs, t->peer))
      SOTTO_TRY(headers_.add(t->peer, transfers, use));
    SOTTO_TRY(calls_.add(*t, staging_, captured_ != nullptr));
  }
  if (captured_ != nullptr) return ok_status();
  SOTTO_ASSIGN(event_, events_.take());
  return ok_status();
}

Status MessageGroup::launch(cudaEvent_t after) {
  // What is captured cannot wait for what is not; NCCL itself orders launches of graphs with it.
  if (calls_.fresh() && after != nullptr && captured_ == nullptr)
    SOTTO_TRY(cuda_status(cudaStreamWaitEvent(stream_, after, 0), "cudaStreamWaitEvent"));
  if (calls_.fresh() && captured_ != nullptr)
    SOTTO_TRY(calls_.stay_in_graph(headers_.all(), stream_));
  const Status status = calls_.queue(headers_.all(), stream_);
  if (status.code() == Code::kInProgress) in_progress_ = true;
  SOTTO_TRY(status);
  in_progress_ = false;
  // Not before: until then NCCL may have put nothing on the stream.
  if (captured_ == nullptr)
    SOTTO_TRY(cuda_status(cudaEventRecord(event_, stream_), "cudaEventRecord"));
  queued_ = true;
  return ok_status();
}

bool MessageGroup::working() const {
  // NCCL's thread may still put it on the stream, or into the graph. Its end is nowhere to be seen
  // but in that of the communicator: an error that NCCL reports meanwhile may be another one.
  if (in_progress_ && !communicators_.over()) return true;
  if (captured_ != nullptr) return false;  // it executes nothing
  return (queued_ ? cudaEventQuery(event_) : cudaStreamQuery(stream_)) == cudaErrorNotReady;
}

bool MessageGroup::has(const OpKey& key) const {
  return std::find(keys_.begin(), keys_.end(), key) != keys_.end();
}

void MessageGroup::restart(Counters& counters) {
  executing_ = true;
  headers_.renew(transfers_);
  headers_.count(counters, true);
  count_transfers(counters);
}

void MessageGroup::complete(Counters& counters) {
  if (std::exchange(executing_, false)) headers_.count(counters, false);
}

void MessageGroup::count_transfers(Counters& counters) const {
  for (const Transfer* t : transfers_) counters.count(*t);
}

void MessageGroup::release() {
  staging_.release();
  headers_.release();
  if (event_ != nullptr) events_.give_back(std::exchange(event_, nullptr));
}

}  // namespace sotto::nccl
