// The rooted reduction, and all-gather and reduce-scatter with unequal counts, at the C ABI:
// results, bytes as planned, groups, bad input.
#include <numeric>
#include <string>
#include <vector>

#include "tests/ranks/capi_support.h"

namespace sotto::test {
namespace {

using Counts = std::vector<uint64_t>;

sotto_parts out_parts(const Counts& counts) {
  sotto_parts parts = SOTTO_PARTS_INIT;
  parts.out_counts = counts.data();
  return parts;
}
sotto_parts in_parts(const Counts& counts) {
  sotto_parts parts = SOTTO_PARTS_INIT;
  parts.in_counts = counts.data();
  return parts;
}

uint64_t sum(const Counts& counts) {
  return std::accumulate(counts.begin(), counts.end(), uint64_t{0});
}

// What the plan says of a request, and what the comm has sent since.
class Planned {
 public:
  Planned(const Member& self, const std::string& request) : self_(self) {
    const std::string report = read_all([&](char* buf, uint64_t cap, uint64_t* need) {
      return sotto_plan_report(self.comm, request.c_str(), buf, cap, need);
    });
    const std::string key = "\"payload_bytes_sent\":";
    bytes_ = std::stoull(report.substr(report.find(key) + key.size()));
    before_ = sent();
  }
  void check(const std::string& what) const {
    require(sent() - before_ == bytes_, what + ": sent " + std::to_string(sent() - before_) +
                                            " bytes, planned " + std::to_string(bytes_));
  }

