#include <nlohmann/json.hpp>

#include "core/optim/optimizer.h"

namespace sotto {
namespace {

nlohmann::ordered_json group_json(const OptimizerParams& p, double lr) {
  return {{"lr", lr},
          {"betas", {p.beta1, p.beta2}},
          {"eps", p.eps},
          {"weight_decay", p.weight_decay},
          {"max_coeff", p.max_coeff},
          {"min_coeff", p.min_coeff}};
}

}  // namespace

Result<std::string> Optimizer::report_json(std::string_view kind) {
  const bool all = kind == "all";
  if (!all && kind != "config" && kind != "groups" && kind != "tensors") {
    return invalid_argument("report kind \"{}\" is unknown; allowed: all, config, groups, tensors",
                            kind);
  }
  if (busy()) return error(Code::kBusy, "a step of this optimizer is in flight");
  nlohmann::ordered_json report;
  if (all || kind == "config") {
    report["type"] = optimizer_kind_name(config_.optimizer.kind);
    if (onebit()) report["mode"] = mode_name(config_.sotto.mode);
    report["stage"] = compressed_ ? "compressed" : "full precision";
    report["step"] = step_;
    report["gradient_clipping"] = config_.gradient_clipping;
    report["scheduler"] = scheduler_kind_name(config_.scheduler.kind);
    if (config_.scheduler.kind != SchedulerKind::kNone)
      report["scheduler_iteration"] = schedule_.last_batch_iteration();
    if (state_type() != StateType::kF32) report["state_dtype"] = state_type_name(state_type());
    if (loss_scaler_.enabled()) report["loss_scale"] = loss_scaler_.scale();
    if (zeroone()) {
      const ZeroOneCounters& c = zeroone_.counters();
      report["stage"] = c.frozen ? "local steps" : "variance updates";
      report["var_freeze_step"] = groups_[0].var_freeze_step;
      report["var_interval"] = c.var_interval;
      report["local_interval"] = c.local_interval;
    } else if (onebit()) {
      report["freeze_step"] = groups_[0].freeze_step;
    }
    if (codec_) {
      report["codec"] = codec_name(codec_->kind);
      if (codec_->kind == CodecKind::kOnebit) {
        report["granularity"] = granularity_name(codec_->granularity);
        report["scale"] = scale_name(codec_->scale);
      }
      if (codec_has_blocks(codec_->kind)) report["block"] = codec_->block;
      report["chunk_align"] = codec_->chunk_align;
      report["chunk_elements"] = layout_->chunk_elements();
    }
  }
  if (all || kind == "groups") {
    report["groups"] = nlohmann::ordered_json::array();
    for (size_t g = 0; g < groups_.size(); ++g)
      report["groups"].push_back(group_json(params_of(g), lr_of(g)));
  }
  if (all || kind == "tensors") {
    SOTTO_ASSIGN(const std::vector<TensorState> states,
                 access_.download<TensorState>(memory_.tensor_states.data(), params_.size()));
    report["tensors"] = nlohmann::ordered_json::array();
    for (size_t t = 0; t < params_.size(); ++t) {
      nlohmann::ordered_json tensor{
          {"name", params_[t].name}, {"count", params_[t].count}, {"group", params_[t].group}};
      if (!frozen_.empty() && frozen_[t] != 0) tensor["frozen"] = true;
      if (t < last_steps_.size() && !tensor.contains("frozen")) {
        tensor["trust_ratio"] = last_steps_[t].trust_ratio;
        if (compressed_) tensor["factor"] = last_steps_[t].factor;
      }
      if (onebit()) {
        tensor["c_avg"] = states[t].c_avg;
        tensor["last_factor"] = states[t].last_factor;
        tensor["scaling_coeff"] = states[t].scaling_coeff;
      }
      report["tensors"].push_back(tensor);
    }
  }
  return report.dump();
}

}  // namespace sotto
