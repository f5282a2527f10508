// Thread blocks with one plain run: what makes a run plain and what just does not, with the bits of
// the reference both ways. Kernels that write bits show by their shuffles which way they went.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/kernels/norms.h"
#include "core/kernels/onebit.h"
#include "core/kernels/onebit_lamb.h"
#include "core/kernels/quant.h"
#include "tests/emulation/simt/simt.h"
#include "tests/support/kernel_cases.h"
#include "tests/support/kernel_targets.h"

namespace sotto::test {
namespace {

constexpr uint64_t kSpare = 64;  // elements of flat operands behind the pieces

// One tensor, whose elements 0 .. count - 1 are at `flat`.
std::vector<Piece> one_piece(uint64_t count, uint64_t flat = 0, uint32_t lane = 0) {
  Piece p;
  p.flat = flat;
  p.count = count;
  p.lane = lane;
  return {p};
}

// Shuffles of one thread block: of the steps in which neighbours get the words of their bits, or of
// the rounds in which they get the bytes, and of the 5 steps that fold the lanes of the sum.
constexpr uint64_t kFold = 5 * 32;
constexpr uint64_t kPlain = 3 * 256 + kFold;
constexpr uint64_t of_rounds(uint64_t rounds) { return rounds * 256 + kFold; }

uint64_t shuffles(const KernelCase& work) {
  static const std::vector<KernelTarget> targets = kernel_targets();
  const uint64_t before = simt::collectives();
  EXPECT_EQ(execute(work, *targets[0].device, 0).error, "");
  return simt::collectives() - before;
}

KernelCase encode_case(std::vector<Piece> pieces, uint64_t flat_elements, bool specials) {
  Random random(31);
  KernelCase work(KernelId::kOnebitEncode);
  work.pieces = std::move(pieces);
  EncodeArgs args{};
  args.scale = ScaleKind::kL2;
  work.set_args(args);
  auto& o = work.named<kernels::OnebitEncode>();
  std::vector<std::vector<float>> x(2, random.normal(flat_elements));
  std::vector<float> c = random.normal(flat_elements);
  if (specials) {
    random.sprinkle(&x[0]);
    random.sprinkle(&c);
  }
  o.x = work.list(x);
  work.memory[o.x.memory[1]].misalign = 0;
  o.to.c = work.flat(c);
  o.to.old_scales = work.flat(std::vector<float>{0.7f});
  o.to.bits = work.flat(std::vector<uint8_t>(flat_elements / 8 + 4, 0x55));
  o.to.sums = work.flat(std::vector<float>(4, -1.0f));
  o.to.flags = work.flat(std::vector<uint32_t>{0});
  return work;
}

TEST(KernelsPlain, EncoderTakesThePlainWayOfWholeBlocks) {
  for (const bool specials : {false, true}) {
    for (const uint64_t count : {kNormBlock, 2 * kNormBlock}) {
      const KernelCase work = encode_case(one_piece(count), count + kSpare, specials);
      EXPECT_EQ(compare_on_all_targets(work), "");
      EXPECT_EQ(shuffles(work), count / kNormBlock * kPlain);
    }
  }
}

// The second block has one element; the first one lacks one, or four.
TEST(KernelsPlain, EncoderLeavesThePlainWayAtTheBordersOfBlocks) {
  const uint64_t n = kNormBlock;
  for (const uint64_t count : {n - 4, n - 1, n + 1, n + 1025}) {
    const KernelCase work = encode_case(one_piece(count), 2 * n, true);
    EXPECT_EQ(compare_on_all_targets(work), "");
    const uint64_t left = count < n ? 0 : count - n;
    EXPECT_EQ(shuffles(work), left == 0 ? of_rounds(8) : kPlain + of_rounds((left + 1023) / 1024));
  }
  // A block that begins with other elements than its first.
  const KernelCase late = encode_case(one_piece(2 * n - 8, 8, 8), 3 * n, true);
  EXPECT_EQ(compare_on_all_targets(late), "");
  EXPECT_EQ(shuffles(late), of_rounds(8) + kPlain);
}

TEST(KernelsPlain, EncoderTakesTensorsThatEndInABlockTheGeneralWay) {
  const uint64_t n = kNormBlock;
  for (const uint64_t border : {n, n + 4, n - 1}) {
    std::vector<Piece> pieces = one_piece(border);
    Piece second;
    second.flat = border;
    second.count = 2 * n - border;
    second.block = border / n;
    second.lane = static_cast<uint32_t>(border % n);
    second.tensor = 1;
    pieces.push_back(second);
    const KernelCase work = encode_case(pieces, 2 * n, true);
    EXPECT_EQ(compare_on_all_targets(work), "");
    // From n - 1 on, elements of the second block are not aligned.
    const uint64_t first = border < n ? of_rounds(8) : kPlain;
    EXPECT_EQ(shuffles(work), first + (border == n ? kPlain : of_rounds(8))) << border;
  }
}

TEST(KernelsPlain, EncoderTakesPaddingTheGeneralWay) {
  std::vector<Piece> pieces = one_piece(kNormBlock);
  pieces[0].tensor = kNoTensor;
  const KernelCase work = encode_case(pieces, kNormBlock, false);
  EXPECT_EQ(compare_on_all_targets(work), "");
  EXPECT_EQ(shuffles(work), of_rounds(8));
}

using Operands = kernels::OnebitEncodeOperands<OperandMemory>;
struct Change {
  const char* what;
  std::function<void(KernelCase*, Operands*)> make;
};

TEST(KernelsPlain, EncoderTakesWhatIsNotPlainTheGeneralWay) {
  const Change changes[] = {
      {"x one element off", [](KernelCase* w, Operands* o) { w->memory[o->x.at()].misalign = 4; }},
      {"c one element off",
       [](KernelCase* w, Operands* o) { w->memory[o->to.c.at()].misalign = 4; }},
      {"bits one byte off",
       [](KernelCase* w, Operands* o) { w->memory[o->to.bits.at()].misalign = 1; }},
      {"bits that begin inside a word", [](KernelCase* w, Operands*) { w->pieces[0].flat = 8; }},
      {"a mask of ones",
       [](KernelCase* w, Operands* o) {
         o->to.valid = w->flat(std::vector<uint8_t>(kNormBlock / 8 + 8, 0xff));
       }},
      {"a mask", [](KernelCase* w,
                    Operands* o) { o->to.valid = w->flat(Random(9).mask(kNormBlock + kSpare)); }},
      {"a tensor that is not the first element's neighbour",
       [](KernelCase* w, Operands*) { w->pieces[0].offset = 1; }},
  };
  for (const Change& change : changes) {
    SCOPED_TRACE(change.what);
    KernelCase work = encode_case(one_piece(kNormBlock), kNormBlock + kSpare, true);
    change.make(&work, &work.named<kernels::OnebitEncode>());
    EXPECT_EQ(compare_on_all_targets(work), "");
    EXPECT_EQ(shuffles(work), of_rounds(8));
  }
  // As well aligned as before, at another place.
  KernelCase work = encode_case(one_piece(kNormBlock, 32), kNormBlock + kSpare, true);
  work.pieces[0].offset = 4;
  work.memory[work.named<kernels::OnebitEncode>().x.at()].misalign = 16;
  EXPECT_EQ(compare_on_all_targets(work), "");
  EXPECT_EQ(shuffles(work), kPlain);
  EXPECT_EQ(compare_low_precision_sources<EncodeArgs>(work), "");
  KernelCase narrow = with_low_precision_source(work, Dtype::kBF16);
  EncodeArgs args{};
  args.scale = ScaleKind::kL2;
  args.source = Dtype::kBF16;
  narrow.set_args(args);
  EXPECT_EQ(shuffles(narrow), of_rounds(8));
}

// The momentum is floats, or bits at any place.
TEST(KernelsPlain, EncoderOfMomentumTakesThePlainWay) {
  Random random(32);
  const uint64_t all = kNormBlock + kSpare;
  for (const uint64_t flat : {0u, 4u, 32u, 34u}) {
    for (const bool bits : {false, true}) {
      SCOPED_TRACE(std::to_string(flat) + (bits ? " bits" : " floats"));
      KernelCase work(KernelId::kOnebitLambEncode);
      work.pieces = one_piece(kNormBlock, flat);
      EncodeArgs args{};
      args.scale = ScaleKind::kL1;
      args.bits_base = flat;
      work.set_args(args);
      auto& o = work.named<kernels::OnebitLambEncode>();
      o.g = work.list(std::vector<std::vector<float>>{random.normal(kNormBlock)});
      if (bits) {
        o.m.bits = work.flat(random.bytes(all / 8));
        o.m.messages = work.flat(make_messages({{0.5f}}));
      } else {
        o.m.floats = work.flat(random.normal(all));
      }
      GroupScalars s;
      s.b1 = 0.9f, s.one_minus_b1 = 0.1f;
      o.scalars = work.flat(std::vector<GroupScalars>{s});
      TensorState state;
      state.scaling_coeff = 1.25;
      o.states = work.flat(std::vector<TensorState>{state});
      o.clip = work.flat(std::vector<float>{0.75f});
      o.to.c = work.flat(random.normal(all));
      o.to.old_scales = work.flat(std::vector<float>{0.7f});
      o.to.bits = work.flat(std::vector<uint8_t>(all / 8, 0x55));
      o.to.sums = work.flat(std::vector<float>(1, -1.0f));
      o.to.flags = work.flat(std::vector<uint32_t>{0});
      EXPECT_EQ(compare_on_all_targets(work), "");
      EXPECT_EQ(shuffles(work), flat % 4 == 0 ? kPlain : of_rounds(8));
    }
  }
}

KernelCase server_case(uint32_t world, uint64_t row_bytes, Random* random) {
  const uint64_t n = kNormBlock + kSpare;
  KernelCase work(KernelId::kOnebitServer);
  work.pieces = one_piece(kNormBlock);
  ServerArgs args{};
  args.row_bytes = row_bytes;
  args.instances = 1;
  args.world = world;
  args.scale = ScaleKind::kL2;
  work.set_args(args);
  std::vector<std::vector<float>> scales(world);
  for (std::vector<float>& s : scales) s = random->positive(1, 1.0f, 0.1f);
  auto& o = work.named<kernels::OnebitServer>();
  o.rows = work.flat(random->bytes(world * row_bytes + 16));
  o.messages = work.flat(make_messages(scales));
  o.c = work.flat(random->normal(n));
  o.old_scales = work.flat(std::vector<float>{0.3f});
  o.bits = work.flat(std::vector<uint8_t>(n / 8));
  o.sums = work.flat(std::vector<float>(1, -1.0f));
  o.new_c = work.flat(std::vector<float>(n, 9.0f));
  return work;
}

TEST(KernelsPlain, ServerTakesThePlainWayForRowsAnywhere) {
  Random random(33);
  for (const uint32_t world : {1u, 4u, 8u, 9u, 17u}) {
    for (const uint64_t row_bytes : {kNormBlock / 8, kNormBlock / 8 + 5}) {
      KernelCase work = server_case(world, row_bytes, &random);
      auto& o = work.named<kernels::OnebitServer>();
      work.memory[o.rows.at()].misalign = 3;
      EXPECT_EQ(compare_on_all_targets(work), "") << world;
      EXPECT_EQ(shuffles(work), kPlain);
      work.memory[o.new_c.at()].misalign = 4;
      EXPECT_EQ(compare_on_all_targets(work), "") << world;
      EXPECT_EQ(shuffles(work), of_rounds(8));
      work.memory[o.new_c.at()].misalign = 0;
      o.valid = work.flat(random.mask(kNormBlock + kSpare));
      EXPECT_EQ(compare_on_all_targets(work), "") << world;
      EXPECT_EQ(shuffles(work), of_rounds(8));
    }
  }
}

// Kernels that write no bits: the same elements with every alignment of what they read and write.
struct Place {
  uint64_t count, flat, target;
  uint32_t misalign;  // of the output
};
std::vector<Place> places() {
  std::vector<Place> all;
  for (const uint64_t count : {kNormBlock - 1, kNormBlock, kNormBlock + 4, 2 * kNormBlock + 1}) {
    for (const uint64_t flat : {0u, 1u, 2u, 4u, 8u, 12u}) {
      for (const uint64_t target : {0u, 1u, 4u, 8u}) {
        for (const uint32_t misalign : {0u, 4u, 12u})
          all.push_back({count, flat, target, misalign});
      }
    }
  }
  return all;
}

TEST(KernelsPlain, DecoderHasTheSameBitsAtEveryPlace) {
  Random random(34);
  const uint64_t all = 2 * kNormBlock + kSpare;
  const std::vector<uint8_t> bits = random.bytes(all / 8);
  for (const Place& place : places()) {
    SCOPED_TRACE(std::to_string(place.count) + " from " + std::to_string(place.flat) + " to " +
                 std::to_string(place.target) + " + " + std::to_string(place.misalign));
    KernelCase work(KernelId::kOnebitDecode);
    work.pieces = one_piece(place.count, place.flat);
    work.pieces[0].target = place.target;
    auto& o = work.named<kernels::OnebitDecode>();
    o.bits = work.flat(bits);
    o.messages = work.flat(make_messages({{0.625f}}));
    o.y = work.list(std::vector<std::vector<float>>{std::vector<float>(all, 5.0f)});
    work.memory[o.y.at()].misalign = place.misalign;
    EXPECT_EQ(compare_on_all_targets(work), "");
  }
}

constexpr std::pair<CodecKind, uint32_t> kFormats[] = {
    {CodecKind::kBf16, 0},   {CodecKind::kFp16, 0},  {CodecKind::kInt8, 32},
    {CodecKind::kInt8, 512}, {CodecKind::kInt4, 32}, {CodecKind::kInt4, 128}};

TEST(KernelsPlain, DecoderOfIntegersAndHalvesHasTheSameBitsAtEveryPlace) {
  Random random(35);
  const uint64_t all = 2 * kNormBlock + kSpare;
  for (const auto& [kind, block] : kFormats) {
    const std::vector<uint8_t> payload = random.bytes(payload_unit(kind, block).bytes_of(2 * all));
    for (const Place& place : places()) {
      if (place.misalign == 12 || place.target == 1) continue;
      SCOPED_TRACE(std::to_string(static_cast<int>(kind)) + ": " + std::to_string(place.count) +
                   " from " + std::to_string(place.flat) + " to " + std::to_string(place.target));
      KernelCase work(KernelId::kQuantDecode);
      work.pieces = one_piece(place.count, place.flat);
      work.pieces[0].target = place.target;
      QuantArgs args{};
      args.kind = kind;
      args.block = block;
      work.set_args(args);
      auto& o = work.named<kernels::QuantDecode>();
      o.payload = work.flat(payload);
      work.memory[o.payload.at()].misalign = place.misalign == 4 ? 2 : 0;
      o.y = work.list(std::vector<std::vector<float>>{std::vector<float>(all, 5.0f)});
      work.memory[o.y.at()].misalign = place.misalign;
      EXPECT_EQ(compare_on_all_targets(work), "");
    }
  }
}

// With padding up to `all` elements, since calls have whole blocks of integers.
std::vector<Piece> filled_up(uint64_t count, uint64_t all) {
  std::vector<Piece> pieces = one_piece(count);
  if (count == all) return pieces;
  Piece padding = pieces[0];
  padding.flat = count;
  padding.count = all - count;
  padding.tensor = kNoTensor;
  padding.block = count / kNormBlock;
  padding.lane = static_cast<uint32_t>(count % kNormBlock);
  pieces.push_back(padding);
  return pieces;
}

TEST(KernelsPlain, EncodersOfIntegersAndHalvesHaveTheSameBitsAtEveryPlace) {
  Random random(37);
  const uint64_t all = 2 * kNormBlock;
  for (const auto& [kind, block] : kFormats) {
    for (const uint64_t count : {kNormBlock - 1, kNormBlock, all}) {
      for (const bool residual : {false, true}) {
        std::vector<std::vector<float>> x = {random.normal(count)};
        random.sprinkle(&x[0]);
        const std::vector<float> e = random.normal(all);
        for (const uint32_t misalign : {0u, 4u, 12u}) {
          for (const uint32_t of_e : {0u, 4u}) {
            SCOPED_TRACE(std::to_string(static_cast<int>(kind)) + ": " + std::to_string(count));
            KernelCase work(KernelId::kQuantEncode);
            work.pieces = filled_up(count, all);
            QuantArgs args{};
            args.kind = kind;
            args.block = block;
            work.set_args(args);
            auto& o = work.named<kernels::QuantEncode>();
            o.x = work.list(x);
            work.memory[o.x.at()].misalign = misalign;
            if (residual) {
              o.e = work.flat(e);
              work.memory[o.e.at()].misalign = of_e;
            }
            o.payload =
                work.flat(std::vector<uint8_t>(payload_unit(kind, block).bytes_of(all), 0xee));
            o.flags = work.flat(std::vector<uint32_t>{0});
            EXPECT_EQ(compare_on_all_targets(work), "");
          }
        }
      }
    }
  }
}

TEST(KernelsPlain, ServersOfIntegersAndHalvesHaveTheSameBitsForRowsAnywhere) {
  Random random(38);
  for (const auto& [kind, block] : kFormats) {
    const uint64_t payload = payload_unit(kind, block).bytes_of(kNormBlock);
    for (const uint64_t count : {kNormBlock - 1, kNormBlock}) {
      for (const uint64_t apart : {0u, 2u, 4u, 8u}) {
        for (const uint32_t world : {1u, 4u, 9u}) {
          SCOPED_TRACE(std::to_string(static_cast<int>(kind)) + ": " + std::to_string(count) +
                       " apart " + std::to_string(apart));
          KernelCase work(KernelId::kQuantServer);
          work.pieces = filled_up(count, kNormBlock);
          QuantArgs args{};
          args.kind = kind;
          args.block = block;
          args.world = world;
          args.row_bytes = payload + apart;
          work.set_args(args);
          auto& o = work.named<kernels::QuantServer>();
          o.rows = work.flat(random.bytes(world * args.row_bytes));
          o.e = work.flat(random.normal(kNormBlock));
          o.new_e = work.flat(std::vector<float>(kNormBlock));
          o.payload = work.flat(std::vector<uint8_t>(payload, 0xee));
          o.flags = work.flat(std::vector<uint32_t>{0});
          EXPECT_EQ(compare_on_all_targets(work), "");
          work.memory[o.rows.at()].misalign = 2;
          EXPECT_EQ(compare_on_all_targets(work), "");
        }
      }
    }
  }
}

TEST(KernelsPlain, SumsOfSquaresHaveTheSameBitsAtEveryPlace) {
  Random random(36);
  for (const uint64_t count : {kNormBlock - 1, kNormBlock, 2 * kNormBlock + 1}) {
    for (const uint32_t misalign : {0u, 4u, 12u}) {
      KernelCase work(KernelId::kSumSquares);
      work.pieces = one_piece(count);
      work.set_args(SourceArgs{});
      auto& o = work.named<kernels::SumSquares>();
      o.x = work.list(std::vector<std::vector<float>>{random.normal(count)});
      work.memory[o.x.at()].misalign = misalign;
      o.sums = work.flat(std::vector<float>(3, -1.0f));
      EXPECT_EQ(compare_on_all_targets(work), "") << count << " " << misalign;
      EXPECT_EQ(compare_low_precision_sources<SourceArgs>(work), "") << count;
    }
  }
}

}  // namespace
}  // namespace sotto::test
