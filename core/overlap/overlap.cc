#include "core/overlap/overlap.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/base/text.h"
#include "core/config/overlap_section.h"
#include "core/optim/agreement.h"
#include "core/optim/settings.h"
#include "core/overlap/step.h"

namespace sotto {
namespace {

constexpr size_t kKeptZeros = 8;

std::string list_of(const std::vector<uint64_t>& indices) {
  return list_of_ranks({indices.begin(), indices.end()});
}

}  // namespace

// Zeros have been written: the gradients are there. If they could not be, the comm fails, and the
// round with it.
class Overlap::ZeroHooks final : public OpHooks {
 public:
  ZeroHooks(std::shared_ptr<Overlap> overlap, uint64_t round, std::vector<uint64_t> indices,
            std::vector<void*> places)
      : overlap_(std::move(overlap)),
        round_(round),
        indices_(std::move(indices)),
        places_(std::move(places)) {}
  void on_complete(Status& status, std::span<const std::byte>) noexcept override {
    if (status.ok()) overlap_->zeroed(round_, indices_, places_);
  }

 private:
  const std::shared_ptr<Overlap> overlap_;
  const uint64_t round_;
  const std::vector<uint64_t> indices_;
  const std::vector<void*> places_;
};

Overlap::Overlap(std::shared_ptr<Comm> comm, const OverlapConfig& config,
                 std::vector<OverlapTensor> tensors, std::shared_ptr<Device> device)
    : comm_(std::move(comm)),
      device_(comm_->context()->device_or_default(device)),
      config_(config),
      tensors_(std::move(tensors)),
      buckets_(cut_buckets(tensors_, launch_order(tensors_.size(), config_.order), config_)),
      observes_(config_.order == OverlapOrder::kObserved),
      round_(comm_->engine(), *device_, tensors_, buckets_),
      own_(tensors_.size()) {
  info_.buckets = static_cast<uint32_t>(buckets_.size());
}

Overlap::~Overlap() = default;

// ---- Creation ----

Result<std::shared_ptr<Overlap>> Overlap::create(std::shared_ptr<Comm> comm, std::string_view json,
                                                 std::vector<OverlapTensor> tensors,
                                                 std::shared_ptr<Device> device,
                                                 const Status& refused) {
  return agreed(comm, caught([&]() -> Result<std::shared_ptr<Overlap>> {
                  SOTTO_TRY(refused);
                  SOTTO_ASSIGN(OverlapConfig config, parse_overlap(json));
                  return make(comm, config, std::move(tensors), std::move(device), nullptr);
                }));
}

Result<std::shared_ptr<Overlap>> Overlap::create_step(const std::shared_ptr<Optimizer>& optimizer,
                                                      std::string_view json,
                                                      const Status& refused) {
  return agreed(optimizer->comm(), caught([&]() -> Result<std::shared_ptr<Overlap>> {
                  SOTTO_TRY(refused);
                  SOTTO_TRY(StepRounds::check(*optimizer));
                  const Config& of = optimizer->config();
                  OverlapConfig config = of.sotto.overlap.value_or(OverlapConfig());
                  if (!json.empty()) {
                    SOTTO_ASSIGN(config, parse_step_overlap(json, of));
                  }
                  return make(optimizer->comm(), config, StepRounds::gradients(*optimizer),
                              optimizer->device(), optimizer);
                }));
}

// Ranks meet, also one that has found a fault of its own or has no memory.
Result<std::shared_ptr<Overlap>> Overlap::agreed(const std::shared_ptr<Comm>& comm,
                                                 const Result<std::shared_ptr<Overlap>>& made) {
  const Result<ParameterSet> registered = caught([&]() -> Result<ParameterSet> {
    SOTTO_TRY(made.status());
    return (*made)->registration();
  });
  const Result<CreationTerms> terms = caught([&]() -> Result<CreationTerms> {
    SOTTO_TRY(registered.status());
    CreationTerms all;
    all.parameters = &*registered;
    for (const ParamSpec& p : *registered) all.elements += p.count;
    all.settings = (*made)->settings_text();
    return all;
  });
  SOTTO_TRY(agree(*comm, OpKind::kSetup, terms));
  // All ranks make the duplicate, at the same place in the order of their calls.
  (*made)->work_->set_comm(comm->duplicate());
  SOTTO_TRY((*made)->work_->use((*made)->buckets_, (*made)->observes_));
  return made;
}

Result<std::shared_ptr<Overlap>> Overlap::make(const std::shared_ptr<Comm>& comm,
                                               const OverlapConfig& config,
                                               std::vector<OverlapTensor> tensors,
                                               std::shared_ptr<Device> device,
                                               const std::shared_ptr<Optimizer>& optimizer) {
  if (tensors.empty()) return invalid_argument("n is 0; an overlap needs at least one gradient");
  for (size_t t = 0; t < tensors.size(); ++t) {
    const Dtype dtype = tensors[t].dtype;
    if (dtype == Dtype::kF32 || dtype == Dtype::kF16 || dtype == Dtype::kBF16) continue;
    return unsupported("like[{}] is {}; gradients are fp32, fp16 or bf16", t, dtype_name(dtype));
  }
  std::shared_ptr<Overlap> overlap(
      new Overlap(comm, config, std::move(tensors), std::move(device)));
  SOTTO_TRY(comm->takes(overlap->device_->caps()));
  if (optimizer != nullptr) {
    overlap->work_ = std::make_unique<StepRounds>(optimizer);
    return overlap;
  }
  auto average =
      std::make_unique<AverageRounds>(comm, overlap->config_, overlap->tensors_, overlap->device_);
  SOTTO_TRY(average->allocate(overlap->buckets_));
  overlap->average_ = average.get();
  overlap->work_ = std::move(average);
  return overlap;
}

ParameterSet Overlap::registration() const {
  std::vector<ParamSpec> specs;
  for (size_t t = 0; t < tensors_.size(); ++t) {
    ParamSpec& spec = specs.emplace_back();
    spec.name = fmt::format("gradient {}", t);
    spec.count = tensors_[t].count;
  }
  return {std::move(specs), DeviceAccess(comm_->context()->engine(), device_)};
}

// Everything that changes what a round does, as lines "key=value".
std::string Overlap::settings_text() const {
  std::string text;
  const auto add = [&](std::string_view key, const auto& value) {
    text += fmt::format("{}={}\n", key, value);
  };
  add("overlap.bucket_bytes", config_.bucket_bytes);
  add("overlap.first_bucket_bytes", config_.first_bucket_bytes);
  add("overlap.rounds", average_ == nullptr ? "steps" : "averages");
  add("overlap.order", overlap_order_name(config_.order));
  add("overlap.wire", config_.wire ? dtype_name(*config_.wire) : "of each gradient");
  text += codec_settings("overlap.codec", config_.codec);
  for (size_t t = 0; t < tensors_.size(); ++t)
    add(fmt::format("dtype of gradient {}", t), dtype_name(tensors_[t].dtype));
  return text;
}

// ---- Rounds ----

void Overlap::adopt(std::vector<OverlapBucket> buckets) {
  const std::lock_guard lock(mutex_);
  buckets_ = std::move(buckets);
  round_.relayout(buckets_);
  observes_ = false;
  observed_.clear();
  info_.buckets = static_cast<uint32_t>(buckets_.size());
  ++info_.layout;
}

Result<OpRef> Overlap::begin(const CallOptions& options, ReduceOp reduce) {
  SOTTO_TRY(comm_->failure());
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return invalid_state("the optimizer of this overlap has been destroyed");
    work_->locate(&tensors_);
    SOTTO_TRY(round_.start(now_ns()));
    places_.clear();
  }
  Result<OpRef> op = caught([&]() -> Result<OpRef> {
    if (!observed_.empty()) SOTTO_TRY(use_observed_order());
    return work_->launch(options, reduce, shared_from_this());
  });
  const std::lock_guard lock(mutex_);
  op.ok() ? round_.opened(*op, options.stream) : round_.drop();
  return op;
}

