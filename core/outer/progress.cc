#include "core/outer/progress.h"

#include <algorithm>
#include <numeric>

#include "core/base/log.h"
#include "core/base/text.h"

namespace sotto {
namespace {

uint32_t averages_in_flight(const OuterFragmentList& fragments) {
  uint32_t n = 0;
  for (const std::unique_ptr<OuterFragment>& f : fragments) n += f->late() ? 1 : 0;
  return n;
}

}  // namespace

OuterProgress OuterProgress::start(OuterConfig* config, uint64_t fragments) {
  OuterSchedule& s = config->schedule;
  OuterProgress at;
  at.flushes.resize(fragments);
  if (s.automatic) {
    s = s.with_period(measuring_period(*config));
    at.tuner.begin(s.synchronous_steps());
  }
  at.rounds = {.now = {s.period, s.synchronous_steps()},
               .delay = s.delay,
               .fragments = fragments,
               .synchronous = s.synchronous_steps(),
               .gradients = s.averages_gradients(),
               .measures = config->penalty.kind == OuterPenalty::kGapInner,
               .past = {}};
  return at;
}

void OuterProgress::hear(std::span<const OuterMessage> messages, OuterConfig* config) {
  OuterSchedule& s = config->schedule;
  if (!s.automatic) return;
  if (tuner.answered()) {
    const MeasuredTimes times = measured_times(messages);
    s = s.with_period(automatic_period(*config, times.average, times.step));
    rounds.change_period(step, s.period);
    tuner.end();
    log(LogLevel::kInfo,
        "outer step {}: period {}, delay {}; averages take {:.3g} ms on the slowest rank, inner "
        "steps {:.3g} ms",
        step, s.period, s.delay, 1e3 * times.average, 1e3 * times.step);
    return;
  }
  const auto asks = [](const OuterMessage& m) { return (m.asks & kOuterAsksPeriod) != 0; };
  if (!tuner.measuring() && std::ranges::any_of(messages, asks)) tuner.begin(step, true);
}

std::optional<OuterTuning> OuterProgress::tuning(const OuterConfig& config) const {
  if (!config.schedule.automatic) return std::nullopt;
  return OuterTuning{rounds.now, rounds.past, rounds.past_end, tuner.measuring(), tuner.asked()};
}

Status OuterProgress::check(const std::optional<OuterTuning>& tuning,
                            const OuterConfig& config) const {
  const OuterSchedule& s = config.schedule;
  if (tuning.has_value() != s.automatic)
    return invalid_argument("the state {} a measured period", s.automatic ? "lacks" : "has");
  if (!tuning) return ok_status();
  const auto fits = [&](const OuterRhythm& r) {
    const bool longer = s.follows() || r.period > s.delay;
    return r.period != 0 && r.period % rounds.fragments == 0 && longer;
  };
  if (fits(tuning->now) && (tuning->past_end == 0 || fits(tuning->past))) return ok_status();
  return invalid_argument("the state has period {}, which {} and delay {} cannot have",
                          tuning->now.period, counted(rounds.fragments, "fragment"), s.delay);
}

void OuterProgress::restore(const OuterTuning& tuning, bool under_way, OuterConfig* config) {
  OuterSchedule& s = config->schedule;
  s = s.with_period(tuning.now.period);
  rounds.now = tuning.now;
  rounds.past = tuning.past;
  rounds.past_end = tuning.past_end;
  rounds.delay = s.delay;
  tuner.end();
  if (!tuning.measuring) return;
  tuner.begin(std::max(step, rounds.synchronous));
  if (tuning.asked && under_way) tuner.ask();
}

int64_t OuterPace::averages_ns() const {
  return std::accumulate(averages_ns_.begin(), averages_ns_.end(), int64_t{0});
}

void OuterPace::fold(const OuterFragmentList& fragments) {
  for (size_t f = 0; f < fragments.size(); ++f) {
    const std::optional<OuterFragment::Consumed> consumed = fragments[f]->take_consumed();
    if (!consumed) continue;
    const OpStats stats = consumed->reduction->stats();
    meter_.consumed(stats.end_ns - stats.start_ns - stats.kept_back_ns,
                    stats.end_ns - consumed->asked_ns);
    averages_ns_[f] = meter_.network_ns();
    if (left_ns_ != 0) left_ns_ = std::max(left_ns_, stats.end_ns);
  }
}

void OuterPace::returned(const OuterFragmentList& fragments, int64_t now_ns) {
  left_ns_ = now_ns;
  left_in_flight_ = averages_in_flight(fragments);
}

void OuterPace::inner_step(const OuterFragmentList& fragments, int64_t now_ns, OuterProgress* at) {
  fold(fragments);
  const bool beside = left_in_flight_ != 0 && averages_in_flight(fragments) != 0;
  if (left_ns_ != 0) {
    const int64_t ns = std::max<int64_t>(0, now_ns - left_ns_);
    if (beside || left_in_flight_ == 0) meter_.inner_step(ns, beside);
    at->tuner.inner_step(at->step + 1, ns);
  }
  left_ns_ = 0;
}

}  // namespace sotto
