// Outer steps behind the steps of an optimizer, whose state is a section of its blob.
#pragma once

#include <memory>
#include <vector>

#include "core/optim/outer_steps.h"
#include "core/outer/outer.h"

namespace sotto {

// As MakeOuterSteps. out_outer: what makes them, for the functions that only outer optimizers have;
// to be closed before the optimizer goes, since averages may be under way.
Result<std::shared_ptr<OuterSteps>> make_outer_steps(const std::shared_ptr<Comm>& comm,
                                                     const Config& config,
                                                     std::vector<ParamSpec> params,
                                                     std::shared_ptr<Device> device,
                                                     std::shared_ptr<Outer>* out_outer);

}  // namespace sotto
