// Collectives, point to point, groups.
#include <algorithm>
#include <utility>
#include <vector>

#include "capi/src/convert.h"
#include "capi/src/handles.h"
#include "capi/src/op_handles.h"
#include "capi/src/parts.h"
#include "core/base/text.h"

using namespace sotto;        // NOLINT: the definitions below are the border itself
using namespace sotto::capi;  // NOLINT

namespace {

// One call on its way through the checks.
struct Submission {
  Comm* comm = nullptr;
  CommState* state = nullptr;
  CallIn options;
  Call call;
  SmallVector<MemoryRange, 8> ranges;  // memory that the call reads and writes
  CommonDevice device;
};

// What in and out of a collective are to each other.
enum class Sides : uint8_t {
  kEqual,      // the same counts
  kInIsPart,   // in is one rank's part of out
  kOutIsPart,  // out is one rank's part of in
};

// Whether `part` is where this rank's part of `whole` lies.
bool lies_in(const Buffer& part, const Buffer& whole, int32_t rank) {
  return part.data ==
         static_cast<unsigned char*>(whole.data) + part.bytes() * static_cast<uint64_t>(rank);
}

Status begin(sotto_comm* comm, const sotto_call* call, OpKind kind, Submission* s) {
  SOTTO_TRY(CallbackScope::refuse_inside());
  SOTTO_ASSIGN(s->options, take_call(call));
  s->state = comm->state.get();
  s->comm = comm->state->core.get();
  s->call.request.kind = kind;
  s->call.request.rank = s->comm->rank();
  s->call.request.size = s->comm->size();
  s->call.tag = s->options.options.tag;
  if (s->state->group.open) SOTTO_TRY(refuse_all_but_tag_and_reduce(s->options));
  return ok_status();
}

// Starts the call, or puts it into the open group.
Status submit(Submission s, sotto_op** out_op) {
  SOTTO_ASSIGN(s.call.device, s.device.find(*s.comm->context()));
  if (!s.state->group.open) {
    return run_operation(*s.comm, s.options, out_op, [&](const CallOptions& options) {
      return s.comm->start(std::move(s.call), options);
    });
  }
  if (out_op != nullptr) {
    return invalid_argument(
        "out_op must be NULL inside a group; sotto_group_end gives out the operation");
  }
  PendingGroup& group = s.state->group;
  if (group.calls.size() == kMaxDescriptors)
    return invalid_argument("a group has at most {} calls", kMaxDescriptors);
  SOTTO_TRY(group.device.add(s.device));
  group.calls.push_back(std::move(s.call));
  group.ranges.insert(group.ranges.end(), s.ranges.begin(), s.ranges.end());
  return ok_status();
}

// Runs the body of a collective; inside a group its error spoils the whole group.
template <class Body>
sotto_status collective(const char* name, sotto_comm* handle, Body&& body) {
  return guarded_on(name, handle, [&](sotto_comm* comm) {
    const Status status = body(comm);
    if (!status.ok() && !CallbackScope::inside() && comm->state->group.open &&
        comm->state->group.first_error.ok()) {
      comm->state->group.first_error = status.with_prefix(name);
    }
    return status;
  });
}

// Buffers of the request: shape from `shape` (the side whose counts the request carries), memory
// from both.
void add_buffers(std::span<const Buffer> shape, std::span<const Buffer> in,
                 std::span<const Buffer> out, Call* call) {
  for (const Buffer& b : shape) {
    call->request.counts.push_back(b.count);
    call->request.dtypes.push_back(b.dtype);
  }
  call->in.assign(shape.size(), nullptr);
  call->out.assign(shape.size(), nullptr);
  for (size_t i = 0; i < in.size(); ++i) call->in[i] = in[i].data;
  for (size_t i = 0; i < out.size(); ++i) call->out[i] = out[i].data;
}

// in[i] and out[i] are the same memory in the way that the operation allows: one range, written.
void add_ranges(std::span<const Buffer> in, std::span<const Buffer> out,
                std::span<const uint8_t> in_place, SmallVector<MemoryRange, 8>* ranges) {
  for (size_t i = 0; i < std::max(in.size(), out.size()); ++i) {
    const bool together = i < in_place.size() && in_place[i] != 0;
    if (i < in.size() && !(together && in[i].bytes() <= out[i].bytes())) {
      ranges->push_back({in[i].data, in[i].bytes(), together, "in", i});
    }
    if (i < out.size() && !(together && out[i].bytes() < in[i].bytes())) {
      ranges->push_back({out[i].data, out[i].bytes(), true, "out", i});
    }
  }
}

Status check_pair(const Buffer& in, const Buffer& out, uint64_t in_factor, uint64_t out_factor,
                  size_t i) {
  if (in.dtype != out.dtype) {
    return invalid_argument("in[{}] is {} but out[{}] is {}", i, dtype_name(in.dtype), i,
                            dtype_name(out.dtype));
  }
  // Counts are below 2^48 and ranks below 2^16: no overflow.
  if (in.count * in_factor != out.count * out_factor) {
    return invalid_argument(
        "in[{}].count is {} and out[{}].count is {}; needed: {}", i, in.count, i, out.count,
        out_factor > in_factor
            ? fmt::format("in = {} * out, for {}", out_factor, counted(out_factor, "rank"))
        : in_factor > out_factor
            ? fmt::format("out = {} * in, for {}", in_factor, counted(in_factor, "rank"))
            : "equal counts");
  }
  return ok_status();
}

// The common way of collectives with inputs and outputs of equal number.
Status take_pairs(Submission* s, const sotto_buffer* in, const sotto_buffer* out, uint64_t n,
                  Sides sides) {
  SmallVector<Buffer> inputs;
  SOTTO_TRY(take_buffers(in, n, "in", &inputs));
  SmallVector<Buffer> outputs;
  SOTTO_TRY(take_buffers(out, n, "out", &outputs));
  SOTTO_TRY(s->device.add(inputs, "in"));
  SOTTO_TRY(s->device.add(outputs, "out"));
  const auto size = static_cast<uint64_t>(s->comm->size());
  const int32_t rank = s->comm->rank();
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Buffer& a = inputs[i];
    const Buffer& b = outputs[i];
    SOTTO_TRY(check_pair(a, b, sides == Sides::kInIsPart ? size : 1,
                         sides == Sides::kOutIsPart ? size : 1, i));
    bool in_place = a.data == b.data;
    if (sides == Sides::kInIsPart) in_place = lies_in(a, b, rank);
    if (sides == Sides::kOutIsPart) in_place = lies_in(b, a, rank);
    s->call.request.in_place.push_back(in_place && a.bytes() != 0 ? 1 : 0);
  }
  add_ranges(inputs, outputs, s->call.request.in_place, &s->ranges);
  SOTTO_TRY(check_overlap(s->ranges));
  SOTTO_ASSIGN(s->call.request.reduce, take_reduce(s->options.reduce, inputs));
  add_buffers(sides == Sides::kOutIsPart ? outputs : inputs, inputs, outputs, &s->call);
  return ok_status();
}

