// sotto_op_*
#include <cstddef>
#include <vector>

#include "capi/src/guard.h"
#include "capi/src/handles.h"
#include "capi/src/op_handles.h"
#include "capi/src/struct_in.h"
#include "core/base/text.h"

using namespace sotto;        // NOLINT: the definitions below are the border itself
using namespace sotto::capi;  // NOLINT

namespace {

Status test(sotto_op* op) {
  SOTTO_ASSIGN(const OpUse body, op_of(op));
  // Inside a callback only the state is told: making progress could run another callback.
  return CallbackScope::inside() ? body->op->status() : body->engine->test(body->op);
}

Status wait(sotto_op* op, int64_t timeout_us) {
  SOTTO_ASSIGN(const OpUse body, op_of(op));
  SOTTO_TRY(CallbackScope::refuse_inside());
  return body->engine->wait(body->op, timeout_us);
}

// Operations of one context; null where the caller has NULL, and no engine if that is everywhere.
struct Several {
  std::vector<OpRef> ops;
  std::shared_ptr<Engine> engine;
};

Result<Several> take_ops(sotto_op* const* ops, uint64_t n) {
  Several several;
  several.ops.resize(n);
  for (uint64_t i = 0; i < n; ++i) {
    if (ops[i] == nullptr) continue;
    Result<OpUse> use = op_of(ops[i]);
    if (!use.ok()) return use.status().with_prefix(fmt::format("ops[{}]", i));
    const OpBody& body = **use;
    if (several.engine != nullptr && several.engine != body.engine) {
      return invalid_argument("ops[{}] belongs to another context than the operations before it",
                              i);
    }
    several.engine = body.engine;
    several.ops[i] = body.op;
  }
  return several;
}

Status wait_any(sotto_op* const* ops, uint64_t n, int64_t timeout_us, uint64_t* out_index) {
  SOTTO_TRY(CallbackScope::refuse_inside());
  SOTTO_TRY(check_pointer(ops, "ops"));
  SOTTO_TRY(check_pointer(out_index, "out_index"));
  SOTTO_ASSIGN(const Several several, take_ops(ops, n));
  if (several.engine == nullptr)
    return invalid_argument("{} given, and each is NULL", counted(n, "operation"));
  SOTTO_ASSIGN(const size_t index, several.engine->wait_any(several.ops, timeout_us));
  *out_index = index;
  return ok_status();
}

Status wait_all(sotto_op* const* ops, uint64_t n, int64_t timeout_us) {
  SOTTO_TRY(CallbackScope::refuse_inside());
  if (n != 0) SOTTO_TRY(check_pointer(ops, "ops"));
  SOTTO_ASSIGN(const Several several, take_ops(ops, n));
  if (several.engine == nullptr) return ok_status();  // nothing to wait for
  const Deadline deadline = Deadline::in_us(several.engine->clock(), timeout_us);
  Status first;
  for (size_t i = 0; i < several.ops.size(); ++i) {
    if (several.ops[i] == nullptr) continue;
    const int64_t left = deadline.never() ? -1 : deadline.left_us(several.engine->clock());
    const Status status = several.engine->wait(several.ops[i], left);
    if (status.code() == Code::kInProgress) return status;
    if (first.ok() && !status.ok()) first = status.with_prefix(fmt::format("ops[{}]", i));
  }
  return first;
}

Status stream_wait(sotto_op* op, void* stream) {
  SOTTO_ASSIGN(const OpUse body, op_of(op));
  if (!body->op->device()->caps().streams) {
    return unsupported(
        "the operation works on host memory; there is no stream to order. Use sotto_op_wait");
  }
  return body->engine->stream_after(body->op, stream);
}

Status own_error(const sotto_op* op, const char** out_text) {
  SOTTO_ASSIGN(const OpUse body, op_of(op));
  // The text lives in the operation, which the handle keeps.
  Status status = CallbackScope::inside() ? body->op->status() : body->op->outcome();
  const bool failed = static_cast<int32_t>(status.code()) < 0;
  if (out_text != nullptr) *out_text = failed ? status.text().c_str() : "";
  return status;
}

Status get_stats(const sotto_op* op, sotto_op_stats* out_stats) {
  SOTTO_ASSIGN(const OpUse body, op_of(op));
  const OpStats s = body->op->stats();
  const sotto_op_stats out = {0,
                              0,
                              s.launch_ns,
                              s.start_ns,
                              s.end_ns,
                              s.kernel_ns,
                              s.payload_bytes_planned,
                              s.header_bytes_planned,
                              s.exposed_ns};
  return put(out, out_stats, offsetof(sotto_op_stats, exposed_ns), "out_stats");
}

}  // namespace

extern "C" {

sotto_status sotto_op_test(sotto_op* op) {
  return guarded("sotto_op_test", [&] { return test(op); });
}

sotto_status sotto_op_wait(sotto_op* op, int64_t timeout_us) {
  return guarded("sotto_op_wait", [&] { return wait(op, timeout_us); });
}

sotto_status sotto_op_wait_any(sotto_op* const* ops, uint64_t n, int64_t timeout_us,
                               uint64_t* out_index) {
  return guarded("sotto_op_wait_any", [&] { return wait_any(ops, n, timeout_us, out_index); });
}

sotto_status sotto_op_wait_all(sotto_op* const* ops, uint64_t n, int64_t timeout_us) {
  return guarded("sotto_op_wait_all", [&] { return wait_all(ops, n, timeout_us); });
}

sotto_status sotto_op_stream_wait(sotto_op* op, void* stream) {
  return guarded("sotto_op_stream_wait", [&] { return stream_wait(op, stream); });
}

sotto_status sotto_op_error(const sotto_op* op, const char** out_text) {
  return guarded("sotto_op_error", [&] { return own_error(op, out_text); });
}

sotto_status sotto_op_get_stats(const sotto_op* op, sotto_op_stats* out_stats) {
  return guarded("sotto_op_get_stats", [&] { return get_stats(op, out_stats); });
}

sotto_status sotto_op_release(sotto_op* op) {
  return guarded("sotto_op_release", [&] { return release_op(op); });
}

}  // extern "C"
