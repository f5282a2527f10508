// sotto_comm_*
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string_view>

#include "capi/src/convert.h"
#include "capi/src/handles.h"
#include "capi/src/struct_in.h"
#include "core/base/text.h"

using namespace sotto;        // NOLINT: the definitions below are the border itself
using namespace sotto::capi;  // NOLINT

namespace {

Status take_config(const sotto_comm_config* config, CommConfig* out) {
  if (config == nullptr) return ok_status();
  sotto_comm_config c;
  SOTTO_TRY(take(config, c, offsetof(sotto_comm_config, native_comm), "config"));
  if (c.reserved != 0) return unsupported("config.reserved is {}; it must be 0", c.reserved);
  if (c.size < 0)
    return invalid_argument("config.size is {}; allowed: 1 and more, or 0 for the launcher's",
                            c.size);
  if (c.size == 0 && c.rank != 0) {
    return invalid_argument(
        "config.rank is {} but config.size is 0, which takes both from the launcher", c.rank);
  }
  if (c.all_gather != nullptr && c.id != nullptr) {
    return invalid_argument(
        "config.id and config.all_gather are both set; ranks meet by one of them");
  }
  out->rank = c.rank;
  out->size = c.size;
  out->timeout_us = c.timeout_us;
  if (c.transport != nullptr) out->transport = c.transport;
  out->native_comm = c.native_comm;
  if (c.id != nullptr) {
    out->id.emplace();
    std::memcpy(out->id->data(), c.id->bytes, sizeof c.id->bytes);
  }
  if (c.all_gather != nullptr) {
    out->exchange = [fn = c.all_gather, user = c.user](const void* in, uint64_t bytes, void* all) {
      const CallbackScope scope;
      const int32_t result = fn(user, in, bytes, all);
      return result == 0 ? ok_status()
                         : error(Code::kTransport, "the caller's all_gather of {} returned {}",
                                 counted(bytes, "byte"), result);
    };
  }
  return ok_status();
}

Result<sotto_comm*> new_handle(std::shared_ptr<Comm> core) {
  auto object = std::make_unique<sotto_comm>();
  object->state = std::make_shared<CommState>();
  object->state->core = std::move(core);
  return give_out(std::move(object));
}

Status create(sotto_context* context, const sotto_comm_config* config, sotto_comm** out_comm) {
  SOTTO_TRY(CallbackScope::refuse_inside());
  SOTTO_TRY(check_pointer(out_comm, "out_comm"));
  CommConfig c;
  SOTTO_TRY(take_config(config, &c));
  SOTTO_ASSIGN(std::shared_ptr<Comm> core, Comm::create(context->core, std::move(c)));
  SOTTO_ASSIGN(*out_comm, new_handle(std::move(core)));
  return ok_status();
}

Status split(sotto_comm* comm, int32_t color, int32_t key, sotto_comm** out_comm) {
  SOTTO_TRY(CallbackScope::refuse_inside());
  SOTTO_TRY(check_pointer(out_comm, "out_comm"));
  SOTTO_TRY(check_no_group(*comm->state));
  SOTTO_ASSIGN(std::shared_ptr<Comm> core, comm->state->core->split(color, key));
  if (core == nullptr) {
    *out_comm = nullptr;
    return ok_status();
  }
  SOTTO_ASSIGN(*out_comm, new_handle(std::move(core)));
  return ok_status();
}

Status rank_of(const sotto_comm* comm, int32_t* out_rank) {
  SOTTO_TRY(check_pointer(out_rank, "out_rank"));
  *out_rank = comm->state->core->rank();
  return ok_status();
}

Status size_of(const sotto_comm* comm, int32_t* out_size) {
  SOTTO_TRY(check_pointer(out_size, "out_size"));
  *out_size = comm->state->core->size();
  return ok_status();
}

Status abort_comm(sotto_comm* comm, const char* reason) {
  SOTTO_TRY(CallbackScope::refuse_inside());
  comm->state->core->abort(reason == nullptr ? "no reason given" : reason);
  return ok_status();
}

Status own_error(const sotto_comm* comm, const char** out_text) {
  std::lock_guard lock(comm->shown_mutex);
  if (comm->shown.ok())
    comm->shown = comm->state->core->failure();  // the first cause never changes
  if (out_text != nullptr) *out_text = comm->shown.text().c_str();
  return comm->shown;
}

Status report(const sotto_comm* comm, const char* kind, char* buf, uint64_t cap,
              uint64_t* out_len) {
  const std::string word = kind == nullptr ? "all" : kind;
  constexpr std::string_view kKinds[] = {"all", "counters", "routes", "waiting"};
  if (std::find(std::begin(kKinds), std::end(kKinds), word) == std::end(kKinds)) {
    return invalid_argument("kind is \"{}\"; known: all, counters, routes, waiting", word);
  }
  return write_text(comm->state->core->report_json(word), buf, cap, out_len);
}

Status get_counters(const sotto_comm* comm, sotto_comm_counters* out_counters) {
  const CommCounters c = comm->state->core->counters();
  sotto_comm_counters out = {};
  out.payload_bytes_sent = c.moved.payload_bytes_sent;
  out.payload_bytes_received = c.moved.payload_bytes_received;
  out.header_bytes_sent = c.moved.header_bytes_sent;
  out.header_bytes_received = c.moved.header_bytes_received;
  out.service_bytes_sent = c.moved.service_bytes_sent;
  out.service_bytes_received = c.moved.service_bytes_received;
  out.messages_sent = c.moved.messages_sent;
  out.messages_received = c.moved.messages_received;
  out.payload_bytes_planned = c.payload_bytes_planned;
  out.header_bytes_planned = c.header_bytes_planned;
  out.kernel_ns = c.kernel_ns;
  out.ops_completed = c.ops_completed;
  return put(out, out_counters, sizeof(sotto_comm_counters), "out_counters");
}

}  // namespace

