// The environment variables of TCP (transports/tcp/params.def).
#pragma once

#include "core/base/params.h"

namespace sotto::tcp {

struct Params {
#define SOTTO_PARAMS "transports/tcp/params.def"
#include "core/base/param_members-inl.h"
};

}  // namespace sotto::tcp
