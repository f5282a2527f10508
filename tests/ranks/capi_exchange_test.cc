// All-to-all, gather, scatter and the newer dtypes and reductions at the C ABI: what they do, what
// is refused and how.
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "tests/ranks/capi_support.h"

namespace sotto::test {
namespace {

using Counts = std::vector<uint64_t>;

sotto_parts parts_of(const Counts& in, const Counts& out) {
  sotto_parts parts = SOTTO_PARTS_INIT;
  parts.in_counts = in.data();
  parts.out_counts = out.data();
  return parts;
}

sotto_comm_counters counters_of(const Member& self) {
  sotto_comm_counters counters = {};
  counters.struct_size = sizeof counters;
  OK(sotto_comm_get_counters(self.comm, &counters));
  return counters;
}

// Runs the call and compares what it sent with the report on `request`.
void as_reported(const Member& self, const nlohmann::json& request,
                 const std::function<void()>& call) {
  const nlohmann::json report =
      nlohmann::json::parse(read_all([&](char* buf, uint64_t cap, uint64_t* out_len) {
        return sotto_plan_report(self.comm, request.dump().c_str(), buf, cap, out_len);
      }));
  const sotto_comm_counters before = counters_of(self);
  call();
  const sotto_comm_counters after = counters_of(self);
  const auto equal = [&](const char* key, uint64_t moved) {
    require(report.at(key) == moved, std::string(key) + ": " + report.dump() + ", moved " +
                                         std::to_string(moved) + " for " + request.dump());
  };
  equal("payload_bytes_sent", after.payload_bytes_sent - before.payload_bytes_sent);
  equal("header_bytes_sent", after.header_bytes_sent - before.header_bytes_sent);
  equal("messages_sent", after.messages_sent - before.messages_sent);
  require(after.payload_bytes_planned == after.payload_bytes_sent, "sent as planned");
}

class CapiExchange : public testing::TestWithParam<const char*> {
 protected:
  std::string world(int32_t size, const std::function<void(Member&)>& body) {
    return run_world(size, {.transport = GetParam()}, body);
  }
};

TEST_P(CapiExchange, GatherAndScatter) {
  EXPECT_EQ(
      world(
          3,
          [](Member& self) {
            const bool root = self.rank == 1;
            std::vector<int64_t> mine{self.rank, 10 + self.rank}, all(6, -1), back(2, -1);
            const sotto_buffer part = buffer(mine), whole = buffer(all), result = buffer(back);
            as_reported(
                self, {{"kind", "gather"}, {"dtype", "int64"}, {"counts", {2}}, {"root", 1}}, [&] {
                  OK(sotto_gather(self.comm, &part, root ? &whole : nullptr, 1, 1, nullptr,
                                  nullptr));
                });
            require(all == (root ? std::vector<int64_t>{0, 10, 1, 11, 2, 12}
                                 : std::vector<int64_t>(6, -1)),
                    "gathered");
            as_reported(
                self, {{"kind", "scatter"}, {"dtype", "int64"}, {"counts", {6}}, {"root", 1}}, [&] {
                  OK(sotto_scatter(self.comm, root ? &whole : nullptr, &result, 1, 1, nullptr,
                                   nullptr));
                });
            require(back == mine, "scattered");
            // In place on the root: its own part stays where it is.
            const sotto_buffer inside = buffer(all.data() + 2, 2);
            all[2] = 7;
            OK(sotto_gather(self.comm, root ? &inside : &part, &whole, 1, 1, nullptr, nullptr));
            require(!root || all[2] == 7, "in place");
            OK(sotto_scatter(self.comm, &whole, root ? &inside : &result, 1, 1, nullptr, nullptr));
            require(root ? all[2] == 7 : back == mine, "in place");
          }),
      "");
}

TEST_P(CapiExchange, AllToAllOfEqualParts) {
  EXPECT_EQ(world(3,
                  [](Member& self) {
                    std::vector<uint32_t> in(6), out(6);
                    for (uint32_t i = 0; i < 6; ++i)
                      in[i] = 100 * static_cast<uint32_t>(self.rank) + i;
                    std::vector<int8_t> small(3, static_cast<int8_t>(self.rank));
                    const sotto_buffer a[] = {buffer(in), buffer(small)};
                    const sotto_buffer b[] = {buffer(out), buffer(small)};  // the second in place
                    sotto_op* op = nullptr;
                    OK(sotto_all_to_all(self.comm, a, b, 2, nullptr, nullptr, &op));
                    OK(sotto_op_wait(op, -1));
                    OK(sotto_op_release(op));
                    const auto me = static_cast<uint32_t>(self.rank);
                    for (uint32_t r = 0; r < 3; ++r) {
                      require(out[2 * r] == 100 * r + 2 * me, "first of a part");
                      require(out[2 * r + 1] == 100 * r + 2 * me + 1, "second of a part");
                    }
                    require(small == std::vector<int8_t>{0, 1, 2}, "in place");
                    as_reported(
                        self, {{"kind", "all_to_all"}, {"dtype", "uint32"}, {"counts", {6}}}, [&] {
                          OK(sotto_all_to_all(self.comm, a, b, 1, nullptr, nullptr, nullptr));
                        });
                  }),
            "");
}

// Rank s sends s + d elements to rank d, and none from 2 to 0.
uint64_t uneven(int32_t s, int32_t d) {
  return s == 2 && d == 0 ? 0 : static_cast<uint64_t>(s + d);
}

TEST_P(CapiExchange, AllToAllOfUnevenParts) {
  EXPECT_EQ(
      world(3,
            [](Member& self) {
              Counts to, from;
              for (int32_t r = 0; r < 3; ++r) {
                to.push_back(uneven(self.rank, r));
                from.push_back(uneven(r, self.rank));
              }
              std::vector<double> in(std::accumulate(to.begin(), to.end(), uint64_t{0}), self.rank);
              const uint64_t arriving = std::accumulate(from.begin(), from.end(), uint64_t{0});
              std::vector<double> out(arriving + 4, -1);
              const sotto_buffer a = buffer(in), b = buffer(out);
              sotto_parts parts = parts_of(to, from);
              const nlohmann::json request = {{"kind", "all_to_all"},
                                              {"dtype", "fp64"},
                                              {"in_counts", nlohmann::json::array({to})},
                                              {"out_counts", nlohmann::json::array({from})}};
              as_reported(self, request, [&] {
                OK(sotto_all_to_all(self.comm, &a, &b, 1, &parts, nullptr, nullptr));
              });
              std::vector<double> want;
              for (int32_t r = 0; r < 3; ++r)
                want.insert(want.end(), from[static_cast<size_t>(r)], static_cast<double>(r));
              want.insert(want.end(), 4, -1);
              require(out == want, "one behind the other");
              // The same from the end of `out`, in a group beside a barrier.
              const Counts offsets{4 + from[1] + from[2], 4 + from[2], 4};
              parts.out_offsets = offsets.data();
              std::fill(out.begin(), out.end(), -1);
              OK(sotto_group_begin(self.comm));
              OK(sotto_all_to_all(self.comm, &a, &b, 1, &parts, nullptr, nullptr));
              OK(sotto_barrier(self.comm, nullptr, nullptr));
              sotto_op* op = nullptr;
              OK(sotto_group_end(self.comm, nullptr, &op));
              OK(sotto_op_wait(op, -1));
              OK(sotto_op_release(op));
              want.assign(4, -1);
              for (int32_t r = 2; r >= 0; --r)
                want.insert(want.end(), from[static_cast<size_t>(r)], static_cast<double>(r));
              require(out == want, "where the offsets say");
            }),
      "");
}

TEST_P(CapiExchange, CountsThatDoNotFitAreProtocol) {
  EXPECT_EQ(world(2,
                  [](Member& self) {
                    std::vector<float> in(8), out(8);
                    const sotto_buffer a = buffer(in), b = buffer(out);
                    // Rank 0 sends 5; rank 1 expects none.
                    const Counts to{1, self.rank == 0 ? uint64_t{5} : uint64_t{1}};
                    const Counts from{self.rank == 0 ? uint64_t{1} : uint64_t{0}, 1};
                    const sotto_parts parts = parts_of(to, from);
                    FAILS(sotto_all_to_all(self.comm, &a, &b, 1, &parts, nullptr, nullptr),
                          SOTTO_E_PROTOCOL, "rank 0", "sends 5 elements", "rank 1", "expects 0");
                    const char* cause = nullptr;
                    FAILS(sotto_comm_error(self.comm, &cause), SOTTO_E_PROTOCOL,
                          "sends 5 elements");
                  }),
            "");
}

TEST_P(CapiExchange, RootsThatDifferAreProtocol) {
  EXPECT_EQ(world(2,
                  [](Member& self) {
                    std::vector<float> in(2), out(4);
                    const sotto_buffer a = buffer(in), b = buffer(out);
                    FAILS(sotto_gather(self.comm, &a, &b, 1, self.rank, nullptr, nullptr),
                          SOTTO_E_PROTOCOL, "gather(root 0", "gather(root 1");
                  }),
            "");
}

template <class T>
void reduces(const Member& self, sotto_reduce_op op, const std::vector<T>& ranks, T want) {
  T value = ranks[static_cast<size_t>(self.rank)];
  const sotto_buffer b = buffer(&value, 1);
  const sotto_call call = call_with([&](auto& c) { c.reduce = op; });
  OK(sotto_all_reduce(self.comm, &b, &b, 1, &call, nullptr));
  require(value == want, "reduction " + std::to_string(op) + " is " + std::to_string(value));
}

TEST_P(CapiExchange, NewerDtypesAndReductions) {
  EXPECT_EQ(
      world(2,
            [](Member& self) {
              reduces<int8_t>(self, SOTTO_REDUCE_SUM, {100, 100}, -56);
              reduces<int8_t>(self, SOTTO_REDUCE_MEAN, {-4, -3}, -3);
              reduces<uint32_t>(self, SOTTO_REDUCE_PROD, {1u << 31, 3}, 1u << 31);
              reduces<uint64_t>(self, SOTTO_REDUCE_MAX, {1, uint64_t{1} << 63}, uint64_t{1} << 63);
              reduces<uint8_t>(self, SOTTO_REDUCE_BIT_OR, {5, 0x82}, 0x87);
              reduces<float>(self, SOTTO_REDUCE_PROD, {-3, 0.5f}, -1.5f);
              reduces<double>(self, SOTTO_REDUCE_PROD, {1e200, 1e-200}, 1e200 * 1e-200);
            }),
      "");
}

INSTANTIATE_TEST_SUITE_P(Transports, CapiExchange, testing::Values("inproc", "tcp"),
                         [](const auto& instance) { return std::string(instance.param); });

// ---- bad input ----

TEST(CapiExchangeErrors, GatherScatterAndEqualParts) {
  EXPECT_EQ(
      run_world(2, {},
                [](Member& self) {
                  std::vector<float> m(16);
                  const auto at = [&](uint64_t begin, uint64_t count) {
                    return buffer(m.data() + begin, count);
                  };
                  const sotto_buffer two = at(0, 2), four = at(4, 4), five = at(4, 5);
                  const auto me = self.rank;
                  FAILS(sotto_gather(nullptr, &two, &four, 1, 0, nullptr, nullptr),
                        SOTTO_E_INVALID_ARGUMENT, "comm is NULL");
                  FAILS(sotto_gather(self.comm, &two, &four, 1, 2, nullptr, nullptr),
                        SOTTO_E_INVALID_ARGUMENT, "root is 2", "0 to 1");
                  FAILS(sotto_scatter(self.comm, &four, &two, 1, -1, nullptr, nullptr),
                        SOTTO_E_INVALID_ARGUMENT, "root is -1");
                  FAILS(sotto_gather(self.comm, &two, &five, 1, me, nullptr, nullptr),
                        SOTTO_E_INVALID_ARGUMENT, "out[0].count is 5", "out = 2 * in");
                  FAILS(sotto_gather(self.comm, &two, nullptr, 1, me, nullptr, nullptr),
                        SOTTO_E_INVALID_ARGUMENT, "out is NULL");
                  FAILS(sotto_scatter(self.comm, &five, &two, 1, me, nullptr, nullptr),
                        SOTTO_E_INVALID_ARGUMENT, "in[0].count is 5", "in = 2 * out");
                  FAILS(sotto_scatter(self.comm, nullptr, &two, 1, me, nullptr, nullptr),
                        SOTTO_E_INVALID_ARGUMENT, "in is NULL");
                  const sotto_buffer wrong = at(4 + 2 * static_cast<uint64_t>(1 - me), 2);
                  FAILS(sotto_gather(self.comm, &wrong, &four, 1, me, nullptr, nullptr),
                        SOTTO_E_INVALID_ARGUMENT, "overlap");
                  FAILS(sotto_scatter(self.comm, &four, &wrong, 1, me, nullptr, nullptr),
                        SOTTO_E_INVALID_ARGUMENT, "overlap");
                  const sotto_buffer odd = at(8, 5), shifted = at(5, 4);
                  FAILS(sotto_all_to_all(self.comm, &five, &odd, 1, nullptr, nullptr, nullptr),
                        SOTTO_E_INVALID_ARGUMENT, "overlap");
                  FAILS(sotto_all_to_all(self.comm, &odd, &odd, 1, nullptr, nullptr, nullptr),
                        SOTTO_E_INVALID_ARGUMENT, "in[0].count is 5", "no multiple of the 2 ranks");
                  FAILS(sotto_all_to_all(self.comm, &four, &shifted, 1, nullptr, nullptr, nullptr),
                        SOTTO_E_INVALID_ARGUMENT, "overlap");
                  FAILS(sotto_all_to_all(self.comm, &two, &four, 1, nullptr, nullptr, nullptr),
                        SOTTO_E_INVALID_ARGUMENT, "in[0].count is 2", "out[0].count is 4");
                  const sotto_call sum = call_with([](auto& c) { c.reduce = SOTTO_REDUCE_SUM; });
                  FAILS(sotto_all_to_all(self.comm, &four, &four, 1, nullptr, &sum, nullptr),
                        SOTTO_E_INVALID_ARGUMENT, "call.reduce is 1");
                  OK(sotto_all_to_all(self.comm, &four, &four, 1, nullptr, nullptr, nullptr));
                }),
      "");
}

TEST(CapiExchangeErrors, Parts) {
  EXPECT_EQ(
      run_world(
          2, {},
          [](Member& self) {
            std::vector<float> x(8), y(8);
            std::vector<int32_t> z(8);
            const sotto_buffer a = buffer(x), b = buffer(y), c = buffer(z);
            const Counts two{2, 2};
            const auto with = [&](const std::function<void(sotto_parts&)>& change,
                                  const sotto_buffer* out) {
              sotto_parts parts = parts_of(two, two);
              change(parts);
              return sotto_all_to_all(self.comm, &a, out, 1, &parts, nullptr, nullptr);
            };
            const auto fails_with = [&](const std::function<void(sotto_parts&)>& change,
                                        const std::vector<std::string>& words) {
              fails(with(change, &b), SOTTO_E_INVALID_ARGUMENT, words, "parts");
            };
            fails_with([](auto& p) { p.struct_size = 24; }, {"parts[0].struct_size is 24"});
            FAILS(with([](auto& p) { p.reserved = 1; }, &b), SOTTO_E_UNSUPPORTED,
                  "parts[0].reserved is 1");
            fails_with([](auto& p) { p.in_counts = nullptr; }, {"parts[0].in_counts is NULL"});
            fails_with([](auto& p) { p.out_counts = nullptr; }, {"parts[0].out_counts is NULL"});
            const Counts much{2, 7}, huge{~uint64_t{0}, 2}, far{0, 9}, near{0, 1};
            fails_with([&](auto& p) { p.in_counts = much.data(); },
                       {"parts[0].in_counts[1] is 7 at offset 2", "in[0] has 8 elements"});
            fails_with([&](auto& p) { p.out_counts = huge.data(); },
                       {"parts[0].out_counts[0] is 18446744073709551615"});
            fails_with([&](auto& p) { p.in_offsets = far.data(); }, {"at offset 9"});
            fails_with([&](auto& p) { p.out_offsets = near.data(); },
                       {"from rank 0 (elements 0 to 2)", "from rank 1 (1 to 3)", "overlap"});
            const Counts other = self.rank == 0 ? Counts{3, 2} : Counts{2, 3};
            fails_with([&](auto& p) { p.out_counts = other.data(); },
                       {"what this rank, " + std::to_string(self.rank), "is 2", "is 3"});
            FAILS(with([](auto&) {}, &c), SOTTO_E_INVALID_ARGUMENT, "in[0] is fp32",
                  "out[0] is int32");
            // In place only with the same parts on both sides.
            const Counts gap{0, 4};
            FAILS(with([&](auto& p) { p.out_offsets = gap.data(); }, &a), SOTTO_E_INVALID_ARGUMENT,
                  "overlap");
            // The stride of an array is the first struct's size.
            sotto_parts pair[] = {parts_of(two, two), parts_of(two, two)};
            pair[1].struct_size = sizeof(sotto_parts) + 8;
            const sotto_buffer ins[] = {a, c}, outs[] = {b, c};
            FAILS(sotto_all_to_all(self.comm, ins, outs, 2, pair, nullptr, nullptr),
                  SOTTO_E_INVALID_ARGUMENT, "parts[1].struct_size is 48");
            pair[1].struct_size = sizeof(sotto_parts);
            OK(sotto_all_to_all(self.comm, ins, outs, 2, pair, nullptr, nullptr));
            OK(with([](auto&) {}, &a));
            OK(with([&](auto& p) { p.out_offsets = gap.data(); }, &b));
            OK(sotto_all_to_all(self.comm, nullptr, nullptr, 0, pair, nullptr, nullptr));
          }),
      "");
}

TEST(CapiExchangeErrors, PlanRequests) {
  EXPECT_EQ(run_world(2, {},
                      [](Member& self) {
                        uint64_t length = 0;
                        const auto bad = [&](const std::string& rest,
                                             const std::vector<std::string>& words) {
                          const std::string text = R"({"kind": "all_to_all", )" + rest + "}";
                          fails(sotto_plan_report(self.comm, text.c_str(), nullptr, 0, &length),
                                SOTTO_E_INVALID_ARGUMENT, words, text.c_str());
                        };
                        bad(R"("counts": [3])", {"request.counts has 3", "2 ranks"});
                        bad(R"("in_counts": [[1, 1]])", {"request.out_counts is null"});
                        bad(R"("in_counts": [[1]], "out_counts": [[1, 1]])",
                            {"request.in_counts has [1]", "2 counts"});
                        bad(R"("in_counts": [[1, -1]], "out_counts": [[1, 1]])", {"has -1"});
                        bad(R"("in_counts": [[1, 1]], "out_counts": [])", {"1 buffer ", "has 0"});
                        bad(R"("in_counts": [[1, 1]], "out_counts": [[2, 2]])", {"itself"});
                        bad(R"("in_counts": [], "out_counts": [], "counts": [])",
                            {"counts beside"});
                        FAILS(sotto_plan_report(self.comm, R"({"kind": "gather", "in_counts": []})",
                                                nullptr, 0, &length),
                              SOTTO_E_INVALID_ARGUMENT, "only all_to_all");
                      }),
            "");
}

}  // namespace
}  // namespace sotto::test
