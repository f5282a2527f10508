// Conversions between float types, and sums of micro-batches.
#include <gtest/gtest.h>
#include <xmmintrin.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "core/base/dtype.h"
#include "core/cpu/cpu_device.h"
#include "tests/support/kernel_cases.h"

namespace sotto::test {
namespace {

std::vector<uint8_t> bytes_as(Dtype type, const std::vector<float>& values) {
  std::vector<uint8_t> out(values.size() * dtype_bytes(type));
  for (size_t i = 0; i < values.size(); ++i) {
    if (type == Dtype::kF32) {
      std::memcpy(&out[4 * i], &values[i], 4);
      continue;
    }
    const uint16_t half = type == Dtype::kF16 ? f32_to_f16(values[i]) : f32_to_bf16(values[i]);
    std::memcpy(&out[2 * i], &half, 2);
  }
  return out;
}

constexpr Dtype kTypes[] = {Dtype::kF32, Dtype::kF16, Dtype::kBF16};

KernelCase convert_case(const Layout& layout, Random* random, Dtype from, Dtype to, float factor,
                        bool specials) {
  KernelCase work(KernelId::kConvert);
  work.set_args(ConvertArgs{from, to, factor});
  work.pieces = layout.by_tensor;
  std::vector<std::vector<uint8_t>> sources, targets;
  for (const uint64_t size : layout.sizes) {
    std::vector<float> values = random->normal(size, 300.0f);
    if (specials) random->sprinkle(&values);
    sources.push_back(bytes_as(from, values));
    targets.emplace_back(size * dtype_bytes(to), uint8_t{0xaa});
  }
  auto& o = work.named<kernels::Convert>();
  o.x = work.list(sources, dtype_bytes(from));
  o.y = work.list(targets, dtype_bytes(to));
  return work;
}

TEST(KernelsConvert, EqualsTheReferenceOnEveryTarget) {
  Random random(60);
  for (const Layout& layout : all_layouts()) {
    for (const Dtype from : kTypes) {
      for (const Dtype to : kTypes) {
        for (const float factor : {1.0f, 0.3f}) {
          SCOPED_TRACE(std::string(dtype_name(from)) + " to " + std::string(dtype_name(to)));
          // A NaN of float32 has no sign and payload of its own.
          const bool specials = to != Dtype::kF32;
          EXPECT_EQ(
              compare_on_all_targets(convert_case(layout, &random, from, to, factor, specials)),
              "");
        }
      }
    }
  }
}

TEST(KernelsConvert, AccumulationEqualsTheReferenceOnEveryTarget) {
  Random random(62);
  for (const Layout& layout : all_layouts()) {
    for (const Dtype source : kTypes) {
      for (const bool first : {true, false}) {
        KernelCase work(KernelId::kAccumulate);
        work.set_args(AccumulateArgs{source, first});
        work.pieces = layout.by_tensor;
        std::vector<std::vector<uint8_t>> sources;
        for (const uint64_t size : layout.sizes)
          sources.push_back(bytes_as(source, random.normal(size)));
        const std::vector<std::vector<float>> sums = random.tensors(layout.sizes);
        auto& o = work.named<kernels::Accumulate>();
        o.x = work.list(sources, dtype_bytes(source));
        o.sum = work.list(sums);
        const size_t sums_at = o.sum.at();
        o.factor = work.flat(std::vector<double>{0.25});
        EXPECT_EQ(compare_on_all_targets(work), "");
        const Outcome after = execute_reference(work);
        for (size_t t = 0; t < sums.size(); ++t) {
          const std::vector<float> got = after.as<float>(sums_at + t);
          for (uint64_t i = 0; i < got.size(); ++i) {
            const float x = float_at(source, sources[t].data(), i);
            ASSERT_EQ(got[i], ((first ? 0.0f : sums[t][i]) + x) * 0.25f);
          }
        }
      }
    }
  }
}

TEST(KernelsConvert, RoundsOnceToTheNearest) {
  Random random(61);
  const Layout layout = make_layout({1000}, 1, 512);
  for (const Dtype to : {Dtype::kF16, Dtype::kBF16}) {
    KernelCase work = convert_case(layout, &random, Dtype::kF32, to, 0.7f, false);
    const std::vector<uint8_t> source = work.memory[0].bytes,
                               got = execute_reference(work).memory[1];
    const double unit = to == Dtype::kF16 ? 0x1p-11 : 0x1p-8;
    for (uint64_t i = 0; i < 1000; ++i) {
      const double exact = double{float_at(Dtype::kF32, source.data(), i)} * 0.7f;
      ASSERT_NEAR(float_at(to, got.data(), i), exact, unit * std::abs(exact) * 1.001);
    }
  }
}

// Applications flush denormals, round otherwise or trap exceptions, in some of their threads.
TEST(KernelsConvert, ArithmeticIsNotThatOfTheApplication) {
  constexpr unsigned kFlags = 0x3f, kFlush = 0x8040, kRoundUp = 0x4000, kMaskInvalid = 0x80;
  Random random(63);
  const Layout layout = make_layout({40000, 37}, 1, 64);
  KernelCase work(KernelId::kConvert);
  work.set_args(ConvertArgs{Dtype::kF32, Dtype::kBF16, 0.3f});
  work.pieces = layout.by_tensor;
  std::vector<std::vector<float>> sources;
  std::vector<std::vector<uint16_t>> targets;
  for (const uint64_t size : layout.sizes) {
    sources.push_back(random.normal(size, 1e-38f));
    sources.back()[5] = std::numeric_limits<float>::signaling_NaN();
    targets.emplace_back(size);
  }
  auto& o = work.named<kernels::Convert>();
  o.x = work.list(sources);
  o.y = work.list(targets);
  const Outcome expected = execute_reference(work);
  const unsigned before = _mm_getcsr() & ~kFlags;
  for (const unsigned mode : {before | kFlush, before | kRoundUp, before & ~kMaskInvalid}) {
    for (const unsigned threads : {1u, 3u}) {
      for (const SimdLevel level : {SimdLevel::kScalar, SimdLevel::kAuto}) {
        SCOPED_TRACE(fmt::format("MXCSR {:x}, {} threads", mode, threads));
        const std::unique_ptr<Device> device = make_cpu_device(threads, level).take();
        _mm_setcsr(mode);
        const Outcome outcome = execute(work, *device, 0);
        const unsigned after = _mm_getcsr();
        _mm_setcsr(before);
        EXPECT_EQ(outcome.error, "");
        EXPECT_TRUE(outcome.memory == expected.memory);
        EXPECT_EQ(after, mode);  // flags of kernels are not the application's either
      }
    }
  }
}

}  // namespace
}  // namespace sotto::test
