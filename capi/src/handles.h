// What the opaque types of sotto.h hold. A handle is the caller's reference; the objects behind it
// live as long as anything uses them.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "capi/src/convert.h"
#include "capi/src/guard.h"
#include "core/base/status.h"
#include "core/group/codec.h"
#include "core/group/comm.h"
#include "core/group/context.h"
#include "core/optim/optimizer.h"
#include "sotto/sotto.h"

namespace sotto::capi {

// Calls collected between sotto_group_begin and sotto_group_end.
struct PendingGroup {
  bool open = false;
  std::vector<Call> calls;
  std::vector<MemoryRange> ranges;  // memory of all calls
  CommonDevice device;
  Status first_error;
};

// A comm as the C API sees it; codecs and optimizers share it.
struct CommState {
  std::shared_ptr<Comm> core;
  PendingGroup group;
};

}  // namespace sotto::capi

struct sotto_context {
  std::shared_ptr<sotto::Context> core;
  uint32_t fork_generation;
};

struct sotto_comm {
  std::shared_ptr<sotto::capi::CommState> state;
  uint32_t fork_generation;
  // The failure that sotto_comm_error has shown: its text has to stay.
  mutable std::mutex shown_mutex;
  mutable sotto::Status shown;
};

struct sotto_codec {
  std::shared_ptr<sotto::capi::CommState> comm;
  std::shared_ptr<sotto::Codec> core;
  uint32_t fork_generation;
};

struct sotto_optim {
  std::shared_ptr<sotto::capi::CommState> comm;
  std::shared_ptr<sotto::Optimizer> core;
  uint32_t fork_generation;
  // Parameters and model copies, in the order of their addresses.
  std::vector<sotto::capi::MemoryRange> written;
};

namespace sotto::capi {

// Checks that every function on a handle begins with: not NULL, not of the parent of a fork.
template <class Handle>
Status check_handle(const Handle* handle, std::string_view name) {
  if (handle == nullptr) return invalid_argument("{} is NULL", name);
  return check_not_forked(handle->fork_generation);
}
// The same for functions tagged "not from callbacks".
template <class Handle>
Status check_handle_outside(const Handle* handle, std::string_view name) {
  SOTTO_TRY(check_handle(handle, name));
  return CallbackScope::refuse_inside();
}

inline Status check_pointer(const void* pointer, std::string_view name) {
  if (pointer == nullptr) return invalid_argument("{} is NULL", name);
  return ok_status();
}

inline Status check_no_group(const CommState& comm) {
  if (!comm.group.open) return ok_status();
  return invalid_state("the comm has an open group; call sotto_group_end first");
}

}  // namespace sotto::capi
