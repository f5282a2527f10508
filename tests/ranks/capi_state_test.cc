// State at the C ABI that does not lie in memory as a whole, bytes of the trainer's own in it, and
// the synchronisation of 0/1 Adam from outside.
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "tests/ranks/capi_support.h"
#include "tests/support/sanitized.h"

namespace sotto::test {
namespace {

const WorldOptions kDefault;

constexpr const char* kJsons[] = {
    R"({"optimizer": {"type": "SGD", "params": {"lr": 0.01}}})",
    R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "sotto": {"state_dtype": "fp8"}})",
    R"({"optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "sotto": {"gradient_codec": {"type": "int8"}}})",
    R"({"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 3}}})",
    R"({"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": 3}},
        "sotto": {"mode": "compat"}})",
    R"({"optimizer": {"type": "ZeroOneAdam", "params": {"lr": 0.01, "var_freeze_step": 3,
        "var_update_scaler": 2, "local_step_scaler": 2, "local_step_clipper": 4}}})",
    R"({"optimizer": {"type": "ZeroOneAdam", "params": {"lr": 0.01, "var_freeze_step": 3,
        "var_update_scaler": 2, "local_step_scaler": 2, "local_step_clipper": 4}},
        "sotto": {"mode": "compat"}})"};
constexpr const char* kOuterJson =
    R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "sotto": {"outer": {"preset": "local_sgd", "period": 4}}})";
constexpr sotto_state_mode kModes[] = {SOTTO_STATE_EXACT, SOTTO_STATE_RESET, SOTTO_STATE_MEAN};

struct Model {
  std::vector<float> p, g;
  sotto_param params[3] = {};
  int32_t rank;

  // State of the last one is in several parts, if it is not smaller.
  static constexpr uint64_t kSeveralParts = kSanitized ? 280'000 : 600'000;
  explicit Model(int32_t rank_in, uint64_t last = kSeveralParts) : rank(rank_in) {
    const uint64_t counts[] = {1000, 37, last};
    for (uint64_t i = 0; i < 1037 + last; ++i) p.push_back(std::sin(static_cast<float>(i)));
    g.resize(p.size());
    uint64_t at = 0;
    for (int t = 0; t < 3; ++t) {
      params[t].struct_size = sizeof params[t];
      params[t].param = buffer(p.data() + at, counts[t]);
      params[t].grad = buffer(g.data() + at, counts[t]);
      at += counts[t];
    }
  }
  sotto_optim* optim(const Member& self, const char* json) {
    sotto_optim* out = nullptr;
    OK(sotto_optim_create(self.comm, json, params, 3, &out));
    return out;
  }
  void train(sotto_optim* optim, int first, int last) {
    for (int k = first; k < last; ++k) {
      for (size_t i = 0; i < g.size(); ++i)
        g[i] = std::cos(static_cast<float>(i * 3 + static_cast<size_t>(k * 7 + rank)));
      OK(sotto_optim_step(optim, nullptr, nullptr));
    }
  }
};

struct Stream {
  std::string bytes;
  uint64_t longest = 0;
  uint64_t calls = 0, fail_at = UINT64_MAX;
  uint64_t change_at = UINT64_MAX;  // from this call on other bytes are read

  static int32_t write(void* user, const void* data, uint64_t n) {
    auto* s = static_cast<Stream*>(user);
    if (s->calls++ == s->fail_at) return 7;
    s->longest = std::max(s->longest, n);
    s->bytes.append(static_cast<const char*>(data), n);
    return 0;
  }
  static int32_t read(void* user, uint64_t offset, void* data, uint64_t n) {
    auto* s = static_cast<Stream*>(user);
    const uint64_t call = s->calls++;
    if (call == s->fail_at) return 7;
    if (offset + n > s->bytes.size()) return 8;
    s->longest = std::max(s->longest, n);
    std::memcpy(data, s->bytes.data() + offset, n);
    if (call >= s->change_at) static_cast<char*>(data)[n - 1] ^= 1;
    return 0;
  }
};

