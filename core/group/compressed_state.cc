#include "core/group/compressed_state.h"

#include <cmath>
#include <cstring>

#include "core/base/text.h"

namespace sotto {
namespace {

// What the encoder starts from: c - (c >= 0 ? S : -S).
float residual_of(float c, float scale) { return c - (c >= 0 ? scale : -scale); }

// What a residual is the residual of.
std::string coding_name(const CodecSettings& s) {
  if (s.kind == CodecKind::kOnebit) return std::string(scale_name(s.scale));
  if (codec_has_blocks(s.kind)) return fmt::format("{}/{}", codec_name(s.kind), s.block);
  return std::string(codec_name(s.kind));
}

// The tensors one after the other, then padding that is data.
template <class F>
void for_each_run(const CompressedLayout& layout, F&& f) {
  uint64_t first = 0;
  uint32_t t = 0;
  for (const auto* list : {&layout.tensors(), &layout.padding()}) {
    for (const LayoutTensor& tensor : *list) {
      for (const Piece& piece : layout.tensor_pieces(t)) f(piece, first + piece.offset);
      first += tensor.count;
      ++t;
    }
  }
}

}  // namespace

std::vector<float> to_flat(const CompressedLayout& layout, const std::vector<float>& by_tensor) {
  std::vector<float> flat(layout.flat_elements(), 0.0f);
  for_each_run(layout, [&](const Piece& p, uint64_t at) {
    if (at < by_tensor.size()) std::memcpy(&flat[p.flat], &by_tensor[at], p.count * 4);
  });
  return flat;
}

std::vector<float> to_tensors(const CompressedLayout& layout, const std::vector<float>& flat,
                              bool padding) {
  std::vector<float> out(padding ? layout.elements_with_padding() : layout.elements());
  for_each_run(layout, [&](const Piece& p, uint64_t at) {
    if (at < out.size()) std::memcpy(&out[at], &flat[p.flat], p.count * 4);
  });
  return out;
}

Result<CompressedState> CompressedState::make(const Comm& comm, const DeviceAccess& access,
                                              const CompressedLayout& layout,
                                              const CodecSettings& settings) {
  CompressedState s;
  s.access_ = access;
  s.layout_ = &layout;
  s.settings_ = settings;
  s.rank_ = comm.rank();
  s.size_ = comm.size();
  if (!settings.residual) return s;
  const auto take = [&](DeviceArray& array, uint64_t bytes) -> Status {
    SOTTO_ASSIGN(array, DeviceArray::make(access.device(), bytes));
    return ok_status();
  };
  const uint64_t instances = layout.instances();
  SOTTO_TRY(take(s.worker_, layout.compressed_elements() * 4));
  for (DeviceArray& server : s.server_) SOTTO_TRY(take(server, layout.chunk_elements() * 4));
  if (!s.onebit()) return s;
  SOTTO_TRY(take(s.worker_scale_, instances * 4));
  SOTTO_TRY(take(s.worker_counts_, instances * 8));
  SOTTO_TRY(take(s.server_counts_, instances * 8));
  for (int i = 0; i < 2; ++i) {
    SOTTO_TRY(take(s.server_scale_[i], instances * 4));
    SOTTO_TRY(take(s.bits_[i], layout.compressed_elements() / 8));
    SOTTO_TRY(take(s.messages_[i], layout.message_bytes()));
  }
  SOTTO_TRY(s.set_counts(std::vector<uint8_t>(layout.flat_elements() / 8, 0xff)));
  return s;
}

void CompressedState::bind(Run& run, const CompressedSlots& slots) const {
  const int next = 1 - current_;
  const auto set = [&run](uint32_t slot, const DeviceArray& array) {
    if (slot != kNoSlot) run.bases[slot] = array.data();
  };
  set(slots.worker, worker_);
  set(slots.server, server_[current_]);
  set(slots.server_next, server_[next]);
  if (!onebit()) return;
  set(slots.worker_scale, worker_scale_);
  set(slots.server_scale, server_scale_[current_]);
  set(slots.server_scale_next, server_scale_[next]);
  set(slots.worker_counts, worker_counts_);
  set(slots.server_counts, server_counts_);
  set(slots.bits, bits_[next]);
  set(slots.messages, messages_[next]);
}

void CompressedState::bind_current(Run& run, uint32_t bits_slot, uint32_t messages_slot) const {
  run.bases[bits_slot] = bits_[current_].data();
  run.bases[messages_slot] = messages_[current_].data();
}

Status CompressedState::set_counts(const std::vector<uint8_t>& valid_bits) {
  std::vector<uint64_t> worker(layout_->instances()), server(layout_->instances());
  for_each_run(*layout_, [&](const Piece& p, uint64_t) {
    if (!layout_->compressed(p.tensor)) return;
    uint64_t valid = 0;
    for (uint64_t f = p.flat; f < p.flat + p.count; ++f)
      valid += (valid_bits[f / 8] >> (7 - f % 8)) & 1u;
    worker[p.scale] += valid;
    if (p.chunk == static_cast<uint32_t>(rank_)) server[p.scale] += valid;
  });
  SOTTO_TRY(access_.upload(worker_counts_.data(), std::span<const uint64_t>(worker)));
  return access_.upload(server_counts_.data(), std::span<const uint64_t>(server));
}

ErrorFeedback CompressedState::no_errors() const {
  ErrorFeedback r;
  r.rank = rank_;
  r.size = size_;
  r.chunk_align = settings_.chunk_align;
  r.granularity = granularity_name(settings_.granularity);
  r.bucket_elements = settings_.bucket_elements;
  r.scale = coding_name(settings_);
  return r;
}

Result<ErrorFeedback> CompressedState::residual(const std::vector<uint8_t>* valid_bits) const {
  const auto is_valid = [&](uint64_t f) {
    return valid_bits == nullptr || ((*valid_bits)[f / 8] >> (7 - f % 8) & 1u) != 0;
  };
  ErrorFeedback r = no_errors();
  if (!settings_.residual) return r;
  const uint64_t instances = layout_->instances();
  std::vector<float> scales(instances), server_scales(instances);
  SOTTO_ASSIGN(std::vector<float> worker,
               access_.download<float>(worker_.data(), layout_->compressed_elements()));
  worker.resize(layout_->flat_elements());
  SOTTO_ASSIGN(r.server,
               access_.download<float>(server_[current_].data(), layout_->chunk_elements()));
  if (onebit()) {
    SOTTO_ASSIGN(scales, access_.download<float>(worker_scale_.data(), instances));
    SOTTO_ASSIGN(server_scales, access_.download<float>(server_scale_[current_].data(), instances));
  }
  // With scale 0, and so for every codec but 1 bit, what is stored is the error.
  for_each_run(*layout_, [&](const Piece& p, uint64_t) {
    if (!layout_->compressed(p.tensor)) return;
    for (uint64_t f = p.flat; f < p.flat + p.count; ++f) {
      worker[f] = is_valid(f) ? residual_of(worker[f], scales[p.scale]) : 0.0f;
    }
  });
  r.worker = to_tensors(*layout_, worker, true);
  const auto me = static_cast<uint32_t>(rank_);
  const std::vector<Piece> pieces = layout_->server_pieces(me);
  const std::vector<Piece> places = layout_->worker_pieces(me);  // of the same elements
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& p = pieces[i];
    for (uint64_t j = 0; j < p.count; ++j) {
      float& e = r.server[p.flat + j];
      const bool real = p.tensor != kNoTensor && is_valid(places[i].flat + j);
      e = real ? residual_of(e, server_scales[p.scale]) : 0.0f;
    }
  }
  return r;
}

