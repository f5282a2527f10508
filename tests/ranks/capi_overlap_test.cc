// Overlaps at the C ABI: rounds, what every text says, and what wrong calls leave untouched.
#include <nlohmann/json.hpp>

#include <atomic>
#include <chrono>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/ranks/capi_overlap_model.h"

namespace sotto::test {
namespace {

// A round as any: the mean of rank + 1.
void works(const Member& self, sotto_overlap* overlap, Gradients& gradients) {
  gradients.write(static_cast<float>(self.rank + 1));
  sotto_op* op = begin(overlap);
  mark(overlap, {0, 1, 2, 3, 4, 5});
  finish(overlap, op);
  gradients.expect(static_cast<float>(self.size + 1) / 2, "a round");
}

TEST(CapiOverlap, MeansAndSums) {
  EXPECT_EQ(run_world(3, {},
                      [](Member& self) {
                        Gradients gradients;
                        sotto_overlap* overlap = new_overlap(self, gradients);
                        works(self, overlap, gradients);
                        const sotto_call call =
                            call_with([](sotto_call& c) { c.reduce = SOTTO_REDUCE_SUM; });
                        gradients.write(static_cast<float>(self.rank));
                        sotto_op* op = begin(overlap, &call);
                        for (const uint64_t i : {3, 0, 5, 4, 2, 1}) mark(overlap, {i});
                        finish(overlap, op);
                        gradients.expect(3, "the sum");
                        const sotto_overlap_info info = info_of(overlap);
                        require(info.rounds == 2 && info.buckets == 3 && info.missing == 0,
                                "figures");
                        require(info.network_ns >= info.exposed_ns && info.exposed_ns >= 0 &&
                                    info.begin_to_last_ready_ns > 0,
                                "times");
                        OK(sotto_overlap_destroy(overlap));
                      }),
            "");
}

// Buffers move from round to round.
TEST(CapiOverlap, GradientsMove) {
  EXPECT_EQ(
      run_world(2, {},
                [](Member& self) {
                  Gradients like;
                  for (sotto_buffer& b : like.buffers) b.data = nullptr;
                  sotto_overlap* overlap = new_overlap(self, like);
                  const uint64_t all[] = {5, 4, 3, 2, 1, 0};
                  for (int round = 0; round < 3; ++round) {
                    Gradients gradients;
                    gradients.write(static_cast<float>(self.rank + round));
                    sotto_op* op = begin(overlap);
                    FAILS(
                        sotto_overlap_ready(overlap, all, nullptr, 1, nullptr),
                        SOTTO_E_INVALID_ARGUMENT,
                        "indices[0]: where gradient 5 is was not said: like[5].data was NULL, and "
                        "grads is NULL");
                    std::vector<sotto_buffer> places;
                    for (const uint64_t i : all) places.push_back(gradients.buffers[i]);
                    OK(sotto_overlap_ready(overlap, all, places.data(), 6, nullptr));
                    finish(overlap, op);
                    gradients.expect(static_cast<float>(round) + 0.5f, "moved");
                  }
                  OK(sotto_overlap_destroy(overlap));
                }),
      "");
}

void wrong_marks(sotto_overlap* overlap, Gradients& gradients) {
  const uint64_t two[] = {2, 1}, far[] = {0, 6}, twice[] = {0, 0};
  FAILS(sotto_overlap_ready(overlap, two, nullptr, 1, nullptr), SOTTO_E_INVALID_STATE,
        "indices[0]: gradient 2 has been marked before in round 1");
  FAILS(sotto_overlap_unused(overlap, two, 1), SOTTO_E_INVALID_STATE,
        "indices[0]: gradient 2 has been marked before in round 1");
  FAILS(sotto_overlap_ready(overlap, far, nullptr, 2, nullptr), SOTTO_E_INVALID_ARGUMENT,
        "indices[1] is 6; allowed: 0 to 5");
  FAILS(sotto_overlap_ready(overlap, twice, nullptr, 2, nullptr), SOTTO_E_INVALID_STATE,
        "indices[1]: gradient 0 is named twice");
  FAILS(sotto_overlap_ready(overlap, nullptr, nullptr, 2, nullptr), SOTTO_E_INVALID_ARGUMENT,
        "indices is NULL but n is 2");
  const uint64_t some[] = {0, 1};
  std::vector<sotto_buffer> wrong{gradients.buffers[0], gradients.buffers[1]};
  wrong[1].count = 36;
  FAILS(sotto_overlap_ready(overlap, some, wrong.data(), 2, nullptr), SOTTO_E_INVALID_ARGUMENT,
        "grads[1].count is 36; gradient 1 was registered with 37");
  wrong[1] = gradients.buffers[1];
  wrong[1].dtype = SOTTO_BFLOAT16;
  FAILS(sotto_overlap_ready(overlap, some, wrong.data(), 2, nullptr), SOTTO_E_INVALID_ARGUMENT,
        "grads[1] is bf16; gradient 1 was registered as fp32");
  wrong[1] = gradients.buffers[1];
  wrong[1].device_type = SOTTO_DEVICE_CUDA;
  FAILS(sotto_overlap_ready(overlap, some, wrong.data(), 2, nullptr), SOTTO_E_INVALID_ARGUMENT,
        "grads[1] is on cuda:0; the gradients of this overlap are on cpu");
  wrong[1].device_type = 7;
  FAILS(sotto_overlap_ready(overlap, some, wrong.data(), 2, nullptr), SOTTO_E_UNSUPPORTED,
        "grads[1].device_type is 7");
}

// Each of them has its own text, and the round goes on as if it had not been made.
TEST(CapiOverlap, WrongCallsChangeNothing) {
  EXPECT_EQ(
      run_world(
          2, {},
          [](Member& self) {
            Gradients gradients;
            sotto_overlap* overlap = new_overlap(self, gradients);
            const uint64_t zero[] = {0};
            const char* const none =
                "no round of this overlap is open; call sotto_overlap_begin first";
            FAILS(sotto_overlap_ready(overlap, zero, nullptr, 1, nullptr), SOTTO_E_INVALID_STATE,
                  none);
            FAILS(sotto_overlap_unused(overlap, zero, 1), SOTTO_E_INVALID_STATE, none);
            FAILS(sotto_overlap_finish(overlap), SOTTO_E_INVALID_STATE, none);
            FAILS(sotto_overlap_withdraw(overlap, "x"), SOTTO_E_INVALID_STATE, none);
            FAILS(sotto_overlap_begin(overlap, nullptr, nullptr), SOTTO_E_INVALID_ARGUMENT,
                  "out_op is NULL");
            const sotto_call most = call_with([](sotto_call& c) { c.reduce = SOTTO_REDUCE_MAX; });
            sotto_op* other = nullptr;
            FAILS(sotto_overlap_begin(overlap, &most, &other), SOTTO_E_INVALID_ARGUMENT,
                  "call.reduce is 4; allowed: 0 (mean), 1 (SOTTO_REDUCE_SUM), 2");
            gradients.write(static_cast<float>(self.rank));
            sotto_op* op = begin(overlap);
            FAILS(sotto_overlap_begin(overlap, nullptr, &other), SOTTO_E_BUSY,
                  "round 1 of this overlap is open; call sotto_overlap_finish or "
                  "sotto_overlap_withdraw first");
            mark(overlap, {2});
            wrong_marks(overlap, gradients);
            require(info_of(overlap).missing == 5, "missing");
            mark(overlap, {4, 1});
            FAILS(sotto_overlap_finish(overlap), SOTTO_E_INVALID_STATE,
                  "round 1: 3 of 6 gradients are missing on rank " + std::to_string(self.rank) +
                      ": 0, 3, 5; call sotto_overlap_ready or "
                      "sotto_overlap_unused for them, or set \"unused\" to \"zero\"; the "
                      "round stays open");
            require(other == nullptr && sotto_op_test(op) == SOTTO_IN_PROGRESS, "it goes on");
            mark(overlap, {5, 3, 0});
            finish(overlap, op);
            gradients.expect(0.5f, "the mean");
            FAILS(sotto_overlap_ready(overlap, zero, nullptr, 1, nullptr), SOTTO_E_INVALID_STATE,
                  "round 1 of this overlap has been finished; wait for its operation, then call "
                  "sotto_overlap_begin");
            OK(sotto_overlap_destroy(overlap));
          }),
      "");
}

// Rank 1 has not begun its round, so that of rank 0 is in flight.
TEST(CapiOverlap, WrongCallsBehindTheEnd) {
  std::atomic<bool> go{false};
  EXPECT_EQ(
      run_world(2, {},
                [&](Member& self) {
                  Gradients gradients;
                  sotto_overlap* overlap = new_overlap(self, gradients);
                  while (self.rank == 1 && !go) std::this_thread::yield();
                  sotto_op* op = begin(overlap);
                  mark(overlap, {0, 1, 2, 3, 4, 5});
                  OK(sotto_overlap_finish(overlap));
                  if (self.rank == 0) {
                    const char* const text =
                        "round 1 of this overlap has been finished; wait for its operation, then "
                        "call sotto_overlap_begin";
                    const uint64_t zero[] = {0};
                    FAILS(sotto_overlap_ready(overlap, zero, nullptr, 1, nullptr),
                          SOTTO_E_INVALID_STATE, text);
                    FAILS(sotto_overlap_finish(overlap), SOTTO_E_INVALID_STATE, text);
                    FAILS(sotto_overlap_withdraw(overlap, "x"), SOTTO_E_INVALID_STATE, text);
                    sotto_op* other = nullptr;
                    FAILS(sotto_overlap_begin(overlap, nullptr, &other), SOTTO_E_BUSY,
                          "round 1 of this overlap is in flight; wait for its operation first");
                    go = true;
                  }
                  OK(sotto_op_wait(op, -1));
                  OK(sotto_op_release(op));
                  works(self, overlap, gradients);
                  OK(sotto_overlap_destroy(overlap));
                }),
      "");
}

sotto_comm_counters counters_of(const Member& self) {
  sotto_comm_counters counters = SOTTO_COMM_COUNTERS_INIT;
  OK(sotto_comm_get_counters(self.comm, &counters));
  return counters;
}

TEST(CapiOverlap, WithdrawEndsTheRoundOnAllRanks) {
  for (const char* transport : {"inproc", "tcp"}) {
    WorldOptions options;
    options.transport = transport;
    EXPECT_EQ(run_world(3, options,
                        [](Member& self) {
                          Gradients gradients;
                          sotto_overlap* overlap = new_overlap(self, gradients);
                          works(self, overlap, gradients);
                          sotto_op* op = begin(overlap);
                          if (self.rank == 1) {
                            mark(overlap, {5});
                            OK(sotto_overlap_withdraw(overlap, "loss is \"NaN\"\n"));
                            FAILS(sotto_overlap_withdraw(overlap, "again"), SOTTO_E_INVALID_STATE,
                                  "this rank has withdrawn from round 2 of this overlap");
                          } else {
                            mark(overlap, {0, 1, 2, 3, 4, 5});
                            OK(sotto_overlap_finish(overlap));
                          }
                          FAILS(sotto_op_wait(op, -1), SOTTO_E_CANCELLED,
                                "overlap round 2: rank 1 has withdrawn: loss is \"NaN\"\\x0a; "
                                "gradients are undefined, the group is healthy");
                          OK(sotto_op_release(op));
                          // As before it ended, which another rank decides.
                          FAILS(sotto_overlap_withdraw(overlap, "again"), SOTTO_E_INVALID_STATE,
                                self.rank == 1
                                    ? "this rank has withdrawn from round 2 of this overlap"
                                    : "round 2 of this overlap has been finished");
                          works(self, overlap, gradients);
                          require(info_of(overlap).rounds == 2, "rounds");
                          OK(sotto_overlap_destroy(overlap));
                          OK(sotto_barrier(self.comm, nullptr, nullptr));
                        }),
              "");
  }
}

// Ranks that are destroyed early do not leave the others waiting.
TEST(CapiOverlap, DestroyWithdraws) {
  EXPECT_EQ(run_world(2, {},
                      [](Member& self) {
                        Gradients gradients;
                        sotto_overlap* overlap = new_overlap(self, gradients);
                        sotto_op* op = begin(overlap);
                        if (self.rank == 0) {
                          mark(overlap, {2});
                          OK(sotto_overlap_destroy(overlap));
                        } else {
                          mark(overlap, {0, 1, 2, 3, 4, 5});
                          OK(sotto_overlap_finish(overlap));
                        }
                        FAILS(sotto_op_wait(op, -1), SOTTO_E_CANCELLED,
                              "rank 0 has withdrawn: it has destroyed the overlap");
                        OK(sotto_op_release(op));
                        if (self.rank == 1) OK(sotto_overlap_destroy(overlap));
                        OK(sotto_barrier(self.comm, nullptr, nullptr));
                      }),
            "");
}

// A round averages in place, so gradients that share memory would be averaged twice.
TEST(CapiOverlap, MemoryOfAnotherGradientIsRefused) {
  EXPECT_EQ(run_world(2, {},
                      [](Member& self) {
                        Gradients gradients;
                        sotto_overlap* overlap = new_overlap(self, gradients);
                        gradients.write(8);
                        sotto_op* op = begin(overlap);
                        const uint64_t both[] = {0, 1};
                        sotto_buffer grads[] = {gradients.buffers[0], gradients.buffers[1]};
                        grads[1].data = grads[0].data;
                        FAILS(sotto_overlap_ready(overlap, both, grads, 2, nullptr),
                              SOTTO_E_INVALID_ARGUMENT, "gradient 1 lies in memory of gradient 0");
                        mark(overlap, {0});
                        FAILS(sotto_overlap_ready(overlap, both + 1, grads + 1, 1, nullptr),
                              SOTTO_E_INVALID_ARGUMENT, "gradient 1 lies in memory of gradient 0");
                        mark(overlap, {1, 2, 3, 4, 5});
                        finish(overlap, op);
                        gradients.expect(8, "what is right is as without it");
                        gradients.write(8);
                        op = begin(overlap);
                        mark(overlap, {0, 1, 2, 3, 4, 5});
                        finish(overlap, op);
                        gradients.expect(8, "the next round");
                        OK(sotto_overlap_destroy(overlap));
                      }),
            "");
}

// A rank without a batch.
TEST(CapiOverlap, UnevenInputsAverageOverAllRanks) {
  EXPECT_EQ(run_world(4, {},
                      [](Member& self) {
                        Gradients gradients;
                        sotto_overlap* overlap = new_overlap(
                            self, gradients,
                            R"({"first_bucket_bytes": 1, "bucket_bytes": 1, "unused": "zero"})");
                        gradients.write(8);
                        sotto_op* op = begin(overlap);
                        if (self.rank != 2) mark(overlap, {0, 1, 2, 3, 4, 5});
                        finish(overlap, op);
                        gradients.expect(6, "the mean over all");
                        OK(sotto_overlap_destroy(overlap));
                      }),
            "");
}

// Time counts where all inputs are there; the text names who is behind, and with which bucket.
TEST(CapiOverlap, TimeOutNamesTheRankAndTheBucket) {
  WorldOptions options;
  options.timeout_us = 1'500'000;
  std::atomic<bool> failed{false};
  EXPECT_EQ(
      run_world(
          2, options,
          [&](Member& self) {
            Gradients gradients;
            sotto_overlap* overlap = new_overlap(self, gradients);
            sotto_op* op = begin(overlap);
            if (self.rank == 1) {
              mark(overlap, {5, 4, 3});  // the first bucket of three, and a part of the second
              while (!failed) std::this_thread::yield();
            } else {
              mark(overlap, {5, 4, 3, 2, 1, 0});
              OK(sotto_overlap_finish(overlap));
            }
            FAILS(sotto_op_wait(op, -1), SOTTO_E_TIMEOUT, "rank 0: ", "waiting for rank 1",
                  "nothing of bucket 1 of 3");
            failed = true;
            OK(sotto_op_release(op));
            OK(sotto_overlap_destroy(overlap));
          }),
      "");
}

TEST(CapiOverlap, RefusesOnAllRanksAlike) {
  EXPECT_EQ(
      run_world(
          2, {},
          [](Member& self) {
            Gradients gradients;
            sotto_overlap* overlap = nullptr;
            const auto create = [&](const char* json, const sotto_buffer* like, uint64_t n) {
              return sotto_overlap_create(self.comm, json, like, n, &overlap);
            };
            const sotto_buffer* const like = gradients.buffers.data();
            const bool bad = self.rank == 1;
            const std::string from = bad ? "" : "rank 1 refuses: ";
            FAILS(create(bad ? nullptr : "{}", like, 6), SOTTO_E_INVALID_ARGUMENT, "json is NULL");
            FAILS(create("{}", like, bad ? 0 : 6), SOTTO_E_INVALID_ARGUMENT, "n is 0");
            FAILS(create(bad ? R"({"bucket_byte": 1})" : "{}", like, 6), SOTTO_E_INVALID_ARGUMENT,
                  "overlap.bucket_byte: unknown key; the nearest one is bucket_bytes");
            std::vector<sotto_buffer> wrong = gradients.buffers;
            wrong[3].dtype = SOTTO_INT32;
            FAILS(create("{}", bad ? wrong.data() : like, 6), SOTTO_E_UNSUPPORTED,
                  "like[3] is int32; gradients are fp32, fp16 or bf16");
            wrong = gradients.buffers;
            wrong[4].data = wrong[0].data;
            FAILS(create("{}", bad ? wrong.data() : like, 6), SOTTO_E_INVALID_ARGUMENT, "like[",
                  "overlap");
            FAILS(create("{}", like, bad ? 5 : 6), SOTTO_E_PROTOCOL, "rank 0 registers 6");
            FAILS(create(bad ? R"({"bucket_bytes": 7})" : "{}", like, 6), SOTTO_E_PROTOCOL,
                  "overlap.bucket_bytes");
            wrong = gradients.buffers;
            wrong[3].dtype = SOTTO_FLOAT16;
            FAILS(create("{}", bad ? wrong.data() : like, 6), SOTTO_E_PROTOCOL,
                  "dtype of gradient 3");
            require(overlap == nullptr, "a handle of a refused call");
            overlap = new_overlap(self, gradients);
            works(self, overlap, gradients);
            OK(sotto_overlap_destroy(overlap));
          }),
      "");
}

TEST(CapiOverlap, ReportsBucketsAndOrder) {
  EXPECT_EQ(
      run_world(
          2, {},
          [](Member& self) {
            Gradients gradients;
            sotto_overlap* overlap = new_overlap(self, gradients);
            const auto report = [&](const char* kind) {
              return nlohmann::json::parse(read_all([&](char* buf, uint64_t cap, uint64_t* len) {
                return sotto_overlap_report(overlap, kind, buf, cap, len);
              }));
            };
            const nlohmann::json buckets = report("buckets");
            require(buckets.dump() == R"([{"bytes":3280,"gradients":[5,4]},)"
                                      R"({"bytes":20004,"gradients":[3,2]},)"
                                      R"({"bytes":4148,"gradients":[1,0]}])",
                    buckets.dump());
            require(report("order").dump() == R"({"gradients":[5,4,3,2,1,0],"order":"reversed"})",
                    report("order").dump());
            works(self, overlap, gradients);
            const nlohmann::json all = report(nullptr);
            require(all["buckets"] == buckets && all["rounds"] == 1 && all["hidden"] == true &&
                        all["settings"]["bucket_bytes"] == 4000 &&
                        all["settings"]["wire"].is_null(),
                    all.dump());
            uint64_t length = 0;
            FAILS(sotto_overlap_report(overlap, "half", nullptr, 0, &length),
                  SOTTO_E_INVALID_ARGUMENT, "kind is \"half\"; known: all, buckets, order");
            OK(sotto_overlap_destroy(overlap));
          }),
      "");
}

// Bytes that a round sends are those that were planned, also of one that was withdrawn.
TEST(CapiOverlap, BytesAreAsPlanned) {
  WorldOptions options;
  options.transport = "tcp";
  EXPECT_EQ(run_world(2, options,
                      [](Member& self) {
                        Gradients gradients;
                        sotto_overlap* overlap = new_overlap(self, gradients);
                        const uint64_t before = counters_of(self).payload_bytes_sent;
                        const sotto_overlap_info info = info_of(overlap);
                        // Half of the gradients there, and half of the averages back.
                        require(info.payload_bytes_per_round == 6858 * 4,
                                std::to_string(info.payload_bytes_per_round));
                        require(info.header_bytes_per_round > 256, "headers");
                        for (int k = 0; k < 3; ++k) {
                          sotto_op* op = begin(overlap);
                          mark(overlap, {0, 1, 2, 3, 4, 5});
                          if (k == 1) {
                            OK(sotto_overlap_withdraw(overlap, nullptr));
                            FAILS(sotto_op_wait(op, -1), SOTTO_E_CANCELLED,
                                  "ranks 0, 1 have withdrawn", "no reason was given");
                            OK(sotto_op_release(op));
                          } else {
                            finish(overlap, op);
                          }
                        }
                        OK(sotto_overlap_destroy(overlap));
                        OK(sotto_barrier(self.comm, nullptr, nullptr));
                        require(counters_of(self).payload_bytes_sent - before ==
                                    3 * info.payload_bytes_per_round,
                                "other bytes than those of three rounds");
                      }),
            "");
}

std::string state_of(const sotto_overlap* overlap, sotto_state_mode mode) {
  return read_all([&](char* buf, uint64_t cap, uint64_t* len) {
    return sotto_overlap_state_export(overlap, mode, buf, cap, len);
  });
}

TEST(CapiOverlap, StatesOfCodecs) {
  EXPECT_EQ(
      run_world(
          2, {},
          [](Member& self) {
            Gradients gradients;
            uint64_t length = 0;
            sotto_overlap* plain = new_overlap(self, gradients);
            FAILS(sotto_overlap_state_export(plain, SOTTO_STATE_EXACT, nullptr, 0, &length),
                  SOTTO_E_INVALID_STATE, "this overlap has no codec");
            FAILS(sotto_overlap_state_import(plain, SOTTO_STATE_EXACT, "x", 1),
                  SOTTO_E_INVALID_ARGUMENT, "state");
            OK(sotto_overlap_destroy(plain));
            sotto_overlap* overlap =
                new_overlap(self, gradients, R"({"bucket_bytes": 4000, "codec": "onebit"})");
            const sotto_call sum = call_with([](sotto_call& c) { c.reduce = SOTTO_REDUCE_SUM; });
            sotto_op* op = nullptr;
            FAILS(sotto_overlap_begin(overlap, &sum, &op), SOTTO_E_INVALID_ARGUMENT,
                  "call.reduce is 1 (SOTTO_REDUCE_SUM), but with a codec gradients become "
                  "their mean: allowed are 0 and 2 (SOTTO_REDUCE_MEAN)");
            const auto round = [&](float x) {
              for (std::vector<float>& d : gradients.data) {
                for (size_t i = 0; i < d.size(); ++i) d[i] = x + static_cast<float>(i % 7);
              }
              sotto_op* started = begin(overlap);
              mark(overlap, {0, 1, 2, 3, 4, 5});
              FAILS(sotto_overlap_state_export(overlap, SOTTO_STATE_EXACT, nullptr, 0, &length),
                    SOTTO_E_BUSY, "is open or in flight; end it first");
              finish(overlap, started);
            };
            round(static_cast<float>(self.rank));
            const std::string state = state_of(overlap, SOTTO_STATE_EXACT);
            round(2);
            const std::vector<std::vector<float>> wanted = gradients.data;
            OK(sotto_overlap_state_import(overlap, SOTTO_STATE_EXACT, state.data(), state.size()));
            round(2);
            require(gradients.data == wanted, "it does not go on from its state");
            FAILS(sotto_overlap_state_import(overlap, SOTTO_STATE_EXACT, state.data(),
                                             state.size() / 2),
                  SOTTO_E_INVALID_ARGUMENT, "state");
            FAILS(sotto_overlap_state_import(overlap, SOTTO_STATE_MEAN, state.data(), state.size()),
                  SOTTO_E_INVALID_ARGUMENT,
                  "the state was exported in mode exact; it cannot be imported in mode mean");
            FAILS(sotto_overlap_state_export(overlap, 9, nullptr, 0, &length),
                  SOTTO_E_INVALID_ARGUMENT, "mode is 9");
            const std::string mean = state_of(overlap, SOTTO_STATE_MEAN);
            OK(sotto_overlap_state_import(overlap, SOTTO_STATE_MEAN, mean.data(), mean.size()));
            OK(sotto_overlap_state_import(overlap, SOTTO_STATE_RESET, mean.data(), mean.size()));
            OK(sotto_overlap_destroy(overlap));
          }),
      "");
}

// Buckets are {3, 2, 1, 0} until the first round has ended, and those of the order that it had from
// the next one on: a state of between them has it. If that is the usual order buckets stay, and
// states tell that rounds behind them have looked at it.
TEST(CapiOverlap, StatesBeforeTheObservedOrderIsTaken) {
  constexpr char kJson[] = R"({"first_bucket_bytes": 9000, "bucket_bytes": 16000,
                               "order": "observed", "codec": "onebit"})";
  EXPECT_EQ(run_world(2, {},
                      [&](Member& self) {
                        const std::vector<size_t> counts(4, 2000);
                        Gradients gradients(counts), others(counts);
                        const auto round = [&](sotto_overlap* overlap, Gradients& g, uint32_t k,
                                               bool usual) {
                          std::mt19937 random(10 * k + static_cast<uint32_t>(self.rank));
                          for (std::vector<float>& d : g.data) {
                            for (float& v : d) v = static_cast<float>(random() % 1000) - 500;
                          }
                          sotto_op* op = begin(overlap);
                          if (usual && k == 0) {
                            for (uint64_t t : {3, 2, 1, 0}) mark(overlap, {t});
                          } else {
                            mark(overlap, {1});
                            mark(overlap, {3});
                            mark(overlap, {0, 2});
                          }
                          finish(overlap, op);
                        };
                        for (uint32_t i = 0; i < 6; ++i) {
                          const uint32_t before = i % 3;
                          const bool usual = i >= 3;
                          const std::string from = "from behind round " + std::to_string(before);
                          sotto_overlap* overlap = new_overlap(self, gradients, kJson);
                          sotto_overlap* resumed = new_overlap(self, others, kJson);
                          for (uint32_t k = 0; k < before; ++k) round(overlap, gradients, k, usual);
                          const std::string state = state_of(overlap, SOTTO_STATE_EXACT);
                          OK(sotto_overlap_state_import(resumed, SOTTO_STATE_EXACT, state.data(),
                                                        state.size()));
                          require(state_of(resumed, SOTTO_STATE_EXACT) == state, from + ": states");
                          for (uint32_t k = before; k < 4; ++k) {
                            round(overlap, gradients, k, usual);
                            round(resumed, others, k, usual);
                            require(gradients.data == others.data,
                                    from + ": gradients of round " + std::to_string(k));
                            require(info_of(overlap).layout == (usual || k == 0 ? 0 : 1), "layout");
                          }
                          require(state_of(resumed, SOTTO_STATE_EXACT) ==
                                      state_of(overlap, SOTTO_STATE_EXACT),
                                  from + ": states at the end");
                          OK(sotto_overlap_destroy(overlap));
                          OK(sotto_overlap_destroy(resumed));
                        }
                      }),
            "");
}