TEST(CapiState, StreamsHaveTheBytesOfOneShot) {
  std::vector<const char*> jsons(std::begin(kJsons), std::end(kJsons));
  jsons.push_back(kOuterJson);
  for (const char* json : jsons) {
    EXPECT_EQ(
        run_world(2, kDefault,
                  [&](Member& self) {
                    Model model(self.rank);
                    sotto_optim* const optim = model.optim(self, json);
                    model.train(optim, 0, 7);
                    for (const sotto_state_mode mode : kModes) {
                      const std::vector<float> before = model.p;
                      Stream stream;
                      OK(sotto_optim_state_write(optim, mode, Stream::write, &stream));
                      require(stream.bytes == one_shot(optim, mode), "other bytes");
                      require(stream.longest <= 1u << 20, "a part is too long");
                      require(model.p == before, "an export has changed parameters");
                    }
                    // From a stream, the run goes on as from the same optimizer.
                    Stream exact;
                    OK(sotto_optim_state_write(optim, SOTTO_STATE_EXACT, Stream::write, &exact));
                    model.train(optim, 7, 10);
                    const std::vector<float> wanted = model.p;
                    Model other(self.rank);
                    sotto_optim* const restored = other.optim(self, json);
                    exact.calls = 0;
                    OK(sotto_optim_state_read(restored, SOTTO_STATE_EXACT, Stream::read, &exact,
                                              exact.bytes.size()));
                    require(exact.longest <= 1u << 20, "a part is too long");
                    other.train(restored, 7, 10);
                    require(other.p == wanted, "the run goes on otherwise");
                    OK(sotto_optim_destroy(optim));
                    OK(sotto_optim_destroy(restored));
                  }),
        "")
        << json;
  }
}

// Local steps with learning rate 0 move no parameter, and momentum of each rank all the same.
TEST(CapiState, LocalStepsWithoutALearningRate) {
  for (const char* json : {kJsons[5], kJsons[6]}) {
    for (const sotto_state_mode mode : kModes) {
      EXPECT_EQ(
          run_world(3, kDefault,
                    [&](Member& self) {
                      Model model(self.rank, 3000), other(self.rank, 3000);
                      sotto_optim* const optim = model.optim(self, json);
                      model.train(optim, 0, 6);
                      OK(sotto_optim_synchronize(optim, nullptr, nullptr));
                      OK(sotto_optim_set(optim, "lr", -1, 0));
                      model.train(optim, 6, 11);
                      const std::string state = one_shot(optim, mode);
                      sotto_optim* const restored = other.optim(self, json);
                      OK(sotto_optim_state_import(restored, mode, state.data(), state.size()));
                      other.train(restored, 11, 16);
                      OK(sotto_optim_synchronize(restored, nullptr, nullptr));
                      if (mode == SOTTO_STATE_EXACT) {
                        OK(sotto_optim_set(optim, "lr", -1, NAN));
                        model.train(optim, 11, 16);
                        OK(sotto_optim_synchronize(optim, nullptr, nullptr));
                        require(model.p == other.p, "the run goes on otherwise");
                      }
                      OK(sotto_optim_destroy(optim));
                      OK(sotto_optim_destroy(restored));
                    }),
          "")
          << json << mode;
    }
  }
}

TEST(CapiState, StreamsThatFail) {
  EXPECT_EQ(
      run_world(
          2, kDefault,
          [](Member& self) {
            Model model(self.rank);
            sotto_optim* const optim = model.optim(self, kJsons[3]);
            model.train(optim, 0, 5);
            FAILS(sotto_optim_state_write(optim, SOTTO_STATE_EXACT, nullptr, nullptr),
                  SOTTO_E_INVALID_ARGUMENT, "write is NULL");
            FAILS(sotto_optim_state_read(optim, SOTTO_STATE_EXACT, nullptr, nullptr, 0),
                  SOTTO_E_INVALID_ARGUMENT, "read is NULL");
            // One rank refuses its bytes; the collective goes on for the other.
            Stream failing;
            failing.fail_at = self.rank == 1 ? 3 : UINT64_MAX;
            const sotto_status status =
                sotto_optim_state_write(optim, SOTTO_STATE_MEAN, Stream::write, &failing);
            require(status == (self.rank == 1 ? SOTTO_E_CANCELLED : SOTTO_OK), sotto_last_error());
            Stream stream;
            OK(sotto_optim_state_write(optim, SOTTO_STATE_EXACT, Stream::write, &stream));
            const std::vector<float> before = model.p;
            stream.calls = 0;
            const auto read = [&](uint64_t length) {
              stream.calls = 0;
              return sotto_optim_state_read(optim, SOTTO_STATE_EXACT, Stream::read, &stream,
                                            length);
            };
            OK(read(stream.bytes.size()));
            const uint64_t calls = stream.calls;
            FAILS(read(stream.bytes.size() - 8), SOTTO_E_INVALID_ARGUMENT, "truncated");
            stream.bytes[stream.bytes.size() / 2] ^= 1;
            FAILS(read(stream.bytes.size()), SOTTO_E_INVALID_ARGUMENT, "checksum");
            stream.bytes[stream.bytes.size() / 2] ^= 1;
            stream.fail_at = 5;
            FAILS(read(stream.bytes.size()), SOTTO_E_CANCELLED, "read function has returned 7");
            require(model.p == before, "a failed import has changed parameters");
            model.train(optim, 5, 6);
            // In the middle of what is applied.
            stream.fail_at = calls - 2;
            FAILS(read(stream.bytes.size()), SOTTO_E_CANCELLED, "read function has returned 7");
            FAILS(sotto_optim_step(optim, nullptr, nullptr), SOTTO_E_INVALID_STATE,
                  "ended in the middle");
            uint64_t length = 0;
            FAILS(sotto_optim_state_export(optim, SOTTO_STATE_EXACT, nullptr, 0, &length),
                  SOTTO_E_INVALID_STATE, "ended in the middle");
            stream.fail_at = UINT64_MAX;
            OK(read(stream.bytes.size()));
            model.train(optim, 5, 6);
            // Other bytes than those that were checked, before anything is applied and then.
            const std::vector<float> trained = model.p;
            // Behind three numbers of the head, all parts of 1 MiB, and the checksum.
            stream.change_at = 3 + ((stream.bytes.size() - 8 + (1u << 20) - 1) >> 20) + 1;
            FAILS(read(stream.bytes.size()), SOTTO_E_INVALID_ARGUMENT,
                  "the state changes while it is read: of bytes ");
            require(model.p == trained, "a refused import has changed parameters");
            model.train(optim, 6, 7);
            stream.change_at = calls - 2;
            FAILS(read(stream.bytes.size()), SOTTO_E_INVALID_ARGUMENT, "changes while it is read");
            FAILS(sotto_optim_step(optim, nullptr, nullptr), SOTTO_E_INVALID_STATE,
                  "ended in the middle");
            stream.change_at = UINT64_MAX;
            OK(read(stream.bytes.size()));
            model.train(optim, 5, 6);
            OK(sotto_optim_destroy(optim));
          }),
      "");
}

