#include "core/group/onebit_codec.h"

#include <cstring>

#include <nlohmann/json.hpp>

#include "core/base/hash.h"
#include "core/base/text.h"

namespace sotto {
namespace {

std::vector<OnebitTensor> tensors_of(const std::vector<uint64_t>& counts) {
  std::vector<OnebitTensor> out;
  for (uint64_t count : counts) out.push_back({count, 0});
  return out;
}

Status word(const nlohmann::json& value, const char* key,
            std::initializer_list<const char*> allowed, size_t* index) {
  std::string list;
  size_t i = 0;
  for (const char* name : allowed) {
    if (value.is_string() && value.get<std::string>() == name) {
      *index = i;
      return ok_status();
    }
    list += fmt::format("{}\"{}\"", i++ == 0 ? "" : ", ", name);
  }
  return invalid_argument("codec: \"{}\" is {}; allowed: {}", key, printable(value.dump()), list);
}

Status parse(std::string_view text, OnebitSettings* settings) {
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object()) return invalid_argument("codec: the description is no JSON object");
  if (!json.contains("type"))
    return invalid_argument("codec: the key \"type\" is missing; allowed: \"1bit\"");
  for (const auto& [key, value] : json.items()) {
    size_t index = 0;
    if (key == "type") {
      if (!value.is_string() || value != "1bit") {
        return unsupported("codec: \"type\" is {}; there is \"1bit\"", printable(value.dump()));
      }
    } else if (key == "scale") {
      SOTTO_TRY(word(value, "scale", {"l2", "l1"}, &index));
      settings->scale = index == 0 ? ScaleKind::kL2 : ScaleKind::kL1;
    } else if (key == "granularity") {
      SOTTO_TRY(word(value, "granularity", {"flat", "tensor"}, &index));
      settings->granularity = index == 0 ? OnebitGranularity::kFlat : OnebitGranularity::kTensor;
    } else if (key == "chunk_align") {
      if (!value.is_number_unsigned() || value.get<uint64_t>() == 0 ||
          value.get<uint64_t>() % 8 != 0 || value.get<uint64_t>() > (1u << 30)) {
        return invalid_argument(
            "codec: \"chunk_align\" is {}; allowed: a positive multiple of 8 up to 2^30",
            printable(value.dump()));
      }
      settings->chunk_align = value.get<uint64_t>();
    } else {
      constexpr std::string_view kKeys[] = {"type", "scale", "granularity", "chunk_align"};
      const std::string_view near = nearest_word(key, kKeys);
      return invalid_argument("codec: unknown key \"{}\"; the nearest known one is \"{}\"",
                              printable(key), near);
    }
  }
  return ok_status();
}

}  // namespace

class OnebitCodec::Hooks final : public OpHooks {
 public:
  explicit Hooks(std::shared_ptr<OnebitCodec> codec) : codec_(std::move(codec)) {}
  void on_complete(Status& status, std::span<const std::byte> verdict) noexcept override {
    if (status.code() == Code::kNonfinite) status = codec_->describe_failure(status, verdict);
    codec_->in_flight_.store(false, std::memory_order_release);
  }

 private:
  std::shared_ptr<OnebitCodec> codec_;
};

OnebitCodec::OnebitCodec(std::shared_ptr<Comm> comm, OnebitSettings settings,
                         std::vector<uint64_t> counts)
    : comm_(std::move(comm)),
      settings_(settings),
      counts_(std::move(counts)),
      layout_(tensors_of(counts_), static_cast<uint32_t>(settings.size), settings.chunk_align,
              settings.granularity) {}

Result<std::shared_ptr<OnebitCodec>> OnebitCodec::create(std::shared_ptr<Comm> comm,
                                                         std::string_view json,
                                                         std::vector<uint64_t> counts,
                                                         const std::vector<Dtype>& dtypes) {
  OnebitSettings settings;
  settings.rank = comm->rank();
  settings.size = comm->size();
  SOTTO_TRY(parse(json, &settings));
  for (size_t i = 0; i < dtypes.size(); ++i) {
    if (dtypes[i] != Dtype::kF32) {
      return unsupported("codec: tensor {} is {}; the 1-bit codec takes fp32", i,
                         dtype_name(dtypes[i]));
    }
  }
  std::shared_ptr<OnebitCodec> codec(new OnebitCodec(std::move(comm), settings, std::move(counts)));
  SOTTO_ASSIGN(codec->state_, OnebitState::make(codec->comm_->engine(), codec->layout_, settings));
  return codec;
}

Result<OnebitCodec::Prepared*> OnebitCodec::prepared(const std::vector<uint8_t>& in_place) {
  for (Prepared& p : prepared_) {
    if (p.in_place == in_place) return &p;
  }
  PlanBuilder builder;
  Prepared p;
  p.in_place = in_place;
  p.collective = emit_onebit_collective(builder, comm_->rank(), layout_, settings_.scale, in_place,
                                        comm_->segment_bytes());
  SOTTO_ASSIGN(p.plan, comm_->prepare(builder.take()));
  prepared_.push_back(std::move(p));
  return &prepared_.back();
}

