// sotto_optim_*
#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "capi/src/convert.h"
#include "capi/src/handles.h"
#include "capi/src/op_handles.h"
#include "capi/src/params.h"
#include "capi/src/state_mode.h"
#include "capi/src/struct_in.h"
#include "core/base/text.h"
#include "core/state/optimizer_outer.h"

using namespace sotto;        // NOLINT: the definitions below are the border itself
using namespace sotto::capi;  // NOLINT

namespace {

constexpr uint64_t kMaxArrays = kMaxParams * 16;
constexpr size_t kMaxNameShown = 300;

// Values may be in host memory or on the optimizer's device.
Result<std::vector<NamedArray>> take_named_arrays(const sotto_named_array* arrays, uint64_t n,
                                                  const DeviceId& device) {
  if (n == 0 || n > kMaxArrays)
    return invalid_argument("n is {}; allowed: 1 to {} arrays", n, kMaxArrays);
  std::vector<NamedArray> out;
  for (uint64_t i = 0; i < n; ++i) {
    sotto_named_array a;
    SOTTO_TRY(take_element(arrays, i, sizeof(sotto_named_array), "arrays", a));
    if (a.reserved != 0)
      return unsupported("arrays[{}].reserved is {}; this version needs 0", i, a.reserved);
    if (a.name == nullptr) return invalid_argument("arrays[{}].name is NULL", i);
    const std::string name =
        fmt::format("arrays[{}] (\"{}\"): values", i, printable(a.name, kMaxNameShown));
    SOTTO_ASSIGN(const Buffer values, take_buffer(a.values, name));
    if (values.device.type != DeviceType::kCpu && values.device != device) {
      return invalid_argument("{} are on {}; allowed: host memory, or {}, the optimizer's device",
                              name, device_name(values.device), device_name(device));
    }
    out.push_back({a.name, values.data, values.count, values.dtype});
  }
  return out;
}

Status create(sotto_comm* comm, const char* json, const sotto_param* params, uint64_t n,
              sotto_optim** out_optim) {
  SOTTO_TRY(CallbackScope::refuse_inside());
  auto object = std::make_unique<sotto_optim>();
  object->comm = comm->state;
  // The other ranks hear of what is wrong here, so that none waits for this one.
  Result<Registration> taken = caught([&]() -> Result<Registration> {
    SOTTO_TRY(check_pointer(out_optim, "out_optim"));
    return take_registration(*comm, json, params, n, ParamUse::kTrained);
  });
  Registration mine = taken.ok() ? taken.take() : Registration();
  const auto make_outer = [&](const auto& on, const auto& config, auto specs, auto device) {
    return make_outer_steps(on, config, std::move(specs), std::move(device), &object->outer);
  };
  SOTTO_ASSIGN(object->core, Optimizer::create(comm->state->core, json == nullptr ? "" : json,
                                               std::move(mine.specs), std::move(mine.device),
                                               taken.status(), make_outer));
  object->written = std::make_shared<WrittenMemory>(std::move(mine.written));
  SOTTO_ASSIGN(*out_optim, give_out(std::move(object)));
  return ok_status();
}

// start: Optimizer::step or Optimizer::accumulate.
Status run(sotto_optim* optim, const sotto_call* call, sotto_op** out_op,
           Result<OpRef> (Optimizer::*start)(const CallOptions&)) {
  SOTTO_TRY(CallbackScope::refuse_inside());
  SOTTO_TRY(check_no_group(*optim->comm));
  SOTTO_ASSIGN(const CallIn options, take_call(call));
  SOTTO_TRY(refuse_reduce_and_codec(options));
  return run_operation(*optim->comm->core, options, out_op,
                       [&](const CallOptions& o) { return ((*optim->core).*start)(o); });
}

Status outer_of(const sotto_optim* optim, sotto_outer** out_outer) {
  SOTTO_TRY(check_pointer(out_outer, "out_outer"));
  if (optim->outer == nullptr) {
    return invalid_state(
        "this optimizer has no outer steps: its configuration has no \"sotto\": {{\"outer\": "
        "...}}");
  }
  auto object = std::make_unique<sotto_outer>();
  object->comm = optim->comm;
  object->core = optim->outer;
  object->optim = optim->core;
  SOTTO_ASSIGN(*out_outer, give_out(std::move(object)));
  return ok_status();
}

Status replay(sotto_optim* optim, sotto_op* op) {
  SOTTO_TRY(CallbackScope::refuse_inside());
  SOTTO_ASSIGN(const OpUse body, op_of(op));
  if (body->engine != optim->comm->core->context()->engine())
    return invalid_argument("the operation is of another context than the optimizer");
  return optim->core->replay(body->op);
}

Status set(sotto_optim* optim, const char* name, int32_t group, double value) {
  SOTTO_TRY(check_pointer(name, "name"));
  return optim->core->set(name, group, value);
}

Status set_grads(sotto_optim* optim, const sotto_buffer* grads, uint64_t n) {
  SmallVector<Buffer> buffers;
  SOTTO_TRY(take_buffers(grads, n, "grads", &buffers));
  std::vector<GradientPlace> places;
  places.reserve(n);
  for (const Buffer& b : buffers) {
    SOTTO_TRY(optim->written->check({b.data, b.bytes(), false, "grads", places.size()}));
    places.push_back({b.data, b.count, b.dtype, b.device});
  }
  return optim->core->set_gradients(places);
}

// Gradients are left out: those that are registered may be memory that the caller has freed.
Status set_params(sotto_optim* optim, const sotto_buffer* params, const sotto_buffer* model_copies,
                  uint64_t n) {
  SOTTO_ASSIGN(Places places, take_places(params, model_copies, n, optim->written->ranges()));
  SOTTO_TRY(optim->core->set_parameters(places.params, places.copies));
  optim->written->move(std::move(places.written));
  return ok_status();
}

Status set_frozen(sotto_optim* optim, const uint8_t* frozen, uint64_t n) {
  SOTTO_TRY(CallbackScope::refuse_inside());
  SOTTO_TRY(check_no_group(*optim->comm));
  SOTTO_TRY(check_pointer(frozen, "frozen"));
  return optim->core->set_frozen(std::span(frozen, n));
}

Status get_info(const sotto_optim* optim, sotto_optim_info* out_info) {
  SOTTO_ASSIGN(const OptimInfo i, optim->core->info());
  sotto_optim_info out = {};
  out.stage = i.stage;
  out.step = i.step;
  out.state_step = i.state_step;
  out.lr = i.lr;
  out.grad_norm = i.grad_norm;
  out.payload_bytes_next_step = i.payload_bytes_next_step;
  out.header_bytes_next_step = i.header_bytes_next_step;
  out.state_bytes = i.state_bytes;
  out.skipped_steps = i.skipped_steps;
  out.loss_scale = i.loss_scale;
  out.micro_batches = i.micro_batches;
  return put(out, out_info, sizeof(sotto_optim_info), "out_info");
}

Status report(const sotto_optim* optim, const char* kind, char* buf, uint64_t cap,
              uint64_t* out_len) {
  SOTTO_ASSIGN(const std::string text, optim->core->report_json(kind == nullptr ? "all" : kind));
  return write_text(text, buf, cap, out_len);
}

Status state_export(const sotto_optim* optim, sotto_state_mode mode, void* buf, uint64_t cap,
                    uint64_t* out_len) {
  SOTTO_TRY(check_pointer(out_len, "out_len"));
  SOTTO_ASSIGN(const StateMode checked, take_optim_mode(*optim->core, mode));
  if (!made_by_one_rank(checked)) {
    // Other ranks are asked only when the result has a place.
    SOTTO_TRY(CallbackScope::refuse_inside());
    SOTTO_ASSIGN(const uint64_t bytes, state_bytes(*optim->core, checked));
    if (buf == nullptr || cap < bytes) return write_bytes(nullptr, bytes, nullptr, 0, out_len);
  }
  SOTTO_ASSIGN(const std::vector<std::byte> blob, export_state(*optim->core, checked));
  return write_bytes(blob.data(), blob.size(), buf, cap, out_len);
}

Status state_import(sotto_optim* optim, sotto_state_mode mode, const void* buf, uint64_t len) {
  SOTTO_ASSIGN(const StateMode checked, take_optim_mode(*optim->core, mode));
  SOTTO_ASSIGN(const std::span<const std::byte> blob, take_blob(buf, len));
  return import_state(*optim->core, checked, blob);
}

Status state_import_arrays(sotto_optim* optim, const sotto_named_array* arrays, uint64_t n) {
  SOTTO_TRY(CallbackScope::refuse_inside());
  SOTTO_TRY(check_no_group(*optim->comm));
  return optim->core->import_arrays(take_named_arrays(arrays, n, optim->core->device()->caps().id));
}

// What the caller's function said, which is not 0.
Status refused_by(std::string_view function, int32_t code) {
  return error(Code::kCancelled, "the {} function has returned {}", function, code);
}

// What one call of the caller's function moves.
uint64_t part_of(std::span<const std::byte> bytes) {
  return std::min<uint64_t>(bytes.size(), uint64_t{1} << 20);
}

Status state_write(const sotto_optim* optim, sotto_state_mode mode, sotto_write_fn write,
                   void* user) {
  if (write == nullptr) return invalid_argument("write is NULL");
  SOTTO_ASSIGN(const StateMode checked, take_optim_mode(*optim->core, mode));
  if (!made_by_one_rank(checked)) {
    SOTTO_TRY(CallbackScope::refuse_inside());
    SOTTO_TRY(check_no_group(*optim->comm));
  }
  // The other ranks count on this one in a collective, whatever has become of its bytes.
  Status refused;
  const auto sink = [&](std::span<const std::byte> bytes) -> Status {
    const CallbackScope inside;
    for (; refused.ok() && !bytes.empty(); bytes = bytes.subspan(part_of(bytes))) {
      const int32_t code = write(user, bytes.data(), part_of(bytes));
      if (code != 0) refused = refused_by("write", code);
    }
    return made_by_one_rank(checked) ? refused : ok_status();
  };
  SOTTO_TRY(export_state(*optim->core, checked, sink));
  return refused;
}

Status state_read(sotto_optim* optim, sotto_state_mode mode, sotto_read_fn read, void* user,
                  uint64_t len) {
  if (read == nullptr) return invalid_argument("read is NULL");
  SOTTO_ASSIGN(const StateMode checked, take_optim_mode(*optim->core, mode));
  const ByteSource source = [&](uint64_t offset, std::span<std::byte> bytes) {
    const CallbackScope inside;
    while (!bytes.empty()) {
      const uint64_t part = part_of(bytes);
      const int32_t code = read(user, offset, bytes.data(), part);
      if (code != 0) return refused_by("read", code);
      offset += part;
      bytes = bytes.subspan(part);
    }
    return ok_status();
  };
  return import_state(*optim->core, checked, source, len);
}

Status set_user_state(sotto_optim* optim, const void* data, uint64_t len) {
  if (len > kMaxUserState)
    return invalid_argument("len is {}; allowed: at most {} bytes", len, kMaxUserState);
  if (data == nullptr && len != 0) return invalid_argument("data is NULL but len is {}", len);
  const auto* first = static_cast<const std::byte*>(data);
  return optim->core->set_user_state(std::vector<std::byte>(first, first + len));
}

Status get_user_state(const sotto_optim* optim, void* buf, uint64_t cap, uint64_t* out_len) {
  const std::vector<std::byte>& bytes = optim->core->user_state();
  return write_bytes(bytes.data(), bytes.size(), buf, cap, out_len);
}

Status end(sotto_optim& optim) {
  // The step in flight reads and writes the caller's parameters, which are free after this call.
  // Its own deadline ends it; the other operations of the comm go on. A round of an overlap has
  // none while gradients are missing.
  Optimizer& core = *optim.core;
  for (const std::weak_ptr<Overlap>& overlap : optim.overlaps) {
    if (const auto alive = overlap.lock()) alive->close("it has destroyed the optimizer");
  }
  core.comm()->engine().wait_until([&] { return !core.busy(); }, -1);
  if (optim.outer != nullptr) optim.outer->close();
  return ok_status();
}

}  // namespace

