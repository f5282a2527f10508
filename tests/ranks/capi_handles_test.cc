// Handles at the C ABI that have been destroyed, or never were any: refused with a text, whatever
// the function, and the others go on.
#include <array>
#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tests/ranks/capi_support.h"

namespace sotto::test {
namespace {

constexpr const char* kAdam = R"({"optimizer": {"type": "Adam", "params": {"lr": 0.1}}})";

struct Objects {
  sotto_context* context = new_context();
  sotto_comm* comm = nullptr;
  sotto_codec* codec = nullptr;
  sotto_optim* optim = nullptr;
  std::array<float, 8> weights{}, gradients{};

  Objects() {
    sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
    config.size = 1;
    OK(sotto_comm_create(context, &config, &comm));
    const sotto_buffer like = buffer(gradients.data(), gradients.size());
    OK(sotto_codec_create(comm, R"({"type": "onebit"})", &like, 1, &codec));
    sotto_param param = SOTTO_PARAM_INIT;
    param.param = buffer(weights.data(), weights.size());
    param.grad = like;
    OK(sotto_optim_create(comm, kAdam, &param, 1, &optim));
  }
};

using Call = std::function<sotto_status()>;

std::vector<Call> calls_on_comm(sotto_comm* comm) {
  static float x[4];
  static const sotto_buffer b = buffer(x, 4);
  return {[=] { return sotto_comm_abort(comm, "never"); },
          [=] { return sotto_comm_error(comm, nullptr); },
          [=] { return sotto_comm_destroy(comm); },
          [=] { return sotto_barrier(comm, nullptr, nullptr); },
          [=] { return sotto_all_reduce(comm, &b, &b, 1, nullptr, nullptr); },
          [=] { return sotto_reduce(comm, &b, &b, 1, 0, nullptr, nullptr); },
          [=] { return sotto_send(comm, &b, 1, 0, nullptr, nullptr); },
          [=] { return sotto_group_begin(comm); },
          [=] { return sotto_group_end(comm, nullptr, nullptr); },
          [=] {
            int32_t rank = 0;
            return sotto_comm_rank(comm, &rank);
          },
          [=] {
            sotto_comm* out = nullptr;
            return sotto_comm_split(comm, 0, 0, &out);
          },
          [=] {
            sotto_comm_counters counters = SOTTO_COMM_COUNTERS_INIT;
            return sotto_comm_get_counters(comm, &counters);
          },
          [=] {
            uint64_t length = 0;
            return sotto_plan_report(comm, R"({"kind": "barrier"})", nullptr, 0, &length);
          },
          [=] {
            sotto_codec* out = nullptr;
            return sotto_codec_create(comm, R"({"type": "onebit"})", &b, 1, &out);
          },
          [=] {
            sotto_optim* out = nullptr;
            sotto_param param = SOTTO_PARAM_INIT;
            return sotto_optim_create(comm, kAdam, &param, 1, &out);
          }};
}

std::vector<Call> calls_on_optim(sotto_optim* optim) {
  return {[=] { return sotto_optim_step(optim, nullptr, nullptr); },
          [=] { return sotto_optim_accumulate(optim, nullptr, nullptr); },
          [=] { return sotto_optim_set(optim, "lr", -1, 0.5); },
          [=] { return sotto_optim_set_grads(optim, nullptr, 0); },
          [=] { return sotto_optim_replay(optim, nullptr); },
          [=] { return sotto_optim_state_import(optim, SOTTO_STATE_EXACT, nullptr, 0); },
          [=] { return sotto_optim_destroy(optim); },
          [=] {
            sotto_optim_info info = SOTTO_OPTIM_INFO_INIT;
            return sotto_optim_get_info(optim, &info);
          },
          [=] {
            uint64_t length = 0;
            return sotto_optim_state_export(optim, SOTTO_STATE_EXACT, nullptr, 0, &length);
          }};
}

std::vector<Call> calls_on_codec(sotto_codec* codec, sotto_comm* comm, float* data) {
  return {[=] {
            uint64_t length = 0;
            return sotto_codec_state_export(codec, SOTTO_STATE_EXACT, nullptr, 0, &length);
          },
          [=] { return sotto_codec_state_import(codec, SOTTO_STATE_RESET, nullptr, 0); },
          [=] { return sotto_codec_destroy(codec); },
          [=] {
            sotto_call call = SOTTO_CALL_INIT;
            call.codec = codec;
            const sotto_buffer b = buffer(data, 8);
            return sotto_all_reduce(comm, &b, &b, 1, &call, nullptr);
          }};
}

std::vector<Call> calls_on_context(sotto_context* context) {
  return {[=] { return sotto_context_poll(context, 0); },
          [=] { return sotto_context_destroy(context); },
          [=] {
            uint64_t length = 0;
            return sotto_context_report(context, nullptr, nullptr, 0, &length);
          },
          [=] {
            sotto_unique_id id;
            return sotto_unique_id_create(context, &id);
          },
          [=] {
            sotto_comm* out = nullptr;
            sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
            config.size = 1;
            return sotto_comm_create(context, &config, &out);
          }};
}

void expect_refused(const std::vector<Call>& calls, const std::string& words) {
  for (size_t i = 0; i < calls.size(); ++i) {
    EXPECT_EQ(calls[i](), SOTTO_E_INVALID_ARGUMENT) << i;
    EXPECT_NE(std::string(sotto_last_error()).find(words), std::string::npos)
        << i << ": " << sotto_last_error();
  }
}

TEST(CapiHandles, DestroyedOnesAreRefusedByEveryFunction) {
  Objects mine, other;
  OK(sotto_codec_destroy(mine.codec));
  expect_refused(calls_on_codec(mine.codec, mine.comm, mine.weights.data()),
                 "has been destroyed before");
  OK(sotto_optim_destroy(mine.optim));
  expect_refused(calls_on_optim(mine.optim), "has been destroyed before");
  OK(sotto_comm_destroy(mine.comm));
  expect_refused(calls_on_comm(mine.comm), "has been destroyed before");
  OK(sotto_context_destroy(mine.context));
  expect_refused(calls_on_context(mine.context), "has been destroyed before");
  // Others that were there before and come after are not mistaken for them.
  const Objects later;
  expect_refused(calls_on_comm(mine.comm), "has been destroyed before");
  for (const Objects* objects : {&later, static_cast<const Objects*>(&other)}) {
    OK(sotto_optim_step(objects->optim, nullptr, nullptr));
    OK(sotto_optim_destroy(objects->optim));
    OK(sotto_codec_destroy(objects->codec));
    OK(sotto_comm_destroy(objects->comm));
    OK(sotto_context_destroy(objects->context));
  }
}

TEST(CapiHandles, ForeignOnesAreRefused) {
  Objects mine;
  alignas(64) char memory[256] = {};
  void* const strange = memory;
  expect_refused(calls_on_comm(static_cast<sotto_comm*>(strange)), "is not a handle");
  expect_refused(calls_on_context(static_cast<sotto_context*>(strange)), "is not a handle");
  // One kind is not another.
  expect_refused(calls_on_optim(reinterpret_cast<sotto_optim*>(mine.comm)), "is not a handle");
  expect_refused({[&] { return sotto_op_wait(reinterpret_cast<sotto_op*>(mine.codec), 0); }},
                 "is not a handle");
  OK(sotto_optim_destroy(mine.optim));
  OK(sotto_codec_destroy(mine.codec));
  OK(sotto_comm_destroy(mine.comm));
  OK(sotto_context_destroy(mine.context));
}

// Children keep their parent alive: the parent's handle is gone, not the parent.
TEST(CapiHandles, OrderOfDestructionDoesNotMatter) {
  Objects mine;
  OK(sotto_context_destroy(mine.context));
  OK(sotto_comm_destroy(mine.comm));
  OK(sotto_optim_step(mine.optim, nullptr, nullptr));
  OK(sotto_codec_destroy(mine.codec));
  OK(sotto_optim_destroy(mine.optim));
}

// Of several threads that destroy a handle one does, and calls under way meanwhile end.
TEST(CapiHandles, DestroyedByOneOfSeveralThreads) {
  for (int round = 0; round < 50; ++round) {
    Objects mine;
    std::atomic<int> done{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&] {
        int32_t rank = 0;
        (void)sotto_comm_rank(mine.comm, &rank);
        done += sotto_comm_destroy(mine.comm) == SOTTO_OK;
        EXPECT_EQ(sotto_comm_rank(mine.comm, &rank), SOTTO_E_INVALID_ARGUMENT);
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(done, 1);
    OK(sotto_codec_destroy(mine.codec));
    OK(sotto_optim_destroy(mine.optim));
    OK(sotto_context_destroy(mine.context));
  }
}

}  // namespace
}  // namespace sotto::test
