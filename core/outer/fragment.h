// A fragment of an outer optimizer: the tensors that are averaged together, their anchor and
// momentum, the average that is under way.
//
// Threads: one at a time. What operations leave behind when they end is written by the driver,
// before an operation that comes after them ends.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "core/codec/compressed_state.h"
#include "core/engine/device_array.h"
#include "core/group/comm.h"
#include "core/optim/parameter_set.h"
#include "core/outer/average_slices.h"
#include "core/outer/fragment_plans.h"

namespace sotto {

// What an inner step has to do with a fragment.
struct OuterEvents {
  bool launches = false;
  bool consumes = false;
  bool measures = false;  // the round's first inner step
  // Before outer steps begin: live parameters become their mean, or the anchor follows them.
  bool averages = false, follows = false;
  bool none() const { return !launches && !consumes && !measures && !averages && !follows; }
};

// What updates have left for reports; of the last one, unless it says otherwise.
struct OuterReport {
  OuterNumbers numbers;
  std::vector<OuterFactor> factors;    // per segment
  std::vector<OuterMessage> messages;  // by rank
  uint32_t votes = 0;                  // of all ranks, in all averages since forget_votes
  std::vector<uint8_t> not_finite;     // by rank: its payload in an average since take_not_finite
  bool not_encoded = false;            // an average since then could not be encoded

  // Of an update. nothing: no rank took part, so the anchor has not moved.
  void take(std::span<const std::byte> bytes, const OuterOutcome& at, bool nothing);
  // Adds the ranks whose payloads were not finite.
  void take_not_finite(std::set<size_t>* ranks);
  // As before the first update.
  void forget();
};

// An average between its launch and its consumption, in a state.
enum class OuterPending : uint8_t { kNone = 0, kDelivered = 1, kUndelivered = 2 };

// What a flush that has failed has made of a fragment.
enum class OuterFlushed : uint8_t {
  kNothing = 0,  // or consumed what had been launched before
  kSent = 1,     // launched what was left
  kConsumed = 2  // everything, but for the agreement of ranks
};

// Everything that a fragment of one rank keeps across steps.
struct OuterFragmentState {
  uint64_t launches = 0, consumed = 0;
  OuterPending pending = OuterPending::kNone;
  bool compressed = false;                                  // the pending one
  uint64_t period = 0;                                      // of its round; 0: the only one
  OuterFlushed flushed = OuterFlushed::kNothing;            // behind the last inner step
  std::array<std::vector<std::byte>, kOuterArrays> arrays;  // empty: there is none
  std::vector<float> live;                                  // the tensors one after the other
  std::optional<ErrorFeedback> residual;
};

// What is taken from a state.
enum class OuterRestore : uint8_t {
  kExact,   // of this rank: everything
  kCommon,  // of a rank of as many: all but error feedback
  kAnchor,  // of any rank: anchor and momentum, without an average under way
};

class OuterFragment {
 public:
  // What the operations of one inner step share.
  struct Step {
    double gamma = 1;     // inner learning rate
    uint64_t place = 0;   // the same on ranks that average with each other: inner steps, flush
    OuterMessage told{};  // this rank's
    CallOptions options;
    OpRef inner;                        // what is local comes after it; null: after nothing
    std::vector<OpRef>* ops = nullptr;  // what the caller has to wait for is appended
  };

  // tensors: numbers of parameters. The context lives longer.
  static Result<std::unique_ptr<OuterFragment>> make(const OuterContext& context,
                                                     std::vector<uint32_t> tensors);
  ~OuterFragment();
  OuterFragment(const OuterFragment&) = delete;
  OuterFragment& operator=(const OuterFragment&) = delete;

  // Starts the operations of a step. An average that is launched goes on behind those that the
  // caller waits for. After an error those in step.ops are still in flight.
  Status begin(const OuterEvents& events, const Step& step);
  // Sends what the last `since` inner steps have changed, consumes everything; live parameters
  // become the anchor, whatever the merge. made: by a flush before, of the same step.
  Status flush(uint64_t since, OuterFlushed made, const Step& step);
  // The anchor becomes the live parameters.
  Status start(const Step& step);
  // Live parameters and anchor change places; back: they have their own again.
  Status swap(const Step& step, bool back);

  // Behind inner step `step`, in the same order of calls on all ranks: slices of the average under
  // way that are due by then are let go.
  void let_go(uint64_t step);

