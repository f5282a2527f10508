// Steps: which kind comes next, its plan, and what its end changes.
#include <bit>
#include <cstring>
#include <limits>
#include <set>

#include "core/base/hash.h"
#include "core/base/log.h"
#include "core/base/small_vector.h"
#include "core/base/text.h"
#include "core/optim/agreement.h"
#include "core/optim/optimizer.h"

namespace sotto {
namespace {

constexpr char kStepInFlight[] =
    "the previous step of this optimizer is still in flight; wait for it first";

// Who met NaN or Inf, as far as ranks know. silent: in a step about which this rank decided alone.
std::string nonfinite_text(const OptimizerData& data, bool silent, std::span<const std::byte> bytes,
                           const StepVerdict& verdict) {
  if (silent) {
    return fmt::format(
        "optimizer step {}: NaN or Inf in this rank's gradient{}; this rank takes no part in this "
        "local step, the others do",
        data.step + 1, data.parameters.first_nonfinite_gradient());
  }
  std::string who;
  std::set<uint32_t> ranks;
  const auto add = [&](uint64_t first, uint32_t count, uint64_t stride, uint64_t at) {
    for (uint32_t r = 0; r < count; ++r) {
      uint32_t flags = 0;
      std::memcpy(&flags, bytes.data() + first + r * stride + at, 4);
      if (flags != 0) ranks.insert(r);
    }
  };
  if (!bytes.empty()) {
    if (verdict.norm_message_count > 1)
      add(verdict.norm_messages, verdict.norm_message_count, 16, 8);
    if (!ranks.empty()) who = fmt::format("rank {}", list_of_ranks({ranks.begin(), ranks.end()}));
    // Whose gradients they are, if that was exchanged; else who met them first.
    if (ranks.empty() && verdict.worker_message_count != 0) {
      const std::vector<uint32_t> flagged = data.layout->flagged(
          bytes.subspan(verdict.worker_messages, data.layout->message_bytes()));
      if (!flagged.empty()) who = servers_text(data.levels.two(), flagged);
    }
  }
  return fmt::format("optimizer step {}: NaN or Inf {}{}; nothing was updated", data.step + 1,
                     who.empty() ? "in the averaged gradient" : "met by " + who,
                     verdict.round_message_bytes == 0
                         ? data.parameters.first_nonfinite_gradient()
                         : "");  // where they were is not known any more
}

// What a step says of each tensor. Of those that took no part it says nothing: they keep what they
// had, NaN if that was nothing.
void keep_tensor_steps(const ParameterSet& parameters, const StepVerdict& verdict,
                       std::span<const std::byte> bytes, std::vector<TensorStep>* steps) {
  TensorStep none;
  none.trust_ratio = none.factor = std::numeric_limits<double>::quiet_NaN();
  steps->resize(verdict.tensor_step_count, none);
  for (uint32_t t = 0; t < steps->size(); ++t) {
    if (parameters.frozen(t) || parameters[t].count == 0) continue;
    std::memcpy(&(*steps)[t], bytes.data() + verdict.tensor_steps + t * sizeof(TensorStep),
                sizeof(TensorStep));
  }
}

// outer: null: there are no outer steps.
StepVariant next_variant(const Algorithm& algorithm, const OuterSteps* outer) {
  StepVariant variant = algorithm.next();
  variant.together = outer != nullptr && outer->averages_gradients();
  return variant;
}

}  // namespace

class Optimizer::StepHooks final : public OpHooks {
 public:
  // owner: null: the gradients are there.
  StepHooks(std::shared_ptr<Optimizer> optimizer, const StepVariant& variant,
            const StepVerdict& verdict, std::shared_ptr<RoundOwner> owner)
      : optimizer_(std::move(optimizer)),
        variant_(variant),
        verdict_(verdict),
        owner_(std::move(owner)) {}
  void on_complete(Status& status, std::span<const std::byte> bytes) noexcept override {
    optimizer_->completed(variant_, verdict_, status, bytes);
    if (owner_ == nullptr) return;
    const auto part = [&](uint64_t first, uint64_t n) {
      return bytes.empty() ? bytes : bytes.subspan(first, n);
    };
    owner_->ended(status, part(verdict_.round_messages, verdict_.round_message_bytes),
                  part(verdict_.first_order, verdict_.first_order_bytes));
  }

