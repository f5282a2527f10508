// sotto_outer_*
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "capi/src/convert.h"
#include "capi/src/handles.h"
#include "capi/src/op_handles.h"
#include "capi/src/params.h"
#include "capi/src/state_mode.h"
#include "capi/src/struct_in.h"
#include "core/state/outer_state.h"

using namespace sotto;        // NOLINT: the definitions below are the border itself
using namespace sotto::capi;  // NOLINT

namespace {

Status check_shards_comm(const CommState& comm, const CommState& shards) {
  SOTTO_TRY(check_no_group(shards));
  if (shards.core->context() == comm.core->context()) return ok_status();
  return invalid_argument("shards: found a comm of another context, allowed: one of that of comm");
}

// shards: null: parameters are whole.
Status create(sotto_comm* comm, const Result<sotto_comm*>& shards, const char* json,
              const sotto_param* params, uint64_t n, sotto_outer** out_outer) {
  SOTTO_TRY(CallbackScope::refuse_inside());
  auto object = std::make_unique<sotto_outer>();
  object->comm = comm->state;
  if (shards.ok() && *shards != nullptr) object->shards = (*shards)->state;
  // The other ranks hear of what is wrong here, so that none waits for this one.
  Result<Registration> taken = caught([&]() -> Result<Registration> {
    SOTTO_TRY(check_pointer(out_outer, "out_outer"));
    SOTTO_TRY(shards.status());
    if (object->shards != nullptr) SOTTO_TRY(check_shards_comm(*comm->state, *object->shards));
    return take_registration(*comm, json, params, n, ParamUse::kAveraged);
  });
  Registration mine = taken.ok() ? taken.take() : Registration();
  SOTTO_ASSIGN(object->core,
               Outer::create(comm->state->core, json == nullptr ? "" : json, std::move(mine.specs),
                             std::move(mine.device), taken.status(),
                             object->shards == nullptr ? nullptr : object->shards->core));
  object->written = std::move(mine.written);
  SOTTO_ASSIGN(*out_outer, give_out(std::move(object)));
  return ok_status();
}

// What the optimizer does itself whose steps these are.
Status check_own(const sotto_outer& outer, std::string_view instead) {
  if (outer.optim == nullptr) return ok_status();
  return invalid_state("these outer steps are those of an optimizer (sotto_optim_outer); call {}",
                       instead);
}

// start: Outer::step, flush or swap.
Status run(sotto_outer* outer, const sotto_call* call, sotto_op** out_op,
           Result<OpRef> (Outer::*start)(const CallOptions&)) {
  SOTTO_TRY(CallbackScope::refuse_inside());
  SOTTO_TRY(check_no_group(*outer->comm));
  SOTTO_ASSIGN(const CallIn options, take_call(call));
  SOTTO_TRY(refuse_reduce_and_codec(options));
  if (outer->optim != nullptr) SOTTO_TRY(outer->optim->check_idle());
  return run_operation(*outer->comm->core, options, out_op,
                       [&](const CallOptions& o) { return ((*outer->core).*start)(o); });
}

Status step(sotto_outer* outer, const sotto_call* call, sotto_op** out_op) {
  SOTTO_TRY(check_own(*outer, "sotto_optim_step, which makes them"));
  return run(outer, call, out_op, &Outer::step);
}

Status set(sotto_outer* outer, const char* name, double value) {
  SOTTO_TRY(check_pointer(name, "name"));
  if (std::string_view(name) == "lr")
    SOTTO_TRY(check_own(*outer, "sotto_optim_set, whose learning rate they have"));
  return outer->core->set(name, value);
}

Status set_params(sotto_outer* outer, const sotto_buffer* params, const sotto_buffer* model_copies,
                  uint64_t n) {
  SOTTO_TRY(check_own(*outer, "sotto_optim_set_params, which moves theirs too"));
  SOTTO_ASSIGN(Places places, take_places(params, model_copies, n, outer->written));
  SOTTO_TRY(outer->core->set_parameters(places.params, places.copies));
  outer->written = std::move(places.written);
  return ok_status();
}

Status state_export(const sotto_outer* outer, sotto_state_mode mode, void* buf, uint64_t cap,
                    uint64_t* out_len) {
  SOTTO_TRY(CallbackScope::refuse_inside());
  SOTTO_TRY(check_pointer(out_len, "out_len"));
  SOTTO_TRY(check_own(*outer, "sotto_optim_state_export, which has their state"));
  SOTTO_ASSIGN(const StateMode checked, take_mode(mode, StateMode::kCommon));
  SOTTO_ASSIGN(const std::vector<std::byte> blob,
               export_outer(*outer->core, exported_errors(checked)));
  return write_bytes(blob.data(), blob.size(), buf, cap, out_len);
}

Status state_import(sotto_outer* outer, sotto_state_mode mode, const void* buf, uint64_t len) {
  SOTTO_TRY(CallbackScope::refuse_inside());
  SOTTO_TRY(check_own(*outer, "sotto_optim_state_import, which has their state"));
  SOTTO_ASSIGN(const StateMode checked, take_mode(mode, StateMode::kCommon));
  SOTTO_ASSIGN(const std::span<const std::byte> blob, take_blob(buf, len));
  SOTTO_ASSIGN(const OuterSnapshot snapshot, decode_outer(blob));
  return outer->core->restore(snapshot, checked == StateMode::kExact);
}

Status get_info(const sotto_outer* outer, sotto_outer_info* out_info) {
  SOTTO_ASSIGN(const OuterInfo i, outer->core->info());
  sotto_outer_info out = {};
  out.events = i.events;
  out.step = i.step;
  out.round = i.round;
  out.next_boundary = i.next_boundary;
  out.fragments = i.fragments;
  out.in_flight = i.in_flight;
  out.votes = i.update.votes;
  out.not_finite = i.update.not_finite;
  out.lambda = i.update.lambda;
  out.gap = i.update.gap;
  out.unit = i.update.unit;
  out.clip_fraction = i.update.clip_fraction;
  out.delta_norm = i.update.delta_norm;
  out.step_norm = i.update.step_norm;
  out.gain = i.gain;
  out.overlap_ratio = i.overlap.ratio();
  out.contention = i.overlap.contention();
  out.network_ns = i.overlap.network_ns();
  out.exposed_ns = i.overlap.exposed_ns();
  out.payload_bytes_next_launch = i.payload_bytes_next_launch;
  out.header_bytes_next_launch = i.header_bytes_next_launch;
  out.state_bytes = i.state_bytes;
  out.loss = i.update.loss;
  out.period = i.period;
  out.delay = i.delay;
  return put(out, out_info, offsetof(sotto_outer_info, period), "out_info");
}

}  // namespace

