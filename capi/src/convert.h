// From the structs of sotto.h to the types of core, with all checks that need no knowledge of the
// comm's state.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/small_vector.h"
#include "core/base/status.h"
#include "core/group/comm.h"
#include "core/kernels/call.h"
#include "sotto/sotto.h"

namespace sotto::capi {

// A checked sotto_buffer: known dtype and kind of device, aligned, its bytes fit into the address
// space. Pinned host memory is the CPU's.
struct Buffer {
  void* data = nullptr;
  uint64_t count = 0;
  Dtype dtype = Dtype::kF32;
  DeviceId device;
  uint64_t bytes() const { return count * dtype_bytes(dtype); }
};

// `need_data` false: only dtype and count matter. `name` is the argument's, as in "in[3]".
Result<Buffer> take_buffer(const sotto_buffer& buffer, std::string_view name,
                           bool need_data = true);
Status take_buffers(const sotto_buffer* buffers, uint64_t n, std::string_view name,
                    SmallVector<Buffer>* out, bool need_data = true);

// A range of memory that a call uses; `name` and `index` are for messages.
struct MemoryRange {
  const void* data = nullptr;
  uint64_t bytes = 0;
  bool written = false;
  std::string_view name;
  uint64_t index = 0;
};
// INVALID_ARGUMENT if a written range overlaps another one. Ranges without bytes overlap nothing.
Status check_overlap(std::span<const MemoryRange> ranges);
// INVALID_ARGUMENT if the range overlaps one of `others`: these are in the order of their addresses
// and overlap nothing.
Status check_apart(const MemoryRange& range, std::span<const MemoryRange> others);

// The one device of the buffers of a call. Buffers without elements are nowhere.
class CommonDevice {
 public:
  // INVALID_ARGUMENT: on another device than those before.
  Status add(const Buffer& buffer, std::string_view name);
  Status add(std::span<const Buffer> buffers, std::string_view name);
  Status add(const CommonDevice& other);
  // The context's own if there was no buffer.
  Result<std::shared_ptr<Device>> find(Context& context) const;

 private:
  // Whose device counts, as it is named on failure: names are not made for every call.
  struct Name {
    std::string text;
    std::optional<size_t> index;
    std::string whole() const;
  };
  Status add(const Buffer& buffer, std::string_view name, std::optional<size_t> index);

  std::optional<DeviceId> id_;
  Name name_;  // of the first buffer
};

struct CallIn {
  CallOptions options;  // without on_done: see Completion (op_handles.h)
  sotto_done_fn on_done = nullptr;
  void* user = nullptr;
  sotto_reduce_op reduce = SOTTO_REDUCE_DEFAULT;
  sotto_codec* codec = nullptr;
};
// `call` may be null.
Result<CallIn> take_call(const sotto_call* call);
// For operations that reduce nothing.
Status refuse_reduce_and_codec(const CallIn& call);
// For calls inside a group: the operation's options are those of sotto_group_end.
Status refuse_all_but_tag_and_reduce(const CallIn& call);
// The reduction of the buffers; bit-or needs integers.
Result<ReduceOp> take_reduce(sotto_reduce_op reduce, std::span<const Buffer> buffers);

// Reports and states: writes what fits, as sotto.h says. `text` ends with a zero byte in buf.
Status write_text(std::string_view text, char* buf, uint64_t cap, uint64_t* out_len);
Status write_bytes(const void* data, uint64_t bytes, void* buf, uint64_t cap, uint64_t* out_len);

}  // namespace sotto::capi
