#include "capi/src/op_handles.h"

#include <utility>

#include "capi/src/guard.h"
#include "core/base/log.h"

namespace sotto::capi {
namespace {

HandlePool<OpBody>& pool() {
  static auto* const instance = new HandlePool<OpBody>("operation", "released");  // never destroyed
  return *instance;
}

// Carries the caller's callback through core, so that the library knows when it is inside of one.
// Deletes itself.
struct DoneRelay {
  sotto_done_fn fn;
  void* user;

  static void run(void* self, int32_t status) {
    const std::unique_ptr<DoneRelay> relay(static_cast<DoneRelay*>(self));
    const CallbackScope scope;
    try {
      relay->fn(relay->user, status);
    } catch (...) {
      log(LogLevel::kError, "a callback (on_done) ended with an exception, which was dropped");
    }
  }
};

}  // namespace

Result<OpUse> op_of(const sotto_op* op) { return pool().get(op); }

Status release_op(sotto_op* op) {
  if (op == nullptr) return ok_status();
  return pool().remove(op).status();
}

Status run_operation(const Comm& comm, const CallIn& call, sotto_op** out_op,
                     const std::function<Result<OpRef>(const CallOptions&)>& start) {
  CallOptions options = call.options;
  std::unique_ptr<DoneRelay> relay;
  if (call.on_done != nullptr) {
    relay = std::make_unique<DoneRelay>(DoneRelay{call.on_done, call.user});
    options.on_done = DoneRelay::run;
    options.user = relay.get();
  }
  const std::shared_ptr<Engine> engine = comm.context()->engine();
  if (out_op == nullptr) {
    options.waits = true;
    SOTTO_ASSIGN(const OpRef op, start(options));
    (void)relay.release();  // the callback runs once and deletes it
    return engine->wait(op, -1);
  }
  // Room for the handle first: once the operation runs, nothing may fail any more.
  SOTTO_ASSIGN(auto place, pool().reserve());
  SOTTO_ASSIGN(OpRef op, start(options));
  (void)relay.release();
  *out_op = static_cast<sotto_op*>(place.put({engine, std::move(op)}));
  return ok_status();
}

}  // namespace sotto::capi