// Collectives and receives that only write (is_read false), sends that only read.
Status take_one_side(Submission* s, const sotto_buffer* buffers, uint64_t n, bool is_read) {
  SmallVector<Buffer> taken;
  SOTTO_TRY(take_buffers(buffers, n, is_read ? "in" : "out", &taken));
  SOTTO_TRY(s->device.add(taken, is_read ? "in" : "out"));
  const std::span<const Buffer> none;
  SOTTO_ASSIGN(s->call.request.reduce, take_reduce(s->options.reduce, taken));
  s->call.request.in_place.assign(taken.size(), 0);
  const std::span<const Buffer> some = taken;
  add_ranges(is_read ? some : none, is_read ? none : some, s->call.request.in_place, &s->ranges);
  SOTTO_TRY(check_overlap(s->ranges));
  add_buffers(some, is_read ? some : none, is_read ? none : some, &s->call);
  return ok_status();
}

Status refuse_codec(const CallIn& call) {
  if (call.codec == nullptr) return ok_status();
  return invalid_argument("call.codec must be NULL: only sotto_all_reduce takes a codec");
}

Status barrier(sotto_comm* comm, const sotto_call* call, sotto_op** out_op) {
  Submission s;
  SOTTO_TRY(begin(comm, call, OpKind::kBarrier, &s));
  SOTTO_TRY(refuse_reduce_and_codec(s.options));
  return submit(std::move(s), out_op);
}

