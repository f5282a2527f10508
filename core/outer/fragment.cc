#include "core/outer/fragment.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

#include "core/base/hash.h"
#include "core/base/text.h"
#include "core/optim/state_arrays.h"
#include "core/outer/settings.h"

namespace sotto {
namespace {

// Before the first average.
constexpr OuterMessage kUnheard = [] {
  OuterMessage message{};
  message.loss = std::numeric_limits<double>::quiet_NaN();
  return message;
}();

}  // namespace

void OuterReport::take(std::span<const std::byte> bytes, const OuterOutcome& at, bool nothing) {
  std::memcpy(&numbers, bytes.data() + at.numbers, sizeof numbers);
  std::memcpy(factors.data(), bytes.data() + at.factors, factors.size() * sizeof(OuterFactor));
  std::memcpy(messages.data(), bytes.data() + at.messages, messages.size() * sizeof(OuterMessage));
  for (const OuterMessage& message : messages) votes |= message.votes;
  if (!nothing) return;
  for (OuterFactor& factor : factors) factor.change = 0, factor.clipped = 0;
}

void OuterReport::forget() {
  OuterReport fresh;
  fresh.factors.resize(factors.size());
  fresh.messages.resize(messages.size(), kUnheard);
  fresh.not_finite.resize(not_finite.size());
  *this = std::move(fresh);
}

void OuterReport::take_not_finite(std::set<size_t>* ranks) {
  for (size_t r = 0; r < not_finite.size(); ++r) {
    if (std::exchange(not_finite[r], uint8_t{0}) != 0) ranks->insert(r);
  }
}

// What was sent becomes what was sent before.
static bool swap_sent(std::array<DeviceArray, kOuterArrays>& arrays, const OuterShape& shape) {
  std::swap(arrays[static_cast<size_t>(shape.sent())],
            arrays[static_cast<size_t>(OuterArray::kPrevious)]);
  return true;
}

// What an average leaves behind: error feedback. One that cannot be encoded ends well, as one in
// which no rank takes part; its update tells of it.
class OuterFragment::ReductionHooks final : public OpHooks {
 public:
  ReductionHooks(OuterFragment* fragment, bool compressed)
      : fragment_(fragment), compressed_(compressed) {}
  void on_complete(Status& status, std::span<const std::byte>) noexcept override {
    if (!compressed_) return;
    if (status.code() == Code::kNonfinite) {
      status = ok_status();
      fragment_->not_encoded_ = true;
    }
    if (status.ok()) fragment_->compressed_.flip();
  }

 private:
  OuterFragment* const fragment_;
  const bool compressed_;
};

// What an update leaves behind. An average in which no rank takes part is none, and no failure. Of
// a payload that was not finite the last operation of the step tells, so that the others go on.
class OuterFragment::UpdateHooks final : public OpHooks {
 public:
  UpdateHooks(OuterFragment* fragment, const OuterOutcome& at, bool average)
      : fragment_(fragment), at_(at), average_(average) {}
  void on_complete(Status& status, std::span<const std::byte> bytes) noexcept override {
    OuterFragment& f = *fragment_;
    const bool nothing = status.code() == Code::kNonfinite;
    if (nothing) status = ok_status();
    if (!status.ok() || !average_) return;
    ++f.consumed_;
    if (std::exchange(f.not_encoded_, false)) f.report_.not_encoded = true;
    if (bytes.empty()) return;
    f.report_.take(bytes, at_, nothing);
    for (size_t r = 0; r < f.report_.not_finite.size(); ++r)
      f.report_.not_finite[r] |= f.report_.messages[r].flags != 0;
  }

