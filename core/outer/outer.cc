#include "core/outer/outer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <utility>

#include "core/base/log.h"
#include "core/optim/agreement.h"
#include "core/optim/settings.h"

namespace sotto {
namespace {

// Everything that changes what a boundary does, as lines "key=value".
// all: also those that may change between a state and its restore.
std::string settings_text(const OuterConfig& c, const ParameterSet& parameters, bool all) {
  std::string text;
  const auto add = [&](std::string_view key, const auto& value) {
    text += fmt::format("sotto.outer.{}={}\n", key, value);
  };
  add("parameters", parameters.registration_hash());
  add("payload", outer_word("payload", c.payload));
  add("period", c.schedule.period);
  add("delay", c.schedule.delay);
  add("switch_step", c.schedule.switch_step);
  add("warmup_steps", c.schedule.warmup_steps);
  add("rule", outer_word("rule", c.rule.kind));
  add("form", outer_word("form", c.rule.form));
  if (all) add("alpha", c.rule.alpha);
  if (all) add("beta", c.rule.beta);
  add("freshness", c.rule.freshness);
  add("lr_normalised", c.rule.lr_normalised);
  add("penalty", outer_word("penalty", c.penalty.kind));
  add("granularity", outer_word("granularity", c.penalty.granularity));
  if (all) add("lambda_const", c.penalty.lambda_const);
  if (all) add("lambda_max", c.penalty.lambda_max);
  if (all) add("eps", c.penalty.eps);
  if (all) add("auto_floor", c.penalty.auto_floor);
  add("consensus_scalars", c.penalty.consensus_scalars);
  add("clip", outer_word("clip", c.clip.kind));
  add("clip_units", outer_word("clip_units", c.clip.units));
  if (all) add("phi", c.clip.phi);
  add("merge", outer_word("merge", c.merge.kind));
  add("merge_a", c.merge.a);
  if (all) add("nonfinite", outer_word("nonfinite", c.nonfinite));
  add("dense_rounds", c.dense_rounds);
  add("codec", c.codec ? codec_name(c.codec->kind) : "none");
  if (c.codec) {
    // Error feedback fits other blocks and selections.
    if (c.codec->row().sparse && all) {
      for_each_setting(c.codec->sparse, [&](const char* key, const auto& value) {
        add(fmt::format("codec.{}", key), value);
      });
    }
    add("codec.scale", scale_name(c.codec->scale));
    add("codec.chunk_align", c.codec->chunk_align);
    add("codec.block", c.codec->block);
    add("codec.residual", c.codec->residual);
  }
  std::vector<uint64_t> counts;
  for (const ParamSpec& p : parameters) counts.push_back(p.count);
  if (const auto cut = c.cut(counts); cut.ok()) {
    for (const std::vector<uint64_t>& fragment : *cut) {
      std::string numbers;
      for (const uint64_t tensor : fragment)
        numbers += fmt::format("{}{}", numbers.empty() ? "" : ", ", tensor);
      add("fragments", numbers);
    }
  }
  return text;
}

// Of the fragment's last update.
void add_report(const OuterFragment& fragment, OuterUpdateInfo* info) {
  const OuterReport& report = fragment.report();
  double changed = 0, clipped = 0, deltas = 0;
  for (const OuterFactor& factor : report.factors) {
    info->lambda = std::max(info->lambda, factor.lambda);
    info->gap = std::max(info->gap, factor.gap);
    info->unit = std::max(info->unit, factor.unit);
    changed += static_cast<double>(factor.change) * factor.change;
    clipped += factor.clipped;
  }
  for (const OuterMessage& message : report.messages) deltas += message.delta_sum;
  info->votes = report.votes;
  info->step_norm = std::sqrt(changed);
  info->delta_norm = std::sqrt(deltas / static_cast<double>(report.messages.size()));
  if (fragment.elements() != 0)
    info->clip_fraction = clipped / static_cast<double>(fragment.elements());
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
  context_.comm->engine().wait_until([this] { return !busy(); }, -1);
  for (const std::unique_ptr<OuterFragment>& f : fragments_) f->await();
}

Result<std::shared_ptr<Outer>> Outer::create(std::shared_ptr<Comm> comm, std::string_view json,
                                             std::vector<ParamSpec> params,
                                             std::shared_ptr<Device> device,
                                             const Status& refused) {
  const Result<std::shared_ptr<Outer>> made = caught([&]() -> Result<std::shared_ptr<Outer>> {
    SOTTO_TRY(refused);
    return make(comm, json, std::move(params), std::move(device));
  });
  const Result<CreationTerms> terms = caught([&]() -> Result<CreationTerms> {
    SOTTO_TRY(made.status());
    return (*made)->terms();
  });
  SOTTO_TRY(agree(*comm, OpKind::kOuterCreate, terms));
  SOTTO_TRY((*made)->start());
  return made;
}

Result<std::shared_ptr<Outer>> Outer::make(std::shared_ptr<Comm> comm, std::string_view json,
                                           std::vector<ParamSpec> params,
                                           std::shared_ptr<Device> device) {
  SOTTO_ASSIGN(OuterConfig config, parse_outer(json));
  SOTTO_TRY(check_supported(config));
  for (const std::string& warning : config.warnings) log(LogLevel::kWarn, "{}", warning);
  OuterContext context;
  context.comm = comm;
  context.access = DeviceAccess(comm->context()->engine(),
                                device != nullptr ? std::move(device) : comm->context()->device());
  context.config = config.resolved(static_cast<uint64_t>(comm->size()));
  ParameterSet parameters(std::move(params), context.access);
  SOTTO_TRY(parameters.check(std::nullopt));
  std::shared_ptr<Outer> outer(new Outer(std::move(context), std::move(parameters)));
  const OuterConfig& c = outer->context_.config;
  std::vector<uint64_t> counts;
  for (const ParamSpec& p : outer->parameters_) counts.push_back(p.count);
  SOTTO_ASSIGN(const std::vector<std::vector<uint64_t>> cut, c.cut(counts));
  for (const std::vector<uint64_t>& tensors : cut) {
    SOTTO_ASSIGN(std::unique_ptr<OuterFragment> fragment,
                 OuterFragment::make(outer->context_, {tensors.begin(), tensors.end()}));
    outer->fragments_.push_back(std::move(fragment));
  }
  outer->rounds_ = {c.schedule.period, c.schedule.delay, cut.size(), c.schedule.synchronous_steps(),
                    c.penalty.kind == OuterPenalty::kGapInner};
  SOTTO_ASSIGN(outer->nothing_, comm->prepare(LogicalPlan(), outer->device()));
  return outer;
}

// All ranks make the duplicate, at the same place in the order of their calls.
Status Outer::start() {
  context_.reductions = context_.comm->duplicate();
  std::vector<OpRef> ops;
  const OuterFragment::Step step = fragment_step({}, &ops);
  for (const std::unique_ptr<OuterFragment>& f : fragments_) SOTTO_TRY(f->start(step));
  SOTTO_ASSIGN(const OpRef started, finish(ok_status(), std::move(ops), {}));
  return context_.comm->engine().wait(started, -1);
}

Result<CreationTerms> Outer::terms() const {
  CreationTerms terms;
  terms.parameters = &parameters_;
  for (const ParamSpec& p : parameters_) terms.elements += p.count;
  terms.policy = {};
  terms.settings = settings_text(context_.config, parameters_, true);
  if (context_.comm->size() > 1) {
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
  if ((name == "lr" || name == "loss") && !std::isfinite(value))
    return invalid_argument("{} is {}; allowed: a finite number", name, value);
  if (name == "lr") {
    if (value <= 0 && context_.config.rule.lr_normalised) {
      return invalid_state(
          "lr is {}: momentum is in units of gradients (sotto.outer.lr_normalised), which are "
          "divided by it; allowed: > 0",
          value);
    }
    given_.gamma = value;
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
  return invalid_argument("\"{}\" cannot be set; allowed: \"lr\", \"loss\", \"weight\"", name);
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
  step.told.loss = given_.loss;
  step.told.weight = static_cast<float>(given_.weight);
  step.told.votes = given_.votes;
  const auto us = [](int64_t ns) {
    return static_cast<uint32_t>(std::clamp<int64_t>(ns / 1000, 0, UINT32_MAX));
  };
  step.told.step_us = us(meter_.step_ns());
  step.told.network_us = us(meter_.network_ns());
  step.told.version = kOuterMessageVersion;
  step.options.tag = options.tag;
  step.options.timeout_us = options.timeout_us;
  step.options.priority = options.priority;
  step.options.stream = options.stream;
  step.ops = ops;
  return step;
}

Result<OpRef> Outer::step(const CallOptions& options) {
  SOTTO_TRY(check_idle());
  SOTTO_TRY(context_.comm->failure());
  if (swapped_) {
    return invalid_state(
        "the anchor is in the place of the parameters; call sotto_outer_swap before the next inner "
        "step");
  }
  measure(context_.comm->engine().clock().now_ns());
  std::vector<OpRef> ops;
  const OuterFragment::Step step = fragment_step(options, &ops);
  if (restored_) SOTTO_TRY(rejoin(step));
  uint32_t happens = 0;
  Status begun;
  for (size_t f = 0; f < fragments_.size() && begun.ok(); ++f) {
    const OuterEvents events = rounds_.at(step_ + 1, f);
    if (events.none()) continue;
    const bool held =
        events.launches && events.consumes && rounds_.delay != 0 && !fragments_[f]->under_way();
    happens |= (events.launches ? kOuterLaunched : 0) | (held ? kOuterHeld : 0) |
               ((events.consumes && !held) || events.averages ? kOuterConsumed : 0);
    if (events.consumes && fragments_[f]->late()) happens |= kOuterWaited;
    if ((events.consumes && !held) || events.averages) {
      fragments_[f]->forget_votes();
      updated_last_ = f;
    }
    begun = fragments_[f]->begin(events, step);
  }
  if (begun.ok()) {
    events_ = happens;
    if ((happens & kOuterLaunched) != 0) given_.votes = 0;
    ++step_;
  }
  Result<OpRef> op = finish(begun, std::move(ops), options);
  left_ns_ = context_.comm->engine().clock().now_ns();
  left_in_flight_ = averages_in_flight();
  return op;
}

uint32_t Outer::averages_in_flight() const {
  uint32_t n = 0;
  for (const std::unique_ptr<OuterFragment>& f : fragments_) n += f->late() ? 1 : 0;
  return n;
}

// What averages took that have been consumed since the last time.
void Outer::fold_consumed() {
  for (const std::unique_ptr<OuterFragment>& f : fragments_) {
    if (const auto consumed = f->take_consumed()) {
      const OpStats stats = consumed->reduction->stats();
      meter_.consumed(stats.start_ns, stats.end_ns, consumed->asked_ns);
    }
  }
}

// The trainer has made an inner step since the last call.
void Outer::measure(int64_t now_ns) {
  fold_consumed();
  const bool beside = left_in_flight_ != 0 && averages_in_flight() != 0;
  if (left_ns_ != 0 && (beside || left_in_flight_ == 0))
    meter_.inner_step(now_ns - left_ns_, beside);
  left_ns_ = 0;
}

Result<OpRef> Outer::finish(const Status& begun, std::vector<OpRef> ops,
                            const CallOptions& options) {
  Status status = begun;
  if (status.ok()) {
    CallOptions last = options;
    last.after = ops;
    in_flight_.store(true, std::memory_order_release);
    Result<OpRef> op = context_.comm->launch_local(
        nothing_, [](Run&) {},
        context_.comm->engine().pool().make<StepHooks>(shared_from_this(), ops), last);
    if (op.ok()) return op;
    in_flight_.store(false, std::memory_order_release);
    status = op.status();
  }
  // What was started uses the caller's memory.
  for (const OpRef& op : ops) (void)context_.comm->engine().wait(op, -1);
  return status;
}

void Outer::completed(Status& status) {
  std::set<size_t> who;
  bool refused = false;
  for (const std::unique_ptr<OuterFragment>& f : fragments_)
    refused = f->take_refused(&who) || refused;
  if (status.ok() && refused) {
    status = error(Code::kNonfinite,
                   "outer step {}: NaN or Inf in the parameters of rank {}; nothing was updated",
                   step_, list_of_ranks({who.begin(), who.end()}));
  }
  in_flight_.store(false, std::memory_order_release);
}

Result<OpRef> Outer::flush(const CallOptions& options) {
  SOTTO_TRY(check_idle());
  SOTTO_TRY(context_.comm->failure());
  if (swapped_)
    return invalid_state("the anchor is in the place of the parameters; call sotto_outer_swap");
  std::vector<OpRef> ops;
  const OuterFragment::Step step = fragment_step(options, &ops);
  if (restored_) SOTTO_TRY(rejoin(step));
  Status begun;
  // Nothing has changed since the last one, or outer steps have not begun.
  const bool idle = flushed_at_ == step_ || step_ <= rounds_.start;
  const uint64_t from = std::max(flushed_at_, rounds_.start);
  bool sends = false;
  for (size_t f = 0; f < fragments_.size() && begun.ok() && !idle; ++f) {
    const uint64_t since = std::min(rounds_.since_launch(step_, f), step_ - from);
    sends = sends || since != 0;
    fragments_[f]->forget_votes();
    updated_last_ = f;
    begun = fragments_[f]->flush(since, step);
  }
  if (begun.ok()) {
    flushed_at_ = step_;
    if (sends) given_.votes = 0;
    events_ = idle ? 0 : kOuterLaunched | kOuterConsumed;
  }
  return finish(begun, std::move(ops), options);
}

Result<OpRef> Outer::swap(const CallOptions& options) {
  SOTTO_TRY(check_idle());
  SOTTO_TRY(context_.comm->failure());
  std::vector<OpRef> ops;
  const OuterFragment::Step step = fragment_step(options, &ops);
  Status begun;
  for (size_t f = 0; f < fragments_.size() && begun.ok(); ++f)
    begun = fragments_[f]->swap(step, swapped_);
  if (begun.ok()) swapped_ = !swapped_;
  return finish(begun, std::move(ops), options);
}

Result<OuterSnapshot> Outer::snapshot() {
  SOTTO_TRY(check_idle());
  OuterSnapshot s;
  s.rank = context_.comm->rank();
  s.size = context_.comm->size();
  s.settings = settings_text(context_.config, parameters_, false);
  s.step = step_;
  s.flushed_at = flushed_at_;
  s.swapped = swapped_;
  for (const std::unique_ptr<OuterFragment>& f : fragments_) {
    SOTTO_ASSIGN(OuterFragmentState state, f->snapshot());
    s.fragments.push_back(std::move(state));
  }
  return s;
}

Status Outer::restore(const OuterSnapshot& s) {
  SOTTO_TRY(check_idle());
  if (s.rank != context_.comm->rank() || s.size != context_.comm->size()) {
    return invalid_argument("the state is of rank {} of {}; this is rank {} of {}", s.rank, s.size,
                            context_.comm->rank(), context_.comm->size());
  }
  const std::string mine = settings_text(context_.config, parameters_, false);
  if (s.settings != mine) {
    const auto differs = std::ranges::mismatch(mine, s.settings).in1;
    const auto begin = mine.rfind('\n', static_cast<size_t>(differs - mine.begin()));
    const std::string line = mine.substr(begin == std::string::npos ? 0 : begin + 1);
    return invalid_argument(
        "the state is of other settings or parameters; the first that differs here "
        "is {}",
        line.substr(0, line.find('\n')));
  }
  if (s.fragments.size() != fragments_.size())
    return invalid_argument("the state has {} fragments, allowed is {}", s.fragments.size(),
                            fragments_.size());
  for (size_t f = 0; f < fragments_.size(); ++f) SOTTO_TRY(fragments_[f]->check(s.fragments[f]));
  for (size_t f = 0; f < fragments_.size(); ++f) {
    fragments_[f]->await();
    SOTTO_TRY(fragments_[f]->restore(s.fragments[f]));
  }
  step_ = s.step;
  flushed_at_ = s.flushed_at;
  swapped_ = s.swapped;
  left_ns_ = 0;
  restored_ = true;
  return ok_status();
}

Status Outer::rejoin(const OuterFragment::Step& step) {
  std::vector<uint64_t> mine{step_, flushed_at_};
  for (const std::unique_ptr<OuterFragment>& f : fragments_) {
    mine.push_back(f->launches());
    mine.push_back(static_cast<uint64_t>(f->pending()));
  }
  SOTTO_ASSIGN(const std::vector<std::string> all,
               context_.comm->exchange(
                   {reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(uint64_t)},
                   OpKind::kOuterCreate));
  std::vector<bool> missing(fragments_.size());
  for (size_t r = 0; r < all.size(); ++r) {
    std::vector<uint64_t> other(mine.size());
    std::memcpy(other.data(), all[r].data(), all[r].size());
    for (size_t i = 0; i < mine.size(); ++i) {
      const bool of_average = i >= 2 && i % 2 == 1;
      const bool alike = of_average ? (other[i] == 0) == (mine[i] == 0) : other[i] == mine[i];
      if (!alike) {
        return error(
            Code::kProtocol,
            "outer step {}: rank {} has restored the state of step {}, rank {} that of step "
            "{}, or between other averages",
            step_ + 1, r, other[0], context_.comm->rank(), step_);
      }
      if (of_average && other[i] == static_cast<uint64_t>(OuterPending::kUndelivered))
        missing[(i - 2) / 2] = true;
    }
  }
  for (size_t f = 0; f < fragments_.size(); ++f) {
    if (missing[f]) SOTTO_TRY(fragments_[f]->relaunch(step));
  }
  restored_ = false;
  return ok_status();
}

Result<OuterInfo> Outer::info() {
  SOTTO_TRY(check_idle());
  OuterInfo info;
  info.events = events_;
  info.step = step_;
  info.next_boundary = rounds_.until_next(step_);
  info.fragments = static_cast<uint32_t>(fragments_.size());
  info.gain = context_.config.gain().value_or(1);
  for (const std::unique_ptr<OuterFragment>& f : fragments_) {
    info.round += f->consumed();
    info.in_flight += f->under_way() ? 1 : 0;
    info.state_bytes += f->state_bytes();
  }
  fold_consumed();
  info.overlap = meter_;
  add_report(*fragments_[updated_last_], &info.update);
  SOTTO_ASSIGN(const PeerTraffic next, fragments_.front()->next_traffic());
  info.payload_bytes_next_launch = next.payload_bytes_sent;
  info.header_bytes_next_launch = next.header_bytes_sent + next.metadata_bytes_sent;
  return info;
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
