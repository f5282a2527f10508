#include "core/overlap/overlap.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/base/hash.h"
#include "core/base/text.h"
#include "core/optim/agreement.h"
#include "core/optim/settings.h"

namespace sotto {
namespace {

constexpr size_t kKeptZeros = 8;

std::string list_of(const std::vector<uint64_t>& indices) {
  return list_of_ranks({indices.begin(), indices.end()});
}

}  // namespace

class Overlap::RoundHooks final : public OpHooks {
 public:
  explicit RoundHooks(std::shared_ptr<Overlap> overlap) : overlap_(std::move(overlap)) {}
  void on_complete(Status& status, std::span<const std::byte> verdict) noexcept override {
    overlap_->ended(status, verdict);
  }

 private:
  const std::shared_ptr<Overlap> overlap_;
};

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

Overlap::Overlap(std::shared_ptr<Comm> comm, OverlapConfig config,
                 std::vector<OverlapTensor> tensors, std::shared_ptr<Device> device)
    : comm_(std::move(comm)),
      device_(device != nullptr ? std::move(device) : comm_->context()->device()),
      config_(std::move(config)),
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
  const Result<std::shared_ptr<Overlap>> made = caught([&]() -> Result<std::shared_ptr<Overlap>> {
    SOTTO_TRY(refused);
    return make(comm, json, std::move(tensors), std::move(device));
  });
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
  (*made)->rounds_comm_ = comm->duplicate();
  SOTTO_TRY((*made)->prepared(ReduceOp::kMean).status());
  return made;
}

Result<std::shared_ptr<Overlap>> Overlap::make(const std::shared_ptr<Comm>& comm,
                                               std::string_view json,
                                               std::vector<OverlapTensor> tensors,
                                               std::shared_ptr<Device> device) {
  SOTTO_ASSIGN(OverlapConfig config, parse_overlap(json));
  if (tensors.empty()) return invalid_argument("n is 0; an overlap needs at least one gradient");
  for (size_t t = 0; t < tensors.size(); ++t) {
    const Dtype dtype = tensors[t].dtype;
    if (dtype == Dtype::kF32 || dtype == Dtype::kF16 || dtype == Dtype::kBF16) continue;
    return unsupported("like[{}] is {}; gradients are fp32, fp16 or bf16", t, dtype_name(dtype));
  }
  std::shared_ptr<Overlap> overlap(
      new Overlap(comm, std::move(config), std::move(tensors), std::move(device)));
  SOTTO_ASSIGN(overlap->codecs_, overlap->make_codecs(overlap->buckets_));
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
  add("overlap.first_bucket_bytes", config_.first_bucket_bytes);
  add("overlap.bucket_bytes", config_.bucket_bytes);
  add("overlap.order", overlap_order_name(config_.order));
  add("overlap.wire", config_.wire ? dtype_name(*config_.wire) : "of each gradient");
  text += codec_settings("overlap.codec", config_.codec);
  for (size_t t = 0; t < tensors_.size(); ++t)
    add(fmt::format("dtype of gradient {}", t), dtype_name(tensors_[t].dtype));
  return text;
}

Result<const Overlap::Prepared*> Overlap::prepared(ReduceOp reduce) {
  std::optional<Prepared>& known = prepared_[reduce == ReduceOp::kMean ? 0 : 1];
  if (known) return &*known;
  OverlapShape shape;
  shape.rank = comm_->rank();
  shape.size = comm_->size();
  shape.tensors = tensors_;
  shape.buckets = buckets_;
  shape.wire = config_.wire;
  OverlapCoding coding;
  if (codecs_ != nullptr) {
    coding = {codecs_->settings(), codecs_->layouts()};
    shape.coding = &coding;
  }
  shape.reduce = reduce;
  shape.observes = observes_;
  shape.sizes = {comm_->segment_bytes(), comm_->held_windows()};
  SOTTO_ASSIGN(OverlapPlan made, build_overlap_round(shape));
  SOTTO_ASSIGN(std::shared_ptr<PreparedPlan> plan,
               rounds_comm_->prepare(std::move(made.plan), device_));
  known.emplace(Prepared{std::move(plan), std::move(made)});
  return &*known;
}

// ---- Layout ----

Result<std::unique_ptr<OverlapCodecs>> Overlap::make_codecs(
    std::span<const OverlapBucket> buckets) const {
  if (!config_.codec) return std::unique_ptr<OverlapCodecs>();
  auto codecs = std::make_unique<OverlapCodecs>(*comm_, tensors_, buckets, *config_.codec);
  SOTTO_TRY(codecs->allocate(*comm_, DeviceAccess(comm_->context()->engine(), device_)));
  return codecs;
}

// `codecs` may refer to `buckets`, which stay in their memory.
Status Overlap::adopt(std::vector<OverlapBucket> buckets, std::unique_ptr<OverlapCodecs> codecs) {
  {
    const std::lock_guard lock(mutex_);
    buckets_ = std::move(buckets);
    codecs_ = std::move(codecs);
    for (std::optional<Prepared>& p : prepared_) p.reset();
    open_ = nullptr;
    round_.relayout(buckets_);
    observes_ = false;
    observed_.clear();
    info_.buckets = static_cast<uint32_t>(buckets_.size());
    ++info_.layout;
  }
  return prepared(ReduceOp::kMean).status();
}

