// Closed formulas for updates, traffic and memory against the specification's figures and against
// counting one by one.
#include "core/config/volume.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/iface/transport.h"

namespace sotto {
namespace {

Config zero_one(uint64_t freeze, uint64_t kappa, uint64_t scaler, uint64_t clipper) {
  Config config;
  config.optimizer.kind = OptimizerKind::kZeroOneAdam;
  IntervalParams& p = config.optimizer.params.intervals;
  p.var_freeze_step = freeze;
  p.var_update_scaler = kappa;
  p.local_step_scaler = scaler;
  p.local_step_clipper = clipper;
  return config;
}

// The rules of the optimizer, step by step.
UpdateCounts counted(const Config& config, uint64_t updates) {
  const IntervalParams& p = config.optimizer.params.intervals;
  UpdateCounts c;
  uint64_t var_interval = 1, var_counter = 0, local_interval = 1, local_counter = 0;
  bool frozen = false;
  for (uint64_t k = 1; k <= updates; ++k) {
    const uint64_t t = k + config.sotto.step_offset;
    if (frozen) {
      ++(t % local_interval == 0 ? c.sync : c.local);
      if (++local_counter == p.local_step_scaler) {
        local_counter = 0;
        local_interval = std::min(p.local_step_clipper, 2 * local_interval);
      }
      continue;
    }
    const bool variance = t % var_interval == 0;
    ++(variance ? c.full_precision : c.compressed);
    if (variance && ++var_counter == p.var_update_scaler) {
      var_counter = 0;
      var_interval *= 2;
    }
    frozen = t > p.var_freeze_step;
  }
  return c;
}

void expect_equal(const UpdateCounts& a, const UpdateCounts& b, uint64_t updates) {
  EXPECT_EQ(a.full_precision, b.full_precision) << updates;
  EXPECT_EQ(a.compressed, b.compressed) << updates;
  EXPECT_EQ(a.sync, b.sync) << updates;
  EXPECT_EQ(a.local, b.local) << updates;
  EXPECT_EQ(a.total(), updates);
}

TEST(ConfigVolume, ZeroOneAdamCountsAreThoseOfItsRules) {
  for (const uint32_t offset : {0u, 1u}) {
    for (Config config : {zero_one(6, 2, 3, 4), zero_one(1, 1, 1, 1), zero_one(50, 3, 7, 6),
                          zero_one(100, 16, 5, 16), zero_one(1000, 1, 2, 100)}) {
      config.sotto.step_offset = offset;
      for (uint64_t updates = 0; updates < 300; ++updates)
        expect_equal(count_updates(config, updates), counted(config, updates), updates);
    }
  }
}

TEST(ConfigVolume, ZeroOneAdamOfThePublishedRun) {
  const UpdateCounts c = count_updates(zero_one(12500, 16, 32678, 16), 152511);
  EXPECT_EQ(c.full_precision, 153u);
  EXPECT_EQ(c.compressed + c.sync, 74200u);
  EXPECT_EQ(c.local, 78158u);
  const auto report = config_report(R"({"optimizer": {"type": "ZeroOneAdam",
      "params": {"var_freeze_step": 12500}}, "fp16": {"enabled": true},
      "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 152511}}})",
                                    0, 0);
  ASSERT_TRUE(report.ok());
  const auto run = nlohmann::json::parse(*report)["run"];
  EXPECT_EQ(run["full_precision_updates"], 153);
  EXPECT_EQ(run["silent_updates"], 78158);
  EXPECT_NEAR(run["bits_per_parameter_and_update"].get<double>(), 0.503, 0.0005);
}

TEST(ConfigVolume, FreezeStepSplitsTheRun) {
  Config config;
  config.optimizer.kind = OptimizerKind::kOneBitAdam;
  config.optimizer.params.freeze.freeze_step = 1000;
  EXPECT_EQ(count_updates(config, 500).full_precision, 500u);
  EXPECT_EQ(count_updates(config, 6000).full_precision, 999u);
  EXPECT_EQ(count_updates(config, 6000).compressed, 5001u);
  config.optimizer.kind = OptimizerKind::kAdam;
  EXPECT_EQ(count_updates(config, 6000).full_precision, 6000u);
}

TEST(ConfigVolume, TrafficOfTheSpecification) {
  constexpr uint64_t kBert = 340000000;
  EXPECT_NEAR(static_cast<double>(compressed_sizes(CodecSettings(), kBert, 64).payload), 83.7e6,
              5e4);
  EXPECT_NEAR(static_cast<double>(full_precision_bytes(kBert, 64, 2)), 1338.8e6, 5e4);
  EXPECT_NEAR(static_cast<double>(full_precision_bytes(kBert, 64, 4)), 2677.5e6, 5e4);
  EXPECT_EQ(compressed_sizes(CodecSettings(), kBert, 1).payload, 0u);
}

TEST(ConfigVolume, CompatPadsToTheReferencesMultiple) {
  Config config;
  config.optimizer.kind = OptimizerKind::kOneBitAdam;
  config.sotto.mode = Mode::kCompat;
  const std::vector<std::pair<uint64_t, uint64_t>> table = {
      {2, 16}, {3, 72}, {4, 32}, {6, 144}, {7, 392}, {8, 64}, {100, 20000}, {127, 129032}};
  for (const auto& [world, multiple] : table) {
    const CodecSettings codec = config.compression(world).value();
    EXPECT_EQ(compressed_sizes(codec, 1, world).flat, multiple);
    EXPECT_EQ(compressed_sizes(codec, multiple + 1, world).flat, 2 * multiple);
  }
}

TEST(ConfigVolume, BlocksAndCastsCarryTheirScales) {
  CodecSettings codec;
  codec.kind = CodecKind::kInt8;
  codec.block = 256;
  EXPECT_EQ(compressed_sizes(codec, 1 << 20, 4).payload, 6u * (1 << 18) / 256 * 260);
  codec.kind = CodecKind::kInt4;
  codec.block = 128;
  EXPECT_EQ(compressed_sizes(codec, 1 << 20, 4).payload, 6u * (1 << 18) / 128 * 68);
  codec.kind = CodecKind::kBf16;
  EXPECT_EQ(compressed_sizes(codec, 1 << 20, 4).payload, 6u * (1 << 18) * 2);
}

TEST(ConfigVolume, EachBucketIsPadded) {
  CodecSettings codec;
  codec.granularity = Granularity::kBucket;
  codec.bucket_elements = 8192;
  // Two buckets of 4 * 2048 and a rest of 1, which takes 4 * 512.
  EXPECT_EQ(compressed_sizes(codec, 2 * 8192 + 1, 4).chunk, 2 * 2048u + 512u);
  EXPECT_EQ(compressed_sizes(codec, 2 * 8192, 4).chunk, 2 * 2048u);
}

TEST(ConfigVolume, MemoryByOptimizer) {
  constexpr uint64_t kN = 1 << 20;  // a multiple of every alignment here
  const auto of = [](OptimizerKind kind) {
    Config config;
    config.optimizer.kind = kind;
    return memory_bytes(config, 4, kN);
  };
  using Arrays = decltype(MemoryBytes::arrays);
  const MemoryBytes adam = of(OptimizerKind::kAdamW);
  EXPECT_EQ(adam.scratch, 10 * kN);  // averages, and windows: 2 of 3 messages of 256 KiB per rank
  EXPECT_EQ(adam.state(), 18 * kN);
  EXPECT_EQ(kHeldWindowBytes, HeldWindows{}.bytes);
  EXPECT_EQ(kHeldWindows, HeldWindows{}.count);
  EXPECT_EQ(kWindowUnitBytes, TransportCaps{}.segment_bytes);
  EXPECT_EQ(adam.gradients, 4 * kN);
  EXPECT_EQ(of(OptimizerKind::kSgd).state(), 10 * kN);
  EXPECT_EQ(memory_bytes(Config{}, 1, kN).scratch, 0u);
  const MemoryBytes lamb = of(OptimizerKind::kOneBitLamb);
  EXPECT_EQ(lamb.m + lamb.v, 8 * kN);
  EXPECT_EQ(lamb.arrays, Arrays({{"den", 4 * kN}, {"vf", 4 * kN}}));
  EXPECT_EQ(lamb.residuals, 6 * kN);  // 4 of the worker, twice 4 / W of the server
  EXPECT_EQ(lamb.bits, 3 * kN / 8);
  const MemoryBytes zero_one = of(OptimizerKind::kZeroOneAdam);
  EXPECT_EQ(zero_one.arrays, Arrays({{"den", 4 * kN}, {"local_sum", 4 * kN}, {"anchor", 4 * kN}}));
  EXPECT_EQ(of(OptimizerKind::kNone).state(), 0u);

  Config coded;
  coded.optimizer.kind = OptimizerKind::kAdamW;
  coded.sotto.gradient_codec.emplace();
  EXPECT_EQ(memory_bytes(coded, 4, kN).residuals, 6 * kN);
  EXPECT_TRUE(memory_bytes(coded, 4, kN).arrays.empty());
  coded.sotto.gradient_codec->kind = CodecKind::kBf16;
  coded.sotto.gradient_codec->residual = false;
  EXPECT_EQ(memory_bytes(coded, 4, kN).residuals, 0u);

  Config half;
  half.optimizer.kind = OptimizerKind::kAdam;
  half.fp16.enabled = true;
  EXPECT_EQ(memory_bytes(half, 4, kN).gradients, 2 * kN);
  EXPECT_EQ(memory_bytes(half, 4, kN).model_copy, 2 * kN);
  EXPECT_EQ(communication_bytes(half), 2u);
  half.communication_data_type = Dtype::kF32;
  EXPECT_EQ(communication_bytes(half), 4u);
  half.fp16.enabled = false;
  half.bf16_enabled = true;
  EXPECT_EQ(gradient_bytes(half), 4u);
}

// Averages have the type that grad_accum_dtype demands of gradients, unless communication_data_type
// says another.
TEST(ConfigVolume, AveragesHaveTheTypeOfTheGradients) {
  Config config;
  EXPECT_EQ(communication_bytes(config), 4u);
  config.bf16_enabled = true;
  EXPECT_EQ(communication_bytes(config), 2u);
  config.grad_accum_dtype = Dtype::kF32;
  EXPECT_EQ(communication_bytes(config), 4u);
  config.grad_accum_dtype = Dtype::kBF16;
  EXPECT_EQ(communication_bytes(config), 2u);
  config.bf16_enabled = false;
  EXPECT_EQ(communication_bytes(config), 2u);
  config.fp16.enabled = true;
  config.grad_accum_dtype = Dtype::kF32;
  EXPECT_EQ(communication_bytes(config), 4u);
  config.communication_data_type = Dtype::kF16;
  EXPECT_EQ(communication_bytes(config), 2u);
}

// As the plans of steps have it (core/optim/step_frame.cc, algorithms/lamb.cc).
TEST(ConfigVolume, ScratchOfConversionsAndDirections) {
  constexpr uint64_t kN = 1 << 20;
  Config adam;
  adam.optimizer.kind = OptimizerKind::kAdam;
  const auto scratch = [](const Config& config, uint64_t world) {
    return memory_bytes(config, world, kN).scratch;
  };
  EXPECT_EQ(scratch(adam, 4), 10 * kN);
  Config other = adam;
  other.prescale_gradients = true;
  EXPECT_EQ(scratch(other, 4), 14 * kN);
  EXPECT_EQ(scratch(other, 1), 0u);
  other = adam;
  other.gradient_predivide_factor = 2;
  EXPECT_EQ(scratch(other, 4), 18 * kN);
  EXPECT_EQ(scratch(other, 2), 14 * kN);  // what is divided before needs no product behind
  other = adam;
  other.communication_data_type = Dtype::kBF16;
  EXPECT_EQ(scratch(other, 4), 6 * kN);
  other.grad_accum_dtype = Dtype::kBF16;
  EXPECT_EQ(scratch(other, 4), 4 * kN);
  for (const OptimizerKind kind : {OptimizerKind::kLamb, OptimizerKind::kOneBitLamb}) {
    Config lamb;
    lamb.optimizer.kind = kind;
    EXPECT_EQ(scratch(lamb, 1), 4 * kN);
    EXPECT_EQ(scratch(lamb, 4), 10 * kN);  // in the averages
    lamb.communication_data_type = Dtype::kBF16;
    EXPECT_EQ(scratch(lamb, 4), 10 * kN);
    lamb.gradient_predivide_factor = 2;
    EXPECT_EQ(scratch(lamb, 4), 10 * kN);
  }
}

TEST(ConfigVolume, LargestSizesDoNotOverflow) {
  Config config;
  config.optimizer.kind = OptimizerKind::kZeroOneAdam;
  config.sotto.granularity = Granularity::kBucket;
  config.sotto.bucket_elements = 8192;
  config.sotto.chunk_align = uint64_t{1} << 30;
  const MemoryBytes bytes = memory_bytes(config, uint64_t{1} << 20, uint64_t{1} << 53);
  EXPECT_GT(bytes.state(), bytes.m);
  EXPECT_GT(bytes.m, uint64_t{1} << 53);
}

}  // namespace
}  // namespace sotto