Status Overlap::use_observed_order() {
  std::vector<OverlapBucket> buckets = cut_buckets(tensors_, observed_, config_);
  SOTTO_TRY(work_->use(buckets, false));
  if (!std::ranges::equal(buckets, buckets_, {}, &OverlapBucket::tensors,
                          &OverlapBucket::tensors)) {
    adopt(std::move(buckets));
    return ok_status();
  }
  const std::lock_guard lock(mutex_);
  observes_ = false;
  observed_.clear();
  return ok_status();
}

void Overlap::bound(RoundMessage* told, uint32_t* order) {
  const std::lock_guard lock(mutex_);
  round_.bound(told, order);
}

Status Overlap::check_places(std::span<const uint64_t> indices,
                             std::span<const ParameterPlace> places) const {
  for (size_t i = 0; i < indices.size(); ++i) {
    const uint64_t t = indices[i];
    const OverlapTensor& tensor = tensors_[t];
    if (places.empty()) {
      if (tensor.data != nullptr || tensor.count == 0) continue;
      return invalid_argument(
          "indices[{}]: where gradient {} is was not said: like[{}].data was NULL, and grads is "
          "NULL",
          i, t, t);
    }
    const ParameterPlace& place = places[i];
    if (place.dtype != tensor.dtype)
      return invalid_argument("grads[{}] is {}; gradient {} was registered as {}", i,
                              dtype_name(place.dtype), t, dtype_name(tensor.dtype));
    if (place.count != tensor.count)
      return invalid_argument("grads[{}].count is {}; gradient {} was registered with {}", i,
                              place.count, t, tensor.count);
    if (place.count != 0 && place.device != device_->caps().id)
      return invalid_argument("grads[{}] is on {}; the gradients of this overlap are on {}", i,
                              device_name(place.device), device_name(device_->caps().id));
  }
  return ok_status();
}

