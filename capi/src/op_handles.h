// Handles of operations, and the way from a started operation of core to the caller.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "capi/src/convert.h"
#include "capi/src/handle_pool.h"
#include "core/base/status.h"
#include "core/engine/engine.h"
#include "core/group/comm.h"
#include "sotto/sotto.h"

namespace sotto::capi {

// What an operation's handle stands for. The engine outlives the operation.
struct OpBody {
  std::shared_ptr<Engine> engine;
  OpRef op;
};

using OpUse = HandlePool<OpBody>::Use;

// INVALID_ARGUMENT: NULL, no handle, or released. INVALID_STATE: made before a fork.
Result<OpUse> op_of(const sotto_op* op);
Status release_op(sotto_op* op);

// Starts an operation by `start`, which gets the call's options with the caller's callback in them.
// Gives out a handle, or waits for completion if out_op is NULL.
Status run_operation(const Comm& comm, const CallIn& call, sotto_op** out_op,
                     const std::function<Result<OpRef>(const CallOptions&)>& start);

}  // namespace sotto::capi
