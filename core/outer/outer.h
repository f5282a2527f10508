// An outer optimizer: after every `period` inner steps what they have changed is averaged over
// ranks and moves an anchor, in the background of the next ones (specification co2-overlap). CO2,
// SlowMo, DiLoCo and their family are settings of it.
//
// Threads: one at a time per outer optimizer. While a step is in flight everything but its own
// operation answers BUSY. An average goes on behind the steps.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/optim/agreement.h"
#include "core/optim/parameter_set.h"
#include "core/outer/fragment.h"
#include "core/outer/progress.h"

namespace sotto {

// What a step has done, or-ed together.
inline constexpr uint32_t kOuterLaunched = 1;
inline constexpr uint32_t kOuterConsumed = 2;  // live parameters have changed
inline constexpr uint32_t kOuterHeld = 4;  // they are back at the anchor: there was no average yet
inline constexpr uint32_t kOuterWaited = 8;      // the average was late
inline constexpr uint32_t kOuterMeasuring = 16;  // period "auto" is not chosen yet

// Of the last update, of the fragment that was updated last.
struct OuterUpdateInfo {
  double lambda = 1, gap = 0, unit = 0;
  double clip_fraction = 0;
  double delta_norm = 0;  // root of the mean over ranks of the squared length of Delta
  double step_norm = 0;   // of the anchor's update
  double loss = std::numeric_limits<double>::quiet_NaN();  // mean of those that ranks have told
  uint32_t votes = 0;                                      // of all ranks
  uint32_t not_finite = 0;                                 // ranks that it has left out
};

struct OuterInfo {
  uint32_t events = 0;         // of the last step
  uint64_t step = 0;           // inner steps done
  uint64_t round = 0;          // averages consumed, of all fragments
  uint64_t next_boundary = 0;  // inner steps until something happens
  uint64_t period = 1, delay = 0;
  uint32_t fragments = 0;
  uint32_t in_flight = 0;  // averages
  OuterUpdateInfo update;
  double gain = 1;
  OverlapMeter overlap;
  uint64_t payload_bytes_next_launch = 0;
  uint64_t header_bytes_next_launch = 0;
  uint64_t state_bytes = 0;
};

// Everything that one rank keeps across steps.
struct OuterSnapshot {
  int32_t rank = 0, size = 1;
  std::string settings;  // lines "key=value": what states of others must have alike
  uint64_t step = 0, flushed_at = 0;
  bool swapped = false;
  std::optional<double> lr;           // of the last inner step, for settings in its units
  std::optional<double> last_rate;    // of the last one whose rate was not 0 or less, if lr is
  std::optional<OuterTuning> tuning;  // with period "auto"
  std::vector<OuterFragmentState> fragments;
};

class Outer : public std::enable_shared_from_this<Outer> {
 public:
  // Collective: as Optimizer::create. json: as parse_outer. params: names, counts, live values and
  // model copies. shards: params are shards, and these ranks have those of this replica; collective
  // among them too. null: params are whole.
  static Result<std::shared_ptr<Outer>> create(std::shared_ptr<Comm> comm, std::string_view json,
                                               std::vector<ParamSpec> params,
                                               std::shared_ptr<Device> device = nullptr,
                                               const Status& refused = {},
                                               std::shared_ptr<Comm> shards = nullptr);
  // Of a configuration that has been read. compares_values: whether ranks compare them.
  static Result<std::shared_ptr<Outer>> create(std::shared_ptr<Comm> comm, OuterConfig config,
                                               std::vector<ParamSpec> params,
                                               std::shared_ptr<Device> device,
                                               bool compares_values);
  ~Outer();
  Outer(const Outer&) = delete;
  Outer& operator=(const Outer&) = delete;

  // "lr": inner learning rate of the next steps; "loss": what this rank tells the others with the
  // next average; "weight": 1, or 0: its inner steps do not count in the next averages; "retune":
  // 1: period "auto" is measured anew when the next average has been consumed.
  Status set(std::string_view name, double value);
  // Told to all ranks with the next average, or-ed together.
  Status vote(uint32_t bits);
  Status set_parameters(std::span<const ParameterPlace> params,
                        std::span<const ParameterPlace> copies);