Status Overlap::take_memory(std::span<const uint64_t> indices, std::span<void* const> memory) {
  if (average_ == nullptr) return ok_status();  // a step only reads them
  SmallVector<void*, 32> homes;
  for (const uint64_t t : indices) homes.push_back(tensors_[t].data);
  return places_.take(indices, memory.empty() ? std::span<void* const>(homes) : memory, tensors_);
}

void Overlap::give_up(std::span<const uint64_t> indices) {
  round_.marks().give_up(indices);
  places_.give_back(indices);
}

Status Overlap::ready(std::span<const uint64_t> indices, std::span<const ParameterPlace> places,
                      const std::optional<void*>& stream) {
  SmallVector<void*, 32> memory;
  for (const ParameterPlace& place : places) memory.push_back(place.data);
  const std::lock_guard lock(mutex_);
  SOTTO_TRY(round_.check_open());
  SOTTO_TRY(round_.marks().claim(indices, round_.number()));
  const Status status = caught([&]() -> Status {
    SOTTO_TRY(check_places(indices, places));
    SOTTO_TRY(take_memory(indices, memory));
    return round_.mark(indices, memory, stream, now_ns());
  });
  if (!status.ok()) give_up(indices);
  return status;
}

Result<std::vector<void*>> Overlap::own_places(std::span<const uint64_t> indices, bool all_own) {
  std::vector<void*> places;
  for (const uint64_t t : indices) {
    const OverlapTensor& tensor = tensors_[t];
    void* place = all_own ? nullptr : tensor.data;
    if (place == nullptr && tensor.count != 0) {
      if (own_[t].data() == nullptr) {
        SOTTO_ASSIGN(own_[t], DeviceArray::make(device_, tensor.bytes()));
      }
      place = own_[t].data();
    }
    places.push_back(place);
  }
  return places;
}

Status Overlap::unused(std::span<const uint64_t> indices) {
  const std::vector<uint64_t> all(indices.begin(), indices.end());
  std::vector<void*> places;
  uint64_t round = 0;
  {
    const std::lock_guard lock(mutex_);
    SOTTO_TRY(round_.check_open());
    round = round_.number();
    SOTTO_TRY(round_.marks().claim(all, round_.number()));
    // A step only reads them.
    const Status status = caught([&]() -> Status {
      SOTTO_ASSIGN(places, own_places(all, average_ == nullptr));
      return take_memory(all, places);
    });
    if (!status.ok()) {
      give_up(all);
      return status;
    }
  }
  const Status begun = write_zeros(all, std::move(places));
  if (begun.ok()) return begun;
  const std::lock_guard lock(mutex_);
  if (round_.number() == round) give_up(all);
  return begun;
}

