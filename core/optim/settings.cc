#include "core/optim/settings.h"

#include <algorithm>
#include <span>

#include "core/base/hash.h"
#include "core/base/small_vector.h"
#include "core/base/text.h"

namespace sotto {
namespace {

constexpr size_t kValueShown = 120;
constexpr size_t kGroupBytes = 4096;  // longer than the text of any group

class Lines {
 public:
  template <class T>
  void add(std::string_view key, const T& value) {
    if constexpr (std::is_enum_v<T>) {
      text_ += fmt::format("{}={}\n", key, static_cast<int64_t>(value));
    } else {
      text_ += fmt::format("{}={}\n", key, value);
    }
  }
  void add(std::string_view key, const std::vector<double>& values) {
    text_ += fmt::format("{}=[", key);
    for (size_t i = 0; i < values.size(); ++i)
      text_ += fmt::format("{}{}", i == 0 ? "" : ", ", values[i]);
    text_ += "]\n";
  }
  void add_all(const std::string& lines) { text_ += lines; }
  std::string take() && { return std::move(text_); }

 private:
  std::string text_;
};

void add_scheduler(const SchedulerConfig& c, Lines* lines) {
  lines->add("scheduler.type", scheduler_kind_name(c.kind));
  lines->add("scheduler.params.warmup_min_lr", c.warmup.min_lr);
  lines->add("scheduler.params.warmup_max_lr", c.warmup.max_lr);
  lines->add("scheduler.params.warmup_num_steps", c.warmup.num_steps);
  lines->add("scheduler.params.warmup_type", c.warmup.type == WarmupType::kLog ? "log" : "linear");
  lines->add("scheduler.params.total_num_steps", c.warmup.total_num_steps);
  lines->add("scheduler.params.warmup_min_ratio", c.warmup.min_ratio);
  lines->add("scheduler.params.cos_min_ratio", c.warmup.cos_min_ratio);
  lines->add("scheduler.params.cycle_min_lr", c.cycle.min_lr);
  lines->add("scheduler.params.cycle_max_lr", c.cycle.max_lr);
  lines->add("scheduler.params.decay_lr_rate", c.cycle.decay_lr_rate);
  lines->add("scheduler.params.cycle_first_step_size", c.cycle.first_step_size);
  lines->add("scheduler.params.cycle_second_step_size", c.cycle.second_step_size);
  lines->add("scheduler.params.decay_step_size", c.cycle.decay_step_size);
  lines->add("scheduler.params.cycle_momentum", c.cycle.momentum);
  lines->add("scheduler.params.cycle_min_mom", c.cycle.min_mom);
  lines->add("scheduler.params.cycle_max_mom", c.cycle.max_mom);
  lines->add("scheduler.params.decay_mom_rate", c.cycle.decay_mom_rate);
  lines->add("scheduler.params.lr_range_test_min_lr", c.range_test.min_lr);
  lines->add("scheduler.params.lr_range_test_step_size", c.range_test.step_size);
  lines->add("scheduler.params.lr_range_test_step_rate", c.range_test.step_rate);
  lines->add("scheduler.params.lr_range_test_staircase", c.range_test.staircase);
}

void add_sotto(const SottoConfig& own, const std::optional<CodecSettings>& codec, Lines* lines) {
  lines->add("sotto.mode", mode_name(own.mode));
  // What settings below follow from comes first.
  lines->add("sotto.outer", own.outer ? own.outer->preset : "none");
  lines->add_all(codec_settings("sotto.gradient_codec", own.gradient_codec));
  lines->add("sotto.chunk_align", own.chunk_align);
  lines->add("sotto.granularity", codec ? granularity_name(codec->granularity) : "none");
  lines->add("sotto.bucket_elements", own.bucket_elements);
  lines->add("sotto.scale", scale_name(own.scale));
  lines->add("sotto.step_offset", own.step_offset);
  lines->add("sotto.zero_variance_policy", own.zero_variance_policy);
  lines->add("sotto.coeff_debias", own.coeff_debias);
  lines->add("sotto.max_consecutive_skips", own.max_consecutive_skips);
  lines->add("sotto.state_dtype", state_type_name(own.state_dtype));
  lines->add("sotto.initial_parameters", initial_parameters_name(own.initial_parameters));
  lines->add("sotto.hierarchy", hierarchy_name(own.hierarchy));
}

std::string text_of(const OptimizerParams& group) {
  Lines lines;
  OptimizerParams::each(group, [&](std::string_view key, const auto& value) {
    lines.add(fmt::format("optimizer.params.{}", key), value);
  });
  return std::move(lines).take();
}

std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  for (size_t end = 0; (end = text.find('\n')) != std::string_view::npos;
       text.remove_prefix(end + 1))
    lines.push_back(text.substr(0, end));
  return lines;
}

// The error that names the first line in which the texts of two ranks differ. Texts have the same
// keys up to there. of: what the keys are of.
Status name_difference(std::span<const std::string_view> texts, std::string_view of) {
  const std::vector<std::string_view> first = lines_of(texts[0]);
  for (size_t r = 1; r < texts.size(); ++r) {
    const std::vector<std::string_view> other = lines_of(texts[r]);
    const auto [a, b] = std::mismatch(first.begin(), first.end(), other.begin(), other.end());
    if (a == first.end() || b == other.end()) continue;
    const auto value = [](std::string_view line) {
      return printable(line.substr(line.find('=') + 1), kValueShown);
    };
    return error(Code::kProtocol,
                 "ranks 0 and {} have different configurations: {}{} is {} on rank 0 and {} on "
                 "rank {}",
                 r, a->substr(0, a->find('=')), of, value(*a), value(*b), r);
  }
  return error(Code::kInternal, "hashes of settings differ, but no setting{}", of);
}

}  // namespace