Status CompressedState::check(const ErrorFeedback& r) const {
  if (r.size != size_) {
    return invalid_argument(
        "the error feedback is of rank {0} of {1}, this is rank {2} of {3}; import the state in "
        "mode "
        "reset, where error feedback starts at zero, or have the {1} ranks export it in mode mean, "
        "which any number of ranks can import",
        r.rank, r.size, rank_, size_);
  }
  if (r.rank != rank_) {
    return invalid_argument(
        "the error feedback is of rank {} of {}, this is rank {} of {}; import the state that this "
        "rank has exported, or this one in mode reset",
        r.rank, r.size, rank_, size_);
  }
  const std::string_view granularity = granularity_name(settings_.granularity);
  const std::string scale = coding_name(settings_);
  if (r.chunk_align != settings_.chunk_align || r.granularity != granularity ||
      r.bucket_elements != settings_.bucket_elements || r.scale != scale) {
    return invalid_argument(
        "the error feedback has chunk_align {}, granularity {}, bucket_elements {}, scale {}; here "
        "they are {}, {}, {}, {}; import it in mode reset",
        r.chunk_align, printable(r.granularity), r.bucket_elements, printable(r.scale),
        settings_.chunk_align, granularity, settings_.bucket_elements, scale);
  }
  const uint64_t worker = settings_.residual ? layout_->elements_with_padding() : 0;
  const uint64_t server = settings_.residual ? layout_->chunk_elements() : 0;
  if (r.worker.size() != worker || r.server.size() != server) {
    return invalid_argument(
        "the error feedback has {} worker and {} server values, here are {} and {}",
        r.worker.size(), r.server.size(), worker, server);
  }
  for (const std::vector<float>* values : {&r.worker, &r.server}) {
    for (const float e : *values) {
      if (!std::isfinite(e)) return invalid_argument("the error feedback has a value {}", e);
    }
  }
  return ok_status();
}