 private:
  OuterFragment* const fragment_;
  const OuterOutcome at_;
  const bool average_;
};

OuterFragment::OuterFragment(const OuterContext& context, std::vector<uint32_t> tensors)
    : context_(context), tensors_(std::move(tensors)), plans_(context_, tensors_) {}

OuterFragment::~OuterFragment() = default;

Result<std::unique_ptr<OuterFragment>> OuterFragment::make(const OuterContext& context,
                                                           std::vector<uint32_t> tensors) {
  std::unique_ptr<OuterFragment> fragment(new OuterFragment(context, std::move(tensors)));
  SOTTO_TRY(fragment->allocate());
  return fragment;
}

Status OuterFragment::allocate() {
  for (size_t i = 0; i < kOuterArrays; ++i) {
    const auto which = static_cast<OuterArray>(i);
    const uint64_t bytes = plans_.shape().bytes_of(which);
    if (bytes == 0 || which == OuterArray::kSwapped) continue;  // that is made when it is needed
    SOTTO_ASSIGN(arrays_[i], DeviceArray::make(context_.access.device(), bytes));
  }
  const std::vector<OuterSegment> segments(plans_.shape().segments());
  SOTTO_TRY(context_.access.upload(array(OuterArray::kSegments).data(),
                                   std::span<const OuterSegment>(segments)));
  report_.factors.resize(segments.size());
  report_.messages.resize(static_cast<size_t>(plans_.shape().size), kUnheard);
  report_.not_finite.resize(report_.messages.size());
  if (!plans_.shape().codes()) return ok_status();
  SOTTO_ASSIGN(compressed_, CompressedState::make(*context_.comm, context_.access, plans_.layout(),
                                                  *context_.config.codec, context_.levels.two(),
                                                  plans_.shape().keeps_launch_errors()));
  return ok_status();
}

void OuterFragment::bind(Run& run, const OuterPlan& slots, const Step& step) const {
  for (size_t i = 0; i < kOuterArrays; ++i) {
    if (slots.arrays[i] != kNoSlot) run.bases[slots.arrays[i]] = arrays_[i].data();
  }
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    const ParamSpec& p = (*context_.parameters)[tensors_[i]];
    if (slots.params != kNoSlot) run.bases[slots.params + i] = p.param;
    if (slots.copies != kNoSlot) run.bases[slots.copies + i] = p.copy;
  }
  if (slots.inputs != kNoSlot) {
    const OuterInputs inputs{step.gamma, context_.config.clip.phi,
                             static_cast<double>(round_period_)};
    std::memcpy(run.bases[slots.inputs], &inputs, sizeof inputs);
  }
  if (slots.told != kNoSlot) std::memcpy(run.bases[slots.told], &step.told, sizeof step.told);
}

std::shared_ptr<OpHooks> OuterFragment::hooks_of(FragmentOp kind, const OuterOutcome& outcome) {
  auto& pool = context_.comm->engine().pool();
  switch (kind) {
    case FragmentOp::kUpdate:
    case FragmentOp::kUpdateCoded:
    case FragmentOp::kUpdateToCoded:
    case FragmentOp::kLastUpdate:
    case FragmentOp::kLastUpdateCoded:
    case FragmentOp::kMeanUpdate: return pool.make<UpdateHooks>(this, outcome, true);
    case FragmentOp::kHold:
    case FragmentOp::kHoldToCoded:
    case FragmentOp::kLastHold: return pool.make<UpdateHooks>(this, outcome, false);
    default: return nullptr;
  }
}

// What ranks that make an operation together have alike.
static OpSignature signature_of(FragmentOp kind, const OuterFragment& fragment,
                                const OuterFragment::Step& step, const OuterContext& context) {
  const CodecSettings codec = context.config.codec.value_or(CodecSettings{});
  const bool by_lr = uses_lr(context.config);
  SmallVector<uint64_t, 24> agreed{static_cast<uint64_t>(kind),
                                   step.place,
                                   fragment.tensors().front(),
                                   fragment.tensors().size(),
                                   fragment.launches(),
                                   context.comm->sizes().segment_bytes,
                                   by_lr ? std::bit_cast<uint64_t>(step.gamma) : 0};
  for (const uint64_t value : codec.terms()) agreed.push_back(value);
  OpSignature signature;
  signature.kind = OpKind::kOuterStep;
  signature.dtype = static_cast<uint32_t>(Dtype::kF32);
  signature.tag = step.options.tag;
  signature.detail = static_cast<uint32_t>(hash64(agreed.data(), agreed.size() * 8));
  return signature;
}

