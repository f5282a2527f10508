#include "core/codec/compressed_state.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "core/base/text.h"
#include "core/codec/coding.h"
#include "core/kernels/elements.h"

namespace sotto {
namespace {

bool is_valid(const std::vector<uint8_t>& bits, uint64_t flat) {
  return bits.empty() || ((bits[flat / 8] >> (7 - flat % 8)) & 1u) != 0;
}

// Over the ranks of a comm, in place, in memory of the host.
Status reduce(Comm& comm, void* data, uint64_t count, Dtype dtype, ReduceOp op) {
  Call call;
  call.service = OpKind::kStateExport;
  call.request.kind = OpKind::kAllReduce;
  call.request.reduce = op;
  call.request.rank = comm.rank();
  call.request.size = comm.size();
  call.request.counts = {count};
  call.request.dtypes = {dtype};
  call.request.in_place = {1};
  call.in = {data};
  call.out = {data};
  return comm.run(std::move(call));
}

// Values of all tensors, which begin as zeros: read(run, values), then, for as many small tensors
// at a time as make a run, finish(values).
template <class Read, class Finish>
Status for_each_batch(const CompressedLayout& layout, Read&& read, Finish&& finish,
                      const FloatSink& sink) {
  std::vector<float> values;
  const auto flush = [&]() -> Status {
    if (values.empty()) return ok_status();
    SOTTO_TRY(finish(std::span<float>(values)));
    SOTTO_TRY(sink(values));
    values.clear();
    return ok_status();
  };
  const Status all = for_each_run(layout, false, [&](const TensorRun& run) -> Status {
    if (values.size() + run.count > kRunElements) SOTTO_TRY(flush());
    const size_t first = values.size();
    values.resize(first + run.count, 0.0f);
    return read(run, &values[first]);
  });
  SOTTO_TRY(all);
  return flush();
}

// The values of a vector, one after the other.
FloatSource source_of(const std::vector<float>& values) {
  return [&values, at = size_t{0}](std::span<float> out) mutable {
    if (!out.empty()) std::memcpy(out.data(), &values[at], out.size_bytes());
    at += out.size();
    return ok_status();
  };
}

FloatSink sink_of(std::vector<float>* values) {
  return [values](std::span<const float> more) {
    values->insert(values->end(), more.begin(), more.end());
    return ok_status();
  };
}

}  // namespace

template <class Visit>
Status CompressedState::for_each_array(const CompressedLayout& layout, Visit&& visit) {
  if (!settings_.residual) return ok_status();
  const uint64_t instances = layout.instances();
  if (place_.serves) SOTTO_TRY(visit(worker_, layout.shard_elements() * 4));
  if (place_.serves && at_launch_) SOTTO_TRY(visit(launch_worker_, layout.shard_elements() * 4));
  if (!settings_.server_residual()) return ok_status();
  if (place_.serves) {
    for (DeviceArray& error : server_error_) SOTTO_TRY(visit(error, layout.chunk_elements() * 4));
  }
  if (!has_scales()) return ok_status();
  if (place_.serves) {
    SOTTO_TRY(visit(worker_scale_, instances * 4));
    if (at_launch_) SOTTO_TRY(visit(launch_scale_, instances * 4));
    SOTTO_TRY(visit(worker_counts_, instances * 8));
    SOTTO_TRY(visit(server_counts_, instances * 8));
    for (DeviceArray& scale : server_scale_) SOTTO_TRY(visit(scale, instances * 4));
  }
  for (int i = 0; i < 2; ++i) {
    SOTTO_TRY(visit(bits_[i], layout.compressed_elements() / 8));
    SOTTO_TRY(visit(messages_[i], layout.message_bytes()));
  }
  return ok_status();
}

uint64_t CompressedState::bytes_of(const CompressedLayout& layout, const CodecSettings& settings,
                                   bool at_launch) {
  CompressedState s;
  s.settings_ = settings;
  s.at_launch_ = at_launch;
  uint64_t sum = 0;
  const auto add = [&sum](DeviceArray&, uint64_t bytes) {
    sum += bytes;
    return ok_status();
  };
  (void)s.for_each_array(layout, add);
  return sum;
}

Result<CompressedState> CompressedState::make(const Comm& comm, const DeviceAccess& access,
                                              const CompressedLayout& layout,
                                              const CodecSettings& settings, const Levels* levels,
                                              bool at_launch) {
  CompressedState s;
  s.at_launch_ = at_launch;
  s.access_ = access;
  s.layout_ = &layout;
  s.settings_ = settings;
  s.place_.rank = comm.rank();
  s.place_.size = comm.size();
  s.place_.server = server_of(levels, comm.rank());
  s.place_.serves = sotto::serves(levels, comm.rank());
  if (levels != nullptr) {
    s.place_.per_host = static_cast<float>(levels->per_host());
    s.place_.hierarchy = fmt::format("{}, hosts", hierarchy_name(levels->kind));
    for (const int32_t host : levels->host_of) s.place_.hierarchy += fmt::format(" {}", host);
  }
  SOTTO_TRY(s.for_each_array(layout, [&](DeviceArray& array, uint64_t bytes) -> Status {
    SOTTO_ASSIGN(array, DeviceArray::make(access.device(), bytes));
    return ok_status();
  }));
  if (!settings.server_residual() || !s.has_scales()) return s;
  SOTTO_TRY(s.set_counts(std::vector<uint8_t>(layout.flat_elements() / 8, 0xff)));
  return s;
}

void CompressedState::bind(Run& run, const CompressedSlots& slots, int current) const {
  const int next = 1 - current;
  const auto set = [&run](uint32_t slot, const DeviceArray& array) {
    if (slot != kNoSlot) run.bases[slot] = array.data();
  };
  set(slots.worker, worker_);
  set(slots.launch_worker, launch_worker_);
  set(slots.server, server_error_[current]);
  set(slots.server_next, server_error_[next]);
  if (!has_scales()) return;
  set(slots.worker_scale, worker_scale_);
  set(slots.launch_scale, launch_scale_);
  set(slots.server_scale, server_scale_[current]);
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
  if (!place_.serves) return ok_status();
  std::vector<uint64_t> worker(layout_->instances()), server(layout_->instances());
  SOTTO_TRY(for_each_run(*layout_, true, [&](const TensorRun& run) {
    if (!layout_->compressed(run.tensor)) return ok_status();
    return run.each_part([&](const Piece& p, uint64_t flat, uint64_t, uint64_t n) {
      uint64_t valid = 0;
      for (uint64_t f = flat; f < flat + n; ++f) valid += (valid_bits[f / 8] >> (7 - f % 8)) & 1u;
      if (works_on(p)) worker[p.scale] += valid;
      if (serves(p)) server[p.scale] += valid;
      return ok_status();
    });
  }));
  SOTTO_TRY(access_.upload(worker_counts_.data(), std::span<const uint64_t>(worker)));
  return access_.upload(server_counts_.data(), std::span<const uint64_t>(server));
}

ErrorFeedback CompressedState::no_errors() const {
  ErrorFeedback r;
  r.rank = place_.rank;
  r.size = place_.size;
  r.chunk_align = settings_.chunk_align;
  r.granularity = granularity_name(settings_.granularity);
  r.bucket_elements = settings_.bucket_elements;
  r.scale = coding_of(settings_.kind).state_name(settings_);
  r.hierarchy = place_.hierarchy;
  return r;
}

// In one level also those of tensors that are never compressed.
uint64_t CompressedState::worker_values() const {
  if (!settings_.residual) return 0;
  if (place_.hierarchy.empty()) return layout_->elements_with_padding();
  uint64_t values = 0;
  for (uint32_t k = 0; k < layout_->servers(); ++k) {
    for (const Piece& piece : worker_chunk(*layout_, k)) {
      if (piece.tensor != kNoTensor && works_on(piece)) values += piece.count;
    }
  }
  return values;
}
uint64_t CompressedState::server_values() const {
  return settings_.server_residual() && place_.serves ? layout_->chunk_elements() : 0;
}

Result<std::vector<float>> CompressedState::scales_of(const DeviceArray& scales) const {
  // With scale 0, and so without scales, what is stored is the error.
  if (!has_scales()) return std::vector<float>(layout_->instances());
  return access_.download<float>(scales.data(), layout_->instances());
}

Status CompressedState::worker_run(const DeviceArray& of, const TensorRun& run,
                                   const std::vector<float>& scales,
                                   const std::vector<uint8_t>& valid_bits, float* out) const {
  if (!layout_->compressed(run.tensor)) {
    std::fill_n(out, run.count, 0.0f);
    return ok_status();
  }
  const auto* worker = static_cast<const float*>(of.data());
  return run.each_part([&](const Piece& p, uint64_t flat, uint64_t at, uint64_t n) -> Status {
    if (!works_on(p)) {
      std::fill_n(out + at, n, 0.0f);
      return ok_status();
    }
    const float* from = worker + (flat - shard_begin());
    SOTTO_TRY(access_.copy_and_wait(out + at, from, n * sizeof(float)));
    for (uint64_t j = 0; j < n; ++j) {
      float& e = out[at + j];
      e = is_valid(valid_bits, flat + j) ? residual_of(e, scales[p.scale]) : 0.0f;
    }
    return ok_status();
  });
}

Status CompressedState::worker_errors(const std::vector<uint8_t>& valid_bits,
                                      const FloatSink& sink) const {
  return errors_of(worker_, worker_scale_, valid_bits, sink);
}

Status CompressedState::errors_of(const DeviceArray& worker, const DeviceArray& scale,
                                  const std::vector<uint8_t>& valid_bits,
                                  const FloatSink& sink) const {
  if (!settings_.residual || !place_.serves) return ok_status();
  SOTTO_ASSIGN(const std::vector<float> scales, scales_of(scale));
  std::vector<float> values;
  return for_each_run(*layout_, true, [&](const TensorRun& run) -> Status {
    values.resize(run.count);
    SOTTO_TRY(worker_run(worker, run, scales, valid_bits, values.data()));
    if (place_.hierarchy.empty()) return sink(values);
    if (!layout_->compressed(run.tensor)) return ok_status();  // no part of a shard
    return run.each_part([&](const Piece& p, uint64_t, uint64_t at, uint64_t n) {
      return works_on(p) ? sink(std::span<const float>(values).subspan(at, n)) : ok_status();
    });
  });
}

Status CompressedState::server_errors(const std::vector<uint8_t>& valid_bits,
                                      const FloatSink& sink) const {
  if (!settings_.server_residual() || !place_.serves) return ok_status();
  SOTTO_ASSIGN(const std::vector<float> scales, scales_of(server_scale_[current_]));
  const std::vector<Piece> pieces = server_chunk(*layout_, place_.server);
  const std::vector<Piece> places = worker_chunk(*layout_, place_.server);  // of the same elements
  const auto* server = static_cast<const float*>(server_error_[current_].data());
  size_t i = 0;
  for (uint64_t at = 0; at < layout_->chunk_elements(); at += kRunElements) {
    const uint64_t end = std::min(at + kRunElements, layout_->chunk_elements());
    SOTTO_ASSIGN(std::vector<float> values, access_.download<float>(server + at, end - at));
    for (; i < pieces.size() && pieces[i].flat < end; ++i) {
      const Piece& p = pieces[i];
      const uint64_t last = std::min(p.flat + p.count, end);
      for (uint64_t f = std::max(p.flat, at); f < last; ++f) {
        const bool real =
            p.tensor != kNoTensor && is_valid(valid_bits, places[i].flat + (f - p.flat));
        float& e = values[f - at];
        e = real ? residual_of(e, scales[p.scale]) : 0.0f;
      }
      if (p.flat + p.count > end) break;
    }
    SOTTO_TRY(sink(values));
  }
  return ok_status();
}

Status CompressedState::mean_worker_errors(Comm& comm, const std::vector<uint8_t>& valid_bits,
                                           const FloatSink& sink) const {
  std::vector<float> scales;
  if (settings_.residual && place_.serves) {
    SOTTO_ASSIGN(scales, scales_of(worker_scale_));
  }
  const auto read = [&](const TensorRun& run, float* out) {
    return settings_.residual ? worker_run(worker_, run, scales, valid_bits, out) : ok_status();
  };
  // In two levels one rank of every host has the error of an element.
  const auto average = [&](std::span<float> values) -> Status {
    if (!settings_.residual) return ok_status();
    SOTTO_TRY(reduce(comm, values.data(), values.size(), Dtype::kF32, ReduceOp::kMean));
    for (float& value : values) value *= place_.per_host;
    return ok_status();
  };
  return for_each_batch(*layout_, read, average, sink);
}

uint64_t CompressedState::server_position(uint64_t flat) const {
  const std::vector<LayoutSection>& all = layout_->sections();
  const LayoutSection& s = *std::prev(
      std::upper_bound(all.begin(), all.end(), flat - shard_begin(),
                       [](uint64_t f, const LayoutSection& o) { return f < o.flat_begin; }));
  return s.server_begin + (flat - layout_->chunk_begin(s, place_.server));
}

// Every error has one owner; the others add no bits.
Status CompressedState::mean_server_errors(Comm& comm, const std::vector<uint8_t>& valid_bits,
                                           const FloatSink& sink) const {
  const bool there = settings_.server_residual();
  std::vector<float> scales;
  if (there && place_.serves) {
    SOTTO_ASSIGN(scales, scales_of(server_scale_[current_]));
  }
  const auto* server = static_cast<const float*>(server_error_[current_].data());
  const auto read = [&](const TensorRun& run, float* out) -> Status {
    if (!there || !layout_->compressed(run.tensor)) return ok_status();
    return run.each_part([&](const Piece& p, uint64_t flat, uint64_t at, uint64_t n) -> Status {
      if (!serves(p)) return ok_status();
      SOTTO_TRY(access_.copy_and_wait(out + at, server + server_position(flat), n * sizeof(float)));
      for (uint64_t j = 0; j < n; ++j) {
        float& e = out[at + j];
        e = is_valid(valid_bits, flat + j) ? residual_of(e, scales[p.scale]) : 0.0f;
      }
      return ok_status();
    });
  };
  const auto gather = [&](std::span<float> values) {
    return there ? reduce(comm, values.data(), values.size(), Dtype::kU32, ReduceOp::kBitOr)
                 : ok_status();
  };
  return for_each_batch(*layout_, read, gather, sink);
}

Status CompressedState::check_settings(const ErrorFeedback& r, uint64_t worker_given,
                                       uint64_t server_given, bool has_mean) const {
  if (r.size != place_.size) {
    return invalid_argument(
        "the error feedback is of rank {} of {}, this is rank {} of {}; import the state in mode "
        "reset, where error feedback starts at zero{}",
        r.rank, r.size, place_.rank, place_.size,
        has_mean ? fmt::format(", or have the {} export it in mode mean, which any number of "
                               "ranks can import",
                               counted(r.size, "rank"))
                 : "");
  }
  if (r.rank != place_.rank) {
    return invalid_argument(
        "the error feedback is of rank {} of {}, this is rank {} of {}; import the state that this "
        "rank has exported, or this one in mode reset",
        r.rank, r.size, place_.rank, place_.size);
  }
  if (r.hierarchy != place_.hierarchy) {
    const auto shown = [](const std::string& hierarchy) {
      return hierarchy.empty() ? std::string("flat") : printable(hierarchy);
    };
    return invalid_argument(
        "the error feedback is of the hierarchy \"{}\", here it is \"{}\"; import the state in "
        "mode reset{}",
        shown(r.hierarchy), shown(place_.hierarchy),
        has_mean ? ", or have its ranks export it in mode mean, which any hierarchy can import"
                 : "");
  }
  const std::string_view granularity = granularity_name(settings_.granularity);
  const std::string scale = coding_of(settings_.kind).state_name(settings_);
  if (r.chunk_align != settings_.chunk_align || r.granularity != granularity ||
      r.bucket_elements != settings_.bucket_elements || r.scale != scale) {
    return invalid_argument(
        "the error feedback has chunk_align {}, granularity {}, bucket_elements {}, scale {}; here "
        "they are {}, {}, {}, {}; import it in mode reset",
        r.chunk_align, printable(r.granularity), r.bucket_elements, printable(r.scale),
        settings_.chunk_align, granularity, settings_.bucket_elements, scale);
  }
  if (worker_given == worker_values() && server_given == server_values()) return ok_status();
  return invalid_argument(
      "the error feedback has {} worker and {} server values, here are {} and {}", worker_given,
      server_given, worker_values(), server_values());
}

Status CompressedState::check(const ErrorFeedback& r, bool has_mean) const {
  SOTTO_TRY(check_settings(r, r.worker.size(), r.server.size(), has_mean));
  for (const std::vector<float>* values : {&r.worker, &r.server}) {
    for (const float e : *values) {
      if (!std::isfinite(e)) return invalid_argument("the error feedback has a value {}", e);
    }
  }
  return ok_status();
}

Status CompressedState::clear_errors() {
  if (!settings_.residual || !place_.serves) return ok_status();
  const std::vector<float> zeros(kRunElements, 0.0f);
  const auto clear = [&](const DeviceArray& array, uint64_t elements) -> Status {
    auto* first = static_cast<float*>(array.data());
    for (uint64_t at = 0; at < elements; at += kRunElements) {
      const uint64_t n = std::min(kRunElements, elements - at);
      SOTTO_TRY(access_.upload(first + at, std::span<const float>(zeros).first(n)));
    }
    return ok_status();
  };
  SOTTO_TRY(clear(worker_, layout_->shard_elements()));
  if (!settings_.server_residual()) return ok_status();
  SOTTO_TRY(clear(server_error_[current_], layout_->chunk_elements()));
  if (!has_scales()) return ok_status();
  SOTTO_TRY(clear(worker_scale_, layout_->instances()));
  return clear(server_scale_[current_], layout_->instances());
}

// padding: they are this rank's own, not those of all.
Status CompressedState::put_worker_errors(const FloatSource& source, bool padding) {
  const bool shard = padding && !place_.hierarchy.empty();
  if (shard && !place_.serves) return ok_status();
  auto* worker = static_cast<float*>(worker_.data());
  std::vector<float> values;
  return for_each_run(*layout_, padding, [&](const TensorRun& run) -> Status {
    values.resize(run.count);
    if (!shard) SOTTO_TRY(source(values));
    if (!layout_->compressed(run.tensor)) return ok_status();
    return run.each_part([&](const Piece& p, uint64_t flat, uint64_t at, uint64_t n) -> Status {
      if (!works_on(p)) return ok_status();
      const std::span<float> part = std::span(values).subspan(at, n);
      if (shard) SOTTO_TRY(source(part));
      return access_.upload(worker + (flat - shard_begin()), std::span<const float>(part));
    });
  });
}

Status CompressedState::put_server_errors(const FloatSource& source) {
  auto* server = static_cast<float*>(server_error_[current_].data());
  std::vector<float> values;
  for (uint64_t at = 0; at < server_values(); at += kRunElements) {
    values.resize(std::min(kRunElements, server_values() - at));
    SOTTO_TRY(source(values));
    SOTTO_TRY(access_.upload(server + at, std::span<const float>(values)));
  }
  return ok_status();
}

Status CompressedState::put_mean_server_errors(const FloatSource& source) {
  const bool servers = settings_.server_residual();
  auto* server = static_cast<float*>(server_error_[current_].data());
  auto* worker = static_cast<float*>(worker_.data());
  std::vector<float> values, errors;
  return for_each_run(*layout_, false, [&](const TensorRun& run) -> Status {
    values.resize(run.count);
    SOTTO_TRY(source(values));
    return run.each_part([&](const Piece& p, uint64_t flat, uint64_t at, uint64_t n) -> Status {
      if (!layout_->compressed(run.tensor)) return ok_status();
      const auto part = std::span<const float>(values).subspan(at, n);
      if (servers && !serves(p)) return ok_status();
      if (servers) return access_.upload(server + server_position(flat), part);
      // Without servers the errors of every worker are as much larger.
      errors.resize(n);
      SOTTO_TRY(access_.copy_and_wait(errors.data(), worker + flat, n * sizeof(float)));
      std::ranges::transform(errors, part, errors.begin(), std::plus<>());
      return access_.upload(worker + flat, std::span<const float>(errors));
    });
  });
}

Result<ErrorFeedback> CompressedState::residual(const std::vector<uint8_t>& valid_bits,
                                                bool at_launch) const {
  ErrorFeedback r = no_errors();
  SOTTO_TRY(errors_of(at_launch ? launch_worker_ : worker_,
                      at_launch ? launch_scale_ : worker_scale_, valid_bits, sink_of(&r.worker)));
  SOTTO_TRY(server_errors(valid_bits, sink_of(&r.server)));
  return r;
}

Status CompressedState::restore(const ErrorFeedback* r) {
  SOTTO_TRY(clear_errors());
  if (r != nullptr && settings_.residual) {
    SOTTO_TRY(put_worker_errors(source_of(r->worker), true));
    SOTTO_TRY(put_server_errors(source_of(r->server)));
  }
  SOTTO_TRY(access_.copy_and_wait(launch_worker_.data(), worker_.data(), launch_worker_.bytes()));
  return access_.copy_and_wait(launch_scale_.data(), worker_scale_.data(), launch_scale_.bytes());
}

Result<MeanErrorFeedback> CompressedState::mean(Comm& comm,
                                                const std::vector<uint8_t>& valid_bits) const {
  MeanErrorFeedback mean;
  SOTTO_TRY(mean_worker_errors(comm, valid_bits, sink_of(&mean.worker)));
  SOTTO_TRY(mean_server_errors(comm, valid_bits, sink_of(&mean.server)));
  return mean;
}

Status CompressedState::restore_mean(const MeanErrorFeedback& mean) {
  if (!settings_.residual)
    return invalid_argument("this codec keeps no error feedback; import the state in mode reset");
  const uint64_t n = layout_->elements();
  if (mean.worker.size() != n || mean.server.size() != n) {
    return invalid_argument(
        "the error feedback has {} worker and {} server values, here are {} and {}",
        mean.worker.size(), mean.server.size(), n, n);
  }
  for (const std::vector<float>* values : {&mean.worker, &mean.server}) {
    for (const float e : *values) {
      if (!std::isfinite(e)) return invalid_argument("the error feedback has a value {}", e);
    }
  }
  SOTTO_TRY(clear_errors());
  SOTTO_TRY(put_worker_errors(source_of(mean.worker), false));
  return put_mean_server_errors(source_of(mean.server));
}

uint64_t CompressedState::bytes() const {
  uint64_t sum = worker_.bytes() + worker_scale_.bytes() + worker_counts_.bytes() +
                 server_counts_.bytes() + launch_worker_.bytes() + launch_scale_.bytes();
  for (int i = 0; i < 2; ++i) {
    sum += server_error_[i].bytes() + server_scale_[i].bytes() + bits_[i].bytes() +
           messages_[i].bytes();
  }
  return sum;
}

}  // namespace sotto
