#include "core/outer/fragment.h"

#include <cstring>
#include <utility>

#include "core/base/hash.h"
#include "core/optim/state_arrays.h"

namespace sotto {
namespace {

std::vector<LayoutTensor> tensors_of(const ParameterSet& parameters,
                                     const std::vector<uint32_t>& tensors) {
  std::vector<LayoutTensor> out;
  for (const uint32_t t : tensors) out.push_back({parameters[t].count, 0});
  return out;
}

// Of inner steps before outer steps begin: live parameters become their mean.
OuterConfig mean_of_parameters() {
  OuterConfig c;
  c.payload = OuterPayload::kParams;
  c.schedule.period = 1;
  c.rule.kind = OuterRule::kNone;
  return c;
}

}  // namespace

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
    const bool refused = nothing && f.context_.config.nonfinite == OuterNonfinite::kError;
    f.report_.refused |= refused;
    ++f.consumed_;
    if (bytes.empty()) return;
    f.take_report(bytes, at_, nothing);
    for (size_t r = 0; refused && r < f.report_.not_finite.size(); ++r)
      f.report_.not_finite[r] |= f.report_.messages[r].flags != 0;
  }

 private:
  OuterFragment* const fragment_;
  const OuterOutcome at_;
  const bool average_;
};

OuterFragment::OuterFragment(const OuterContext& context, std::vector<uint32_t> tensors)
    : context_(context), tensors_(std::move(tensors)) {
  const Comm& comm = *context_.comm;
  const CodecSettings codec = context_.config.codec.value_or(CodecSettings{});
  layout_ = std::make_unique<CompressedLayout>(
      tensors_of(*context_.parameters, tensors_),
      context_.config.codec ? static_cast<uint32_t>(comm.size()) : 1, codec.chunk_align,
      Granularity::kFlat, 0, codec.row().scales);
  mean_config_ = mean_of_parameters();
  shape_.rank = comm.rank();
  shape_.size = comm.size();
  shape_.layout = layout_.get();
  shape_.sizes = {comm.segment_bytes(), comm.held_windows()};
  for (uint32_t i = 0; i < tensors_.size(); ++i) {
    const ParamSpec& p = (*context_.parameters)[tensors_[i]];
    if (p.copy == nullptr) continue;
    shape_.copies.tensors.push_back(i);
    shape_.copies.type = p.copy_dtype;
  }
  shape_.config = &context_.config;
  mean_shape_ = last_shape_ = shape_;
  last_shape_.last = true;
  shape_.config = &context_.config;
  mean_shape_.config = &mean_config_;
}

OuterFragment::~OuterFragment() = default;

// nothing: no rank took part, so the anchor has not moved.
void OuterFragment::take_report(std::span<const std::byte> bytes, const OuterOutcome& at,
                                bool nothing) {
  OuterReport& r = report_;
  std::memcpy(&r.numbers, bytes.data() + at.numbers, sizeof r.numbers);
  std::memcpy(r.factors.data(), bytes.data() + at.factors, r.factors.size() * sizeof(OuterFactor));
  std::memcpy(r.messages.data(), bytes.data() + at.messages,
              r.messages.size() * sizeof(OuterMessage));
  for (const OuterMessage& message : r.messages) r.votes |= message.votes;
  if (!nothing) return;
  for (OuterFactor& factor : r.factors) factor.change = 0, factor.clipped = 0;
}

Result<std::unique_ptr<OuterFragment>> OuterFragment::make(const OuterContext& context,
                                                           std::vector<uint32_t> tensors) {
  std::unique_ptr<OuterFragment> fragment(new OuterFragment(context, std::move(tensors)));
  SOTTO_TRY(fragment->allocate());
  return fragment;
}