// An operation without messages, or with those that shards of a replica exchange.
Result<OpRef> OuterFragment::local(FragmentOp kind, const Step& step, std::vector<OpRef> after) {
  SOTTO_ASSIGN(const FragmentPlans::Prepared* p, plans_.get(kind));
  CallOptions options = step.options;
  options.after = std::move(after);
  // What comes after an operation of this step comes after the caller's stream.
  if (!step.ops->empty() && !options.after.empty()) options.stream.reset();
  if (step.inner != nullptr) options.after.push_back(step.inner);
  const auto bind_run = [&](Run& run) {
    bind(run, p->slots, step);
    compressed_.bind(run, p->slots.codec, next_errors_);
  };
  std::shared_ptr<OpHooks> hooks = hooks_of(kind, p->slots.outcome);
  SOTTO_ASSIGN(OpRef op,
               p->slots.over_shards
                   ? context_.shards->launch(p->plan, signature_of(kind, *this, step, context_),
                                             std::ref(bind_run), hooks, options)
                   : context_.comm->launch_local(p->plan, std::ref(bind_run), hooks, options));
  step.ops->push_back(op);
  return op;
}

// An operation of the ranks that average.
Result<OpRef> OuterFragment::collective(FragmentOp kind, const Step& step, bool compressed,
                                        int32_t priority, std::vector<OpRef> after) {
  SOTTO_ASSIGN(const FragmentPlans::Prepared* p, plans_.get(kind));
  OpSignature agreed = signature_of(kind, *this, step, context_);
  agreed.count = plans_.layout().elements();
  CallOptions options;
  options.timeout_us = step.options.timeout_us;
  options.admitted = step.options.admitted;
  options.priority = priority;
  options.after = std::move(after);
  const auto bind_run = [&](Run& run) {
    bind(run, p->slots, step);
    if (compressed) compressed_.bind(run, p->slots.codec, next_errors_);
  };
  return context_.reductions->launch(
      p->plan, agreed, std::ref(bind_run),
      context_.comm->engine().pool().make<ReductionHooks>(this, compressed), options);
}

// The average of the payload, which nobody waits for yet.
Status OuterFragment::reduce(const Step& step, bool compressed, std::vector<OpRef> after) {
  SOTTO_ASSIGN(OpRef op, collective(compressed ? FragmentOp::kReduceCoded : FragmentOp::kReduce,
                                    step, compressed, kBackgroundPriority, std::move(after)));
  if (compressed) next_errors_ = 1 - next_errors_;
  const OuterSchedule& s = context_.config.schedule;
  pending_ = Pending{std::move(op), compressed, false, s.period, {step.place / 2 + 1, s.delay}};
  return ok_status();
}

// The step with the average that is under way, which then is not any more. It comes after all that
// its step has started: if that cannot be done it is not made.
Result<OpRef> OuterFragment::update(FragmentOp full, FragmentOp coded, const Step& step) {
  std::vector<OpRef> after = *step.ops;
  if (pending_->reduction != nullptr) {
    pending_->slices.let_all_go(context_.comm->engine(), pending_->reduction);
    after.push_back(pending_->reduction);
  }
  round_period_ = pending_->period;
  SOTTO_ASSIGN(OpRef op, local(pending_->compressed ? coded : full, step, std::move(after)));
  before_.back().update = op;
  if (pending_->reduction != nullptr)
    last_ = Consumed{std::move(pending_->reduction), context_.comm->engine().clock().now_ns()};
  pending_.reset();
  return op;
}

Result<OpRef> OuterFragment::update_or_hold(bool last, const Step& step) {
  const bool coded = !last && plans_.shape().keeps_sent() && compresses_next();
  if (pending_) {
    if (last) return update(FragmentOp::kLastUpdate, FragmentOp::kLastUpdateCoded, step);
    return update(coded ? FragmentOp::kUpdateToCoded : FragmentOp::kUpdate,
                  FragmentOp::kUpdateCoded, step);
  }
  SOTTO_ASSIGN(OpRef op, local(last    ? FragmentOp::kLastHold
                               : coded ? FragmentOp::kHoldToCoded
                                       : FragmentOp::kHold,
                               step, *step.ops));
  before_.back().update = op;
  return op;
}

// Consumes what the last boundary has launched, and launches (delay = period).
Status OuterFragment::boundary(const Step& step) {
  const bool compressed = compresses_next();
  // That of the average under way stays as `previous`.
  if (plans_.shape().two_payloads()) before_.back().swapped = swap_sent(arrays_, plans_.shape());
  SOTTO_ASSIGN(const OpRef made, update_or_hold(false, step));
  const Status begun = reduce(step, compressed, {made});
  if (begun.ok() || context_.comm->failure().ok()) return begun;
  // The update may be made, so the call does not fail with the comm: the next one tells of it.
  pending_ = Pending{nullptr, compressed, false, context_.config.schedule.period};
  return ok_status();
}

