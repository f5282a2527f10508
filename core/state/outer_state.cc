#include "core/state/outer_state.h"

#include <string>
#include <utility>

#include "core/base/json_text.h"
#include "core/state/meta.h"

namespace sotto {
namespace {

// Names of arrays in a state, by OuterArray. They stay.
constexpr std::string_view kArrayNames[] = {
    "anchor",      "momentum", "payload",   "previous", "result",   "last_step", "launch_anchor",
    "launch_live", "segments", "inner_sum", "message",  "messages", "swapped",   "sent"};
static_assert(std::size(kArrayNames) == kOuterArrays);

std::string section(size_t fragment, std::string_view name) {
  return fmt::format("outer.{}.{}", fragment, name);
}

StateJson rhythm_meta(const OuterRhythm& r) { return {{"period", r.period}, {"start", r.start}}; }

StateJson tuning_meta(const OuterTuning& t) {
  return {{"now", rhythm_meta(t.now)},
          {"past", rhythm_meta(t.past)},
          {"past_end", t.past_end},
          {"measuring", t.measuring},
          {"asked", t.asked}};
}

Status read_rhythm(const StateJson& meta, const char* key, OuterRhythm* r) {
  const auto found = meta.find(key);
  if (found == meta.end() || !found->is_object())
    return invalid_argument("the state's description has no valid \"{}\"", key);
  SOTTO_TRY(read_key(*found, "period", &r->period));
  return read_key(*found, "start", &r->start);
}

Result<OuterTuning> read_tuning(const StateJson& meta) {
  OuterTuning t;
  if (!meta.is_object()) return invalid_argument("the state's description has no valid \"tuning\"");
  SOTTO_TRY(read_rhythm(meta, "now", &t.now));
  SOTTO_TRY(read_rhythm(meta, "past", &t.past));
  SOTTO_TRY(read_key(meta, "past_end", &t.past_end));
  SOTTO_TRY(read_key(meta, "measuring", &t.measuring));
  SOTTO_TRY(read_key(meta, "asked", &t.asked));
  return t;
}

StateJson fragment_meta(const OuterFragmentState& f) {
  StateJson meta{{"launches", f.launches},
                 {"consumed", f.consumed},
                 {"pending", static_cast<uint64_t>(f.pending)},
                 {"compressed", f.compressed}};
  if (f.flushed != OuterFlushed::kNothing) meta["flushed"] = static_cast<uint64_t>(f.flushed);
  if (f.residual) meta["residual"] = residual_meta(*f.residual);
  return meta;
}

void add_fragment(size_t i, const OuterFragmentState& f, BlobWriter* writer) {
  for (size_t k = 0; k < kOuterArrays; ++k) {
    if (!f.arrays[k].empty()) writer->add(section(i, kArrayNames[k]), f.arrays[k]);
  }
  writer->add(section(i, "live"), f.live);
  if (!f.residual) return;
  writer->add(section(i, "worker_error"), f.residual->worker);
  writer->add(section(i, "server_error"), f.residual->server);
}

Result<OuterFragmentState> read_fragment(const BlobReader& reader, const StateJson& meta,
                                         size_t i) {
  OuterFragmentState f;
  uint64_t pending = 0, flushed = 0;
  SOTTO_TRY(read_key(meta, "launches", &f.launches));
  SOTTO_TRY(read_key(meta, "consumed", &f.consumed));
  SOTTO_TRY(read_key(meta, "pending", &pending));
  SOTTO_TRY(read_key(meta, "compressed", &f.compressed));
  if (meta.contains("period")) SOTTO_TRY(read_key(meta, "period", &f.period));
  if (meta.contains("flushed")) SOTTO_TRY(read_key(meta, "flushed", &flushed));
  if (flushed > static_cast<uint64_t>(OuterFlushed::kConsumed))
    return invalid_argument("the state's description has no valid \"flushed\"");
  f.flushed = static_cast<OuterFlushed>(flushed);
  if (pending > static_cast<uint64_t>(OuterPending::kUndelivered))
    return invalid_argument("the state's description has no valid \"pending\"");
  f.pending = static_cast<OuterPending>(pending);
  for (size_t k = 0; k < kOuterArrays; ++k) {
    const std::string name = section(i, kArrayNames[k]);
    if (!reader.has(name)) continue;
    SOTTO_ASSIGN(f.arrays[k], reader.values<std::byte>(name));
  }
  SOTTO_ASSIGN(f.live, reader.values<float>(section(i, "live")));
  if (!meta.contains("residual")) return f;
  SOTTO_ASSIGN(f.residual, read_residual_meta(meta));
  SOTTO_ASSIGN(f.residual->worker, reader.values<float>(section(i, "worker_error")));
  SOTTO_ASSIGN(f.residual->server, reader.values<float>(section(i, "server_error")));
  return f;
}

}  // namespace

std::vector<std::byte> encode_outer(const OuterSnapshot& s) {
  StateJson meta{{"kind", "outer"},
                 {"type", "outer"},
                 {"mode", "exact"},
                 {"rank", s.rank},
                 {"size", s.size},
                 {"step", s.step},
                 {"flushed_at", s.flushed_at},
                 {"swapped", s.swapped},
                 {"settings", s.settings}};
  meta["fragments"] = StateJson::array();
  for (const OuterFragmentState& f : s.fragments) {
    StateJson& fragment = meta["fragments"].emplace_back(fragment_meta(f));
    if (s.tuning) fragment["period"] = f.period;
  }
  if (s.lr) meta["lr"] = *s.lr;
  if (s.last_rate) meta["last_lr"] = *s.last_rate;
  if (s.tuning) meta["tuning"] = tuning_meta(*s.tuning);
  BlobWriter writer;
  writer.add("meta", std::string_view(dump_text(meta)));
  for (size_t i = 0; i < s.fragments.size(); ++i) add_fragment(i, s.fragments[i], &writer);
  return std::move(writer).finish();
}

Result<OuterSnapshot> decode_outer(std::span<const std::byte> bytes) {
  SOTTO_ASSIGN(const BlobReader reader, BlobReader::open(bytes));
  SOTTO_ASSIGN(const StateJson meta, meta_of(reader, "outer"));
  OuterSnapshot s;
  SOTTO_TRY(read_key(meta, "rank", &s.rank));
  SOTTO_TRY(read_key(meta, "size", &s.size));
  SOTTO_TRY(read_key(meta, "step", &s.step));
  SOTTO_TRY(read_key(meta, "flushed_at", &s.flushed_at));
  SOTTO_TRY(read_key(meta, "swapped", &s.swapped));
  SOTTO_TRY(read_key(meta, "settings", &s.settings));
  if (meta.contains("lr")) {
    SOTTO_TRY(read_key(meta, "lr", &s.lr.emplace()));
  }
  if (meta.contains("last_lr")) {
    SOTTO_TRY(read_key(meta, "last_lr", &s.last_rate.emplace()));
  }
  if (meta.contains("tuning")) {
    SOTTO_ASSIGN(s.tuning, read_tuning(meta["tuning"]));
  }
  const auto fragments = meta.find("fragments");
  if (fragments == meta.end() || !fragments->is_array())
    return invalid_argument("the state's description has no valid \"fragments\"");
  for (const StateJson& fragment : *fragments) {
    SOTTO_ASSIGN(OuterFragmentState f, read_fragment(reader, fragment, s.fragments.size()));
    s.fragments.push_back(std::move(f));
  }
  return s;
}

Result<std::vector<std::byte>> export_outer(Outer& outer, StateErrors errors) {
  SOTTO_ASSIGN(OuterSnapshot snapshot, outer.snapshot());
  for (OuterFragmentState& f : snapshot.fragments) {
    if (errors == StateErrors::kMean && f.residual) {
      return unsupported(
          "states with mean error feedback do not hold that of sotto.outer.codec; export exactly "
          "(SOTTO_STATE_EXACT), or without error feedback (SOTTO_STATE_RESET)");
    }
    if (errors != StateErrors::kOwn) f.residual.reset();
  }
  return encode_outer(snapshot);
}

}  // namespace sotto
