// The rooted reduction, and all-gather and reduce-scatter with unequal counts, against plain loops
// and the bits of the all-reduce, on every kind and size of world.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "core/base/hash.h"
#include "tests/support/core_ranks.h"

namespace sotto::test {
namespace {

// Floats of very different size: another order of a sum has other bits.
float value(int32_t rank, size_t tensor, uint64_t i) {
  const uint64_t key[] = {static_cast<uint64_t>(rank), tensor, i};
  const uint64_t random = hash64(key, sizeof key, 5);
  return std::ldexp(static_cast<float>(static_cast<int32_t>(random >> 32)),
                    static_cast<int>(random % 40) - 40);
}

constexpr float kUntouched = -7.25f;

Call make_call(const Comm& comm, OpKind kind, size_t tensors) {
  Call call;
  call.request.kind = kind;
  call.request.rank = comm.rank();
  call.request.size = comm.size();
  call.request.counts.assign(tensors, 0);
  call.request.dtypes.assign(tensors, Dtype::kF32);
  call.request.in_place.assign(tensors, 0);
  return call;
}

// Runs the call and compares what was sent with what the plan says.
Status run_counted(Comm& comm, Call call) {
  call.request.segment_bytes = comm.sizes().segment_bytes;
  SOTTO_ASSIGN(const std::shared_ptr<PreparedPlan> plan, comm.prepare({&call, 1}));
  const PeerTraffic planned = plan->plan().traffic.total;
  const TransferCounters before = comm.counters().moved;
  SOTTO_TRY(comm.finish(comm.start(std::move(call), {})));
  const TransferCounters after = comm.counters().moved;
  const uint64_t payload = after.payload_bytes_sent - before.payload_bytes_sent;
  const uint64_t header = after.header_bytes_sent - before.header_bytes_sent;
  if (payload == planned.payload_bytes_sent &&
      header == planned.header_bytes_sent + planned.metadata_bytes_sent)
    return ok_status();
  return error(Code::kInternal, "sent {} and {}; planned {}", payload, header,
               planned.payload_bytes_sent);
}

using Tensor = std::vector<float>;

Tensor contribution(const Comm& comm, size_t tensor, uint64_t count) {
  Tensor x(count);
  for (uint64_t i = 0; i < count; ++i) x[i] = value(comm.rank(), tensor, i);
  return x;
}

// The all-reduce of what every rank contributes.
Status reduced_everywhere(Comm& comm, const std::vector<uint64_t>& counts, ReduceOp op,
                          std::vector<Tensor>* out) {
  Call call = make_call(comm, OpKind::kAllReduce, counts.size());
  call.request.reduce = op;
  std::vector<Tensor> in;
  for (size_t t = 0; t < counts.size(); ++t) {
    call.request.counts[t] = counts[t];
    in.push_back(contribution(comm, t, counts[t]));
    out->emplace_back(counts[t]);
  }
  for (size_t t = 0; t < counts.size(); ++t) {
    call.in.push_back(in[t].data());
    call.out.push_back((*out)[t].data());
  }
  return comm.finish(comm.start(std::move(call), {}));
}

Status compare(const float* got, const float* want, uint64_t n, const std::string& what) {
  for (uint64_t i = 0; i < n; ++i) {
    if (std::memcmp(got + i, want + i, sizeof *got) != 0)
      return error(Code::kInternal, "{}: [{}] is {}, want {}", what, i, got[i], want[i]);
  }
  return ok_status();
}

Status reduce(Comm& comm, const std::vector<uint64_t>& counts, int32_t root, bool in_place,
              ReduceOp op) {
  std::vector<Tensor> want, in, out;
  SOTTO_TRY(reduced_everywhere(comm, counts, op, &want));
  Call call = make_call(comm, OpKind::kReduce, counts.size());
  call.request.reduce = op;
  call.request.root = root;
  const bool is_root = comm.rank() == root;
  for (size_t t = 0; t < counts.size(); ++t) {
    call.request.counts[t] = counts[t];
    call.request.in_place[t] = in_place && is_root;
    in.push_back(contribution(comm, t, counts[t]));
    out.push_back(in_place ? in[t] : Tensor(counts[t], kUntouched));
  }
  const std::vector<Tensor> before = in;
  for (size_t t = 0; t < counts.size(); ++t) {
    call.in.push_back(in_place && is_root ? out[t].data() : in[t].data());
    call.out.push_back(is_root ? out[t].data() : nullptr);
  }
  SOTTO_TRY(run_counted(comm, std::move(call)));
  for (size_t t = 0; t < counts.size(); ++t) {
    const std::string what =
        fmt::format("tensor {} of {}, root {}, in place {}", t, counts[t], root, in_place);
    if (is_root) SOTTO_TRY(compare(out[t].data(), want[t].data(), counts[t], what));
    SOTTO_TRY(compare(in[t].data(), before[t].data(), counts[t], what + ": input"));
  }
  return ok_status();
}

class Unequal : public ::testing::TestWithParam<std::tuple<std::string, int32_t>> {
 protected:
  WorldOptions world() const { return world_of(std::get<0>(GetParam()), std::get<1>(GetParam())); }
};

TEST_P(Unequal, ReduceToEveryRootHasTheBitsOfAllReduce) {
  const Status status = run_world(world(), [](const std::shared_ptr<Comm>& comm) -> Status {
    for (int32_t root = 0; root < comm->size(); ++root) {
      for (const bool in_place : {false, true}) {
        SOTTO_TRY(reduce(*comm, {1025}, root, in_place, ReduceOp::kSum));
        SOTTO_TRY(reduce(*comm, {5, 0, 30001, 17, 20000}, root, in_place, ReduceOp::kMean));
      }
    }
    SOTTO_TRY(reduce(*comm, {0}, 0, false, ReduceOp::kSum));
    return reduce(*comm, {3}, comm->size() - 1, false, ReduceOp::kMax);
  });
  EXPECT_TRUE(status.ok()) << status.text();
}

// Tensors of several dtypes are sections one after the other. Not every rank has a message in each
// round of a tree or of a rooted reduction, but all count rounds alike.
TEST_P(Unequal, SeveralDtypesInOneCall) {
  constexpr Dtype kDtypes[] = {Dtype::kI16, Dtype::kF64, Dtype::kU16, Dtype::kI8, Dtype::kI16};
  const Status status = run_world(world(), [&](const std::shared_ptr<Comm>& comm) -> Status {
    for (const OpKind kind : {OpKind::kBroadcast, OpKind::kReduce}) {
      for (const uint64_t n : {uint64_t{3}, uint64_t{30'000}, uint64_t{200'000}}) {
        Call call = make_call(*comm, kind, std::size(kDtypes));
        call.request.root = comm->size() - 1;
        call.request.reduce = ReduceOp::kBitOr;
        const bool is_root = comm->rank() == call.request.root;
        std::vector<std::vector<uint8_t>> in, out;
        for (size_t t = 0; t < std::size(kDtypes); ++t) {
          call.request.dtypes[t] = kDtypes[t];
          call.request.counts[t] = n + t;
          const uint64_t bytes = (n + t) * dtype_bytes(kDtypes[t]);
          // All ranks have the same for a reduction, so that any dtype's or is that; floats are 0.
          const uint8_t fill =
              dtype_is_float(kDtypes[t]) ? 0 : static_cast<uint8_t>(0x11 * (t + 1));
          in.emplace_back(bytes, kind == OpKind::kReduce || is_root ? fill : 0xff);
          out.emplace_back(bytes, 0xee);
        }
        if (kind == OpKind::kReduce) call.request.dtypes[1] = Dtype::kI64;  // or needs integers
        for (size_t t = 0; t < in.size(); ++t) {
          call.in.push_back(in[t].data());
          call.out.push_back(out[t].data());
        }
        SOTTO_TRY(run_counted(*comm, std::move(call)));
        for (size_t t = 0; t < in.size(); ++t) {
          const uint8_t fill =
              dtype_is_float(kDtypes[t]) ? 0 : static_cast<uint8_t>(0x11 * (t + 1));
          const uint8_t want = kind == OpKind::kReduce && !is_root ? 0xee : fill;
          for (const uint8_t byte : out[t]) {
            if (byte != want)
              return error(Code::kInternal, "kind {}, n {}, tensor {}", static_cast<int>(kind), n,
                           t);
          }
        }
      }
    }
    return ok_status();
  });
  EXPECT_TRUE(status.ok()) << status.text();
}

// A chunk of more windows, and more results, than are held at a time.
TEST_P(Unequal, ReduceOfManyWindows) {
  WorldOptions options = world();
  options.params.segment_bytes = 8192;
  const Status status = run_world(options, [](const std::shared_ptr<Comm>& comm) -> Status {
    const int32_t root = comm->size() / 2;
    SOTTO_TRY(reduce(*comm, {600'003}, root, false, ReduceOp::kSum));
    return reduce(*comm, {300'001, 7, 250'000}, root, true, ReduceOp::kSum);
  });
  EXPECT_TRUE(status.ok()) << status.text();
}

// Elements that rank r has of tensor t: some have none.
uint64_t count_of(int32_t r, size_t t) {
  constexpr uint64_t kCounts[] = {3, 0, 1025, 17, 40'000, 1, 0, 260};
  return kCounts[(static_cast<size_t>(r) * 3 + t) % 8];
}

enum class Place { kDense, kGaps, kInPlace };

// Where the parts of a tensor lie: one behind the other, or from the last rank to the first with a
// gap before each, which differs from rank to rank.
std::vector<Range> parts_of(const Comm& comm, size_t tensor, Place place, uint64_t* elements) {
  std::vector<Range> parts(static_cast<size_t>(comm.size()));
  const uint64_t gap = place == Place::kGaps ? 1 + static_cast<uint64_t>(comm.rank()) : 0;
  uint64_t at = 0;
  for (int32_t k = 0; k < comm.size(); ++k) {
    const int32_t r = place == Place::kDense ? k : comm.size() - 1 - k;
    parts[static_cast<size_t>(r)] = {at + gap, count_of(r, tensor)};
    at += gap + count_of(r, tensor);
  }
  *elements = at + gap;
  return parts;
}

Status all_gather(Comm& comm, size_t tensors, Place place) {
  Call call = make_call(comm, OpKind::kAllGatherParts, tensors);
  const auto me = static_cast<size_t>(comm.rank());
  std::vector<Tensor> in, out, want;
  for (size_t t = 0; t < tensors; ++t) {
    uint64_t elements = 0;
    const std::vector<Range> parts = parts_of(comm, t, place, &elements);
    call.request.out_parts.insert(call.request.out_parts.end(), parts.begin(), parts.end());
    in.push_back(contribution(comm, t, parts[me].count));
    out.emplace_back(elements, kUntouched);
    want.emplace_back(elements, kUntouched);
    for (int32_t r = 0; r < comm.size(); ++r) {
      const Range& part = parts[static_cast<size_t>(r)];
      call.request.counts[t] += part.count;
      for (uint64_t i = 0; i < part.count; ++i) want[t][part.begin + i] = value(r, t, i);
    }
    if (place != Place::kInPlace || parts[me].count == 0) continue;
    std::copy(in[t].begin(), in[t].end(), out[t].begin() + static_cast<long>(parts[me].begin));
    call.request.in_place[t] = 1;
  }
  for (size_t t = 0; t < tensors; ++t) {
    const Range& mine = call.request.out_parts[t * static_cast<size_t>(comm.size()) + me];
    call.in.push_back(call.request.in_place[t] ? out[t].data() + mine.begin : in[t].data());
    call.out.push_back(out[t].data());
  }
  SOTTO_TRY(run_counted(comm, std::move(call)));
  for (size_t t = 0; t < tensors; ++t)
    SOTTO_TRY(compare(out[t].data(), want[t].data(), want[t].size(), fmt::format("tensor {}", t)));
  return ok_status();
}

// Every rank contributes to part r of tensor t what contribution() has from element `first` on.
Status reduce_scatter(Comm& comm, size_t tensors, Place place, ReduceOp op) {
  Call call = make_call(comm, OpKind::kReduceScatterParts, tensors);
  call.request.reduce = op;
  const auto me = static_cast<size_t>(comm.rank());
  std::vector<uint64_t> totals(tensors, 0), first(tensors, 0);
  std::vector<Tensor> in, out, want;
  for (size_t t = 0; t < tensors; ++t) {
    uint64_t elements = 0;
    const std::vector<Range> parts = parts_of(comm, t, place, &elements);
    call.request.in_parts.insert(call.request.in_parts.end(), parts.begin(), parts.end());
    in.emplace_back(elements, kUntouched);
    out.emplace_back(parts[me].count, kUntouched);
    for (int32_t r = 0; r < comm.size(); ++r) {
      const Range& part = parts[static_cast<size_t>(r)];
      if (r == comm.rank()) first[t] = totals[t];
      for (uint64_t i = 0; i < part.count; ++i)
        in[t][part.begin + i] = value(comm.rank(), t, totals[t] + i);
      totals[t] += part.count;
    }
    call.request.counts[t] = totals[t];
    call.request.in_place[t] = place == Place::kInPlace && parts[me].count != 0;
  }
  SOTTO_TRY(reduced_everywhere(comm, totals, op, &want));
  for (size_t t = 0; t < tensors; ++t) {
    const Range& mine = call.request.in_parts[t * static_cast<size_t>(comm.size()) + me];
    call.in.push_back(in[t].data());
    call.out.push_back(call.request.in_place[t] ? in[t].data() + mine.begin : out[t].data());
  }
  const SmallVector<void*> results = call.out;
  SOTTO_TRY(run_counted(comm, std::move(call)));
  for (size_t t = 0; t < tensors; ++t)
    SOTTO_TRY(compare(static_cast<const float*>(results[t]), want[t].data() + first[t],
                      count_of(comm.rank(), t), fmt::format("tensor {}", t)));
  return ok_status();
}

TEST_P(Unequal, AllGatherAndReduceScatter) {
  const Status status = run_world(world(), [](const std::shared_ptr<Comm>& comm) -> Status {
    for (const Place place : {Place::kDense, Place::kGaps, Place::kInPlace}) {
      for (const size_t tensors : {size_t{1}, size_t{5}}) {
        const std::string what =
            fmt::format("{} tensors, place {}", tensors, static_cast<int>(place));
        SOTTO_TRY(all_gather(*comm, tensors, place).with_prefix("all_gather, " + what));
        SOTTO_TRY(reduce_scatter(*comm, tensors, place, ReduceOp::kSum)
                      .with_prefix("reduce_scatter, " + what));
      }
    }
    return reduce_scatter(*comm, 5, Place::kDense, ReduceOp::kMean);
  });
  EXPECT_TRUE(status.ok()) << status.text();
}

// Counts are the same on all ranks, or the operation fails on all of them, which name both calls.
TEST_P(Unequal, OtherCountsOnOneRank) {
  if (std::get<1>(GetParam()) == 1) GTEST_SKIP() << "one rank agrees with itself";
  for (const OpKind kind : {OpKind::kAllGatherParts, OpKind::kReduceScatterParts}) {
    const Status status = run_world(world(), [&](const std::shared_ptr<Comm>& comm) -> Status {
      Call call = make_call(*comm, kind, 1);
      std::vector<Range>& parts =
          kind == OpKind::kAllGatherParts ? call.request.out_parts : call.request.in_parts;
      const auto size = static_cast<uint64_t>(comm->size());
      for (uint64_t r = 0; r < size; ++r) parts.push_back({r * 2, 2});
      // One more for rank 0 and one less for rank 1, by rank 1: the sum is the same.
      if (comm->rank() == 1) parts[0].count = 3, parts[1] = {3, 1};
      call.request.counts[0] = 2 * size;
      Tensor whole(2 * size), part(3);
      const bool gathers = kind == OpKind::kAllGatherParts;
      call.in = {gathers ? part.data() : whole.data()};
      call.out = {gathers ? whole.data() : part.data()};
      const Status ended = comm->finish(comm->start(std::move(call), {}));
      if (ended.code() != Code::kProtocol || ended.text().find("_v(") == std::string::npos)
        return error(Code::kInternal, "{} {}", static_cast<int>(ended.code()), ended.text());
      return ok_status();
    });
    EXPECT_TRUE(status.ok()) << status.text();
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, Unequal,
                         ::testing::Combine(::testing::ValuesIn(world_kinds()),
                                            ::testing::Values(1, 2, 3, 4, 7)),
                         [](const auto& p) {
                           return std::get<0>(p.param) + "_" + std::to_string(std::get<1>(p.param));
                         });

}  // namespace
}  // namespace sotto::test