TEST(CapiState, BytesOfTheTrainersOwn) {
  EXPECT_EQ(
      run_world(2, kDefault,
                [](Member& self) {
                  Model model(self.rank), other(self.rank);
                  sotto_optim* const a = model.optim(self, kJsons[3]);
                  sotto_optim* const b = other.optim(self, kJsons[3]);
                  const auto own_of = [](const sotto_optim* optim) {
                    uint64_t length = 0;
                    OK(sotto_optim_get_user_state(optim, nullptr, 0, &length));
                    std::string out(length, '\0');
                    OK(sotto_optim_get_user_state(optim, out.data(), out.size(), &length));
                    return out;
                  };
                  require(own_of(a).empty(), "there is something at the beginning");
                  const std::string own = "epoch 3\0 of rank " + std::to_string(self.rank);
                  OK(sotto_optim_set_user_state(a, own.data(), own.size()));
                  model.train(a, 0, 4);
                  for (const sotto_state_mode mode : kModes) {
                    const std::string blob = one_shot(a, mode);
                    OK(sotto_optim_set_user_state(b, "x", 1));
                    OK(sotto_optim_state_import(b, mode, blob.data(), blob.size()));
                    require(own_of(b) == own, "other bytes: " + own_of(b));
                  }
                  OK(sotto_optim_set_user_state(a, nullptr, 0));
                  const std::string none = one_shot(a, SOTTO_STATE_EXACT);
                  OK(sotto_optim_state_import(b, SOTTO_STATE_EXACT, none.data(), none.size()));
                  require(own_of(b).empty(), "the bytes have stayed");
                  FAILS(sotto_optim_set_user_state(a, own.data(), (1u << 26) + 1),
                        SOTTO_E_INVALID_ARGUMENT, "len is 67108865", "67108864");
                  FAILS(sotto_optim_set_user_state(a, nullptr, 1), SOTTO_E_INVALID_ARGUMENT,
                        "data is NULL");
                  OK(sotto_optim_destroy(a));
                  OK(sotto_optim_destroy(b));
                }),
      "");
}

TEST(CapiState, SkippedStepsAreAPartOfIt) {
  EXPECT_EQ(
      run_world(2, kDefault,
                [](Member& self) {
                  Model model(self.rank), other(self.rank);
                  sotto_optim* const a = model.optim(self, kJsons[0]);
                  sotto_optim* const b = other.optim(self, kJsons[0]);
                  model.train(a, 0, 1);
                  model.g[5] = NAN;
                  require(sotto_optim_step(a, nullptr, nullptr) == SOTTO_E_NONFINITE, "NaN");
                  const std::string blob = one_shot(a, SOTTO_STATE_EXACT);
                  OK(sotto_optim_state_import(b, SOTTO_STATE_EXACT, blob.data(), blob.size()));
                  sotto_optim_info info = {};
                  info.struct_size = sizeof info;
                  OK(sotto_optim_get_info(b, &info));
                  require(info.skipped_steps == 1 && info.step == 1, "skipped_steps");
                  OK(sotto_optim_destroy(a));
                  OK(sotto_optim_destroy(b));
                }),
      "");
}

