#include "core/group/codec_settings.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "core/base/text.h"

namespace sotto {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kTypes[] = {"onebit", "bf16", "fp16", "int8", "int4"};
constexpr CodecKind kKinds[] = {CodecKind::kOnebit, CodecKind::kBf16, CodecKind::kFp16,
                                CodecKind::kInt8, CodecKind::kInt4};
constexpr std::string_view kOldName = "1bit";  // of "onebit"

constexpr uint64_t kDefaultBucket = uint64_t{1} << 22;
constexpr uint64_t kLargestBucket = uint64_t{1} << 40;
constexpr uint64_t kLargestAlign = uint64_t{1} << 30;
constexpr uint64_t kSmallestBlock = 32;

// For which types a key has a meaning.
struct Key {
  std::string_view name;
  bool onebit, casts, blocks;
};
constexpr Key kKeys[] = {
    {"type", true, true, true},          {"chunk_align", true, true, true},
    {"mode", true, false, false},        {"scale", true, false, false},
    {"granularity", true, false, false}, {"bucket_elements", true, false, false},
    {"block", false, false, true},       {"residual", false, true, true},
};

bool applies(const Key& key, CodecKind kind) {
  if (kind == CodecKind::kOnebit) return key.onebit;
  return codec_has_blocks(kind) ? key.blocks : key.casts;
}

std::string in_quotes(std::span<const std::string_view> words) {
  std::string text;
  for (const std::string_view word : words)
    text += fmt::format("{}\"{}\"", text.empty() ? "" : ", ", word);
  return text;
}

// Index of the word under a key; `fallback` without it.
Result<size_t> take_word(const Json& json, const char* key, std::span<const std::string_view> words,
                         size_t fallback) {
  const auto it = json.find(key);
  if (it == json.end()) return fallback;
  const std::string* word = it->get_ptr<const std::string*>();
  const auto found = word == nullptr ? words.end() : std::find(words.begin(), words.end(), *word);
  if (found == words.end())
    return invalid_argument("codec: \"{}\" is {}; allowed: {}", key, printable(it->dump()),
                            in_quotes(words));
  return static_cast<size_t>(found - words.begin());
}

template <class Fits>
Result<uint64_t> take_number(const Json& json, const char* key, uint64_t fallback,
                             const char* allowed, Fits&& fits) {
  const auto it = json.find(key);
  if (it == json.end()) return fallback;
  if (!it->is_number_unsigned() || !fits(it->get<uint64_t>()))
    return invalid_argument("codec: \"{}\" is {}; allowed: {}", key, printable(it->dump()),
                            allowed);
  return it->get<uint64_t>();
}

Result<CodecKind> take_type(const Json& json) {
  const auto it = json.find("type");
  if (it == json.end())
    return invalid_argument("codec: the key \"type\" is missing; allowed: {}", in_quotes(kTypes));
  const std::string* word = it->get_ptr<const std::string*>();
  if (word != nullptr && *word == kOldName) return CodecKind::kOnebit;
  const auto found =
      word == nullptr ? std::end(kTypes) : std::find(std::begin(kTypes), std::end(kTypes), *word);
  if (found == std::end(kTypes)) {
    return unsupported("codec: \"type\" is {}; there are {}", printable(it->dump()),
                       in_quotes(kTypes));
  }
  return kKinds[found - std::begin(kTypes)];
}

Status check_keys(const Json& json, CodecKind kind) {
  std::vector<std::string_view> names;
  for (const Key& key : kKeys) {
    if (applies(key, kind)) names.push_back(key.name);
  }
  for (const auto& item : json.items()) {
    const std::string& name = item.key();
    if (std::find(names.begin(), names.end(), name) != names.end()) continue;
    const auto* known = std::find_if(std::begin(kKeys), std::end(kKeys),
                                     [&](const Key& key) { return key.name == name; });
    if (known == std::end(kKeys)) {
      return invalid_argument("codec: unknown key \"{}\"; the nearest known one is \"{}\"",
                              printable(name), nearest_word(name, names));
    }
    return invalid_argument("codec: the key \"{}\" has no meaning for type \"{}\"; that takes {}",
                            name, codec_name(kind), in_quotes(names));
  }
  return ok_status();
}

Status take_mode(const Json& json, OnebitSettings* s) {
  constexpr std::string_view kModes[] = {"strict", "compat"};
  SOTTO_ASSIGN(const size_t mode, take_word(json, "mode", kModes, 0));
  s->compat = mode == 1;
  if (!s->compat) return ok_status();
  if (s->granularity == OnebitGranularity::kBucket)
    return invalid_argument(
        "codec: \"mode\" is \"compat\", whose arithmetic has no \"granularity\" \"bucket\"; "
        "allowed: \"flat\", \"tensor\"");
  if (json.contains("chunk_align"))
    return invalid_argument(
        "codec: \"chunk_align\" is set, but in \"mode\" \"compat\" it is lcm(number of ranks, 8); "
        "remove it");
  return ok_status();
}

Status take_onebit(const Json& json, OnebitSettings* s) {
  constexpr std::string_view kScales[] = {"l2", "l1"};
  constexpr std::string_view kGranularities[] = {"flat", "tensor", "bucket"};
  constexpr OnebitGranularity kValues[] = {OnebitGranularity::kFlat, OnebitGranularity::kTensor,
                                           OnebitGranularity::kBucket};
  SOTTO_ASSIGN(const size_t scale, take_word(json, "scale", kScales, 0));
  SOTTO_ASSIGN(const size_t granularity, take_word(json, "granularity", kGranularities, 0));
  s->scale = scale == 0 ? ScaleKind::kL2 : ScaleKind::kL1;
  s->granularity = kValues[granularity];
  SOTTO_TRY(take_mode(json, s));
  if (s->granularity != OnebitGranularity::kBucket) {
    if (!json.contains("bucket_elements")) return ok_status();
    return invalid_argument(
        "codec: \"bucket_elements\" is set, but \"granularity\" is \"{}\"; it belongs to "
        "\"bucket\"",
        kGranularities[granularity]);
  }
  SOTTO_ASSIGN(s->bucket_elements, take_number(json, "bucket_elements", kDefaultBucket,
                                               "a whole number from 8192 to 2^40", [](uint64_t n) {
                                                 return n >= kNormBlock && n <= kLargestBucket;
                                               }));
  return ok_status();
}

Status take_blocks(const Json& json, OnebitSettings* s) {
  SOTTO_ASSIGN(const uint64_t block,
               take_number(json, "block", s->kind == CodecKind::kInt8 ? 256 : 128,
                           "32, 64, 128, 256, 512", [](uint64_t n) {
                             return std::has_single_bit(n) && n >= kSmallestBlock &&
                                    n <= kMaxQuantBlock;
                           }));
  s->block = static_cast<uint32_t>(block);
  if (s->chunk_align % block != 0) {
    return invalid_argument(
        "codec: \"chunk_align\" is {}, which is no multiple of \"block\", {}; choose a multiple",
        s->chunk_align, block);
  }
  return ok_status();
}

}  // namespace