TEST(CapiOverlap, NullHandles) {
  sotto_overlap_info info = SOTTO_OVERLAP_INFO_INIT;
  uint64_t length = 0, zero[] = {0};
  sotto_op* op = nullptr;
  sotto_overlap* overlap = nullptr;
  FAILS(sotto_overlap_create(nullptr, "{}", nullptr, 0, &overlap), SOTTO_E_INVALID_ARGUMENT,
        "comm is NULL");
  FAILS(sotto_overlap_begin(nullptr, nullptr, &op), SOTTO_E_INVALID_ARGUMENT, "overlap is NULL");
  FAILS(sotto_overlap_ready(nullptr, zero, nullptr, 1, nullptr), SOTTO_E_INVALID_ARGUMENT,
        "overlap is NULL");
  FAILS(sotto_overlap_unused(nullptr, zero, 1), SOTTO_E_INVALID_ARGUMENT, "overlap is NULL");
  FAILS(sotto_overlap_finish(nullptr), SOTTO_E_INVALID_ARGUMENT, "overlap is NULL");
  FAILS(sotto_overlap_withdraw(nullptr, "x"), SOTTO_E_INVALID_ARGUMENT, "overlap is NULL");
  FAILS(sotto_overlap_get_info(nullptr, &info), SOTTO_E_INVALID_ARGUMENT, "overlap is NULL");
  FAILS(sotto_overlap_report(nullptr, nullptr, nullptr, 0, &length), SOTTO_E_INVALID_ARGUMENT,
        "overlap is NULL");
  OK(sotto_overlap_destroy(nullptr));
}

}  // namespace
}  // namespace sotto::test
