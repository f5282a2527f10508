// Creation and settings. Steps are in optimizer_step.cc, state in optimizer_state.cc, reports in
// report.cc.
#include "core/optim/optimizer.h"

#include <algorithm>
#include <cmath>

#include "core/base/log.h"
#include "core/base/text.h"
#include "core/optim/agreement.h"

namespace sotto {
namespace {

// Groups are those of the file; a file without any leaves them to the program, which has at most
// one for every parameter. So memory is in proportion to what was given.
Result<uint64_t> count_groups(const Config& config, const std::vector<ParamSpec>& params) {
  const uint64_t named = config.sotto.param_groups.size();
  const uint64_t allowed = named != 0 ? named : std::max<uint64_t>(1, params.size());
  uint64_t n_groups = std::max<uint64_t>(1, named);
  for (size_t i = 0; i < params.size(); ++i) {
    const ParamSpec& p = params[i];
    if (p.group >= allowed) {
      return invalid_argument(
          "parameter {} (\"{}\"): group is {}; allowed: 0 to {}, {}", i, printable(p.name), p.group,
          allowed - 1,
          named != 0 ? fmt::format("since sotto.param_groups has {}", counted(named, "group"))
                     : fmt::format("one group for each of {}: the configuration has no "
                                   "sotto.param_groups",
                                   counted(params.size(), "parameter")));
    }
    n_groups = std::max<uint64_t>(n_groups, uint64_t{p.group} + 1);
  }
  return n_groups;
}

// What callers may set of an optimizer.
std::string allowed_names(std::span<const std::string_view> of_groups) {
  std::string names;
  for (const std::string_view name : of_groups) names += fmt::format("\"{}\", ", name);
  return names + "\"scheduler_iteration\", \"loss_scale\"";
}

}  // namespace

Optimizer::Optimizer(OptimizerData data)
    : data_(std::move(data)),
      algorithm_(Algorithm::make(data_)),
      loss_scaler_(data_.config.fp16),
      plans_(data_, *algorithm_, loss_scaler_, accumulation_) {}

Result<std::shared_ptr<Optimizer>> Optimizer::create(
    std::shared_ptr<Comm> comm, std::string_view config_text, std::vector<ParamSpec> params,
    std::shared_ptr<Device> device, const Status& refused, const MakeOuterSteps& make_outer) {
  // All ranks meet, also one that has found a fault of its own or has no memory.
  const Result<std::shared_ptr<Optimizer>> made =
      caught([&]() -> Result<std::shared_ptr<Optimizer>> {
        SOTTO_TRY(refused);
        return make(comm, config_text, std::move(params), device, make_outer != nullptr);
      });
  const Result<CreationTerms> terms = caught([&]() -> Result<CreationTerms> {
    SOTTO_TRY(made.status());
    return creation_terms((*made)->data_, (*made)->loss_scaler_, comm->size());
  });
  SOTTO_TRY(agree(*comm, OpKind::kOptimCreate, terms));
  OptimizerData& d = (*made)->data_;
  d.group = comm;
  if (d.config.sotto.initial_parameters == InitialParameters::kBroadcast)
    SOTTO_TRY(d.parameters.broadcast(*comm, *d.layout));
  if (d.config.sotto.outer) {
    SOTTO_ASSIGN(d.group_levels, make_levels(d.config.sotto.hierarchy, comm->hosts()));
    SOTTO_ASSIGN(
        (*made)->outer_,
        make_outer(comm, d.config, {d.parameters.begin(), d.parameters.end()}, d.access.device()));
  }
  return made;
}

Result<std::shared_ptr<Optimizer>> Optimizer::make(std::shared_ptr<Comm> comm,
                                                   std::string_view config_text,
                                                   std::vector<ParamSpec> params,
                                                   std::shared_ptr<Device> device, bool has_outer) {
  SOTTO_ASSIGN(Config config, parse_config(config_text));
  SOTTO_TRY(check_supported(config));
  if (config.sotto.outer && !has_outer)
    return unsupported("sotto.outer: there are no outer steps for this optimizer");
  for (const std::string& warning : config.warnings) log(LogLevel::kWarn, "{}", warning);
  if (const std::string& wanted = config.sotto.transport;
      wanted != "auto" && wanted != comm->transport()) {
    return invalid_argument(
        "sotto.transport is \"{}\", but this comm runs on \"{}\"; create the comm with that "
        "transport, or set SOTTO_TRANSPORT",
        wanted, comm->transport());
  }
  SOTTO_ASSIGN(const std::optional<BatchNumbers> batch,
               config.resolve_batch(static_cast<uint64_t>(comm->size())));
  if (config.sotto.outer) comm = comm->alone();
  SOTTO_ASSIGN(const uint64_t n_groups, count_groups(config, params));
  SOTTO_ASSIGN(std::vector<OptimizerParams> groups, config.resolve_groups(n_groups));
  std::vector<double> base_lr;
  for (const OptimizerParams& g : groups) base_lr.push_back(g.lr);
  SOTTO_ASSIGN(LrSchedule schedule,
               LrSchedule::create(config.scheduler, std::move(base_lr), config.sotto.mode));
  DeviceAccess access(comm->context()->engine(), comm->context()->device_or_default(device));
  ParameterSet parameters(std::move(params), access);
  SOTTO_TRY(parameters.check(config.grad_accum_dtype));
  SOTTO_TRY(comm->takes(access.device()->caps()));
  std::shared_ptr<Optimizer> optimizer(new Optimizer(
      OptimizerData(std::move(comm), std::move(access), std::move(config), std::move(parameters),
                    ParamGroups(std::move(groups), std::move(schedule)))));
  if (batch) optimizer->accumulation_.steps = batch->gas;
  OptimizerData& d = optimizer->data_;
  SOTTO_TRY(d.lay_out(optimizer->algorithm_->masks_zero_variance()));
  SOTTO_TRY(d.allocate(optimizer->algorithm_->arrays()));
  SOTTO_TRY(optimizer->algorithm_->allocated());
  return optimizer;
}

Status Optimizer::check_idle() const {
  return busy() ? error(Code::kBusy, "a step of this optimizer is in flight") : ok_status();
}

Status Optimizer::set(std::string_view name, int32_t group, double value) {
  SOTTO_TRY(check_idle());
  const auto n = static_cast<int32_t>(data_.groups.size());
  if (group < -1 || group >= n)
    return invalid_argument("group is {}; allowed: -1 (all) to {}", group, n - 1);
  if (name == "loss_scale") {
    SOTTO_TRY(loss_scaler_.check(group, value));
    SOTTO_TRY(accumulation_.check_none(*data_.comm));
    loss_scaler_.set(value);
    return ok_status();
  }
  if (name == "scheduler_iteration") {
    if (data_.config.scheduler.kind == SchedulerKind::kNone)
      return invalid_argument("scheduler_iteration cannot be set: there is no scheduler");
    if (group != -1)
      return invalid_argument("group is {}; scheduler_iteration is one for all: -1", group);
    return data_.groups.set_iteration(value);
  }
  const std::span<const std::string_view> settable = algorithm_->settable();
  const auto first = static_cast<size_t>(group < 0 ? 0 : group);
  const auto last = static_cast<size_t>(group < 0 ? n : group + 1);
  for (size_t g = first; g < last; ++g) {
    SOTTO_TRY(data_.groups.check(name, g, value, settable, allowed_names(settable)));
    SOTTO_TRY(algorithm_->check_setting(name, g, value));
  }
  for (size_t g = first; g < last; ++g) data_.groups.set(name, g, value);
  return ok_status();
}

Status Optimizer::set_gradients(std::span<const GradientPlace> grads) {
  SOTTO_TRY(check_idle());
  return data_.parameters.set_gradients(grads);
}

Status Optimizer::set_parameters(std::span<const ParameterPlace> params,
                                 std::span<const ParameterPlace> copies) {
  SOTTO_TRY(check_idle());
  if (outer_ != nullptr) SOTTO_TRY(outer_->set_parameters(params, copies));
  return data_.parameters.set_parameters(params, copies);
}

Status Optimizer::set_frozen(std::span<const uint8_t> frozen) {
  SOTTO_TRY(check_idle());
  SOTTO_ASSIGN(std::vector<uint8_t> flags, data_.parameters.frozen_flags(frozen));
  if (flags == data_.parameters.frozen()) return ok_status();
  // What ranks have summed up since the last synchronisation is that of all parameters.
  if (!algorithm_->restored_with(flags) && algorithm_->synchronisation()) SOTTO_TRY(synchronise());
  SOTTO_TRY(algorithm_->freeze(flags));
  data_.parameters.set_frozen(std::move(flags));
  plans_.clear();
  return ok_status();
}

Status Optimizer::set_user_state(std::vector<std::byte> bytes) {
  SOTTO_TRY(check_idle());
  user_state_ = std::move(bytes);
  return ok_status();
}

Result<OptimInfo> Optimizer::info() {
  SOTTO_TRY(check_idle());
  OptimInfo info;
  info.stage = algorithm_->late() ? 1 : 0;
  info.step = data_.step;
  info.state_step = data_.state_step(data_.step);
  info.lr = data_.groups.lr(0);
  info.grad_norm = outcomes_.grad_norm;
  info.skipped_steps = outcomes_.skipped;
  info.loss_scale = loss_scaler_.scale();
  info.micro_batches = accumulation_.done;
  SOTTO_ASSIGN(const PreparedStep* p, next_plan(nullptr));
  PeerTraffic total = p->plan->plan().traffic.total;
  if (outer_ != nullptr) {
    SOTTO_ASSIGN(const PeerTraffic outer, outer_->next_traffic());
    total += outer;
    info.state_bytes = outer_->state_bytes();
  }
  info.payload_bytes_next_step = total.payload_bytes_sent;
  info.header_bytes_next_step = total.header_bytes_sent + total.metadata_bytes_sent;
  info.state_bytes += data_.arrays.bytes() + data_.compressed.bytes() + plans_.bytes();
  return info;
}

}  // namespace sotto