Status CompressedState::restore(const ErrorFeedback* r) {
  if (!settings_.residual) return ok_status();
  const std::vector<float> worker = r != nullptr
                                        ? to_flat(*layout_, r->worker)
                                        : std::vector<float>(layout_->flat_elements(), 0.0f);
  const std::vector<float> server =
      r != nullptr ? r->server : std::vector<float>(layout_->chunk_elements(), 0.0f);
  SOTTO_TRY(access_.upload(worker_.data(),
                           std::span<const float>(worker).first(layout_->compressed_elements())));
  SOTTO_TRY(access_.upload(server_[current_].data(), std::span<const float>(server)));
  if (!onebit()) return ok_status();
  const std::vector<float> zero(layout_->instances(), 0.0f);
  SOTTO_TRY(access_.upload(worker_scale_.data(), std::span<const float>(zero)));
  return access_.upload(server_scale_[current_].data(), std::span<const float>(zero));
}

Result<MeanErrorFeedback> CompressedState::mean(Comm& comm,
                                                const std::vector<uint8_t>* valid_bits) const {
  MeanErrorFeedback mean;
  mean.worker.assign(layout_->elements(), 0.0f);
  mean.server.assign(layout_->elements(), 0.0f);
  if (!settings_.residual) return mean;
  SOTTO_ASSIGN(ErrorFeedback own, residual(valid_bits));
  own.worker.resize(layout_->elements());
  Call call;
  call.service = OpKind::kStateExport;
  call.request.kind = OpKind::kAllReduce;
  call.request.reduce = ReduceOp::kMean;
  call.request.rank = comm.rank();
  call.request.size = comm.size();
  call.request.counts = {own.worker.size()};
  call.request.dtypes = {Dtype::kF32};
  call.request.in_place = {0};
  call.in = {own.worker.data()};
  call.out = {mean.worker.data()};
  SOTTO_TRY(comm.run(std::move(call)));
  SOTTO_ASSIGN(const std::vector<std::string> servers,
               comm.exchange(std::string(reinterpret_cast<const char*>(own.server.data()),
                                         own.server.size() * 4),
                             OpKind::kStateExport));
  std::vector<float> flat(layout_->flat_elements(), 0.0f);
  for (uint32_t k = 0; k < layout_->ranks(); ++k) {
    const std::vector<Piece> from = layout_->server_pieces(k);
    const std::vector<Piece> to = layout_->worker_pieces(k);
    for (size_t i = 0; i < from.size(); ++i)
      std::memcpy(&flat[to[i].flat], servers[k].data() + from[i].flat * 4, from[i].count * 4);
  }
  mean.server = to_tensors(*layout_, flat);
  return mean;
}

Status CompressedState::restore_mean(const MeanErrorFeedback& mean) {
  if (!settings_.residual)
    return invalid_argument("this codec keeps no error feedback; import the state in mode reset");
  const std::vector<float> flat = mean.server.size() == layout_->elements()
                                      ? to_flat(*layout_, mean.server)
                                      : std::vector<float>();
  ErrorFeedback own = no_errors();
  own.worker = mean.worker;
  if (own.worker.size() == layout_->elements()) own.worker.resize(layout_->elements_with_padding());
  if (!flat.empty() || layout_->elements() == 0) own.server.resize(layout_->chunk_elements());
  const auto me = static_cast<uint32_t>(rank_);
  const std::vector<Piece> to = layout_->server_pieces(me);
  const std::vector<Piece> from = layout_->worker_pieces(me);
  for (size_t i = 0; i < to.size() && !flat.empty(); ++i)
    std::memcpy(&own.server[to[i].flat], &flat[from[i].flat], from[i].count * 4);
  SOTTO_TRY(check(own));
  return restore(&own);
}

uint64_t CompressedState::bytes() const {
  uint64_t sum =
      worker_.bytes() + worker_scale_.bytes() + worker_counts_.bytes() + server_counts_.bytes();
  for (int i = 0; i < 2; ++i) {
    sum += server_[i].bytes() + server_scale_[i].bytes() + bits_[i].bytes() + messages_[i].bytes();
  }
  return sum;
}

}  // namespace sotto