Status OuterFragment::allocate() {
  for (size_t i = 0; i < kOuterArrays; ++i) {
    const auto which = static_cast<OuterArray>(i);
    const uint64_t bytes = shape_.bytes_of(which);
    if (bytes == 0 || which == OuterArray::kSwapped) continue;  // that is made when it is needed
    SOTTO_ASSIGN(arrays_[i], DeviceArray::make(context_.access.device(), bytes));
  }
  const std::vector<OuterSegment> segments(shape_.segments());
  SOTTO_TRY(context_.access.upload(array(OuterArray::kSegments).data(),
                                   std::span<const OuterSegment>(segments)));
  report_.factors.resize(segments.size());
  report_.messages.resize(static_cast<size_t>(shape_.size));
  report_.not_finite.resize(report_.messages.size());
  if (!context_.config.codec || shape_.alone()) return ok_status();
  SOTTO_ASSIGN(compressed_, CompressedState::make(*context_.comm, context_.access, *layout_,
                                                  *context_.config.codec));
  return ok_status();
}

OuterPlan OuterFragment::build(Kind kind) const {
  switch (kind) {
    case Kind::kStart: return build_outer_start(shape_);
    case Kind::kInner: return build_outer_inner_sum(shape_);
    case Kind::kLaunch: return build_outer_launch(shape_);
    case Kind::kReduce: return build_outer_reduction(shape_, false);
    case Kind::kReduceCoded: return build_outer_reduction(shape_, true);
    case Kind::kUpdate: return build_outer_update(shape_, false);
    case Kind::kUpdateCoded: return build_outer_update(shape_, true);
    case Kind::kHold: return build_outer_hold(shape_);
    case Kind::kLastUpdate: return build_outer_update(last_shape_, false);
    case Kind::kLastUpdateCoded: return build_outer_update(last_shape_, true);
    case Kind::kLastHold: return build_outer_hold(last_shape_);
    case Kind::kAgree: return build_outer_agreement(shape_);
    case Kind::kMeanLaunch: return build_outer_launch(mean_shape_);
    case Kind::kMeanUpdate: return build_outer_update(mean_shape_, false);
    case Kind::kSwap: return build_outer_swap(shape_, false);
    case Kind::kSwapBack: return build_outer_swap(shape_, true);
    case Kind::kCount: break;
  }
  return {};
}

Result<const OuterFragment::Prepared*> OuterFragment::prepared(Kind kind) {
  std::optional<Prepared>& known = plans_[static_cast<size_t>(kind)];
  if (known) return &*known;
  OuterPlan made = build(kind);
  SOTTO_ASSIGN(std::shared_ptr<PreparedPlan> plan,
               context_.comm->prepare(std::move(made.plan), context_.access.device()));
  known.emplace(Prepared{std::move(plan), std::move(made)});
  return &*known;
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
    const OuterInputs inputs{step.gamma, context_.config.clip.phi};
    std::memcpy(run.bases[slots.inputs], &inputs, sizeof inputs);
  }
  if (slots.told != kNoSlot) std::memcpy(run.bases[slots.told], &step.told, sizeof step.told);
}

std::shared_ptr<OpHooks> OuterFragment::hooks_of(Kind kind, const OuterOutcome& outcome) {
  switch (kind) {
    case Kind::kUpdate:
    case Kind::kUpdateCoded:
    case Kind::kLastUpdate:
    case Kind::kLastUpdateCoded:
    case Kind::kMeanUpdate: return std::make_shared<UpdateHooks>(this, outcome, true);
    case Kind::kHold:
    case Kind::kLastHold: return std::make_shared<UpdateHooks>(this, outcome, false);
    default: return nullptr;
  }
}

// An operation without messages.
Result<OpRef> OuterFragment::local(Kind kind, const Step& step, std::vector<OpRef> after) {
  SOTTO_ASSIGN(const Prepared* p, prepared(kind));
  CallOptions options = step.options;
  options.after = std::move(after);
  const auto bind_run = [&](Run& run) { bind(run, p->slots, step); };
  SOTTO_ASSIGN(OpRef op, context_.comm->launch_local(p->plan, std::ref(bind_run),
                                                     hooks_of(kind, p->slots.outcome), options));
  step.ops->push_back(op);
  return op;
}

