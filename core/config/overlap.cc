#include "core/config/overlap.h"

#include "core/config/document.h"
#include "core/config/sections.h"

namespace sotto {

std::string_view overlap_order_name(OverlapOrder order) {
  return order == OverlapOrder::kReversed ? "reversed" : "registered";
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
  return config;
}

}  // namespace sotto
