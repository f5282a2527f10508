// NCCL's own collectives in place of messages: when they are used, and that nothing else changes.
// Ranks are threads on the fake NCCL, with tensors on fake devices.
#include <array>
#include <atomic>
#include <cmath>
#include <thread>

#include "tests/nccl/native_world.h"

namespace sotto::test {
namespace {

template <class T>
std::vector<T> numbers(size_t n, int32_t rank) {
  std::vector<T> v(n);
  for (size_t i = 0; i < n; ++i) {
    const double x = std::sin(static_cast<double>(i + 1) * 0.7 + rank) * 1e5;
    v[i] = std::is_floating_point_v<T> ? static_cast<T>(x) : static_cast<T>(static_cast<int>(x));
  }
  return v;
}

// One collective of two tensors, of different types, the second one in place or not.
template <class T, class U>
std::string two(
    Member& self, Where where, bool in_place, sotto_reduce_op op,
    const std::function<sotto_status(const sotto_buffer*, const sotto_buffer*, sotto_call&)>& f,
    size_t in_parts, size_t out_parts) {
  int device = 0;  // that of the rank in the whole world
  CUDA_OK(cudaGetDevice(&device));
  Tensors tensors(where, device);
  const size_t n = 5003;
  const auto me = static_cast<size_t>(self.rank);
  std::vector<T> a = numbers<T>(n * in_parts, self.rank), x(n * out_parts, T(3));
  std::vector<U> b = numbers<U>(33 * std::max(in_parts, out_parts), self.rank + 9);
  std::vector<U> y(33 * out_parts, U(3)), c(b.begin(), b.begin() + 33 * in_parts);
  sotto_buffer in[] = {tensors.add(a), tensors.add(in_place ? b : c)};
  sotto_buffer out[] = {tensors.add(x), in_place ? in[1] : tensors.add(y)};
  if (in_place) {  // the smaller side is this rank's part of the larger one
    sotto_buffer& part = in_parts < out_parts ? in[1] : out[1];
    part.count = 33 * std::min(in_parts, out_parts);
    if (in_parts != out_parts) part.data = static_cast<U*>(part.data) + 33 * me;
  }
  sotto_call call = tensors.call();
  call.reduce = op;
  OK(f(in, out, call));
  tensors.download();
  return bytes_of(x) + bytes_of(in_place ? b : y) + bytes_of(a);
}

template <class T, class U>
std::string every_collective(Member& self, Where where) {
  const auto size = static_cast<size_t>(self.size);
  std::string all;
  for (const bool in_place : {false, true}) {
    all += two<T, U>(
        self, where, in_place, 0,
        [&](auto* in, auto* out, auto& call) {
          return sotto_all_gather(self.comm, in, out, 2, &call, nullptr);
        },
        1, size);
    all += two<T, U>(
        self, where, in_place, 0,
        [&](auto* in, auto* out, auto& call) {
          return sotto_broadcast(self.comm, in, out, 2, self.size - 1, &call, nullptr);
        },
        1, 1);
    for (const sotto_reduce_op op : {SOTTO_REDUCE_SUM, SOTTO_REDUCE_PROD, SOTTO_REDUCE_MIN}) {
      all += two<T, U>(
          self, where, in_place, op,
          [&](auto* in, auto* out, auto& call) {
            return sotto_reduce_scatter(self.comm, in, out, 2, &call, nullptr);
          },
          size, 1);
      all += two<T, U>(
          self, where, in_place, op,
          [&](auto* in, auto* out, auto& call) {
            return sotto_all_reduce(self.comm, in, out, 2, &call, nullptr);
          },
          1, 1);
    }
  }
  return all;
}

// On devices, on the host, and on both at once: with the bits of another transport.
TEST(NcclNative, ResultsAreThoseOfMessages) {
  for (const int32_t size : {2, 4}) {
    const auto host =
        run_native(size, "exact", every_collective<int32_t, uint8_t>, "inproc", Where::kHost);
    const Body mixed = [](Member& self, Where) {
      return every_collective<int32_t, uint8_t>(self, self.rank == 1 ? Where::kHost : Where::kCuda);
    };
    ASSERT_EQ(host.failure, "");
    EXPECT_EQ(host.calls, Calls{});
    for (const char* native : {"off", "exact", "all"}) {
      const NativeRun run = run_native(size, native, every_collective<int32_t, uint8_t>);
      EXPECT_EQ(run.failure, "");
      EXPECT_TRUE(run.results == host.results) << native << ", " << size << " ranks";
      const NativeRun on_host =
          run_native(size, native, every_collective<int32_t, uint8_t>, "nccl", Where::kHost);
      EXPECT_EQ(on_host.failure, "");
      EXPECT_TRUE(on_host.results == host.results) << native << ", " << size << " ranks, host";
      const NativeRun both = run_native(size, native, mixed);
      EXPECT_EQ(both.failure, "");
      EXPECT_TRUE(both.results == host.results) << native << ", " << size << " ranks, mixed";
      // Two tensors, in place and not, three reductions.
      const Calls expected = std::string(native) == "off" ? Calls{} : each(size, {4, 4, 12, 12});
      EXPECT_EQ(run.calls, expected) << native;
      EXPECT_EQ(on_host.calls, expected) << native;
      EXPECT_EQ(both.calls, expected) << native;
    }
  }
}

// Moves keep the bits of floats; sums have those of other transports unless the caller gave them
// up.
TEST(NcclNative, SumsOfFloatsAreNcclsOnlyWhereAllowed) {
  const auto host = run_native(4, "exact", every_collective<float, double>, "inproc", Where::kHost);
  const NativeRun exact = run_native(4, "exact", every_collective<float, double>);
  EXPECT_EQ(exact.failure, "");
  EXPECT_TRUE(exact.results == host.results);
  EXPECT_EQ(exact.calls, each(4, {4, 4, 0, 0}));
  const NativeRun all = run_native(4, "all", every_collective<float, double>);
  EXPECT_EQ(all.failure, "");
  EXPECT_TRUE(all.results == host.results) << "the fake adds in the order of ranks";
  EXPECT_EQ(all.calls, each(4, {4, 4, 12, 12}));
}

TEST(NcclNative, WhatNcclDoesOtherwiseGoesAsMessages) {
  const Body body = [](Member& self, Where where) {
    std::string all;
    for (const sotto_reduce_op op : {SOTTO_REDUCE_MEAN, SOTTO_REDUCE_BIT_OR}) {
      all += two<int8_t, uint64_t>(
          self, where, false, op,
          [&](auto* in, auto* out, auto& call) {
            return sotto_all_reduce(self.comm, in, out, 2, &call, nullptr);
          },
          1, 1);
    }
    // More tensors than there are calls for.
    Tensors tensors(where, self.rank);
    std::vector<std::vector<int32_t>> many(70, std::vector<int32_t>(5, self.rank));
    std::vector<sotto_buffer> buffers;
    for (auto& v : many) buffers.push_back(tensors.add(v));
    const sotto_call call = tensors.call();
    OK(sotto_broadcast(self.comm, buffers.data(), buffers.data(), 70, 1, &call, nullptr));
    tensors.download();
    for (auto& v : many) all += bytes_of(v);
    return all;
  };
  const NativeRun host = run_native(2, "all", body, "inproc", Where::kHost);
  const NativeRun run = run_native(2, "all", body);
  EXPECT_EQ(run.failure, "");
  EXPECT_TRUE(run.results == host.results);
  EXPECT_EQ(run.calls, Calls{});
}

// A part of a comm, or all of it in another order.
Member split(const Member& parent, int32_t color, int32_t key) {
  Member child{0, 0, parent.context, nullptr};
  OK(sotto_comm_split(parent.comm, color, key, &child.comm));
  OK(sotto_comm_rank(child.comm, &child.rank));
  OK(sotto_comm_size(child.comm, &child.size));
  return child;
}

TEST(NcclNative, SplitsHaveCommunicatorsOfTheirOwn) {
  for (const int key_sign : {1, -1}) {
    for (const int32_t colors : {1, 2, 4}) {
      const Body body = [&](Member& self, Where where) {
        Member child = split(self, self.rank % colors, key_sign * self.rank);
        Member grandchild = split(child, 0, -child.rank);
        const std::string results = every_collective<int32_t, uint8_t>(child, where) +
                                    every_collective<int32_t, uint8_t>(grandchild, where);
        OK(sotto_comm_destroy(child.comm));
        OK(sotto_comm_destroy(grandchild.comm));
        return results;
      };
      const NativeRun host = run_native(4, "exact", body, "inproc", Where::kHost);
      ASSERT_EQ(host.failure, "");
      const NativeRun off = run_native(4, "off", body);
      EXPECT_EQ(off.failure, "");
      EXPECT_TRUE(off.results == host.results);
      EXPECT_EQ(off.calls, Calls{});
      const NativeRun run = run_native(4, "exact", body);
      EXPECT_EQ(run.failure, "");
      EXPECT_TRUE(run.results == host.results) << colors << " colors, " << key_sign;
      // All-gathers of both splits are native too; one rank alone calls nothing.
      EXPECT_EQ(run.calls, each(4, colors == 4 ? Calls{1, 0, 0, 0} : Calls{10, 8, 24, 24}));
    }
  }
}

// Each rank is in a row and a column at once; operations of both are in flight together.
TEST(NcclNative, RowsAndColumnsOfAMeshDoNotMeet) {
  const uint64_t before = fake_nccl_live_comms();
  const NativeRun run = run_native(4, "exact", [](Member& self, Where where) {
    Member row = split(self, self.rank / 2, self.rank), column = split(self, self.rank % 2, 0);
    Tensors tensors(where, self.rank);
    constexpr size_t kCount = 3001;
    std::vector<int32_t> mine(kCount, 1 << self.rank), from_row(kCount), from_column(kCount);
    const sotto_buffer in = tensors.add(mine), r = tensors.add(from_row),
                       c = tensors.add(from_column);
    const sotto_call call = tensors.call();
    for (int round = 0; round < 20; ++round) {
      sotto_op* ops[2] = {};
      OK(sotto_all_reduce(row.comm, &in, &r, 1, &call, &ops[0]));
      OK(sotto_broadcast(column.comm, &in, &c, 1, round % 2, &call, &ops[1]));
      for (sotto_op* op : ops) {
        OK(sotto_op_wait(op, -1));
        OK(sotto_op_release(op));
      }
    }
    tensors.download();
    require(from_row == std::vector<int32_t>(kCount, self.rank < 2 ? 3 : 12), "sums of rows");
    require(from_column == std::vector<int32_t>(kCount, self.rank % 2 == 0 ? 4 : 8),
            "from the second row");
    OK(sotto_comm_destroy(row.comm));
    OK(sotto_comm_destroy(column.comm));
    return std::string();
  });
  EXPECT_EQ(run.failure, "");
  EXPECT_EQ(run.calls, each(4, {2, 20, 0, 20}));
  EXPECT_EQ(fake_nccl_live_comms(), before);
}

// Without an end of the root comm, at the latest when its ranks use that again.
TEST(NcclNative, CommunicatorsOfSplitsEndWithThem) {
  std::atomic<uint64_t> most{0};
  const NativeRun run = run_native(2, "exact", [&](Member& self, Where where) {
    Tensors tensors(where, self.rank);
    std::vector<int32_t> numbers(100, 1);
    const sotto_buffer b = tensors.add(numbers);
    const sotto_call call = tensors.call();
    const auto sum = [&](const Member& of) {
      OK(sotto_all_reduce(of.comm, &b, &b, 1, &call, nullptr));
    };
    for (int i = 0; i < 8; ++i) {
      Member child = split(self, 0, -self.rank);
      if (i % 2 == 0) sum(child);
      OK(sotto_comm_destroy(child.comm));
      for (int again = 0; again < 3; ++again) {
        std::this_thread::sleep_for(std::chrono::milliseconds(25));
        sum(self);
      }
      most = std::max<uint64_t>(most, fake_nccl_live_comms());
    }
    return std::string();
  });
  EXPECT_EQ(run.failure, "");
  EXPECT_LE(most, 4u);  // one more of each rank at most
}

// Counters state what the plan says that each rank is to get from each.
TEST(NcclNative, CountersAreThoseOfThePlan) {
  const NativeRun run = run_native(3, "all", [](Member& self, Where where) {
    constexpr uint64_t kCount = 1000;
    Tensors tensors(where, self.rank);
    std::vector<float> in(kCount, 1.0f), out(kCount * 3);
    const sotto_buffer a = tensors.add(in), b = tensors.add(out);
    const auto sent = [&] {
      sotto_comm_counters counters = {};
      counters.struct_size = sizeof counters;
      OK(sotto_comm_get_counters(self.comm, &counters));
      require(counters.payload_bytes_sent == counters.payload_bytes_planned, "sent as planned");
      return std::pair(counters.payload_bytes_sent, counters.payload_bytes_received);
    };
    const sotto_call call = tensors.call();
    const auto start = sent();
    OK(sotto_all_gather(self.comm, &a, &b, 1, &call, nullptr));
    const auto gathered = sent();
    require(gathered.first - start.first == 2 * 4 * kCount, "sent by an all-gather");
    require(gathered.second - start.second == 2 * 4 * kCount, "received by an all-gather");
    OK(sotto_broadcast(self.comm, &a, &a, 1, 2, &call, nullptr));
    const auto broadcast = sent();
    const bool root = self.rank == 2;
    require(broadcast.first - gathered.first == (root ? 2 * 4 * kCount : 0), "by a broadcast");
    require(broadcast.second - gathered.second == (root ? 0 : 4 * kCount), "by a broadcast");
    OK(sotto_all_reduce(self.comm, &a, &a, 1, &call, nullptr));
    const auto reduced = sent();
    // Shares of 336, 336 and 328 elements: those of others, and the own one twice.
    const uint64_t own = self.rank == 2 ? 328 : 336;
    require(reduced.first - broadcast.first == 4 * (kCount + own), "sent by an all-reduce");
    require(reduced.second - broadcast.second == 4 * (kCount + own), "received by an all-reduce");
    const std::string plan = read_all([&](char* at, uint64_t cap, uint64_t* n) {
      return sotto_plan_report(
          self.comm, R"({"kind": "all_gather", "dtype": "fp32", "counts": [1000]})", at, cap, n);
    });
    require(plan.find("\"payload_bytes_sent\":8000,") != std::string::npos, plan);
    return std::string();
  });
  EXPECT_EQ(run.failure, "");
}

TEST(NcclNative, AnAbortEndsWhatWaits) {
  for (const bool on_split : {false, true}) {
    std::array<sotto_status, 3> ended{};
    std::atomic<int> there{0};
    const NativeRun run = run_native(3, "exact", [&](Member& self, Where where) {
      Tensors tensors(where, self.rank);
      std::vector<float> in(1000, 1.0f), out(3000);
      const sotto_buffer a = tensors.add(in), b = tensors.add(out);
      const Member on = on_split ? split(self, 0, -self.rank) : self;
      sotto_status& status = ended[static_cast<size_t>(self.rank)];
      std::string text;
      ++there;
      if (self.rank == 2) {
        while (there < 3) std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        status = sotto_comm_abort(self.comm, "enough");
      } else {
        const sotto_call call = tensors.call();
        status = sotto_all_gather(on.comm, &a, &b, 1, &call, nullptr);
        text = sotto_last_error();
      }
      if (on_split) (void)sotto_comm_destroy(on.comm);  // says again why it has failed
      return text;
    });
    EXPECT_EQ(run.failure, "");
    EXPECT_EQ(ended, (std::array<sotto_status, 3>{SOTTO_E_ABORTED, SOTTO_E_ABORTED, SOTTO_OK}));
    EXPECT_NE(run.results[0].find("enough"), std::string::npos) << run.results[0];
  }
}

}  // namespace
}  // namespace sotto::test