Result<std::shared_ptr<PreparedPlan>> Overlap::zeros_plan(const std::vector<uint64_t>& indices) {
  {
    const std::lock_guard lock(mutex_);
    const auto known = std::ranges::find(zeros_, indices, &Zeros::indices);
    if (known != zeros_.end()) return known->plan;
  }
  std::vector<uint64_t> bytes;
  for (const uint64_t t : indices) bytes.push_back(tensors_[t].bytes());
  SOTTO_ASSIGN(std::shared_ptr<PreparedPlan> plan,
               work_->comm()->prepare(build_zeros(bytes), device_));
  const std::lock_guard lock(mutex_);
  if (zeros_.size() == kKeptZeros) zeros_.erase(zeros_.begin());
  zeros_.push_back({indices, plan});
  return plan;
}

Status Overlap::write_zeros(const std::vector<uint64_t>& indices, std::vector<void*> places) {
  SOTTO_ASSIGN(std::shared_ptr<PreparedPlan> plan, zeros_plan(indices));
  CallOptions options;
  uint64_t round = 0;
  {
    const std::lock_guard lock(mutex_);
    round = round_.number();
    options.stream = round_.stream();
  }
  const auto bind = [&](Run& run) { std::ranges::copy(places, run.bases.begin()); };
  return work_->comm()
      ->launch_local(std::move(plan), std::ref(bind),
                     std::make_shared<ZeroHooks>(shared_from_this(), round, indices, places),
                     options)
      .status();
}

void Overlap::zeroed(uint64_t round, std::span<const uint64_t> indices,
                     std::span<void* const> places) {
  const std::lock_guard lock(mutex_);
  if (round_.number() != round || round_.op() == nullptr) return;  // it has ended
  (void)round_.mark(indices, places, std::nullopt, now_ns());
}

Status Overlap::finish() {
  std::vector<uint64_t> missing;
  {
    const std::lock_guard lock(mutex_);
    SOTTO_TRY(round_.check_open());
    missing = round_.marks().missing_ones();
    if (!missing.empty() && config_.unused == OverlapUnused::kError) {
      return invalid_state(
          "round {}: {} of {} gradients are missing on rank {}: {}; call sotto_overlap_ready or "
          "sotto_overlap_unused for them, or set \"unused\" to \"zero\"; the round stays open",
          round_.number(), missing.size(), tensors_.size(), comm_->rank(), list_of(missing));
    }
  }
  if (!missing.empty()) SOTTO_TRY(unused(missing));
  const std::lock_guard lock(mutex_);
  SOTTO_TRY(round_.check_open());
  round_.finish(std::nullopt, now_ns());
  return ok_status();
}

Status Overlap::withdraw(std::string_view reason) {
  const std::lock_guard lock(mutex_);
  SOTTO_TRY(round_.check_open());
  const std::vector<uint64_t> missing = round_.marks().missing_ones();
  SOTTO_ASSIGN(const std::vector<void*> places, own_places(missing, true));
  SOTTO_TRY(round_.marks().claim(missing, round_.number()));
  SOTTO_TRY(round_.mark(missing, places, std::nullopt, now_ns()));
  round_.finish(reason, now_ns());
  return ok_status();
}

void Overlap::ended(Status& status, std::span<const std::byte> messages,
                    std::span<const std::byte> order) noexcept {
  const std::lock_guard lock(mutex_);
  if (status.code() == Code::kNonfinite) {
    if (const std::optional<std::string> who = withdrawn_text(messages)) {
      status = error(Code::kCancelled, "{}; {}, the group is healthy", *who, work_->leaves());
    }
    status = status.with_prefix(fmt::format("overlap round {}", round_.number()));
  }
  if (status.ok()) {
    if (!order.empty()) observe(order);
    const int64_t now = now_ns();
    ++info_.rounds;
    const OverlapRound::Times& times = round_.times();
    info_.begin_to_last_ready_ns = times.last_mark_ns - times.begin_ns;
    info_.network_ns = now - times.first_bucket_ns;
    info_.exposed_ns = now - times.finished_ns;
  }
  round_.ended(status);
}

// Of all gradients, each once.
static bool is_order(const std::vector<uint32_t>& order, size_t gradients) {
  return std::ranges::is_permutation(order, launch_order(gradients, OverlapOrder::kRegistered));
}

