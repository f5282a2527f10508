// Selections of blocks: the specification's own vectors, vector and CUDA kernels against the
// reference, ties and zeros, sums and errors, undo, any bytes in the decoder.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/kernels/sparse.h"
#include "tests/support/kernel_cases.h"

namespace sotto::test {
namespace {

SparseSettings settings_of(uint32_t block, uint32_t k, uint32_t bits,
                           SparseIndex index = SparseIndex::kEliasFano, double decay = 0.95) {
  SparseSettings s;
  s.block = block;
  s.k = k;
  s.bits = bits;
  s.index = index;
  s.error_decay = decay;
  return s;
}

// Every form of the index part, every number of bits; blocks of warps and of thread blocks.
std::vector<SparseSettings> all_settings() {
  std::vector<SparseSettings> all = {
      settings_of(4096, 64, 2),
      settings_of(4096, 128, 4, SparseIndex::kPacked),
      settings_of(4096, 1024, 8),
      settings_of(1024, 1, 2),
      settings_of(64, 64, 2),
      settings_of(64, 5, 32, SparseIndex::kPacked),
      settings_of(512, 33, 4, SparseIndex::kEliasFano, 0),
      settings_of(8, 2, 8, SparseIndex::kEliasFano, 1),
      settings_of(16, 3, 2, SparseIndex::kPacked, 0.5),
      settings_of(2048, 17, 2),
  };
  all[1].dense_below = 100;
  all[3].average = all[6].average = SparseAverage::kContributors;
  return all;
}

struct Tensors {
  std::vector<uint64_t> sizes;
  std::vector<Piece> pieces;
  uint64_t elements = 0, payload = 0;
  std::vector<uint64_t> starts;  // of payload
};

Tensors tensors_of(const SparseSettings& s, std::vector<uint64_t> sizes) {
  Tensors out;
  out.sizes = std::move(sizes);
  uint64_t block = 0;
  for (uint32_t t = 0; t < out.sizes.size(); ++t) {
    const uint64_t n = out.sizes[t];
    out.starts.push_back(out.payload);
    if (n != 0) {
      out.pieces.push_back({.flat = out.elements,
                            .offset = 0,
                            .target = out.payload,
                            .count = n,
                            .block = block,
                            .tensor = t,
                            .scale = is_dense(s, n) ? 1u : 0u});
    }
    block += (n + kNormBlock - 1) / kNormBlock;
    out.elements += n;
    out.payload += sparse_bytes(s, n);
  }
  return out;
}

std::vector<std::vector<uint64_t>> all_sizes() {
  if (kSanitized) return {{1}, {7, 0, 4097, 65}};
  return {{1}, {8192}, {7, 0, 65, 1, 8193, 130, 63, 4096}};
}

struct EncodeCase {
  EncodeCase(const SparseSettings& s, const Tensors& t, const std::vector<std::vector<float>>& x,
             const std::vector<float>& e, const float* weight = nullptr)
      : work(KernelId::kSparseEncode) {
    work.pieces = t.pieces;
    work.set_args(SparseArgs{s});
    auto& o = work.named<kernels::SparseEncode>();
    o.x = work.list(x);
    o.e = work.flat(e);
    e_at = o.e.at();
    o.payload = work.flat(std::vector<uint8_t>(t.payload, 0xee));
    out_at = o.payload.at();
    o.flags = work.flat(std::vector<uint32_t>{0});
    flags_at = o.flags.at();
    if (weight != nullptr) o.weight = work.flat(std::vector<float>{*weight});
  }
  KernelCase work;
  size_t e_at = 0, out_at = 0, flags_at = 0;
};

struct MeanCase {
  // factors: of every tensor and rank; empty: none.
  MeanCase(const SparseSettings& s, const Tensors& t, const std::vector<uint8_t>& rows,
           const std::vector<float>& weights, const std::vector<float>& factors = {})
      : work(KernelId::kSparseMean) {
    SparseArgs args{s};
    args.row_bytes = t.payload;
    args.world = static_cast<uint32_t>(weights.size());
    args.weight_bytes = 4;
    work.pieces = t.pieces;
    work.set_args(args);
    auto& o = work.named<kernels::SparseMean>();
    o.rows = work.flat(rows);
    if (std::ranges::any_of(weights, [](float w) { return w == 0; })) {
      std::vector<uint8_t> bytes(4 * weights.size());
      std::memcpy(bytes.data(), weights.data(), bytes.size());
      o.weights = work.flat(bytes);
    }
    if (!factors.empty()) o.factors = work.flat(factors);
    std::vector<std::vector<float>> y;
    for (const uint64_t size : t.sizes) y.emplace_back(size, 7.0f);
    o.y = work.list(y);
    first = o.y.at();
    tensors = y.size();
  }
  std::vector<float> y(const Outcome& out) const {
    std::vector<float> all;
    for (size_t t = 0; t < tensors; ++t) {
      const std::vector<float> values = out.as<float>(first + t);
      all.insert(all.end(), values.begin(), values.end());
    }
    return all;
  }
  KernelCase work;
  size_t first = 0, tensors = 0;
};

// Specification, section 12.

std::string hex(const std::vector<uint8_t>& bytes) {
  std::string text;
  for (const uint8_t b : bytes) text += fmt::format("{}{:02x}", text.empty() ? "" : " ", b);
  return text;
}

struct Encoded {
  std::string payload;
  std::vector<float> q, e;
};
// With e = 0 before.
Encoded encode_one(const SparseSettings& s, const std::vector<float>& x,
                   std::vector<float> e = {}) {
  const Tensors t = tensors_of(s, {x.size()});
  e.resize(x.size());
  EncodeCase encode(s, t, {x}, e);
  EXPECT_EQ(compare_on_all_targets(encode.work), "");
  const Outcome out = execute_reference(encode.work);
  EXPECT_EQ(out.as<uint32_t>(encode.flags_at)[0], 0u);
  MeanCase mean(s, t, out.memory[encode.out_at], {1});
  EXPECT_EQ(compare_on_all_targets(mean.work), "");
  return {hex(out.memory[encode.out_at]), mean.y(execute_reference(mean.work)),
          out.as<float>(encode.e_at)};
}

using F = std::vector<float>;

TEST(KernelsSparse, TheWorkedExampleOfTheSpecification) {
  const SparseSettings s = settings_of(8, 2, 2, SparseIndex::kEliasFano, 0.5);
  const F d0 = {1, -4, 2, 0, 3, -.5, 4, -2, 0, 0, 0, 8, 0, 0, 0, 0};
  const F d1 = {2, 2, -2, 2, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, -8};
  const Encoded a = encode_one(s, d0), b = encode_one(s, d1);
  EXPECT_EQ(a.payload, "42 20 80 40 80 40 90 b0 00 00 00 41");
  EXPECT_EQ(a.q, (F{0, -4, 0, 0, 0, 0, 4, 0, 0, 0, 0, 8, 0, 0, 0, 0}));
  EXPECT_EQ(a.e, (F{1, 0, 2, 0, 3, -.5, 0, -2, 0, 0, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(b.payload, "c0 a0 00 40 00 40 03 90 e0 40 00 41");
  EXPECT_EQ(b.q, (F{2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7, -8}));
  EXPECT_EQ(b.e, (F{0, 0, -2, 2, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 0, 0}));
  const Encoded c = encode_one(s, d1, a.e), d = encode_one(s, d0, b.e);
  EXPECT_EQ(c.payload, "c0 e0 00 40 20 40 03 90 e0 40 00 41");
  EXPECT_EQ(c.q, (F{2.5, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7, -8}));
  EXPECT_EQ(c.e, (F{0, 0, -1, 2, 1.5, -.25, 0, -1, 1, 2, 3, 4, 5, 6, 0, 0}));
  EXPECT_EQ(d.payload, "42 20 80 40 80 40 14 e0 40 40 20 41");
  EXPECT_EQ(d.q, (F{0, -4, 0, 0, 0, 0, 4, 0, 0, 0, 0, 10, 0, 3, 0, 0}));
  EXPECT_EQ(d.e, (F{1, 0, 1, 1, 3, -.5, 0, -2, .5, 1, 1.5, 0, 2.5, 0, 0, 0}));
}

TEST(KernelsSparse, BothAveragesOfTheWorkedExample) {
  SparseSettings s = settings_of(8, 2, 2);
  const Tensors t = tensors_of(s, {16});
  const std::vector<uint8_t> rows = {0x42, 0x20, 0x80, 0x40, 0x80, 0x40, 0x90, 0xb0,
                                     0x00, 0x00, 0x00, 0x41, 0xc0, 0xa0, 0x00, 0x40,
                                     0x00, 0x40, 0x03, 0x90, 0xe0, 0x40, 0x00, 0x41};
  const auto mean = [&](const std::vector<float>& weights) {
    MeanCase work(s, t, rows, weights);
    EXPECT_EQ(compare_on_all_targets(work.work), "");
    return work.y(execute_reference(work.work));
  };
  EXPECT_EQ(mean({1, 1}), (F{1, -1, 0, 0, 0, 0, 2, 0, 0, 0, 0, 4, 0, 0, 3.5, -4}));
  EXPECT_EQ(mean({0, 1}), (F{2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7, -8}));
  EXPECT_EQ(mean({0, 0}), F(16));
  s.average = SparseAverage::kContributors;
  EXPECT_EQ(mean({1, 1}), (F{2, -1, 0, 0, 0, 0, 4, 0, 0, 0, 0, 8, 0, 0, 7, -8}));
}

TEST(KernelsSparse, EliasFanoPackedIndicesAndRoundingOfTheSpecification) {
  F c(64);
  c[3] = 1, c[17] = -3, c[18] = 2.5, c[60] = 6;
  EXPECT_EQ(encode_one(settings_of(64, 4, 2), c).payload, "31 2c b2 8b 0b 40 c0 40");
  EXPECT_EQ(encode_one(settings_of(64, 4, 2, SparseIndex::kPacked), c).payload,
            "0d 14 bc 8b 0b 40 c0 40");
  const F r = {.3f, -.7f, .1f, .65f, .2f, -.9f, .05f, .55f};
  EXPECT_EQ(encode_one(settings_of(8, 4, 2), r).payload, "55 26 22 3f 66 3f");
  EXPECT_EQ(encode_one(settings_of(8, 4, 4), r).payload, "55 b5 94 3b a8 03 3e");
  EXPECT_EQ(encode_one(settings_of(8, 4, 8), r).payload, "55 9d 5c 81 4e d4 36 e8 3b");
}

TEST(KernelsSparse, SizesOfTheSpecification) {
  const uint64_t sizes[][3] = {{32, 48, 60},    {64, 84, 116},     {128, 148, 228},
                               {256, 260, 452}, {1024, 772, 1796}, {4096, 1028, 1028}};
  for (const auto& [k, ef, packed] : sizes) {
    const auto size = static_cast<uint32_t>(k);
    EXPECT_EQ(sparse_bytes(settings_of(4096, size, 2), 4096), ef);
    EXPECT_EQ(sparse_bytes(settings_of(4096, size, 2, SparseIndex::kPacked), 4096), packed);
  }
  EXPECT_EQ(sparse_bytes(settings_of(4096, 64, 4), 4096), 100u);
  EXPECT_EQ(sparse_bytes(settings_of(4096, 64, 8), 4096), 132u);
  EXPECT_EQ(sparse_bytes(settings_of(4096, 64, 32), 3 * 4096 + 1), 3 * 320 + 4u);
}

TEST(KernelsSparse, EncoderUndoAndMeanEqualTheReferenceOnEveryTarget) {
  Random random(31);
  for (const SparseSettings& s : all_settings()) {
    for (const std::vector<uint64_t>& sizes : all_sizes()) {
      const Tensors t = tensors_of(s, sizes);
      std::vector<uint8_t> rows;
      for (const int variant : {0, 1, 2}) {
        SCOPED_TRACE(fmt::format("block {} k {} bits {}, {} elements, variant {}", s.block, s.k,
                                 s.bits, t.elements, variant));
        std::vector<std::vector<float>> x = random.tensors(t.sizes);
        if (variant == 2) {
          for (auto& tensor : x) random.sprinkle(&tensor);
        }
        const float weight = variant == 1 ? 0.0f : 1.0f;
        EncodeCase encode(s, t, x, random.normal(t.elements, 0.5f),
                          variant == 0 ? nullptr : &weight);
        EXPECT_EQ(compare_on_all_targets(encode.work), "");
        const Outcome out = execute_reference(encode.work);
        const std::vector<uint8_t>& payload = out.memory[encode.out_at];
        rows.insert(rows.end(), payload.begin(), payload.end());
        EncodeCase undo(s, t, x, out.as<float>(encode.e_at), variant == 0 ? nullptr : &weight);
        undo.work.id = KernelId::kSparseEncodeUndo;
        undo.work.memory[undo.out_at].bytes = payload;
        for (const bool paired : {false, true}) {
          undo.work.paired_ran = paired;
          EXPECT_EQ(compare_on_all_targets(undo.work), "");
        }
      }
      EXPECT_EQ(compare_on_all_targets(MeanCase(s, t, rows, {1, 1, 1}).work), "");
      EXPECT_EQ(compare_on_all_targets(MeanCase(s, t, rows, {1, 0, 1}).work), "");
    }
  }
}

// What is selected, sent and left, without the kernel's own way to find it.
TEST(KernelsSparse, TheLargestAreSentLowerIndicesFirstAndTheRestIsLeft) {
  Random random(32);
  for (const SparseSettings& s : all_settings()) {
    for (const int grid : {0, 1, 4, 1000}) {  // values on a coarse grid tie; 1000: mostly zeros
      const uint64_t n = 2 * uint64_t{s.block} + s.block / 3 + 1;
      const Tensors t = tensors_of(s, {n});
      F x = random.normal(n);
      for (float& v : x) {
        if (grid == 1000) v = random.below(50) == 0 ? v : 0.0f;
        if (grid == 1 || grid == 4) v = std::round(v * static_cast<float>(grid));
      }
      const Encoded got = encode_one(s, x);
      if (is_dense(s, n)) continue;
      for (uint64_t first = 0; first < n; first += s.block) {
        const auto m = static_cast<uint32_t>(std::min<uint64_t>(s.block, n - first));
        std::vector<uint32_t> order(m);
        for (uint32_t i = 0; i < m; ++i) order[i] = i;
        std::ranges::stable_sort(order, [&](uint32_t a, uint32_t b) {
          return std::fabs(x[first + a]) > std::fabs(x[first + b]);
        });
        const uint32_t k = sparse_block(s, m).k;
        for (uint32_t j = 0; j < m; ++j) {
          const uint64_t i = first + order[j];
          ASSERT_NEAR(got.q[i] + got.e[i], x[i], 1e-6) << i;
          if (j >= k) {
            ASSERT_EQ(got.q[i], 0.0f) << "not selected: " << i;
            ASSERT_EQ(got.e[i], x[i]) << "not selected: " << i;
          } else if (s.bits != 4 && std::fabs(x[i]) > 0.3f) {
            ASSERT_NE(got.q[i], 0.0f) << "selected: " << i;
          } else if (x[i] == 0.0f) {
            ASSERT_EQ(got.q[i], 0.0f) << i;
          }
        }
      }
    }
  }
}

// What is selected of a block is looked for where it was in the block before.
TEST(KernelsSparse, BlocksOfAllScalesFollowEachOther) {
  Random random(37);
  const float scales[] = {1, 1.02f, 0.9f, 1e-3f, 1e30f, 0, 0, 1e-40f, 1, 1e38f, 1, 1, 1e-3f, 2};
  for (const SparseSettings& s : all_settings()) {
    const uint64_t n = std::size(scales) * uint64_t{s.block} - 3;
    const Tensors t = tensors_of(s, {n});
    std::vector<std::vector<float>> x = random.tensors(t.sizes);
    for (uint64_t i = 0; i < n; ++i) x[0][i] *= scales[i / s.block];
    F e(n);
    for (const bool finite : {true, true, false}) {
      if (!finite) random.sprinkle(&x[0]);
      EncodeCase encode(s, t, x, e);
      EXPECT_EQ(compare_on_all_targets(encode.work), "") << s.block << " " << s.k;
      e = execute_reference(encode.work).as<float>(encode.e_at);
    }
  }
}

TEST(KernelsSparse, UndoTakesAnEncodingBack) {
  Random random(33);
  for (const SparseSettings& s : all_settings()) {
    const Tensors t = tensors_of(s, {9000, 70});
    const std::vector<std::vector<float>> x = random.tensors(t.sizes);
    F e = random.normal(t.elements);
    if (s.dense_below != 0) std::fill(e.end() - 70, e.end(), 0.0f);
    EncodeCase encode(s, t, x, e);
    const Outcome out = execute_reference(encode.work);
    EncodeCase undo(s, t, x, out.as<float>(encode.e_at));
    undo.work.id = KernelId::kSparseEncodeUndo;
    undo.work.memory[undo.out_at].bytes = out.memory[encode.out_at];
    undo.work.paired_ran = true;
    const F before = execute_reference(undo.work).as<float>(undo.e_at);
    for (size_t i = 0; i < e.size(); ++i)
      ASSERT_NEAR(before[i], s.error_decay == 0 ? 0.0f : e[i], 3e-6) << i;
  }
}

TEST(KernelsSparse, WhatIsNotFiniteRaisesTheFlag) {
  for (const SparseSettings& s : all_settings()) {
    const Tensors t = tensors_of(s, {70, 5000});
    for (const float bad : {std::nanf(""), -INFINITY}) {
      std::vector<std::vector<float>> x = {F(70, 1.0f), F(5000, 1.0f)};
      for (const auto& [tensor, at] : {std::pair{0, 69}, {1, 0}, {1, 4999}}) {
        x[tensor][at] = bad;
        EncodeCase encode(s, t, x, F(t.elements));
        EXPECT_EQ(execute_reference(encode.work).as<uint32_t>(encode.flags_at)[0], 1u);
        x[tensor][at] = 1;
      }
    }
  }
  // A sum of finite values, and a level, that float32 or bfloat16 has not.
  const SparseSettings s = settings_of(8, 1, 2, SparseIndex::kEliasFano, 1);
  const Tensors t = tensors_of(s, {8});
  const F large(8, 3.3e38f), largest(8, std::numeric_limits<float>::max());
  for (const auto& [x, e] : {std::pair{large, large}, {largest, F(8)}}) {
    EncodeCase encode(s, t, {x}, e);
    EXPECT_EQ(compare_on_all_targets(encode.work), "");
    EXPECT_EQ(execute_reference(encode.work).as<uint32_t>(encode.flags_at)[0], 1u);
  }
}

TEST(KernelsSparse, MeansOfManyRanksAreTheSumsInTheirOrder) {
  Random random(34);
  SparseSettings s = settings_of(64, 16, 32, SparseIndex::kEliasFano, 0);
  for (const uint32_t world : {1u, 2u, 5u, 8u, 9u, 17u}) {
    for (const SparseAverage average : {SparseAverage::kRanks, SparseAverage::kContributors}) {
      s.average = average;
      const Tensors t = tensors_of(s, {200});
      std::vector<uint8_t> rows;
      std::vector<F> q;
      std::vector<float> weights;
      for (uint32_t r = 0; r < world; ++r) {
        const std::vector<std::vector<float>> x = random.tensors({200});
        EncodeCase encode(s, t, x, F(200));
        const Outcome out = execute_reference(encode.work);
        const std::vector<uint8_t>& payload = out.memory[encode.out_at];
        rows.insert(rows.end(), payload.begin(), payload.end());
        q.emplace_back(x[0]);
        const F left = out.as<float>(encode.e_at);
        for (size_t i = 0; i < 200; ++i) q[r][i] -= left[i];
        weights.push_back(r % 3 == 1 ? 0.0f : 1.0f);
      }
      MeanCase mean(s, t, rows, weights);
      EXPECT_EQ(compare_on_all_targets(mean.work), "");
      const F y = mean.y(execute_reference(mean.work));
      for (size_t i = 0; i < 200; ++i) {
        float total = 0;
        uint32_t senders = 0, ranks = 0;
        for (uint32_t group = 0; group < world; group += 8) {
          float partial = 0;
          for (uint32_t r = group; r < std::min(world, group + 8); ++r) {
            if (weights[r] == 0) continue;
            partial += q[r][i];
            senders += q[r][i] != 0;
            ++ranks;
          }
          total += partial;
        }
        const uint32_t n = average == SparseAverage::kRanks ? ranks : senders;
        ASSERT_EQ(y[i], n == 0 ? 0 : total * (1.0f / static_cast<float>(n))) << world << ", " << i;
      }
    }
  }
}

// Number of a tensor's first block in Piece::message; returns how many there are, with the ranges
// of tensors that are sent as selections.
std::vector<NormRange> number_blocks(const SparseSettings& s, Tensors* t, uint64_t* blocks) {
  std::vector<NormRange> ranges;
  *blocks = 0;
  for (Piece& p : t->pieces) {
    p.message = static_cast<uint32_t>(*blocks);
    if (p.scale == 1) continue;
    ranges.push_back(
        {.first_block = *blocks, .blocks = sparse_blocks(s, p.count), .tensor = p.tensor});
    *blocks += ranges.back().blocks;
  }
  return ranges;
}

TEST(KernelsSparse, NormsAboveTheMedianAreBroughtDownToIt) {
  constexpr uint32_t kWorld = 5;
  Random random(36);
  for (const SparseSettings& s : all_settings()) {
    Tensors t = tensors_of(s, {kSanitized ? 4100u : 9000u, 0, 70});
    uint64_t blocks = 0;
    const std::vector<NormRange> ranges = number_blocks(s, &t, &blocks);
    // Rank 1 does not count; of the others the larger ones are 3 and 4.
    const std::vector<float> weights = {1, 0, 1, 1, 1}, scales = {1, 100, 0.5f, 3, 8};
    std::vector<uint8_t> rows;
    for (uint32_t r = 0; r < kWorld; ++r) {
      std::vector<std::vector<float>> x = random.tensors(t.sizes);
      for (std::vector<float>& values : x) {
        for (float& value : values) value *= scales[r];
      }
      EncodeCase encode(s, t, x, F(t.elements));
      const Outcome encoded = execute_reference(encode.work);
      const std::vector<uint8_t>& payload = encoded.memory[encode.out_at];
      rows.insert(rows.end(), payload.begin(), payload.end());
    }
    SparseArgs args{s};
    args.row_bytes = t.payload;
    args.world = kWorld;
    KernelCase squares(KernelId::kSparseSquares);
    squares.pieces = t.pieces;
    squares.set_args(args);
    auto& o = squares.named<kernels::SparseSquares>();
    o.rows = squares.flat(rows);
    o.squares = squares.flat(std::vector<double>(blocks * kWorld, -1));
    const size_t squares_at = o.squares.at();
    EXPECT_EQ(compare_on_all_targets(squares), "");
    const std::vector<double> of_blocks = execute_reference(squares).as<double>(squares_at);

    KernelCase median(KernelId::kSparseMedian);
    median.set_args(SparseMedianArgs{ranges.data(), ranges.size(), kWorld, 4});
    auto& m = median.named<kernels::SparseMedian>();
    m.squares = median.flat(of_blocks);
    std::vector<uint8_t> weight_bytes(4 * kWorld);
    std::memcpy(weight_bytes.data(), weights.data(), weight_bytes.size());
    m.weights = median.flat(weight_bytes);
    m.factors = median.flat(std::vector<float>(3 * kWorld, 7));
    const size_t factors_at = m.factors.at();
    EXPECT_EQ(compare_on_all_targets(median), "");
    const std::vector<float> factors = execute_reference(median).as<float>(factors_at);

    for (const NormRange& range : ranges) {
      // What a rank has sent is the mean of that rank alone.
      std::vector<float> norms;
      for (uint32_t r = 0; r < kWorld; ++r) {
        std::vector<float> only(kWorld, 0);
        only[r] = 1;
        MeanCase mean(s, t, rows, only);
        const F y = mean.y(execute_reference(mean.work));
        const uint64_t first = range.tensor == 0 ? 0 : t.sizes[0];
        double sum = 0;
        for (uint64_t i = 0; i < t.sizes[range.tensor]; ++i)
          sum += double{y[first + i]} * y[first + i];
        norms.push_back(static_cast<float>(std::sqrt(sum)));
      }
      EXPECT_TRUE(norms[2] < norms[0] && norms[0] < norms[3] && norms[3] < norms[4]);
      for (uint32_t r = 0; r < kWorld; ++r) {
        const float want = r < 3 ? 1 : norms[0] / norms[r];  // element 1 of four is the median
        EXPECT_NEAR(factors[range.tensor * kWorld + r], want, 1e-5f * want) << r;
      }
    }
    MeanCase mean(s, t, rows, weights, factors);
    EXPECT_EQ(compare_on_all_targets(mean.work), "");
    // The mean is that of the ranks, each multiplied.
    const F y = mean.y(execute_reference(mean.work));
    if (s.average == SparseAverage::kContributors) continue;
    F want(t.elements);
    for (uint32_t r = 0; r < kWorld; ++r) {
      if (weights[r] == 0) continue;
      std::vector<float> only(kWorld, 0);
      only[r] = 1;
      MeanCase one(s, t, rows, only);
      const F q = one.y(execute_reference(one.work));
      for (uint64_t i = 0; i < t.elements; ++i) {
        const uint32_t tensor = i < t.sizes[0] ? 0 : 2;
        const bool dense = is_dense(s, t.sizes[tensor]);
        want[i] += (dense ? 1.0f : factors[tensor * kWorld + r]) * q[i];
      }
    }
    for (uint64_t i = 0; i < t.elements; ++i) ASSERT_EQ(y[i], want[i] * 0.25f) << i;
  }
}

TEST(KernelsSparse, AnyBytesMayBeDecoded) {
  Random random(35);
  for (const SparseSettings& s : all_settings()) {
    const Tensors t = tensors_of(s, {kSanitized ? 4100u : 9000u, 70});
    for (int round = 0; round < 4; ++round) {
      std::vector<uint8_t> rows = random.bytes(3 * t.payload);
      if (round == 1) std::fill(rows.begin(), rows.end(), uint8_t{0xff});
      if (round == 2) std::fill(rows.begin(), rows.end(), uint8_t{0});
      MeanCase mean(s, t, rows, {1, 1, 1});
      EXPECT_EQ(compare_on_all_targets(mean.work), "");
      Tensors numbered = t;
      uint64_t blocks = 0;
      (void)number_blocks(s, &numbered, &blocks);
      SparseArgs args{s};
      args.row_bytes = t.payload;
      args.world = 3;
      KernelCase squares(KernelId::kSparseSquares);
      squares.pieces = numbered.pieces;
      squares.set_args(args);
      auto& o = squares.named<kernels::SparseSquares>();
      o.rows = squares.flat(rows);
      o.squares = squares.flat(std::vector<double>(3 * blocks));
      EXPECT_EQ(compare_on_all_targets(squares), "");
    }
  }
  // Two indices that are the same, and one that is out of range: nothing was sent.
  const SparseSettings s = settings_of(16, 3, 32, SparseIndex::kPacked);
  for (const uint8_t last : {uint8_t{0x12}, uint8_t{0x22}, uint8_t{0x21}}) {
    std::vector<uint8_t> row(sparse_bytes(s, 13));
    const Tensors t = tensors_of(s, {13});
    row[0] = last;  // indices 1 and 2, 2 and 2, 2 and 1
    const float values[2] = {5, 6};
    std::memcpy(&row[sparse_block(s, 13).index_bytes], values, 8);
    MeanCase mean(s, t, row, {1});
    EXPECT_EQ(compare_on_all_targets(mean.work), "");
    F want(13);
    if (last == 0x12) want[1] = 5, want[2] = 6;
    EXPECT_EQ(mean.y(execute_reference(mean.work)), want);
  }
}

}  // namespace
}  // namespace sotto::test
