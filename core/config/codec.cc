#include "core/config/codec.h"

#include <algorithm>
#include <bit>

#include "core/config/document.h"
#include "core/config/sections.h"

namespace sotto {
namespace {

constexpr uint64_t kDefaultBucket = uint64_t{1} << 22;

// The codec that has the word at `position` among the words of all.
CodecKind kind_of_word(uint32_t position) {
  for (const CodecRow* row = kCodecs;; ++row) {
    const auto words = 1 + static_cast<uint32_t>(std::ranges::count(row->words, '|'));
    if (position < words) return row->kind;
    position -= words;
  }
}

// The type comes first: it says which other keys there are.
Result<CodecKind> read_type(const Json& object, const std::string& path, Findings& findings) {
  const Json* type = object.contains("type") ? &object["type"] : nullptr;
  const std::string type_path = path + ".type";
  const Json only = type == nullptr ? Json::object() : Json{{"type", *type}};
  Findings unused;
  Result<ObjectReader> reader = ObjectReader::open(only, ConfigSection::kCodec, ~0u, path, unused);
  if (!reader.ok()) {
    findings.error_path = type_path;
    return reader.status();
  }
  if (const auto word = reader->word("type")) return kind_of_word(*word);
  return findings.fail(type_path, fmt::format("missing; write one of {}",
                                              find_key(ConfigSection::kCodec, "type", ~0u)->words));
}

Status read_scales(const ObjectReader& reader, CodecSettings& s, Findings& findings) {
  read_word(reader, "scale", s.scale);
  read_word(reader, "granularity", s.granularity);
  const bool buckets = s.granularity == Granularity::kBucket;
  if (buckets) s.bucket_elements = kDefaultBucket;
  reader.get("bucket_elements", s.bucket_elements);
  if (!buckets && reader.has("bucket_elements")) {
    return findings.fail(reader.path_of("bucket_elements"),
                         fmt::format("belongs to granularity bucket, but granularity is {}; leave "
                                     "it out",
                                     granularity_name(s.granularity)));
  }
  Mode mode = Mode::kStrict;
  read_word(reader, "mode", mode);
  s.compat = mode == Mode::kCompat;
  if (!s.compat) return ok_status();
  if (buckets)
    return findings.fail(reader.path_of("granularity"),
                         "in mode compat: found bucket, allowed is flat, tensor");
  if (!reader.has("chunk_align")) return ok_status();
  return findings.fail(reader.path_of("chunk_align"),
                       "in mode compat: it is lcm(number of ranks, 8), remove the key");
}

Status read_blocks(const ObjectReader& reader, CodecSettings& s, Findings& findings) {
  uint64_t block = s.row().block;
  reader.get("block", block);
  if (!std::has_single_bit(block)) {
    return findings.fail(reader.path_of("block"),
                         fmt::format("found {}, allowed is 32, 64, 128, 256, 512", block));
  }
  s.block = static_cast<uint32_t>(block);
  if (s.chunk_align % block == 0) return ok_status();
  return findings.fail(
      reader.path_of("chunk_align"),
      fmt::format("found {}, allowed is a multiple of block, {}", s.chunk_align, block));
}

// Keys of servers, and those that have no sense with them.
Status read_servers(const ObjectReader& reader, SparseSettings& s, Findings& findings) {
  uint64_t k = 0;
  reader.get("k_server", k);
  if (!s.has_servers()) {
    if (k == 0) return ok_status();
    return findings.fail(reader.path_of("k_server"),
                         fmt::format("found {} with exchange gather, which has no servers; allowed "
                                     "is 0, or exchange two_phase",
                                     k));
  }
  if (s.median_clip) {
    return findings.fail(reader.path_of("median_clip"),
                         "found true with exchange two_phase, allowed is false");
  }
  // Fewer would lose in the mean what ranks have sent (specification sparse-loco, 6.4).
  const uint64_t least = std::min(2 * s.k, s.block);
  if (k != 0 && (k < least || k > s.block)) {
    return findings.fail(reader.path_of("k_server"),
                         fmt::format("found {} with k {} and block {}, allowed is 0 or {} to {}", k,
                                     s.k, s.block, least, s.block));
  }
  s.k_server = static_cast<uint32_t>(k);
  return ok_status();
}

Status read_sparse(const ObjectReader& reader, CodecSettings& s, Findings& findings) {
  SparseSettings& sparse = s.sparse;
  uint64_t block = sparse.block, k = sparse.k, bits = sparse.bits;
  reader.get("block", block);
  if (!std::has_single_bit(block)) {
    return findings.fail(reader.path_of("block"),
                         fmt::format("found {}, allowed is a power of two from {} to {}", block,
                                     kMinSparseBlock, kMaxSparseBlock));
  }
  reader.get("k", k);
  if (k > block) {
    return findings.fail(
        reader.path_of(reader.has("k") ? "k" : "block"),
        fmt::format("found k {} with block {}, allowed is k from 1 to block", k, block));
  }
  reader.get("bits", bits);
  if (bits != 2 && bits != 4 && bits != 8 && bits != 32) {
    return findings.fail(reader.path_of("bits"),
                         fmt::format("found {}, allowed is 2, 4, 8, 32", bits));
  }
  sparse.block = static_cast<uint32_t>(block);
  sparse.k = static_cast<uint32_t>(k);
  sparse.bits = static_cast<uint32_t>(bits);
  reader.get("error_decay", sparse.error_decay);
  read_word(reader, "index", sparse.index);
  read_word(reader, "average", sparse.average);
  reader.get("dense_below", sparse.dense_below);
  reader.get("median_clip", sparse.median_clip);
  read_word(reader, "exchange", sparse.exchange);
  s.chunk_align = kSparseAlign;
  return read_servers(reader, sparse, findings);
}

}  // namespace

Result<CodecSettings> read_codec(const Json& object, const std::string& path, Findings& findings) {
  CodecSettings s;
  SOTTO_ASSIGN(s.kind, read_type(object, path, findings));
  SOTTO_ASSIGN(const ObjectReader reader,
               ObjectReader::open(object, ConfigSection::kCodec, kind_bit(s.kind), path, findings));
  SOTTO_TRY(read_chunk_align(reader, s.chunk_align, findings));
  s.residual = s.row().residual != ResidualUse::kOnRequest;
  reader.get("residual", s.residual);
  if (s.row().scales) SOTTO_TRY(read_scales(reader, s, findings));
  if (s.row().block != 0) SOTTO_TRY(read_blocks(reader, s, findings));
  if (s.row().sparse) SOTTO_TRY(read_sparse(reader, s, findings));
  read_word(reader, "hierarchy", s.hierarchy);
  if (s.compat && s.hierarchy != Hierarchy::kFlat) {
    return findings.fail(
        reader.path_of("hierarchy"),
        fmt::format("in mode compat: found {}, allowed is flat", hierarchy_name(s.hierarchy)));
  }
  return s;
}

Status refuse_hierarchy(const CodecSettings& codec, const std::string& path, Findings& findings) {
  if (codec.hierarchy == Hierarchy::kFlat) return ok_status();
  return findings.fail(
      path + ".hierarchy",
      fmt::format("found {}, allowed here is flat; sotto.hierarchy is for all averages",
                  hierarchy_name(codec.hierarchy)));
}

Result<CodecSettings> parse_codec(std::string_view text) {
  std::string twice;
  SOTTO_ASSIGN(const Json json, parse_plain(text, "codec", &twice));
  if (json.is_discarded()) return invalid_argument("codec: the description is no JSON");
  if (!twice.empty())
    return invalid_argument("codec: the key {} is there twice; leave one of them out", twice);
  if (!json.is_object())
    return invalid_argument("codec: found {}, allowed is an object", json_text(json));
  Findings findings;
  return read_codec(json, "codec", findings);
}

}  // namespace sotto
