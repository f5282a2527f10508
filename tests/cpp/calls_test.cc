// Every call of sotto.hpp does what its name says, on ranks.
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>

#include "tests/cpp/world.h"

namespace cpp_test {
namespace {

std::vector<float> numbers(size_t n, float first) {
  std::vector<float> x(n);
  std::iota(x.begin(), x.end(), first);
  return x;
}

TEST(CppCalls, Library) {
  EXPECT_EQ(abi_version(), SOTTO_ABI_VERSION);
  EXPECT_EQ(std::string(version_string()).substr(0, 4), "0.2.");
  EXPECT_NE(std::string(build_info()).find("onebit"), std::string::npos);
  EXPECT_STREQ(status_name(SOTTO_E_BUSY), "BUSY");
  EXPECT_NE(config_report(kAdam, 2, 1000).find("Adam"), std::string::npos);
  EXPECT_EQ(config_resolve(R"({"train_batch_size": "auto"})", R"({"train_batch_size": 64})"),
            R"({"train_batch_size":64})");
  FAILS(predict_report("{}"), SOTTO_E_INVALID_ARGUMENT, "params");
  const std::string predicted = predict_report(
      R"({"params": 1000, "ranks": 2, "bandwidth_mbit": 100, "step_ms": 10, "rates": {"fp32": 1, "bf16": 1, "fp16": 1, "int8": 1, "int4": 1, "onebit": 1, "topk": 1, "outer": 1}})");
  EXPECT_NE(predicted.find("co2"), std::string::npos);
  static std::string said;
  set_log([](void*, std::int32_t, const char* text) { said += text; }, nullptr, 5);
  setenv("SOTTO_NO_SUCH_PARAMETER", "1", 1);
  { Alone alone; }
  unsetenv("SOTTO_NO_SUCH_PARAMETER");
  set_log(nullptr, nullptr, 0);
  EXPECT_NE(said.find("SOTTO_NO_SUCH_PARAMETER"), std::string::npos) << said;
  FAILS(set_log(nullptr, nullptr, 9), SOTTO_E_INVALID_ARGUMENT, "level");
}

TEST(CppCalls, ContextsAndComms) {
  EXPECT_EQ(on_ranks(3,
                     [](comm& ranks) {
                       const std::int32_t rank = ranks.rank();
                       require(ranks.size() == 3, "size");
                       comm some = ranks.split(rank == 1 ? -1 : 0, -rank);
                       require(static_cast<bool>(some) == (rank != 1), "split");
                       if (some)
                         require(some.rank() == (rank == 2 ? 0 : 1) && some.size() == 2, "order");
                       wait(ranks.barrier(call().tag(7)));
                       require(ranks.report("counters").find("peers") != std::string::npos,
                               ranks.report());
                       require(ranks.counters().ops_completed >= 1, "counters");
                       require(
                           ranks.plan(R"({"kind": "all_reduce", "counts": [8]})").find("payload") !=
                               std::string::npos,
                           "plan");
                       FAILS(ranks.plan("{}"), SOTTO_E_INVALID_ARGUMENT, "kind");
                       FAILS(ranks.report("nothing"), SOTTO_E_INVALID_ARGUMENT, "nothing");
                       require(ranks.error().ok() && ranks.error().message() == "OK", "healthy");
                     }),
            "");
  context polled = context::create(context_config().no_progress_thread().max_ops(4));
  polled.poll();
  EXPECT_NE(polled.report().find("parameters"), std::string::npos);
  FAILS(context::create(context_config().cpu_threads(100000)), SOTTO_E_INVALID_ARGUMENT,
        "cpu_threads");
  FAILS(comm::create(polled, comm_config().rank(0, 1).transport("pigeon")), SOTTO_E_UNSUPPORTED,
        "pigeon");
}

// An id of a context is a temporary value.
TEST(CppCalls, ConfigurationsKeepTheirId) {
  Alone alone;
  comm_config config;
  config.rank(0, 1).id(alone.ctx.unique_id());
  const comm_config copy = config;
  comm_config assigned;
  EXPECT_EQ(assigned.get()->id, nullptr);
  assigned = copy;
  const comm_config* const all[] = {&copy, &config, &assigned};
  for (const comm_config* const each : all) {
    EXPECT_GE(static_cast<const void*>(each->get()->id), each);
    EXPECT_LT(static_cast<const void*>(each->get()->id), each + 1);
    EXPECT_EQ(std::memcmp(each->get()->id, config.get()->id, sizeof(sotto_unique_id)), 0);
  }
  EXPECT_EQ(comm::create(alone.ctx, assigned).size(), 1);
}

// A comm over the caller's own all-gather.
TEST(CppCalls, OwnAllGather) {
  Alone alone;
  bool called = false;
  const auto gather = [](void* user, const void* in, std::uint64_t n, void* out) -> std::int32_t {
    *static_cast<bool*>(user) = true;
    std::memcpy(out, in, n);
    return 0;
  };
  comm one = comm::create(alone.ctx, comm_config().rank(0, 1).all_gather(gather, &called));
  EXPECT_EQ(one.size(), 1);
}

TEST(CppCalls, Collectives) {
  EXPECT_EQ(
      on_ranks(
          2,
          [](comm& ranks) {
            const std::int32_t rank = ranks.rank(), peer = 1 - rank;
            const std::vector<float> mine = numbers(4, 1.0f + 10.0f * static_cast<float>(rank));
            const auto is = [](const std::vector<float>& x, const std::vector<float>& y,
                               const char* what) { require(x == y, what); };
            const std::vector<float> a = numbers(4, 1), b = numbers(4, 11);
            std::vector<float> both(a), sum(4), mean(4), x;
            both.insert(both.end(), b.begin(), b.end());
            for (size_t i = 0; i < 4; ++i) sum[i] = a[i] + b[i], mean[i] = sum[i] / 2;

            x = mine, wait(ranks.broadcast(x, 1)), is(x, b, "broadcast in place");
            x.assign(4, 0), wait(ranks.broadcast(mine, x, 0)), is(x, a, "broadcast");
            x.assign(8, 0), wait(ranks.all_gather(mine, x)), is(x, both, "all_gather");
            x = mine, wait(ranks.all_reduce(x)), is(x, sum, "all_reduce in place");
            x.assign(4, 0), wait(ranks.all_reduce(mine, x, call().reduce(reduce_op::mean)));
            is(x, mean, "mean");
            x.assign(4, 0), wait(ranks.all_reduce(mine, x, call().reduce(reduce_op::max)));
            is(x, b, "max");
            x.assign(2, 0), wait(ranks.reduce_scatter(mine, x));
            is(x, {sum.begin() + 2 * rank, sum.begin() + 2 * rank + 2}, "reduce_scatter");
            x = mine, wait(ranks.reduce(x, 0)), is(x, rank == 0 ? sum : mine, "reduce in place");
            if (rank == 0) {
              x.assign(4, 0), wait(ranks.reduce(mine, x, 0)), is(x, sum, "reduce");
              x.assign(8, 0), wait(ranks.gather(mine, x, 0)), is(x, both, "gather");
              x.assign(4, 0), wait(ranks.scatter(both, x, 0)), is(x, a, "scatter");
            } else {  // what only the root has is left out
              wait(ranks.reduce(mine, out_buffers(), 0));
              wait(ranks.gather(mine, out_buffers(), 0));
              x.assign(4, 0), wait(ranks.scatter(in_buffers(), x, 0)), is(x, b, "scatter");
            }
            x.assign(4, 0), wait(ranks.all_to_all(mine, x));
            const size_t at = static_cast<size_t>(2 * rank);
            is(x, {a[at], a[at + 1], b[at], b[at + 1]}, "all_to_all");
            // Parts of their own lengths, the other rank's first.
            const std::vector<std::uint64_t> counts{1, 3}, offsets{3, 0},
                take{rank == 0 ? 1u : 3u, rank == 0 ? 1u : 3u};
            const std::array<parts, 1> uneven{{parts().in(counts, offsets).out(take)}};
            x.assign(rank == 0 ? 2 : 6, 0), wait(ranks.all_to_all(mine, x, uneven));
            is(x,
               rank == 0 ? std::vector<float>{a[3], b[3]}
                         : std::vector<float>{a[0], a[1], a[2], b[0], b[1], b[2]},
               "all_to_all with parts");
            const std::array<parts, 1> out_parts{{parts().out(counts)}},
                in_parts{{parts().in(counts)}};
            const std::vector<float> piece(mine.begin(), mine.begin() + (rank == 0 ? 1 : 3));
            x.assign(4, 0), wait(ranks.all_gather_v(piece, x, out_parts));
            is(x, {a[0], b[0], b[1], b[2]}, "all_gather_v");
            x.assign(rank == 0 ? 1 : 3, 0), wait(ranks.reduce_scatter_v(mine, x, in_parts));
            is(x,
               rank == 0 ? std::vector<float>{sum[0]} : std::vector<float>{sum[1], sum[2], sum[3]},
               "reduce_scatter_v");
            x.assign(4, 0);
            {
              op sent = ranks.send(mine, peer);
              wait(ranks.recv(x, peer));
              sent.wait();
            }
            is(x, rank == 0 ? b : a, "send and receive");
          }),
      "");
}

TEST(CppCalls, ListsAndGroupsAndDtypes) {
  EXPECT_EQ(
      on_ranks(2,
               [](comm& ranks) {
                 std::vector<double> x(3, 1.5);
                 std::int64_t y[2] = {1, 2};
                 std::vector<std::uint8_t> z(5, 3);
                 std::array<bfloat16, 1> h{{{0x3f80}}};  // 1
                 const std::vector<sotto_buffer> all{buffer_of(x), buffer_of(y), buffer_of(z),
                                                     buffer_of(h)};
                 op first = ranks.all_reduce(all);
                 first.wait();
                 require(x[2] == 3.0 && y[1] == 4 && z[4] == 6 && h[0].bits == 0x4000, "sums");
                 require(first.stats().payload_bytes_planned > 0 && first.error().ok(), "stats");
                 require(first.test(), "ended");

                 sotto::group both = ranks.group();
                 both.all_reduce(x, call().tag(1));
                 both.all_reduce(y, call().tag(2).reduce(reduce_op::max));
                 FAILS(ranks.group(), SOTTO_E_INVALID_STATE, "group");
                 op collected = both.end();
                 collected.wait();
                 require(x[0] == 6.0 && y[0] == 2, "a group");
                 FAILS(both.end(), SOTTO_E_INVALID_ARGUMENT, "comm is NULL");

                 std::vector<op> ops;
                 for (int i = 0; i < 3; ++i) ops.push_back(ranks.barrier());
                 ops.emplace_back();
                 require(wait_any(ops) < 3, "one of them");
                 require(wait_all(ops), "all of them");
               }),
      "");
}

// Times that are over are no errors.
TEST(CppCalls, WaitsForAWhile) {
  EXPECT_EQ(on_ranks(2,
                     [](comm& ranks) {
                       float x[1] = {1};
                       const auto moment = std::chrono::milliseconds(20);
                       if (ranks.rank() == 0) {
                         std::vector<op> ops;
                         ops.push_back(ranks.recv(x, 1));
                         require(!ops[0].wait_for(moment), "wait_for");
                         require(!ops[0].test() && ops[0].error().in_progress(), "test");
                         require(ops[0].error().text().empty(), "no text");
                         require(wait_any(ops, moment) == 1, "wait_any");
                         require(!wait_all(ops, moment), "wait_all");
                         float go = 1;
                         wait(ranks.send(buffer_of(&go, 1), 1));
                         ops[0].wait();
                         require(x[0] == 3, "received");
                         FAILS(ops[0].stream_wait(nullptr), SOTTO_E_UNSUPPORTED, "host");
                       } else {
                         wait(ranks.recv(x, 0));
                         x[0] = 3;
                         wait(ranks.send(x, 0));
                       }
                     }),
            "");
}

TEST(CppCalls, BadInput) {
  Alone alone;
  comm& ranks = alone.ranks;
  std::vector<float> x(4), y(3);
  const std::vector<sotto_buffer> two(2, buffer_of(x));
  const std::array<parts, 1> one_part;
  FAILS(wait(ranks.all_reduce(two, y)), SOTTO_E_INVALID_ARGUMENT,
        "all_reduce: in are 2 and out are 1; allowed: as many");
  FAILS(wait(ranks.all_to_all(two, two, one_part)), SOTTO_E_INVALID_ARGUMENT,
        "all_to_all: the buffers are 2 and parts are 1");
  FAILS(wait(ranks.all_reduce(x, y)), SOTTO_E_INVALID_ARGUMENT, "out[0]");
  FAILS(wait(ranks.all_reduce(x, out_buffers())), SOTTO_E_INVALID_ARGUMENT, "out is NULL");
  FAILS(wait(ranks.broadcast(x, 1)), SOTTO_E_INVALID_ARGUMENT, "root");
  FAILS(wait(ranks.all_reduce(x, call().reduce(reduce_op::bit_or))), SOTTO_E_INVALID_ARGUMENT,
        "integers");
  FAILS(codec::create(ranks, R"({"type": "morse"})", x), SOTTO_E_INVALID_ARGUMENT, "morse");
  FAILS(optim::create(ranks, kAdam, span<const param>()), SOTTO_E_INVALID_ARGUMENT, "n is 0");
  FAILS(optim::create(ranks, "{", span<const param>()), SOTTO_E_INVALID_ARGUMENT, "");
  FAILS(overlap::create(ranks, R"({"speed": 1})", x), SOTTO_E_INVALID_ARGUMENT, "speed");
  FAILS(outer::create(ranks, R"({"preset": "none"})", std::array<param, 1>{param("x", x)}),
        SOTTO_E_INVALID_ARGUMENT, "none");
  FAILS(optim::create(ranks, nullptr, span<const param>()), SOTTO_E_INVALID_ARGUMENT,
        "json is NULL");
}

// A call that this interface refuses before the library has seen it.
TEST(CppCalls, NothingOfAGroupStartsAfterARefusal) {
  Alone alone;
  std::vector<float> x(4, 1.0f), y(4);
  const std::vector<sotto_buffer> two(2, buffer_of(x));
  group calls = alone.ranks.group();
  calls.all_reduce(x, y);
  FAILS(calls.all_reduce(two, x), SOTTO_E_INVALID_ARGUMENT, "in are 2 and out are 1");
  group moved = std::move(calls);
  FAILS(moved.end(), SOTTO_E_INVALID_ARGUMENT, "all_reduce: in are 2 and out are 1");
  EXPECT_EQ(y[0], 0.0f);
  {
    group dropped = alone.ranks.group();
    dropped.all_reduce(x, y);
    FAILS(dropped.all_to_all(two, two, std::array<parts, 1>()), SOTTO_E_INVALID_ARGUMENT,
          "parts are 1");
  }
  EXPECT_EQ(y[0], 0.0f);
  group next = alone.ranks.group();
  next.all_reduce(x, y);
  next.end().wait();
  EXPECT_EQ(y[0], 1.0f);
}

TEST(CppCalls, Codecs) {
  EXPECT_EQ(on_ranks(2,
                     [](comm& ranks) {
                       std::vector<float> x = numbers(4096, static_cast<float>(ranks.rank()));
                       codec bits =
                           codec::create(ranks, R"({"type": "int8"})", buffer_like<float>(4096));
                       wait(ranks.all_reduce(x, call().encode(bits)));
                       require(std::abs(x[100] - 100.5f) < 2.0f, "the mean");
                       const auto state = bits.state_export(state_mode::exact);
                       require(state.size() > 4 * 4096, "residuals");
                       bits.state_import(state_mode::exact, state);
                       FAILS(bits.state_import(state_mode::exact, bytes(state.data(), 10)),
                             SOTTO_E_INVALID_ARGUMENT, "");
                       codec other =
                           codec::create(ranks, R"({"type": "int8"})", buffer_like<float>(4096));
                       other.state_import(state_mode::mean, bits.state_export(state_mode::mean));
                     }),
            "");
}

}  // namespace
}  // namespace cpp_test