// An operation of all ranks.
Result<OpRef> OuterFragment::collective(Kind kind, const Step& step, bool compressed,
                                        int32_t priority, std::vector<OpRef> after) {
  SOTTO_ASSIGN(const Prepared* p, prepared(kind));
  const CodecSettings codec = context_.config.codec.value_or(CodecSettings{});
  const uint64_t agreed[] = {static_cast<uint64_t>(kind),
                             tensors_.front(),
                             tensors_.size(),
                             launches_,
                             static_cast<uint64_t>(codec.kind),
                             codec.chunk_align,
                             codec.block,
                             context_.comm->segment_bytes()};
  OpSignature signature;
  signature.kind = OpKind::kOuterStep;
  signature.dtype = static_cast<uint32_t>(Dtype::kF32);
  signature.count = layout_->elements();
  signature.tag = step.options.tag;
  signature.detail = static_cast<uint32_t>(hash64(agreed, sizeof agreed));
  CallOptions options;
  options.timeout_us = step.options.timeout_us;
  options.priority = priority;
  options.after = std::move(after);
  const auto bind_run = [&](Run& run) {
    bind(run, p->slots, step);
    if (compressed) compressed_.bind(run, p->slots.codec);
  };
  SOTTO_ASSIGN(OpRef op, context_.reductions->launch(p->plan, signature, std::ref(bind_run),
                                                     nullptr, options));
  // The next one is bound before this one has ended, and goes on from its error feedback.
  if (compressed) compressed_.flip();
  return op;
}

// The average of the payload, which nobody waits for yet.
Status OuterFragment::reduce(const Step& step, bool compressed, std::vector<OpRef> after) {
  SOTTO_ASSIGN(OpRef op, collective(compressed ? Kind::kReduceCoded : Kind::kReduce, step,
                                    compressed, kBackgroundPriority, std::move(after)));
  pending_ = Pending{std::move(op), compressed};
  return ok_status();
}

// The update may be made, so the call does not fail with the comm: the next one tells of it.
Status OuterFragment::reduce_behind_update(const Step& step, bool compressed,
                                           std::vector<OpRef> after) {
  const Status begun = reduce(step, compressed, std::move(after));
  return context_.comm->failure().ok() ? begun : ok_status();
}

// The step with the average that is under way, which then is not any more.
Result<OpRef> OuterFragment::update(Kind full, Kind coded, const Step& step,
                                    std::vector<OpRef> after) {
  after.push_back(pending_->reduction);
  SOTTO_ASSIGN(OpRef op, local(pending_->compressed ? coded : full, step, std::move(after)));
  last_ = Consumed{std::move(pending_->reduction), context_.comm->engine().clock().now_ns()};
  pending_.reset();
  return op;
}

// Launches, and consumes what the last boundary has launched (delay = period).
Status OuterFragment::boundary(const Step& step) {
  const bool compressed = compresses_next();
  const auto step_or_hold = [&](std::vector<OpRef> after) {
    return pending_ ? update(Kind::kUpdate, Kind::kUpdateCoded, step, std::move(after))
                    : local(Kind::kHold, step, std::move(after));
  };
  if (!shape_.launches_first()) {
    SOTTO_ASSIGN(const OpRef stepped, step_or_hold({}));
    SOTTO_ASSIGN(const OpRef launched, local(Kind::kLaunch, step, {stepped}));
    return reduce_behind_update(step, compressed, {launched});
  }
  std::vector<OpRef> prior;
  if (pending_) prior.push_back(pending_->reduction);
  // That of the average under way stays as `previous`.
  if (two_payloads()) std::swap(array(OuterArray::kPayload), array(OuterArray::kPrevious));
  SOTTO_ASSIGN(const OpRef launched, local(Kind::kLaunch, step, std::move(prior)));
  SOTTO_ASSIGN(const OpRef stepped, step_or_hold({launched}));
  return reduce_behind_update(step, compressed, {launched, stepped});
}

Status OuterFragment::average_now(const Step& step) {
  SOTTO_ASSIGN(const OpRef launched, local(Kind::kMeanLaunch, step, {}));
  SOTTO_TRY(reduce(step, false, {launched}));
  return update(Kind::kMeanUpdate, Kind::kMeanUpdate, step, {}).status();
}

