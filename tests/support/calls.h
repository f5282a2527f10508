// Calls that many tests make.
#pragma once

#include <cstdint>
#include <vector>

#include "core/group/comm.h"

namespace sotto::test {

// The sum over all ranks of `count` elements; in == out: in place.
inline Call all_reduce_of(const Comm& comm, float* in, float* out, uint64_t count) {
  Call call;
  call.request.kind = OpKind::kAllReduce;
  call.request.rank = comm.rank();
  call.request.size = comm.size();
  call.request.counts = {count};
  call.request.dtypes = {Dtype::kF32};
  call.request.in_place = {in == out};
  call.in = {in};
  call.out = {out};
  return call;
}

inline Call all_reduce_of(const Comm& comm, std::vector<float>& data) {
  return all_reduce_of(comm, data.data(), data.data(), data.size());
}

inline Status all_reduce(const std::shared_ptr<Comm>& comm, std::vector<float>& data,
                         const CallOptions& options = {}) {
  return comm->finish(comm->start(all_reduce_of(*comm, data), options));
}

}  // namespace sotto::test