Result<std::shared_ptr<PreparedPlan>> OnebitCodec::plan(const std::vector<uint8_t>& in_place) {
  if (comm_->size() == 1 || layout_.elements() == 0) {
    PlanBuilder nothing;
    return comm_->prepare(nothing.take());
  }
  SOTTO_ASSIGN(const Prepared* p, prepared(in_place));
  return p->plan;
}

Result<OpRef> OnebitCodec::all_reduce(const std::vector<void*>& in, const std::vector<void*>& out,
                                      const CallOptions& options) {
  if (busy())
    return error(Code::kBusy, "an all-reduce of this codec is still in flight; wait for it first");
  if (comm_->size() == 1 || layout_.elements() == 0) return copy_alone(in, out, options);
  std::vector<uint8_t> in_place;
  for (size_t i = 0; i < in.size(); ++i) in_place.push_back(in[i] == out[i] && counts_[i] > 0);
  SOTTO_ASSIGN(const Prepared* p, prepared(in_place));
  OpSignature signature;
  signature.kind = OpKind::kAllReduce;
  signature.reduce = static_cast<uint16_t>(ReduceOp::kMean);
  signature.dtype = static_cast<uint32_t>(Dtype::kF32);
  signature.count = layout_.elements();
  signature.tag = options.tag;
  std::vector<uint64_t> agreed(counts_);
  agreed.insert(agreed.end(),
                {uint64_t{1}, settings_.chunk_align, static_cast<uint64_t>(settings_.granularity),
                 static_cast<uint64_t>(settings_.scale), comm_->segment_bytes()});
  signature.detail = static_cast<uint32_t>(hash64(agreed.data(), agreed.size() * 8));
  const auto bind = [&](Run& run) {
    for (size_t i = 0; i < in.size(); ++i) {
      run.bases[p->collective.in + i] = in[i];
      run.bases[p->collective.out + i] = out[i];
    }
    state_.bind(run, p->collective.slots);
  };
  in_flight_.store(true, std::memory_order_release);
  Result<OpRef> op =
      comm_->launch(p->plan, signature, bind, std::make_shared<Hooks>(shared_from_this()), options);
  if (!op.ok()) in_flight_.store(false, std::memory_order_release);
  return op;
}

// One rank: the identity (specification 1.7).
Result<OpRef> OnebitCodec::copy_alone(const std::vector<void*>& in, const std::vector<void*>& out,
                                      const CallOptions& options) {
  Call call;
  call.request.kind = OpKind::kAllReduce;
  call.request.rank = comm_->rank();
  call.request.size = comm_->size();
  call.request.counts = counts_;
  call.request.dtypes.assign(counts_.size(), Dtype::kF32);
  for (size_t i = 0; i < in.size(); ++i) call.request.in_place.push_back(in[i] == out[i]);
  call.in = in;
  call.out = out;
  return comm_->start(std::move(call), options);
}

Status OnebitCodec::describe_failure(const Status& status,
                                     std::span<const std::byte> verdict) const {
  std::string who;
  const uint64_t stride = scale_message_bytes(layout_.instances());
  for (uint32_t r = 0; !verdict.empty() && r < layout_.ranks(); ++r) {
    uint32_t flags = 0;
    std::memcpy(&flags, verdict.data() + 8 + (r + 1) * stride - 4, 4);
    if (flags != 0) who += fmt::format("{}{}", who.empty() ? "" : ", ", r);
  }
  if (who.empty())
    return Status(
        status.code(),
        "compressed all-reduce: a sum is not finite; the residuals of the servers were reset");
  return Status(
      status.code(),
      fmt::format("compressed all-reduce: NaN or Inf in the input of rank {}; nothing was written",
                  who));
}

Result<OnebitCodec::Snapshot> OnebitCodec::snapshot() {
  if (busy()) return error(Code::kBusy, "an all-reduce of this codec is in flight");
  Snapshot s;
  s.counts = counts_;
  SOTTO_ASSIGN(s.residual, state_.residual(comm_->engine(), nullptr));
  return s;
}

Status OnebitCodec::restore(const Snapshot& s, bool with_residual) {
  if (busy()) return error(Code::kBusy, "an all-reduce of this codec is in flight");
  if (s.counts != counts_)
    return invalid_argument("the state is of {} tensors with other sizes than the {} of this codec",
                            s.counts.size(), counts_.size());
  if (with_residual) SOTTO_TRY(state_.check(s.residual));
  return state_.restore(comm_->engine(), with_residual ? &s.residual : nullptr);
}

}  // namespace sotto
