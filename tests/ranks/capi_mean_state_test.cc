// Error feedback in mode mean where a codec has no place for it.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "tests/ranks/capi_overlap_model.h"

namespace sotto::test {
namespace {

constexpr uint64_t kSmall = 50, kLarge = 1000;
constexpr const char* kInt8 = R"({"type": "int8"})";
constexpr const char* kSmallSentWhole =
    R"({"type": "topk", "block": 64, "k": 8, "dense_below": 51})";
constexpr const char* kAllSelected = R"({"type": "topk", "block": 64, "k": 8, "dense_below": 50})";

std::vector<float> numbers(uint64_t n, int32_t seed) {
  std::vector<float> out(n);
  for (uint64_t i = 0; i < n; ++i) out[i] = std::sin(static_cast<float>(i * 3 + 1) + seed);
  return out;
}

// A codec for two tensors, one of which is small.
struct Coded {
  std::vector<float> small, large;
  sotto_codec* codec = nullptr;
  Coded(const Member& self, const char* json)
      : small(numbers(kSmall, self.rank)), large(numbers(kLarge, 7 + self.rank)) {
    const sotto_buffer like[] = {buffer(small), buffer(large)};
    OK(sotto_codec_create(self.comm, json, like, 2, &codec));
  }
  ~Coded() { sotto_codec_destroy(codec); }
  Coded(const Coded&) = delete;
  Coded& operator=(const Coded&) = delete;

  void reduce(const Member& self) {
    const sotto_buffer both[] = {buffer(small), buffer(large)};
    const sotto_call call = call_with([&](sotto_call& c) { c.codec = codec; });
    OK(sotto_all_reduce(self.comm, both, both, 2, &call, nullptr));
  }
  std::vector<char> state(sotto_state_mode mode) const {
    uint64_t bytes = 0;
    OK(sotto_codec_state_export(codec, mode, nullptr, 0, &bytes));
    std::vector<char> out(bytes);
    OK(sotto_codec_state_export(codec, mode, out.data(), bytes, &bytes));
    return out;
  }
};

// The kernels keep no error of a tensor that is sent as float32: one that was put there would be
// sent by no later call.
TEST(CapiMeanState, AnErrorThatWouldNeverBeSentIsRefused) {
  EXPECT_EQ(
      run_world(
          2, {},
          [](Member& self) {
            Coded from(self, kInt8);
            from.reduce(self);
            const std::vector<char> mean = from.state(SOTTO_STATE_MEAN);
            Coded to(self, kSmallSentWhole);
            const std::vector<char> before = to.state(SOTTO_STATE_EXACT);
            FAILS(sotto_codec_state_import(to.codec, SOTTO_STATE_MEAN, mean.data(), mean.size()),
                  SOTTO_E_INVALID_ARGUMENT, "tensor 0", "dense_below 51");
            require(to.state(SOTTO_STATE_EXACT) == before, "the state has changed");
            OK(sotto_codec_state_import(to.codec, SOTTO_STATE_RESET, mean.data(), mean.size()));
            // Its own state has none of that tensor.
            to.reduce(self);
            const std::vector<char> own = to.state(SOTTO_STATE_MEAN);
            OK(sotto_codec_state_import(to.codec, SOTTO_STATE_MEAN, own.data(), own.size()));
            Coded all(self, kAllSelected);
            OK(sotto_codec_state_import(all.codec, SOTTO_STATE_MEAN, mean.data(), mean.size()));
          }),
      "");
}

TEST(CapiMeanState, NorIsThatOfAnOptimizersGradients) {
  EXPECT_EQ(
      run_world(
          2, {},
          [](Member& self) {
            std::vector<float> p(kSmall + kLarge, 1.0f), g = numbers(kSmall + kLarge, self.rank);
            sotto_param params[2] = {SOTTO_PARAM_INIT, SOTTO_PARAM_INIT};
            for (int t = 0; t < 2; ++t) {
              const uint64_t first = t == 0 ? 0 : kLarge, n = t == 0 ? kLarge : kSmall;
              params[t].param = buffer(p.data() + first, n);
              params[t].grad = buffer(g.data() + first, n);
            }
            const auto optimizer = [&](const std::string& codec) {
              const std::string json =
                  R"({"optimizer": {"type": "Adam"}, "sotto": {"gradient_codec": )" + codec + "}}";
              sotto_optim* out = nullptr;
              OK(sotto_optim_create(self.comm, json.c_str(), params, 2, &out));
              return out;
            };
            sotto_optim* const from = optimizer(kInt8);
            OK(sotto_optim_step(from, nullptr, nullptr));
            uint64_t bytes = 0;
            OK(sotto_optim_state_export(from, SOTTO_STATE_MEAN, nullptr, 0, &bytes));
            std::vector<char> mean(bytes);
            OK(sotto_optim_state_export(from, SOTTO_STATE_MEAN, mean.data(), bytes, &bytes));
            sotto_optim* const to = optimizer(kSmallSentWhole);
            const std::vector<float> before = p;
            FAILS(sotto_optim_state_import(to, SOTTO_STATE_MEAN, mean.data(), bytes),
                  SOTTO_E_INVALID_ARGUMENT, "tensor 1", "dense_below 51");
            OK(sotto_optim_step(to, nullptr, nullptr));  // nothing has changed: the state is whole
            OK(sotto_optim_state_import(to, SOTTO_STATE_RESET, mean.data(), bytes));
            require(p == before, "parameters are not those of the state");
            sotto_optim* const all = optimizer(kAllSelected);
            OK(sotto_optim_state_import(all, SOTTO_STATE_MEAN, mean.data(), bytes));
            for (sotto_optim* optim : {from, to, all}) OK(sotto_optim_destroy(optim));
          }),
      "");
}

TEST(CapiMeanState, NorIsThatOfAnOverlap) {
  EXPECT_EQ(run_world(2, {},
                      [](Member& self) {
                        const std::vector<size_t> counts = {kLarge, kSmall};
                        Gradients gradients(counts), others(counts);
                        for (std::vector<float>& d : gradients.data)
                          std::ranges::copy(numbers(d.size(), self.rank), d.begin());
                        const auto json = [](const std::string& codec) {
                          return R"({"codec": )" + codec + "}";
                        };
                        sotto_overlap* from = new_overlap(self, gradients, json(kInt8).c_str());
                        sotto_op* op = begin(from);
                        mark(from, {0, 1});
                        finish(from, op);
                        uint64_t bytes = 0;
                        OK(sotto_overlap_state_export(from, SOTTO_STATE_MEAN, nullptr, 0, &bytes));
                        std::vector<char> mean(bytes);
                        OK(sotto_overlap_state_export(from, SOTTO_STATE_MEAN, mean.data(), bytes,
                                                      &bytes));
                        sotto_overlap* to =
                            new_overlap(self, others, json(kSmallSentWhole).c_str());
                        FAILS(sotto_overlap_state_import(to, SOTTO_STATE_MEAN, mean.data(), bytes),
                              SOTTO_E_INVALID_ARGUMENT, "tensor 1", "dense_below 51");
                        sotto_overlap* all = new_overlap(self, others, json(kAllSelected).c_str());
                        OK(sotto_overlap_state_import(all, SOTTO_STATE_MEAN, mean.data(), bytes));
                        for (sotto_overlap* overlap : {from, to, all})
                          OK(sotto_overlap_destroy(overlap));
                      }),
            "");
}

}  // namespace
}  // namespace sotto::test
