// Calls that many tests make.
#pragma once

#include <vector>

#include "core/group/comm.h"

namespace sotto::test {

// The sum over all ranks, in place.
inline Call all_reduce_of(const Comm& comm, std::vector<float>& data) {
  Call call;
  call.request.kind = OpKind::kAllReduce;
  call.request.rank = comm.rank();
  call.request.size = comm.size();
  call.request.counts = {data.size()};
  call.request.dtypes = {Dtype::kF32};
  call.request.in_place = {1};
  call.in = {data.data()};
  call.out = {data.data()};
  return call;
}

inline Status all_reduce(const std::shared_ptr<Comm>& comm, std::vector<float>& data,
                         const CallOptions& options = {}) {
  return comm->finish(comm->start(all_reduce_of(*comm, data), options));
}

}  // namespace sotto::test
