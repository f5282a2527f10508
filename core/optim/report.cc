#include <cmath>
#include <nlohmann/json.hpp>

#include "core/base/json_text.h"
#include "core/optim/optimizer.h"

namespace sotto {
namespace {

nlohmann::ordered_json group_json(const OptimizerParams& p, double lr) {
  return {{"lr", lr},
          {"betas", {p.beta1, p.beta2}},
          {"eps", p.eps},
          {"weight_decay", p.weight_decay},
          {"max_coeff", p.lamb.max_coeff},
          {"min_coeff", p.lamb.min_coeff}};
}

}  // namespace

Result<std::string> Optimizer::report_json(std::string_view kind) {
  const bool all = kind == "all";
  if (!all && kind != "config" && kind != "groups" && kind != "tensors") {
    return invalid_argument("report kind \"{}\" is unknown; allowed: all, config, groups, tensors",
                            kind);
  }
  SOTTO_TRY(check_idle());
  nlohmann::ordered_json report;
  if (all || kind == "config") {
    report["type"] = optimizer_kind_name(data_.config.optimizer.kind);
    if (data_.one_bit()) report["mode"] = mode_name(data_.config.sotto.mode);
    report["stage"] = algorithm_->stage();
    report["step"] = data_.step;
    report["gradient_clipping"] = data_.config.gradient_clipping;
    report["scheduler"] = scheduler_kind_name(data_.config.scheduler.kind);
    if (data_.config.scheduler.kind != SchedulerKind::kNone)
      report["scheduler_iteration"] = data_.groups.schedule().last_batch_iteration();
    if (data_.arrays["m"].type != StateType::kF32)
      report["state_dtype"] = state_type_name(data_.arrays["m"].type);
    if (loss_scaler_.enabled()) report["loss_scale"] = loss_scaler_.scale();
    algorithm_->report_settings(&report);
    if (!data_.levels.flat()) {
      report["hierarchy"] = hierarchy_name(data_.levels.kind);
      report["ranks_per_host"] = data_.levels.per_host();
      report["hosts"] = data_.levels.host_count();
    }
    if (data_.codec) {
      report["codec"] = codec_name(data_.codec->kind);
      if (data_.codec->row().scales) {
        report["granularity"] = granularity_name(data_.codec->granularity);
        report["scale"] = scale_name(data_.codec->scale);
      }
      if (data_.codec->row().block != 0) report["block"] = data_.codec->block;
      report["chunk_align"] = data_.codec->chunk_align;
      report["chunk_elements"] = data_.layout->chunk_elements();
    }
  }
  if (all || kind == "groups") {
    report["groups"] = nlohmann::ordered_json::array();
    for (size_t g = 0; g < data_.groups.size(); ++g)
      report["groups"].push_back(group_json(data_.groups.params(g), data_.groups.lr(g)));
  }
  if (all || kind == "tensors") {
    SOTTO_ASSIGN(const std::vector<TensorState> states,
                 data_.access.download<TensorState>(data_.arrays.data("tensor_states"),
                                                    data_.parameters.size()));
    report["tensors"] = nlohmann::ordered_json::array();
    for (size_t t = 0; t < data_.parameters.size(); ++t) {
      nlohmann::ordered_json tensor{{"name", data_.parameters[t].name},
                                    {"count", data_.parameters[t].count},
                                    {"group", data_.parameters[t].group}};
      if (data_.parameters.frozen(static_cast<uint32_t>(t))) tensor["frozen"] = true;
      if (t < outcomes_.last_steps.size() && !tensor.contains("frozen") &&
          !std::isnan(outcomes_.last_steps[t].trust_ratio)) {
        tensor["trust_ratio"] = outcomes_.last_steps[t].trust_ratio;
        if (algorithm_->late()) tensor["factor"] = outcomes_.last_steps[t].factor;
      }
      algorithm_->report_tensor(states[t], &tensor);
      report["tensors"].push_back(tensor);
    }
  }
  return dump_text(report);
}

}  // namespace sotto