extern "C" {

sotto_status sotto_comm_create(sotto_context* context, const sotto_comm_config* config,
                               sotto_comm** out_comm) {
  return guarded_on("sotto_comm_create", context,
                    [&](auto* object) { return create(object, config, out_comm); });
}

sotto_status sotto_comm_split(sotto_comm* comm, int32_t color, int32_t key, sotto_comm** out_comm) {
  return guarded_on("sotto_comm_split", comm,
                    [&](auto* object) { return split(object, color, key, out_comm); });
}

sotto_status sotto_comm_rank(const sotto_comm* comm, int32_t* out_rank) {
  return guarded_on("sotto_comm_rank", comm,
                    [&](auto* object) { return rank_of(object, out_rank); });
}

sotto_status sotto_comm_size(const sotto_comm* comm, int32_t* out_size) {
  return guarded_on("sotto_comm_size", comm,
                    [&](auto* object) { return size_of(object, out_size); });
}

sotto_status sotto_comm_abort(sotto_comm* comm, const char* reason) {
  return guarded_on("sotto_comm_abort", comm,
                    [&](auto* object) { return abort_comm(object, reason); });
}

sotto_status sotto_comm_error(const sotto_comm* comm, const char** out_text) {
  return guarded_on("sotto_comm_error", comm,
                    [&](auto* object) { return own_error(object, out_text); });
}

sotto_status sotto_comm_report(const sotto_comm* comm, const char* kind, char* buf, uint64_t cap,
                               uint64_t* out_len) {
  return guarded_on("sotto_comm_report", comm,
                    [&](auto* object) { return report(object, kind, buf, cap, out_len); });
}

sotto_status sotto_comm_get_counters(const sotto_comm* comm, sotto_comm_counters* out_counters) {
  return guarded_on("sotto_comm_get_counters", comm,
                    [&](auto* object) { return get_counters(object, out_counters); });
}

sotto_status sotto_comm_destroy(sotto_comm* comm) {
  return destroyed("sotto_comm_destroy", comm,
                   [](sotto_comm& object) { return object.state->core->drain(); });
}

}  // extern "C"
