// The uncompressed collectives against plain loops, on every size of world that divides nothing
// evenly.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "tests/support/core_ranks.h"

namespace sotto::test {
namespace {

// Integers as floats: sums are exact, so any order gives the same value and the expected one is
// easy to write.
float value(int32_t rank, uint64_t i) {
  return static_cast<float>((i * 7 + static_cast<uint64_t>(rank) * 13) % 101) - 50;
}

class Collectives : public ::testing::TestWithParam<std::tuple<std::string, int32_t>> {
 protected:
  WorldOptions world() const { return world_of(std::get<0>(GetParam()), std::get<1>(GetParam())); }
};

Call make_call(const Comm& comm, OpKind kind, std::vector<uint64_t> counts) {
  Call call;
  call.request.kind = kind;
  call.request.rank = comm.rank();
  call.request.size = comm.size();
  call.request.counts = std::move(counts);
  call.request.dtypes.assign(call.request.counts.size(), Dtype::kF32);
  call.request.in_place.assign(call.request.counts.size(), 0);
  return call;
}

constexpr uint64_t kSizes[] = {0, 1, 7, 8, 9, 1023, 1025, 250003};

TEST_P(Collectives, AllReduceSumsInPlaceAndOut) {
  const Status status = run_world(world(), [&](const std::shared_ptr<Comm>& comm) -> Status {
    for (uint64_t n : kSizes) {
      for (const bool in_place : {false, true}) {
        std::vector<float> in(n), out(n, -1.0f);
        for (uint64_t i = 0; i < n; ++i) in[i] = value(comm->rank(), i);
        if (in_place) out = in;
        Call call = make_call(*comm, OpKind::kAllReduce, {n});
        call.request.in_place[0] = in_place;
        call.in = {in_place ? out.data() : in.data()};
        call.out = {out.data()};
        SOTTO_TRY(comm->finish(comm->start(std::move(call), {})));
        for (uint64_t i = 0; i < n; ++i) {
          float want = 0;
          for (int32_t r = 0; r < comm->size(); ++r) want += value(r, i);
          if (out[i] != want)
            return error(Code::kInternal, "n {} in_place {}: [{}] is {}, want {}", n, in_place, i,
                         out[i], want);
        }
      }
    }
    return ok_status();
  });
  EXPECT_TRUE(status.ok()) << status.text();
}

TEST_P(Collectives, SeveralTensorsAtOnce) {
  const Status status = run_world(world(), [&](const std::shared_ptr<Comm>& comm) -> Status {
    const std::vector<uint64_t> counts{5, 0, 100000, 17, 70000};
    std::vector<std::vector<float>> in, out;
    Call call = make_call(*comm, OpKind::kAllReduce, counts);
    for (size_t t = 0; t < counts.size(); ++t) {
      in.emplace_back(counts[t]);
      out.emplace_back(counts[t]);
      for (uint64_t i = 0; i < counts[t]; ++i) in[t][i] = value(comm->rank(), i + t);
    }
    for (size_t t = 0; t < counts.size(); ++t) {
      call.in.push_back(in[t].data());
      call.out.push_back(out[t].data());
    }
    SOTTO_TRY(comm->finish(comm->start(std::move(call), {})));
    for (size_t t = 0; t < counts.size(); ++t) {
      for (uint64_t i = 0; i < counts[t]; ++i) {
        float want = 0;
        for (int32_t r = 0; r < comm->size(); ++r) want += value(r, i + t);
        if (out[t][i] != want)
          return error(Code::kInternal, "tensor {} [{}] is {}, want {}", t, i, out[t][i], want);
      }
    }
    return ok_status();
  });
  EXPECT_TRUE(status.ok()) << status.text();
}

// Small segments, so that a chunk has more windows than are held in memory at a time.
TEST_P(Collectives, ChunksOfManyWindows) {
  WorldOptions options = world();
  options.params.segment_bytes = 8192;
  const Status status = run_world(options, [&](const std::shared_ptr<Comm>& comm) -> Status {
    const auto size = static_cast<uint64_t>(comm->size());
    for (const bool scatter : {false, true}) {
      const uint64_t n = scatter ? 600'003 / size : 600'003;
      const uint64_t first = scatter ? static_cast<uint64_t>(comm->rank()) * n : 0;
      std::vector<float> in(scatter ? n * size : n), out(n, -1.0f);
      for (uint64_t i = 0; i < in.size(); ++i) in[i] = value(comm->rank(), i);
      Call call = make_call(*comm, scatter ? OpKind::kReduceScatter : OpKind::kAllReduce, {n});
      call.in = {in.data()};
      call.out = {out.data()};
      SOTTO_TRY(comm->finish(comm->start(std::move(call), {})));
      for (uint64_t i = 0; i < n; ++i) {
        float want = 0;
        for (int32_t r = 0; r < comm->size(); ++r) want += value(r, first + i);
        if (out[i] != want)
          return error(Code::kInternal, "scatter {}: [{}] is {}, want {}", scatter, i, out[i],
                       want);
      }
    }
    return ok_status();
  });
  EXPECT_TRUE(status.ok()) << status.text();
}

TEST_P(Collectives, BroadcastFromEveryRoot) {
  const Status status = run_world(world(), [&](const std::shared_ptr<Comm>& comm) -> Status {
    for (int32_t root = 0; root < comm->size(); ++root) {
      for (uint64_t n : kSizes) {
        std::vector<float> in(n), out(n, -1.0f);
        for (uint64_t i = 0; i < n; ++i) in[i] = value(comm->rank(), i);
        Call call = make_call(*comm, OpKind::kBroadcast, {n});
        call.request.root = root;
        call.in = {in.data()};
        call.out = {out.data()};
        SOTTO_TRY(comm->finish(comm->start(std::move(call), {})));
        for (uint64_t i = 0; i < n; ++i) {
          if (out[i] != value(root, i))
            return error(Code::kInternal, "root {} n {}: [{}] is {}", root, n, i, out[i]);
        }
      }
    }
    return ok_status();
  });
  EXPECT_TRUE(status.ok()) << status.text();
}

TEST_P(Collectives, ReduceScatterThenAllGather) {
  const Status status = run_world(world(), [&](const std::shared_ptr<Comm>& comm) -> Status {
    const auto size = static_cast<uint64_t>(comm->size());
    for (uint64_t n : kSizes) {
      std::vector<float> in(n * size), part(n), all(n * size);
      for (uint64_t i = 0; i < in.size(); ++i) in[i] = value(comm->rank(), i);
      Call rs = make_call(*comm, OpKind::kReduceScatter, {n});
      rs.in = {in.data()};
      rs.out = {part.data()};
      SOTTO_TRY(comm->finish(comm->start(std::move(rs), {})));
      Call ag = make_call(*comm, OpKind::kAllGather, {n});
      ag.in = {part.data()};
      ag.out = {all.data()};
      SOTTO_TRY(comm->finish(comm->start(std::move(ag), {})));
      for (uint64_t i = 0; i < all.size(); ++i) {
        float want = 0;
        for (int32_t r = 0; r < comm->size(); ++r) want += value(r, i);
        if (all[i] != want)
          return error(Code::kInternal, "n {}: [{}] is {}, want {}", n, i, all[i], want);
      }
    }
    return ok_status();
  });
  EXPECT_TRUE(status.ok()) << status.text();
}

TEST_P(Collectives, BarrierAndSplit) {
  const Status status = run_world(world(), [&](const std::shared_ptr<Comm>& comm) -> Status {
    SOTTO_TRY(comm->barrier());
    SOTTO_ASSIGN(std::shared_ptr<Comm> half, comm->split(comm->rank() % 2, -comm->rank()));
    const int32_t expected_size = (comm->size() + 1 - comm->rank() % 2) / 2;
    if (half->size() != expected_size)
      return error(Code::kInternal, "split has size {}, want {}", half->size(), expected_size);
    const std::string mine(1, static_cast<char>('a' + comm->rank()));
    SOTTO_ASSIGN(const std::vector<std::string> all, half->exchange(mine));
    for (size_t r = 0; r + 1 < all.size(); ++r) {
      if (all[r][0] != all[r + 1][0] + 2)
        return error(Code::kInternal, "split order is wrong at {}", r);
    }
    return comm->barrier();
  });
  EXPECT_TRUE(status.ok()) << status.text();
}

// Each rank in turn comes last, long behind the others.
TEST_P(Collectives, NobodyLeavesABarrierBeforeTheLastHasCome) {
  std::vector<std::atomic<int32_t>> entered(static_cast<size_t>(std::get<1>(GetParam())));
  const Status status = run_world(world(), [&](const std::shared_ptr<Comm>& comm) -> Status {
    for (int32_t last = 0; last < comm->size(); ++last) {
      if (comm->rank() == last) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      ++entered[static_cast<size_t>(last)];
      SOTTO_TRY(comm->barrier());
      const int32_t found = entered[static_cast<size_t>(last)];
      if (found != comm->size()) {
        return error(Code::kInternal, "rank {} leaves with {} of {} ranks inside, rank {} is late",
                     comm->rank(), found, comm->size(), last);
      }
    }
    return ok_status();
  });
  EXPECT_TRUE(status.ok()) << status.text();
}

TEST_P(Collectives, GroupedRingExchange) {
  const Status status = run_world(world(), [&](const std::shared_ptr<Comm>& comm) -> Status {
    if (comm->size() < 2) return ok_status();
    for (uint64_t n : {uint64_t{3}, uint64_t{500000}}) {
      std::vector<float> in(n), out(n);
      for (uint64_t i = 0; i < n; ++i) in[i] = value(comm->rank(), i);
      Call send = make_call(*comm, OpKind::kSendRecv, {n});
      send.request.is_send = true;
      send.request.peer = (comm->rank() + 1) % comm->size();
      send.in = {in.data()};
      send.out = {nullptr};
      Call recv = make_call(*comm, OpKind::kSendRecv, {n});
      recv.request.peer = (comm->rank() + comm->size() - 1) % comm->size();
      recv.in = {nullptr};
      recv.out = {out.data()};
      std::vector<Call> calls;
      calls.push_back(std::move(send));
      calls.push_back(std::move(recv));
      SOTTO_TRY(comm->finish(comm->start_group(calls, {})));
      const int32_t from = (comm->rank() + comm->size() - 1) % comm->size();
      for (uint64_t i = 0; i < n; ++i) {
        if (out[i] != value(from, i))
          return error(Code::kInternal, "n {}: [{}] is {}", n, i, out[i]);
      }
    }
    return ok_status();
  });
  EXPECT_TRUE(status.ok()) << status.text();
}

INSTANTIATE_TEST_SUITE_P(Worlds, Collectives,
                         ::testing::Combine(::testing::ValuesIn(world_kinds()),
                                            ::testing::Values(1, 2, 3, 4, 7, 8)),
                         [](const auto& p) {
                           return std::get<0>(p.param) + "_" + std::to_string(std::get<1>(p.param));
                         });

}  // namespace
}  // namespace sotto::test
