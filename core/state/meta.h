// The description inside a state blob, and the error feedback that follows it.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "core/base/text.h"
#include "core/codec/compressed_state.h"
#include "core/state/blob.h"

namespace sotto {

using StateJson = nlohmann::ordered_json;

// Reads one number or string of the meta section; a missing or wrong one is an error that names the
// key.
template <class T>
Status read_key(const StateJson& meta, const char* key, T* out) {
  const auto it = meta.find(key);
  const bool fits = it != meta.end() && (std::is_same_v<T, std::string> ? it->is_string()
                                         : std::is_same_v<T, bool>      ? it->is_boolean()
                                         : std::is_same_v<T, double>    ? it->is_number()
                                         : std::is_same_v<T, int64_t> || std::is_same_v<T, int32_t>
                                             ? it->is_number_integer()
                                             : it->is_number_unsigned());
  if (!fits) return invalid_argument("the state's description has no valid \"{}\"", key);
  *out = it->template get<T>();
  return ok_status();
}

inline Result<StateJson> meta_of(const BlobReader& reader, const char* kind) {
  SOTTO_ASSIGN(const std::string text, reader.text("meta"));
  StateJson meta = StateJson::parse(text, nullptr, false);
  if (!meta.is_object()) return invalid_argument("the state's description cannot be read");
  std::string found;
  SOTTO_TRY(read_key(meta, "kind", &found));
  if (found != kind)
    return invalid_argument("the state is of kind \"{}\", \"{}\" is wanted", printable(found),
                            kind);
  return meta;
}

inline StateJson residual_meta(const ErrorFeedback& r) {
  StateJson meta{{"rank", r.rank},
                 {"size", r.size},
                 {"chunk_align", r.chunk_align},
                 {"granularity", r.granularity},
                 {"bucket_elements", r.bucket_elements},
                 {"scale", r.scale}};
  if (!r.hierarchy.empty()) meta["hierarchy"] = r.hierarchy;
  return meta;
}

inline void add_residual(const ErrorFeedback& r, BlobWriter* writer) {
  writer->add("worker_error", r.worker);
  writer->add("server_error", r.server);
}

// Without its values.
inline Result<ErrorFeedback> read_residual_meta(const StateJson& meta) {
  ErrorFeedback r;
  const auto it = meta.find("residual");
  if (it == meta.end() || !it->is_object())
    return invalid_argument("the state's description has no valid \"residual\"");
  SOTTO_TRY(read_key(*it, "rank", &r.rank));
  SOTTO_TRY(read_key(*it, "size", &r.size));
  SOTTO_TRY(read_key(*it, "chunk_align", &r.chunk_align));
  SOTTO_TRY(read_key(*it, "granularity", &r.granularity));
  if (it->contains("bucket_elements"))
    SOTTO_TRY(read_key(*it, "bucket_elements", &r.bucket_elements));
  SOTTO_TRY(read_key(*it, "scale", &r.scale));
  if (it->contains("hierarchy")) SOTTO_TRY(read_key(*it, "hierarchy", &r.hierarchy));
  return r;
}

inline Result<ErrorFeedback> read_residual(const BlobReader& reader, const StateJson& meta) {
  SOTTO_ASSIGN(ErrorFeedback r, read_residual_meta(meta));
  SOTTO_ASSIGN(r.worker, reader.values<float>("worker_error"));
  SOTTO_ASSIGN(r.server, reader.values<float>("server_error"));
  return r;
}

}  // namespace sotto