Status check_rank_argument(const Comm& comm, int32_t rank, std::string_view name) {
  if (rank >= 0 && rank < comm.size()) return ok_status();
  return invalid_argument("{} is {}; allowed: 0 to {}", name, rank, comm.size() - 1);
}

Status broadcast(sotto_comm* comm, const sotto_buffer* in, const sotto_buffer* out, uint64_t n,
                 int32_t root, const sotto_call* call, sotto_op** out_op) {
  Submission s;
  SOTTO_TRY(begin(comm, call, OpKind::kBroadcast, &s));
  SOTTO_TRY(refuse_reduce_and_codec(s.options));
  SOTTO_TRY(check_rank_argument(*s.comm, root, "root"));
  s.call.request.root = root;
  if (s.comm->rank() == root) {
    SOTTO_TRY(take_pairs(&s, in, out, n, Sides::kEqual));
  } else {
    SOTTO_TRY(take_one_side(&s, out, n, false));
  }
  return submit(std::move(s), out_op);
}

Status all_gather(sotto_comm* comm, const sotto_buffer* in, const sotto_buffer* out, uint64_t n,
                  const sotto_call* call, sotto_op** out_op) {
  Submission s;
  SOTTO_TRY(begin(comm, call, OpKind::kAllGather, &s));
  SOTTO_TRY(refuse_reduce_and_codec(s.options));
  SOTTO_TRY(take_pairs(&s, in, out, n, Sides::kInIsPart));
  return submit(std::move(s), out_op);
}

Status reduce_scatter(sotto_comm* comm, const sotto_buffer* in, const sotto_buffer* out, uint64_t n,
                      const sotto_call* call, sotto_op** out_op) {
  Submission s;
  SOTTO_TRY(begin(comm, call, OpKind::kReduceScatter, &s));
  SOTTO_TRY(refuse_codec(s.options));
  SOTTO_TRY(take_pairs(&s, in, out, n, Sides::kOutIsPart));
  return submit(std::move(s), out_op);
}

Status gather(sotto_comm* comm, const sotto_buffer* in, const sotto_buffer* out, uint64_t n,
              int32_t root, const sotto_call* call, sotto_op** out_op) {
  Submission s;
  SOTTO_TRY(begin(comm, call, OpKind::kGather, &s));
  SOTTO_TRY(refuse_reduce_and_codec(s.options));
  SOTTO_TRY(check_rank_argument(*s.comm, root, "root"));
  s.call.request.root = root;
  if (s.comm->rank() == root) {
    SOTTO_TRY(take_pairs(&s, in, out, n, Sides::kInIsPart));
  } else {
    SOTTO_TRY(take_one_side(&s, in, n, true));
  }
  return submit(std::move(s), out_op);
}

Status scatter(sotto_comm* comm, const sotto_buffer* in, const sotto_buffer* out, uint64_t n,
               int32_t root, const sotto_call* call, sotto_op** out_op) {
  Submission s;
  SOTTO_TRY(begin(comm, call, OpKind::kScatter, &s));
  SOTTO_TRY(refuse_reduce_and_codec(s.options));
  SOTTO_TRY(check_rank_argument(*s.comm, root, "root"));
  s.call.request.root = root;
  if (s.comm->rank() == root) {
    SOTTO_TRY(take_pairs(&s, in, out, n, Sides::kOutIsPart));
  } else {
    SOTTO_TRY(take_one_side(&s, out, n, false));
  }
  return submit(std::move(s), out_op);
}

Status reduce(sotto_comm* comm, const sotto_buffer* in, const sotto_buffer* out, uint64_t n,
              int32_t root, const sotto_call* call, sotto_op** out_op) {
  Submission s;
  SOTTO_TRY(begin(comm, call, OpKind::kReduce, &s));
  SOTTO_TRY(refuse_codec(s.options));
  SOTTO_TRY(check_rank_argument(*s.comm, root, "root"));
  s.call.request.root = root;
  if (s.comm->rank() == root) {
    SOTTO_TRY(take_pairs(&s, in, out, n, Sides::kEqual));
  } else {
    SOTTO_TRY(take_one_side(&s, in, n, true));
  }
  return submit(std::move(s), out_op);
}

