// The 1-bit codec: encoder, server, decoder, scales, decisions.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <optional>

#include "core/base/bits.h"
#include "tests/support/kernel_cases.h"
#include "tests/support/kernel_targets.h"

namespace sotto::test {
namespace {

// Encoder over a whole layout. Memory indices are kept for the checks.
struct EncodeCase {
  EncodeCase(const Layout& layout, ScaleKind kind, const std::vector<std::vector<float>>& x,
             const std::vector<float>& c, float old_scale, const std::vector<uint8_t>* valid,
             std::optional<float> coefficient = std::nullopt)
      : work(KernelId::kOnebitEncode) {
    work.pieces = layout.by_chunk;
    EncodeArgs args{};
    args.scale = kind;
    work.set_args(args);
    auto& o = work.named<kernels::OnebitEncode>();
    o.x = work.list(x);
    o.to.c = work.flat(c);
    c_at = o.to.c.at();
    o.to.old_scales = work.flat(std::vector<float>{old_scale});
    o.to.bits = work.flat(std::vector<uint8_t>(layout.padded / 8, 0));
    bits_at = o.to.bits.at();
    o.to.sums = work.flat(std::vector<float>(layout.chunk_blocks, -1.0f));
    sums_at = o.to.sums.at();
    if (valid != nullptr) o.to.valid = work.flat(*valid);
    o.to.flags = work.flat(std::vector<uint32_t>{0});
    flags_at = o.to.flags.at();
    if (coefficient) o.coefficient = work.flat(std::vector<float>{*coefficient});
  }
  KernelCase work;
  size_t c_at = 0, bits_at = 0, sums_at = 0, flags_at = 0;
};

// Sum over the layout's blocks, by its chunks' ranges.
double total(const std::vector<float>& sums) {
  double sum = 0;
  for (const float s : sums) sum += s;
  return sum;
}

TEST(KernelsOnebit, EncodeEqualsTheReferenceOnEveryTarget) {
  Random random(3);
  for (const Layout& layout : all_layouts()) {
    for (const ScaleKind kind : {ScaleKind::kL2, ScaleKind::kL1}) {
      for (const int variant : {0, 1, 2, 3}) {
        SCOPED_TRACE(layout.elements());
        std::vector<std::vector<float>> x = random.tensors(layout.sizes);
        std::vector<float> c = random.normal(layout.padded);
        if (variant & 1) {
          for (auto& tensor : x) random.sprinkle(&tensor);
          random.sprinkle(&c);
        }
        const std::vector<uint8_t> valid = random.mask(layout.padded);
        const std::vector<uint8_t>* mask = variant & 2 ? &valid : nullptr;
        EXPECT_EQ(compare_on_all_targets(EncodeCase(layout, kind, x, c, 0.7f, mask).work), "");
        EncodeCase encode(layout, kind, x, c, 0.7f, mask, 0.8f);
        EXPECT_EQ(compare_on_all_targets(encode.work), "");
        EXPECT_EQ(compare_low_precision_sources<EncodeArgs>(encode.work), "");
        for (const bool ran : {false, true}) {
          KernelCase undo = encode.work;
          undo.id = KernelId::kOnebitEncodeUndo;
          undo.paired_ran = ran;
          EXPECT_EQ(compare_on_all_targets(undo), "");
          EXPECT_EQ(compare_low_precision_sources<EncodeArgs>(undo), "");
        }
      }
    }
  }
}

TEST(KernelsOnebit, EncodeFollowsTheFormulas) {
  Random random(4);
  const Layout layout = make_layout({5, 20000, 3, 16384, 77, 70001}, 4, 512, 2);
  const std::vector<std::vector<float>> x = random.tensors(layout.sizes);
  const std::vector<float> c = random.normal(layout.padded);
  const std::vector<uint8_t> valid = random.mask(layout.padded);
  const float old_scale = 0.6f;
  for (const ScaleKind kind : {ScaleKind::kL2, ScaleKind::kL1}) {
    EncodeCase encode(layout, kind, x, c, old_scale, &valid);
    const Outcome out = execute_reference(encode.work);
    const std::vector<float> found = out.as<float>(encode.c_at);
    const std::vector<uint8_t>& bits = out.memory[encode.bits_at];
    std::vector<double> sums(layout.chunk_blocks, 0.0);
    for (size_t t = 0; t < x.size(); ++t) {
      for (uint64_t i = 0; i < x[t].size(); ++i) {
        const uint64_t flat = layout.starts[t] + i;
        double expected = 0;
        if (get_bit(valid.data(), flat)) {
          expected = double{x[t][i]} + (c[flat] - (c[flat] >= 0 ? 1.0 : -1.0) * old_scale);
        }
        ASSERT_NEAR(found[flat], expected, 1e-6 * (1 + std::fabs(expected)));
        ASSERT_EQ(get_bit(bits.data(), flat), found[flat] >= 0);
        const uint64_t chunk = flat / layout.chunk;
        sums[layout.chunk_ranges[chunk].first_block + flat % layout.chunk / kNormBlock] +=
            kind == ScaleKind::kL2 ? expected * expected : std::fabs(expected);
      }
    }
    for (uint64_t i = layout.elements(); i < layout.padded; ++i) {
      ASSERT_TRUE(get_bit(bits.data(), i));
      ASSERT_EQ(found[i], c[i]) << "padding of c was touched";
    }
    const std::vector<float> blocks = out.as<float>(encode.sums_at);
    for (size_t b = 0; b < sums.size(); ++b) EXPECT_NEAR(blocks[b], sums[b], 1e-5 * sums[b]);
    EXPECT_EQ(out.as<uint32_t>(encode.flags_at)[0], 0u);
  }
}

// Residual after an encoding with scale s, as the next encoder computes it.
std::vector<float> residuals(const std::vector<float>& c, float s) {
  std::vector<float> e;
  for (const float v : c) e.push_back(v - (v >= 0 ? s : -s));
  return e;
}

// Scale of block sums through kNormFinish; checks the message.
float finish(const std::vector<float>& sums, uint64_t count, ScaleKind kind,
             uint32_t flags_before = 0, uint32_t* flags = nullptr) {
  KernelCase work(KernelId::kNormFinish);
  NormRange range;
  range.blocks = sums.size();
  NormArgs args{};
  args.ranges = &range;
  args.n = 1;
  args.scale = kind;
  work.set_args(args);
  auto& o = work.named<kernels::NormFinish>();
  o.sums = work.flat(sums);
  o.counts = work.flat(std::vector<uint64_t>{count});
  o.scales = work.flat(std::vector<float>{-1});
  const size_t scale = o.scales.at();
  o.message = work.flat(std::vector<uint8_t>(scale_message_bytes(1)));
  const size_t message = o.message.at();
  o.flags = work.flat(std::vector<uint32_t>{flags_before});
  const size_t flag = o.flags.at();
  EXPECT_EQ(compare_on_all_targets(work), "");
  const Outcome out = execute_reference(work);
  EXPECT_EQ(std::memcmp(out.memory[message].data(), out.memory[scale].data(), 4), 0);
  EXPECT_EQ(std::memcmp(out.memory[message].data() + 4, out.memory[flag].data(), 4), 0);
  if (flags != nullptr) *flags = out.as<uint32_t>(flag)[0];
  return out.as<float>(scale)[0];
}

TEST(KernelsOnebit, VectorOfCompressionAlone) {
  const Layout layout = make_layout({4}, 1, 8);
  const std::vector<float> zero(8, 0.0f);
  EncodeCase l2(layout, ScaleKind::kL2, {{3, -4, 0, -0.0f}}, zero, 0.0f, nullptr);
  const Outcome out = execute_reference(l2.work);
  EXPECT_EQ(out.memory[l2.bits_at][0], 0xbf);  // 1011, padding 1111
  const float s2 = finish(out.as<float>(l2.sums_at), 4, ScaleKind::kL2);
  EXPECT_EQ(s2, 2.5f);
  const std::vector<float> c = out.as<float>(l2.c_at);
  const std::vector<float> e = residuals({c.begin(), c.begin() + 4}, s2);
  EXPECT_EQ(e, (std::vector<float>{0.5f, -1.5f, -2.5f, -2.5f}));
  EncodeCase l1(layout, ScaleKind::kL1, {{3, -4, 0, -0.0f}}, zero, 0.0f, nullptr);
  const float s1 = finish(execute_reference(l1.work).as<float>(l1.sums_at), 4, ScaleKind::kL1);
  EXPECT_EQ(s1, 1.75f);
  double square = 0;
  for (const float v : residuals({c.begin(), c.begin() + 4}, s1)) square += double{v} * v;
  EXPECT_EQ(square, 12.75);
}

TEST(KernelsOnebit, PackedBytesOfTheTwoRankVector) {
  const Layout layout = make_layout({16}, 2, 8);
  std::vector<float> x0(16, 2.0f), x1(16);
  std::fill(x0.begin() + 8, x0.end(), -2.0f);
  for (size_t i = 0; i < 16; ++i) x1[i] = i % 2 == 0 ? 1.0f : -1.0f;
  const std::vector<float> zero(16, 0.0f);
  EncodeCase r0(layout, ScaleKind::kL2, {x0}, zero, 0.0f, nullptr);
  EncodeCase r1(layout, ScaleKind::kL2, {x1}, zero, 0.0f, nullptr);
  EXPECT_EQ(execute_reference(r0.work).memory[r0.bits_at], (std::vector<uint8_t>{0xff, 0x00}));
  EXPECT_EQ(execute_reference(r1.work).memory[r1.bits_at], (std::vector<uint8_t>{0xaa, 0xaa}));
}

// I4: ||q|| = ||c||; I6: the contraction; both from the kernels' own numbers.
TEST(KernelsOnebit, ScaleHasTheNormOfTheInput) {
  Random random(5);
  const uint64_t n = 100003;
  const Layout layout = make_layout({n}, 1, 8);
  const std::vector<float> zero(layout.padded, 0.0f);
  const std::vector<std::vector<float>> x = {random.normal(n)};
  EncodeCase l2(layout, ScaleKind::kL2, x, zero, 0.0f, nullptr);
  EncodeCase l1(layout, ScaleKind::kL1, x, zero, 0.0f, nullptr);
  const Outcome out = execute_reference(l2.work);
  const double s2 = finish(out.as<float>(l2.sums_at), n, ScaleKind::kL2);
  const double s1 = finish(execute_reference(l1.work).as<float>(l1.sums_at), n, ScaleKind::kL1);
  double norm2 = 0, norm1 = 0;
  for (const float v : x[0]) norm2 += double{v} * v, norm1 += std::fabs(v);
  EXPECT_NEAR(s2 * std::sqrt(double{n}) / std::sqrt(norm2), 1.0, 1e-6);
  const double rho = norm1 / std::sqrt(norm2 * static_cast<double>(n));
  double error2 = 0, error1 = 0;
  for (const float v : x[0]) {
    error2 += std::pow(v - (v >= 0 ? s2 : -s2), 2);
    error1 += std::pow(v - (v >= 0 ? s1 : -s1), 2);
  }
  EXPECT_NEAR(error2 / (2 * (1 - rho) * norm2), 1.0, 1e-5);
  EXPECT_NEAR(error1 / ((1 - rho * rho) * norm2), 1.0, 1e-5);
}

// I7: powers of two scale everything exactly. I1: residual and quantised value give c back.
TEST(KernelsOnebit, PowersOfTwoScaleExactly) {
  Random random(6);
  const Layout layout = make_layout({8193}, 1, 8);
  std::vector<std::vector<float>> x = {random.normal(8193)};
  std::vector<float> c = random.normal(layout.padded);
  EncodeCase one(layout, ScaleKind::kL2, x, c, 0.75f, nullptr);
  for (float& v : x[0]) v *= 0x1p-20f;
  for (float& v : c) v *= 0x1p-20f;
  EncodeCase small(layout, ScaleKind::kL2, x, c, 0.75f * 0x1p-20f, nullptr);
  const Outcome a = execute_reference(one.work);
  const Outcome b = execute_reference(small.work);
  EXPECT_EQ(a.memory[one.bits_at], b.memory[small.bits_at]);
  const std::vector<float> ca = a.as<float>(one.c_at), cb = b.as<float>(small.c_at);
  for (size_t i = 0; i < ca.size(); ++i) ASSERT_EQ(ca[i] * 0x1p-20f, cb[i]);
  const float sa = finish(a.as<float>(one.sums_at), 8193, ScaleKind::kL2);
  EXPECT_EQ(sa * 0x1p-20f, finish(b.as<float>(small.sums_at), 8193, ScaleKind::kL2));
  const std::vector<float> e = residuals(ca, sa);
  for (size_t i = 0; i < 8193; ++i) {
    const float q = ca[i] >= 0 ? sa : -sa;
    const float magnitude = std::fabs(ca[i]);
    if (magnitude >= sa / 2 && magnitude <= 2 * sa) {
      ASSERT_EQ(q + e[i], ca[i]);
    } else {
      ASSERT_NEAR(double{q} + e[i], ca[i], std::fabs(e[i]) * 0x1p-24);
    }
  }
}

TEST(KernelsOnebit, NonfiniteInputsAreZeroAndFlagged) {
  const Layout layout = make_layout({70}, 1, 8);
  const std::vector<float> zero(layout.padded, 0.0f);
  for (const float bad :
       {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
        std::numeric_limits<float>::quiet_NaN()}) {
    for (const uint64_t at : {0, 40, 63, 64, 69}) {
      std::vector<float> x(70, 1.0f);
      x[at] = bad;
      EncodeCase encode(layout, ScaleKind::kL2, {x}, zero, 0.0f, nullptr);
      EXPECT_EQ(compare_on_all_targets(encode.work), "");
      const Outcome out = execute_reference(encode.work);
      EXPECT_EQ(out.as<uint32_t>(encode.flags_at)[0], kFlagNonfinite);
      EXPECT_EQ(out.as<float>(encode.c_at)[at], 0.0f);
      // A masked one is of no interest.
      std::vector<uint8_t> valid(layout.padded / 8, 0xff);
      set_bit(valid.data(), at, false);
      EncodeCase masked(layout, ScaleKind::kL2, {x}, zero, 0.0f, &valid);
      EXPECT_EQ(compare_on_all_targets(masked.work), "");
      EXPECT_EQ(execute_reference(masked.work).as<uint32_t>(masked.flags_at)[0], 0u);
    }
  }
}

// Undo after an encoding gives c - x', before it the residual.
TEST(KernelsOnebit, UndoTakesTheEncodingBack) {
  Random random(7);
  const uint64_t n = 1025;
  const Layout layout = make_layout({n}, 1, 8);
  const std::vector<std::vector<float>> x = {random.normal(n)};
  const std::vector<float> c = random.normal(layout.padded);
  EncodeCase encode(layout, ScaleKind::kL2, x, c, 0.5f, nullptr);
  const Outcome encoded = execute_reference(encode.work);
  EncodeCase undo(layout, ScaleKind::kL2, x, encoded.as<float>(encode.c_at), 0.5f, nullptr);
  undo.work.id = KernelId::kOnebitEncodeUndo;
  undo.work.paired_ran = true;
  const std::vector<float> e = residuals(c, 0.5f);
  const std::vector<float> back = execute_reference(undo.work).as<float>(undo.c_at);
  const std::vector<float> coded = encoded.as<float>(encode.c_at);
  for (size_t i = 0; i < n; ++i) ASSERT_NEAR(back[i], e[i], std::fabs(coded[i]) * 0x1p-23);
  encode.work.id = KernelId::kOnebitEncodeUndo;
  const std::vector<float> never = execute_reference(encode.work).as<float>(encode.c_at);
  for (size_t i = 0; i < n; ++i) ASSERT_EQ(never[i], e[i]);
}

struct ServerCase {
  ServerCase(const Layout& layout, uint64_t rank, uint32_t world, ScaleKind kind, Random* random,
             bool specials, const std::vector<uint8_t>* valid)
      : work(KernelId::kOnebitServer), scales(world), row_bytes(layout.chunk / 8 + 5) {
    work.pieces = layout.of_server(rank);
    ServerArgs args{};
    args.row_bytes = row_bytes;
    args.valid_base = rank * layout.chunk;
    args.instances = 1;
    args.world = world;
    args.scale = kind;
    work.set_args(args);
    rows = random->bytes(world * row_bytes);
    for (std::vector<float>& s : scales) s = random->positive(1, 1.0f, 0.1f);
    c = random->normal(layout.chunk);
    if (specials) random->sprinkle(&c);
    auto& o = work.named<kernels::OnebitServer>();
    o.rows = work.flat(rows);
    o.messages = work.flat(make_messages(scales));
    o.c = work.flat(c);
    o.old_scales = work.flat(std::vector<float>{0.3f});
    o.bits = work.flat(std::vector<uint8_t>(layout.chunk / 8));
    bits_at = o.bits.at();
    o.sums = work.flat(std::vector<float>(layout.chunk_ranges[rank].blocks, -1.0f));
    sums_at = o.sums.at();
    if (valid != nullptr) o.valid = work.flat(*valid);
    o.new_c = work.flat(std::vector<float>(layout.chunk, 9.0f));
    new_at = o.new_c.at();
  }
  KernelCase work;
  std::vector<std::vector<float>> scales;
  uint64_t row_bytes;
  std::vector<uint8_t> rows;
  std::vector<float> c;
  size_t new_at = 0, bits_at = 0, sums_at = 0;
};

TEST(KernelsOnebit, ServerEqualsTheReferenceOnEveryTarget) {
  Random random(8);
  for (const Layout& layout : all_layouts()) {
    for (const uint32_t world : {1u, 2u, 3u, 4u, 7u, 8u, 9u, 16u, 21u}) {
      if (world > 4 && layout.elements() > 70000 && world != 9) continue;
      for (const int variant : {0, 1, 2, 3}) {
        SCOPED_TRACE(std::to_string(layout.elements()) + " world " + std::to_string(world));
        const ScaleKind kind = variant & 1 ? ScaleKind::kL1 : ScaleKind::kL2;
        const std::vector<uint8_t> valid = random.mask(layout.padded);
        ServerCase server(layout, layout.world - 1, world, kind, &random, variant & 1,
                          variant & 2 ? &valid : nullptr);
        EXPECT_EQ(compare_on_all_targets(server.work), "");
      }
    }
  }
}

TEST(KernelsOnebit, ServerFollowsTheFormulas) {
  Random random(9);
  const Layout layout = make_layout({5, 20000, 3, 16384}, 2, 512);
  for (const uint32_t world : {2u, 5u, 8u, 11u, 16u}) {
    const std::vector<uint8_t> valid = random.mask(layout.padded);
    ServerCase server(layout, 1, world, ScaleKind::kL2, &random, false, &valid);
    const Outcome out = execute_reference(server.work);
    const std::vector<float> found = out.as<float>(server.new_at);
    double norm = 0;
    const uint64_t real = layout.elements() - layout.chunk;
    for (uint64_t i = 0; i < layout.chunk; ++i) {
      const bool used = i < real && get_bit(valid.data(), layout.chunk + i);
      double a = 0;
      for (uint32_t r = 0; used && r < world; ++r) {
        const bool bit = get_bit(server.rows.data() + r * server.row_bytes, i);
        a += (bit ? 1.0 : -1.0) * server.scales[r][0] / world;
      }
      if (used) a += server.c[i] - (server.c[i] >= 0 ? 0.3 : -0.3);
      if (i < real) {
        ASSERT_NEAR(found[i], a, 2e-6);
      } else {
        ASSERT_EQ(found[i], 9.0f);  // padding is not written
      }
      ASSERT_EQ(get_bit(out.memory[server.bits_at].data(), i), !used || found[i] >= 0);
      norm += a * a;
    }
    EXPECT_NEAR(total(out.as<float>(server.sums_at)), norm, 1e-5 * norm);
  }
}

// The order of 1.6: groups of 8 ranks, each from 0, then the groups.
TEST(KernelsOnebit, ServerAddsRanksInGroupsOfEight) {
  const uint32_t world = 16;
  const Layout layout = make_layout({64}, 1, 64);
  KernelCase work(KernelId::kOnebitServer);
  work.pieces = layout.of_server(0);
  ServerArgs args{};
  args.row_bytes = 8;
  args.instances = 1;
  args.world = world;
  args.scale = ScaleKind::kL2;
  work.set_args(args);
  // Terms: 2^24 in rank 0, 1 in all others, so the order shows.
  std::vector<std::vector<float>> scales(world, {16.0f});
  scales[0][0] = 0x1p28f;
  auto& o = work.named<kernels::OnebitServer>();
  o.rows = work.flat(std::vector<uint8_t>(world * 8, 0xff));
  o.messages = work.flat(make_messages(scales));
  o.c = work.flat(std::vector<float>(64, 0.0f));
  o.old_scales = work.flat(std::vector<float>{0.0f});
  o.bits = work.flat(std::vector<uint8_t>(8));
  o.sums = work.flat(std::vector<float>(1));
  o.new_c = work.flat(std::vector<float>(64, 0.0f));
  const size_t c = o.new_c.at();
  EXPECT_EQ(compare_on_all_targets(work), "");
  // First group: 2^24 + 1 + ... stays 2^24; second: 8; all in one row would stay 2^24.
  for (const float v : execute_reference(work).as<float>(c)) EXPECT_EQ(v, 0x1p24f + 8);
}

TEST(KernelsOnebit, DecodeEqualsTheReferenceAndTheRule) {
  Random random(10);
  for (const Layout& layout : all_layouts()) {
    for (const bool masks : {false, true}) {
      SCOPED_TRACE(layout.elements());
      KernelCase work(KernelId::kOnebitDecode);
      work.pieces = layout.by_chunk;
      const std::vector<uint8_t> bits = random.bytes(layout.padded / 8 + 1);
      const std::vector<uint8_t> valid = random.mask(layout.padded);
      std::vector<std::vector<float>> scales(layout.world);
      for (std::vector<float>& s : scales) s = random.positive(1, 1.0f, 0.1f);
      auto& o = work.named<kernels::OnebitDecode>();
      o.bits = work.flat(bits);
      o.messages = work.flat(make_messages(scales));
      o.y = work.list(random.tensors(layout.sizes));
      const size_t y = o.y.at();
      if (masks) o.valid = work.flat(valid);
      EXPECT_EQ(compare_on_all_targets(work), "");
      const Outcome out = execute_reference(work);
      for (size_t t = 0; t < layout.sizes.size(); ++t) {
        const std::vector<float> found = out.as<float>(y + t);
        for (uint64_t i = 0; i < found.size(); ++i) {
          const uint64_t flat = layout.starts[t] + i;
          const float r = scales[flat / layout.chunk][0];
          const bool masked = masks && !get_bit(valid.data(), flat);
          ASSERT_EQ(found[i], masked ? 0.0f : get_bit(bits.data(), flat) ? r : -r);
        }
      }
    }
  }
}

TEST(KernelsOnebit, ScalesOfSpecialSums) {
  const float inf = std::numeric_limits<float>::infinity();
  uint32_t flags = 0;
  EXPECT_EQ(finish({}, 0, ScaleKind::kL2), 0.0f);
  EXPECT_EQ(finish({4.0f, 5.0f}, 0, ScaleKind::kL2), 0.0f);
  EXPECT_EQ(finish({4.0f, 5.0f}, 1, ScaleKind::kL2, 0, &flags), 3.0f);
  EXPECT_EQ(flags, 0u);
  EXPECT_EQ(finish({inf}, 3, ScaleKind::kL2, 0, &flags), 0.0f);
  EXPECT_EQ(flags, kFlagNonfinite);
  EXPECT_EQ(finish({1.0f}, 1, ScaleKind::kL1, kFlagNonfinite, &flags), 1.0f);
  EXPECT_EQ(flags, kFlagNonfinite);
}

TEST(KernelsOnebit, GateDecidesFromFlagsAndThePriorWord) {
  const auto decide = [](const std::vector<uint32_t>& flags, const uint32_t* prior) {
    KernelCase work(KernelId::kGate);
    GateArgs args{};
    args.message_bytes = scale_message_bytes(2);
    args.world = static_cast<uint32_t>(flags.size());
    args.fail_word = kSkipServer;
    work.set_args(args);
    std::vector<uint32_t> area;
    for (const uint32_t f : flags) area.insert(area.end(), {0x3f800000u, 0x3f800000u, f});
    auto& o = work.named<kernels::Gate>();
    o.messages = work.flat(area);
    if (prior != nullptr) o.prior = work.flat(std::vector<uint32_t>{*prior});
    o.word = work.flat(std::vector<uint32_t>{0});
    const size_t word = o.word.at();
    EXPECT_EQ(compare_on_all_targets(work), "");
    return execute_reference(work).as<uint32_t>(word)[0];
  };
  const uint32_t commit = kCommit, skip = kSkipNonfinite;
  EXPECT_EQ(decide({0, 0, 0}, nullptr), kCommit);
  EXPECT_EQ(decide({0, 0, 1}, nullptr), kSkipServer);
  EXPECT_EQ(decide({0, 0}, &commit), kCommit);
  EXPECT_EQ(decide({1, 0}, &commit), kSkipServer);
  EXPECT_EQ(decide({0, 0}, &skip), kSkipNonfinite);
  EXPECT_EQ(decide({1, 0}, &skip), kSkipNonfinite);
}

TEST(KernelsOnebit, PredicateDecidesWhetherAKernelRuns) {
  for (const KernelTarget& target : kernel_targets()) {
    SCOPED_TRACE(target.name);
    Device& device = *target.device;
    std::vector<uint32_t> word{kSkipNonfinite};  // where the device reaches it
    std::vector<uint8_t> bytes(70), copy(70);
    const Operand operand{bytes.data()};
    const FillArgs args{9};
    KernelCall call;
    call.id = KernelId::kFill;
    call.operands = std::span(&operand, 1);
    call.args = &args;
    call.bytes = bytes.size();
    call.predicate = word.data();
    call.expect = kCommit;
    ASSERT_TRUE(device.launch(0, call, {}).ok());
    EXPECT_EQ(bytes, std::vector<uint8_t>(70, 0));
    word[0] = kCommit;
    ASSERT_TRUE(device.launch(0, call, {}).ok());
    EXPECT_EQ(bytes, std::vector<uint8_t>(70, 9));
    const auto copied = [&](const uint32_t* predicate, uint32_t expect) {
      EXPECT_TRUE(device.copy(0, copy.data() + 1, bytes.data() + 1, 68, predicate, expect).ok());
      return copy[1] == 9;
    };
    EXPECT_FALSE(copied(word.data(), kSkipServer));
    EXPECT_TRUE(copied(nullptr, 0));
    EXPECT_EQ(copy.front(), 0);
    EXPECT_EQ(copy.back(), 0);
    EXPECT_EQ(std::count(copy.begin(), copy.end(), 9), 68);
    EXPECT_FALSE(device.launch(1, call, {}).ok());
  }
}

}  // namespace
}  // namespace sotto::test
