// sotto_overlap_*
#include <memory>
#include <utility>
#include <vector>

#include "capi/src/convert.h"
#include "capi/src/handles.h"
#include "capi/src/op_handles.h"
#include "capi/src/state_mode.h"
#include "capi/src/struct_in.h"
#include "core/state/overlap_state.h"

using namespace sotto;        // NOLINT: the definitions below are the border itself
using namespace sotto::capi;  // NOLINT

namespace {

struct Gradients {
  std::vector<OverlapTensor> tensors;
  std::shared_ptr<Device> device;
};

Result<Gradients> take_gradients(const sotto_comm& comm, const sotto_buffer* like, uint64_t n) {
  SmallVector<Buffer> buffers;
  SOTTO_TRY(take_buffers(like, n, "like", &buffers, false));
  CommonDevice common;
  SOTTO_TRY(common.add(buffers, "like"));
  Gradients out;
  std::vector<MemoryRange> ranges;
  for (size_t i = 0; i < buffers.size(); ++i) {
    const Buffer& b = buffers[i];
    if (b.data != nullptr) {
      SOTTO_TRY(take_buffer(like[i], fmt::format("like[{}]", i)).status());
      ranges.push_back({b.data, b.bytes(), true, "like", i});
    }
    out.tensors.push_back({b.count, b.dtype, b.data});
  }
  SOTTO_TRY(check_overlap(ranges));
  SOTTO_ASSIGN(out.device, common.find(*comm.state->core->context()));
  return out;
}

Status create(sotto_comm* comm, const char* json, const sotto_buffer* like, uint64_t n,
              sotto_overlap** out_overlap) {
  SOTTO_TRY(CallbackScope::refuse_inside());
  auto object = std::make_unique<sotto_overlap>();
  object->comm = comm->state;
  // The other ranks hear of what is wrong here, so that none waits for this one.
  Result<Gradients> taken = caught([&]() -> Result<Gradients> {
    SOTTO_TRY(check_no_group(*comm->state));
    SOTTO_TRY(check_pointer(json, "json"));
    SOTTO_TRY(check_pointer(out_overlap, "out_overlap"));
    return take_gradients(*comm, like, n);
  });
  Gradients mine = taken.ok() ? taken.take() : Gradients();
  SOTTO_ASSIGN(object->core,
               Overlap::create(comm->state->core, json == nullptr ? "" : json,
                               std::move(mine.tensors), std::move(mine.device), taken.status()));
  SOTTO_ASSIGN(*out_overlap, give_out(std::move(object)));
  return ok_status();
}

Status create_step(sotto_optim* optim, const char* json, sotto_overlap** out_overlap) {
  SOTTO_TRY(CallbackScope::refuse_inside());
  auto object = std::make_unique<sotto_overlap>();
  object->comm = optim->comm;
  object->written = optim->written;
  const Status refused = caught([&] {
    SOTTO_TRY(check_no_group(*optim->comm));
    SOTTO_TRY(check_pointer(out_overlap, "out_overlap"));
    return optim->core->check_idle();
  });
  SOTTO_ASSIGN(object->core,
               Overlap::create_step(optim->core, json == nullptr ? "" : json, refused));
  std::erase_if(optim->overlaps, [](const auto& overlap) { return overlap.expired(); });
  optim->overlaps.push_back(object->core);
  SOTTO_ASSIGN(*out_overlap, give_out(std::move(object)));
  return ok_status();
}

Result<ReduceOp> take_mean_or_sum(sotto_reduce_op reduce) {
  if (reduce == SOTTO_REDUCE_DEFAULT || reduce == SOTTO_REDUCE_MEAN) return ReduceOp::kMean;
  if (reduce == SOTTO_REDUCE_SUM) return ReduceOp::kSum;
  return invalid_argument(
      "call.reduce is {}; allowed: {} (mean), {} (SOTTO_REDUCE_SUM), {} (SOTTO_REDUCE_MEAN)",
      reduce, SOTTO_REDUCE_DEFAULT, SOTTO_REDUCE_SUM, SOTTO_REDUCE_MEAN);
}

Status begin(sotto_overlap* overlap, const sotto_call* call, sotto_op** out_op) {
  SOTTO_TRY(CallbackScope::refuse_inside());
  SOTTO_TRY(check_no_group(*overlap->comm));
  SOTTO_TRY(check_pointer(out_op, "out_op"));
  SOTTO_ASSIGN(CallIn options, take_call(call));
  SOTTO_ASSIGN(const ReduceOp reduce, take_mean_or_sum(options.reduce));
  if (overlap->core->config().codec && reduce == ReduceOp::kSum)
    return invalid_argument(
        "call.reduce is {} (SOTTO_REDUCE_SUM), but with a codec gradients become their mean: "
        "allowed are {} and {} (SOTTO_REDUCE_MEAN)",
        SOTTO_REDUCE_SUM, SOTTO_REDUCE_DEFAULT, SOTTO_REDUCE_MEAN);
  if (overlap->core->makes_steps() && options.reduce != SOTTO_REDUCE_DEFAULT)
    return invalid_argument(
        "call.reduce is {}, but rounds of this overlap are steps, which average as their optimizer "
        "says: allowed is {}",
        options.reduce, SOTTO_REDUCE_DEFAULT);
  options.reduce = SOTTO_REDUCE_DEFAULT;
  SOTTO_TRY(refuse_reduce_and_codec(options));
  return run_operation(*overlap->comm->core, options, out_op,
                       [&](const CallOptions& o) { return overlap->core->begin(o, reduce); });
}

Result<std::span<const uint64_t>> take_indices(const uint64_t* indices, uint64_t n) {
  if (indices == nullptr && n != 0) return invalid_argument("indices is NULL but n is {}", n);
  return std::span(indices, n);
}

Status ready(sotto_overlap* overlap, const uint64_t* indices, const sotto_buffer* grads, uint64_t n,
             void* stream) {
  SOTTO_TRY(CallbackScope::refuse_inside());
  SOTTO_ASSIGN(const auto numbers, take_indices(indices, n));
  SmallVector<ParameterPlace> places;
  if (grads != nullptr) {
    SmallVector<Buffer> buffers;
    SOTTO_TRY(take_buffers(grads, n, "grads", &buffers));
    for (const Buffer& b : buffers) {
      if (overlap->written != nullptr) {
        SOTTO_TRY(overlap->written->check({b.data, b.bytes(), false, "grads", places.size()}));
      }
      places.push_back({b.data, b.count, b.dtype, b.device});
    }
  }
  return overlap->core->ready(numbers, places, stream);
}

Status unused(sotto_overlap* overlap, const uint64_t* indices, uint64_t n) {
  SOTTO_TRY(CallbackScope::refuse_inside());
  SOTTO_ASSIGN(const auto numbers, take_indices(indices, n));
  return overlap->core->unused(numbers);
}

Status get_info(const sotto_overlap* overlap, sotto_overlap_info* out_info) {
  const OverlapInfo i = overlap->core->info();
  sotto_overlap_info out = {};
  out.buckets = i.buckets;
  out.rounds = i.rounds;
  out.layout = i.layout;
  out.begin_to_last_ready_ns = i.begin_to_last_ready_ns;
  out.network_ns = i.network_ns;
  out.exposed_ns = i.exposed_ns;
  out.payload_bytes_per_round = i.payload_bytes_per_round;
  out.header_bytes_per_round = i.header_bytes_per_round;
  out.state_bytes = i.state_bytes;
  out.missing = static_cast<uint32_t>(i.missing);
  out.early_payload_bytes_per_round = i.early_payload_bytes_per_round;
  return put(out, out_info, sizeof(sotto_overlap_info), "out_info");
}

Status state_export(const sotto_overlap* overlap, sotto_state_mode mode, void* buf, uint64_t cap,
                    uint64_t* out_len) {
  SOTTO_TRY(CallbackScope::refuse_inside());
  SOTTO_TRY(check_pointer(out_len, "out_len"));
  SOTTO_ASSIGN(const StateMode checked, take_mode(mode));
  if (checked == StateMode::kMean) {
    // Other ranks are asked only when the result has a place.
    SOTTO_ASSIGN(const uint64_t bytes, mean_state_bytes(*overlap->core));
    if (buf == nullptr || cap < bytes) return write_bytes(nullptr, bytes, nullptr, 0, out_len);
  }
  SOTTO_ASSIGN(const std::vector<std::byte> blob, export_state(*overlap->core, checked));
  return write_bytes(blob.data(), blob.size(), buf, cap, out_len);
}

Status state_import(sotto_overlap* overlap, sotto_state_mode mode, const void* buf, uint64_t len) {
  SOTTO_TRY(CallbackScope::refuse_inside());
  SOTTO_ASSIGN(const StateMode checked, take_mode(mode));
  SOTTO_ASSIGN(const std::span<const std::byte> blob, take_blob(buf, len));
  return import_state(*overlap->core, checked, blob);
}

Status report(const sotto_overlap* overlap, const char* kind, char* buf, uint64_t cap,
              uint64_t* out_len) {
  SOTTO_ASSIGN(const std::string text, overlap->core->report(kind == nullptr ? "all" : kind));
  return write_text(text, buf, cap, out_len);
}

}  // namespace