 private:
  uint64_t sent() const {
    sotto_comm_counters counters = SOTTO_COMM_COUNTERS_INIT;
    OK(sotto_comm_get_counters(self_.comm, &counters));
    return counters.payload_bytes_sent;
  }
  const Member& self_;
  uint64_t bytes_ = 0, before_ = 0;
};

class CapiReduce : public testing::TestWithParam<const char*> {
 protected:
  std::string world(int32_t size, const std::function<void(Member&)>& body) const {
    WorldOptions options;
    options.transport = GetParam();
    return run_world(size, options, body);
  }
};

template <class T>
void reduce_all_dtypes(const Member& self, uint64_t n) {
  std::vector<T> x(n, static_cast<T>(self.rank + 1)), y(n, T{77});
  for (int32_t root = 0; root < self.size; ++root) {
    const bool mine = self.rank == root;
    const Planned planned(self, R"({"kind": "reduce", "dtype": "fp32", "counts": [)" +
                                    std::to_string(n * sizeof(T) / 4) + R"(], "root": )" +
                                    std::to_string(root) + "}");
    const sotto_buffer in = buffer(x), out = buffer(y);
    OK(sotto_reduce(self.comm, &in, mine ? &out : nullptr, 1, root, nullptr, nullptr));
    if (sizeof(T) == 4) planned.check("reduce");
    const T want = static_cast<T>(self.size * (self.size + 1) / 2);
    for (const T value : y) require(value == (mine ? want : T{77}), "reduce");
    y.assign(n, T{77});
  }
}

TEST_P(CapiReduce, ReduceOfEveryDtype) {
  for (const int32_t size : {2, 3}) {
    EXPECT_EQ(world(size,
                    [](Member& self) {
                      reduce_all_dtypes<int8_t>(self, 100);
                      reduce_all_dtypes<uint8_t>(self, 100);
                      reduce_all_dtypes<int32_t>(self, 1000);
                      reduce_all_dtypes<uint32_t>(self, 40'000);
                      reduce_all_dtypes<int64_t>(self, 100);
                      reduce_all_dtypes<uint64_t>(self, 100);
                      reduce_all_dtypes<float>(self, 50'000);
                      reduce_all_dtypes<double>(self, 33);
                    }),
              "");
  }
}

// 16-bit integers, which share their C++ type with nothing that buffer() knows.
TEST_P(CapiReduce, SixteenBitIntegers) {
  EXPECT_EQ(
      world(3,
            [](Member& self) {
              std::vector<int16_t> x{32767, -32768, -5, 300}, y(4);
              std::vector<uint16_t> u{65535, 1, 40'000, 0}, v(4);
              const auto at = [](void* data, sotto_dtype dtype) {
                return sotto_buffer{data, 4, dtype, SOTTO_DEVICE_CPU, 0, 0};
              };
              const sotto_buffer ins[] = {at(x.data(), SOTTO_INT16), at(u.data(), SOTTO_UINT16)};
              const sotto_buffer outs[] = {at(y.data(), SOTTO_INT16), at(v.data(), SOTTO_UINT16)};
              const auto reduced = [&](sotto_reduce_op op) {
                const sotto_call call = call_with([&](auto& c) { c.reduce = op; });
                OK(sotto_all_reduce(self.comm, ins, outs, 2, &call, nullptr));
              };
              reduced(SOTTO_REDUCE_MEAN);
              require(y == x && v == u, "the mean of equal numbers is the number");
              reduced(SOTTO_REDUCE_SUM);
              require(y == std::vector<int16_t>({32765, -32768, -15, 900}), "sum, int16");
              require(v == std::vector<uint16_t>({65533, 3, 54'464, 0}), "sum, uint16");
              reduced(SOTTO_REDUCE_MIN);
              require(y == x && v == u, "min");
              reduced(SOTTO_REDUCE_BIT_OR);
              require(y == x && v == u, "bit or");
              OK(sotto_broadcast(self.comm, ins, outs, 2, 1, nullptr, nullptr));
              std::vector<int16_t> all(12);
              const sotto_buffer whole{all.data(), 12, SOTTO_INT16, SOTTO_DEVICE_CPU, 0, 0};
              OK(sotto_all_gather(self.comm, ins, &whole, 1, nullptr, nullptr));
              require(all[5] == -32768 && all[11] == 300, "all_gather");
            }),
      "");
}

TEST_P(CapiReduce, MeansOfIntegersAreRoundedTowardsZero) {
  EXPECT_EQ(world(2,
                  [](Member& self) {
                    std::vector<int32_t> x{-3, 3, INT32_MIN, INT32_MAX, -1};
                    if (self.rank == 1) x = {0, 0, INT32_MIN, INT32_MAX, INT32_MIN};
                    const sotto_buffer b = buffer(x);
                    const sotto_call call =
                        call_with([](auto& c) { c.reduce = SOTTO_REDUCE_MEAN; });
                    OK(sotto_all_reduce(self.comm, &b, &b, 1, &call, nullptr));
                    require(x == std::vector<int32_t>({-1, 1, INT32_MIN, INT32_MAX, INT32_MIN / 2}),
                            "mean");
                  }),
            "");
}

TEST_P(CapiReduce, UnequalCounts) {
  EXPECT_EQ(
      world(3,
            [](Member& self) {
              const Counts counts{2, 0, 30'000};
              const auto me = static_cast<size_t>(self.rank);
              const uint64_t first = me == 2 ? 2 : 0, n = sum(counts);
              std::vector<float> mine(counts[me], static_cast<float>(self.rank + 1)), all(n);
              const sotto_parts gathers = out_parts(counts), scatters = in_parts(counts);
              {
                const Planned planned(self,
                                      R"({"kind": "all_gather_v", "out_counts": [[2, 0, 30000]]})");
                const sotto_buffer in = buffer(mine), out = buffer(all);
                OK(sotto_all_gather_v(self.comm, &in, &out, 1, &gathers, nullptr, nullptr));
                planned.check("all_gather_v");
                for (uint64_t i = 0; i < n; ++i) require(all[i] == (i < 2 ? 1 : 3), "all_gather_v");
              }
              {
                const Planned planned(
                    self, R"({"kind": "reduce_scatter_v", "in_counts": [[2, 0, 30000]]})");
                for (uint64_t i = 0; i < n; ++i) all[i] = static_cast<float>(i);
                const sotto_buffer in = buffer(all), out = buffer(mine);
                const sotto_call mean = call_with([](auto& c) { c.reduce = SOTTO_REDUCE_MEAN; });
                OK(sotto_reduce_scatter_v(self.comm, &in, &out, 1, &scatters, &mean, nullptr));
                planned.check("reduce_scatter_v");
                for (uint64_t i = 0; i < mine.size(); ++i)
                  require(mine[i] == static_cast<float>(first + i), "reduce_scatter_v");
              }
              {  // in place, and both in a group with a reduce
                const sotto_buffer whole = buffer(all);
                const sotto_buffer part = buffer(all.data() + first, counts[me]);
                std::vector<float> other(9, 1.0f);
                const sotto_buffer b = buffer(other);
                sotto_op* op = nullptr;
                OK(sotto_group_begin(self.comm));
                OK(sotto_reduce_scatter_v(self.comm, &whole, &part, 1, &scatters, nullptr,
                                          nullptr));
                OK(sotto_reduce(self.comm, &b, &b, 1, 1, nullptr, nullptr));
                OK(sotto_group_end(self.comm, nullptr, &op));
                OK(sotto_op_wait_all(&op, 1, -1));
                OK(sotto_op_release(op));
                for (uint64_t i = first; i < first + counts[me]; ++i)
                  require(all[i] == 3 * static_cast<float>(i), "reduce_scatter_v in place");
                require(other[8] == (self.rank == 1 ? 3.0f : 1.0f), "reduce in a group");
                OK(sotto_all_gather_v(self.comm, &part, &whole, 1, &gathers, nullptr, nullptr));
                for (uint64_t i = 0; i < n; ++i)
                  require(all[i] == 3 * static_cast<float>(i), "all_gather_v in place");
              }
              OK(sotto_all_gather_v(self.comm, nullptr, nullptr, 0, nullptr, nullptr, nullptr));
            }),
      "");
}

TEST_P(CapiReduce, RanksThatDiffer) {
  struct Case {
    std::function<sotto_status(const Member&, const sotto_buffer& in, const sotto_buffer& out)>
        call;
    std::vector<std::string> words;
  };
  const std::vector<Case> cases = {
      {[](const Member& self, const sotto_buffer& in, const sotto_buffer& out) {
         return sotto_reduce(self.comm, &in, &out, 1, self.rank, nullptr, nullptr);
       },
       {"reduce(sum, root 0", "reduce(sum, root 1"}},
      {[](const Member& self, const sotto_buffer& in, const sotto_buffer& out) {
         const sotto_call call =
             call_with([&](auto& c) { c.reduce = self.rank == 0 ? SOTTO_REDUCE_MAX : 0; });
         return sotto_reduce(self.comm, &in, &out, 1, 0, &call, nullptr);
       },
       {"reduce(max", "reduce(sum"}},
      {[](const Member& self, const sotto_buffer& in, const sotto_buffer& out) {
         const Counts counts = self.rank == 0 ? Counts{8, 0} : Counts{0, 8};
         const sotto_parts parts = out_parts(counts);
         return sotto_all_gather_v(self.comm, &in, &out, 1, &parts, nullptr, nullptr);
       },
       {"all_gather_v(fp32, 8 elements", "layout"}},
      {[](const Member& self, const sotto_buffer& in, const sotto_buffer& out) {
         const Counts counts = self.rank == 0 ? Counts{8, 0} : Counts{0, 8};
         const sotto_parts parts = in_parts(counts);
         return sotto_reduce_scatter_v(self.comm, &in, &out, 1, &parts, nullptr, nullptr);
       },
       {"reduce_scatter_v(sum, fp32, 8 elements", "layout"}}};
  for (const Case& c : cases) {
    EXPECT_EQ(world(2,
                    [&](Member& self) {
                      std::vector<float> x(8), y(8);
                      sotto_status status = c.call(self, buffer(x), buffer(y));
                      // A reduction that only the other side sends to may have completed before.
                      if (status == SOTTO_OK) status = sotto_barrier(self.comm, nullptr, nullptr);
                      fails(status, SOTTO_E_PROTOCOL, c.words, "ranks that differ");
                    }),
              "");
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, CapiReduce, testing::Values("inproc", "tcp"),
                         [](const auto& instance) { return std::string(instance.param); });

TEST(CapiReduceErrors, BadInput) {
  EXPECT_EQ(
      run_world(
          2, {},
          [](Member& self) {
            std::vector<float> x(8), y(8);
            std::vector<int32_t> z(8);
            const sotto_buffer a = buffer(x), b = buffer(y), c = buffer(z);
            const sotto_buffer two = buffer(x.data(), 2), into = buffer(y.data(), 2);
            const auto me = self.rank;
            FAILS(sotto_reduce(self.comm, &a, &b, 1, 2, nullptr, nullptr), SOTTO_E_INVALID_ARGUMENT,
                  "root is 2", "0 to 1");
            FAILS(sotto_reduce(self.comm, &a, &b, 1, -1, nullptr, nullptr),
                  SOTTO_E_INVALID_ARGUMENT, "root is -1");
            FAILS(sotto_reduce(self.comm, &a, nullptr, 1, me, nullptr, nullptr),
                  SOTTO_E_INVALID_ARGUMENT, "out is NULL");
            FAILS(sotto_reduce(self.comm, nullptr, &b, 1, 0, nullptr, nullptr),
                  SOTTO_E_INVALID_ARGUMENT, "in is NULL");
            FAILS(sotto_reduce(self.comm, &a, &into, 1, me, nullptr, nullptr),
                  SOTTO_E_INVALID_ARGUMENT, "out[0].count is 2", "equal counts");
            FAILS(sotto_reduce(self.comm, &a, &c, 1, me, nullptr, nullptr),
                  SOTTO_E_INVALID_ARGUMENT, "in[0] is fp32", "out[0] is int32");
            const sotto_call bits = call_with([](auto& o) { o.reduce = SOTTO_REDUCE_BIT_OR; });
            FAILS(sotto_reduce(self.comm, &a, &b, 1, 1 - me, &bits, nullptr),
                  SOTTO_E_INVALID_ARGUMENT, "BIT_OR", "in[0] is fp32");

            const auto gather = [&](const Counts& counts, const sotto_buffer& in,
                                    const std::function<void(sotto_parts&)>& change) {
              sotto_parts parts = out_parts(counts);
              change(parts);
              return sotto_all_gather_v(self.comm, &in, &b, 1, &parts, nullptr, nullptr);
            };
            const auto as_is = [](sotto_parts&) {};
            const Counts good{2, 2}, much{2, 7}, huge{2, ~uint64_t{0}}, near{0, 1};
            FAILS(sotto_all_gather_v(self.comm, &two, &b, 1, nullptr, nullptr, nullptr),
                  SOTTO_E_INVALID_ARGUMENT, "parts");
            FAILS(gather(much, a, as_is), SOTTO_E_INVALID_ARGUMENT,
                  "parts[0].out_counts[1] is 7 at offset 2", "out[0] has 8 elements");
            FAILS(gather(huge, a, as_is), SOTTO_E_INVALID_ARGUMENT, "18446744073709551615");
            FAILS(gather(good, a, as_is), SOTTO_E_INVALID_ARGUMENT, "in[0].count is 8",
                  "parts[0].out_counts[" + std::to_string(me) + "], this rank's, is 2");
            FAILS(gather(good, two, [&](auto& p) { p.in_counts = good.data(); }),
                  SOTTO_E_INVALID_ARGUMENT, "parts[0].in_counts and in_offsets must be NULL");
            FAILS(gather(good, two, [&](auto& p) { p.out_counts = nullptr; }),
                  SOTTO_E_INVALID_ARGUMENT, "parts[0].out_counts is NULL");
            FAILS(gather(good, two, [&](auto& p) { p.out_offsets = near.data(); }),
                  SOTTO_E_INVALID_ARGUMENT, "overlap");
            FAILS(gather(good, two, [&](auto& p) { p.struct_size = 24; }), SOTTO_E_INVALID_ARGUMENT,
                  "parts[0].struct_size is 24");
            const sotto_buffer inside = buffer(y.data() + 2 * static_cast<uint64_t>(1 - me), 2);
            FAILS(gather(good, inside, as_is), SOTTO_E_INVALID_ARGUMENT, "overlap");

            const auto scatter = [&](const Counts& counts, const sotto_buffer& out,
                                     const std::function<void(sotto_parts&)>& change) {
              sotto_parts parts = in_parts(counts);
              change(parts);
              return sotto_reduce_scatter_v(self.comm, &a, &out, 1, &parts, nullptr, nullptr);
            };
            FAILS(scatter(much, b, as_is), SOTTO_E_INVALID_ARGUMENT,
                  "parts[0].in_counts[1] is 7 at offset 2", "in[0] has 8 elements");
            FAILS(scatter(good, b, as_is), SOTTO_E_INVALID_ARGUMENT, "out[0].count is 8",
                  "parts[0].in_counts[" + std::to_string(me) + "], this rank's, is 2");
            FAILS(scatter(good, into, [&](auto& p) { p.out_offsets = near.data(); }),
                  SOTTO_E_INVALID_ARGUMENT, "parts[0].out_counts and out_offsets must be NULL");
            const Counts over = {0, 1};  // in place, and another rank is sent what is written
            const sotto_buffer mine = buffer(x.data() + over[me], 2);
            FAILS(scatter(good, mine, [&](auto& p) { p.in_offsets = over.data(); }),
                  SOTTO_E_INVALID_ARGUMENT, "parts[0]: out[0] is in place",
                  "the part of rank " + std::to_string(1 - me));
            const sotto_call max = call_with([](auto& o) { o.reduce = SOTTO_REDUCE_MAX; });
            const sotto_parts parts = out_parts(good);
            FAILS(sotto_all_gather_v(self.comm, &two, &b, 1, &parts, &max, nullptr),
                  SOTTO_E_INVALID_ARGUMENT, "reduces nothing");
            // Nothing was lost.
            OK(gather(good, two, as_is));
            OK(scatter(good, into, as_is));
            OK(sotto_reduce(self.comm, &a, &b, 1, 0, nullptr, nullptr));
          }),
      "");
}

TEST(CapiReduceErrors, PlanRequests) {
  EXPECT_EQ(
      run_world(
          2, {},
          [](Member& self) {
            uint64_t length = 0;
            const auto bad = [&](const std::string& text, const std::vector<std::string>& words) {
              fails(sotto_plan_report(self.comm, text.c_str(), nullptr, 0, &length),
                    SOTTO_E_INVALID_ARGUMENT, words, text.c_str());
            };
            bad(R"({"kind": "all_gather_v", "counts": [4]})",
                {"request has counts beside", "leave it out"});
            bad(R"({"kind": "all_gather_v"})", {"request.out_counts is null"});
            bad(R"({"kind": "all_gather_v", "in_counts": [[1, 1]]})",
                {"all_gather_v takes out_counts alone"});
            bad(R"({"kind": "reduce_scatter_v", "in_counts": [[1]]})",
                {"request.in_counts has [1]", "2 counts"});
            bad(R"({"kind": "reduce", "counts": [1], "root": 2})", {"request.root is 2"});
            bad(R"({"kind": "reduce", "counts": [1], "reduce": "bit_or"})", {"needs integers"});
            OK(sotto_plan_report(
                self.comm,
                R"({"kind": "reduce", "dtype": "uint16", "counts": [9], "reduce": "mean"})",
                nullptr, 0, &length));
          }),
      "");
}

}  // namespace
}  // namespace sotto::test
