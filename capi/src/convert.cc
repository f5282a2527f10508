#include "capi/src/convert.h"

#include <algorithm>
#include <cstring>

#include "capi/src/struct_in.h"
#include "core/base/text.h"

namespace sotto::capi {
namespace {

// So that sizes of concatenations and byte offsets stay within 63 bits.
constexpr uint64_t kMaxBytes = uint64_t{1} << 48;
constexpr uint64_t kMaxBuffers = uint64_t{1} << 20;
constexpr uint32_t kKnownFlags = SOTTO_CALL_DONE_ANY_THREAD | SOTTO_CALL_NO_BLOCK;

Status check_dtype_and_place(const sotto_buffer& b, std::string_view name) {
  if (!dtype_known(b.dtype)) {
    return unsupported(
        "{}.dtype is {:#010x}; known: int8, int16, int32, int64, uint8, uint16, uint32, uint64, "
        "fp16, fp32, fp64, "
        "bf16 (SOTTO_INT8, ...)",
        name, b.dtype);
  }
  switch (b.device_type) {
    case 0:
    case SOTTO_DEVICE_CPU:
      if (b.device_id == 0) break;
      return invalid_argument("{}.device_id is {}; the CPU has number 0", name, b.device_id);
    case SOTTO_DEVICE_CUDA:
    case SOTTO_DEVICE_CUDA_HOST:
      if (b.device_id >= 0) break;
      return invalid_argument("{}.device_id is {}; CUDA devices are numbered from 0", name,
                              b.device_id);
    default:
      return unsupported(
          "{}.device_type is {}; known: {} (CPU), {} (CUDA), {} (host memory pinned by CUDA)", name,
          b.device_type, SOTTO_DEVICE_CPU, SOTTO_DEVICE_CUDA, SOTTO_DEVICE_CUDA_HOST);
  }
  if (b.flags != 0) return unsupported("{}.flags is {:#x}; this version knows none", name, b.flags);
  return ok_status();
}

struct Placed {
  uintptr_t begin;
  uintptr_t end;
  const MemoryRange* range;
};

uintptr_t begin_of(const MemoryRange& range) { return reinterpret_cast<uintptr_t>(range.data); }

std::string label(const MemoryRange& range) {
  return fmt::format("{}[{}]", range.name, range.index);
}

Status overlap(const MemoryRange& a, const MemoryRange& b) {
  return invalid_argument(
      "{} ({} at {}) and {} ({} at {}) overlap, and not as in-place operations may", label(a),
      counted(a.bytes, "byte"), a.data, label(b), counted(b.bytes, "byte"), b.data);
}

}  // namespace

Result<Buffer> take_buffer(const sotto_buffer& b, std::string_view name, bool need_data) {
  SOTTO_TRY(check_dtype_and_place(b, name));
  Buffer out{b.data, b.count, static_cast<Dtype>(b.dtype), {}};
  if (b.device_type == SOTTO_DEVICE_CUDA) out.device = {DeviceType::kCuda, b.device_id};
  const uint64_t element = dtype_bytes(out.dtype);
  if (b.count > kMaxBytes / element) {
    return invalid_argument("{}.count is {}; allowed: at most {} elements of {}", name, b.count,
                            kMaxBytes / element, dtype_name(out.dtype));
  }
  if (!need_data) return out;
  if (b.data == nullptr && b.count != 0)
    return invalid_argument("{}.data is NULL but its count is {}", name, b.count);
  if (reinterpret_cast<uintptr_t>(b.data) % element != 0) {
    return invalid_argument("{}.data {} is not aligned to {}, the size of {}", name, b.data,
                            element, dtype_name(out.dtype));
  }
  return out;
}

Status take_buffers(const sotto_buffer* buffers, uint64_t n, std::string_view name,
                    SmallVector<Buffer>* out, bool need_data) {
  if (n > kMaxBuffers)
    return invalid_argument("n is {}; allowed: at most {} buffers", n, kMaxBuffers);
  if (buffers == nullptr && n != 0) return invalid_argument("{} is NULL but n is {}", name, n);
  out->reserve(n);
  for (uint64_t i = 0; i < n; ++i) {
    Result<Buffer> buffer = take_buffer(buffers[i], name, need_data);
    // The index is put in on failure only: names are not made for every buffer of every call.
    if (!buffer.ok())
      return take_buffer(buffers[i], fmt::format("{}[{}]", name, i), need_data).status();
    out->push_back(*buffer);
  }
  return ok_status();
}

std::string CommonDevice::Name::whole() const {
  return index ? fmt::format("{}[{}]", text, *index) : text;
}

Status CommonDevice::add(const Buffer& buffer, std::string_view name) {
  return add(buffer, name, std::nullopt);
}

Status CommonDevice::add(const Buffer& buffer, std::string_view name, std::optional<size_t> index) {
  if (buffer.count == 0 || id_ == buffer.device) return ok_status();
  Name of{std::string(name), index};
  if (!id_) {
    id_ = buffer.device;
    name_ = std::move(of);
    return ok_status();
  }
  return invalid_argument("{} is on {}, but {} is on {}; the buffers of a call are on one device",
                          name_.whole(), device_name(*id_), of.whole(), device_name(buffer.device));
}

Status CommonDevice::add(std::span<const Buffer> buffers, std::string_view name) {
  for (size_t i = 0; i < buffers.size(); ++i) SOTTO_TRY(add(buffers[i], name, i));
  return ok_status();
}

Status CommonDevice::add(const CommonDevice& other) {
  if (!other.id_) return ok_status();
  return add(Buffer{nullptr, 1, Dtype::kU8, *other.id_}, other.name_.text, other.name_.index);
}

Result<std::shared_ptr<Device>> CommonDevice::find(Context& context) const {
  if (!id_) return context.device();
  Result<std::shared_ptr<Device>> device = context.device_of(*id_);
  if (!device.ok()) return device.status().with_prefix(name_.whole());
  return device;
}

Status check_overlap(std::span<const MemoryRange> ranges) {
  SmallVector<Placed, 8> placed;
  placed.reserve(ranges.size());
  for (const MemoryRange& range : ranges) {
    const uintptr_t begin = begin_of(range);
    if (range.bytes != 0) placed.push_back({begin, begin + range.bytes, &range});
  }
  std::sort(placed.begin(), placed.end(),
            [](const Placed& a, const Placed& b) { return a.begin < b.begin; });
  // Of the ranges that begin before: the one that reaches farthest, and of the written ones.
  const Placed* farthest = nullptr;
  const Placed* farthest_written = nullptr;
  for (const Placed& p : placed) {
    const Placed* other = p.range->written ? farthest : farthest_written;
    if (other != nullptr && other->end > p.begin) return overlap(*other->range, *p.range);
    if (farthest == nullptr || p.end > farthest->end) farthest = &p;
    if (p.range->written && (farthest_written == nullptr || p.end > farthest_written->end))
      farthest_written = &p;
  }
  return ok_status();
}

Status check_apart(const MemoryRange& range, std::span<const MemoryRange> others) {
  const uintptr_t begin = begin_of(range), end = begin + range.bytes;
  // The last that begins before the range's end is the only one that may reach into it.
  const auto behind =
      std::partition_point(others.begin(), others.end(),
                           [&](const MemoryRange& other) { return begin_of(other) < end; });
  if (range.bytes == 0 || behind == others.begin()) return ok_status();
  const MemoryRange& last = *std::prev(behind);
  return begin_of(last) + last.bytes > begin ? overlap(range, last) : ok_status();
}

Result<CallIn> take_call(const sotto_call* call) {
  CallIn out;
  sotto_call c = {};  // NULL means the same as all zero, the default stream included
  if (call != nullptr) SOTTO_TRY(take(call, c, sizeof(sotto_call), "call"));
  if ((c.flags & ~kKnownFlags) != 0) {
    return unsupported("call.flags is {:#x}; this version knows {:#x}", c.flags, kKnownFlags);
  }
  if (c.reduce < SOTTO_REDUCE_DEFAULT || c.reduce > SOTTO_REDUCE_BIT_OR) {
    return invalid_argument("call.reduce is {}; allowed: {} to {}", c.reduce, SOTTO_REDUCE_DEFAULT,
                            SOTTO_REDUCE_BIT_OR);
  }
  out.options.tag = c.tag;
  out.options.stream = c.stream;
  out.options.timeout_us = c.timeout_us;
  out.options.priority = c.priority;
  out.options.no_block = (c.flags & SOTTO_CALL_NO_BLOCK) != 0;
  out.options.done_any_thread = (c.flags & SOTTO_CALL_DONE_ANY_THREAD) != 0;
  out.on_done = c.on_done;
  out.user = c.user;
  out.reduce = c.reduce;
  out.codec = c.codec;
  return out;
}

Status refuse_reduce_and_codec(const CallIn& call) {
  if (call.reduce != SOTTO_REDUCE_DEFAULT) {
    return invalid_argument("call.reduce is {}; this operation reduces nothing: it must be 0",
                            call.reduce);
  }
  if (call.codec != nullptr)
    return invalid_argument("call.codec must be NULL: only sotto_all_reduce takes a codec");
  return ok_status();
}

Status refuse_all_but_tag_and_reduce(const CallIn& call) {
  const CallOptions& o = call.options;
  std::string_view field;
  if (o.timeout_us != 0) field = "timeout_us";
  if (o.priority != 0) field = "priority";
  if (o.no_block || o.done_any_thread) field = "flags";
  if (o.stream != nullptr) field = "stream";
  if (call.on_done != nullptr) field = "on_done";
  if (!field.empty()) {
    return invalid_argument(
        "call.{} is set inside a group; give it to sotto_group_end, for the whole operation",
        field);
  }
  if (call.codec != nullptr)
    return unsupported("call.codec is set inside a group; compressed calls cannot be grouped");
  return ok_status();
}

Result<ReduceOp> take_reduce(sotto_reduce_op reduce, std::span<const Buffer> buffers) {
  switch (reduce) {
    case SOTTO_REDUCE_MIN: return ReduceOp::kMin;
    case SOTTO_REDUCE_MAX: return ReduceOp::kMax;
    case SOTTO_REDUCE_MEAN: return ReduceOp::kMean;
    case SOTTO_REDUCE_PROD: return ReduceOp::kProd;
    case SOTTO_REDUCE_BIT_OR: break;
    default: return ReduceOp::kSum;
  }
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (!dtype_is_float(buffers[i].dtype)) continue;
    return invalid_argument(
        "call.reduce is SOTTO_REDUCE_BIT_OR, which needs integers, but in[{}] is {}", i,
        dtype_name(buffers[i].dtype));
  }
  return ReduceOp::kBitOr;
}

Status write_text(std::string_view text, char* buf, uint64_t cap, uint64_t* out_len) {
  if (out_len == nullptr) return invalid_argument("out_len is NULL");
  if (buf != nullptr && cap > text.size()) {
    std::memcpy(buf, text.data(), text.size());
    buf[text.size()] = '\0';
  }
  *out_len = text.size();
  return ok_status();
}

Status write_bytes(const void* data, uint64_t bytes, void* buf, uint64_t cap, uint64_t* out_len) {
  if (out_len == nullptr) return invalid_argument("out_len is NULL");
  if (buf != nullptr && cap >= bytes && bytes != 0) std::memcpy(buf, data, bytes);
  *out_len = bytes;
  return ok_status();
}

}  // namespace sotto::capi
