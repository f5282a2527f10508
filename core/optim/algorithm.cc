#include "core/optim/algorithm.h"

#include <cmath>

#include "core/optim/algorithms/adam.h"
#include "core/optim/algorithms/lamb.h"
#include "core/optim/algorithms/onebit_adam.h"
#include "core/optim/algorithms/onebit_lamb.h"
#include "core/optim/algorithms/sgd.h"
#include "core/optim/algorithms/zeroone_adam.h"

namespace sotto {
namespace {

template <class T>
std::unique_ptr<Algorithm> made(OptimizerData& data) {
  return std::make_unique<T>(data);
}

struct Row {
  OptimizerKind kind;
  std::unique_ptr<Algorithm> (*make)(OptimizerData&);
};
constexpr Row kRows[] = {
    {OptimizerKind::kSgd, made<Sgd>},
    {OptimizerKind::kAdam, made<Adam>},
    {OptimizerKind::kAdamW, made<Adam>},
    {OptimizerKind::kLamb, made<Lamb>},
    {OptimizerKind::kOneBitAdam, made<OneBitAdam>},
    {OptimizerKind::kOneBitLamb, made<OneBitLamb>},
    {OptimizerKind::kZeroOneAdam, made<ZeroOneAdam>},
};

}  // namespace

std::unique_ptr<Algorithm> Algorithm::make(OptimizerData& data) {
  for (const Row& row : kRows) {
    if (row.kind == data.config.optimizer.kind) return row.make(data);
  }
  return nullptr;
}

GroupScalars Algorithm::scalars(const StepVariant& variant, size_t group) const {
  const OptimizerParams p = d_.groups.params(group);
  const auto t = static_cast<double>(d_.next_t());
  GroupScalars s;
  s.lr = d_.groups.lr(group);
  s.b1 = static_cast<float>(p.beta1);
  s.one_minus_b1 = static_cast<float>(1.0 - p.beta1);
  s.b2 = static_cast<float>(p.beta2);
  s.one_minus_b2 = static_cast<float>(1.0 - p.beta2);
  s.eps = static_cast<float>(p.eps);
  s.weight_decay = static_cast<float>(p.weight_decay);
  s.c1 = static_cast<float>(p.bias_correction ? 1.0 - std::pow(p.beta1, t) : 1.0);
  s.c2 = static_cast<float>(p.bias_correction ? 1.0 - std::pow(p.beta2, t) : 1.0);
  s.decoupled = p.adam_w_mode ? 1 : 0;
  write_scalars(variant, group, &s);
  return s;
}

void Algorithm::write_padding_scalars(GroupScalars* scalars) const {
  scalars->b1 = 0;
  scalars->one_minus_b1 = 1;
}

void Algorithm::committed(const StepVariant&) {
  if (d_.codec) d_.compressed.flip();
}

Status Algorithm::restore(const OptimSnapshot&) {
  const std::vector<TensorState> states(d_.parameters.size());
  SOTTO_TRY(
      d_.access.upload(d_.arrays.data("tensor_states"), std::span<const TensorState>(states)));
  return d_.write_valid_bits(false);
}

std::vector<std::string_view> Algorithm::common_arrays(const OptimSnapshot&) const {
  return {"v", "m", kParamsArray};
}

StateArraySpec Algorithm::floats(std::string_view name, bool exported) const {
  return {name, d_.layout->flat_elements() * 4, exported};
}

StateArraySpec Algorithm::moment(std::string_view name) const {
  const StateType type = d_.moment_type();
  return {name, state_element_bytes(*d_.layout, type), true, type, name == "v"};
}

}  // namespace sotto