TEST(CapiState, SynchronizeBringsParametersTogether) {
  for (const char* json : kJsons) {
    EXPECT_EQ(
        run_world(3, kDefault,
                  [&](Member& self) {
                    const bool zeroone = std::string(json).find("ZeroOne") != std::string::npos;
                    const bool compat = std::string(json).find("compat") != std::string::npos;
                    Model model(self.rank, 60'000);
                    sotto_optim* const optim = model.optim(self, json);
                    const auto spread = [&] {
                      std::vector<float> all(model.p.size() * 3), out = all;
                      sotto_buffer in = buffer(model.p), gathered = buffer(all);
                      OK(sotto_all_gather(self.comm, &in, &gathered, 1, nullptr, nullptr));
                      float most = 0;
                      for (size_t i = 0; i < model.p.size(); ++i) {
                        for (size_t r = 1; r < 3; ++r)
                          most = std::max(most, std::abs(all[i] - all[r * model.p.size() + i]));
                      }
                      return most;
                    };
                    bool apart = false;
                    for (int k = 0; k < 10; ++k) {
                      model.train(optim, k, k + 1);
                      apart = apart || spread() > 1e-3f;
                      sotto_op* op = nullptr;
                      OK(sotto_optim_synchronize(optim, nullptr, k % 2 == 0 ? &op : nullptr));
                      if (op != nullptr) OK(sotto_op_wait(op, -1));
                      if (op != nullptr) OK(sotto_op_release(op));
                      require(spread() <= (compat ? 1e-5f : 0.0f), "parameters differ");
                    }
                    require(apart == zeroone, "ranks were apart");
                    sotto_optim_info info = {};
                    info.struct_size = sizeof info;
                    OK(sotto_optim_get_info(optim, &info));
                    require(info.step == 10, "a synchronisation is no step");
                    OK(sotto_optim_destroy(optim));
                  }),
        "")
        << json;
  }
}

// Bytes of resident memory: now ("VmRSS"), or at most since the last call of forget_peak ("VmHWM").
uint64_t resident(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(key + ":", 0) == 0) return std::stoull(line.substr(key.size() + 1)) * 1024;
  }
  return 0;
}
void forget_peak() { std::ofstream("/proc/self/clear_refs") << "5"; }

TEST(CapiState, StreamsNeedLittleMemory) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer's own memory counts in the resident size";
  constexpr uint64_t kElements = 24'000'000;
  constexpr uint64_t kAllowed = 32u << 20;
  EXPECT_EQ(
      run_world(1, kDefault,
                [&](Member& self) {
                  std::vector<float> p(kElements, 0.5f), g(kElements, 0.25f);
                  sotto_param param = {};
                  param.struct_size = sizeof param;
                  param.param = buffer(p);
                  param.grad = buffer(g);
                  sotto_optim* optim = nullptr;
                  OK(sotto_optim_create(self.comm, kJsons[3], &param, 1, &optim));
                  for (int k = 0; k < 4; ++k) OK(sotto_optim_step(optim, nullptr, nullptr));
                  std::FILE* const file = std::tmpfile();
                  require(file != nullptr, "a temporary file");
                  const int fd = fileno(file);
                  uint64_t length = 0;
                  const auto write = [](void* user, const void* data, uint64_t n) {
                    auto* f = static_cast<std::FILE*>(user);
                    return std::fwrite(data, 1, n, f) == n ? 0 : 1;
                  };
                  const auto read = [](void* user, uint64_t offset, void* data, uint64_t n) {
                    const auto got =
                        pread(*static_cast<int*>(user), data, n, static_cast<off_t>(offset));
                    return static_cast<uint64_t>(got) == n ? 0 : 1;
                  };
                  OK(sotto_optim_state_export(optim, SOTTO_STATE_EXACT, nullptr, 0, &length));
                  require(length > kElements * 12, "the state is smaller than its parts");
                  const auto measured = [&](const char* what, auto&& work) {
                    forget_peak();
                    const uint64_t before = resident("VmRSS");
                    if (resident("VmHWM") > before + kAllowed) {
                      std::printf("the peak cannot be reset here; %s is not measured\n", what);
                      return work();
                    }
                    work();
                    const uint64_t most = resident("VmHWM") - before;
                    require(most <= kAllowed,
                            std::string(what) + " needs " + std::to_string(most) + " bytes");
                  };
                  measured("the export", [&] {
                    OK(sotto_optim_state_write(optim, SOTTO_STATE_EXACT, write, file));
                  });
                  std::fflush(file);
                  int descriptor = fd;
                  measured("the import", [&] {
                    OK(sotto_optim_state_read(optim, SOTTO_STATE_EXACT, read, &descriptor, length));
                  });
                  std::fclose(file);
                  OK(sotto_optim_step(optim, nullptr, nullptr));
                  OK(sotto_optim_destroy(optim));
                }),
      "");
}

}  // namespace
}  // namespace sotto::test