Status Overlap::use_observed_order() {
  std::vector<OverlapBucket> buckets = cut_buckets(tensors_, observed_, config_);
  if (std::ranges::equal(buckets, buckets_, {}, &OverlapBucket::tensors, &OverlapBucket::tensors)) {
    observes_ = false;
    observed_.clear();
    for (std::optional<Prepared>& p : prepared_) p.reset();
    return prepared(ReduceOp::kMean).status();
  }
  SOTTO_ASSIGN(std::unique_ptr<OverlapCodecs> codecs, make_codecs(buckets));
  if (codecs != nullptr && codecs->settings().residual && comm_->size() > 1) {
    SOTTO_ASSIGN(const OverlapSnapshot errors, codecs_->by_gradient(*rounds_comm_));
    SOTTO_TRY(codecs->restore_mean(errors));
  }
  return adopt(std::move(buckets), std::move(codecs));
}

// ---- Rounds ----

OpSignature Overlap::signature(ReduceOp reduce, uint64_t tag) const {
  OpSignature s;
  s.kind = OpKind::kAllReduce;
  s.reduce = static_cast<uint16_t>(reduce);
  s.dtype = static_cast<uint32_t>(tensors_[0].dtype);
  for (const OverlapTensor& t : tensors_) {
    s.count += t.count;
    if (static_cast<uint32_t>(t.dtype) != s.dtype) s.dtype = 0;
  }
  s.tag = tag;
  // The rest was compared when the overlap was made; buckets may be those of a state.
  std::vector<uint64_t> agreed{comm_->segment_bytes(), observes_};
  for (const OverlapBucket& bucket : buckets_) {
    agreed.push_back(bucket.tensors.size());
    agreed.insert(agreed.end(), bucket.tensors.begin(), bucket.tensors.end());
  }
  s.detail = static_cast<uint32_t>(hash64(agreed.data(), agreed.size() * sizeof(uint64_t)));
  return s;
}

Result<OpRef> Overlap::begin(const CallOptions& options, ReduceOp reduce) {
  SOTTO_TRY(comm_->failure());
  {
    const std::lock_guard lock(mutex_);
    SOTTO_TRY(round_.start(now_ns()));
  }
  Result<OpRef> op = caught([&] { return launch(options, reduce); });
  const std::lock_guard lock(mutex_);
  op.ok() ? round_.opened(*op, options.stream) : round_.drop();
  return op;
}

Result<OpRef> Overlap::launch(const CallOptions& options, ReduceOp reduce) {
  if (!observed_.empty()) SOTTO_TRY(use_observed_order());
  SOTTO_ASSIGN(const Prepared* p, prepared(reduce));
  const auto bind = [&](Run& run) {
    const OverlapPlan& slots = p->slots;
    for (size_t t = 0; t < tensors_.size(); ++t) run.bases[slots.slots[t]] = tensors_[t].data;
    if (codecs_ != nullptr) codecs_->bind(run, slots.codecs);
    void* const order = slots.order == kNoSlot ? nullptr : run.bases[slots.order];
    const std::lock_guard lock(mutex_);
    open_ = p;
    round_.bound(static_cast<RoundMessage*>(run.bases[slots.told]), static_cast<uint32_t*>(order));
  };
  return rounds_comm_->launch(p->plan, signature(reduce, options.tag), std::ref(bind),
                              comm_->engine().pool().make<RoundHooks>(shared_from_this()), options);
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

Status Overlap::ready(std::span<const uint64_t> indices, std::span<const ParameterPlace> places,
                      const std::optional<void*>& stream) {
  SmallVector<void*, 32> memory;
  for (const ParameterPlace& place : places) memory.push_back(place.data);
  const std::lock_guard lock(mutex_);
  SOTTO_TRY(round_.check_open());
  SOTTO_TRY(round_.marks().claim(indices, round_.number()));
  Status status = check_places(indices, places);
  if (status.ok()) status = round_.mark(indices, memory, stream, now_ns());
  if (!status.ok()) round_.marks().give_up(indices);
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
    Result<std::vector<void*>> found = own_places(all, false);
    if (!found.ok()) {
      round_.marks().give_up(all);
      return found.status();
    }
    places = found.take();
  }
  const Status begun = write_zeros(all, std::move(places));
  if (begun.ok()) return begun;
  const std::lock_guard lock(mutex_);
  if (round_.number() == round) round_.marks().give_up(all);
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
               rounds_comm_->prepare(build_zeros(bytes), device_));
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
  return rounds_comm_
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