std::string codec_settings(std::string_view path, const std::optional<CodecSettings>& codec,
                           bool selection) {
  Lines lines;
  const auto add = [&](std::string_view key, const auto& value) {
    lines.add(fmt::format("{}.{}", path, key), value);
  };
  add("type", codec ? codec_name(codec->kind) : "none");
  if (!codec) return std::move(lines).take();
  if (codec->row().sparse && selection) for_each_setting(codec->sparse, add);
  add("scale", scale_name(codec->scale));
  add("granularity", granularity_name(codec->granularity));
  add("bucket_elements", codec->bucket_elements);
  add("chunk_align", codec->chunk_align);
  add("block", codec->block);
  add("residual", codec->residual);
  if (selection) add("hierarchy", hierarchy_name(codec->hierarchy));
  return std::move(lines).take();
}

std::string common_settings(const Config& config, uint64_t n_groups, const LossScaler& loss_scaler,
                            Dtype gradients, const std::optional<CodecSettings>& codec) {
  Lines lines;
  lines.add("optimizer.type", optimizer_kind_name(config.optimizer.kind));
  lines.add("dtype of the gradients", dtype_name(gradients));
  lines.add("gradient_clipping", config.gradient_clipping);
  lines.add("communication_data_type", config.communication_data_type
                                           ? dtype_name(*config.communication_data_type)
                                           : "the gradients' own");
  lines.add("gradient_predivide_factor", config.gradient_predivide_factor);
  lines.add("prescale_gradients", config.prescale_gradients);
  lines.add("fp16: dynamic loss scale", loss_scaler.dynamic());
  lines.add("fp16: loss scale", loss_scaler.scale());
  lines.add("fp16.loss_scale_window", config.fp16.loss_scale_window);
  lines.add("fp16.min_loss_scale", config.fp16.min_loss_scale);
  add_sotto(config.sotto, codec, &lines);
  add_scheduler(config.scheduler, &lines);
  lines.add("number of parameter groups (sotto.param_groups)", n_groups);
  return std::move(lines).take();
}

uint64_t hash_of_settings(const OptimizerParams& group) {
  SmallVector<double, 32> values;
  OptimizerParams::each(group, [&](std::string_view, const auto& value) {
    values.push_back(static_cast<double>(value));
  });
  return hash64(values.data(), values.size() * sizeof(double));
}

Status explain_common_settings(Comm& comm, OpKind kind, const std::string& mine,
                               const std::vector<uint64_t>& bytes) {
  std::string padded = mine;
  padded.resize(*std::max_element(bytes.begin(), bytes.end()));
  SOTTO_ASSIGN(const std::vector<std::string> all, comm.exchange(padded, kind));
  std::vector<std::string_view> texts;
  for (size_t r = 0; r < all.size(); ++r)
    texts.push_back(std::string_view(all[r]).substr(0, bytes[r]));
  return name_difference(texts, "");
}

Status explain_groups(Comm& comm, OpKind kind, const std::vector<OptimizerParams>& mine) {
  std::vector<uint64_t> hashes;
  for (const OptimizerParams& group : mine) hashes.push_back(hash_of_settings(group));
  const uint64_t bytes = hashes.size() * sizeof(uint64_t);
  SOTTO_ASSIGN(const std::vector<std::string> all,
               comm.exchange({reinterpret_cast<const char*>(hashes.data()), bytes}, kind));
  size_t different = bytes;  // the first byte in which a rank differs from rank 0
  for (const std::string& other : all) {
    const auto at = std::mismatch(all[0].begin(), all[0].end(), other.begin()).first;
    different = std::min(different, static_cast<size_t>(at - all[0].begin()));
  }
  const size_t group = std::min(different / sizeof(uint64_t), mine.size() - 1);
  std::string text = text_of(mine[group]);
  text.resize(kGroupBytes);
  SOTTO_ASSIGN(const std::vector<std::string> texts, comm.exchange(text, kind));
  const std::vector<std::string_view> views(texts.begin(), texts.end());
  return name_difference(views, fmt::format(" of parameter group {}", group));
}

}  // namespace sotto
