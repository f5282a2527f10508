// Bad input at the C ABI: the code, what the text names, and that nothing is harmed by it.
#include <sys/wait.h>
#include <unistd.h>

#include <barrier>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "tests/ranks/capi_support.h"
#include "tests/support/reserved_port.h"

namespace sotto::test {
namespace {

const WorldOptions kDefault;

TEST(CapiErrors, NullArguments) {
  sotto_context* context = new_context();
  sotto_comm* comm = nullptr;
  uint64_t length = 0;
  FAILS(sotto_context_create(nullptr, nullptr), SOTTO_E_INVALID_ARGUMENT, "out_context is NULL");
  FAILS(sotto_context_poll(nullptr, 0), SOTTO_E_INVALID_ARGUMENT, "context is NULL");
  FAILS(sotto_context_report(context, "half", nullptr, 0, &length), SOTTO_E_INVALID_ARGUMENT,
        "kind is \"half\"");
  FAILS(sotto_context_report(context, nullptr, nullptr, 0, nullptr), SOTTO_E_INVALID_ARGUMENT,
        "out_len is NULL");
  FAILS(sotto_unique_id_create(context, nullptr), SOTTO_E_INVALID_ARGUMENT, "out_id is NULL");
  FAILS(sotto_comm_create(nullptr, nullptr, &comm), SOTTO_E_INVALID_ARGUMENT, "context is NULL");
  FAILS(sotto_comm_rank(nullptr, nullptr), SOTTO_E_INVALID_ARGUMENT, "comm is NULL");
  FAILS(sotto_barrier(nullptr, nullptr, nullptr), SOTTO_E_INVALID_ARGUMENT, "comm is NULL");
  FAILS(sotto_op_wait(nullptr, -1), SOTTO_E_INVALID_ARGUMENT, "operation is NULL");
  FAILS(sotto_config_report(nullptr, 1, 1, nullptr, 0, &length), SOTTO_E_INVALID_ARGUMENT,
        "json is NULL");
  FAILS(sotto_optim_step(nullptr, nullptr, nullptr), SOTTO_E_INVALID_ARGUMENT, "optim is NULL");
  FAILS(sotto_codec_create(nullptr, "{}", nullptr, 1, nullptr), SOTTO_E_INVALID_ARGUMENT,
        "comm is NULL");
  OK(sotto_context_destroy(nullptr));
  OK(sotto_comm_destroy(nullptr));
  OK(sotto_op_release(nullptr));
  OK(sotto_codec_destroy(nullptr));
  OK(sotto_optim_destroy(nullptr));
  OK(sotto_context_destroy(context));
}

TEST(CapiErrors, TextIsClearedByTheNextCallThatSucceeds) {
  sotto_context* context = new_context();
  EXPECT_NE(sotto_unique_id_create(context, nullptr), SOTTO_OK);
  EXPECT_STRNE(sotto_last_error(), "");
  OK(sotto_context_poll(context, 0));
  EXPECT_STREQ(sotto_last_error(), "");
  OK(sotto_context_destroy(context));
}

TEST(CapiErrors, ContextConfig) {
  sotto_context* context = nullptr;
  sotto_context_config config = SOTTO_CONTEXT_CONFIG_INIT;
  config.struct_size = 8;
  FAILS(sotto_context_create(&config, &context), SOTTO_E_INVALID_ARGUMENT,
        "config.struct_size is 8", "allowed 16 to 4096");
  config = SOTTO_CONTEXT_CONFIG_INIT;
  config.no_progress_thread = 2;
  FAILS(sotto_context_create(&config, &context), SOTTO_E_INVALID_ARGUMENT,
        "no_progress_thread is 2", "0 or 1");
  config = SOTTO_CONTEXT_CONFIG_INIT;
  config.cpu_threads = 5000;
  FAILS(sotto_context_create(&config, &context), SOTTO_E_INVALID_ARGUMENT, "cpu_threads is 5000",
        "0 to 4096");
  setenv("SOTTO_TIMEOUT_US", "soon", 1);
  FAILS(sotto_context_create(nullptr, &context), SOTTO_E_INVALID_ARGUMENT, "SOTTO_TIMEOUT_US",
        "soon");
  unsetenv("SOTTO_TIMEOUT_US");
  EXPECT_EQ(context, nullptr);
}

TEST(CapiErrors, CommConfig) {
  sotto_context* context = new_context();
  sotto_comm* comm = nullptr;
  const auto with = [&](const std::function<void(sotto_comm_config&)>& change) {
    sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
    config.size = 1;
    change(config);
    return sotto_comm_create(context, &config, &comm);
  };
  FAILS(with([](auto& c) { c.struct_size = 40; }), SOTTO_E_INVALID_ARGUMENT,
        "config.struct_size is 40");
  FAILS(with([](auto& c) { c.reserved = 1; }), SOTTO_E_UNSUPPORTED, "reserved");
  FAILS(with([](auto& c) { c.size = -2; }), SOTTO_E_INVALID_ARGUMENT, "size is -2");
  FAILS(with([](auto& c) { c.rank = 1; }), SOTTO_E_INVALID_ARGUMENT, "rank is 1", "0 to 0");
  FAILS(with([](auto& c) { c.size = 0, c.rank = 3; }), SOTTO_E_INVALID_ARGUMENT, "rank is 3",
        "size is 0");
  FAILS(with([](auto& c) { c.transport = "pigeon"; }), SOTTO_E_UNSUPPORTED, "pigeon",
        "inproc, shm, tcp");
  FAILS(with([](auto& c) { c.size = 2; }), SOTTO_E_INVALID_ARGUMENT, "unique id");
  sotto_unique_id noise;
  std::memset(&noise, 0x5a, sizeof noise);
  FAILS(with([&](auto& c) { c.id = &noise; }), SOTTO_E_INVALID_ARGUMENT, "unique id");
  EXPECT_EQ(comm, nullptr);
  OK(with([](auto&) {}));
  OK(sotto_comm_destroy(comm));
  OK(sotto_context_destroy(context));
}

TEST(CapiErrors, RendezvousThatNobodyAnswers) {
  const ReservedPort port;
  const std::string place = "127.0.0.1:" + std::to_string(port.number());
  setenv("SOTTO_RENDEZVOUS", ("tcp://" + place).c_str(), 1);
  sotto_context* context = new_context();
  unsetenv("SOTTO_RENDEZVOUS");
  sotto_comm* comm = nullptr;
  sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
  config.rank = 1;
  config.size = 2;
  config.timeout_us = 300'000;
  const sotto_status status = sotto_comm_create(context, &config, &comm);
  const std::string text = sotto_last_error();
  EXPECT_TRUE(status == SOTTO_E_TRANSPORT || status == SOTTO_E_TIMEOUT)
      << sotto_status_name(status);
  EXPECT_NE(text.find(place), std::string::npos) << text;
  OK(sotto_context_destroy(context));
}

// Where the ranks of a launcher meet is not for a group of one, of which each may have several.
TEST(CapiErrors, AGroupOfOneMeetsNobody) {
  const ReservedPort port;
  setenv("SOTTO_RENDEZVOUS", ("tcp://127.0.0.1:" + std::to_string(port.number())).c_str(), 1);
  sotto_context* context = new_context();
  unsetenv("SOTTO_RENDEZVOUS");
  sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
  config.size = 1;
  sotto_comm *first = nullptr, *second = nullptr;
  OK(sotto_comm_create(context, &config, &first));
  OK(sotto_comm_create(context, &config, &second));
  OK(sotto_barrier(first, nullptr, nullptr));
  OK(sotto_barrier(second, nullptr, nullptr));
  OK(sotto_comm_destroy(first));
  OK(sotto_comm_destroy(second));
  OK(sotto_context_destroy(context));
}

class CapiRendezvous : public testing::TestWithParam<const char*> {
 protected:
  // Ranks that state `numbers` of `sizes`; returns what every one of them was told.
  std::vector<std::string> meet(std::vector<int32_t> numbers, std::vector<int32_t> sizes,
                                int64_t timeout_us) {
    setenv("SOTTO_TRANSPORT", GetParam(), 1);
    std::vector<sotto_context*> contexts;
    for (size_t i = 0; i < numbers.size(); ++i) contexts.push_back(new_context());
    sotto_unique_id id;
    OK(sotto_unique_id_create(contexts[0], &id));
    unsetenv("SOTTO_TRANSPORT");
    std::vector<std::string> told(numbers.size());
    const std::string failure = run_ranks(static_cast<int>(numbers.size()), [&](int i) {
      sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
      config.rank = numbers[static_cast<size_t>(i)];
      config.size = sizes[static_cast<size_t>(i)];
      config.id = &id;
      config.timeout_us = timeout_us;
      sotto_comm* comm = nullptr;
      const sotto_status status =
          sotto_comm_create(contexts[static_cast<size_t>(i)], &config, &comm);
      told[static_cast<size_t>(i)] =
          std::string(sotto_status_name(status)) + " " + sotto_last_error();
      sotto_comm_destroy(comm);
    });
    EXPECT_EQ(failure, "");
    for (sotto_context* context : contexts) OK(sotto_context_destroy(context));
    return told;
  }
  static bool tcp() { return std::string(GetParam()) == "tcp"; }
  // What is wrong, or, over TCP, where only the wrong connection is refused, that no other rank
  // came.
  static bool told(const std::string& text) {
    return text.rfind("INVALID_ARGUMENT", 0) == 0 ||
           (tcp() && text.rfind("TIMEOUT", 0) == 0 &&
            text.find("did not come (") != std::string::npos &&
            text.find("turned away: ") != std::string::npos);
  }
  static constexpr int64_t kWaits = 10'000'000;
};

TEST_P(CapiRendezvous, TwoRanksWithOneNumber) {
  int refused = 0;
  for (const std::string& text : meet({0, 1, 1}, {3, 3, 3}, kWaits)) {
    refused += text.rfind("INVALID_ARGUMENT", 0) == 0;
    EXPECT_TRUE(told(text)) << text;
    EXPECT_NE(text.find("rank 1"), std::string::npos) << text;
    EXPECT_NE(text.find(tcp() ? "already taken by pid" : "two callers"), std::string::npos) << text;
  }
  EXPECT_EQ(refused, tcp() ? 1 : 3);
}

TEST_P(CapiRendezvous, SizesThatDiffer) {
  const std::vector<std::string> texts = meet({0, 1}, {2, 3}, kWaits);
  EXPECT_EQ(texts[1].rfind("INVALID_ARGUMENT", 0), 0u) << texts[1];
  for (const std::string& text : texts) {
    EXPECT_TRUE(told(text)) << text;
    EXPECT_NE(text.find('2'), std::string::npos) << text;
    EXPECT_NE(text.find('3'), std::string::npos) << text;
  }
}

TEST_P(CapiRendezvous, MissingRankIsNamed) {
  for (const std::string& text : meet({0, 2}, {3, 3}, kWaits)) {
    EXPECT_EQ(text.rfind("TIMEOUT", 0), 0u) << text;
    EXPECT_NE(text.find('1'), std::string::npos) << text;
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, CapiRendezvous, testing::Values("inproc", "tcp"),
                         [](const auto& instance) { return std::string(instance.param); });

TEST(CapiErrors, Buffers) {
  EXPECT_EQ(
      run_world(
          1, kDefault,
          [](Member& self) {
            std::vector<float> a(8), b(8);
            const auto reduce =
                [&](const std::function<void(sotto_buffer&, sotto_buffer&)>& change) {
                  sotto_buffer in = buffer(a), out = buffer(b);
                  change(in, out);
                  return sotto_all_reduce(self.comm, &in, &out, 1, nullptr, nullptr);
                };
            FAILS(reduce([](auto& in, auto&) { in.dtype = 0x12345678; }), SOTTO_E_UNSUPPORTED,
                  "in[0].dtype is 0x12345678", "fp32");
            FAILS(reduce([](auto&, auto& out) { out.device_type = 7; }), SOTTO_E_UNSUPPORTED,
                  "out[0].device_type is 7");
            FAILS(reduce([](auto&, auto& out) { out.device_type = SOTTO_DEVICE_CUDA; }),
                  SOTTO_E_INVALID_ARGUMENT, "in[0] is on cpu", "out[0] is on cuda:0");
            const bool cuda = std::string(sotto_build_info()).find("\"cuda\"") != std::string::npos;
            FAILS(reduce([](auto& in, auto& out) {
                    in.device_type = out.device_type = SOTTO_DEVICE_CUDA;
                    in.device_id = out.device_id = 1000;
                  }),
                  cuda ? SOTTO_E_DEVICE : SOTTO_E_UNSUPPORTED, "in[0]", "cuda:1000");
            FAILS(reduce([](auto&, auto& out) {
                    out.device_type = SOTTO_DEVICE_CUDA;
                    out.device_id = -1;
                  }),
                  SOTTO_E_INVALID_ARGUMENT, "out[0].device_id is -1");
            FAILS(reduce([](auto&, auto& out) { out.device_id = 1; }), SOTTO_E_INVALID_ARGUMENT,
                  "out[0].device_id is 1");
            FAILS(reduce([](auto& in, auto&) { in.flags = 4; }), SOTTO_E_UNSUPPORTED,
                  "in[0].flags is 0x4");
            FAILS(reduce([](auto& in, auto&) { in.data = nullptr; }), SOTTO_E_INVALID_ARGUMENT,
                  "in[0].data is NULL", "count is 8");
            FAILS(reduce([](auto& in, auto&) { in.data = static_cast<char*>(in.data) + 1; }),
                  SOTTO_E_INVALID_ARGUMENT, "in[0].data", "not aligned to 4");
            FAILS(reduce([](auto& in, auto& out) { in.count = out.count = uint64_t{1} << 60; }),
                  SOTTO_E_INVALID_ARGUMENT, "in[0].count");
            FAILS(reduce([](auto&, auto& out) { out.count = 7; }), SOTTO_E_INVALID_ARGUMENT,
                  "in[0].count is 8", "out[0].count is 7");
            FAILS(reduce([](auto&, auto& out) { out.dtype = SOTTO_INT32; }),
                  SOTTO_E_INVALID_ARGUMENT, "in[0] is fp32", "out[0] is int32");
            sotto_buffer one = buffer(a);
            FAILS(sotto_all_reduce(self.comm, nullptr, &one, 1, nullptr, nullptr),
                  SOTTO_E_INVALID_ARGUMENT, "in is NULL but n is 1");
            FAILS(sotto_all_reduce(self.comm, &one, &one, uint64_t{1} << 40, nullptr, nullptr),
                  SOTTO_E_INVALID_ARGUMENT, "n is 1099511627776");
            OK(reduce([](auto&, auto&) {}));  // nothing of the above has harmed the comm
            OK(reduce([](auto& in, auto& out) {
              in.device_type = 0;
              out = in;
            }));
          }),
      "");
}

TEST(CapiErrors, Overlap) {
  EXPECT_EQ(
      run_world(
          2, kDefault,
          [](Member& self) {
            std::vector<float> m(64);
            const auto at = [&](uint64_t begin, uint64_t count) {
              return buffer(m.data() + begin, count);
            };
            const auto reduce = [&](std::vector<sotto_buffer> in, std::vector<sotto_buffer> out) {
              return sotto_all_reduce(self.comm, in.data(), out.data(), in.size(), nullptr,
                                      nullptr);
            };
            FAILS(reduce({at(0, 8)}, {at(4, 8)}), SOTTO_E_INVALID_ARGUMENT, "in[0]", "out[0]",
                  "overlap");
            FAILS(reduce({at(0, 8), at(8, 8)}, {at(16, 8), at(20, 8)}), SOTTO_E_INVALID_ARGUMENT,
                  "out[0]", "out[1]");
            FAILS(reduce({at(0, 8), at(8, 8)}, {at(8, 8), at(0, 8)}), SOTTO_E_INVALID_ARGUMENT,
                  "overlap");
            OK(reduce({at(0, 8), at(0, 8)}, {at(16, 8), at(24, 8)}));  // reading twice is fine
            OK(reduce({at(0, 8), at(8, 8)}, {at(0, 8), at(8, 8)}));    // in place
            OK(reduce({at(0, 0)}, {at(0, 0)}));

            const uint64_t mine = 8 * static_cast<uint64_t>(self.rank), other = 8 - mine;
            sotto_buffer part = at(mine, 8), wrong = at(other, 8), whole = at(0, 16);
            OK(sotto_all_gather(self.comm, &part, &whole, 1, nullptr, nullptr));
            FAILS(sotto_all_gather(self.comm, &wrong, &whole, 1, nullptr, nullptr),
                  SOTTO_E_INVALID_ARGUMENT, "overlap");
            OK(sotto_reduce_scatter(self.comm, &whole, &part, 1, nullptr, nullptr));
            FAILS(sotto_reduce_scatter(self.comm, &whole, &wrong, 1, nullptr, nullptr),
                  SOTTO_E_INVALID_ARGUMENT, "overlap");
            sotto_buffer three = at(0, 24);
            FAILS(sotto_all_gather(self.comm, &part, &three, 1, nullptr, nullptr),
                  SOTTO_E_INVALID_ARGUMENT, "out[0].count is 24", "out = 2 * in");
          }),
      "");
}

TEST(CapiErrors, CallOptions) {
  EXPECT_EQ(run_world(1, kDefault,
                      [](Member& self) {
                        std::vector<int32_t> a(4);
                        sotto_buffer b = buffer(a);
                        const auto with = [&](const std::function<void(sotto_call&)>& change) {
                          const sotto_call call = call_with(change);
                          return sotto_all_reduce(self.comm, &b, &b, 1, &call, nullptr);
                        };
                        FAILS(with([](auto& c) { c.struct_size = 60; }), SOTTO_E_INVALID_ARGUMENT,
                              "call.struct_size is 60");
                        FAILS(with([](auto& c) { c.flags = 8; }), SOTTO_E_UNSUPPORTED,
                              "call.flags is 0x8");
                        FAILS(with([](auto& c) { c.reduce = 9; }), SOTTO_E_INVALID_ARGUMENT,
                              "call.reduce is 9");
                        OK(with([](auto& c) { c.reduce = SOTTO_REDUCE_BIT_OR; }));
                        std::vector<float> floats(4);
                        const sotto_buffer f = buffer(floats);
                        const sotto_call bit_or =
                            call_with([](auto& c) { c.reduce = SOTTO_REDUCE_BIT_OR; });
                        FAILS(sotto_all_reduce(self.comm, &f, &f, 1, &bit_or, nullptr),
                              SOTTO_E_INVALID_ARGUMENT, "SOTTO_REDUCE_BIT_OR", "in[0] is fp32");
                        const sotto_call max =
                            call_with([](auto& c) { c.reduce = SOTTO_REDUCE_MAX; });
                        FAILS(sotto_barrier(self.comm, &max, nullptr), SOTTO_E_INVALID_ARGUMENT,
                              "call.reduce is 4");
                        FAILS(sotto_broadcast(self.comm, &b, &b, 1, 1, nullptr, nullptr),
                              SOTTO_E_INVALID_ARGUMENT, "root is 1", "0 to 0");
                        FAILS(sotto_send(self.comm, &b, 1, 5, nullptr, nullptr),
                              SOTTO_E_INVALID_ARGUMENT, "peer is 5");
                        FAILS(sotto_recv(self.comm, &b, 1, 0, nullptr, nullptr),
                              SOTTO_E_INVALID_ARGUMENT, "this rank itself");
                        sotto_comm* half = nullptr;
                        FAILS(sotto_comm_split(self.comm, -2, 0, &half), SOTTO_E_INVALID_ARGUMENT,
                              "color is -2");
                        OK(with([](auto&) {}));
                      }),
            "");
}

TEST(CapiErrors, Groups) {
  EXPECT_EQ(run_world(2, kDefault,
                      [](Member& self) {
                        std::vector<float> a(4), b(4);
                        sotto_buffer in = buffer(a), out = buffer(b);
                        sotto_op* op = nullptr;
                        FAILS(sotto_group_end(self.comm, nullptr, nullptr), SOTTO_E_INVALID_STATE,
                              "no open group");
                        OK(sotto_group_begin(self.comm));
                        FAILS(sotto_group_begin(self.comm), SOTTO_E_INVALID_STATE, "open group");
                        sotto_comm* half = nullptr;
                        FAILS(sotto_comm_split(self.comm, 0, 0, &half), SOTTO_E_INVALID_STATE,
                              "open group");
                        FAILS(sotto_send(self.comm, &in, 1, 1 - self.rank, nullptr, &op),
                              SOTTO_E_INVALID_ARGUMENT, "out_op");
                        OK(sotto_recv(self.comm, &out, 1, 1 - self.rank, nullptr, nullptr));
                        // The error of a collected call comes back, and nothing has been started.
                        FAILS(sotto_group_end(self.comm, nullptr, &op), SOTTO_E_INVALID_ARGUMENT,
                              "sotto_send", "out_op");

                        const sotto_call urgent = call_with([](auto& c) { c.priority = 1; });
                        OK(sotto_group_begin(self.comm));
                        FAILS(sotto_barrier(self.comm, &urgent, nullptr), SOTTO_E_INVALID_ARGUMENT,
                              "call.priority");
                        FAILS(sotto_group_end(self.comm, nullptr, nullptr),
                              SOTTO_E_INVALID_ARGUMENT, "call.priority");

                        int stream = 0;
                        const sotto_call behind = call_with([&](auto& c) { c.stream = &stream; });
                        OK(sotto_group_begin(self.comm));
                        FAILS(sotto_barrier(self.comm, &behind, nullptr), SOTTO_E_INVALID_ARGUMENT,
                              "call.stream");
                        FAILS(sotto_group_end(self.comm, nullptr, nullptr),
                              SOTTO_E_INVALID_ARGUMENT, "call.stream");

                        OK(sotto_group_begin(self.comm));
                        OK(sotto_send(self.comm, &in, 1, 1 - self.rank, nullptr, nullptr));
                        OK(sotto_recv(self.comm, &in, 1, 1 - self.rank, nullptr,
                                      nullptr));  // into what is being sent
                        FAILS(sotto_group_end(self.comm, nullptr, nullptr),
                              SOTTO_E_INVALID_ARGUMENT, "overlap");
                        OK(sotto_barrier(self.comm, nullptr, nullptr));
                      }),
            "");
}

TEST(CapiErrors, OperationAfterRelease) {
  EXPECT_EQ(run_world(1, kDefault,
                      [](Member& self) {
                        sotto_op* op = nullptr;
                        OK(sotto_barrier(self.comm, nullptr, &op));
                        OK(sotto_op_wait(op, -1));
                        OK(sotto_op_release(op));
                        const char* text = nullptr;
                        uint64_t index = 0;
                        sotto_op_stats stats = {};
                        stats.struct_size = sizeof stats;
                        const char* kSays = "has been released before";
                        FAILS(sotto_op_release(op), SOTTO_E_INVALID_ARGUMENT, kSays);
                        FAILS(sotto_op_wait(op, -1), SOTTO_E_INVALID_ARGUMENT, kSays);
                        FAILS(sotto_op_test(op), SOTTO_E_INVALID_ARGUMENT, kSays);
                        FAILS(sotto_op_error(op, &text), SOTTO_E_INVALID_ARGUMENT, kSays);
                        FAILS(sotto_op_get_stats(op, &stats), SOTTO_E_INVALID_ARGUMENT, kSays);
                        FAILS(sotto_op_stream_wait(op, nullptr), SOTTO_E_INVALID_ARGUMENT, kSays);
                        FAILS(sotto_op_wait_any(&op, 1, -1, &index), SOTTO_E_INVALID_ARGUMENT,
                              kSays, "ops[0]");
                        sotto_op* none = nullptr;
                        FAILS(sotto_op_wait_any(&none, 1, -1, &index), SOTTO_E_INVALID_ARGUMENT,
                              "1 operation given, and each is NULL");
                      }),
            "");
}

TEST(CapiErrors, CountMismatchIsProtocolOnEveryRank) {
  for (const char* transport : {"inproc", "tcp"}) {
    const WorldOptions options{.transport = transport};
    EXPECT_EQ(run_world(2, options,
                        [](Member& self) {
                          std::vector<float> a(100 + static_cast<size_t>(self.rank));
                          sotto_buffer b = buffer(a);
                          FAILS(sotto_all_reduce(self.comm, &b, &b, 1, nullptr, nullptr),
                                SOTTO_E_PROTOCOL, "100", "101");
                          const char* cause = nullptr;
                          FAILS(sotto_comm_error(self.comm, &cause), SOTTO_E_PROTOCOL, "100",
                                "101");
                          // A failed comm stays failed and keeps its first cause.
                          OK(sotto_comm_abort(self.comm, "later"));
                          FAILS(sotto_barrier(self.comm, nullptr, nullptr), SOTTO_E_PROTOCOL, "100",
                                "101");
                        }),
              "")
        << transport;
  }
}

TEST(CapiErrors, RanksThatFailTogetherReportOneCause) {
  for (const char* transport : {"inproc", "tcp"}) {
    std::barrier together(4);
    std::mutex mutex;
    std::set<std::string> causes;
    const WorldOptions options{.transport = transport};
    EXPECT_EQ(run_world(4, options,
                        [&](Member& self) {
                          OK(sotto_barrier(self.comm, nullptr, nullptr));
                          together.arrive_and_wait();
                          if (self.rank > 0)
                            OK(sotto_comm_abort(self.comm, std::to_string(self.rank).c_str()));
                          FAILS(sotto_barrier(self.comm, nullptr, nullptr), SOTTO_E_ABORTED,
                                "aborted the group");
                          const char* cause = nullptr;
                          FAILS(sotto_comm_error(self.comm, &cause), SOTTO_E_ABORTED, "aborted");
                          {
                            std::lock_guard lock(mutex);
                            causes.insert(cause);
                          }
                          together.arrive_and_wait();
                        }),
              "")
        << transport;
    EXPECT_EQ(causes.size(), 1u) << transport << ": " << testing::PrintToString(causes);
  }
}

TEST(CapiErrors, DestroyWithOperationsInFlight) {
  // Rank 1 never calls the barrier: rank 0's operation is failed by the deadline of destroy, and no
  // handle is harmed.
  const WorldOptions options{.timeout_us = 10'000'000, .destroy = false};
  EXPECT_EQ(run_world(2, options,
                      [](Member& self) {
                        if (self.rank == 0) {
                          sotto_op* op = nullptr;
                          const sotto_call forever = call_with([](auto& c) { c.timeout_us = -1; });
                          OK(sotto_barrier(self.comm, &forever, &op));
                          OK(sotto_context_destroy(self.context));  // the comm keeps it working
                          FAILS(sotto_comm_destroy(self.comm), SOTTO_E_TIMEOUT, "in flight");
                          FAILS(sotto_op_wait(op, -1), SOTTO_E_TIMEOUT, "in flight");
                          OK(sotto_op_release(op));
                        } else {
                          const char* cause = nullptr;
                          while (sotto_comm_error(self.comm, &cause) == SOTTO_OK)
                            OK(sotto_context_poll(self.context, 1000));
                          require(std::string(cause).find("rank 0") != std::string::npos, cause);
                          sotto_comm_destroy(self.comm);
                          OK(sotto_context_destroy(self.context));
                        }
                      }),
            "");
}

struct Reentry {
  sotto_comm* comm;
  sotto_op** op;
  std::string problem = "not called";
};

TEST(CapiErrors, CallsFromACallback) {
  EXPECT_EQ(run_world(1, kDefault,
                      [](Member& self) {
                        sotto_op* op = nullptr;
                        Reentry reentry{self.comm, &op};
                        const sotto_call call = call_with([&](auto& c) {
                          c.user = &reentry;
                          c.on_done = [](void* user, sotto_status status) {
                            auto& r = *static_cast<Reentry*>(user);
                            r.problem = "";
                            if (status != SOTTO_OK) r.problem += "status ";
                            if (sotto_op_test(*r.op) != SOTTO_OK) r.problem += "test ";
                            if (sotto_op_error(*r.op, nullptr) != SOTTO_OK) r.problem += "error ";
                            if (sotto_op_wait(*r.op, -1) != SOTTO_E_INVALID_STATE)
                              r.problem += "wait ";
                            if (sotto_barrier(r.comm, nullptr, nullptr) != SOTTO_E_INVALID_STATE)
                              r.problem += "barrier ";
                            if (sotto_comm_destroy(r.comm) != SOTTO_E_INVALID_STATE)
                              r.problem += "destroy ";
                          };
                        });
                        OK(sotto_barrier(self.comm, &call, &op));
                        OK(sotto_op_wait(op, -1));
                        OK(sotto_op_test(op));
                        require(reentry.problem.empty(), "in the callback: " + reentry.problem);
                        OK(sotto_op_release(op));
                      }),
            "");
}

TEST(CapiErrors, ForkedChildIsRefused) {
  sotto_context* context = new_context(false);
  sotto_comm* comm = nullptr;
  sotto_op* op = nullptr;
  sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
  config.size = 1;
  OK(sotto_comm_create(context, &config, &comm));
  OK(sotto_barrier(comm, nullptr, &op));
  OK(sotto_op_wait(op, -1));
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    sotto_context* another = nullptr;
    int32_t rank = 0;
    const bool refused = sotto_context_poll(context, 0) == SOTTO_E_INVALID_STATE &&
                         sotto_comm_rank(comm, &rank) == SOTTO_E_INVALID_STATE &&
                         sotto_barrier(comm, nullptr, nullptr) == SOTTO_E_INVALID_STATE &&
                         sotto_op_test(op) == SOTTO_E_INVALID_STATE &&
                         sotto_op_release(op) == SOTTO_E_INVALID_STATE &&
                         sotto_comm_destroy(comm) == SOTTO_E_INVALID_STATE &&
                         sotto_context_destroy(context) == SOTTO_E_INVALID_STATE &&
                         sotto_context_create(nullptr, &another) == SOTTO_E_INVALID_STATE &&
                         std::strstr(sotto_last_error(), "fork") != nullptr;
    _exit(refused ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  OK(sotto_barrier(comm, nullptr, nullptr));  // the parent goes on
  OK(sotto_op_release(op));
  OK(sotto_comm_destroy(comm));
  OK(sotto_context_destroy(context));
}

TEST(CapiErrors, LogLevel) {
  std::vector<std::string> lines;
  const auto sink = [](void* user, int32_t, const char* message) {
    sotto_context* none = nullptr;
    FAILS(sotto_context_create(nullptr, &none), SOTTO_E_INVALID_STATE, "inside a callback");
    static_cast<std::vector<std::string>*>(user)->push_back(message);
  };
  FAILS(sotto_set_log(sink, &lines, -1), SOTTO_E_INVALID_ARGUMENT, "level is -1");
  OK(sotto_set_log(sink, &lines, 2));
  setenv("SOTTO_TIMEOUT_UZ", "1", 1);  // a misspelt variable warns
  setenv("SOTTO_LOG", "error", 1);     // and a level given to sotto_set_log wins
  OK(sotto_context_destroy(new_context()));
  EXPECT_STREQ(sotto_last_error(), "");
  OK(sotto_set_log(nullptr, nullptr, 0));
  unsetenv("SOTTO_LOG");
  unsetenv("SOTTO_TIMEOUT_UZ");
  OK(sotto_set_log(nullptr, nullptr, 0));
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_NE(lines[0].find("SOTTO_TIMEOUT_UZ"), std::string::npos) << lines[0];
  EXPECT_NE(lines[0].find("SOTTO_TIMEOUT_US"), std::string::npos) << lines[0];
}

}  // namespace
}  // namespace sotto::test
