#include "core/state/overlap_state.h"

#include <utility>

#include "core/base/json_text.h"
#include "core/state/meta.h"

namespace sotto {
namespace {

std::vector<std::byte> encode(const OverlapSnapshot& s, StateMode mode) {
  StateJson meta{{"kind", "overlap"}, {"type", "overlap"}, {"mode", mode_name(mode)}};
  meta["residual"] = residual_meta(s.errors);
  if (s.observes) meta["observes"] = *s.observes;
  std::vector<uint64_t> sizes;
  std::vector<uint32_t> gradients;
  for (const std::vector<uint32_t>& bucket : s.buckets) {
    sizes.push_back(bucket.size());
    gradients.insert(gradients.end(), bucket.begin(), bucket.end());
  }
  BlobWriter writer;
  writer.add("meta", std::string_view(dump_text(meta)));
  writer.add("counts", s.counts);
  writer.add("bucket_sizes", sizes);
  writer.add("bucket_gradients", gradients);
  add_residual(s.errors, &writer);
  if (!s.observed.empty()) writer.add("observed_order", s.observed);
  return std::move(writer).finish();
}

Status read_buckets(const BlobReader& reader, OverlapSnapshot* s) {
  SOTTO_ASSIGN(const std::vector<uint64_t> sizes, reader.values<uint64_t>("bucket_sizes"));
  SOTTO_ASSIGN(const std::vector<uint32_t> gradients, reader.values<uint32_t>("bucket_gradients"));
  auto at = gradients.begin();
  for (const uint64_t size : sizes) {
    if (size > static_cast<uint64_t>(gradients.end() - at))
      return invalid_argument("the state's buckets have more gradients than it names");
    const auto end = at + static_cast<std::ptrdiff_t>(size);
    s->buckets.emplace_back(at, end);
    at = end;
  }
  return ok_status();
}

}  // namespace

Result<uint64_t> mean_state_bytes(const Overlap& overlap) {
  SOTTO_ASSIGN(const OverlapSnapshot s, overlap.empty_mean());
  return encode(s, StateMode::kMean).size();
}

Result<std::vector<std::byte>> export_state(const Overlap& overlap, StateMode mode) {
  if (mode == StateMode::kMean) {
    SOTTO_ASSIGN(const OverlapSnapshot s, overlap.mean());
    return encode(s, mode);
  }
  SOTTO_ASSIGN(OverlapSnapshot s, overlap.snapshot());
  if (mode == StateMode::kReset) {
    s.errors.worker.clear();
    s.errors.server.clear();
  }
  return encode(s, mode);
}

Status import_state(Overlap& overlap, StateMode mode, std::span<const std::byte> bytes) {
  SOTTO_ASSIGN(const BlobReader reader, BlobReader::open(bytes));
  SOTTO_ASSIGN(const StateJson meta, meta_of(reader, "overlap"));
  OverlapSnapshot s;
  SOTTO_ASSIGN(s.errors, read_residual(reader, meta));
  SOTTO_ASSIGN(s.counts, reader.values<uint64_t>("counts"));
  SOTTO_TRY(read_buckets(reader, &s));
  if (meta.contains("observes")) {
    SOTTO_TRY(read_key(meta, "observes", &s.observes.emplace()));
  }
  if (reader.has("observed_order")) {
    SOTTO_ASSIGN(s.observed, reader.values<uint32_t>("observed_order"));
  }
  if (mode == StateMode::kReset) return overlap.restore(s, false);
  std::string found;
  SOTTO_TRY(read_key(meta, "mode", &found));
  if (found != mode_name(mode)) {
    return invalid_argument("the state was exported in mode {}; it cannot be imported in mode {}",
                            printable(found), mode_name(mode));
  }
  return mode == StateMode::kExact ? overlap.restore(s, true) : overlap.restore_mean(s);
}

}  // namespace sotto
