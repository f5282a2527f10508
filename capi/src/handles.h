// What the opaque types of sotto.h stand for. A handle is the caller's reference, known by a pool,
// so that one that has been destroyed is recognised; the objects behind it live as long as anything
// uses them, a call of another thread included.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "capi/src/convert.h"
#include "capi/src/guard.h"
#include "capi/src/handle_pool.h"
#include "core/base/status.h"
#include "core/codec/codec.h"
#include "core/group/comm.h"
#include "core/group/context.h"
#include "core/optim/optimizer.h"
#include "core/outer/outer.h"
#include "core/overlap/overlap.h"
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

// Parameters and model copies, which steps write. Threads: any.
class WrittenMemory {
 public:
  // In the order of addresses.
  explicit WrittenMemory(std::vector<MemoryRange> ranges) : ranges_(std::move(ranges)) {}
  // INVALID_ARGUMENT if the range overlaps one of them.
  Status check(const MemoryRange& range) const {
    const std::lock_guard lock(mutex_);
    return check_apart(range, ranges_);
  }
  void move(std::vector<MemoryRange> ranges) {
    const std::lock_guard lock(mutex_);
    ranges_ = std::move(ranges);
  }
  // For the thread that may move them.
  const std::vector<MemoryRange>& ranges() const { return ranges_; }

 private:
  mutable std::mutex mutex_;
  std::vector<MemoryRange> ranges_;
};

}  // namespace sotto::capi

struct sotto_context {
  std::shared_ptr<sotto::Context> core;
};

struct sotto_comm {
  std::shared_ptr<sotto::capi::CommState> state;
  // The failure that sotto_comm_error has shown: its text has to stay.
  mutable std::mutex shown_mutex;
  mutable sotto::Status shown;
};

struct sotto_codec {
  std::shared_ptr<sotto::capi::CommState> comm;
  std::shared_ptr<sotto::Codec> core;
};

struct sotto_optim {
  std::shared_ptr<sotto::capi::CommState> comm;
  std::shared_ptr<sotto::Optimizer> core;
  std::shared_ptr<sotto::Outer> outer;                  // that follows its steps; null: none does
  std::vector<std::weak_ptr<sotto::Overlap>> overlaps;  // whose rounds are its steps
  std::shared_ptr<sotto::capi::WrittenMemory> written;
};

struct sotto_outer {
  std::shared_ptr<sotto::capi::CommState> comm;
  std::shared_ptr<sotto::capi::CommState> shards;  // null: parameters are whole
  std::shared_ptr<sotto::Outer> core;
  std::shared_ptr<sotto::Optimizer> optim;  // makes its steps and has its state; null: none does
  // What steps write, in the order of addresses.
  std::vector<sotto::capi::MemoryRange> written;
};

struct sotto_overlap {
  std::shared_ptr<sotto::capi::CommState> comm;
  std::shared_ptr<sotto::Overlap> core;
  std::shared_ptr<const sotto::capi::WrittenMemory> written;  // by its steps; null: of averages
};

namespace sotto::capi {

template <class Object>
using ObjectPool = HandlePool<std::unique_ptr<Object>>;
// The pool of sotto_context, sotto_comm, sotto_codec, sotto_optim, sotto_outer or sotto_overlap.
template <class Object>
ObjectPool<Object>& pool_of();
template <>
ObjectPool<sotto_context>& pool_of();
template <>
ObjectPool<sotto_comm>& pool_of();
template <>
ObjectPool<sotto_codec>& pool_of();
template <>
ObjectPool<sotto_optim>& pool_of();
template <>
ObjectPool<sotto_outer>& pool_of();
template <>
ObjectPool<sotto_overlap>& pool_of();

// The handle that the caller gets.
template <class Object>
Result<Object*> give_out(std::unique_ptr<Object> object) {
  SOTTO_ASSIGN(void* const handle, pool_of<Object>().insert(std::move(object)));
  return static_cast<Object*>(handle);
}

// What the caller's handle stands for. INVALID_ARGUMENT: NULL, no handle, or destroyed.
// INVALID_STATE: made before a fork.
template <class Object>
Result<typename ObjectPool<Object>::Use> object_of(const Object* handle) {
  return pool_of<Object>().get(handle);
}

// The body of a function on a handle, which gets the object.
template <class Object, class Body>
sotto_status guarded_on(const char* function, Object* handle, Body&& body) noexcept {
  return guarded(function, [&]() -> Status {
    SOTTO_ASSIGN(const auto object, object_of(handle));
    return body(object->get());
  });
}

// Of a function that destroys: the handle is gone, `end` gets the object for the last time. NULL:
// nothing happens.
template <class Object, class End>
sotto_status destroyed(const char* function, Object* handle, End&& end) noexcept {
  return guarded(function, [&]() -> Status {
    if (handle == nullptr) return ok_status();
    SOTTO_TRY(object_of(handle).status());
    SOTTO_TRY(CallbackScope::refuse_inside());
    SOTTO_ASSIGN(const auto object, pool_of<Object>().remove(handle));
    return end(**object);
  });
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