std::string_view codec_name(CodecKind kind) {
  return kTypes[std::find(std::begin(kKinds), std::end(kKinds), kind) - std::begin(kKinds)];
}

Result<OnebitSettings> parse_codec(std::string_view text) {
  const Json json = Json::parse(text, nullptr, false);
  if (!json.is_object()) return invalid_argument("codec: the description is no JSON object");
  OnebitSettings s;
  SOTTO_ASSIGN(s.kind, take_type(json));
  SOTTO_TRY(check_keys(json, s.kind));
  SOTTO_ASSIGN(s.chunk_align,
               take_number(json, "chunk_align", 512, "a positive multiple of 8 up to 2^30",
                           [](uint64_t n) { return n != 0 && n % 8 == 0 && n <= kLargestAlign; }));
  if (s.kind == CodecKind::kOnebit) {
    SOTTO_TRY(take_onebit(json, &s));
    return s;
  }
  if (codec_has_blocks(s.kind)) SOTTO_TRY(take_blocks(json, &s));
  // Casts lose little, and a residual costs 4 bytes per element.
  s.residual = codec_has_blocks(s.kind);
  if (const auto it = json.find("residual"); it != json.end()) {
    if (!it->is_boolean())
      return invalid_argument("codec: \"residual\" is {}; allowed: true, false",
                              printable(it->dump()));
    s.residual = it->get<bool>();
  }
  return s;
}

}  // namespace sotto
