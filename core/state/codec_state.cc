// State of a codec as a blob.
#include "core/base/json_text.h"
#include "core/state/meta.h"
#include "core/state/optim_state.h"

namespace sotto {
namespace {

std::vector<std::byte> encode(const Codec& codec, StateMode mode, const ErrorFeedback& r) {
  StateJson meta{{"kind", "codec"}, {"type", "codec"}, {"mode", mode_name(mode)}};
  meta["residual"] = residual_meta(r);
  BlobWriter writer;
  writer.add("meta", std::string_view(dump_text(meta)));
  writer.add("counts", codec.counts());
  add_residual(r, &writer);
  return std::move(writer).finish();
}

std::vector<std::byte> encode_mean(const Codec& codec, MeanErrorFeedback mean) {
  ErrorFeedback r;  // of no rank and no layout
  r.size = 0;
  r.worker = std::move(mean.worker);
  r.server = std::move(mean.server);
  return encode(codec, StateMode::kMean, r);
}

}  // namespace

uint64_t mean_state_bytes(const Codec& codec) {
  const uint64_t n = codec.elements();
  return encode_mean(codec, {std::vector<float>(n), std::vector<float>(n)}).size();
}

Result<std::vector<std::byte>> export_state(Codec& codec, StateMode mode) {
  if (mode == StateMode::kMean) {
    SOTTO_ASSIGN(MeanErrorFeedback mean, codec.mean());
    return encode_mean(codec, std::move(mean));
  }
  SOTTO_ASSIGN(Codec::Snapshot s, codec.snapshot());
  if (mode == StateMode::kReset) {
    s.residual.worker.clear();
    s.residual.server.clear();
  }
  return encode(codec, mode, s.residual);
}

Status import_state(Codec& codec, StateMode mode, std::span<const std::byte> bytes) {
  SOTTO_ASSIGN(const BlobReader reader, BlobReader::open(bytes));
  SOTTO_ASSIGN(const StateJson meta, meta_of(reader, "codec"));
  Codec::Snapshot s;
  SOTTO_ASSIGN(s.residual, read_residual(reader, meta));
  SOTTO_ASSIGN(s.counts, reader.values<uint64_t>("counts"));
  if (mode == StateMode::kReset) return codec.restore(s, false);
  std::string found = "exact";
  if (meta.contains("mode")) SOTTO_TRY(read_key(meta, "mode", &found));
  if (found != mode_name(mode)) {
    return invalid_argument("the state was exported in mode {}; it cannot be imported in mode {}",
                            printable(found), mode_name(mode));
  }
  if (mode == StateMode::kExact) return codec.restore(s, true);
  return codec.restore_mean(s.counts, {std::move(s.residual.worker), std::move(s.residual.server)});
}

}  // namespace sotto
