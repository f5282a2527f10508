// How far an outer optimizer is, and what that says about steps to come; what its inner steps and
// averages take.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/outer/fragment.h"
#include "core/outer/overlap_meter.h"
#include "core/outer/period_tuner.h"
#include "core/outer/rounds.h"

namespace sotto {

using OuterFragmentList = std::vector<std::unique_ptr<OuterFragment>>;

// Of period "auto": everything that decides on launches to come, in a state.
struct OuterTuning {
  OuterRhythm now, past;
  uint64_t past_end = 0;
  bool measuring = false;
  bool asked = false;  // what ranks have told with the average under way decides
};

struct OuterProgress {
  uint64_t step = 0, flushed_at = 0;  // inner steps
  struct Flushed {
    uint64_t step = 0;
    OuterFlushed made = OuterFlushed::kNothing;
  };
  std::vector<Flushed> flushes;  // by fragment: of the last one that has failed
  OuterRounds rounds;
  PeriodTuner tuner;

  // Of a new optimizer, whose configuration has period and delay then.
  static OuterProgress start(OuterConfig* config, uint64_t fragments);
  // What flushes have made of a fragment since the last inner step.
  OuterFlushed flushed(size_t fragment) const {
    const Flushed& last = flushes[fragment];
    return last.step == step ? last.made : OuterFlushed::kNothing;
  }
  // Behind a step that has consumed an average: what follows from what ranks have told with it.
  void hear(std::span<const OuterMessage> messages, OuterConfig* config);

  // Nothing: the period is the file's.
  std::optional<OuterTuning> tuning(const OuterConfig& config) const;
  // INVALID_ARGUMENT: it is not of such an optimizer.
  Status check(const std::optional<OuterTuning>& tuning, const OuterConfig& config) const;
  // Of a state that has been checked, behind its step. under_way: its averages are.
  void restore(const OuterTuning& tuning, bool under_way, OuterConfig* config);
};

// Of inner steps and averages.
class OuterPace {
 public:
  void start(uint64_t fragments) { averages_ns_.assign(fragments, 0); }
  const OverlapMeter& meter() const { return meter_; }
  // What the last averages of all fragments took.
  int64_t averages_ns() const;
  // Takes what averages took that have been consumed since the last time.
  void fold(const OuterFragmentList& fragments);
  // The trainer goes on with the next inner step.
  void returned(const OuterFragmentList& fragments, int64_t now_ns);
  // It has made it.
  void inner_step(const OuterFragmentList& fragments, int64_t now_ns, OuterProgress* at);
  // It does something else.
  void left() { left_ns_ = 0; }

 private:
  OverlapMeter meter_;
  // When the next inner step began: the last call has returned, and the averages that it consumed
  // have ended. 0: there was none.
  int64_t left_ns_ = 0;
  uint32_t left_in_flight_ = 0;       // averages then
  std::vector<int64_t> averages_ns_;  // the last one of each fragment
};

}  // namespace sotto