extern "C" {

sotto_status sotto_overlap_create(sotto_comm* comm, const char* json, const sotto_buffer* like,
                                  uint64_t n, sotto_overlap** out_overlap) {
  return guarded_on("sotto_overlap_create", comm,
                    [&](auto* object) { return create(object, json, like, n, out_overlap); });
}

sotto_status sotto_overlap_create_step(sotto_optim* optim, const char* json,
                                       sotto_overlap** out_overlap) {
  return guarded_on("sotto_overlap_create_step", optim,
                    [&](auto* object) { return create_step(object, json, out_overlap); });
}

sotto_status sotto_overlap_begin(sotto_overlap* overlap, const sotto_call* call,
                                 sotto_op** out_op) {
  return guarded_on("sotto_overlap_begin", overlap,
                    [&](auto* object) { return begin(object, call, out_op); });
}

sotto_status sotto_overlap_ready(sotto_overlap* overlap, const uint64_t* indices,
                                 const sotto_buffer* grads, uint64_t n, void* stream) {
  return guarded_on("sotto_overlap_ready", overlap,
                    [&](auto* object) { return ready(object, indices, grads, n, stream); });
}

sotto_status sotto_overlap_unused(sotto_overlap* overlap, const uint64_t* indices, uint64_t n) {
  return guarded_on("sotto_overlap_unused", overlap,
                    [&](auto* object) { return unused(object, indices, n); });
}

sotto_status sotto_overlap_finish(sotto_overlap* overlap) {
  return guarded_on("sotto_overlap_finish", overlap, [&](auto* object) -> Status {
    SOTTO_TRY(CallbackScope::refuse_inside());
    return object->core->finish();
  });
}

sotto_status sotto_overlap_withdraw(sotto_overlap* overlap, const char* reason) {
  return guarded_on("sotto_overlap_withdraw", overlap, [&](auto* object) -> Status {
    SOTTO_TRY(CallbackScope::refuse_inside());
    return object->core->withdraw(reason == nullptr ? "no reason was given" : reason);
  });
}

sotto_status sotto_overlap_get_info(const sotto_overlap* overlap, sotto_overlap_info* out_info) {
  return guarded_on("sotto_overlap_get_info", overlap,
                    [&](auto* object) { return get_info(object, out_info); });
}

sotto_status sotto_overlap_report(const sotto_overlap* overlap, const char* kind, char* buf,
                                  uint64_t cap, uint64_t* out_len) {
  return guarded_on("sotto_overlap_report", overlap,
                    [&](auto* object) { return report(object, kind, buf, cap, out_len); });
}

sotto_status sotto_overlap_state_export(const sotto_overlap* overlap, sotto_state_mode mode,
                                        void* buf, uint64_t cap, uint64_t* out_len) {
  return guarded_on("sotto_overlap_state_export", overlap,
                    [&](auto* object) { return state_export(object, mode, buf, cap, out_len); });
}

sotto_status sotto_overlap_state_import(sotto_overlap* overlap, sotto_state_mode mode,
                                        const void* buf, uint64_t len) {
  return guarded_on("sotto_overlap_state_import", overlap,
                    [&](auto* object) { return state_import(object, mode, buf, len); });
}

sotto_status sotto_overlap_destroy(sotto_overlap* overlap) {
  return destroyed("sotto_overlap_destroy", overlap, [](sotto_overlap& object) {
    object.core->close();
    return ok_status();
  });
}

}  // extern "C"