OuterFragment::Made OuterFragment::take_back() {
  for (; !before_.empty(); before_.pop_back()) {
    Before& before = before_.back();
    if (before.update != nullptr && before.update->status().ok()) {
      const bool sent = launches_ != before_.front().launches;
      return {true, before.last ? OuterFlushed::kConsumed
                    : sent      ? OuterFlushed::kSent
                                : OuterFlushed::kNothing};
    }
    if (before.swapped) swap_sent(arrays_, plans_.shape());
    if (pending_ && pending_->reduction != nullptr) {
      pending_->slices.let_all_go(context_.comm->engine(), pending_->reduction);
      dropped_.push_back(pending_->reduction);
    }
    pending_ = std::move(before.pending);
    launches_ = before.launches;
    next_errors_ = compressed_.current();
    last_.reset();
  }
  return {};
}

Status OuterFragment::begin(const OuterEvents& events, const Step& step) {
  before_.push_back({pending_, launches_});
  if (events.averages) {
    SOTTO_ASSIGN(const OpRef launched, local(FragmentOp::kMeanLaunch, step, {}));
    SOTTO_TRY(reduce(step, false, {launched}));
    return update(FragmentOp::kMeanUpdate, FragmentOp::kMeanUpdate, step).status();
  }
  if (events.follows) {
    SOTTO_ASSIGN(before_.back().update, local(FragmentOp::kStart, step, {}));
    return ok_status();
  }
  if (events.measures) SOTTO_TRY(local(FragmentOp::kInner, step, {}).status());
  if (events.launches && events.consumes && context_.config.schedule.delay != 0) {
    SOTTO_TRY(boundary(step));
    ++launches_;
    return ok_status();
  }
  if (events.launches) {
    SOTTO_ASSIGN(const OpRef launched, local(FragmentOp::kLaunch, step, *step.ops));
    SOTTO_TRY(reduce(step, compresses_next(), {launched}));
    ++launches_;
  }
  if (!events.consumes || !pending_) return ok_status();
  return update(FragmentOp::kUpdate, FragmentOp::kUpdateCoded, step).status();
}

// Nothing was launched beside it. Ranks that have gone their own ways come together (section 5).
Status OuterFragment::last_update(bool made, const Step& step) {
  std::vector<OpRef> after;
  if (!made) {
    before_.push_back({pending_, launches_});
    before_.back().last = true;
    if (plans_.shape().two_payloads()) before_.back().swapped = swap_sent(arrays_, plans_.shape());
    SOTTO_ASSIGN(OpRef stepped, update_or_hold(true, step));
    after.push_back(std::move(stepped));
  }
  const OuterRuleConfig& rule = context_.config.rule;
  if (!plans_.shape().two_payloads() || rule.beta == 0 || rule.kind == OuterRule::kNone ||
      plans_.shape().alone())
    return ok_status();
  SOTTO_ASSIGN(OpRef agreed, collective(FragmentOp::kAgree, step, false, step.options.priority,
                                        std::move(after)));
  step.ops->push_back(std::move(agreed));
  return ok_status();
}

Status OuterFragment::flush(uint64_t since, OuterFlushed made, const Step& step) {
  if (made != OuterFlushed::kNothing) return last_update(made == OuterFlushed::kConsumed, step);
  const uint64_t delay = context_.config.schedule.delay;
  const bool both = delay == 0 || delay == context_.config.schedule.period;
  if (since != 0 && !both && pending_) SOTTO_TRY(begin({.consumes = true}, step));
  if (since != 0) SOTTO_TRY(begin({.launches = true, .consumes = both}, step));
  return last_update(false, step);
}

std::optional<OuterFragment::Consumed> OuterFragment::take_consumed() {
  if (!last_ || !last_->reduction->done()) return std::nullopt;
  return std::exchange(last_, std::nullopt);
}

void OuterFragment::let_go(uint64_t step) {
  if (pending_ && pending_->reduction != nullptr)
    pending_->slices.let_go(context_.comm->engine(), pending_->reduction, step);
}

void OuterFragment::await() {
  Engine& engine = context_.comm->engine();
  if (pending_ && pending_->reduction != nullptr) {
    pending_->slices.let_all_go(engine, pending_->reduction);
    (void)engine.wait(pending_->reduction, -1);
  }
  for (const OpRef& op : dropped_) (void)engine.wait(op, -1);
}

