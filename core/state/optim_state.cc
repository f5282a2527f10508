#include "core/state/optim_state.h"

#include <functional>
#include <iterator>
#include <optional>
#include <utility>

#include "core/base/text.h"
#include "core/state/meta.h"

namespace sotto {
namespace {

constexpr std::string_view kPartNames[] = {"params",
                                           "m",
                                           "v",
                                           "vf",
                                           "padding_m",
                                           "local_sum",
                                           "anchor",
                                           "worker_error",
                                           "server_error",
                                           "mean_worker_error",
                                           "mean_server_error"};
static_assert(std::size(kPartNames) == kStateParts);
std::string_view name_of(StatePart part) { return kPartNames[static_cast<size_t>(part)]; }

constexpr StatePart kAllParts[] = {StatePart::kParams,
                                   StatePart::kM,
                                   StatePart::kV,
                                   StatePart::kVf,
                                   StatePart::kPaddingM,
                                   StatePart::kLocalSum,
                                   StatePart::kAnchor,
                                   StatePart::kWorkerError,
                                   StatePart::kServerError,
                                   StatePart::kMeanWorkerError,
                                   StatePart::kMeanServerError};

std::string meta_of(const OptimSnapshot& s) {
  StateJson meta{{"kind", "optimizer"},
                 {"algorithm", s.algorithm},
                 {"mode", s.mode},
                 {"step", s.step},
                 {"step_offset", s.step_offset},
                 {"average_since", s.average_since},
                 {"compressed", s.compressed},
                 {"stage_started", s.stage_started},
                 {"scheduler_iteration", s.scheduler_iteration},
                 {"skipped_steps", s.skipped_steps},
                 {"loss_scale",
                  {{"scale", s.loss_scale.scale},
                   {"iteration", s.loss_scale.iteration},
                   {"last_overflow", s.loss_scale.last_overflow}}},
                 {"names", s.names}};
  if (s.residual) meta["residual"] = residual_meta(*s.residual);
  if (!s.lr_sums.empty()) {
    meta["zeroone"] = {{"var_interval", s.zeroone.var_interval},
                       {"var_counter", s.zeroone.var_counter},
                       {"local_interval", s.zeroone.local_interval},
                       {"local_counter", s.zeroone.local_counter},
                       {"frozen", s.zeroone.frozen}};
  }
  return meta.dump(-1, ' ', false, StateJson::error_handler_t::replace);
}

// A section of a blob: bytes of the snapshot, or a part.
struct Section {
  std::string_view name;
  const void* data = nullptr;
  uint64_t bytes = 0;
  std::optional<StatePart> part;
};

// In the order of the blob. `meta` and the snapshot have to live as long.
std::vector<Section> sections_of(const OptimSnapshot& s, const std::string& meta) {
  std::vector<Section> out;
  const auto bytes = [&](std::string_view name, const auto& values) {
    out.push_back({name, values.data(), values.size() * sizeof(values[0]), std::nullopt});
  };
  const auto part = [&](StatePart p) {
    out.push_back({name_of(p), nullptr, s.values(p) * sizeof(float), p});
  };
  bytes("meta", meta);
  bytes("counts", s.counts);
  for (const StatePart p : {StatePart::kParams, StatePart::kM, StatePart::kV, StatePart::kVf})
    part(p);
  bytes("tensor_states", s.tensor_states);
  if (s.values(StatePart::kPaddingM) != 0) part(StatePart::kPaddingM);
  if (!s.frozen_m.empty()) bytes("frozen_m", s.frozen_m);
  if (!s.lr_sums.empty()) {
    bytes("lr_sums", s.lr_sums);
    bytes("anchor_decays", s.anchor_decays);
    part(StatePart::kLocalSum);
    part(StatePart::kAnchor);
  }
  if (!s.user.empty()) bytes("user", s.user);
  if (s.residual) {
    part(StatePart::kWorkerError);
    part(StatePart::kServerError);
  }
  if (s.mean) {
    part(StatePart::kMeanWorkerError);
    part(StatePart::kMeanServerError);
  }
  return out;
}

BlobSize size_of(const std::vector<Section>& sections) {
  BlobSize size;
  for (const Section& section : sections) size.add(section.name, section.bytes);
  return size;
}

using PartWriter = std::function<Status(StatePart, const FloatSink&)>;

Status write(const OptimSnapshot& s, const PartWriter& parts, const ByteSink& sink) {
  const std::string meta = meta_of(s);
  const std::vector<Section> sections = sections_of(s, meta);
  BlobStream stream(sink);
  SOTTO_TRY(stream.start(size_of(sections)));
  for (const Section& section : sections) {
    SOTTO_TRY(stream.section(section.name, section.bytes));
    if (!section.part) {
      SOTTO_TRY(stream.put(section.data, section.bytes));
    } else if (section.bytes != 0) {
      SOTTO_TRY(parts(*section.part, [&](std::span<const float> values) {
        return stream.put(values.data(), values.size_bytes());
      }));
    }
  }
  return stream.finish();
}

ByteSink sink_of(std::vector<std::byte>* out) {
  return [out](std::span<const std::byte> more) {
    out->insert(out->end(), more.begin(), more.end());
    return ok_status();
  };
}

StateErrors exported_errors(StateMode mode) {
  if (made_by_one_rank(mode)) return StateErrors::kOwn;
  return mode == StateMode::kMean ? StateErrors::kMean : StateErrors::kNone;
}

StateErrors imported_errors(StateMode mode) {
  return mode == StateMode::kExact  ? StateErrors::kOwn
         : mode == StateMode::kMean ? StateErrors::kMean
                                    : StateErrors::kNone;
}

// A snapshot whose parts are left in the blob.
Result<OptimSnapshot> read_description(const BlobReader& reader) {
  SOTTO_ASSIGN(const StateJson meta, meta_of(reader, "optimizer"));
  OptimSnapshot s;
  const auto take = [&](StatePart part) -> Status {
    SOTTO_ASSIGN(s.outside[static_cast<size_t>(part)], reader.count<float>(name_of(part)));
    return ok_status();
  };
  SOTTO_TRY(read_key(meta, "algorithm", &s.algorithm));
  SOTTO_TRY(read_key(meta, "mode", &s.mode));
  SOTTO_TRY(read_key(meta, "step", &s.step));
  SOTTO_TRY(read_key(meta, "step_offset", &s.step_offset));
  SOTTO_TRY(read_key(meta, "average_since", &s.average_since));
  SOTTO_TRY(read_key(meta, "compressed", &s.compressed));
  SOTTO_TRY(read_key(meta, "stage_started", &s.stage_started));
  SOTTO_TRY(read_key(meta, "scheduler_iteration", &s.scheduler_iteration));
  // States of before have none.
  if (meta.contains("skipped_steps")) SOTTO_TRY(read_key(meta, "skipped_steps", &s.skipped_steps));
  if (reader.has("user")) {
    SOTTO_ASSIGN(s.user, reader.values<std::byte>("user"));
    if (s.user.size() > kMaxUserState) {
      return invalid_argument("the state has {} bytes of the trainer's own; allowed: at most {}",
                              s.user.size(), kMaxUserState);
    }
  }
  const auto loss_scale = meta.find("loss_scale");
  if (loss_scale == meta.end() || !loss_scale->is_object())
    return invalid_argument("the state's description has no valid \"loss_scale\"");
  SOTTO_TRY(read_key(*loss_scale, "scale", &s.loss_scale.scale));
  SOTTO_TRY(read_key(*loss_scale, "iteration", &s.loss_scale.iteration));
  SOTTO_TRY(read_key(*loss_scale, "last_overflow", &s.loss_scale.last_overflow));
  const auto names = meta.find("names");
  if (names == meta.end() || !names->is_array())
    return invalid_argument("the state's description has no valid \"names\"");
  for (const StateJson& name : *names) {
    if (!name.is_string())
      return invalid_argument("the state's description has a name that is no string");
    s.names.push_back(name.get<std::string>());
  }
  SOTTO_ASSIGN(s.counts, reader.values<uint64_t>("counts"));
  for (const StatePart part : {StatePart::kParams, StatePart::kM, StatePart::kV, StatePart::kVf})
    SOTTO_TRY(take(part));
  SOTTO_ASSIGN(s.tensor_states, reader.values<TensorState>("tensor_states"));
  if (reader.has("padding_m")) SOTTO_TRY(take(StatePart::kPaddingM));
  if (reader.has("frozen_m")) {
    SOTTO_ASSIGN(s.frozen_m, reader.values<float>("frozen_m"));
  }
  if (const auto zeroone = meta.find("zeroone"); zeroone != meta.end()) {
    if (!zeroone->is_object())
      return invalid_argument("the state's description has no valid \"zeroone\"");
    SOTTO_TRY(read_key(*zeroone, "var_interval", &s.zeroone.var_interval));
    SOTTO_TRY(read_key(*zeroone, "var_counter", &s.zeroone.var_counter));
    SOTTO_TRY(read_key(*zeroone, "local_interval", &s.zeroone.local_interval));
    SOTTO_TRY(read_key(*zeroone, "local_counter", &s.zeroone.local_counter));
    SOTTO_TRY(read_key(*zeroone, "frozen", &s.zeroone.frozen));
    SOTTO_ASSIGN(s.lr_sums, reader.values<double>("lr_sums"));
    SOTTO_ASSIGN(s.anchor_decays, reader.values<double>("anchor_decays"));
    SOTTO_TRY(take(StatePart::kLocalSum));
    SOTTO_TRY(take(StatePart::kAnchor));
  }
  if (meta.contains("residual")) {
    SOTTO_ASSIGN(s.residual, read_residual_meta(meta));
    SOTTO_TRY(take(StatePart::kWorkerError));
    SOTTO_TRY(take(StatePart::kServerError));
  }
  if (reader.has("mean_worker_error")) {
    s.mean.emplace();
    SOTTO_TRY(take(StatePart::kMeanWorkerError));
    SOTTO_TRY(take(StatePart::kMeanServerError));
  }
  return s;
}

}  // namespace

std::vector<std::byte> encode_optim(const OptimSnapshot& s) {
  std::vector<std::byte> out;
  // Memory takes everything.
  (void)write(
      s, [&](StatePart part, const FloatSink& sink) { return sink(*s.part(part)); }, sink_of(&out));
  return out;
}

Result<OptimSnapshot> decode_optim(std::span<const std::byte> bytes) {
  SOTTO_ASSIGN(const BlobReader reader, BlobReader::open(bytes));
  SOTTO_ASSIGN(OptimSnapshot s, read_description(reader));
  for (const StatePart part : kAllParts) {
    if (std::exchange(s.outside[static_cast<size_t>(part)], 0) == 0) continue;
    SOTTO_ASSIGN(*s.part(part), reader.values<float>(name_of(part)));
  }
  return s;
}

Status export_state(Optimizer& optimizer, StateMode mode, const ByteSink& sink) {
  const StateErrors errors = exported_errors(mode);
  SOTTO_ASSIGN(const OptimSnapshot s, optimizer.describe(errors));
  return write(
      s, [&](StatePart part, const FloatSink& to) { return optimizer.stream(part, errors, to); },
      sink);
}

Result<std::vector<std::byte>> export_state(Optimizer& optimizer, StateMode mode) {
  std::vector<std::byte> out;
  SOTTO_ASSIGN(const uint64_t bytes, state_bytes(optimizer, mode));
  out.reserve(bytes);
  SOTTO_TRY(export_state(optimizer, mode, sink_of(&out)));
  return out;
}

Result<uint64_t> state_bytes(Optimizer& optimizer, StateMode mode) {
  SOTTO_ASSIGN(const OptimSnapshot s, optimizer.describe(exported_errors(mode)));
  return size_of(sections_of(s, meta_of(s))).total();
}

Status import_state(Optimizer& optimizer, StateMode mode, const ByteSource& source,
                    uint64_t bytes) {
  SOTTO_ASSIGN(const BlobReader reader, BlobReader::open(source, bytes));
  SOTTO_ASSIGN(OptimSnapshot s, read_description(reader));
  // Of 0/1 Adam between synchronisations: what one rank has summed up becomes everybody's.
  s.local_sum_is_common = mode == StateMode::kCommon;
  return optimizer.restore(s, imported_errors(mode), [&](StatePart part) -> Result<FloatSource> {
    return FloatSource([&reader, part, at = uint64_t{0}](std::span<float> out) mutable {
      const uint64_t first = std::exchange(at, at + out.size_bytes());
      return reader.read(name_of(part), first, std::as_writable_bytes(out));
    });
  });
}

Status import_state(Optimizer& optimizer, StateMode mode, std::span<const std::byte> bytes) {
  const ByteSource source = [bytes](uint64_t offset, std::span<std::byte> out) {
    if (!out.empty()) std::memcpy(out.data(), bytes.data() + offset, out.size());
    return ok_status();
  };
  return import_state(optimizer, mode, source, bytes.size());
}

}  // namespace sotto
