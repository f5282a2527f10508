// Every row of the table of codecs has all its parts: words, a unit, slots, kernels, texts.
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include "core/codec/coding.h"
#include "core/codec/compressed.h"
#include "core/config/codec.h"

namespace sotto::test {
namespace {

std::vector<std::string> words_of(const CodecRow& row) {
  std::vector<std::string> words{""};
  for (const char c : row.words) {
    if (c == '|') {
      words.emplace_back();
    } else {
      words.back() += c;
    }
  }
  return words;
}

CodecSettings settings_of(std::string_view word) {
  return parse_codec(fmt::format(R"({{"type": "{}"}})", word)).take();
}

TEST(CodecTable, NumbersThatStandInSignatures) {
  const std::map<std::string_view, int> numbers{{"onebit", 1}, {"bf16", 2}, {"fp16", 3},
                                                {"int8", 4},   {"int4", 5}, {"topk", 6}};
  for (const auto& [name, number] : numbers)
    EXPECT_EQ(static_cast<int>(settings_of(name).kind), number) << name;
  std::set<CodecKind> taken;
  for (const CodecRow& row : kCodecs) EXPECT_TRUE(taken.insert(row.kind).second) << row.name();
}

TEST(CodecTable, EveryWordMakesItsCodec) {
  std::set<std::string> all;
  for (const CodecRow& row : kCodecs) {
    EXPECT_EQ(codec_name(row.kind), row.name());
    for (const std::string& word : words_of(row)) {
      EXPECT_TRUE(all.insert(word).second) << word;
      const CodecSettings s = settings_of(word);
      EXPECT_EQ(s.kind, row.kind) << word;
      EXPECT_EQ(s.block, row.block) << word;
      EXPECT_EQ(s.residual, row.residual != ResidualUse::kOnRequest) << word;
      EXPECT_EQ(s.server_residual(), s.residual && !row.sparse) << word;
      EXPECT_GT(s.bits_per_element(2), 0) << word;
      EXPECT_LE(s.bits_per_element(2), 16) << word;
      if (row.sparse) continue;
      EXPECT_EQ(s.chunk_align % s.unit().elements, 0u) << word;
      EXPECT_GT(s.unit().bytes, 0u) << word;
    }
  }
}

TEST(CodecTable, AnUnknownNameIsRefusedWithTheAllowedNames) {
  const Status status = parse_codec(R"({"type": "int9"})").status();
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  for (const CodecRow& row : kCodecs) {
    for (const std::string& word : words_of(row))
      EXPECT_NE(status.text().find(word), std::string::npos) << status.text();
  }
}

TEST(CodecTable, StatesOfCodecsHaveNamesOfTheirOwn) {
  std::set<std::string> names;
  for (const CodecRow& row : kCodecs) {
    const Coding& coding = coding_of(row.kind);
    EXPECT_TRUE(names.insert(coding.state_name(settings_of(row.name()))).second) << row.name();
    EXPECT_TRUE(coding.refused().starts_with("NaN or Inf")) << row.name();
  }
}

// What kernels with an operand of this kind, from this slot on, cover.
struct Covered {
  uint64_t elements = 0;
  std::vector<uint32_t> steps;
};
Covered covered(const LogicalPlan& plan, Footprint footprint, Access access, uint32_t slot) {
  Covered out;
  for (uint32_t i = 0; i < plan.steps.size(); ++i) {
    const KernelStep* const kernel = plan.steps[i].kernel();
    const auto fits = [&](const OperandRef& o) {
      return o.slot != kNoSlot && o.footprint == footprint && o.access == access &&
             (slot == kNoSlot || o.slot == slot);
    };
    if (kernel == nullptr || std::ranges::none_of(kernel->operands, fits)) continue;
    out.steps.push_back(i);
    for (const Piece& p : kernel->pieces) out.elements += p.tensor == kNoTensor ? 0 : p.count;
  }
  return out;
}

class CodecParts : public testing::TestWithParam<CodecRow> {};

TEST_P(CodecParts, ACollectiveEncodesServesDecodesAndTakesBack) {
  for (const bool residual : {true, false}) {
    CodecSettings codec = settings_of(GetParam().name());
    if (!residual && GetParam().residual == ResidualUse::kAlways) continue;
    codec.residual = residual;
    const CompressedLayout layout({{70'001, 0}, {3, 0}, {0, 0}}, 3, codec.chunk_align,
                                  codec.granularity, 0, codec.row().scales);
    PlanBuilder b;
    const CompressedCollective c =
        emit_compressed_collective(b, 1, layout, codec, std::vector<uint8_t>(3, 0), 16384);
    const LogicalPlan plan = b.take();
    const Covered encoded = covered(plan, Footprint::kList, Access::kRead, c.in);
    EXPECT_EQ(encoded.elements, layout.elements());
    // Every rank adds up all of what is not for servers.
    const bool sparse = codec.row().sparse;
    uint64_t own = 0;
    for (const Piece& p : server_chunk(layout, 1)) own += p.tensor == kNoTensor ? 0 : p.count;
    EXPECT_EQ(covered(plan, Footprint::kRows, Access::kRead, kNoSlot).elements, sparse ? 0 : own);
    const Covered decoded =
        covered(plan, sparse ? Footprint::kList : Footprint::kTarget, Access::kWrite, c.out);
    EXPECT_EQ(decoded.elements, layout.elements());
    for (const uint32_t i : decoded.steps) EXPECT_EQ(plan.steps[i].phase, Phase::kCommitting);
    EXPECT_EQ(c.slots.worker != kNoSlot, residual);
    EXPECT_EQ(c.slots.server_next != kNoSlot, codec.server_residual());
    EXPECT_EQ(c.slots.server_scale_next != kNoSlot, codec.row().scales);
    // Whatever changes the worker's residual is taken back.
    if (!residual) continue;
    for (const uint32_t i :
         covered(plan, Footprint::kFlat, Access::kReadWrite, c.slots.worker).steps) {
      EXPECT_TRUE(std::any_of(plan.undo.begin(), plan.undo.end(),
                              [&](const UndoStep& u) { return u.pair_first == i; }));
    }
  }
}

// With servers of blocks what a rank adds up and encodes again is what lies in its chunk, and no
// block has two servers.
TEST(CodecTable, ServersOfBlocksAddUpTheirChunks) {
  const CodecSettings codec =
      *parse_codec(R"({"type": "topk", "block": 64, "k": 8, "exchange": "two_phase"})");
  const std::vector<LayoutTensor> tensors{{70'001, 0}, {3, 0}, {0, 0}, {130, 0}};
  uint64_t all = 0;
  for (uint32_t me = 0; me < 3; ++me) {
    const CompressedLayout layout = CompressedLayout::of(codec, tensors, 3, 1);
    EXPECT_EQ(layout.elements(), 70'134u);
    PlanBuilder b;
    const CompressedCollective c = emit_compressed_collective(
        b, static_cast<int32_t>(me), layout, codec, std::vector<uint8_t>(4, 0), 16384);
    const LogicalPlan plan = b.take();
    EXPECT_EQ(covered(plan, Footprint::kList, Access::kRead, c.in).elements, layout.elements());
    EXPECT_EQ(covered(plan, Footprint::kList, Access::kWrite, c.out).elements, layout.elements());
    uint64_t own = 0;
    for (const Piece& p : server_chunk(layout, me)) {
      if (p.tensor == kNoTensor) continue;
      EXPECT_EQ(p.offset % 64, 0u);
      own += p.count;
    }
    const Covered served = covered(plan, Footprint::kFlat, Access::kReadWrite, c.slots.server_next);
    EXPECT_EQ(served.elements, own);
    for (const uint32_t i : served.steps) {
      for (const Piece& p : plan.steps[i].kernel()->pieces) {
        EXPECT_LE(p.flat + p.count, layout.chunk_elements());
        EXPECT_EQ(p.offset % 64, 0u);
      }
    }
    all += own;
  }
  EXPECT_EQ(all, 70'134u);
}

std::string codec_of(const testing::TestParamInfo<CodecRow>& info) {
  return std::string(info.param.name());
}
INSTANTIATE_TEST_SUITE_P(All, CodecParts, testing::ValuesIn(kCodecs), codec_of);

}  // namespace
}  // namespace sotto::test