// The counts of the request are those of one part.
Status divide_counts(CollectiveRequest* r) {
  const auto size = static_cast<uint64_t>(r->size);
  for (size_t i = 0; i < r->counts.size(); ++i) {
    if (r->counts[i] % size != 0) {
      return invalid_argument(
          "in[{}].count is {}, no multiple of the {} ranks; parts of different sizes need `parts`",
          i, r->counts[i], size);
    }
    r->counts[i] /= size;
  }
  return ok_status();
}

// Buffers of a collective whose parts the caller states.
Status take_uneven(Submission* s, const sotto_buffer* in, const sotto_buffer* out, uint64_t n,
                   const sotto_parts* parts) {
  CollectiveRequest& request = s->call.request;
  SmallVector<Buffer> inputs;
  SOTTO_TRY(take_buffers(in, n, "in", &inputs));
  SmallVector<Buffer> outputs;
  SOTTO_TRY(take_buffers(out, n, "out", &outputs));
  SOTTO_TRY(s->device.add(inputs, "in"));
  SOTTO_TRY(s->device.add(outputs, "out"));
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].dtype == outputs[i].dtype) continue;
    return invalid_argument("in[{}] is {} but out[{}] is {}", i, dtype_name(inputs[i].dtype), i,
                            dtype_name(outputs[i].dtype));
  }
  SOTTO_TRY(take_parts(parts, inputs, outputs, &request));
  add_ranges(inputs, outputs, request.in_place, &s->ranges);
  SOTTO_TRY(check_overlap(s->ranges));
  SOTTO_ASSIGN(request.reduce, take_reduce(s->options.reduce, inputs));
  add_buffers(inputs, inputs, outputs, &s->call);
  request.counts = counts_of_parts(request);
  return ok_status();
}

Status all_gather_v(sotto_comm* comm, const sotto_buffer* in, const sotto_buffer* out, uint64_t n,
                    const sotto_parts* parts, const sotto_call* call, sotto_op** out_op) {
  Submission s;
  SOTTO_TRY(begin(comm, call, OpKind::kAllGatherParts, &s));
  SOTTO_TRY(refuse_reduce_and_codec(s.options));
  SOTTO_TRY(take_uneven(&s, in, out, n, parts));
  return submit(std::move(s), out_op);
}

Status reduce_scatter_v(sotto_comm* comm, const sotto_buffer* in, const sotto_buffer* out,
                        uint64_t n, const sotto_parts* parts, const sotto_call* call,
                        sotto_op** out_op) {
  Submission s;
  SOTTO_TRY(begin(comm, call, OpKind::kReduceScatterParts, &s));
  SOTTO_TRY(refuse_codec(s.options));
  SOTTO_TRY(take_uneven(&s, in, out, n, parts));
  return submit(std::move(s), out_op);
}

Status all_to_all(sotto_comm* comm, const sotto_buffer* in, const sotto_buffer* out, uint64_t n,
                  const sotto_parts* parts, const sotto_call* call, sotto_op** out_op) {
  Submission s;
  SOTTO_TRY(begin(comm, call, parts == nullptr ? OpKind::kAllToAll : OpKind::kAllToAllParts, &s));
  SOTTO_TRY(refuse_reduce_and_codec(s.options));
  if (parts != nullptr) {
    SOTTO_TRY(take_uneven(&s, in, out, n, parts));
  } else {
    SOTTO_TRY(take_pairs(&s, in, out, n, Sides::kEqual));
    SOTTO_TRY(divide_counts(&s.call.request));
  }
  return submit(std::move(s), out_op);
}

