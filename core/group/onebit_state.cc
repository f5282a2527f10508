#include "core/group/onebit_state.h"

#include <cstring>

#include "core/base/text.h"

namespace sotto {
namespace {

// What the encoder starts from: c - (c >= 0 ? S : -S).
float residual_of(float c, float scale) { return c - (c >= 0 ? scale : -scale); }

const char* name_of(OnebitGranularity g) {
  return g == OnebitGranularity::kTensor ? "tensor" : "flat";
}
const char* name_of(ScaleKind s) { return s == ScaleKind::kL1 ? "l1" : "l2"; }

template <class F>
void for_each_run(const OnebitLayout& layout, F&& f) {
  uint64_t first = 0;
  for (uint32_t t = 0; t < layout.tensors().size(); ++t) {
    for (const Piece& piece : layout.tensor_pieces(t)) f(piece, first + piece.offset);
    first += layout.tensors()[t].count;
  }
}

}  // namespace

std::vector<float> to_flat(const OnebitLayout& layout, const std::vector<float>& by_tensor) {
  std::vector<float> flat(layout.flat_elements(), 0.0f);
  for_each_run(layout, [&](const Piece& p, uint64_t at) {
    std::memcpy(&flat[p.flat], &by_tensor[at], p.count * 4);
  });
  return flat;
}

std::vector<float> to_tensors(const OnebitLayout& layout, const std::vector<float>& flat) {
  std::vector<float> out(layout.elements());
  for_each_run(layout, [&](const Piece& p, uint64_t at) {
    std::memcpy(&out[at], &flat[p.flat], p.count * 4);
  });
  return out;
}

Result<OnebitState> OnebitState::make(Engine& engine, const OnebitLayout& layout,
                                      const OnebitSettings& settings) {
  OnebitState s;
  s.layout_ = &layout;
  s.settings_ = settings;
  const auto take = [&](DeviceArray& array, uint64_t bytes) -> Status {
    SOTTO_ASSIGN(array, DeviceArray::make(engine.device(), bytes));
    return ok_status();
  };
  const uint64_t instances = layout.instances();
  SOTTO_TRY(take(s.worker_, layout.flat_elements() * 4));
  SOTTO_TRY(take(s.worker_scale_, instances * 4));
  SOTTO_TRY(take(s.server_, layout.chunk_elements() * 4));
  SOTTO_TRY(take(s.server_scale_, instances * 4));
  SOTTO_TRY(take(s.worker_counts_, instances * 8));
  SOTTO_TRY(take(s.server_counts_, instances * 8));
  for (int i = 0; i < 2; ++i) {
    SOTTO_TRY(take(s.bits_[i], layout.flat_elements() / 8));
    SOTTO_TRY(take(s.messages_[i], scale_message_bytes(instances) * layout.ranks()));
  }
  SOTTO_TRY(s.set_counts(engine, std::vector<uint8_t>(layout.flat_elements() / 8, 0xff)));
  return s;
}

void OnebitState::bind(Run& run, const OnebitSlots& slots) const {
  run.bases[slots.worker] = worker_.data();
  run.bases[slots.worker_scale] = worker_scale_.data();
  run.bases[slots.server] = server_.data();
  run.bases[slots.server_scale] = server_scale_.data();
  run.bases[slots.worker_counts] = worker_counts_.data();
  run.bases[slots.server_counts] = server_counts_.data();
  run.bases[slots.bits] = bits_[1 - current_].data();
  run.bases[slots.messages] = messages_[1 - current_].data();
}

void OnebitState::bind_current(Run& run, uint32_t bits_slot, uint32_t messages_slot) const {
  run.bases[bits_slot] = bits_[current_].data();
  run.bases[messages_slot] = messages_[current_].data();
}

Status OnebitState::set_counts(Engine& engine, const std::vector<uint8_t>& valid_bits) {
  std::vector<uint64_t> worker(layout_->instances()), server(layout_->instances());
  for_each_run(*layout_, [&](const Piece& p, uint64_t) {
    uint64_t valid = 0;
    for (uint64_t f = p.flat; f < p.flat + p.count; ++f)
      valid += (valid_bits[f / 8] >> (7 - f % 8)) & 1u;
    worker[p.scale] += valid;
    if (p.chunk == static_cast<uint32_t>(settings_.rank)) server[p.scale] += valid;
  });
  SOTTO_TRY(upload(engine, worker_counts_.data(), std::span<const uint64_t>(worker)));
  return upload(engine, server_counts_.data(), std::span<const uint64_t>(server));
}

Result<OnebitResidual> OnebitState::residual(Engine& engine,
                                             const std::vector<uint8_t>* valid_bits) const {
  const auto is_valid = [&](uint64_t f) {
    return valid_bits == nullptr || ((*valid_bits)[f / 8] >> (7 - f % 8) & 1u) != 0;
  };
  OnebitResidual r;
  r.rank = settings_.rank;
  r.size = settings_.size;
  r.chunk_align = settings_.chunk_align;
  r.granularity = name_of(settings_.granularity);
  r.scale = name_of(settings_.scale);
  const uint64_t instances = layout_->instances();
  SOTTO_ASSIGN(std::vector<float> worker,
               download<float>(engine, worker_.data(), layout_->flat_elements()));
  SOTTO_ASSIGN(const std::vector<float> scales,
               download<float>(engine, worker_scale_.data(), instances));
  SOTTO_ASSIGN(r.server, download<float>(engine, server_.data(), layout_->chunk_elements()));
  SOTTO_ASSIGN(const std::vector<float> server_scales,
               download<float>(engine, server_scale_.data(), instances));
  for_each_run(*layout_, [&](const Piece& p, uint64_t) {
    for (uint64_t f = p.flat; f < p.flat + p.count; ++f) {
      worker[f] = is_valid(f) ? residual_of(worker[f], scales[p.scale]) : 0.0f;
    }
  });
  r.worker = to_tensors(*layout_, worker);
  const auto me = static_cast<uint32_t>(settings_.rank);
  const OnebitSegment chunk{me * layout_->chunk_elements(), layout_->chunk_elements()};
  for (const Piece& p : layout_->server_pieces(me, chunk)) {
    for (uint64_t f = p.flat; f < p.flat + p.count; ++f) {
      const bool real = p.tensor != kNoTensor && is_valid(chunk.begin + f);
      r.server[f] = real ? residual_of(r.server[f], server_scales[p.scale]) : 0.0f;
    }
  }
  return r;
}

Status OnebitState::check(const OnebitResidual& r) const {
  if (r.rank != settings_.rank || r.size != settings_.size) {
    return invalid_argument(
        "the error feedback is of rank {} of {}, this is rank {} of {}; import it in mode reset",
        r.rank, r.size, settings_.rank, settings_.size);
  }
  const char* granularity = name_of(settings_.granularity);
  const char* scale = name_of(settings_.scale);
  if (r.chunk_align != settings_.chunk_align || r.granularity != granularity || r.scale != scale) {
    return invalid_argument(
        "the error feedback has chunk_align {}, granularity {}, scale {}; here they are {}, {}, "
        "{}; import it in mode reset",
        r.chunk_align, printable(r.granularity), printable(r.scale), settings_.chunk_align,
        granularity, scale);
  }
  if (r.worker.size() != layout_->elements() || r.server.size() != layout_->chunk_elements()) {
    return invalid_argument(
        "the error feedback has {} worker and {} server values, here are {} and {}",
        r.worker.size(), r.server.size(), layout_->elements(), layout_->chunk_elements());
  }
  return ok_status();
}

Status OnebitState::restore(Engine& engine, const OnebitResidual* r) {
  const std::vector<float> worker = r != nullptr
                                        ? to_flat(*layout_, r->worker)
                                        : std::vector<float>(layout_->flat_elements(), 0.0f);
  const std::vector<float> server =
      r != nullptr ? r->server : std::vector<float>(layout_->chunk_elements(), 0.0f);
  const std::vector<float> zero(layout_->instances(), 0.0f);
  SOTTO_TRY(upload(engine, worker_.data(), std::span<const float>(worker)));
  SOTTO_TRY(upload(engine, server_.data(), std::span<const float>(server)));
  SOTTO_TRY(upload(engine, worker_scale_.data(), std::span<const float>(zero)));
  return upload(engine, server_scale_.data(), std::span<const float>(zero));
}

uint64_t OnebitState::bytes() const {
  uint64_t sum = 0;
  for (const DeviceArray* a :
       {&worker_, &worker_scale_, &server_, &server_scale_, &worker_counts_, &server_counts_,
        &bits_[0], &bits_[1], &messages_[0], &messages_[1]}) {
    sum += a->bytes();
  }
  return sum;
}

}  // namespace sotto
