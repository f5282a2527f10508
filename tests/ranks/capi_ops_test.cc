// Operations and their life at the C ABI: waiting, callbacks, groups, splits, order of destruction,
// without a thread of the library's own.
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "tests/ranks/capi_support.h"

namespace sotto::test {
namespace {

struct Setting {
  const char* transport;
  int32_t size;
  bool progress_thread;
};

class CapiOps : public testing::TestWithParam<Setting> {
 protected:
  std::string world(const std::function<void(Member&)>& body, bool destroy = true) {
    return run_world(GetParam().size,
                     {.transport = GetParam().transport,
                      .progress_thread = GetParam().progress_thread,
                      .destroy = destroy},
                     body);
  }
};

float value(int32_t rank, size_t i) {
  return static_cast<float>((rank + 1) * static_cast<int32_t>(i % 11 + 1));
}
float sum_of(int32_t size, size_t i) {
  return static_cast<float>(size * (size + 1) / 2) * static_cast<float>(i % 11 + 1);
}

TEST_P(CapiOps, ManyInFlightCompleteInAnyOrderOfWaiting) {
  EXPECT_EQ(world([](Member& self) {
              constexpr size_t kOps = 6;
              std::vector<std::vector<float>> data;
              std::vector<sotto_op*> ops(kOps);
              for (size_t k = 0; k < kOps; ++k) {
                data.emplace_back();
                for (size_t i = 0; i < 1 + 3000 * k; ++i) data[k].push_back(value(self.rank, i));
              }
              for (size_t k = 0; k < kOps; ++k) {
                const sotto_buffer b = buffer(data[k]);
                const sotto_call call = call_with([&](auto& c) { c.tag = k; });
                OK(sotto_all_reduce(self.comm, &b, &b, 1, &call, &ops[k]));
              }
              for (size_t left = kOps; left > 0; --left) {
                uint64_t index = 99;
                OK(sotto_op_wait_any(ops.data(), kOps, -1, &index));
                OK(sotto_op_test(ops[index]));
                OK(sotto_op_release(ops[index]));
                ops[index] = nullptr;
              }
              for (const auto& d : data) {
                for (size_t i = 0; i < d.size(); ++i) require(d[i] == sum_of(self.size, i), "sum");
              }
            }),
            "");
}

TEST_P(CapiOps, CallbackRunsOnceWithTheStatus) {
  EXPECT_EQ(world([](Member& self) {
              struct Calls {
                std::atomic<int> count{0};
                sotto_status status = SOTTO_IN_PROGRESS;
              } calls;
              const sotto_call call = call_with([&](auto& c) {
                c.user = &calls;
                c.on_done = [](void* user, sotto_status status) {
                  static_cast<Calls*>(user)->status = status;
                  ++static_cast<Calls*>(user)->count;
                };
              });
              sotto_op* op = nullptr;
              OK(sotto_barrier(self.comm, &call, &op));
              OK(sotto_op_release(op));  // the operation goes on, and poll runs the callback
              while (calls.count == 0) OK(sotto_context_poll(self.context, 1000));
              OK(sotto_barrier(self.comm, nullptr, nullptr));
              require(calls.count == 1 && calls.status == SOTTO_OK, "one call with the status");
              sotto_comm* part = nullptr;
              OK(sotto_comm_split(self.comm, 0, self.rank, &part));
              OK(sotto_barrier(part, &call, &op));
              OK(sotto_op_release(op));
              OK(sotto_comm_destroy(part));
              require(calls.count == 2, "a call before the comm is gone");
            }),
            "");
}

// A thread waits for an operation while another one is in the callback of an earlier one.
TEST_P(CapiOps, WaitsReturnBehindTheOperationsOwnCallback) {
  EXPECT_EQ(world([](Member& self) {
              struct Call {
                std::atomic<bool> begun{false}, go{false};
                std::atomic<int> ended{0};
              } slow, quick;
              quick.go = true;
              const auto call_of = [](Call& with) {
                return call_with([&](auto& c) {
                  c.user = &with;
                  c.on_done = [](void* user, sotto_status) {
                    auto& at = *static_cast<Call*>(user);
                    at.begun = true;
                    while (!at.go) std::this_thread::yield();
                    ++at.ended;
                  };
                });
              };
              const sotto_call first = call_of(slow), second = call_of(quick);
              sotto_op* ops[2];
              OK(sotto_barrier(self.comm, &first, &ops[0]));
              OK(sotto_barrier(self.comm, &second, &ops[1]));
              std::thread other([&] { (void)sotto_op_wait(ops[0], -1); });
              while (!slow.begun) std::this_thread::yield();
              // Its own callback is not the other thread's to run.
              OK(sotto_op_wait(ops[1], -1));
              require(quick.ended == 1 && slow.ended == 0, "the callback of the operation alone");
              require(sotto_op_wait(ops[0], 2000) == SOTTO_IN_PROGRESS, "wait inside its callback");
              require(sotto_op_test(ops[0]) == SOTTO_IN_PROGRESS, "test inside its callback");
              require(sotto_op_error(ops[0], nullptr) == SOTTO_IN_PROGRESS, "error");
              uint64_t index = 99;
              require(sotto_op_wait_any(ops, 1, 2000, &index) == SOTTO_IN_PROGRESS && index == 99,
                      "wait_any inside its callback");
              std::thread later([&] {
                std::this_thread::sleep_for(std::chrono::milliseconds(20));
                slow.go = true;
              });
              OK(sotto_op_wait(ops[0], -1));
              require(slow.ended == 1, "the wait ends behind the callback");
              OK(sotto_op_test(ops[0]));
              other.join();
              later.join();
              for (sotto_op* op : ops) OK(sotto_op_release(op));
            }),
            "");
}

TEST_P(CapiOps, TimeOverChangesNothing) {
  EXPECT_EQ(world([](Member& self) {
              if (self.size == 1) return;
              std::vector<float> a(10, 1.0f);
              const sotto_buffer b = buffer(a);
              float go = 1;
              const sotto_buffer signal = buffer(&go, 1);
              if (self.rank == 0) {
                sotto_op* op = nullptr;
                uint64_t index = 99;
                const char* text = nullptr;
                OK(sotto_recv(self.comm, &b, 1, 1, nullptr, &op));
                require(sotto_op_wait(op, 2000) == SOTTO_IN_PROGRESS,
                        "the sender has not been told yet");
                require(sotto_op_wait_any(&op, 1, 0, &index) == SOTTO_IN_PROGRESS && index == 99,
                        "wait_any");
                require(sotto_op_error(op, &text) == SOTTO_IN_PROGRESS && std::string(text).empty(),
                        "no error");
                OK(sotto_send(self.comm, &signal, 1, 1, nullptr, nullptr));
                OK(sotto_op_wait(op, -1));
                require(a[9] == 7.0f, "received");
                OK(sotto_op_release(op));
              } else if (self.rank == 1) {
                OK(sotto_recv(self.comm, &signal, 1, 0, nullptr, nullptr));
                a.assign(10, 7.0f);
                OK(sotto_send(self.comm, &b, 1, 0, nullptr, nullptr));
              }
            }),
            "");
}

TEST_P(CapiOps, GroupedRingOfSendsAndReceives) {
  EXPECT_EQ(world([](Member& self) {
              if (self.size == 1) return;
              const int32_t next = (self.rank + 1) % self.size,
                            before = (self.rank + self.size - 1) % self.size;
              std::vector<float> out(50000, static_cast<float>(self.rank)), in(50000);
              const sotto_buffer from = buffer(out), to = buffer(in);
              sotto_op* op = nullptr;
              OK(sotto_group_begin(self.comm));
              OK(sotto_send(self.comm, &from, 1, next, nullptr, nullptr));
              OK(sotto_recv(self.comm, &to, 1, before, nullptr, nullptr));
              OK(sotto_group_end(self.comm, nullptr, &op));
              OK(sotto_op_wait(op, -1));
              OK(sotto_op_release(op));
              require(in.front() == static_cast<float>(before) && in.back() == in.front(),
                      "from the rank before");
            }),
            "");
}

TEST_P(CapiOps, SplitsAndDestructionInAnyOrder) {
  EXPECT_EQ(world(
                [](Member& self) {
                  sotto_comm *half = nullptr, *none = nullptr;
                  OK(sotto_comm_split(self.comm, self.rank % 2, -self.rank, &half));
                  OK(sotto_comm_split(self.comm, -1, 0, &none));
                  require(none == nullptr, "color -1 gives no comm");
                  int32_t rank = -1, size = -1;
                  OK(sotto_comm_rank(half, &rank));
                  OK(sotto_comm_size(half, &size));
                  const int32_t members = (self.size + 1 - self.rank % 2) / 2;
                  require(size == members && rank == members - 1 - self.rank / 2, "ordered by key");
                  double sum = 1;
                  const sotto_buffer b = buffer(&sum, 1);
                  sotto_op* op = nullptr;
                  OK(sotto_all_reduce(half, &b, &b, 1, nullptr, &op));
                  // Parents first: what depends on them still works.
                  OK(sotto_barrier(self.comm, nullptr, nullptr));
                  OK(sotto_context_destroy(self.context));
                  OK(sotto_comm_destroy(self.comm));
                  OK(sotto_op_wait(op, -1));
                  require(sum == static_cast<double>(members), "sum over the split");
                  OK(sotto_comm_destroy(half));
                  OK(sotto_op_test(op));
                  OK(sotto_op_release(op));
                },
                false),
            "");
}

// Rank 0 waits for the others, and then lets an operation end without waiting.
TEST_P(CapiOps, StatsSayHowLongThreadsStoodStill) {
  std::atomic<bool> seen{false};  // by rank 0, in the figures of an operation under way
  EXPECT_EQ(world([&](Member& self) {
              constexpr auto kLate = std::chrono::milliseconds(60);
              std::vector<float> x(100, 1);
              const sotto_buffer b = buffer(x);
              const auto stats_of = [](sotto_op* op) {
                sotto_op_stats stats = SOTTO_OP_STATS_INIT;
                OK(sotto_op_get_stats(op, &stats));
                OK(sotto_op_release(op));
                return stats;
              };
              sotto_op* op = nullptr;
              if (self.rank != 0) {
                std::this_thread::sleep_for(kLate);
                for (int ms = 0; !seen && ms < 10000; ++ms)
                  std::this_thread::sleep_for(std::chrono::milliseconds(1));
              }
              OK(sotto_all_reduce(self.comm, &b, &b, 1, nullptr, &op));
              if (self.rank == 0 && self.size > 1) {
                require(sotto_op_wait(op, 5000) == SOTTO_IN_PROGRESS, "it is under way");
                sotto_op_stats early = SOTTO_OP_STATS_INIT;
                OK(sotto_op_get_stats(op, &early));
                require(early.exposed_ns >= 4'000'000, std::to_string(early.exposed_ns));
                seen = true;
              }
              OK(sotto_op_wait(op, -1));
              const sotto_op_stats waited = stats_of(op);
              require(waited.exposed_ns <= waited.end_ns - waited.launch_ns, "longer than it");
              if (self.rank == 0 && self.size > 1)
                require(waited.exposed_ns > 30'000'000, std::to_string(waited.exposed_ns));
              OK(sotto_all_reduce(self.comm, &b, &b, 1, nullptr, &op));
              while (sotto_op_test(op) == SOTTO_IN_PROGRESS) std::this_thread::yield();
              OK(sotto_op_wait(op, -1));
              require(stats_of(op).exposed_ns == 0, "nobody stood still");
              OK(sotto_barrier(self.comm, nullptr, nullptr));
              FAILS(sotto_trace_span(self.context, nullptr, 0, 0), SOTTO_E_INVALID_ARGUMENT,
                    "name");
              FAILS(sotto_trace_span(self.context, "a", 5, 4), SOTTO_E_INVALID_ARGUMENT,
                    "end_ns is 4; allowed: from begin_ns, 5");
              OK(sotto_trace_span(self.context, "a", 5, 5));
            }),
            "");
}

TEST_P(CapiOps, ReportsAndCounters) {
  EXPECT_EQ(
      world([](Member& self) {
        std::vector<float> a(5000, 1.0f);
        const sotto_buffer b = buffer(a);
        OK(sotto_all_reduce(self.comm, &b, &b, 1, nullptr, nullptr));
        sotto_comm_counters counters = {};
        counters.struct_size = sizeof counters;
        OK(sotto_comm_get_counters(self.comm, &counters));
        require(counters.payload_bytes_sent == counters.payload_bytes_planned, "sent as planned");
        require(counters.header_bytes_sent == counters.header_bytes_planned, "headers as planned");
        require(counters.ops_completed == 1, "one operation");
        for (const char* kind : {"all", "counters", "routes", "waiting"}) {
          const std::string text = read_all([&](char* buf, uint64_t cap, uint64_t* out_len) {
            return sotto_comm_report(self.comm, kind, buf, cap, out_len);
          });
          require(text.front() == '{' && text.back() == '}', text);
        }
        char small[4] = "abc";
        uint64_t length = 0;
        OK(sotto_comm_report(self.comm, nullptr, small, sizeof small, &length));
        require(length > 3 && std::string(small) == "abc",
                "a buffer that is too small is not written");
      }),
      "");
}

INSTANTIATE_TEST_SUITE_P(Worlds, CapiOps,
                         testing::Values(Setting{"inproc", 1, true}, Setting{"inproc", 2, false},
                                         Setting{"inproc", 4, true}, Setting{"tcp", 2, false},
                                         Setting{"tcp", 3, true}),
                         [](const auto& instance) {
                           const Setting& s = instance.param;
                           return std::string(s.transport) + std::to_string(s.size) +
                                  (s.progress_thread ? "" : "Polled");
                         });

// What the text names is the call of a group that other ranks have not made.
TEST(CapiGroup, ATimeOutNamesTheCallThatWaits) {
  EXPECT_EQ(run_world(2, {.destroy = false},
                      [](Member& self) {
                        std::vector<float> x(8, 1), y(4, 1);
                        const sotto_buffer a = buffer(x), b = buffer(y);
                        const sotto_call soon = call_with([](auto& c) { c.timeout_us = 300'000; });
                        OK(sotto_group_begin(self.comm));
                        OK(sotto_all_reduce(self.comm, &a, &a, 1, nullptr, nullptr));
                        if (self.rank == 0) {
                          OK(sotto_all_reduce(self.comm, &b, &b, 1, nullptr, nullptr));
                          FAILS(sotto_group_end(self.comm, &soon, nullptr), SOTTO_E_TIMEOUT,
                                "operation 1 all_reduce", "4 elements", "waiting for rank 1");
                        } else {
                          OK(sotto_group_end(self.comm, nullptr, nullptr));
                        }
                      }),
            "");
}

// One more spoils the group, as other errors do.
TEST(CapiGroup, HasALimit) {
  constexpr size_t kMost = 65'535;
  EXPECT_EQ(run_world(1, {},
                      [](Member& self) {
                        std::vector<float> x{1, 2, 3}, y(3);
                        const sotto_buffer in = buffer(x), out = buffer(y);
                        const auto begin = [&](size_t barriers) {
                          OK(sotto_group_begin(self.comm));
                          for (size_t i = 0; i < barriers; ++i)
                            OK(sotto_barrier(self.comm, nullptr, nullptr));
                        };
                        const auto reduce = [&] {
                          return sotto_all_reduce(self.comm, &in, &out, 1, nullptr, nullptr);
                        };
                        begin(kMost - 1);
                        OK(reduce());
                        OK(sotto_group_end(self.comm, nullptr, nullptr));
                        require(y == x, "the last call of a group");
                        y.assign(3, 0);
                        const char* const limit = "a group has at most 65535 calls";
                        begin(kMost);
                        FAILS(reduce(), SOTTO_E_INVALID_ARGUMENT, limit);
                        FAILS(sotto_group_end(self.comm, nullptr, nullptr),
                              SOTTO_E_INVALID_ARGUMENT, "sotto_all_reduce", limit);
                        OK(reduce());
                        require(y == x, "behind the refused group");
                      }),
            "");
}

// An all-gather of the caller's own in place of the library's rendezvous.
struct Exchange {
  RankBarrier* barrier;
  std::vector<std::string>* blobs;
  int rank;
};

TEST(CapiBootstrap, CallersAllGather) {
  constexpr int kSize = 3;
  RankBarrier barrier(kSize);
  std::vector<std::string> blobs(kSize);
  EXPECT_EQ(run_ranks(kSize,
                      [&](int rank) {
                        Exchange exchange{&barrier, &blobs, rank};
                        sotto_context* context = new_context();
                        sotto_comm* comm = nullptr;
                        sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
                        config.rank = rank;
                        config.size = kSize;
                        config.transport = "tcp";
                        config.timeout_us = 20'000'000;
                        config.user = &exchange;
                        config.all_gather = [](void* user, const void* in, uint64_t bytes,
                                               void* out) -> int32_t {
                          const auto& e = *static_cast<Exchange*>(user);
                          (*e.blobs)[static_cast<size_t>(e.rank)].assign(
                              static_cast<const char*>(in), bytes);
                          e.barrier->wait();
                          for (size_t r = 0; r < e.blobs->size(); ++r) {
                            std::memcpy(static_cast<char*>(out) + r * bytes, (*e.blobs)[r].data(),
                                        bytes);
                          }
                          e.barrier->wait();
                          return 0;
                        };
                        OK(sotto_comm_create(context, &config, &comm));
                        int32_t sum = rank;
                        const sotto_buffer b = buffer(&sum, 1);
                        OK(sotto_all_reduce(comm, &b, &b, 1, nullptr, nullptr));
                        require(sum == 3, "sum of ranks");
                        OK(sotto_comm_destroy(comm));
                        OK(sotto_context_destroy(context));
                      }),
            "");
}

// Ranks that name no transport meet by TCP, and leave it if all of them are in one process. One
// that names tcp, or whose rate is limited, keeps all of them there; so would one in another
// process. The report names what carries a rank's messages, "auto" if several do.
TEST(CapiBootstrap, AutoMovesInsideOneProcess) {
  struct Case {
    const char* transport_of_rank_1;
    const char* rate_limit;
    const char *want, *want_on_rank_1;
  };
  for (const Case& c : {Case{"auto", "0", "inproc", "inproc"}, Case{"tcp", "0", "auto", "tcp"},
                        Case{"auto", "10000", "tcp", "tcp"}}) {
    setenv("SOTTO_RATE_LIMIT_MBIT", c.rate_limit, 1);
    EXPECT_EQ(run_world(3, {.transport = "auto", .transport_of_rank_1 = c.transport_of_rank_1},
                        [&](Member& self) {
                          std::vector<float> a(5000, 1.0f);
                          const sotto_buffer b = buffer(a);
                          OK(sotto_all_reduce(self.comm, &b, &b, 1, nullptr, nullptr));
                          require(a[4999] == 3.0f, "sum");
                          const std::string report =
                              read_all([&](char* buf, uint64_t cap, uint64_t* out_len) {
                                return sotto_comm_report(self.comm, nullptr, buf, cap, out_len);
                              });
                          const std::string want = fmt::format(
                              "\"transport\":\"{}\"", self.rank == 1 ? c.want_on_rank_1 : c.want);
                          require(report.find(want) != std::string::npos, report);
                        }),
              "")
        << c.want;
    unsetenv("SOTTO_RATE_LIMIT_MBIT");
  }
}

TEST(CapiBootstrap, CallersAllGatherThatFails) {
  sotto_context* context = new_context();
  sotto_comm* comm = nullptr;
  sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
  config.size = 2;
  config.transport = "tcp";
  config.timeout_us = 5'000'000;
  config.all_gather = [](void*, const void*, uint64_t, void*) -> int32_t { return 42; };
  FAILS(sotto_comm_create(context, &config, &comm), SOTTO_E_TRANSPORT, "all_gather", "42");
  OK(sotto_context_destroy(context));
}

}  // namespace
}  // namespace sotto::test
