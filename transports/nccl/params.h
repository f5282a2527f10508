// The environment variables of NCCL (transports/nccl/params.def).
#pragma once

#include "core/base/params.h"

namespace sotto::nccl {

struct Params {
#define SOTTO_PARAMS "transports/nccl/params.def"
#include "core/base/param_members-inl.h"
};

}  // namespace sotto::nccl
