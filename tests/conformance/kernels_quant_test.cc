// Casts and blockwise integers: vector kernels against the reference, the reference against its
// description, error bounds, special values, any bytes in the decoders.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/cpu/ops_quant.h"
#include "tests/support/kernel_cases.h"

namespace sotto::test {
namespace {

struct Format {
  CodecKind kind;
  uint32_t block;
};
constexpr Format kFormats[] = {{CodecKind::kBf16, 0},   {CodecKind::kFp16, 0},
                               {CodecKind::kInt8, 256}, {CodecKind::kInt8, 32},
                               {CodecKind::kInt4, 128}, {CodecKind::kInt4, 512}};

std::vector<Layout> layouts() {
  std::vector<Layout> all;
  for (const uint64_t n : {0, 1, 7, 8, 9, 65, 513, 1023, 8193})
    all.push_back(make_layout({n}, 1, 512));
  all.push_back(make_layout({7, 0, 65, 1, 8193, 130, 9000, 63}, 2, 512, 3));
  all.push_back(make_layout({50003}, 3, 512));
  return all;
}

uint64_t payload_bytes(const Format& f, uint64_t elements) {
  return payload_unit(f.kind, f.block).bytes_of(elements);
}

QuantArgs args_of(const Format& f) {
  QuantArgs args{};
  args.kind = f.kind;
  args.block = f.block;
  return args;
}

struct EncodeCase {
  EncodeCase(const Layout& layout, const Format& f, const std::vector<std::vector<float>>& x,
             const std::vector<float>* e)
      : work(KernelId::kQuantEncode) {
    work.pieces = layout.by_chunk;
    work.set_args(args_of(f));
    auto& o = work.named<kernels::QuantEncode>();
    o.x = work.list(x);
    if (e != nullptr) o.e = work.flat(*e);
    e_at = o.e.at();
    o.payload = work.flat(std::vector<uint8_t>(payload_bytes(f, layout.padded), 0xee));
    out_at = o.payload.at();
    o.flags = work.flat(std::vector<uint32_t>{0});
    flags_at = o.flags.at();
  }
  KernelCase work;
  size_t e_at = 0, out_at = 0, flags_at = 0;
};

// Residuals are 0 in padding.
std::vector<float> residual(Random* random, const Layout& layout, float sigma) {
  std::vector<float> e = random->normal(layout.padded, sigma);
  std::fill(e.begin() + static_cast<ptrdiff_t>(layout.elements()), e.end(), 0.0f);
  return e;
}

std::vector<float> decode(const Layout& layout, const Format& f, const std::vector<uint8_t>& bytes,
                          bool compare) {
  KernelCase work(KernelId::kQuantDecode);
  work.pieces = layout.by_chunk;
  work.set_args(args_of(f));
  auto& o = work.named<kernels::QuantDecode>();
  o.payload = work.flat(bytes);
  std::vector<std::vector<float>> y;
  for (const uint64_t size : layout.sizes) y.emplace_back(size, 7.0f);
  o.y = work.list(y);
  const size_t first = o.y.at();
  if (compare) {
    EXPECT_EQ(compare_on_all_targets(work), "");
  }
  const Outcome out = execute_reference(work);
  std::vector<float> flat(layout.padded);
  for (size_t t = 0; t < y.size(); ++t) {
    const std::vector<float> values = out.as<float>(first + t);
    std::copy(values.begin(), values.end(),
              flat.begin() + static_cast<ptrdiff_t>(layout.starts[t]));
  }
  return flat;
}

TEST(KernelsQuant, EncoderEqualsTheReferenceOnEveryTarget) {
  Random random(21);
  for (const Layout& layout : layouts()) {
    for (const Format& f : kFormats) {
      for (const int variant : {0, 1, 2, 3}) {
        SCOPED_TRACE(std::to_string(layout.elements()) + " kind " +
                     std::to_string(static_cast<int>(f.kind)) + " variant " +
                     std::to_string(variant));
        std::vector<std::vector<float>> x = random.tensors(layout.sizes);
        const std::vector<float> e = residual(&random, layout, 0.1f);
        if (variant >= 2) {
          for (auto& tensor : x) random.sprinkle(&tensor);
        }
        EncodeCase encode(layout, f, x, variant % 2 == 1 ? &e : nullptr);
        EXPECT_EQ(compare_on_all_targets(encode.work), "");
      }
    }
  }
}

// Bounds as the header of the C API states them; a is the largest magnitude of the block.
double bound(const Format& f, float c, float a) {
  switch (f.kind) {
    case CodecKind::kBf16: return std::max(std::fabs(c) * 0x1p-8, 0x1p-134);
    case CodecKind::kFp16: return std::max(std::fabs(c) * 0x1p-11, 0x1p-25);
    case CodecKind::kInt8: return a < 0x1p-120f ? a : a / 254.0 * (1 + 0x1p-12);
    case CodecKind::kInt4: return a < 0x1p-120f ? a : a / 14.0 * (1 + 0x1p-12);
    case CodecKind::kOnebit:
    case CodecKind::kTopk: break;
  }
  return 0;
}

TEST(KernelsQuant, ValuesAndErrorsMakeUpTheInputWithinTheBounds) {
  Random random(22);
  for (const Format& f : kFormats) {
    for (const float sigma : {1.0f, 1e-30f, 1e-36f, 1e-38f, 1e-42f, 1e4f}) {
      const Layout layout = make_layout({5, 3000, 1, 5191}, 1, 512);
      const std::vector<std::vector<float>> x = random.tensors(layout.sizes, sigma);
      const std::vector<float> e = residual(&random, layout, sigma);
      EncodeCase encode(layout, f, x, &e);
      const Outcome out = execute_reference(encode.work);
      ASSERT_EQ(out.as<uint32_t>(encode.flags_at)[0], 0u);
      const std::vector<float> left = out.as<float>(encode.e_at);
      const std::vector<float> v = decode(layout, f, out.memory[encode.out_at], false);
      std::vector<float> c(layout.padded);
      for (size_t t = 0; t < x.size(); ++t) {
        for (size_t i = 0; i < x[t].size(); ++i)
          c[layout.starts[t] + i] = x[t][i] + e[layout.starts[t] + i];
      }
      const uint64_t block = codec_has_blocks(f.kind) ? f.block : 1;
      for (uint64_t first = 0; first < layout.padded; first += block) {
        float a = 0;
        for (uint64_t i = first; i < first + block; ++i) a = std::max(a, std::fabs(c[i]));
        for (uint64_t i = first; i < first + block; ++i) {
          ASSERT_EQ(left[i], c[i] - v[i]);
          ASSERT_LE(std::fabs(double{c[i]} - v[i]), bound(f, c[i], a))
              << "kind " << static_cast<int>(f.kind) << " sigma " << sigma << " c " << c[i];
        }
      }
    }
  }
}

TEST(KernelsQuant, CodesOfASmallExample) {
  const Layout layout = make_layout({32}, 1, 32);
  std::vector<float> x(32, 0.0f);
  x[0] = 7.0f, x[1] = -7.0f, x[2] = 2.5f, x[3] = -0.5f, x[4] = 3.5f;
  EncodeCase encode(layout, {CodecKind::kInt4, 32}, {x}, nullptr);
  EXPECT_EQ(compare_on_all_targets(encode.work), "");
  std::vector<uint8_t> bytes = execute_reference(encode.work).memory[encode.out_at];
  float scale;
  std::memcpy(&scale, &bytes[16], 4);
  EXPECT_NEAR(scale, 1.0f, 1e-6);
  // 7 -7 | 2 (to even) -0 | 4 0 | ...
  EXPECT_EQ(bytes[0], 0x79);
  EXPECT_EQ(bytes[1], 0x20);
  EXPECT_EQ(bytes[2], 0x40);
  EncodeCase wide(layout, {CodecKind::kInt8, 32}, {x}, nullptr);
  bytes = execute_reference(wide.work).memory[wide.out_at];
  EXPECT_EQ(static_cast<int8_t>(bytes[0]), 127);
  EXPECT_EQ(static_cast<int8_t>(bytes[1]), -127);
  EXPECT_EQ(static_cast<int8_t>(bytes[2]), 45);  // 45.36
}

TEST(KernelsQuant, WhatHasNoNumberIsFlaggedAndUndone) {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float huge = std::numeric_limits<float>::max();
  for (const Format& f : kFormats) {
    for (const float bad : {inf, -inf, nan, huge}) {
      // The largest float fits the blocks' scale only if it does not overflow when decoded.
      for (const uint64_t at : {0u, 31u, 300u, 599u}) {
        const Layout layout = make_layout({600}, 1, 512);
        std::vector<std::vector<float>> x = {std::vector<float>(600, 0.75f)};
        x[0][at] = bad;
        std::vector<float> e(layout.padded, 0.0f);
        for (size_t i = 0; i < 600; ++i) e[i] = 0.0625f * static_cast<float>(i % 5);
        EncodeCase encode(layout, f, x, &e);
        EXPECT_EQ(compare_on_all_targets(encode.work), "");
        const Outcome out = execute_reference(encode.work);
        if (bad != huge || f.kind == CodecKind::kFp16) {
          ASSERT_EQ(out.as<uint32_t>(encode.flags_at)[0], kFlagNonfinite);
        }
        for (const float v : decode(layout, f, out.memory[encode.out_at], false))
          ASSERT_TRUE(std::isfinite(v));
        encode.work.id = KernelId::kQuantEncodeUndo;
        encode.work.paired_ran = true;
        encode.work.memory[encode.e_at].bytes = out.memory[encode.e_at];
        encode.work.memory[encode.out_at].bytes = out.memory[encode.out_at];
        EXPECT_EQ(compare_on_all_targets(encode.work), "");
        const std::vector<float> back = execute_reference(encode.work).as<float>(encode.e_at);
        for (size_t i = 0; i < 600; ++i) {
          // The large one swallows what was there.
          if (i == at && bad == huge) continue;
          ASSERT_NEAR(back[i], e[i], bad == huge ? 1.0 : 2e-7) << i;
        }
      }
    }
  }
}

struct ServerCase {
  ServerCase(const Layout& layout, const Format& f, uint64_t rank, uint32_t world, bool with_error,
             std::vector<uint8_t> bytes, const std::vector<float>& e)
      : work(KernelId::kQuantServer) {
    work.pieces = layout.of_server(rank);
    QuantArgs args = args_of(f);
    args.world = world;
    args.row_bytes = payload_bytes(f, layout.chunk);
    work.set_args(args);
    rows = std::move(bytes);
    auto& o = work.named<kernels::QuantServer>();
    o.rows = work.flat(rows);
    if (with_error) {
      o.e = work.flat(e);
      o.new_e = work.flat(std::vector<float>(layout.chunk, 0.0f));
    }
    o.payload = work.flat(std::vector<uint8_t>(payload_bytes(f, layout.chunk), 0xee));
    o.flags = work.flat(std::vector<uint32_t>{0});
    e_at = o.new_e.at();
    out_at = o.payload.at();
    flags_at = o.flags.at();
  }
  KernelCase work;
  std::vector<uint8_t> rows;
  size_t e_at = 0, out_at = 0, flags_at = 0;
};

// Rows of real payloads, or (hostile) of any bytes.
std::vector<uint8_t> make_rows(Random* random, const Layout& layout, const Format& f,
                               uint32_t world, bool hostile) {
  if (hostile) return random->bytes(world * payload_bytes(f, layout.chunk));
  std::vector<uint8_t> rows;
  const Layout one = make_layout({layout.chunk}, 1, layout.chunk);
  for (uint32_t r = 0; r < world; ++r) {
    EncodeCase encode(one, f, {random->normal(layout.chunk)}, nullptr);
    const std::vector<uint8_t> row = execute_reference(encode.work).memory[encode.out_at];
    rows.insert(rows.end(), row.begin(), row.end());
  }
  return rows;
}

TEST(KernelsQuant, ServerEqualsTheReferenceOnEveryTarget) {
  Random random(23);
  for (const Layout& layout : layouts()) {
    if (layout.chunk == 0) continue;
    for (const Format& f : kFormats) {
      for (const uint32_t world : {1u, 2u, 3u, 8u, 9u, 17u}) {
        for (const int variant : {0, 1, 2, 3}) {
          if (layout.elements() > 9000 && (world == 8 || world == 1 || variant == 0)) continue;
          SCOPED_TRACE(std::to_string(layout.elements()) + " world " + std::to_string(world) +
                       " kind " + std::to_string(static_cast<int>(f.kind)));
          ServerCase server(layout, f, layout.world - 1, world, variant % 2 == 1,
                            make_rows(&random, layout, f, world, variant >= 2),
                            random.normal(layout.chunk));
          EXPECT_EQ(compare_on_all_targets(server.work), "");
        }
      }
    }
  }
}

TEST(KernelsQuant, ServerAddsTheMeanAndTheErrorAndFlagsWhatIsNotFinite) {
  Random random(24);
  const Layout layout = make_layout({1024}, 1, 512);
  for (const Format& f : kFormats) {
    for (const uint32_t world : {2u, 9u}) {
      std::vector<uint8_t> rows = make_rows(&random, layout, f, world, false);
      const std::vector<float> e = random.normal(1024, 0.1f);
      ServerCase server(layout, f, 0, world, true, rows, e);
      const Outcome out = execute_reference(server.work);
      EXPECT_EQ(out.as<uint32_t>(server.flags_at)[0], 0u);
      const std::vector<float> left = out.as<float>(server.e_at);
      const std::vector<float> v = decode(layout, f, out.memory[server.out_at], false);
      const uint64_t row = payload_bytes(f, 1024);
      std::vector<double> mean(1024);
      for (uint32_t r = 0; r < world; ++r) {
        const std::vector<uint8_t> bytes(rows.begin() + static_cast<ptrdiff_t>(r * row),
                                         rows.begin() + static_cast<ptrdiff_t>((r + 1) * row));
        const std::vector<float> values = decode(layout, f, bytes, false);
        for (size_t i = 0; i < 1024; ++i) mean[i] += double{values[i]} / world;
      }
      for (size_t i = 0; i < 1024; ++i) ASSERT_NEAR(double{v[i]} + left[i], mean[i] + e[i], 2e-6);
      // A scale (or a 16-bit value) that is not finite in the last row.
      const PayloadUnit unit = payload_unit(f.kind, f.block);
      const uint32_t word = 0x7fc07fc0;  // NaN in every format
      std::memcpy(&rows[(world - 1) * row + unit.bytes_of(512) - 4], &word, 4);
      ServerCase poisoned(layout, f, 0, world, true, rows, e);
      EXPECT_EQ(compare_on_all_targets(poisoned.work), "");
      const Outcome bad = execute_reference(poisoned.work);
      EXPECT_EQ(bad.as<uint32_t>(poisoned.flags_at)[0], kFlagNonfinite);
      for (const float left_over : bad.as<float>(poisoned.e_at))
        ASSERT_TRUE(std::isfinite(left_over));
    }
  }
}

TEST(KernelsQuant, AnyBytesCanBeDecoded) {
  Random random(25);
  for (const Layout& layout : layouts()) {
    for (const Format& f : kFormats) {
      const std::vector<uint8_t> bytes = random.bytes(payload_bytes(f, layout.padded));
      const std::vector<float> y = decode(layout, f, bytes, true);
      if (!codec_has_blocks(f.kind)) continue;
      for (const float v : y) ASSERT_FALSE(std::isnan(v));
    }
  }
}

}  // namespace
}  // namespace sotto::test
