#include "core/state/optim_state.h"

#include <nlohmann/json.hpp>

#include "core/base/text.h"

namespace sotto {
namespace {

using Json = nlohmann::ordered_json;

// Reads one number or string of the meta section; a missing or wrong one is an error that names the
// key.
template <class T>
Status read(const Json& meta, const char* key, T* out) {
  const auto it = meta.find(key);
  const bool fits = it != meta.end() && (std::is_same_v<T, std::string> ? it->is_string()
                                         : std::is_same_v<T, bool>      ? it->is_boolean()
                                         : std::is_same_v<T, int64_t> || std::is_same_v<T, int32_t>
                                             ? it->is_number_integer()
                                             : it->is_number_unsigned());
  if (!fits) return invalid_argument("the state's description has no valid \"{}\"", key);
  *out = it->template get<T>();
  return ok_status();
}

Result<Json> meta_of(const BlobReader& reader, const char* kind) {
  SOTTO_ASSIGN(const std::string text, reader.text("meta"));
  Json meta = Json::parse(text, nullptr, false);
  if (!meta.is_object()) return invalid_argument("the state's description cannot be read");
  std::string found;
  SOTTO_TRY(read(meta, "kind", &found));
  if (found != kind)
    return invalid_argument("the state is of kind \"{}\", \"{}\" is wanted", printable(found),
                            kind);
  return meta;
}

Json residual_meta(const OnebitResidual& r) {
  return {{"rank", r.rank},
          {"size", r.size},
          {"chunk_align", r.chunk_align},
          {"granularity", r.granularity},
          {"scale", r.scale}};
}

void add_residual(const OnebitResidual& r, BlobWriter* writer) {
  writer->add("worker_error", r.worker);
  writer->add("server_error", r.server);
}

Result<OnebitResidual> read_residual(const BlobReader& reader, const Json& meta) {
  OnebitResidual r;
  const auto it = meta.find("residual");
  if (it == meta.end() || !it->is_object())
    return invalid_argument("the state's description has no valid \"residual\"");
  SOTTO_TRY(read(*it, "rank", &r.rank));
  SOTTO_TRY(read(*it, "size", &r.size));
  SOTTO_TRY(read(*it, "chunk_align", &r.chunk_align));
  SOTTO_TRY(read(*it, "granularity", &r.granularity));
  SOTTO_TRY(read(*it, "scale", &r.scale));
  SOTTO_ASSIGN(r.worker, reader.values<float>("worker_error"));
  SOTTO_ASSIGN(r.server, reader.values<float>("server_error"));
  return r;
}

}  // namespace

std::vector<std::byte> encode_optim(const OptimSnapshot& s) {
  Json meta{{"kind", "optimizer"},
            {"algorithm", s.algorithm},
            {"step", s.step},
            {"step_offset", s.step_offset},
            {"compressed", s.compressed},
            {"stage_started", s.stage_started},
            {"scheduler_iteration", s.scheduler_iteration},
            {"names", s.names}};
  if (s.residual) meta["residual"] = residual_meta(*s.residual);
  BlobWriter writer;
  writer.add("meta", std::string_view(meta.dump(-1, ' ', false, Json::error_handler_t::replace)));
  writer.add("counts", s.counts);
  writer.add("params", s.params);
  writer.add("m", s.m);
  writer.add("v", s.v);
  writer.add("vf", s.vf);
  writer.add("tensor_states", s.tensor_states);
  if (s.residual) add_residual(*s.residual, &writer);
  return std::move(writer).finish();
}

Result<OptimSnapshot> decode_optim(std::span<const std::byte> bytes) {
  SOTTO_ASSIGN(const BlobReader reader, BlobReader::open(bytes));
  SOTTO_ASSIGN(const Json meta, meta_of(reader, "optimizer"));
  OptimSnapshot s;
  SOTTO_TRY(read(meta, "algorithm", &s.algorithm));
  SOTTO_TRY(read(meta, "step", &s.step));
  SOTTO_TRY(read(meta, "step_offset", &s.step_offset));
  SOTTO_TRY(read(meta, "compressed", &s.compressed));
  SOTTO_TRY(read(meta, "stage_started", &s.stage_started));
  SOTTO_TRY(read(meta, "scheduler_iteration", &s.scheduler_iteration));
  const auto names = meta.find("names");
  if (names == meta.end() || !names->is_array())
    return invalid_argument("the state's description has no valid \"names\"");
  for (const Json& name : *names) {
    if (!name.is_string())
      return invalid_argument("the state's description has a name that is no string");
    s.names.push_back(name.get<std::string>());
  }
  SOTTO_ASSIGN(s.counts, reader.values<uint64_t>("counts"));
  SOTTO_ASSIGN(s.params, reader.values<float>("params"));
  SOTTO_ASSIGN(s.m, reader.values<float>("m"));
  SOTTO_ASSIGN(s.v, reader.values<float>("v"));
  SOTTO_ASSIGN(s.vf, reader.values<float>("vf"));
  SOTTO_ASSIGN(s.tensor_states, reader.values<TensorState>("tensor_states"));
  if (meta.contains("residual")) {
    SOTTO_ASSIGN(s.residual, read_residual(reader, meta));
  }
  return s;
}

Result<std::vector<std::byte>> export_state(Optimizer& optimizer, StateMode mode) {
  SOTTO_ASSIGN(const OptimSnapshot snapshot, optimizer.snapshot(mode == StateMode::kExact));
  return encode_optim(snapshot);
}

Status import_state(Optimizer& optimizer, StateMode mode, std::span<const std::byte> bytes) {
  SOTTO_ASSIGN(const OptimSnapshot snapshot, decode_optim(bytes));
  return optimizer.restore(snapshot, mode == StateMode::kExact);
}

Result<std::vector<std::byte>> export_state(OnebitCodec& codec, StateMode mode) {
  SOTTO_ASSIGN(const OnebitCodec::Snapshot s, codec.snapshot());
  const bool exact = mode == StateMode::kExact;
  Json meta{{"kind", "codec"}, {"type", "1bit"}, {"has_residual", exact}};
  OnebitResidual r = s.residual;
  meta["residual"] = residual_meta(r);
  BlobWriter writer;
  writer.add("meta", std::string_view(meta.dump()));
  writer.add("counts", s.counts);
  if (!exact) {
    r.worker.clear();
    r.server.clear();
  }
  add_residual(r, &writer);
  return std::move(writer).finish();
}

Status import_state(OnebitCodec& codec, StateMode mode, std::span<const std::byte> bytes) {
  SOTTO_ASSIGN(const BlobReader reader, BlobReader::open(bytes));
  SOTTO_ASSIGN(const Json meta, meta_of(reader, "codec"));
  OnebitCodec::Snapshot s;
  SOTTO_ASSIGN(s.residual, read_residual(reader, meta));
  SOTTO_ASSIGN(s.counts, reader.values<uint64_t>("counts"));
  return codec.restore(s, mode == StateMode::kExact);
}

}  // namespace sotto