void Overlap::observe(std::span<const std::byte> bytes) {
  std::vector<uint32_t> order(tensors_.size());
  std::memcpy(order.data(), bytes.data(), order.size() * sizeof(uint32_t));
  if (is_order(order, tensors_.size())) observed_ = std::move(order);
}

void Overlap::close(std::string_view why) {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  (void)withdraw(why);
  OpRef op;
  {
    const std::lock_guard lock(mutex_);
    op = round_.op();
  }
  if (op != nullptr) (void)comm_->engine().wait(op, -1);
}

// ---- State ----

Result<AverageRounds*> Overlap::errors() const {
  if (average_ == nullptr) {
    return invalid_state(
        "rounds of this overlap are steps of an optimizer, whose state has the error feedback: "
        "sotto_optim_state_export and sotto_optim_state_import");
  }
  const std::lock_guard lock(mutex_);
  if (round_.state() == OverlapRound::State::kIdle) return average_;
  return error(Code::kBusy, "round {} of this overlap is open or in flight; end it first",
               round_.number());
}

Result<OverlapSnapshot> Overlap::snapshot() const {
  SOTTO_ASSIGN(AverageRounds * average, errors());
  SOTTO_ASSIGN(OverlapSnapshot snapshot, average->snapshot());
  snapshot.observed = observed_;
  if (config_.order == OverlapOrder::kObserved) snapshot.observes = observes_;
  return snapshot;
}

Result<OverlapSnapshot> Overlap::mean() const {
  SOTTO_ASSIGN(AverageRounds * average, errors());
  return average->mean();
}

Result<OverlapSnapshot> Overlap::empty_mean() const {
  SOTTO_ASSIGN(AverageRounds * average, errors());
  return average->empty_mean();
}

Status Overlap::restore(const OverlapSnapshot& snapshot, bool with_errors) {
  SOTTO_ASSIGN(AverageRounds * average, errors());
  if (!with_errors) return average->clear();
  const auto alike = [](const OverlapBucket& mine, const std::vector<uint32_t>& other) {
    return mine.tensors == other;
  };
  if (config_.order != OverlapOrder::kObserved) return average->restore(snapshot);
  // An order that was observed belongs to the state.
  if (!snapshot.observed.empty() && !is_order(snapshot.observed, tensors_.size()))
    return invalid_argument("the order that the state has observed does not have each of {} once",
                            counted(tensors_.size(), "gradient"));
  const bool same = std::ranges::equal(buckets_, snapshot.buckets, alike);
  const bool observes = snapshot.observes.value_or(same && observes_);
  if (same) {
    SOTTO_TRY(average->restore(snapshot));
  } else {
    SOTTO_ASSIGN(std::vector<OverlapBucket> buckets, buckets_of(tensors_, snapshot.buckets));
    SOTTO_TRY(average->restore_with(buckets, snapshot));
    adopt(std::move(buckets));
  }
  if (observes != observes_ || !same) SOTTO_TRY(average->use(buckets_, observes));
  const std::lock_guard lock(mutex_);
  observes_ = observes;
  observed_ = snapshot.observed;
  return ok_status();
}

Status Overlap::restore_mean(const OverlapSnapshot& snapshot) {
  SOTTO_ASSIGN(AverageRounds * average, errors());
  return average->restore_mean(snapshot);
}

OverlapInfo Overlap::info() const {
  const std::lock_guard lock(mutex_);
  OverlapInfo info = info_;
  const RoundTraffic traffic = work_->traffic();
  info.payload_bytes_per_round = traffic.total.payload_bytes_sent;
  info.header_bytes_per_round = traffic.total.header_bytes_sent + traffic.total.metadata_bytes_sent;
  info.early_payload_bytes_per_round = traffic.early_payload_bytes;
  info.state_bytes = work_->bytes();
  for (const Zeros& zeros : zeros_) info.state_bytes += zeros.plan->held_bytes();
  for (const DeviceArray& own : own_) info.state_bytes += own.bytes();
  if (round_.state() == OverlapRound::State::kOpen) info.missing = round_.marks().missing();
  return info;
}

}  // namespace sotto
