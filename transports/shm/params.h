// The environment variables of shared memory (transports/shm/params.def).
#pragma once

#include "core/base/params.h"

namespace sotto::shm {

struct Params {
#define SOTTO_PARAMS "transports/shm/params.def"
#include "core/base/param_members-inl.h"
};

}  // namespace sotto::shm
