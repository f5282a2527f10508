#include "core/config/overlap_section.h"

#include <algorithm>

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

Result<OverlapConfig> parse(std::string_view text, const auto& read) {
  std::string twice;
  SOTTO_ASSIGN(const Json json, parse_plain(text, "overlap", &twice));
  if (json.is_discarded()) return invalid_argument("overlap: the description is no JSON");
  if (!twice.empty())
    return invalid_argument("overlap: the key {} is there twice; leave one of them out", twice);
  if (!json.is_object())
    return invalid_argument("overlap: found {}, allowed is an object", json_text(json));
  Findings findings;
  return read(json, findings);
}

Result<ObjectReader> read_buckets(const Json& json, const std::string& path, OverlapConfig* config,
                                  Findings& findings) {
  SOTTO_ASSIGN(ObjectReader reader,
               ObjectReader::open(json, ConfigSection::kOverlap, ~0u, path, findings));
  reader.get("first_bucket_bytes", config->first_bucket_bytes);
  reader.get("bucket_bytes", config->bucket_bytes);
  if (reader.find("first_bucket_bytes") == nullptr)
    config->first_bucket_bytes = std::min(config->first_bucket_bytes, config->bucket_bytes);
  read_word(reader, "order", config->order);
  read_word(reader, "unused", config->unused);
  return reader;
}

}  // namespace

Result<OverlapConfig> parse_overlap(std::string_view text) {
  return parse(text, [](const Json& json, Findings& findings) -> Result<OverlapConfig> {
    OverlapConfig config;
    SOTTO_ASSIGN(const ObjectReader reader, read_buckets(json, "overlap", &config, findings));
    config.wire = dtype_of_word(reader.word("wire"));
    SOTTO_TRY(read_overlap_codec(reader, config, findings));
    return config;
  });
}

Result<OverlapConfig> parse_step_overlap(std::string_view text, const Config& optimizer) {
  return parse(text, [&](const Json& json, Findings& findings) {
    return read_step_overlap(json, "overlap", optimizer, findings);
  });
}

Result<OverlapConfig> read_step_overlap(const Json& json, const std::string& path,
                                        const Config& optimizer, Findings& findings) {
  OverlapConfig config;
  SOTTO_ASSIGN(const ObjectReader reader, read_buckets(json, path, &config, findings));
  const bool one_bit = optimizer_is_one_bit(optimizer.optimizer.kind);
  if (reader.find("codec") != nullptr) {
    return findings.fail(
        reader.path_of("codec"),
        one_bit ? "found with a 1-bit optimizer, which compresses gradients itself; leave it out"
                : "rounds are steps of the optimizer, which says what gradients are compressed "
                  "with: set sotto.gradient_codec");
  }
  if (reader.find("wire") != nullptr) {
    return findings.fail(reader.path_of("wire"),
                         "rounds are steps of the optimizer, which says what gradients are on the "
                         "wire: set communication_data_type");
  }
  if (!one_bit || optimizer.sotto.granularity != Granularity::kBucket) return config;
  for (const std::string_view key : {"first_bucket_bytes", "bucket_bytes"}) {
    if (reader.find(key) == nullptr) continue;
    return findings.fail(reader.path_of(key),
                         "buckets of a 1-bit optimizer are those that have scales of their own: "
                         "set sotto.bucket_elements");
  }
  config.bucket_bytes = config.first_bucket_bytes = optimizer.sotto.bucket_elements * 4;
  return config;
}

Json overlap_json(const OverlapConfig& config) {
  return {{"first_bucket_bytes", config.first_bucket_bytes},
          {"bucket_bytes", config.bucket_bytes},
          {"order", overlap_order_name(config.order)},
          {"unused", overlap_unused_name(config.unused)}};
}

}  // namespace sotto
