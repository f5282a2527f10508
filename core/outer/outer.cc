#include "core/outer/outer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <utility>

#include "core/base/log.h"
#include "core/base/text.h"
#include "core/optim/agreement.h"
#include "core/outer/settings.h"
#include "core/outer/shards.h"

namespace sotto {
namespace {

// Of the fragment's last update.
void add_report(OuterFragment& fragment, OuterUpdateInfo* info) {
  const OuterReport& report = fragment.report();
  double changed = 0, clipped = 0, deltas = 0;
  for (const OuterFactor& factor : report.factors) {
    info->lambda = std::max(info->lambda, factor.lambda);
    info->gap = std::max(info->gap, factor.gap);
    info->unit = std::max(info->unit, factor.unit);
    changed += static_cast<double>(factor.change) * factor.change;
    clipped += factor.clipped;
  }
  double losses = 0;
  uint32_t told = 0;
  for (const OuterMessage& message : report.messages) {
    deltas += message.delta_sum;
    if (std::isnan(message.loss)) continue;
    losses += message.loss;
    ++told;
  }
  if (told != 0) info->loss = losses / told;
  info->step_norm = std::sqrt(changed);
  info->delta_norm = std::sqrt(deltas / static_cast<double>(report.messages.size()));
  if (const uint64_t all = fragment.shape().norm_elements(); all != 0)
    info->clip_fraction = clipped / static_cast<double>(all);
}

// Of the averages that were consumed last.
void forget_votes(const OuterFragmentList& fragments) {
  for (const std::unique_ptr<OuterFragment>& f : fragments) f->report().votes = 0;
}

// The update may divide by the learning rate.
Status check_lr(const OuterConfig& config, double lr) {
  if (lr > 0 || !config.rule.lr_normalised) return ok_status();
  return invalid_state(
      "lr is {}: momentum is in units of gradients (sotto.outer.lr_normalised), which are "
      "divided by it; allowed: > 0",
      lr);
}

// Inner steps are the trainer's own.
Status check_by_hand(const OuterConfig& config) {
  if (!config.schedule.averages_gradients()) return ok_status();
  return invalid_argument(
      "configuration: outer.every_step: found gradients, allowed is parameters where inner steps "
      "are the trainer's, whose gradients are not known here; average them before the inner step, "
      "or create an optimizer with \"sotto\": {{\"outer\": ...}}");
}

// Inner steps of a fragment whose change no launch has sent. pending: its average is under way.
// What is done between a launch and a merge that resets is dropped by that merge.
uint64_t unsent_steps(const OuterConfig& config, const OuterProgress& at, size_t fragment,
                      bool pending) {
  if (at.flushed(fragment) != OuterFlushed::kNothing) return 0;
  const uint64_t of_all = at.step - std::max(at.flushed_at, at.rounds.synchronous);
  const uint64_t since_launch = at.rounds.since_launch(at.step, fragment);
  if (since_launch >= of_all) return of_all;  // nothing was launched
  const OuterSchedule& s = config.schedule;
  if (config.merge.kind != OuterMerge::kReset || s.delay == 0 || s.delay == s.period)
    return since_launch;
  return pending ? 0 : since_launch - std::min(since_launch, s.delay);
}

}  // namespace

// The end of the last operation of a step.
class Outer::StepHooks final : public OpHooks {
 public:
  StepHooks(std::shared_ptr<Outer> outer, std::vector<OpRef> ops)
      : outer_(std::move(outer)), ops_(std::move(ops)) {}
  void on_complete(Status& status, std::span<const std::byte>) noexcept override {
    // The comm has failed behind a step that was made: the next one tells of it.
    if (!ops_.empty() &&
        std::ranges::all_of(ops_, [](const OpRef& op) { return op->status().ok(); }))
      status = ok_status();
    outer_->completed(status);
  }
  void add_stats(OpStats& stats) const noexcept override {
    for (const OpRef& op : ops_) {
      const OpStats part = op->stats();
      if (part.start_ns != 0) stats.start_ns = std::min(stats.start_ns, part.start_ns);
      stats.kernel_ns += part.kernel_ns;
      stats.payload_bytes_planned += part.payload_bytes_planned;
      stats.header_bytes_planned += part.header_bytes_planned;
    }
  }