extern "C" {

sotto_status sotto_optim_create(sotto_comm* comm, const char* json, const sotto_param* params,
                                uint64_t n, sotto_optim** out_optim) {
  return guarded_on("sotto_optim_create", comm,
                    [&](auto* object) { return create(object, json, params, n, out_optim); });
}

sotto_status sotto_optim_step(sotto_optim* optim, const sotto_call* call, sotto_op** out_op) {
  return guarded_on("sotto_optim_step", optim,
                    [&](auto* object) { return run(object, call, out_op, &Optimizer::step); });
}

sotto_status sotto_optim_outer(sotto_optim* optim, sotto_outer** out_outer) {
  return guarded_on("sotto_optim_outer", optim,
                    [&](auto* object) { return outer_of(object, out_outer); });
}

sotto_status sotto_optim_replay(sotto_optim* optim, sotto_op* op) {
  return guarded_on("sotto_optim_replay", optim, [&](auto* object) { return replay(object, op); });
}

sotto_status sotto_optim_accumulate(sotto_optim* optim, const sotto_call* call, sotto_op** out_op) {
  return guarded_on("sotto_optim_accumulate", optim, [&](auto* object) {
    return run(object, call, out_op, &Optimizer::accumulate);
  });
}

sotto_status sotto_optim_set(sotto_optim* optim, const char* name, int32_t group, double value) {
  return guarded_on("sotto_optim_set", optim,
                    [&](auto* object) { return set(object, name, group, value); });
}

sotto_status sotto_optim_set_grads(sotto_optim* optim, const sotto_buffer* grads, uint64_t n) {
  return guarded_on("sotto_optim_set_grads", optim,
                    [&](auto* object) { return set_grads(object, grads, n); });
}

sotto_status sotto_optim_get_info(const sotto_optim* optim, sotto_optim_info* out_info) {
  return guarded_on("sotto_optim_get_info", optim,
                    [&](auto* object) { return get_info(object, out_info); });
}

sotto_status sotto_optim_report(const sotto_optim* optim, const char* kind, char* buf, uint64_t cap,
                                uint64_t* out_len) {
  return guarded_on("sotto_optim_report", optim,
                    [&](auto* object) { return report(object, kind, buf, cap, out_len); });
}

sotto_status sotto_optim_state_export(const sotto_optim* optim, sotto_state_mode mode, void* buf,
                                      uint64_t cap, uint64_t* out_len) {
  return guarded_on("sotto_optim_state_export", optim,
                    [&](auto* object) { return state_export(object, mode, buf, cap, out_len); });
}

sotto_status sotto_optim_state_import(sotto_optim* optim, sotto_state_mode mode, const void* buf,
                                      uint64_t len) {
  return guarded_on("sotto_optim_state_import", optim,
                    [&](auto* object) { return state_import(object, mode, buf, len); });
}

sotto_status sotto_optim_state_import_arrays(sotto_optim* optim, const sotto_named_array* arrays,
                                             uint64_t n) {
  return guarded_on("sotto_optim_state_import_arrays", optim,
                    [&](auto* object) { return state_import_arrays(object, arrays, n); });
}

sotto_status sotto_optim_synchronize(sotto_optim* optim, const sotto_call* call,
                                     sotto_op** out_op) {
  return guarded_on("sotto_optim_synchronize", optim, [&](auto* object) {
    return run(object, call, out_op, &Optimizer::synchronise);
  });
}

sotto_status sotto_optim_state_write(const sotto_optim* optim, sotto_state_mode mode,
                                     sotto_write_fn write, void* user) {
  return guarded_on("sotto_optim_state_write", optim,
                    [&](auto* object) { return state_write(object, mode, write, user); });
}

sotto_status sotto_optim_state_read(sotto_optim* optim, sotto_state_mode mode, sotto_read_fn read,
                                    void* user, uint64_t len) {
  return guarded_on("sotto_optim_state_read", optim,
                    [&](auto* object) { return state_read(object, mode, read, user, len); });
}

sotto_status sotto_optim_set_user_state(sotto_optim* optim, const void* data, uint64_t len) {
  return guarded_on("sotto_optim_set_user_state", optim,
                    [&](auto* object) { return set_user_state(object, data, len); });
}

sotto_status sotto_optim_get_user_state(const sotto_optim* optim, void* buf, uint64_t cap,
                                        uint64_t* out_len) {
  return guarded_on("sotto_optim_get_user_state", optim,
                    [&](auto* object) { return get_user_state(object, buf, cap, out_len); });
}

sotto_status sotto_optim_set_params(sotto_optim* optim, const sotto_buffer* params,
                                    const sotto_buffer* model_copies, uint64_t n) {
  return guarded_on("sotto_optim_set_params", optim,
                    [&](auto* object) { return set_params(object, params, model_copies, n); });
}

sotto_status sotto_optim_set_frozen(sotto_optim* optim, const uint8_t* frozen, uint64_t n) {
  return guarded_on("sotto_optim_set_frozen", optim,
                    [&](auto* object) { return set_frozen(object, frozen, n); });
}

sotto_status sotto_optim_destroy(sotto_optim* optim) {
  return destroyed("sotto_optim_destroy", optim, end);
}

}  // extern "C"