  // What a call of begin or flush has changed can be taken back until this.
  void settled() { before_.clear(); }
  // What stays of calls of begin or flush that have failed.
  struct Made {
    bool update = false;
    OuterFlushed flush = OuterFlushed::kNothing;
  };
  // Their operations have ended: what was not done is taken back.
  Made take_back();

  // An average has been launched, and not been consumed.
  bool under_way() const { return pending_.has_value(); }
  OuterPending pending() const;
  // It has not ended.
  bool late() const {
    return pending_ && pending_->reduction != nullptr && !pending_->reduction->done();
  }
  // The average that was consumed last, once it has ended, with the time of the call: given once.
  struct Consumed {
    OpRef reduction;
    int64_t asked_ns = 0;
  };
  // Whether the average that is under way, or else the next one, is as later ones are: of the
  // codec, if there is one.
  bool usual() const {
    return !plans_.shape().codes() || (pending_ ? pending_->compressed : compresses_next());
  }

  std::optional<Consumed> take_consumed();
  // Waits for it, as long as its time-out. Ranks do so in the same order of calls.
  void await();
  uint64_t launches() const { return launches_; }
  uint64_t consumed() const { return consumed_; }
  OuterReport& report() { return report_; }
  uint64_t state_bytes() const;
  // Of the next launch, or of a mean of parameters.
  Result<PeerTraffic> next_traffic(bool averages = false);
  const std::vector<uint32_t>& tensors() const { return tensors_; }
  const OuterShape& shape() const { return plans_.shape(); }
  // Waits for the average under way unless slices of it are kept back, which go with inner steps:
  // it is undelivered. Nothing else is in flight; here and below.
  Result<OuterFragmentState> snapshot();
  // INVALID_ARGUMENT: it is not of such a fragment.
  Status check(const OuterFragmentState& state, OuterRestore how) const;
  // A state that has been checked. A pending average is the one of the state, or has to be launched
  // again. kAnchor: of a new fragment, whose live parameters become the anchor.
  Status restore(const OuterFragmentState& state, OuterRestore how);
  // Averages again what this rank has sent.
  Status relaunch(const Step& step);
  // Values of an array in the order of the tensors.
  Result<std::vector<float>> values(OuterArray array) const;

 private:
  class ReductionHooks;
  class UpdateHooks;
  struct Pending {
    OpRef reduction;  // null: of a state
    bool compressed = false;
    bool delivered = false;  // of a state
    uint64_t period = 0;     // of its round
    AverageSlices slices = {};
  };
  // As a part of a step, with one update at most, has found it.
  struct Before {
    std::optional<Pending> pending;
    uint64_t launches = 0;
    bool swapped = false;    // the part has swapped the payloads
    OpRef update = nullptr;  // or hold
    bool last = false;       // of a flush
  };

  OuterFragment(const OuterContext& context, std::vector<uint32_t> tensors);
  Status allocate();
  DeviceArray& array(OuterArray which) { return arrays_[static_cast<size_t>(which)]; }
  void bind(Run& run, const OuterPlan& slots, const Step& step) const;
  std::shared_ptr<OpHooks> hooks_of(FragmentOp kind, const OuterOutcome& outcome);
  Result<OpRef> local(FragmentOp kind, const Step& step, std::vector<OpRef> after);
  Result<OpRef> collective(FragmentOp kind, const Step& step, bool compressed, int32_t priority,
                           std::vector<OpRef> after);
  Status reduce(const Step& step, bool compressed, std::vector<OpRef> after);
  Result<OpRef> update(FragmentOp full, FragmentOp coded, const Step& step);
  Result<OpRef> update_or_hold(bool last, const Step& step);
  Status boundary(const Step& step);
  Status last_update(bool made, const Step& step);
  bool compresses_next() const {
    return plans_.shape().codes() && launches_ >= context_.config.dense_rounds;
  }

  const OuterContext& context_;
  const std::vector<uint32_t> tensors_;
  FragmentPlans plans_;
  std::array<DeviceArray, kOuterArrays> arrays_;
  CompressedState compressed_;
  std::optional<Pending> pending_;
  std::optional<Consumed> last_;
  std::vector<Before> before_;  // parts of the step in flight
  std::vector<OpRef> dropped_;  // averages of steps that have failed
  uint64_t round_period_ = 1;   // of the average that is consumed
  uint64_t launches_ = 0, consumed_ = 0;
  // Buffers of error feedback for the next average with a codec, which begins when those before it
  // have ended: by then each of them has made the other ones current.
  int next_errors_ = 0;
  bool not_encoded_ = false;  // the average under way
  OuterReport report_;
};

}  // namespace sotto
