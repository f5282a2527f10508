// Every collective, codec and optimizer on tensors of a CUDA device, over every transport and world
// size, gives the bits that it gives on host memory.
#include <cmath>
#include <mutex>

#include "tests/cuda/device_memory.h"
#include "tests/cuda/transports.h"

namespace sotto::test {
namespace {

using Body = std::function<std::string(Member&, Where)>;

// What the body returns on each rank, one after the other.
std::string results_of(const Body& body, Where where, int32_t size, const char* transport) {
  WorldOptions options;
  options.transport = transport;
  if (where == Where::kCuda)  // what NCCL takes
    options.on_rank = [](int32_t rank) { CUDA_OK(cudaSetDevice(device_of(rank))); };
  std::mutex mutex;
  std::vector<std::string> results(static_cast<size_t>(size));
  const std::string failure = run_world(size, options, [&](Member& self) {
    std::string mine = body(self, where);
    std::lock_guard lock(mutex);
    results[static_cast<size_t>(self.rank)] = std::move(mine);
  });
  EXPECT_EQ(failure, "") << size << " ranks, " << transport;
  std::string all;
  for (const std::string& r : results) all += r;
  return all;
}

class SameBits : public ::testing::TestWithParam<std::tuple<const char*, int32_t>> {
 protected:
  void compare(const Body& body) {
    const auto [transport, size] = GetParam();
    const std::string host = results_of(body, Where::kHost, size, transport);
    const std::string device = results_of(body, Where::kCuda, size, transport);
    ASSERT_EQ(host.size(), device.size());
    EXPECT_FALSE(host.empty());
    size_t first = 0;
    while (first < host.size() && host[first] == device[first]) ++first;
    EXPECT_EQ(first, host.size()) << "the first byte that differs";
  }
};

template <class T>
std::vector<T> values(size_t n, int32_t rank, int seed) {
  std::vector<T> v(n);
  for (size_t i = 0; i < n; ++i) {
    const double x = std::sin(static_cast<double>(i + 1) * (0.7 + 0.1 * seed) + rank) * 50;
    v[i] = std::is_floating_point_v<T> ? static_cast<T>(x) : static_cast<T>(static_cast<int>(x));
  }
  return v;
}

// bf16, finite.
std::vector<uint16_t> halves(size_t n, int32_t rank) {
  std::vector<uint16_t> v(n);
  for (size_t i = 0; i < n; ++i) {
    const float x = std::sin(static_cast<float>(i) * 0.37f + static_cast<float>(rank));
    uint32_t bits = 0;
    std::memcpy(&bits, &x, 4);
    v[i] = static_cast<uint16_t>(bits >> 16);
  }
  return v;
}

// Where `to` lies: arguments of the library name its memory.
template <class T>
void refill(std::vector<T>* to, const std::vector<T>& from) {
  std::copy(from.begin(), from.end(), to->begin());
}

// One collective with a result on this rank.
struct Pair {
  template <class T>
  static std::string run(
      Member& self, Where where, std::vector<T> in, size_t out_count,
      const std::function<sotto_status(const sotto_buffer*, const sotto_buffer*, sotto_call&)>& f) {
    Tensors tensors(where, device_of(self.rank));
    std::vector<T> out(out_count, T(7));
    const sotto_buffer a = tensors.add(in), b = tensors.add(out);
    sotto_call call = tensors.call();
    ok(f(&a, &b, call), "a collective");
    tensors.download();
    return bytes_of(out);
  }
};

TEST_P(SameBits, Collectives) {
  compare([](Member& self, Where where) {
    const auto size = static_cast<size_t>(self.size);
    const size_t n = 5003;
    std::string all;
    const auto reduce = [&](sotto_reduce_op op) {
      return [&self, op](const sotto_buffer* in, const sotto_buffer* out, sotto_call& call) {
        call.reduce = op;
        return sotto_all_reduce(self.comm, in, out, 1, &call, nullptr);
      };
    };
    for (const sotto_reduce_op op : {SOTTO_REDUCE_SUM, SOTTO_REDUCE_MEAN, SOTTO_REDUCE_MAX}) {
      all += Pair::run(self, where, values<float>(n, self.rank, op), n, reduce(op));
      all += Pair::run(self, where, halves(n, self.rank), n, reduce(op));
      all += Pair::run(self, where, values<int32_t>(n, self.rank, op), n, reduce(op));
    }
    all += Pair::run(self, where, values<uint8_t>(n, self.rank, 1), n, reduce(SOTTO_REDUCE_BIT_OR));
    all +=
        Pair::run(self, where, values<float>(70001, self.rank, 1), 70001, reduce(SOTTO_REDUCE_SUM));
    all += Pair::run(self, where, values<float>(n, self.rank, 2), n * size,
                     [&](auto* in, auto* out, auto& call) {
                       return sotto_all_gather(self.comm, in, out, 1, &call, nullptr);
                     });
    all += Pair::run(self, where, values<float>(n * size, self.rank, 3), n,
                     [&](auto* in, auto* out, auto& call) {
                       return sotto_reduce_scatter(self.comm, in, out, 1, &call, nullptr);
                     });
    all += Pair::run(self, where, values<float>(n * size, self.rank, 4), n * size,
                     [&](auto* in, auto* out, auto& call) {
                       return sotto_all_to_all(self.comm, in, out, 1, nullptr, &call, nullptr);
                     });
    all += Pair::run(self, where, values<double>(n, self.rank, 5), n,
                     [&](auto* in, auto* out, auto& call) {
                       return sotto_broadcast(self.comm, in, out, 1, self.size - 1, &call, nullptr);
                     });
    all += Pair::run(self, where, values<float>(n, self.rank, 6), n * size,
                     [&](auto* in, auto* out, auto& call) {
                       return sotto_gather(self.comm, in, out, 1, 0, &call, nullptr);
                     });
    all += Pair::run(self, where, values<float>(n * size, self.rank, 7), n,
                     [&](auto* in, auto* out, auto& call) {
                       return sotto_scatter(self.comm, in, out, 1, 0, &call, nullptr);
                     });
    return all;
  });
}

TEST_P(SameBits, InPlaceAndPointToPoint) {
  compare([](Member& self, Where where) {
    Tensors tensors(where, device_of(self.rank));
    std::vector<float> a = values<float>(9001, self.rank, 1), b(100, 0.0f), c = a;
    const sotto_buffer in_place = tensors.add(a), to = tensors.add(b), from = tensors.add(c);
    sotto_call call = tensors.call();
    OK(sotto_all_reduce(self.comm, &in_place, &in_place, 1, &call, nullptr));
    if (self.size > 1) {
      sotto_buffer part = from;
      part.count = 100;
      OK(sotto_group_begin(self.comm));
      OK(sotto_send(self.comm, &part, 1, (self.rank + 1) % self.size, nullptr, nullptr));
      OK(sotto_recv(self.comm, &to, 1, (self.rank + self.size - 1) % self.size, nullptr, nullptr));
      OK(sotto_group_end(self.comm, &call, nullptr));
    }
    tensors.download();
    return bytes_of(a) + bytes_of(b);
  });
}

// Three calls, so that error feedback takes part, and the state at the end.
std::string codec_results(Member& self, Where where, const char* json) {
  Tensors tensors(where, device_of(self.rank));
  std::vector<float> x[2] = {std::vector<float>(9001), std::vector<float>(37)}, y[2] = {x[0], x[1]};
  const sotto_buffer in[] = {tensors.add(x[0]), tensors.add(x[1])};
  const sotto_buffer out[] = {tensors.add(y[0]), tensors.add(y[1])};
  sotto_codec* codec = nullptr;
  OK(sotto_codec_create(self.comm, json, in, 2, &codec));
  std::string all;
  for (int round = 0; round < 3; ++round) {
    for (auto& v : x) refill(&v, values<float>(v.size(), self.rank, round));
    tensors.upload();
    sotto_call call = tensors.call();
    call.codec = codec;
    OK(sotto_all_reduce(self.comm, in, out, 2, &call, nullptr));
    tensors.download();
    all += bytes_of(y[0]) + bytes_of(y[1]);
  }
  uint64_t length = 0;
  OK(sotto_codec_state_export(codec, SOTTO_STATE_EXACT, nullptr, 0, &length));
  std::string blob(length, '\0');
  OK(sotto_codec_state_export(codec, SOTTO_STATE_EXACT, blob.data(), length, &length));
  OK(sotto_codec_destroy(codec));
  return all + blob;
}

TEST_P(SameBits, Codecs) {
  for (const char* json :
       {R"({"type": "onebit", "granularity": "bucket", "bucket_elements": 8192, "chunk_align": 8})",
        R"({"type": "onebit", "scale": "l1", "granularity": "tensor"})", R"({"type": "int8"})",
        R"({"type": "int4", "block": 64, "chunk_align": 64})",
        R"({"type": "bf16", "residual": true})", R"({"type": "fp16"})", R"({"type": "topk"})",
        R"({"type": "topk", "block": 64, "k": 8, "bits": 4, "average": "contributors"})",
        R"({"type": "topk", "block": 512, "k": 9, "median_clip": true})",
        R"({"type": "topk", "block": 128, "k": 5, "exchange": "two_phase"})"}) {
    SCOPED_TRACE(json);
    compare([json](Member& self, Where where) { return codec_results(self, where, json); });
  }
}

struct Training {
  const char* json;
  bool half = false;         // bf16 gradients, bf16 model copies
  bool mask = false;         // of the second tensor
  bool accumulates = false;  // one more micro-batch per step
};

std::string training_results(Member& self, Where where, const Training& training) {
  constexpr int kSteps = 8;
  const size_t counts[] = {1000, 17, 8193, 1};
  Tensors tensors(where, device_of(self.rank));
  std::vector<std::vector<float>> p, g;
  std::vector<std::vector<uint16_t>> half, copies;
  for (size_t n : counts) {
    p.push_back(values<float>(n, 0, 1));
    g.emplace_back(n);
    half.emplace_back(n);
    copies.emplace_back(n);
  }
  std::vector<uint8_t> mask(counts[1], 1);
  mask[3] = mask[9] = 0;
  std::vector<sotto_param> params(4);
  for (size_t t = 0; t < 4; ++t) {
    params[t].struct_size = sizeof(sotto_param);
    params[t].group = static_cast<uint32_t>(t % 2);
    params[t].param = tensors.add(p[t]);
    params[t].grad = training.half ? tensors.add(half[t]) : tensors.add(g[t]);
    if (training.half) params[t].model_copy = tensors.add(copies[t]);
    if (training.mask && t == 1) params[t].mask = tensors.add(mask);
  }
  tensors.sync();
  sotto_optim* optim = nullptr;
  OK(sotto_optim_create(self.comm, training.json, params.data(), params.size(), &optim));
  const auto new_gradients = [&](int seed) {
    tensors.download();  // what the library has written stays as it is
    for (size_t t = 0; t < 4; ++t) {
      refill(&g[t], values<float>(counts[t], self.rank, seed));
      refill(&half[t], halves(counts[t], self.rank + seed));
    }
    tensors.upload();
  };
  for (int step = 0; step < kSteps; ++step) {
    const sotto_call call = tensors.call();
    if (training.accumulates) {
      new_gradients(100 + step);
      OK(sotto_optim_accumulate(optim, &call, nullptr));
    }
    new_gradients(step);
    OK(sotto_optim_step(optim, &call, nullptr));
  }
  tensors.download();
  std::string all;
  for (size_t t = 0; t < 4; ++t) all += bytes_of(p[t]) + bytes_of(copies[t]);
  uint64_t length = 0;
  OK(sotto_optim_state_export(optim, SOTTO_STATE_EXACT, nullptr, 0, &length));
  std::string blob(length, '\0');
  OK(sotto_optim_state_export(optim, SOTTO_STATE_EXACT, blob.data(), length, &length));
  OK(sotto_optim_state_import(optim, SOTTO_STATE_EXACT, blob.data(), length));
  const sotto_call call = tensors.call();
  OK(sotto_optim_step(optim, &call, nullptr));
  tensors.download();
  for (size_t t = 0; t < 4; ++t) all += bytes_of(p[t]);
  OK(sotto_optim_destroy(optim));
  return all + blob;
}

TEST_P(SameBits, Optimizers) {
  const Training trainings[] = {
      {R"({"optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}}})"},
      {R"({"optimizer": {"type": "Adam", "params": {"lr": 0.01, "adam_w_mode": false,
           "weight_decay": 0.1}}, "gradient_clipping": 1.0})"},
      {R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "gradient_clipping": 0.5})",
       true, true},
      {R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}})", false, false, true},
      {R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "sotto": {"state_dtype": "bf16"}})",
       true, true},
      {R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "sotto": {"state_dtype": "fp8"}})",
       false, true},
      {R"({"optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9, "nesterov": true}},
           "sotto": {"state_dtype": "fp8"}})"},
      {R"({"optimizer": {"type": "Lion", "params": {"lr": 0.01, "weight_decay": 0.1}}})", true,
       true},
      {R"({"optimizer": {"type": "Lion", "params": {"lr": 0.01}}, "sotto": {"state_dtype": "fp8"}})"},
      {R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
           "sotto": {"gradient_codec": {"type": "int8"}}})"},
      {R"({"optimizer": {"type": "Lamb", "params": {"lr": 0.01, "weight_decay": 0.01}}})", true},
      {R"({"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 3}}})"},
      {R"({"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 3}}})", false,
       true},
      {R"({"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": 3,
           "weight_decay": 0.01}}})"},
      {R"({"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": 3}},
           "sotto": {"mode": "compat"}})"},
      {R"({"optimizer": {"type": "ZeroOneAdam", "params": {"lr": 0.01, "var_freeze_step": 3,
           "var_update_scaler": 2, "local_step_scaler": 3, "local_step_clipper": 4}}})"},
      {R"({"optimizer": {"type": "ZeroOneAdam", "params": {"lr": 0.01, "var_freeze_step": 3,
           "var_update_scaler": 2, "local_step_scaler": 3, "local_step_clipper": 4}},
           "sotto": {"mode": "compat"}})",
       true},
  };
  for (const Training& training : trainings) {
    SCOPED_TRACE(training.json);
    compare([&](Member& self, Where where) { return training_results(self, where, training); });
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, SameBits,
                         ::testing::Combine(::testing::ValuesIn(transports_under_test()),
                                            ::testing::Values(1, 2, 4)),
                         [](const auto& param) {
                           return std::string(std::get<0>(param.param)) + "_" +
                                  std::to_string(std::get<1>(param.param));
                         });

}  // namespace
}  // namespace sotto::test