  // Why no step with this inner learning rate can be made now. INVALID_STATE: the anchor is in the
  // place of the parameters; the update would divide by the learning rate.
  Status check(double lr) const;
  // Whether something happens after the next inner step. If not, passed() may take the place of
  // step_behind, which would make an operation that does nothing.
  bool due() const;
  void passed(double lr);
  // Whether the next inner step averages gradients over ranks, since outer steps have not begun.
  bool averages_gradients() const { return at_.rounds.at(at_.step + 1, 0).follows; }
  // After every inner step.
  Result<OpRef> step(const CallOptions& options) {
    return step_behind(nullptr, given_.gamma, options);
  }
  // The same behind an inner step in flight with learning rate `lr`, which ends well unless the
  // comm or device has failed.
  Result<OpRef> step_behind(OpRef inner, double lr, const CallOptions& options);
  // That inner step has changed nothing: the operation of step_behind ends with this. Driver.
  void skipped(const Status& why) noexcept { skipped_ = why; }
  // Launches what has not been sent, consumes everything; live parameters become the anchor. A
  // collective; behind another one it does nothing.
  Result<OpRef> flush(const CallOptions& options);
  // Anchor and live parameters change places, what is under way goes on; the next call undoes it.
  Result<OpRef> swap(const CallOptions& options);

  // Waits for averages under way, which are not consumed. Also of a comm that has failed: what had
  // not been delivered is sent again after the restore.
  Result<OuterSnapshot> snapshot();
  // INVALID_ARGUMENT: of other settings or parameters. own: of this rank of as many; else of any,
  // without error feedback (OuterRestore).
  Status check(const OuterSnapshot& snapshot, bool own) const;
  // After that check, which it makes too: on its error nothing has changed. Ranks find each other
  // in the next step, which is a collective.
  Status restore(const OuterSnapshot& snapshot, bool own = true);
  // Live parameters become the anchor, as in a new one. Ranks do so between the same steps.
  Status restart();
  Result<OuterInfo> info();
  // What the next step sends.
  Result<PeerTraffic> next_traffic();
  uint64_t state_bytes() const;
  // Waits for a step in flight and for averages under way, at most as long as their deadlines. The
  // caller's memory is free then.
  void close();
  bool busy() const { return in_flight_.load(std::memory_order_acquire); }
  const std::shared_ptr<Comm>& comm() const { return context_.comm; }
  // Values of an array of all fragments, in the order of the parameters; for tests and states.
  Result<std::vector<std::vector<float>>> values(OuterArray array) const;

 private:
  class StepHooks;
  // By the trainer, for the next steps.
  struct Given {
    double gamma = 1, loss = std::numeric_limits<double>::quiet_NaN(), weight = 1;
    double last_rate = 1;  // the last gamma that was not 0 or less; 0: it is not known
    bool sets_lr = false;  // by set(): it stays behind an import
    uint32_t votes = 0;
    uint16_t asks = 0;

    void set_rate(double lr) {
      gamma = lr;
      if (lr > 0) last_rate = lr;
    }
  };

  Outer(OuterContext context, ParameterSet parameters);
  static Result<std::shared_ptr<Outer>> make(std::shared_ptr<Comm> comm, const OuterConfig& config,
                                             std::vector<ParamSpec> params,
                                             std::shared_ptr<Device> device);
  // shards: borrowed, as in create.
  static Result<std::shared_ptr<Outer>> agreed(Result<std::shared_ptr<Outer>> made, Comm& comm,
                                               bool compares_values, Comm* shards = nullptr);
  Status make_fragments();
  Status start();
  Result<CreationTerms> terms(bool compares_values) const;
  Status check_idle() const;
  OuterFragment::Step fragment_step(const CallOptions& options, std::vector<OpRef>* ops) const;
  Status begin_step(const OuterFragment::Step& step);
  Status begin_fragment(size_t f, const OuterEvents& events, const OuterFragment::Step& step);
  // The operation that the caller waits for: it comes after `ops`.
  Result<OpRef> finish(const Status& begun, std::vector<OpRef> ops, const CallOptions& options);
  // The step or flush has failed with its comm: everything but inner steps is as before.
  void take_back();
  void completed(Status& status);
  // Ranks that have restored a state: all of the same step; what is missing is launched again.
  Status rejoin(const OuterFragment::Step& step);

  ParameterSet parameters_;
  OuterContext context_;
  OuterProgress at_;
  std::optional<OuterProgress> before_;  // the step or flush in flight
  OuterFragmentList fragments_;
  std::shared_ptr<PreparedPlan> nothing_;
  uint32_t events_ = 0;
  size_t updated_last_ = 0;  // fragment
  Given given_;
  bool swapped_ = false;
  bool restored_ = false;
  Status skipped_;           // the inner step in flight
  uint32_t not_finite_ = 0;  // ranks that the last step with an average has left out
  OuterPace pace_;
  std::atomic<bool> in_flight_{false};
};

}  // namespace sotto