Status OuterFragment::start(const Step& step) {
  return local(FragmentOp::kStart, step, {}).status();
}

Status OuterFragment::swap(const Step& step, bool back) {
  DeviceArray& swapped = array(OuterArray::kSwapped);
  if (swapped.data() == nullptr) {
    SOTTO_ASSIGN(swapped, DeviceArray::make(context_.access.device(),
                                            plans_.shape().bytes_of(OuterArray::kSwapped)));
  }
  return local(back ? FragmentOp::kSwapBack : FragmentOp::kSwap, step, {}).status();
}

OuterPending OuterFragment::pending() const {
  if (!pending_) return OuterPending::kNone;
  const bool delivered =
      pending_->reduction != nullptr ? pending_->reduction->status().ok() : pending_->delivered;
  return delivered ? OuterPending::kDelivered : OuterPending::kUndelivered;
}

// What an average writes.
static bool comes_with_average(OuterArray which) {
  return which == OuterArray::kResult || which == OuterArray::kMessages;
}

Result<OuterFragmentState> OuterFragment::snapshot() {
  const bool goes_on = pending_ && pending_->reduction != nullptr && !pending_->reduction->done() &&
                       pending_->slices.keep_back(pending_->reduction);
  if (!goes_on) await();
  OuterFragmentState state;
  state.launches = launches_;
  state.consumed = consumed_;
  state.pending = pending();
  state.compressed = pending_ && pending_->compressed;
  state.period = pending_ ? pending_->period : 0;
  for (size_t i = 0; i < kOuterArrays; ++i) {
    const DeviceArray& from = arrays_[i];
    if (from.bytes() == 0) continue;
    if (goes_on && comes_with_average(static_cast<OuterArray>(i))) {
      state.arrays[i].resize(from.bytes());
      continue;
    }
    SOTTO_ASSIGN(state.arrays[i], context_.access.download<std::byte>(from.data(), from.bytes()));
  }
  for (const uint32_t t : tensors_) {
    const ParamSpec& p = (*context_.parameters)[t];
    SOTTO_ASSIGN(const std::vector<float> values,
                 context_.access.download<float>(p.param, p.count));
    state.live.insert(state.live.end(), values.begin(), values.end());
  }
  if (plans_.shape().keeps_errors()) {
    const bool at_launch = state.pending == OuterPending::kUndelivered && state.compressed &&
                           plans_.shape().keeps_launch_errors();
    SOTTO_ASSIGN(state.residual, compressed_.residual({}, at_launch));
  }
  return state;
}

static bool has_elements(OuterArray which) {
  return which != OuterArray::kSegments && which != OuterArray::kInnerSum &&
         which != OuterArray::kMessage && which != OuterArray::kMessages;
}

// Those that have the same values on all ranks, and outlive a boundary.
constexpr OuterArray kCommonArrays[] = {OuterArray::kAnchor, OuterArray::kMomentum,
                                        OuterArray::kLastStep, OuterArray::kSegments};

// Bytes of an array without the padding behind its elements, which ranks and hierarchy decide.
static uint64_t needed_of(const OuterShape& shape, OuterArray which) {
  const uint64_t all = shape.bytes_of(which);
  return all == 0 || !has_elements(which) ? all : shape.layout->elements() * sizeof(float);
}

Status OuterFragment::check(const OuterFragmentState& state, OuterRestore how) const {
  if (how == OuterRestore::kAnchor) {
    for (const OuterArray which : kCommonArrays) {
      const uint64_t found = state.arrays[static_cast<size_t>(which)].size();
      const uint64_t needed = needed_of(plans_.shape(), which);
      if (found < needed)
        return invalid_argument("the state has {} bytes of array {} of a fragment, needed are {}",
                                found, static_cast<size_t>(which), needed);
    }
    return ok_status();
  }
  // Arrays have padding as error feedback needs it, which says more about what differs.
  if (how == OuterRestore::kExact) {
    if (state.residual.has_value() != plans_.shape().keeps_errors())
      return invalid_argument("the state {} error feedback",
                              plans_.shape().keeps_errors() ? "lacks" : "has");
    if (state.residual) SOTTO_TRY(compressed_.check(*state.residual, false));
  }
  for (size_t i = 0; i < kOuterArrays; ++i) {
    const auto which = static_cast<OuterArray>(i);
    const uint64_t found = state.arrays[i].size();
    const uint64_t all = plans_.shape().bytes_of(which);
    if (found == all || (which == OuterArray::kSwapped && found == 0)) continue;
    if (how != OuterRestore::kExact && all != 0 && has_elements(which) &&
        found >= needed_of(plans_.shape(), which))
      continue;
    return invalid_argument("the state has {} bytes of array {} of a fragment, allowed is {}",
                            found, i, all);
  }
  const uint64_t elements = plans_.layout().elements();
  if (state.live.size() != elements)
    return invalid_argument("the state has {} of a fragment, allowed is {}",
                            counted(state.live.size(), "parameter"), elements);
  return ok_status();
}

