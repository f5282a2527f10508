// NCCL's own collectives in place of messages: when they are used, and that nothing else changes.
// Ranks are threads on the fake NCCL, with tensors on fake devices.
#include <array>
#include <cmath>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "tests/cuda/device_memory.h"
#include "tests/support/fake_nccl/fake_nccl.h"

namespace sotto::test {
namespace {

constexpr std::array kNames = {"ncclAllGather", "ncclBroadcast", "ncclReduceScatter",
                               "ncclAllReduce"};
using Calls = std::array<uint64_t, kNames.size()>;

// So many of each rank.
Calls each(int32_t size, Calls calls) {
  for (uint64_t& n : calls) n *= static_cast<uint64_t>(size);
  return calls;
}

Calls calls_so_far() {
  Calls calls{};
  for (size_t i = 0; i < kNames.size(); ++i) calls[i] = fake_nccl_calls_of(kNames[i]);
  return calls;
}

struct Outcome {
  std::string failure;
  std::vector<std::string> results;  // of the ranks
  Calls calls{};                     // of all ranks
};

using Body = std::function<std::string(Member&, Where)>;

// `native`: what SOTTO_NCCL_NATIVE says.
Outcome run_native(int32_t size, const char* native, const Body& body,
                   const char* transport = "nccl", Where where = Where::kCuda) {
  Outcome run;
  run.results.resize(static_cast<size_t>(size));
  WorldOptions options;
  options.transport = transport;
  options.on_rank = [](int32_t rank) { CUDA_OK(cudaSetDevice(rank)); };
  setenv("SOTTO_NCCL_NATIVE", native, 1);
  const Calls before = calls_so_far();
  run.failure = run_world(size, options, [&](Member& self) {
    run.results[static_cast<size_t>(self.rank)] = body(self, where);
  });
  unsetenv("SOTTO_NCCL_NATIVE");
  const Calls after = calls_so_far();
  for (size_t i = 0; i < run.calls.size(); ++i) run.calls[i] = after[i] - before[i];
  return run;
}

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
    Member& self, Where where, bool in_place, sotto_reduce op,
    const std::function<sotto_status(const sotto_buffer*, const sotto_buffer*, sotto_call&)>& f,
    size_t in_parts, size_t out_parts) {
  Tensors tensors(where, self.rank);
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
    for (const sotto_reduce op : {SOTTO_REDUCE_SUM, SOTTO_REDUCE_PROD, SOTTO_REDUCE_MIN}) {
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
      const Outcome run = run_native(size, native, every_collective<int32_t, uint8_t>);
      EXPECT_EQ(run.failure, "");
      EXPECT_TRUE(run.results == host.results) << native << ", " << size << " ranks";
      const Outcome on_host =
          run_native(size, native, every_collective<int32_t, uint8_t>, "nccl", Where::kHost);
      EXPECT_EQ(on_host.failure, "");
      EXPECT_TRUE(on_host.results == host.results) << native << ", " << size << " ranks, host";
      const Outcome both = run_native(size, native, mixed);
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
  const Outcome exact = run_native(4, "exact", every_collective<float, double>);
  EXPECT_EQ(exact.failure, "");
  EXPECT_TRUE(exact.results == host.results);
  EXPECT_EQ(exact.calls, each(4, {4, 4, 0, 0}));
  const Outcome all = run_native(4, "all", every_collective<float, double>);
  EXPECT_EQ(all.failure, "");
  EXPECT_TRUE(all.results == host.results) << "the fake adds in the order of ranks";
  EXPECT_EQ(all.calls, each(4, {4, 4, 12, 12}));
}

TEST(NcclNative, WhatNcclDoesOtherwiseGoesAsMessages) {
  const Body body = [](Member& self, Where where) {
    std::string all;
    for (const sotto_reduce op : {SOTTO_REDUCE_MEAN, SOTTO_REDUCE_BIT_OR}) {
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
  const Outcome host = run_native(2, "all", body, "inproc", Where::kHost);
  const Outcome run = run_native(2, "all", body);
  EXPECT_EQ(run.failure, "");
  EXPECT_TRUE(run.results == host.results);
  EXPECT_EQ(run.calls, Calls{});
}

// A comm of all ranks in their order uses them, one of fewer or of another order does not.
TEST(NcclNative, OnlyForCommsThatAreTheCommunicator) {
  for (const int key_sign : {1, -1}) {
    for (const int32_t colors : {1, 2}) {
      const Outcome run = run_native(4, "exact", [&](Member& self, Where where) {
        sotto_comm* comm = nullptr;
        OK(sotto_comm_split(self.comm, self.rank % colors, key_sign * self.rank, &comm));
        Member child{0, 0, self.context, comm};
        OK(sotto_comm_rank(comm, &child.rank));
        OK(sotto_comm_size(comm, &child.size));
        Tensors tensors(where, self.rank);
        std::vector<int32_t> in(7, self.rank), out(7 * static_cast<size_t>(child.size));
        const sotto_buffer a = tensors.add(in), b = tensors.add(out);
        const sotto_call call = tensors.call();
        OK(sotto_all_gather(comm, &a, &b, 1, &call, nullptr));
        tensors.download();
        for (int32_t r = 0; r < child.size; ++r) {
          const int32_t place = key_sign > 0 ? r : child.size - 1 - r;
          require(out[static_cast<size_t>(7 * r)] == place * colors + self.rank % colors,
                  "the part of a rank");
        }
        OK(sotto_comm_destroy(comm));
        return std::string();
      });
      EXPECT_EQ(run.failure, "");
      // One all-gather is the split's own.
      EXPECT_EQ(run.calls, each(4, {key_sign > 0 && colors == 1 ? 2u : 1u, 0, 0, 0}));
    }
  }
}

// Counters state what the plan says that each rank is to get from each.
TEST(NcclNative, CountersAreThoseOfThePlan) {
  const Outcome run = run_native(3, "all", [](Member& self, Where where) {
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
  std::array<sotto_status, 3> ended{};
  const Outcome run = run_native(3, "exact", [&](Member& self, Where where) {
    Tensors tensors(where, self.rank);
    std::vector<float> in(1000, 1.0f), out(3000);
    const sotto_buffer a = tensors.add(in), b = tensors.add(out);
    sotto_status& status = ended[static_cast<size_t>(self.rank)];
    if (self.rank == 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      status = sotto_comm_abort(self.comm, "enough");
      return std::string();
    }
    const sotto_call call = tensors.call();
    status = sotto_all_gather(self.comm, &a, &b, 1, &call, nullptr);
    return std::string(sotto_last_error());
  });
  EXPECT_EQ(run.failure, "");
  EXPECT_EQ(ended, (std::array<sotto_status, 3>{SOTTO_E_ABORTED, SOTTO_E_ABORTED, SOTTO_OK}));
  EXPECT_NE(run.results[0].find("enough"), std::string::npos) << run.results[0];
}

}  // namespace
}  // namespace sotto::test