void Overlap::ended(Status& status, std::span<const std::byte> verdict) {
  const std::lock_guard lock(mutex_);
  if (status.code() == Code::kNonfinite && !verdict.empty()) status = explain(verdict);
  if (status.ok()) {
    if (codecs_ != nullptr) codecs_->flip();
    if (open_->slots.order != kNoSlot) observe(verdict.subspan(open_->slots.order_of_rank_0));
    const int64_t now = now_ns();
    ++info_.rounds;
    const OverlapRound::Times& times = round_.times();
    info_.begin_to_last_ready_ns = times.last_mark_ns - times.begin_ns;
    info_.network_ns = now - times.first_bucket_ns;
    info_.exposed_ns = now - times.finished_ns;
  }
  round_.ended(status);
}

// bytes: begin with the order of rank 0.
void Overlap::observe(std::span<const std::byte> bytes) {
  std::vector<uint32_t> order(tensors_.size());
  std::memcpy(order.data(), bytes.data(), order.size() * sizeof(uint32_t));
  if (std::ranges::is_permutation(order, launch_order(order.size(), OverlapOrder::kRegistered)))
    observed_ = std::move(order);
}

// Why the ranks have decided not to commit.
Status Overlap::explain(std::span<const std::byte> verdict) const {
  std::vector<size_t> who;
  std::string reason;
  const uint64_t first = open_->slots.messages;
  for (size_t r = 0; r < static_cast<size_t>(comm_->size()); ++r) {
    RoundMessage message;
    std::memcpy(&message, verdict.data() + first + r * sizeof message, sizeof message);
    if (message.withdrawn == 0) continue;
    message.reason[sizeof message.reason - 1] = 0;
    if (who.empty()) reason = message.reason;
    who.push_back(r);
  }
  if (who.empty()) {
    return error(Code::kNonfinite,
                 "overlap round {}: {}; gradients are undefined, the group is healthy",
                 round_.number(), codecs_->explain(verdict, open_->slots.verdicts));
  }
  const bool one = who.size() == 1;
  return error(Code::kCancelled,
               "overlap round {}: {} {} {} withdrawn: {}; gradients are undefined, the group is "
               "healthy",
               round_.number(), one ? "rank" : "ranks", list_of_ranks(who), one ? "has" : "have",
               printable(reason, sizeof RoundMessage::reason));
}

void Overlap::close() {
  (void)withdraw("it has destroyed the overlap");
  OpRef op;
  {
    const std::lock_guard lock(mutex_);
    op = round_.op();
  }
  if (op != nullptr) (void)comm_->engine().wait(op, -1);
}

// ---- State ----

Status Overlap::check_state() const {
  if (codecs_ == nullptr)
    return invalid_state("this overlap has no codec, and so no error feedback that could be saved");
  const std::lock_guard lock(mutex_);
  if (round_.state() == OverlapRound::State::kIdle) return ok_status();
  return error(Code::kBusy, "round {} of this overlap is open or in flight; end it first",
               round_.number());
}

Result<OverlapSnapshot> Overlap::snapshot() const {
  SOTTO_TRY(check_state());
  return codecs_->snapshot();
}

Result<OverlapSnapshot> Overlap::mean() const {
  SOTTO_TRY(check_state());
  return codecs_->mean(*comm_);
}

Status Overlap::restore(const OverlapSnapshot& snapshot, bool with_errors) {
  SOTTO_TRY(check_state());
  if (!with_errors) return codecs_->clear();
  const auto alike = [](const OverlapBucket& mine, const std::vector<uint32_t>& other) {
    return mine.tensors == other;
  };
  // An order that was observed belongs to the state.
  if (config_.order != OverlapOrder::kObserved ||
      std::ranges::equal(buckets_, snapshot.buckets, alike))
    return codecs_->restore(snapshot);
  SOTTO_ASSIGN(std::vector<OverlapBucket> buckets, buckets_of(tensors_, snapshot.buckets));
  SOTTO_ASSIGN(std::unique_ptr<OverlapCodecs> codecs, make_codecs(buckets));
  SOTTO_TRY(codecs->restore(snapshot));
  return adopt(std::move(buckets), std::move(codecs));
}

Status Overlap::restore_mean(const OverlapSnapshot& snapshot) {
  SOTTO_TRY(check_state());
  return codecs_->restore_mean(snapshot);
}

Result<OverlapSnapshot> Overlap::empty_mean() const {
  SOTTO_TRY(check_state());
  return codecs_->empty_mean();
}

OverlapInfo Overlap::info() const {
  const std::lock_guard lock(mutex_);
  OverlapInfo info = info_;
  const PeerTraffic& traffic = prepared_[0]->plan->plan().traffic.total;
  info.payload_bytes_per_round = traffic.payload_bytes_sent;
  info.header_bytes_per_round = traffic.header_bytes_sent + traffic.metadata_bytes_sent;
  for (const std::optional<Prepared>& p : prepared_)
    info.state_bytes += p ? p->plan->held_bytes() : 0;
  for (const Zeros& zeros : zeros_) info.state_bytes += zeros.plan->held_bytes();
  if (codecs_ != nullptr) info.state_bytes += codecs_->bytes();
  for (const DeviceArray& own : own_) info.state_bytes += own.bytes();
  if (round_.state() == OverlapRound::State::kOpen) info.missing = round_.marks().missing();
  return info;
}

}  // namespace sotto
