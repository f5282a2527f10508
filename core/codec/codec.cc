#include "core/codec/codec.h"

#include <cstring>

#include "core/base/hash.h"
#include "core/base/text.h"
#include "core/codec/coding.h"
#include "core/codec/sent_whole.h"
#include "core/config/codec.h"

namespace sotto {
namespace {

std::vector<LayoutTensor> tensors_of(const std::vector<uint64_t>& counts) {
  std::vector<LayoutTensor> out;
  for (uint64_t count : counts) out.push_back({count, 0});
  return out;
}

}  // namespace

class Codec::Hooks final : public OpHooks {
 public:
  explicit Hooks(std::shared_ptr<Codec> codec) : codec_(std::move(codec)) {}
  void on_complete(Status& status, std::span<const std::byte> verdict) noexcept override {
    if (status.ok()) codec_->state_.flip();
    if (status.code() == Code::kNonfinite) status = codec_->describe_failure(status, verdict);
    codec_->in_flight_.store(false, std::memory_order_release);
  }

 private:
  std::shared_ptr<Codec> codec_;
};

Codec::Codec(std::shared_ptr<Comm> comm, std::shared_ptr<Device> device,
             const CodecSettings& settings, Levels levels, std::vector<uint64_t> counts)
    : comm_(std::move(comm)),
      device_(comm_->context()->device_or_default(device)),
      settings_(settings),
      levels_(std::move(levels)),
      counts_(std::move(counts)),
      layout_(CompressedLayout::of(settings, tensors_of(counts_), levels_.servers(),
                                   levels_.shards(),
                                   settings.compat ? std::optional<uint32_t>(0) : std::nullopt)) {}

Result<std::shared_ptr<Codec>> Codec::create(std::shared_ptr<Comm> comm, std::string_view json,
                                             std::vector<uint64_t> counts,
                                             const std::vector<Dtype>& dtypes,
                                             std::shared_ptr<Device> device) {
  SOTTO_ASSIGN(CodecSettings settings, parse_codec(json));
  if (settings.compat)
    settings.chunk_align = compat_chunk_align(static_cast<uint64_t>(comm->size()));
  for (size_t i = 0; i < dtypes.size(); ++i) {
    if (dtypes[i] != Dtype::kF32) {
      return unsupported("codec: tensor {} is {}; codecs take fp32", i, dtype_name(dtypes[i]));
    }
  }
  SOTTO_ASSIGN(Levels levels, make_levels(settings.hierarchy, comm->hosts()));
  settings.hierarchy = levels.kind;
  std::shared_ptr<Codec> codec(new Codec(std::move(comm), std::move(device), settings,
                                         std::move(levels), std::move(counts)));
  SOTTO_TRY(codec->comm_->takes(codec->device_->caps()));
  SOTTO_ASSIGN(codec->state_,
               CompressedState::make(
                   *codec->comm_, DeviceAccess(codec->comm_->context()->engine(), codec->device_),
                   codec->layout_, settings, codec->levels_.two()));
  return codec;
}

Result<Codec::Prepared*> Codec::prepared(std::span<const uint8_t> in_place) {
  for (Prepared& p : prepared_) {
    if (std::ranges::equal(p.in_place, in_place)) return &p;
  }
  PlanBuilder builder;
  Prepared p;
  p.in_place.assign(in_place.begin(), in_place.end());
  p.collective = emit_compressed_collective(builder, comm_->rank(), layout_, settings_, in_place,
                                            comm_->sizes().segment_bytes, levels_.two());
  SOTTO_ASSIGN(p.plan, comm_->prepare(builder.take(), device_));
  prepared_.push_back(std::move(p));
  return &prepared_.back();
}

Result<std::shared_ptr<PreparedPlan>> Codec::plan(const SmallVector<uint8_t>& in_place) {
  if (compresses_nothing()) {
    Call call = mean_in_full(in_place);
    return comm_->prepare(std::span(&call, 1));
  }
  SOTTO_ASSIGN(const Prepared* p, prepared(in_place));
  return p->plan;
}

Result<OpRef> Codec::all_reduce(const SmallVector<void*>& in, const SmallVector<void*>& out,
                                const CallOptions& options) {
  if (busy())
    return error(Code::kBusy, "an all-reduce of this codec is still in flight; wait for it first");
  SmallVector<uint8_t> in_place;
  for (size_t i = 0; i < in.size(); ++i) in_place.push_back(in[i] == out[i] && counts_[i] > 0);
  if (compresses_nothing()) {
    Call call = mean_in_full(in_place);
    call.in = in;
    call.out = out;
    return comm_->start(std::move(call), options);
  }
  SOTTO_ASSIGN(const Prepared* p, prepared(in_place));
  OpSignature signature;
  signature.kind = OpKind::kAllReduce;
  signature.reduce = static_cast<uint16_t>(ReduceOp::kMean);
  signature.dtype = static_cast<uint32_t>(Dtype::kF32);
  signature.count = layout_.elements();
  signature.tag = options.tag;
  SmallVector<uint64_t, 16> agreed(counts_.begin(), counts_.end());
  for (const uint64_t value : settings_.terms()) agreed.push_back(value);
  agreed.push_back(comm_->sizes().segment_bytes);
  signature.detail = static_cast<uint32_t>(hash64(agreed.data(), agreed.size() * 8));
  const auto bind = [&](Run& run) {
    for (size_t i = 0; i < in.size(); ++i) {
      run.bases[p->collective.in + i] = in[i];
      run.bases[p->collective.out + i] = out[i];
    }
    state_.bind(run, p->collective.slots);
  };
  in_flight_.store(true, std::memory_order_release);
  Result<OpRef> op = caught([&] {
    return comm_->launch(p->plan, signature, std::ref(bind),
                         comm_->engine().pool().make<Hooks>(shared_from_this()), options);
  });
  if (!op.ok()) in_flight_.store(false, std::memory_order_release);
  return op;
}

// One rank: the identity (specification 1.7). One host: the plain mean (1.11).
Call Codec::mean_in_full(const SmallVector<uint8_t>& in_place) const {
  Call call;
  call.request.kind = OpKind::kAllReduce;
  call.request.reduce = ReduceOp::kMean;
  call.request.rank = comm_->rank();
  call.request.size = comm_->size();
  call.request.counts = counts_;
  call.request.dtypes.assign(counts_.size(), Dtype::kF32);
  call.request.in_place = in_place;
  call.device = device_;
  return call;
}

Status Codec::describe_failure(const Status& status, std::span<const std::byte> verdict) const {
  if (verdict.empty()) return status;
  uint32_t word = 0;
  std::memcpy(&word, verdict.data(), 4);
  const uint64_t area = layout_.message_bytes();
  const bool server = word == kSkipServer;
  const std::vector<uint32_t> flagged =
      layout_.flagged(verdict.subspan(server ? 8 + area : 8, area));
  std::vector<size_t> ranks;
  for (const uint32_t s : flagged) ranks.push_back(static_cast<size_t>(levels_.rank_of(s)));
  const std::string_view refused = coding_of(settings_.kind).refused();
  if (!server) {
    return Status(status.code(),
                  fmt::format("compressed all-reduce: {} in the input of {}; nothing was written",
                              refused, servers_text(levels_.two(), flagged)));
  }
  return Status(
      status.code(),
      fmt::format(
          "compressed all-reduce: {} in the sums at rank {}; nothing was written{}", refused,
          list_of_ranks(ranks),
          settings_.server_residual() ? ", the error feedback of all sums starts at 0 again" : ""));
}

Result<Codec::Snapshot> Codec::snapshot() {
  if (busy()) return error(Code::kBusy, "an all-reduce of this codec is in flight");
  Snapshot s;
  s.counts = counts_;
  SOTTO_ASSIGN(s.residual, state_.residual({}));
  return s;
}

Status Codec::restore(const Snapshot& s, bool with_residual) {
  if (busy()) return error(Code::kBusy, "an all-reduce of this codec is in flight");
  if (s.counts != counts_)
    return invalid_argument("the state is of {} with other sizes than the {} of this codec",
                            counted(s.counts.size(), "tensor"), counts_.size());
  if (with_residual) SOTTO_TRY(state_.check(s.residual));
  return state_.restore(with_residual ? &s.residual : nullptr);
}

Result<MeanErrorFeedback> Codec::mean() {
  if (busy()) return error(Code::kBusy, "an all-reduce of this codec is in flight");
  return state_.mean(*comm_, {});
}

Status Codec::restore_mean(const std::vector<uint64_t>& counts, const MeanErrorFeedback& mean) {
  if (busy()) return error(Code::kBusy, "an all-reduce of this codec is in flight");
  if (counts != counts_)
    return invalid_argument("the state is of {} with other sizes than the {} of this codec",
                            counted(counts.size(), "tensor"), counts_.size());
  for (const std::vector<float>* values : {&mean.worker, &mean.server}) {
    std::span<const float> left = *values;
    if (left.size() != layout_.elements()) continue;  // refused below
    SOTTO_TRY(for_each_run(layout_, false, [&](const TensorRun& run) {
      const std::span<const float> errors = left.first(run.count);
      left = left.subspan(run.count);
      return check_sent_whole(settings_, run.tensor, counts_[run.tensor], errors);
    }));
  }
  return state_.restore_mean(mean);
}

}  // namespace sotto