// Values of the tensors, one after the other.
static Status write_live(const ParameterSet& parameters, std::span<const uint32_t> tensors,
                         std::span<const float> values) {
  uint64_t at = 0;
  for (const uint32_t t : tensors) {
    const uint64_t count = parameters[t].count;
    SOTTO_TRY(parameters.write(t, 0, values.subspan(at, count)));
    at += count;
  }
  return ok_status();
}

Status OuterFragment::restore(const OuterFragmentState& state, OuterRestore how) {
  launches_ = state.launches;
  consumed_ = state.consumed;
  pending_.reset();
  last_.reset();
  if (how == OuterRestore::kAnchor) {
    for (const OuterArray which : kCommonArrays) {
      const std::vector<std::byte>& from = state.arrays[static_cast<size_t>(which)];
      const uint64_t bytes = std::min<uint64_t>(from.size(), array(which).bytes());
      SOTTO_TRY(context_.access.upload(array(which).data(), std::span(from).first(bytes)));
    }
    SOTTO_ASSIGN(const std::vector<float> anchor, values(OuterArray::kAnchor));
    return write_live(*context_.parameters, tensors_, anchor);
  }
  for (size_t i = 0; i < kOuterArrays; ++i) {
    const std::vector<std::byte>& from = state.arrays[i];
    if (from.empty()) continue;
    const uint64_t all = plans_.shape().bytes_of(static_cast<OuterArray>(i));
    if (arrays_[i].bytes() != all) {
      SOTTO_ASSIGN(arrays_[i], DeviceArray::make(context_.access.device(), all));
    }
    SOTTO_TRY(context_.access.upload(arrays_[i].data(),
                                     std::span(from).first(std::min<uint64_t>(all, from.size()))));
  }
  SOTTO_TRY(write_live(*context_.parameters, tensors_, state.live));
  if (plans_.shape().keeps_errors()) {
    const bool own = how == OuterRestore::kExact;
    SOTTO_TRY(compressed_.restore(own ? &*state.residual : nullptr));
  }
  next_errors_ = compressed_.current();
  if (state.pending != OuterPending::kNone) {
    pending_ = Pending{nullptr, state.compressed, state.pending == OuterPending::kDelivered,
                       state.period != 0 ? state.period : context_.config.schedule.period};
  }
  return ok_status();
}

Status OuterFragment::relaunch(const Step& step) { return reduce(step, pending_->compressed, {}); }

uint64_t OuterFragment::state_bytes() const {
  uint64_t bytes = compressed_.bytes();
  for (const DeviceArray& a : arrays_) bytes += a.bytes();
  bytes += plans_.held_bytes();
  return bytes;
}

Result<PeerTraffic> OuterFragment::next_traffic(bool averages) {
  SOTTO_ASSIGN(
      const FragmentPlans::Prepared* p,
      plans_.get(compresses_next() && !averages ? FragmentOp::kReduceCoded : FragmentOp::kReduce));
  return p->plan->plan().traffic.total;
}

Result<std::vector<float>> OuterFragment::values(OuterArray which) const {
  const DeviceArray& from = arrays_[static_cast<size_t>(which)];
  std::vector<float> out(plans_.layout().elements());
  const StateArray array{.elements = from.data()};
  uint64_t at = 0;
  const auto read = [&](const TensorRun& run) {
    float* to = out.data() + at;
    at += run.count;
    return read_state(context_.access, array, run, to);
  };
  SOTTO_TRY(for_each_run(plans_.layout(), false, read));
  return out;
}

}  // namespace sotto
