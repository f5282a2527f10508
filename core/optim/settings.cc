#include "core/optim/settings.h"

#include <algorithm>

#include "core/base/hash.h"
#include "core/base/text.h"

namespace sotto {
namespace {

// Groups whose values are listed; of the others there is a hash.
constexpr size_t kListedGroups = 256;
constexpr size_t kValueShown = 120;

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
  std::string take() && { return std::move(text_); }

 private:
  std::string text_;
};

void add_scheduler(const SchedulerConfig& c, Lines* lines) {
  lines->add("scheduler.type", scheduler_kind_name(c.kind));
  lines->add("scheduler.params.warmup_min_lr", c.warmup_min_lr);
  lines->add("scheduler.params.warmup_max_lr", c.warmup_max_lr);
  lines->add("scheduler.params.warmup_num_steps", c.warmup_num_steps);
  lines->add("scheduler.params.warmup_type", c.warmup_type == WarmupType::kLog ? "log" : "linear");
  lines->add("scheduler.params.total_num_steps", c.total_num_steps);
  lines->add("scheduler.params.warmup_min_ratio", c.warmup_min_ratio);
  lines->add("scheduler.params.cos_min_ratio", c.cos_min_ratio);
  lines->add("scheduler.params.cycle_min_lr", c.cycle_min_lr);
  lines->add("scheduler.params.cycle_max_lr", c.cycle_max_lr);
  lines->add("scheduler.params.decay_lr_rate", c.decay_lr_rate);
  lines->add("scheduler.params.cycle_first_step_size", c.cycle_first_step_size);
  lines->add("scheduler.params.cycle_second_step_size", c.cycle_second_step_size);
  lines->add("scheduler.params.decay_step_size", c.decay_step_size);
  lines->add("scheduler.params.cycle_momentum", c.cycle_momentum);
  lines->add("scheduler.params.cycle_min_mom", c.cycle_min_mom);
  lines->add("scheduler.params.cycle_max_mom", c.cycle_max_mom);
  lines->add("scheduler.params.decay_mom_rate", c.decay_mom_rate);
  lines->add("scheduler.params.lr_range_test_min_lr", c.lr_range_test_min_lr);
  lines->add("scheduler.params.lr_range_test_step_size", c.lr_range_test_step_size);
  lines->add("scheduler.params.lr_range_test_step_rate", c.lr_range_test_step_rate);
  lines->add("scheduler.params.lr_range_test_staircase", c.lr_range_test_staircase);
}

void add_codec(const std::optional<CodecSettings>& codec, Lines* lines) {
  lines->add("sotto.gradient_codec.type", codec ? codec_name(codec->kind) : "none");
  if (!codec) return;
  lines->add("sotto.gradient_codec.scale", scale_name(codec->scale));
  lines->add("sotto.gradient_codec.granularity", granularity_name(codec->granularity));
  lines->add("sotto.gradient_codec.bucket_elements", codec->bucket_elements);
  lines->add("sotto.gradient_codec.chunk_align", codec->chunk_align);
  lines->add("sotto.gradient_codec.block", codec->block);
  lines->add("sotto.gradient_codec.residual", codec->residual);
}

void add_sotto(const SottoConfig& own, const std::optional<CodecSettings>& codec, Lines* lines) {
  lines->add("sotto.mode", mode_name(own.mode));
  lines->add("sotto.chunk_align", own.chunk_align);
  lines->add("sotto.granularity", codec ? granularity_name(codec->granularity) : "none");
  lines->add("sotto.bucket_elements", own.bucket_elements);
  lines->add("sotto.scale", scale_name(own.scale));
  lines->add("sotto.step_offset", own.step_offset);
  lines->add("sotto.zero_variance_policy", own.zero_variance_policy);
  lines->add("sotto.coeff_debias", own.coeff_debias);
  lines->add("sotto.max_consecutive_skips", own.max_consecutive_skips);
  lines->add("sotto.state_dtype", own.state_dtype);
  lines->add("sotto.initial_parameters", initial_parameters_name(own.initial_parameters));
  add_codec(own.gradient_codec, lines);
}

void add_group(const OptimizerParams& g, size_t index, Lines* lines) {
  const auto add = [&](std::string_view key, const auto& value) {
    lines->add(fmt::format("optimizer.params.{} of parameter group {}", key, index), value);
  };
  add("lr", g.lr);
  add("betas[0]", g.beta1);
  add("betas[1]", g.beta2);
  add("eps", g.eps);
  add("weight_decay", g.weight_decay);
  add("bias_correction", g.bias_correction);
  add("eps_inside_sqrt", g.eps_inside_sqrt);
  add("adam_w_mode", g.adam_w_mode);
  add("max_coeff", g.max_coeff);
  add("min_coeff", g.min_coeff);
  add("freeze_step", g.freeze_step);
  add("non_freeze", g.non_freeze);
  add("coeff_beta", g.coeff_beta);
  add("factor_max", g.factor_max);
  add("factor_min", g.factor_min);
  add("factor_threshold", g.factor_threshold);
  add("var_freeze_step", g.var_freeze_step);
  add("var_update_scaler", g.var_update_scaler);
  add("local_step_scaler", g.local_step_scaler);
  add("local_step_clipper", g.local_step_clipper);
  add("momentum", g.momentum);
  add("dampening", g.dampening);
  add("nesterov", g.nesterov);
}

std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  for (size_t end = 0; (end = text.find('\n')) != std::string_view::npos;
       text.remove_prefix(end + 1))
    lines.push_back(text.substr(0, end));
  return lines;
}

}  // namespace

std::string step_settings(const Config& config, const std::vector<OptimizerParams>& groups,
                          const LossScaler& loss_scaler, Dtype gradients,
                          const std::optional<CodecSettings>& codec) {
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
  Lines others;
  for (size_t g = 0; g < groups.size(); ++g)
    add_group(groups[g], g, g < kListedGroups ? &lines : &others);
  lines.add(fmt::format("hash of the parameter groups from {} on", kListedGroups),
            hash64(std::move(others).take()));
  return std::move(lines).take();
}

Status explain_settings(Comm& comm, const std::string& mine, const std::vector<uint64_t>& bytes) {
  std::string padded = mine;
  padded.resize(*std::max_element(bytes.begin(), bytes.end()));
  SOTTO_ASSIGN(const std::vector<std::string> all, comm.exchange(padded, OpKind::kOptimCreate));
  const auto text_of = [&](size_t r) { return std::string_view(all[r]).substr(0, bytes[r]); };
  const std::vector<std::string_view> first = lines_of(text_of(0));
  for (size_t r = 1; r < all.size(); ++r) {
    const std::vector<std::string_view> other = lines_of(text_of(r));
    const auto [a, b] = std::mismatch(first.begin(), first.end(), other.begin(), other.end());
    if (a == first.end() || b == other.end()) continue;
    const size_t key = a->find('=');
    const std::string_view name = a->substr(0, key);
    const size_t other_key = b->find('=');
    if (b->substr(0, other_key) != name) continue;  // more groups, or a codec: named before
    return error(Code::kProtocol,
                 "ranks 0 and {} have different configurations: {} is {} on rank 0 "
                 "and {} on rank {}",
                 r, name, printable(a->substr(key + 1), kValueShown),
                 printable(b->substr(other_key + 1), kValueShown), r);
  }
  return error(Code::kProtocol, "ranks have configurations with other optimizer settings");
}

}  // namespace sotto
