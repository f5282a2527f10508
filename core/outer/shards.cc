#include "core/outer/shards.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "core/base/text.h"
#include "core/optim/agreement.h"
#include "core/outer/settings.h"

namespace sotto {

Status check_shards(const OuterConfig& c) {
  const auto refuse = [](std::string_view key, const auto& found, std::string_view allowed) {
    return unsupported(
        "sotto.outer.{}: found {}, which every shard of the parameters would decide for itself; "
        "allowed where parameters are shards: {}",
        key, found, allowed);
  };
  if (takes_gap(c.penalty) && c.penalty.granularity == OuterGranularity::kTensor)
    return refuse("granularity", "\"tensor\"", "\"global\", or \"element\" with \"gap_rel\"");
  const bool clips = c.clip.kind == OuterClip::kNorm || c.clip.kind == OuterClip::kRms;
  if (c.rule.freshness > 0 && (clips || takes_gap(c.penalty)))
    return refuse("freshness", c.rule.freshness,
                  "0, or clip \"none\" or \"coord\" with penalty \"none\" or \"const\"");
  if (c.schedule.automatic) return refuse("period", "\"auto\"", "a number");
  if (c.fragments.count > 1 && c.fragments.lists.empty())
    return refuse("fragments", c.fragments.count, "1, or lists of indices of parameters");
  if (c.nonfinite == OuterNonfinite::kError)
    return refuse("nonfinite", "\"error\"", "\"skip_rank\", \"pass\"");
  return ok_status();
}

std::string settings_of_shards(const OuterConfig& config, const ParameterSet& parameters) {
  const std::string text = outer_settings_text(config, parameters, true);
  // The first line has names and sizes.
  return fmt::format("number of parameters={}\n{}", parameters.size(),
                     text.substr(text.find('\n') + 1));
}

Status agree_on_shards(Comm& shards, const Result<std::string>& settings) {
  const ParameterSet none({}, {});
  Result<CreationTerms> terms = CreationTerms{};
  if (settings.ok()) {
    terms->parameters = &none;
    terms->settings = *settings;
  } else {
    terms = settings.status();
  }
  return agree(shards, OpKind::kOuterCreate, terms);
}

Result<std::map<uint32_t, OuterShards>> sizes_of_shards(Comm& shards, const OuterConfig& config,
                                                        const ParameterSet& parameters) {
  std::vector<uint64_t> counts;
  for (const ParamSpec& p : parameters) counts.push_back(p.count);
  SOTTO_ASSIGN(const std::vector<std::vector<uint64_t>> cut, config.cut(counts));
  struct Size {
    uint64_t blocks = 0, elements = 0;
  };
  std::vector<Size> own;
  for (const std::vector<uint64_t>& fragment : cut) {
    std::vector<LayoutTensor> tensors;
    for (const uint64_t t : fragment) tensors.push_back({counts[t], 0});
    // Norm blocks are those of tensors, however chunks of a codec lie.
    const CompressedLayout layout = outer_layout(config, std::move(tensors), 1);
    own.push_back({layout.tensor_blocks(), layout.elements()});
  }
  const uint64_t bytes = own.size() * sizeof(Size);
  SOTTO_ASSIGN(
      const std::vector<std::string> all,
      shards.exchange({reinterpret_cast<const char*>(own.data()), bytes}, OpKind::kOuterCreate));
  std::map<uint32_t, OuterShards> sizes;
  for (size_t f = 0; f < own.size(); ++f) {
    OuterShards of{shards.rank(), shards.size()};
    for (const std::string& other : all) {
      Size size;
      std::memcpy(&size, other.data() + f * sizeof size, sizeof size);
      of.blocks = std::max(of.blocks, size.blocks);
      of.elements += size.elements;
    }
    sizes[static_cast<uint32_t>(cut[f].front())] = of;
  }
  return sizes;
}

}  // namespace sotto