 private:
  std::shared_ptr<Optimizer> optimizer_;
  StepVariant variant_;
  StepVerdict verdict_;
  std::shared_ptr<RoundOwner> owner_;
};

Result<OpRef> Optimizer::accumulate(const CallOptions& options) {
  if (busy()) return error(Code::kBusy, kStepInFlight);
  if (accumulation_.steps != 0 && accumulation_.done + 1 >= accumulation_.steps) {
    return invalid_state(
        "{} micro-batches are accumulated, and gradient_accumulation_steps is {}: the gradients of "
        "the last one are the step's",
        accumulation_.done, accumulation_.steps);
  }
  if (!data_.arrays.has("micro_sums")) {
    SOTTO_TRY(
        data_.arrays.add(data_.access, *data_.layout,
                         {"micro_sums", std::max<uint64_t>(1, data_.layout->elements() * 4)}));
  }
  return launch(accumulation_.done == 0 ? kFirstAccumulation : kAccumulation, options);
}

// An import that ended in the middle leaves nothing to go on from.
Status Optimizer::check_whole() const {
  if (!torn_) return ok_status();
  return invalid_state("the last import ended in the middle of the state; import one first");
}

Result<StepVariant> Optimizer::next_step() const {
  if (busy()) return error(Code::kBusy, kStepInFlight);
  SOTTO_TRY(check_whole());
  if (accumulation_.done != 0 && accumulation_.steps != 0 &&
      accumulation_.done + 1 != accumulation_.steps) {
    return invalid_state(
        "gradient_accumulation_steps is {}, but the step has {} micro-batches: {} accumulated and "
        "its own",
        accumulation_.steps, accumulation_.done + 1, accumulation_.done);
  }
  return next_variant(*algorithm_, outer_.get());
}

Result<PreparedStep*> Optimizer::next_plan(LateSteps* late) {
  return plans_.get(next_variant(*algorithm_, outer_.get()), late);
}

Result<OpRef> Optimizer::begin(const CallOptions& options, const std::shared_ptr<LateSteps>& late,
                               std::shared_ptr<RoundOwner> owner) {
  SOTTO_ASSIGN(const StepVariant variant, next_step());
  if (options.stream) {
    SOTTO_ASSIGN(const std::shared_ptr<GraphCapture> graph,
                 data_.access.device()->capture_graph(*options.stream));
    if (graph != nullptr)
      return invalid_state(
          "the call's stream is being captured: a step whose gradients arrive while it runs is not "
          "part of a graph");
  }
  if (variant.begins_stage) SOTTO_TRY(algorithm_->start_stage());
  followed_ = false;
  return launch(variant, options, late.get(), owner);
}

Result<OpRef> Optimizer::step(const CallOptions& options) {
  SOTTO_ASSIGN(const StepVariant variant, next_step());
  const double lr = data_.groups.lr(0);
  if (outer_ != nullptr) SOTTO_TRY(outer_->check(lr));
  if (options.stream) {
    SOTTO_ASSIGN(std::shared_ptr<GraphCapture> graph,
                 data_.access.device()->capture_graph(*options.stream));
    if (graph != nullptr && outer_ != nullptr)
      return invalid_state(
          "the call's stream is being captured: outer steps (sotto.outer) are not "
          "part of a graph; make the step outside of the capture");
    if (graph != nullptr) return capture(variant, options, std::move(graph));
  }
  if (variant.begins_stage) SOTTO_TRY(algorithm_->start_stage());
  followed_ = outer_ != nullptr && outer_->due();
  if (!followed_) {
    Result<OpRef> op = launch(variant, options);
    if (outer_ != nullptr && op.ok()) outer_->passed(lr);
    return op;
  }
  CallOptions own;
  if (variant.together) own.tag = options.tag;
  own.timeout_us = options.timeout_us;
  own.priority = options.priority;
  own.no_block = options.no_block;
  own.stream = options.stream;
  SOTTO_ASSIGN(OpRef inner, launch(variant, std::move(own)));
  return outer_->step(std::move(inner), lr, options);
}

// Whether there is something to average follows from counters, so ranks agree on it.
Result<OpRef> Optimizer::synchronise(const CallOptions& options) {
  if (busy()) return error(Code::kBusy, kStepInFlight);
  SOTTO_TRY(check_whole());
  SOTTO_TRY(accumulation_.check_none(*data_.comm));
  if (const std::optional<StepVariant> due = algorithm_->synchronisation())
    return launch(*due, options);
  SOTTO_ASSIGN(std::shared_ptr<PreparedPlan> nothing,
               data_.comm->prepare(LogicalPlan(), data_.access.device()));
  return data_.comm->launch_local(
      std::move(nothing), [](Run&) {}, nullptr, options);
}

Status Optimizer::synchronise() {
  SOTTO_ASSIGN(const OpRef op, synchronise(CallOptions{}));
  return data_.comm->engine().wait(op, -1);
}

OpSignature Optimizer::signature(const StepVariant& variant, const LateSteps* late) const {
  OpSignature s;
  s.kind = OpKind::kOptimStep;
  s.dtype = static_cast<uint32_t>(Dtype::kF32);
  s.count = data_.layout->elements();
  SmallVector<uint64_t, 8> groups;
  for (size_t g = 0; g < data_.groups.size(); ++g) groups.push_back(data_.groups.step_hash(g));
  // Ranks that are at different steps or stages, or that would make other updates, must not mix.
  const uint64_t values[] = {data_.next_t(),
                             variant.traffic,
                             static_cast<uint64_t>(data_.config.optimizer.kind),
                             data_.comm->sizes().segment_bytes,
                             std::bit_cast<uint64_t>(loss_scaler_.scale()),
                             accumulation_.done,
                             hash64(groups.data(), groups.size() * sizeof(uint64_t)),
                             data_.groups.other_hash(data_.parameters.frozen_hash()),
                             imported_};
  s.detail = static_cast<uint32_t>(hash64(values, sizeof values));
  if (late != nullptr) s.detail ^= static_cast<uint32_t>(late->gradients.hash());
  s.root = pack_group_hashes(groups);
  s.reduce = static_cast<uint16_t>(imported_);
  return s;
}

Result<OpRef> Optimizer::launch(const StepVariant& variant, CallOptions options, LateSteps* late,
                                const std::shared_ptr<RoundOwner>& owner) {
  if (options.timeout_us == 0 && data_.config.sotto.timeout_ms)
    options.timeout_us = static_cast<int64_t>(*data_.config.sotto.timeout_ms) * 1000;
  SOTTO_ASSIGN(PreparedStep * p, plans_.get(variant, late));
  Comm& comm = late == nullptr ? data_.ranks(variant.together) : *late->comm;
  OpSignature s = signature(variant, late);
  s.tag = options.tag;
  in_flight_.store(true, std::memory_order_release);
  const auto bind_run = [&](Run& run) {
    plans_.bind(run, *p, variant);
    if (owner == nullptr) return;
    const RoundEnd& end = p->slots.end;
    owner->bound(static_cast<RoundMessage*>(run.bases[end.told]),
                 end.order == kNoSlot ? nullptr : static_cast<uint32_t*>(run.bases[end.order]));
  };
  const bool local = accumulates(variant) || (outer_ != nullptr && !variant.together);
  Result<OpRef> op = caught([&] {
    auto hooks =
        comm.engine().pool().make<StepHooks>(shared_from_this(), variant, p->verdict, owner);
    return local ? comm.launch_local(p->plan, std::ref(bind_run), std::move(hooks), options)
                 : comm.launch(p->plan, s, std::ref(bind_run), std::move(hooks), options);
  });
  if (!op.ok()) in_flight_.store(false, std::memory_order_release);
  return op;
}

// On the driver, before any thread learns that the step has ended.
void Optimizer::completed(const StepVariant& variant, const StepVerdict& verdict, Status& status,
                          std::span<const std::byte> bytes) {
  if (accumulates(variant)) {
    accumulation_.done += status.ok();
    return in_flight_.store(false, std::memory_order_release);
  }
  const auto advance = [&] {
    algorithm_->committed(variant);
    if (!variant.update) return;
    ++data_.step;
    data_.groups.schedule().advance();
  };
  // Ranks decide about such a step alone, without a message.
  const bool silent = variant.local && data_.comm->size() > 1 &&
                      data_.config.gradient_clipping == 0 && !loss_scaler_.enabled();
  // Beside outer steps it counts as an inner step: ranks go on with them, and with the learning
  // rate.
  const bool counts = outer_ != nullptr;
  const bool local = counts && !variant.together;
  imported_ = 0;
  // Whatever has become of the step, its micro-batches are gone.
  if (variant.update) accumulation_.done = 0;
  // Its owner says who has withdrawn.
  const bool withdrawn =
      !bytes.empty() && verdict.round_message_bytes != 0 &&
      withdrawn_text(bytes.subspan(verdict.round_messages, verdict.round_message_bytes));
  if (!bytes.empty() && !withdrawn) {
    outcomes_.grad_norm = std::numeric_limits<double>::quiet_NaN();
    if (verdict.norm != 0) std::memcpy(&outcomes_.grad_norm, bytes.data() + verdict.norm, 8);
  }
  if (status.ok()) {
    keep_tensor_steps(data_.parameters, verdict, bytes, &outcomes_.last_steps);
    advance();
    outcomes_.skipped_in_a_row = 0;
    if (variant.update) loss_scaler_.advance(false);
  } else {
    // The residual, if there is one, was taken back to S = 0; a server residual may have been
    // reset.
    if (status.code() == Code::kNonfinite && !withdrawn) {
      ++outcomes_.skipped;
      status = Status(Code::kNonfinite, nonfinite_text(data_, silent || local, bytes, verdict));
      // The other ranks know nothing of it and go on.
      if (silent) advance();
      if (counts) data_.groups.schedule().advance();
      if (loss_scaler_.enabled())
        outcomes_.overflowed(loss_scaler_, data_.config.sotto.max_consecutive_skips, status);
      if (followed_ && !status.ok()) {
        outer_->skipped(status);
        status = ok_status();
      }
    }
  }
  in_flight_.store(false, std::memory_order_release);
}

void Optimizer::Outcomes::overflowed(LossScaler& scaler, uint64_t limit, Status& status) {
  const double used = scaler.scale();
  scaler.advance(true);
  if (!scaler.dynamic()) return;
  if (++skipped_in_a_row < limit) {
    log(LogLevel::kInfo, "{}; loss scale {} -> {}", status.text(), used, scaler.scale());
    status = ok_status();
    return;
  }
  status = error(Code::kNonfinite,
                 "{}; {} in a row overflowed (sotto.max_consecutive_skips), the loss "
                 "scale is down to {}: the gradients themselves are not finite",
                 status.text(), counted(skipped_in_a_row, "step"), scaler.scale());
}

}  // namespace sotto
