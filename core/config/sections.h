// Between the source files of this folder: readers of single sections, and what stands in the way
// of a configuration.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/config/config.h"
#include "core/config/reader.h"

namespace sotto {

// Each reads one object of the file into `config`.
Status read_optimizer(const Json& object, Config& config, Findings& findings);
Status read_scheduler(const Json& object, Config& config, Findings& findings);
Status read_sotto(const Json& object, Config& config, Findings& findings);
Result<CodecSettings> read_codec(const Json& object, const std::string& path, Findings& findings);
// Of a codec whose averages have the hierarchy of the file.
Status refuse_hierarchy(const CodecSettings& codec, const std::string& path, Findings& findings);
Result<OuterConfig> read_outer(const Json& object, const std::string& path, Findings& findings);
// Of the "sotto" section; of an optimizer whose keys have been read.
Result<OverlapConfig> read_step_overlap(const Json& object, const std::string& path,
                                        const Config& optimizer, Findings& findings);
// What outer steps and the rest of a file have to do with each other.
Status check_outer_in_file(const Config& config, Findings& findings);
void warn_outer_in_file(const Config& config, Findings& findings);
// Exports as configured, of DeepSpeed's programs and in Python, would be refused after hours of
// training.
void warn_of_refused_states(const SottoConfig& sotto, Findings& findings);

// The file as a whole, with its warnings and keys in `findings`. text: without comments.
Result<Config> read_file(const Json& json, std::string_view text, Findings& findings);

// Elements, of "sotto" and of a codec.
Status read_chunk_align(const ObjectReader& reader, uint64_t& out, Findings& findings);

// The type that a word of "fp32|fp16|bf16" names.
std::optional<Dtype> dtype_of_word(std::optional<uint32_t> word);

// A word of the table, whose words are in the order of the enum, which starts at 1.
template <class Enum>
void read_word(const ObjectReader& reader, std::string_view key, Enum& out) {
  if (const auto word = reader.word(key)) out = static_cast<Enum>(*word + 1);
}

// Group `index` of resolve_groups; the status has the path of the group in front.
Result<OptimizerParams> resolve_group(const Config& config, uint64_t index);

// What DeepSpeed's optimizer of this type compresses as one: kFlat stands for a parameter group, or
// for 1-bit LAMB for everything.
Granularity published_granularity(OptimizerKind kind, bool half);

struct Obstacle {
  std::string path;
  std::string value;
  std::string supported;
  std::string text() const;
};
std::vector<Obstacle> find_obstacles(const Config& config);
// Of outer steps, whose object has this path.
std::vector<Obstacle> find_obstacles(const OuterConfig& outer, std::string_view path);

// Parts of a report. 0: unknown.
Json codec_json(const CodecSettings& codec);
Json outer_json(const OuterConfig& outer, uint64_t world, uint64_t n_params);
Json overlap_json(const OverlapConfig& overlap);

std::string_view zero_variance_policy_name(ZeroVariancePolicy policy);
std::string_view checkpoint_name(CheckpointErrors checkpoint);

}  // namespace sotto
