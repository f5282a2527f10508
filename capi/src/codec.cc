// sotto_codec_*
#include <memory>
#include <span>
#include <vector>

#include "capi/src/convert.h"
#include "capi/src/handles.h"
#include "capi/src/state_mode.h"
#include "core/state/optim_state.h"

using namespace sotto;        // NOLINT: the definitions below are the border itself
using namespace sotto::capi;  // NOLINT

namespace {

Status create(sotto_comm* comm, const char* json, const sotto_buffer* like, uint64_t n,
              sotto_codec** out_codec) {
  SOTTO_TRY(CallbackScope::refuse_inside());
  SOTTO_TRY(check_pointer(json, "json"));
  SOTTO_TRY(check_pointer(out_codec, "out_codec"));
  if (n == 0) return invalid_argument("n is 0; a codec needs at least one tensor");
  SmallVector<Buffer> tensors;
  SOTTO_TRY(take_buffers(like, n, "like", &tensors, false));
  std::vector<uint64_t> counts;
  std::vector<Dtype> dtypes;
  for (const Buffer& tensor : tensors) {
    counts.push_back(tensor.count);
    dtypes.push_back(tensor.dtype);
  }
  CommonDevice common;
  SOTTO_TRY(common.add(tensors, "like"));
  SOTTO_ASSIGN(std::shared_ptr<Device> device, common.find(*comm->state->core->context()));
  auto object = std::make_unique<sotto_codec>();
  object->comm = comm->state;
  SOTTO_ASSIGN(object->core, Codec::create(comm->state->core, json, std::move(counts), dtypes,
                                           std::move(device)));
  SOTTO_ASSIGN(*out_codec, give_out(std::move(object)));
  return ok_status();
}

Status state_export(const sotto_codec* codec, sotto_state_mode mode, void* buf, uint64_t cap,
                    uint64_t* out_len) {
  SOTTO_TRY(check_pointer(out_len, "out_len"));
  SOTTO_ASSIGN(const StateMode checked, take_mode(mode));
  if (checked == StateMode::kMean) {
    // Other ranks are asked only when the result has a place.
    SOTTO_TRY(CallbackScope::refuse_inside());
    const uint64_t bytes = mean_state_bytes(*codec->core);
    if (buf == nullptr || cap < bytes) return write_bytes(nullptr, bytes, nullptr, 0, out_len);
  }
  SOTTO_ASSIGN(const std::vector<std::byte> blob, export_state(*codec->core, checked));
  return write_bytes(blob.data(), blob.size(), buf, cap, out_len);
}

Status state_import(sotto_codec* codec, sotto_state_mode mode, const void* buf, uint64_t len) {
  SOTTO_ASSIGN(const StateMode checked, take_mode(mode));
  SOTTO_ASSIGN(const std::span<const std::byte> blob, take_blob(buf, len));
  return import_state(*codec->core, checked, blob);
}

}  // namespace

extern "C" {

sotto_status sotto_codec_create(sotto_comm* comm, const char* json, const sotto_buffer* like,
                                uint64_t n, sotto_codec** out_codec) {
  return guarded_on("sotto_codec_create", comm,
                    [&](auto* object) { return create(object, json, like, n, out_codec); });
}

sotto_status sotto_codec_destroy(sotto_codec* codec) {
  return destroyed("sotto_codec_destroy", codec, [](sotto_codec&) { return ok_status(); });
}

sotto_status sotto_codec_state_export(const sotto_codec* codec, sotto_state_mode mode, void* buf,
                                      uint64_t cap, uint64_t* out_len) {
  return guarded_on("sotto_codec_state_export", codec,
                    [&](auto* object) { return state_export(object, mode, buf, cap, out_len); });
}

sotto_status sotto_codec_state_import(sotto_codec* codec, sotto_state_mode mode, const void* buf,
                                      uint64_t len) {
  return guarded_on("sotto_codec_state_import", codec,
                    [&](auto* object) { return state_import(object, mode, buf, len); });
}

}  // extern "C"