extern "C" {

sotto_status sotto_outer_create(sotto_comm* comm, const char* json, const sotto_param* params,
                                uint64_t n, sotto_outer** out_outer) {
  return guarded_on("sotto_outer_create", comm, [&](auto* object) {
    return create(object, nullptr, json, params, n, out_outer);
  });
}

sotto_status sotto_outer_create_sharded(sotto_comm* comm, sotto_comm* shards, const char* json,
                                        const sotto_param* params, uint64_t n,
                                        sotto_outer** out_outer) {
  return guarded_on("sotto_outer_create_sharded", comm, [&](auto* object) {
    const auto other = object_of(shards);
    // A handle that is none is told to the other ranks too.
    const Result<sotto_comm*> given =
        other.ok()
            ? Result<sotto_comm*>((*other)->get())
            : Status(other.status().code(), fmt::format("shards: {}", other.status().text()));
    return create(object, given, json, params, n, out_outer);
  });
}

sotto_status sotto_outer_set(sotto_outer* outer, const char* name, double value) {
  return guarded_on("sotto_outer_set", outer,
                    [&](auto* object) { return set(object, name, value); });
}

sotto_status sotto_outer_step(sotto_outer* outer, const sotto_call* call, sotto_op** out_op) {
  return guarded_on("sotto_outer_step", outer,
                    [&](auto* object) { return step(object, call, out_op); });
}

sotto_status sotto_outer_flush(sotto_outer* outer, const sotto_call* call, sotto_op** out_op) {
  return guarded_on("sotto_outer_flush", outer,
                    [&](auto* object) { return run(object, call, out_op, &Outer::flush); });
}

sotto_status sotto_outer_swap(sotto_outer* outer, const sotto_call* call, sotto_op** out_op) {
  return guarded_on("sotto_outer_swap", outer,
                    [&](auto* object) { return run(object, call, out_op, &Outer::swap); });
}

sotto_status sotto_outer_vote(sotto_outer* outer, uint32_t bits) {
  return guarded_on("sotto_outer_vote", outer,
                    [&](auto* object) { return object->core->vote(bits); });
}

sotto_status sotto_outer_set_params(sotto_outer* outer, const sotto_buffer* params,
                                    const sotto_buffer* model_copies, uint64_t n) {
  return guarded_on("sotto_outer_set_params", outer,
                    [&](auto* object) { return set_params(object, params, model_copies, n); });
}

sotto_status sotto_outer_state_export(const sotto_outer* outer, sotto_state_mode mode, void* buf,
                                      uint64_t cap, uint64_t* out_len) {
  return guarded_on("sotto_outer_state_export", outer,
                    [&](auto* object) { return state_export(object, mode, buf, cap, out_len); });
}

sotto_status sotto_outer_state_import(sotto_outer* outer, sotto_state_mode mode, const void* buf,
                                      uint64_t len) {
  return guarded_on("sotto_outer_state_import", outer,
                    [&](auto* object) { return state_import(object, mode, buf, len); });
}

sotto_status sotto_outer_get_info(const sotto_outer* outer, sotto_outer_info* out_info) {
  return guarded_on("sotto_outer_get_info", outer,
                    [&](auto* object) { return get_info(object, out_info); });
}

sotto_status sotto_outer_destroy(sotto_outer* outer) {
  return destroyed("sotto_outer_destroy", outer, [](sotto_outer& object) {
    Outer& core = *object.core;
    if (object.optim == nullptr) {
      core.close();
    } else {  // averages are the optimizer's; a flush or swap ends here, at most by its deadline
      core.comm()->engine().wait_until([&] { return !core.busy(); }, -1);
    }
    return ok_status();
  });
}

}  // extern "C"
