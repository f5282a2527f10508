#include "core/overlap/average.h"

#include <algorithm>
#include <utility>

#include "core/base/hash.h"

namespace sotto {

// `prepared` is that of the round: none is made anew while it is in flight.
class AverageRounds::Hooks final : public OpHooks {
 public:
  Hooks(AverageRounds& rounds, const Prepared& prepared, std::shared_ptr<RoundOwner> owner)
      : rounds_(rounds), prepared_(prepared), owner_(std::move(owner)) {}
  void on_complete(Status& status, std::span<const std::byte> verdict) noexcept override {
    rounds_.ended(prepared_, status, verdict);
    const OverlapPlan& at = prepared_.slots;
    const auto part = [&](uint64_t first, uint64_t n) {
      return verdict.empty() ? verdict : verdict.subspan(first, n);
    };
    owner_->ended(status, part(at.messages, at.end.messages.bytes),
                  part(at.order_of_rank_0, at.order_bytes));
  }

 private:
  AverageRounds& rounds_;  // its owner's
  const Prepared& prepared_;
  const std::shared_ptr<RoundOwner> owner_;
};

AverageRounds::AverageRounds(std::shared_ptr<Comm> comm, const OverlapConfig& config,
                             const std::vector<OverlapTensor>& tensors,
                             std::shared_ptr<Device> device)
    : comm_(std::move(comm)), config_(config), tensors_(tensors), device_(std::move(device)) {}

Status AverageRounds::allocate(const std::vector<OverlapBucket>& buckets) {
  buckets_ = buckets;
  SOTTO_ASSIGN(levels_, make_levels(config_.codec ? config_.codec->hierarchy : Hierarchy::kFlat,
                                    comm_->hosts()));
  SOTTO_ASSIGN(codecs_, make_codecs(buckets_));
  return ok_status();
}

Result<std::unique_ptr<OverlapCodecs>> AverageRounds::make_codecs(
    const std::vector<OverlapBucket>& buckets) const {
  if (!config_.codec) return std::unique_ptr<OverlapCodecs>();
  auto codecs = std::make_unique<OverlapCodecs>(levels_, tensors_, buckets, *config_.codec);
  SOTTO_TRY(codecs->allocate(*comm_, DeviceAccess(comm_->context()->engine(), device_)));
  return codecs;
}

Status AverageRounds::adopt(std::vector<OverlapBucket> buckets,
                            std::unique_ptr<OverlapCodecs> codecs, bool observes) {
  codecs_ = std::move(codecs);
  buckets_ = std::move(buckets);
  observes_ = observes;
  for (std::optional<Prepared>& p : prepared_) p.reset();
  return prepared(ReduceOp::kMean).status();
}

Status AverageRounds::use(const std::vector<OverlapBucket>& buckets, bool observes) {
  if (std::ranges::equal(buckets, buckets_, {}, &OverlapBucket::tensors, &OverlapBucket::tensors))
    return adopt(std::move(buckets_), std::move(codecs_), observes);
  std::vector<OverlapBucket> own = buckets;
  SOTTO_ASSIGN(std::unique_ptr<OverlapCodecs> codecs, make_codecs(own));
  if (codecs != nullptr && codecs->settings().residual && comm_->size() > 1) {
    SOTTO_ASSIGN(const OverlapSnapshot errors, codecs_->by_gradient(*rounds_comm_));
    SOTTO_TRY(codecs->restore_mean(errors));
  }
  return adopt(std::move(own), std::move(codecs), observes);
}

// ---- Rounds ----

Result<const AverageRounds::Prepared*> AverageRounds::prepared(ReduceOp reduce) {
  std::optional<Prepared>& known = prepared_[reduce == ReduceOp::kMean ? 0 : 1];
  if (known) return &*known;
  OverlapShape shape;
  shape.rank = comm_->rank();
  shape.size = comm_->size();
  shape.tensors = tensors_;
  shape.buckets = buckets_;
  shape.wire = config_.wire;
  OverlapCoding coding;
  if (compresses()) {
    coding = {codecs_->settings(), codecs_->layouts()};
    shape.coding = &coding;
  }
  shape.levels = compresses() ? levels_.two() : comm_->levels().of_sums();
  shape.reduce = reduce;
  shape.observes = observes_;
  shape.sizes = comm_->sizes();
  SOTTO_ASSIGN(OverlapPlan made, build_overlap_round(shape));
  SOTTO_ASSIGN(std::shared_ptr<PreparedPlan> plan,
               rounds_comm_->prepare(std::move(made.plan), device_));
  known.emplace(Prepared{std::move(plan), std::move(made)});
  return &*known;
}

OpSignature AverageRounds::signature(ReduceOp reduce, uint64_t tag) const {
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
  std::vector<uint64_t> agreed{comm_->sizes().segment_bytes, observes_};
  for (const OverlapBucket& bucket : buckets_) {
    agreed.push_back(bucket.tensors.size());
    agreed.insert(agreed.end(), bucket.tensors.begin(), bucket.tensors.end());
  }
  s.detail = static_cast<uint32_t>(hash64(agreed.data(), agreed.size() * sizeof(uint64_t)));
  return s;
}

Result<OpRef> AverageRounds::launch(const CallOptions& options, ReduceOp reduce,
                                    std::shared_ptr<RoundOwner> owner) {
  SOTTO_ASSIGN(const Prepared* p, prepared(reduce));
  // All that the round touches is behind the streams on which gradients become ready.
  CallOptions own = options;
  if (own.stream && device_->caps().streams) SOTTO_TRY(device_->check_stream(*own.stream));
  own.stream.reset();
  const auto bind = [&](Run& run) {
    const OverlapPlan& slots = p->slots;
    for (size_t t = 0; t < tensors_.size(); ++t) run.bases[slots.slots[t]] = tensors_[t].data;
    if (codecs_ != nullptr) codecs_->bind(run, slots.codecs);
    const uint32_t order = slots.end.order;
    owner->bound(static_cast<RoundMessage*>(run.bases[slots.end.told]),
                 order == kNoSlot ? nullptr : static_cast<uint32_t*>(run.bases[order]));
  };
  return rounds_comm_->launch(p->plan, signature(reduce, options.tag), std::ref(bind),
                              comm_->engine().pool().make<Hooks>(*this, *p, owner), own);
}

void AverageRounds::ended(const Prepared& prepared, Status& status,
                          std::span<const std::byte> verdict) {
  if (status.ok() && codecs_ != nullptr) codecs_->flip();
  if (status.code() != Code::kNonfinite || verdict.empty()) return;
  const OverlapPlan& at = prepared.slots;
  if (withdrawn_text(verdict.subspan(at.messages, at.end.messages.bytes))) return;
  status = Status(Code::kNonfinite, fmt::format("{}; {}, the group is healthy",
                                                codecs_->explain(verdict, at.verdicts), leaves()));
}

RoundTraffic AverageRounds::traffic() const {
  return RoundTraffic::of(prepared_[0]->plan->plan(), buckets_.size());
}

uint64_t AverageRounds::bytes() const {
  uint64_t bytes = codecs_ == nullptr ? 0 : codecs_->bytes();
  for (const std::optional<Prepared>& p : prepared_) bytes += p ? p->plan->held_bytes() : 0;
  return bytes;
}

// ---- State ----

Status AverageRounds::check_codecs() const {
  if (codecs_ != nullptr) return ok_status();
  return invalid_state("this overlap has no codec, and so no error feedback that could be saved");
}

Result<OverlapSnapshot> AverageRounds::snapshot() const {
  SOTTO_TRY(check_codecs());
  return codecs_->snapshot();
}

Result<OverlapSnapshot> AverageRounds::mean() const {
  SOTTO_TRY(check_codecs());
  return codecs_->mean(*comm_);
}

Result<OverlapSnapshot> AverageRounds::empty_mean() const {
  SOTTO_TRY(check_codecs());
  return codecs_->empty_mean();
}

Status AverageRounds::clear() {
  SOTTO_TRY(check_codecs());
  return codecs_->clear();
}

Status AverageRounds::restore(const OverlapSnapshot& snapshot) {
  SOTTO_TRY(check_codecs());
  return codecs_->restore(snapshot);
}

Status AverageRounds::restore_with(std::vector<OverlapBucket> buckets,
                                   const OverlapSnapshot& snapshot) {
  SOTTO_TRY(check_codecs());
  SOTTO_ASSIGN(std::unique_ptr<OverlapCodecs> codecs, make_codecs(buckets));
  SOTTO_TRY(codecs->restore(snapshot));
  return adopt(std::move(buckets), std::move(codecs), false);
}

Status AverageRounds::restore_mean(const OverlapSnapshot& snapshot) {
  SOTTO_TRY(check_codecs());
  return codecs_->restore_mean(snapshot);
}

}  // namespace sotto
