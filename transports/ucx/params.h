// The environment variables of UCX (transports/ucx/params.def).
#pragma once

#include "core/base/params.h"

namespace sotto::ucx {

struct Params {
#define SOTTO_PARAMS "transports/ucx/params.def"
#include "core/base/param_members-inl.h"
};

}  // namespace sotto::ucx
