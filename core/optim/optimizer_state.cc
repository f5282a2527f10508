// Optimizer state in and out, in the order of the tensors and without padding.
#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "core/base/hash.h"
#include "core/base/text.h"
#include "core/codec/sent_whole.h"
#include "core/optim/optimizer.h"

namespace sotto {
namespace {

// All values of arrays that are outside of the snapshot.
Status fetch(Optimizer& optimizer, StateErrors errors, OptimSnapshot* s) {
  std::vector<std::string> outside;
  for (const OptimSnapshot::Array& array : s->arrays()) {
    if (array.bytes != 0 && array.values.empty()) outside.push_back(array.name);
  }
  for (const std::string& name : outside) {
    SOTTO_TRY(optimizer.stream(name, errors, [&](std::span<const float> values) {
      s->append(name, std::as_bytes(values));
      return ok_status();
    }));
  }
  return ok_status();
}

// Values of error feedback; those of other parts are taken as they are.
Status check_errors(const OptimizerData& data, const OptimSnapshot& s, StateErrors errors,
                    const ArraySource& source) {
  const bool own = errors == StateErrors::kOwn && data.codec && !data.alone();
  const bool mean = errors == StateErrors::kMean && data.keeps_errors();
  if (!own && !mean) return ok_status();
  std::vector<float> values;
  for (const std::string_view name :
       {own ? kWorkerError : kMeanWorkerError, own ? kServerError : kMeanServerError}) {
    SOTTO_ASSIGN(const FloatSource read, source(name));
    const auto take = [&](uint64_t count) -> Status {
      values.resize(count);
      SOTTO_TRY(read(values));
      for (const float e : values) {
        if (!std::isfinite(e)) return invalid_argument("the error feedback has a value {}", e);
      }
      return ok_status();
    };
    if (mean) {  // in the order of the tensors
      const auto check_run = [&](const TensorRun& run) -> Status {
        SOTTO_TRY(take(run.count));
        if (data.alone()) return ok_status();
        return check_sent_whole(*data.codec, run.tensor, data.parameters[run.tensor].count, values);
      };
      SOTTO_TRY(for_each_run(*data.layout, false, check_run));
      continue;
    }
    const uint64_t n = s.bytes(name) / sizeof(float);
    for (uint64_t at = 0; at < n; at += kRunElements)
      SOTTO_TRY(take(std::min(kRunElements, n - at)));
  }
  return ok_status();
}

// Parameters, moments and what else is exported. Returns a hash of what all ranks have to have
// alike; 0: not compared.
Result<uint64_t> apply_arrays(OptimizerData& data, const Algorithm& algorithm,
                              const OptimSnapshot& s, StateErrors errors,
                              const ArraySource& source) {
  std::map<std::string_view, uint64_t> hashes;
  std::vector<float> values;
  const auto load = [&](std::string_view name, auto&& write) -> Status {
    SOTTO_ASSIGN(const FloatSource read, source(name));
    Hasher64 hasher;
    const auto take = [&](const TensorRun& run) -> Status {
      values.resize(run.count);
      SOTTO_TRY(read(values));
      hasher.update(values.data(), values.size() * sizeof(float));
      return write(run);
    };
    SOTTO_TRY(for_each_run(*data.layout, false, take));
    hashes[name] = hasher.digest();
    return ok_status();
  };
  const auto write_params = [&](const TensorRun& run) {
    return data.parameters.write(run.tensor, run.at, values);
  };
  SOTTO_TRY(load(kParamsArray, write_params));
  for (const OptimSnapshot::Array& array : s.arrays()) {
    if (!data.arrays.exports(array.name) || !algorithm.restores(array.name, s)) continue;
    const StateArray to = data.arrays[array.name];
    const auto write = [&](const TensorRun& run) {
      return write_state(data.access, to, run, values);
    };
    SOTTO_TRY(load(array.name, write));
  }
  // Padding that is data: only this rank's own state has its momentum.
  FloatSource padding;
  if (errors == StateErrors::kOwn && s.bytes(kMomentumPadding) != 0) {
    SOTTO_ASSIGN(padding, source(kMomentumPadding));
  }
  const uint32_t tensors = tensor_count(*data.layout, false),
                 all = tensor_count(*data.layout, true);
  const auto write_padding = [&](const TensorRun& run) -> Status {
    values.assign(run.count, 0.0f);
    if (padding) SOTTO_TRY(padding(values));
    return write_state(data.access, data.arrays["m"], run, values);
  };
  SOTTO_TRY(for_each_tensor_run(*data.layout, tensors, all, write_padding));
  if (data.config.sotto.initial_parameters == InitialParameters::kTrust) return 0;
  std::vector<uint64_t> common{s.step};
  for (const std::string_view name : algorithm.common_arrays(s)) common.push_back(hashes[name]);
  return std::max<uint64_t>(hash64(common.data(), common.size() * sizeof(uint64_t)), 1);
}

Status apply_errors(OptimizerData& data, const OptimSnapshot& s, StateErrors errors,
                    const ArraySource& source) {
  if (!data.codec || data.alone()) return ok_status();  // one rank has no errors
  SOTTO_TRY(data.compressed.clear_errors());
  if (!data.keeps_errors() || errors == StateErrors::kNone) return ok_status();
  const bool own = errors == StateErrors::kOwn;
  if (own && !s.residual) return ok_status();
  SOTTO_ASSIGN(const FloatSource worker, source(own ? kWorkerError : kMeanWorkerError));
  SOTTO_TRY(data.compressed.put_worker_errors(worker, own));
  SOTTO_ASSIGN(const FloatSource server, source(own ? kServerError : kMeanServerError));
  return own ? data.compressed.put_server_errors(server)
             : data.compressed.put_mean_server_errors(server);
}

}  // namespace

Result<OptimSnapshot> Optimizer::describe(StateErrors errors) {
  SOTTO_TRY(check_idle());
  SOTTO_TRY(check_whole());
  OptimSnapshot s;  // micro-batches of the next step are no part of it
  s.algorithm = std::string(optimizer_kind_name(data_.config.optimizer.kind));
  s.mode = std::string(mode_name(data_.mode()));
  s.step = data_.step;
  s.step_offset = data_.step_offset();
  s.scheduler_iteration = data_.groups.schedule().last_batch_iteration();
  s.skipped_steps = outcomes_.skipped;
  s.user = user_state_;
  if (outer_ != nullptr) {
    SOTTO_ASSIGN(s.outer, outer_->state(errors));
  }
  s.loss_scale = loss_scaler_.state();
  for (const ParamSpec& p : data_.parameters) {
    s.names.push_back(p.name);
    s.counts.push_back(p.count);
  }
  const uint64_t bytes = data_.layout->elements() * sizeof(float);
  s.put_outside(kParamsArray, bytes);
  for (const std::string_view moment : {"m", "v"}) {
    if (data_.arrays.has(moment)) s.put_outside(moment, bytes);
  }
  SOTTO_TRY(algorithm_->describe(errors, &s));
  if (errors == StateErrors::kMean && keeps_errors()) {
    s.mean.emplace();
    s.put_outside(kMeanWorkerError, bytes);
    s.put_outside(kMeanServerError, bytes);
  }
  if (!data_.codec || errors != StateErrors::kOwn || data_.alone()) return s;
  s.residual = data_.compressed.no_errors();
  s.put_outside(kWorkerError, data_.compressed.worker_values() * sizeof(float));
  s.put_outside(kServerError, data_.compressed.server_values() * sizeof(float));
  return s;
}

bool Optimizer::streams(std::string_view array) const {
  constexpr std::string_view kOthers[] = {kParamsArray, kMomentumPadding, kWorkerError,
                                          kServerError, kMeanWorkerError, kMeanServerError};
  return data_.arrays.exports(array) ||
         std::find(std::begin(kOthers), std::end(kOthers), array) != std::end(kOthers);
}

Status Optimizer::stream(std::string_view name, StateErrors errors, const FloatSink& sink) {
  if (std::optional<Status> own = algorithm_->stream(name, errors, sink)) return std::move(*own);
  std::vector<float> values;
  const auto runs = [&](uint32_t first, uint32_t last, auto&& read) {
    return for_each_tensor_run(*data_.layout, first, last, [&](const TensorRun& run) -> Status {
      values.resize(run.count);
      SOTTO_TRY(read(run, values.data()));
      return sink(values);
    });
  };
  const uint32_t tensors = tensor_count(*data_.layout, false);
  const auto read = [&](std::string_view array, uint32_t first, uint32_t last) {
    return runs(first, last, [&, from = data_.arrays[array]](const TensorRun& run, float* out) {
      return read_state(data_.access, from, run, out);
    });
  };
  if (name == kParamsArray) {
    return runs(0, tensors, [&](const TensorRun& run, float* out) {
      return data_.access.copy_and_wait(out, data_.parameters[run.tensor].param + run.at,
                                        run.count * sizeof(float));
    });
  }
  if (name == kMomentumPadding) return read("m", tensors, tensor_count(*data_.layout, true));
  if (data_.arrays.exports(name)) return read(name, 0, tensors);
  SOTTO_ASSIGN(const std::vector<uint8_t> valid, data_.valid_bits());
  if (name == kWorkerError) return data_.compressed.worker_errors(valid, sink);
  if (name == kServerError) return data_.compressed.server_errors(valid, sink);
  if (data_.alone()) {  // averages nothing
    return runs(0, tensors, [](const TensorRun& run, float* out) {
      std::fill_n(out, run.count, 0.0f);
      return ok_status();
    });
  }
  return name == kMeanWorkerError ? data_.compressed.mean_worker_errors(*data_.comm, valid, sink)
                                  : data_.compressed.mean_server_errors(*data_.comm, valid, sink);
}

// What a rank has summed up since the last synchronisation is its own, with error feedback or
// without.
Result<OptimSnapshot> Optimizer::snapshot(bool with_residual) {
  SOTTO_ASSIGN(OptimSnapshot s, describe(StateErrors::kOwn));
  if (!with_residual) {
    s.residual.reset();
    for (const std::string_view own : {kWorkerError, kServerError, kMomentumPadding}) s.remove(own);
  }
  SOTTO_TRY(fetch(*this, StateErrors::kOwn, &s));
  return s;
}

Status Optimizer::restore(const OptimSnapshot& s, bool with_residual) {
  const StateErrors errors = with_residual ? StateErrors::kOwn : StateErrors::kNone;
  return restore(s, errors, [&](std::string_view name) -> Result<FloatSource> {
    return FloatSource([from = s.values<float>(name)](std::span<float> out) mutable {
      std::copy_n(from.begin(), out.size(), out.begin());
      from = from.subspan(out.size());
      return ok_status();
    });
  });
}

Status Optimizer::restore(const OptimSnapshot& s, StateErrors errors, const ArraySource& source) {
  SOTTO_TRY(check_idle());
  SOTTO_TRY(algorithm_->accepts(s, errors));
  const bool own = errors == StateErrors::kOwn;
  if (outer_ == nullptr && !s.outer.empty())
    return invalid_argument("the state is of an optimizer with sotto.outer, which this one lacks");
  if (outer_ != nullptr && !s.outer.empty()) SOTTO_TRY(outer_->check_state(s.outer, own));
  SOTTO_TRY(check_errors(data_, s, errors, source));
  torn_ = true;
  SOTTO_TRY(apply(s, errors, source));
  if (outer_ != nullptr)
    SOTTO_TRY(s.outer.empty() ? outer_->restart() : outer_->restore(s.outer, own));
  torn_ = false;
  return ok_status();
}

Status Optimizer::apply(const OptimSnapshot& s, StateErrors errors, const ArraySource& source) {
  SOTTO_ASSIGN(imported_, apply_arrays(data_, *algorithm_, s, errors, source));
  SOTTO_TRY(algorithm_->restore(s));
  SOTTO_TRY(apply_errors(data_, s, errors, source));
  data_.step = s.step;
  accumulation_.done = 0;
  plans_.clear();
  outcomes_ = {};
  outcomes_.skipped = s.skipped_steps;
  user_state_ = s.user;
  // A static scale is the configuration's.
  if (loss_scaler_.dynamic()) loss_scaler_.restore(s.loss_scale);
  return data_.groups.schedule().restore(s.scheduler_iteration);
}

}  // namespace sotto
