#include "core/config/overlap.h"

#include "core/config/document.h"
#include "core/config/sections.h"

namespace sotto {
namespace {

// {"type": word} for a word.
Status read_overlap_codec(const ObjectReader& reader, OverlapConfig& config, Findings& findings) {
  const Json* const value = reader.find("codec");
  if (value == nullptr) return ok_status();
  const std::string path = reader.path_of("codec");
  SOTTO_ASSIGN(config.codec, value->is_string() ? read_codec(Json{{"type", *value}}, path, findings)
                                                : read_codec(*value, path, findings));
  if (config.codec->compat) {
    return findings.fail(path + ".mode",
                         "found compat, which is the 1-bit optimizers' published arithmetic; "
                         "allowed here is strict");
  }
  if (!config.wire) return ok_status();
  return findings.fail(reader.path_of("wire"),
                       "the codec says what gradients are on the wire; leave one of them out");
}

}  // namespace

std::string_view overlap_order_name(OverlapOrder order) {
  switch (order) {
    case OverlapOrder::kReversed: return "reversed";
    case OverlapOrder::kRegistered: return "registered";
    case OverlapOrder::kObserved: break;
  }
  return "observed";
}

std::string_view overlap_unused_name(OverlapUnused unused) {
  return unused == OverlapUnused::kError ? "error" : "zero";
}

Result<OverlapConfig> parse_overlap(std::string_view text) {
  std::string twice;
  const Json json = parse_plain(text, &twice);
  if (json.is_discarded()) return invalid_argument("overlap: the description is no JSON");
  if (!twice.empty())
    return invalid_argument("overlap: the key {} is there twice; leave one of them out", twice);
  if (!json.is_object())
    return invalid_argument("overlap: found {}, allowed is an object", json_text(json));
  Findings findings;
  SOTTO_ASSIGN(const ObjectReader reader,
               ObjectReader::open(json, ConfigSection::kOverlap, ~0u, "overlap", findings));
  OverlapConfig config;
  reader.get("first_bucket_bytes", config.first_bucket_bytes);
  reader.get("bucket_bytes", config.bucket_bytes);
  read_word(reader, "order", config.order);
  read_word(reader, "unused", config.unused);
  config.wire = dtype_of_word(reader.word("wire"));
  SOTTO_TRY(read_overlap_codec(reader, config, findings));
  return config;
}

}  // namespace sotto