Status OuterFragment::begin(const OuterEvents& events, const Step& step) {
  if (events.averages) return average_now(step);
  if (events.measures) SOTTO_TRY(local(Kind::kInner, step, {}).status());
  if (events.launches && events.consumes && context_.config.schedule.delay != 0) {
    SOTTO_TRY(boundary(step));
    ++launches_;
    return ok_status();
  }
  if (events.launches) {
    SOTTO_ASSIGN(const OpRef launched, local(Kind::kLaunch, step, {}));
    SOTTO_TRY(reduce(step, compresses_next(), {launched}));
    ++launches_;
  }
  if (!events.consumes || !pending_) return ok_status();
  return update(Kind::kUpdate, Kind::kUpdateCoded, step, {}).status();
}

// Nothing was launched beside it. Ranks that have gone their own ways come together (section 5).
Status OuterFragment::last_update(const Step& step) {
  if (two_payloads()) std::swap(array(OuterArray::kPayload), array(OuterArray::kPrevious));
  SOTTO_ASSIGN(OpRef stepped, pending_ ? update(Kind::kLastUpdate, Kind::kLastUpdateCoded, step, {})
                                       : local(Kind::kLastHold, step, {}));
  const OuterRuleConfig& rule = context_.config.rule;
  if (!two_payloads() || rule.beta == 0 || rule.kind == OuterRule::kNone || shape_.alone())
    return ok_status();
  SOTTO_ASSIGN(OpRef agreed,
               collective(Kind::kAgree, step, false, step.options.priority, {std::move(stepped)}));
  step.ops->push_back(std::move(agreed));
  return ok_status();
}

Status OuterFragment::flush(uint64_t since, const Step& step) {
  const uint64_t delay = context_.config.schedule.delay;
  const bool both = delay == 0 || delay == context_.config.schedule.period;
  if (since != 0 && !both && pending_) SOTTO_TRY(begin({.consumes = true}, step));
  if (since != 0) SOTTO_TRY(begin({.launches = true, .consumes = both}, step));
  return last_update(step);
}

std::optional<OuterFragment::Consumed> OuterFragment::take_consumed() {
  if (!last_ || !last_->reduction->done()) return std::nullopt;
  return std::exchange(last_, std::nullopt);
}

bool OuterFragment::take_refused(std::set<size_t>* ranks) {
  if (!std::exchange(report_.refused, false)) return false;
  for (size_t r = 0; r < report_.not_finite.size(); ++r) {
    if (std::exchange(report_.not_finite[r], uint8_t{0}) != 0) ranks->insert(r);
  }
  return true;
}

void OuterFragment::await() const {
  if (pending_) (void)context_.comm->engine().wait(pending_->reduction, -1);
}

Status OuterFragment::start(const Step& step) { return local(Kind::kStart, step, {}).status(); }

Status OuterFragment::swap(const Step& step, bool back) {
  DeviceArray& swapped = array(OuterArray::kSwapped);
  if (swapped.data() == nullptr) {
    SOTTO_ASSIGN(swapped, DeviceArray::make(context_.access.device(),
                                            shape_.bytes_of(OuterArray::kSwapped)));
  }
  return local(back ? Kind::kSwapBack : Kind::kSwap, step, {}).status();
}

uint64_t OuterFragment::state_bytes() const {
  uint64_t bytes = compressed_.bytes();
  for (const DeviceArray& a : arrays_) bytes += a.bytes();
  for (const std::optional<Prepared>& p : plans_) bytes += p ? p->plan->held_bytes() : 0;
  return bytes;
}

Result<PeerTraffic> OuterFragment::next_traffic() {
  SOTTO_ASSIGN(const Prepared* p, prepared(compresses_next() ? Kind::kReduceCoded : Kind::kReduce));
  return p->plan->plan().traffic.total;
}

Result<std::vector<float>> OuterFragment::values(OuterArray which) const {
  const DeviceArray& from = arrays_[static_cast<size_t>(which)];
  std::vector<float> out(layout_->elements());
  const StateArray array{.elements = from.data()};
  uint64_t at = 0;
  const auto read = [&](const TensorRun& run) {
    float* to = out.data() + at;
    at += run.count;
    return read_state(context_.access, array, run, to);
  };
  SOTTO_TRY(for_each_run(*layout_, false, read));
  return out;
}

}  // namespace sotto