Status compressed_all_reduce(Submission s, sotto_op** out_op) {
  SOTTO_ASSIGN(const auto use, object_of(s.options.codec));
  const sotto_codec* const codec = use->get();
  if (codec->comm.get() != s.state) return invalid_argument("call.codec was made for another comm");
  if (s.options.reduce != SOTTO_REDUCE_DEFAULT && s.options.reduce != SOTTO_REDUCE_MEAN) {
    return invalid_argument("call.reduce is {}; with a codec it must be 0 or SOTTO_REDUCE_MEAN",
                            s.options.reduce);
  }
  const std::vector<uint64_t>& counts = codec->core->counts();
  if (counts.size() != s.call.request.counts.size()) {
    return invalid_argument("n is {} but call.codec was made for {}", s.call.request.counts.size(),
                            counted(counts.size(), "tensor"));
  }
  for (size_t i = 0; i < counts.size(); ++i) {
    if (s.call.request.dtypes[i] != Dtype::kF32 || s.call.request.counts[i] != counts[i]) {
      return invalid_argument("in[{}] has {} of {} but call.codec was made for {} of fp32", i,
                              counted(s.call.request.counts[i], "element"),
                              dtype_name(s.call.request.dtypes[i]), counts[i]);
    }
  }
  SOTTO_ASSIGN(const std::shared_ptr<Device> device, s.device.find(*s.comm->context()));
  if (device != codec->core->device() && codec->core->elements() != 0) {
    return invalid_argument("in[0] is on {} but call.codec was made for tensors on {}",
                            device_name(device->caps().id),
                            device_name(codec->core->device()->caps().id));
  }
  return run_operation(*s.comm, s.options, out_op, [&](const CallOptions& options) {
    return codec->core->all_reduce(s.call.in, s.call.out, options);
  });
}

Status all_reduce(sotto_comm* comm, const sotto_buffer* in, const sotto_buffer* out, uint64_t n,
                  const sotto_call* call, sotto_op** out_op) {
  Submission s;
  SOTTO_TRY(begin(comm, call, OpKind::kAllReduce, &s));
  SOTTO_TRY(take_pairs(&s, in, out, n, Sides::kEqual));
  if (s.options.codec != nullptr) return compressed_all_reduce(std::move(s), out_op);
  return submit(std::move(s), out_op);
}

Status point_to_point(sotto_comm* comm, const sotto_buffer* buffers, uint64_t n, int32_t peer,
                      bool is_send, const sotto_call* call, sotto_op** out_op) {
  Submission s;
  SOTTO_TRY(begin(comm, call, OpKind::kSendRecv, &s));
  SOTTO_TRY(refuse_reduce_and_codec(s.options));
  SOTTO_TRY(check_rank_argument(*s.comm, peer, "peer"));
  if (peer == s.comm->rank()) return invalid_argument("peer is {}, this rank itself", peer);
  s.call.request.peer = peer;
  s.call.request.is_send = is_send;
  SOTTO_TRY(take_one_side(&s, buffers, n, is_send));
  return submit(std::move(s), out_op);
}

Status group_begin(sotto_comm* comm) {
  SOTTO_TRY(CallbackScope::refuse_inside());
  SOTTO_TRY(check_no_group(*comm->state));
  comm->state->group = {};
  comm->state->group.open = true;
  return ok_status();
}

Status group_end(sotto_comm* comm, const sotto_call* call, sotto_op** out_op) {
  SOTTO_TRY(CallbackScope::refuse_inside());
  if (!comm->state->group.open)
    return invalid_state("the comm has no open group; call sotto_group_begin first");
  PendingGroup group = std::exchange(comm->state->group, {});
  SOTTO_TRY(group.first_error);
  SOTTO_TRY(check_overlap(group.ranges).with_prefix("calls of the group"));
  SOTTO_ASSIGN(const CallIn options, take_call(call));
  SOTTO_ASSIGN(const std::shared_ptr<Device> device,
               group.device.find(*comm->state->core->context()));
  for (Call& c : group.calls) c.device = device;  // also of those without elements
  SOTTO_TRY(refuse_reduce_and_codec(options));
  if (options.options.tag != 0) {
    return invalid_argument(
        "call.tag is {}; the calls of a group have their own tags: it must be 0",
        options.options.tag);
  }
  return run_operation(*comm->state->core, options, out_op, [&](const CallOptions& o) {
    return comm->state->core->start_group(group.calls, o);
  });
}

}  // namespace