 private:
  std::shared_ptr<Outer> outer_;
  std::vector<OpRef> ops_;
};

Outer::Outer(OuterContext context, ParameterSet parameters)
    : parameters_(std::move(parameters)), context_(std::move(context)) {
  context_.parameters = &parameters_;
}

Outer::~Outer() = default;

void Outer::close() {
  (void)context_.failure();
  context_.comm->engine().wait_until([this] { return !busy(); }, -1);
  for (const std::unique_ptr<OuterFragment>& f : fragments_) f->await();
}

Result<std::shared_ptr<Outer>> Outer::create(std::shared_ptr<Comm> comm, std::string_view json,
                                             std::vector<ParamSpec> params,
                                             std::shared_ptr<Device> device, const Status& refused,
                                             std::shared_ptr<Comm> shards) {
  if (shards != nullptr && shards->size() == 1) shards = nullptr;
  const auto made = caught([&]() -> Result<std::shared_ptr<Outer>> {
    SOTTO_TRY(refused);
    SOTTO_ASSIGN(const OuterConfig config, parse_outer(json));
    SOTTO_TRY(check_supported(config));
    SOTTO_TRY(check_by_hand(config));
    if (shards != nullptr) SOTTO_TRY(check_shards(config));
    for (const std::string& warning : config.warnings) log(LogLevel::kWarn, "{}", warning);
    SOTTO_ASSIGN(std::shared_ptr<Outer> outer,
                 make(comm, config, std::move(params), std::move(device)));
    if (shards != nullptr) SOTTO_TRY(shards->takes(outer->context_.access.device()->caps()));
    outer->context_.shards = shards;
    return outer;
  });
  return agreed(made, *comm, true, shards.get());
}

Result<std::shared_ptr<Outer>> Outer::create(std::shared_ptr<Comm> comm, OuterConfig config,
                                             std::vector<ParamSpec> params,
                                             std::shared_ptr<Device> device, bool compares_values) {
  const auto made =
      caught([&] { return make(comm, config, std::move(params), std::move(device)); });
  return agreed(made, *comm, compares_values);
}

// Of shards those of a replica agree, then the replicas, then those of a replica about what has
// come of that: all ranks create it, or none.
Result<std::shared_ptr<Outer>> Outer::agreed(Result<std::shared_ptr<Outer>> made, Comm& comm,
                                             bool compares_values, Comm* shards) {
  const auto settings = [&]() -> Result<std::string> {
    SOTTO_TRY(made.status());
    return settings_of_shards((*made)->context_.config, (*made)->parameters_);
  };
  const auto with_sizes = [&]() -> Status {
    SOTTO_TRY(agree_on_shards(*shards, caught(settings)));
    SOTTO_ASSIGN((*made)->context_.sizes,
                 sizes_of_shards(*shards, (*made)->context_.config, (*made)->parameters_));
    return ok_status();
  };
  const auto add = [&](const Status& status) {
    if (made.ok() && !status.ok()) made = status;
  };
  if (shards != nullptr) add(with_sizes());
  if (made.ok()) add(caught([&] { return (*made)->make_fragments(); }));
  const Status all = agree(comm, OpKind::kOuterCreate, caught([&]() -> Result<CreationTerms> {
                             SOTTO_TRY(made.status());
                             return (*made)->terms(compares_values);
                           }));
  if (!all.ok()) made = all;  // it names the rank
  if (shards != nullptr) add(agree_on_shards(*shards, caught(settings)));
  SOTTO_TRY(made.status());
  (*made)->context_.reductions = comm.duplicate();
  SOTTO_TRY((*made)->start());
  return made;
}

Result<std::shared_ptr<Outer>> Outer::make(std::shared_ptr<Comm> comm, const OuterConfig& config,
                                           std::vector<ParamSpec> params,
                                           std::shared_ptr<Device> device) {
  OuterContext context;
  context.comm = comm;
  context.access =
      DeviceAccess(comm->context()->engine(), comm->context()->device_or_default(device));
  context.config = config.resolved(static_cast<uint64_t>(comm->size()));
  SOTTO_ASSIGN(context.levels, make_levels(config.hierarchy, comm->hosts()));
  context.config.hierarchy = context.levels.kind;
  if (context.config.codec) context.config.codec->hierarchy = context.levels.kind;
  SOTTO_TRY(check_supported(context.config));
  ParameterSet parameters(std::move(params), context.access);
  SOTTO_TRY(parameters.check(std::nullopt));
  SOTTO_TRY(comm->takes(context.access.device()->caps()));
  std::shared_ptr<Outer> outer(new Outer(std::move(context), std::move(parameters)));
  SOTTO_ASSIGN(outer->nothing_, comm->prepare(LogicalPlan(), outer->context_.access.device()));
  return outer;
}

// As new, which have to be started.
Status Outer::make_fragments() {
  const OuterConfig& c = context_.config;
  std::vector<uint64_t> counts;
  for (const ParamSpec& p : parameters_) counts.push_back(p.count);
  SOTTO_ASSIGN(const std::vector<std::vector<uint64_t>> cut, c.cut(counts));
  OuterFragmentList fragments;
  for (const std::vector<uint64_t>& tensors : cut) {
    SOTTO_ASSIGN(std::unique_ptr<OuterFragment> fragment,
                 OuterFragment::make(context_, {tensors.begin(), tensors.end()}));
    fragments.push_back(std::move(fragment));
  }
  for (const std::unique_ptr<OuterFragment>& f : fragments_) f->await();
  fragments_ = std::move(fragments);
  at_ = OuterProgress::start(&context_.config, cut.size());
  pace_.start(cut.size());
  return ok_status();
}

Status Outer::start() {
  std::vector<OpRef> ops;
  const OuterFragment::Step step = fragment_step({}, &ops);
  for (const std::unique_ptr<OuterFragment>& f : fragments_) SOTTO_TRY(f->start(step));
  SOTTO_ASSIGN(const OpRef started, finish(ok_status(), std::move(ops), {}));
  return context_.comm->engine().wait(started, -1);
}

Result<CreationTerms> Outer::terms(bool compares_values) const {
  CreationTerms terms;
  terms.parameters = &parameters_;
  for (const ParamSpec& p : parameters_) terms.elements += p.count;
  terms.policy = {};
  terms.settings = outer_settings_text(context_.config, parameters_, true);
  if (compares_values && context_.comm->size() > 1) {
    SOTTO_ASSIGN(terms.value_hashes, parameters_.value_hashes());
  }
  return terms;
}

Status Outer::check_idle() const {
  return busy()
             ? error(Code::kBusy, "a step of this outer optimizer is in flight; wait for it first")
             : ok_status();
}

Status Outer::set(std::string_view name, double value) {
  SOTTO_TRY(check_idle());
  const bool is_lr = name == "lr";
  if (is_lr ? !fits_float32(value) : name == "loss" && !std::isfinite(value))
    return invalid_argument("{} is {}; allowed: a finite number{}", name, value,
                            is_lr ? ", in float32 too" : "");
  if (is_lr) {
    given_.set_rate(value);
    given_.sets_lr = true;
    return ok_status();
  }
  if (name == "loss") {
    given_.loss = value;
    return ok_status();
  }
  if (name == "weight") {
    if (value != 0 && value != 1) return invalid_argument("weight is {}; allowed: 0 or 1", value);
    given_.weight = value;
    return ok_status();
  }
  if (name == "retune") {
    if (value != 1) return invalid_argument("retune is {}; allowed: 1", value);
    const OuterSchedule& s = context_.config.schedule;
    if (!s.automatic)
      return invalid_state("retune measures a period \"auto\" anew; the period here is {}",
                           s.period);
    given_.asks |= kOuterAsksPeriod;
    return ok_status();
  }
  return invalid_argument("\"{}\" cannot be set; allowed: \"lr\", \"loss\", \"weight\", \"retune\"",
                          name);
}

Status Outer::vote(uint32_t bits) {
  SOTTO_TRY(check_idle());
  given_.votes |= bits;
  return ok_status();
}

Status Outer::set_parameters(std::span<const ParameterPlace> params,
                             std::span<const ParameterPlace> copies) {
  SOTTO_TRY(check_idle());
  return parameters_.set_parameters(params, copies);
}

OuterFragment::Step Outer::fragment_step(const CallOptions& options,
                                         std::vector<OpRef>* ops) const {
  OuterFragment::Step step;
  step.gamma = given_.gamma;
  step.place = 2 * at_.step;
  step.told.loss = given_.loss;
  step.told.weight = static_cast<float>(given_.weight);
  step.told.votes = given_.votes;
  const auto us = [](int64_t ns) {
    return static_cast<uint32_t>(std::clamp<int64_t>(ns / 1000, 0, UINT32_MAX));
  };
  step.told.step_us = us(at_.tuner.measuring() ? at_.tuner.step_ns() : pace_.meter().step_ns());
  step.told.network_us = us(pace_.averages_ns());
  step.told.version = kOuterMessageVersion;
  step.told.asks = given_.asks;
  step.options.tag = options.tag;
  step.options.timeout_us = context_.timeout_us(options);
  step.options.priority = options.priority;
  step.options.admitted = true;
  step.options.stream = options.stream;
  step.ops = ops;
  return step;
}

Status Outer::check(double lr) const {
  SOTTO_TRY(check_idle());
  SOTTO_TRY(context_.failure());
  if (swapped_) {
    return invalid_state(
        "the anchor is in the place of the parameters; call sotto_outer_swap before the next inner "
        "step");
  }
  for (size_t f = 0; f < fragments_.size(); ++f) {
    if (at_.rounds.at(at_.step + 1, f).consumes) return check_lr(context_.config, lr);
  }
  return ok_status();
}

bool Outer::due() const {
  if (restored_) return true;
  for (size_t f = 0; f < fragments_.size(); ++f) {
    if (!at_.rounds.at(at_.step + 1, f).none()) return true;
  }
  return false;
}

void Outer::passed(double lr) {
  given_.set_rate(lr);
  const Clock& clock = context_.comm->engine().clock();
  pace_.inner_step(fragments_, clock.now_ns(), &at_);
  events_ = 0;
  ++at_.step;
  for (const std::unique_ptr<OuterFragment>& f : fragments_) f->let_go(at_.step);
  pace_.returned(fragments_, clock.now_ns());
}

Result<OpRef> Outer::step_behind(OpRef inner, double lr, const CallOptions& options) {
  if (const Status allowed = check(lr); !allowed.ok()) {
    if (inner == nullptr) return allowed;
    return finish(allowed, {std::move(inner)}, options);  // which uses the caller's memory
  }
  if (inner == nullptr) SOTTO_TRY(context_.admit(options));
  given_.set_rate(lr);
  const Clock& clock = context_.comm->engine().clock();
  pace_.inner_step(fragments_, clock.now_ns(), &at_);
  std::vector<OpRef> ops;
  if (inner != nullptr) ops.push_back(inner);
  OuterFragment::Step step = fragment_step(options, &ops);
  step.inner = std::move(inner);
  const Status begun = caught([&]() -> Status {
    if (restored_) SOTTO_TRY(rejoin(step));
    return begin_step(step);
  });
  pace_.returned(fragments_, clock.now_ns());  // behind `finish` averages are the driver's as well
  return finish(begun, std::move(ops), options);
}

Status Outer::begin_step(const OuterFragment::Step& step) {
  before_ = at_;
  events_ = 0;
  for (const std::unique_ptr<OuterFragment>& f : fragments_) f->settled();
  // Updates come last, so that none is made in a step that fails.
  bool tells = false;
  for (const bool updates : {false, true}) {
    for (size_t f = 0; f < fragments_.size(); ++f) {
      const OuterEvents events = at_.rounds.at(at_.step + 1, f);
      const bool moves = events.consumes || events.averages || events.follows;
      if (!events.none() && moves == updates) SOTTO_TRY(begin_fragment(f, events, step));
      tells = tells || events.launches || events.averages;
    }
  }
  if (tells) given_.votes = 0;
  if ((events_ & kOuterLaunched) != 0) given_.asks = 0;
  ++at_.step;
  for (const std::unique_ptr<OuterFragment>& f : fragments_) f->let_go(at_.step);
  return ok_status();
}

Status Outer::begin_fragment(size_t f, const OuterEvents& events, const OuterFragment::Step& step) {
  OuterFragment& fragment = *fragments_[f];
  // Without a delay a step consumes what it launches. What a flush has consumed is not there.
  const bool at_once = at_.rounds.delay == 0;
  const bool consumes = events.consumes && (at_once || fragment.under_way());
  const bool held = events.launches && events.consumes && !consumes;
  const bool moves = consumes || events.averages;
  if (moves && (events_ & kOuterConsumed) == 0) forget_votes(fragments_);
  events_ |= (events.launches ? kOuterLaunched : 0) | (held ? kOuterHeld : 0) |
             (moves ? kOuterConsumed : 0);
  if (consumes && fragment.late()) events_ |= kOuterWaited;
  if (moves) updated_last_ = f;
  if (f == 0 && consumes && !at_once) at_.tuner.answer();
  if (f == 0 && events.launches) at_.tuner.asks(at_.step + 1, fragments_.size());
  if (f == 0 && consumes && at_once) at_.tuner.answer();
  if (consumes && fragment.usual()) at_.tuner.consumed();
  return fragment.begin(events, step);
}

Result<OpRef> Outer::finish(const Status& begun, std::vector<OpRef> ops,
                            const CallOptions& options) {
  Status status = begun;
  if (status.ok()) {
    CallOptions last = options;
    last.admitted = true;
    last.after = ops;
    in_flight_.store(true, std::memory_order_release);
    Result<OpRef> op = caught([&] {
      return context_.comm->launch_local(
          nothing_, [](Run&) {},
          context_.comm->engine().pool().make<StepHooks>(shared_from_this(), ops), last);
    });
    if (op.ok()) return op;
    in_flight_.store(false, std::memory_order_release);
    status = op.status();
  }
  // What was started uses the caller's memory.
  for (const OpRef& op : ops) (void)context_.comm->engine().wait(op, -1);
  const auto made = [](const OpRef& op) { return op->status().ok(); };
  if (begun.ok() && !ops.empty() && std::ranges::all_of(ops, made)) {
    completed(status = ok_status());
    if (status.ok()) return ops.back();
    return status;
  }
  take_back();
  skipped_ = ok_status();
  return status;
}

void Outer::take_back() {
  if (!before_) return;
  bool updated = false;
  for (size_t f = 0; f < fragments_.size(); ++f) {
    const OuterFragment::Made made = fragments_[f]->take_back();
    updated = updated || made.update;
    if (made.flush != OuterFlushed::kNothing) at_.flushes[f] = {at_.step, made.flush};
  }
  if (!updated) at_ = *before_;
  at_.flushed_at = before_->flushed_at;
  before_.reset();
}

void Outer::completed(Status& status) {
  if (!status.ok()) take_back();
  const bool consumed = before_ && (events_ & kOuterConsumed) != 0;
  if (consumed) at_.hear(fragments_[updated_last_]->report().messages, &context_.config);
  before_.reset();
  std::set<size_t> who;
  bool encoded = true;
  for (const std::unique_ptr<OuterFragment>& f : fragments_) {
    f->report().take_not_finite(&who);
    encoded = !std::exchange(f->report().not_encoded, false) && encoded;
  }
  const bool fails = context_.config.nonfinite == OuterNonfinite::kError;
  const bool refused = !who.empty() && fails;
  if (status.ok() && consumed)
    not_finite_ = static_cast<uint32_t>(encoded ? who.size() : context_.comm->size());
  if (status.ok() && !encoded) {
    const std::string text =
        fmt::format("outer step {}: codec \"{}\" cannot encode what the ranks have changed",
                    at_.step, codec_name(context_.config.codec->kind));
    if (fails) status = error(Code::kNonfinite, "{}; nothing was updated", text);
    if (!fails) log(LogLevel::kWarn, "{}; the average has left out all ranks", text);
  }
  if (status.ok() && !refused && who.contains(static_cast<size_t>(context_.comm->rank()))) {
    log(LogLevel::kWarn,
        "outer step {}: NaN or Inf in the parameters of this rank, which the average has left out",
        at_.step);
  }
  if (status.ok() && refused) {
    status = error(Code::kNonfinite,
                   "outer step {}: NaN or Inf in the parameters of rank {}; nothing was updated",
                   at_.step, list_of_ranks({who.begin(), who.end()}));
  }
  if (status.ok()) status = skipped_;
  skipped_ = ok_status();
  in_flight_.store(false, std::memory_order_release);
}

Result<OpRef> Outer::flush(const CallOptions& options) {
  SOTTO_TRY(check_idle());
  SOTTO_TRY(context_.failure());
  if (swapped_)
    return invalid_state("the anchor is in the place of the parameters; call sotto_outer_swap");
  // Nothing has changed since the last one, or outer steps have not begun.
  const bool idle = at_.flushed_at == at_.step || at_.step <= at_.rounds.synchronous;
  // A schedule may have ended at 0: what is left belongs to inner steps before that.
  const double lr = given_.gamma > 0 ? given_.gamma : given_.last_rate;
  if (!idle) SOTTO_TRY(check_lr(context_.config, lr));
  SOTTO_TRY(context_.admit(options));
  std::vector<OpRef> ops;
  OuterFragment::Step step = fragment_step(options, &ops);
  step.gamma = lr;
  if (restored_) SOTTO_TRY(rejoin(step));
  ++step.place;
  before_ = at_;
  for (const std::unique_ptr<OuterFragment>& f : fragments_) f->settled();
  at_.tuner.forget();  // what ranks would have told is consumed here
  Status begun;
  if (!idle) forget_votes(fragments_);
  bool sends = false;
  for (size_t f = 0; f < fragments_.size() && begun.ok() && !idle; ++f) {
    const bool pending = fragments_[f]->pending() != OuterPending::kNone;
    const uint64_t since = unsent_steps(context_.config, at_, f, pending);
    sends = sends || since != 0;
    updated_last_ = f;
    begun = caught([&] { return fragments_[f]->flush(since, at_.flushed(f), step); });
  }
  if (begun.ok()) {
    at_.flushed_at = at_.step;
    if (sends) given_.votes = given_.asks = 0;
    events_ = idle ? 0 : kOuterLaunched | kOuterConsumed;
  }
  return finish(begun, std::move(ops), options);
}

Result<OpRef> Outer::swap(const CallOptions& options) {
  SOTTO_TRY(check_idle());
  SOTTO_TRY(context_.failure());
  SOTTO_TRY(context_.admit(options));
  std::vector<OpRef> ops;
  const OuterFragment::Step step = fragment_step(options, &ops);
  Status begun;
  for (size_t f = 0; f < fragments_.size() && begun.ok(); ++f)
    begun = caught([&] { return fragments_[f]->swap(step, swapped_); });
  if (begun.ok()) swapped_ = !swapped_;
  pace_.left();
  return finish(begun, std::move(ops), options);
}

Result<OuterInfo> Outer::info() {
  SOTTO_TRY(check_idle());
  OuterInfo info;
  info.events = events_ | (at_.tuner.measuring() ? kOuterMeasuring : 0);
  info.step = at_.step;
  info.next_boundary = at_.rounds.until_next(at_.step);
  info.period = at_.rounds.now.period;
  info.delay = at_.rounds.delay;
  info.fragments = static_cast<uint32_t>(fragments_.size());
  info.gain = context_.config.gain().value_or(1);
  for (const std::unique_ptr<OuterFragment>& f : fragments_) {
    info.round += f->consumed();
    info.in_flight += f->under_way() ? 1 : 0;
  }
  info.state_bytes = state_bytes();
  pace_.fold(fragments_);
  info.overlap = pace_.meter();
  add_report(*fragments_[updated_last_], &info.update);
  for (const std::unique_ptr<OuterFragment>& f : fragments_) info.update.votes |= f->report().votes;
  info.update.not_finite = not_finite_;
  SOTTO_ASSIGN(const PeerTraffic next, fragments_.front()->next_traffic());
  info.payload_bytes_next_launch = next.payload_bytes_sent;
  info.header_bytes_next_launch = next.header_bytes_sent + next.metadata_bytes_sent;
  return info;
}

uint64_t Outer::state_bytes() const {
  uint64_t bytes = 0;
  for (const std::unique_ptr<OuterFragment>& f : fragments_) bytes += f->state_bytes();
  return bytes;
}

Result<PeerTraffic> Outer::next_traffic() {
  PeerTraffic sum;
  for (size_t f = 0; f < fragments_.size(); ++f) {
    const OuterEvents events = at_.rounds.at(at_.step + 1, f);
    if (!events.launches && !events.averages) continue;
    SOTTO_ASSIGN(const PeerTraffic next, fragments_[f]->next_traffic(events.averages));
    sum += next;
  }
  return sum;
}

Result<std::vector<std::vector<float>>> Outer::values(OuterArray array) const {
  std::vector<std::vector<float>> out(parameters_.size());
  for (const std::unique_ptr<OuterFragment>& f : fragments_) {
    SOTTO_ASSIGN(const std::vector<float> all, f->values(array));
    auto at = all.begin();
    for (const uint32_t t : f->tensors()) {
      const auto end = at + static_cast<ptrdiff_t>(parameters_[t].count);
      out[t].assign(at, end);
      at = end;
    }
  }
  return out;
}

}  // namespace sotto