extern "C" {

sotto_status sotto_barrier(sotto_comm* comm, const sotto_call* call, sotto_op** out_op) {
  return collective("sotto_barrier", comm,
                    [&](sotto_comm* object) { return barrier(object, call, out_op); });
}

sotto_status sotto_broadcast(sotto_comm* comm, const sotto_buffer* in, const sotto_buffer* out,
                             uint64_t n, int32_t root, const sotto_call* call, sotto_op** out_op) {
  return collective("sotto_broadcast", comm, [&](sotto_comm* object) {
    return broadcast(object, in, out, n, root, call, out_op);
  });
}

sotto_status sotto_all_gather(sotto_comm* comm, const sotto_buffer* in, const sotto_buffer* out,
                              uint64_t n, const sotto_call* call, sotto_op** out_op) {
  return collective("sotto_all_gather", comm, [&](sotto_comm* object) {
    return all_gather(object, in, out, n, call, out_op);
  });
}

sotto_status sotto_reduce_scatter(sotto_comm* comm, const sotto_buffer* in, const sotto_buffer* out,
                                  uint64_t n, const sotto_call* call, sotto_op** out_op) {
  return collective("sotto_reduce_scatter", comm, [&](sotto_comm* object) {
    return reduce_scatter(object, in, out, n, call, out_op);
  });
}

sotto_status sotto_all_gather_v(sotto_comm* comm, const sotto_buffer* in, const sotto_buffer* out,
                                uint64_t n, const sotto_parts* parts, const sotto_call* call,
                                sotto_op** out_op) {
  return collective("sotto_all_gather_v", comm, [&](sotto_comm* object) {
    return all_gather_v(object, in, out, n, parts, call, out_op);
  });
}

sotto_status sotto_reduce_scatter_v(sotto_comm* comm, const sotto_buffer* in,
                                    const sotto_buffer* out, uint64_t n, const sotto_parts* parts,
                                    const sotto_call* call, sotto_op** out_op) {
  return collective("sotto_reduce_scatter_v", comm, [&](sotto_comm* object) {
    return reduce_scatter_v(object, in, out, n, parts, call, out_op);
  });
}

sotto_status sotto_reduce(sotto_comm* comm, const sotto_buffer* in, const sotto_buffer* out,
                          uint64_t n, int32_t root, const sotto_call* call, sotto_op** out_op) {
  return collective("sotto_reduce", comm, [&](sotto_comm* object) {
    return reduce(object, in, out, n, root, call, out_op);
  });
}

sotto_status sotto_all_reduce(sotto_comm* comm, const sotto_buffer* in, const sotto_buffer* out,
                              uint64_t n, const sotto_call* call, sotto_op** out_op) {
  return collective("sotto_all_reduce", comm, [&](sotto_comm* object) {
    return all_reduce(object, in, out, n, call, out_op);
  });
}

sotto_status sotto_gather(sotto_comm* comm, const sotto_buffer* in, const sotto_buffer* out,
                          uint64_t n, int32_t root, const sotto_call* call, sotto_op** out_op) {
  return collective("sotto_gather", comm, [&](sotto_comm* object) {
    return gather(object, in, out, n, root, call, out_op);
  });
}

sotto_status sotto_scatter(sotto_comm* comm, const sotto_buffer* in, const sotto_buffer* out,
                           uint64_t n, int32_t root, const sotto_call* call, sotto_op** out_op) {
  return collective("sotto_scatter", comm, [&](sotto_comm* object) {
    return scatter(object, in, out, n, root, call, out_op);
  });
}

sotto_status sotto_all_to_all(sotto_comm* comm, const sotto_buffer* in, const sotto_buffer* out,
                              uint64_t n, const sotto_parts* parts, const sotto_call* call,
                              sotto_op** out_op) {
  return collective("sotto_all_to_all", comm, [&](sotto_comm* object) {
    return all_to_all(object, in, out, n, parts, call, out_op);
  });
}

sotto_status sotto_send(sotto_comm* comm, const sotto_buffer* in, uint64_t n, int32_t peer,
                        const sotto_call* call, sotto_op** out_op) {
  return collective("sotto_send", comm, [&](sotto_comm* object) {
    return point_to_point(object, in, n, peer, true, call, out_op);
  });
}

sotto_status sotto_recv(sotto_comm* comm, const sotto_buffer* out, uint64_t n, int32_t peer,
                        const sotto_call* call, sotto_op** out_op) {
  return collective("sotto_recv", comm, [&](sotto_comm* object) {
    return point_to_point(object, out, n, peer, false, call, out_op);
  });
}

sotto_status sotto_group_begin(sotto_comm* comm) {
  return guarded_on("sotto_group_begin", comm, [&](auto* object) { return group_begin(object); });
}

sotto_status sotto_group_end(sotto_comm* comm, const sotto_call* call, sotto_op** out_op) {
  return guarded_on("sotto_group_end", comm,
                    [&](auto* object) { return group_end(object, call, out_op); });
}

}  // extern "C"
