// The flat space of compressed calls: every granularity covers every element once, and everything
// that has an index stays inside its array.
#include "core/codec/compressed_layout.h"

#include <gtest/gtest.h>

#include <array>
#include <set>

namespace sotto::test {
namespace {

struct Shape {
  std::vector<LayoutTensor> tensors;
  uint32_t ranks;
  uint64_t align;
  Granularity granularity;
  uint64_t bucket;
  uint64_t tensor_align = 1;
};

std::vector<Shape> shapes() {
  const std::vector<std::vector<LayoutTensor>> sets = {
      {{1, 0}},
      {{0, 0}, {0, 0}},
      {{70001, 0}},
      {{7, 1}, {0, 0}, {9000, 0}, {1025, 1}, {3, 2}, {30001, 0}},
  };
  std::vector<Shape> out;
  for (const auto& tensors : sets) {
    for (const uint32_t ranks : {1u, 2u, 3u, 8u}) {
      for (const uint64_t align : {8u, 512u}) {
        out.push_back({tensors, ranks, align, Granularity::kFlat, 0});
        out.push_back({tensors, ranks, align, Granularity::kFlat, 0, align});
        out.push_back({tensors, ranks, align, Granularity::kGroup, 0});
        out.push_back({tensors, ranks, align, Granularity::kTensor, 0});
        out.push_back({tensors, ranks, align, Granularity::kBucket, 8192});
        out.push_back({tensors, ranks, align, Granularity::kBucket, 101});
      }
    }
  }
  return out;
}

CompressedLayout layout_of(const Shape& s) {
  return CompressedLayout(s.tensors, s.ranks, s.align, s.granularity, s.bucket, true, std::nullopt,
                          1, s.tensor_align);
}

// Where the elements of each tensor lie, from its own pieces.
std::vector<std::vector<uint64_t>> places(const CompressedLayout& layout) {
  std::vector<std::vector<uint64_t>> out(layout.tensors().size());
  for (uint32_t t = 0; t < out.size(); ++t) {
    out[t].assign(layout.tensors()[t].count, ~uint64_t{0});
    for (const Piece& p : layout.tensor_pieces(t)) {
      for (uint64_t j = 0; j < p.count; ++j) out[t][p.offset + j] = p.flat + j;
    }
  }
  return out;
}

TEST(CompressedLayout, SegmentsCoverEveryElementOnceOnBothSides) {
  for (const Shape& shape : shapes()) {
    const CompressedLayout layout = layout_of(shape);
    const auto where = places(layout);
    std::vector<int> seen(layout.flat_elements());
    uint64_t real = 0;
    for (uint32_t k = 0; k < shape.ranks; ++k) {
      uint64_t server_at = 0;
      for (uint32_t s = 0; s < layout.sections().size(); ++s) {
        for (const LayoutSegment& segment : layout.segments(s, k, 3 * kNormBlock)) {
          const std::vector<Piece> worker = layout.worker_pieces(k, segment);
          const std::vector<Piece> server = layout.server_pieces(k, segment);
          ASSERT_EQ(worker.size(), server.size());
          uint64_t at = segment.begin;
          for (size_t i = 0; i < worker.size(); ++i) {
            const Piece& p = worker[i];
            ASSERT_EQ(p.flat, at);
            ASSERT_EQ(server[i].flat, server_at);
            ASSERT_EQ(server[i].count, p.count);
            ASSERT_LT(p.block, layout.worker_blocks());
            ASSERT_LT(server[i].block, layout.server_blocks());
            ASSERT_LT(p.scale, layout.instances());
            ASSERT_LE(4 * (uint64_t{p.message} + 2), layout.message_bytes());
            for (uint64_t j = 0; j < p.count; ++j) {
              ++seen[at + j];
              if (p.tensor == kNoTensor) continue;
              ASSERT_EQ(where[p.tensor][p.offset + j], at + j);
            }
            real += p.tensor != kNoTensor ? p.count : 0;
            at += p.count;
            server_at += p.count;
          }
          ASSERT_EQ(at, segment.begin + segment.count);
        }
      }
      if (shape.tensor_align == 1) {
        ASSERT_EQ(server_at, layout.chunk_elements());
      } else if (!layout.sections().empty()) {
        ASSERT_EQ(server_at, layout.chunk_count(layout.sections()[0], k));
        ASSERT_LE(server_at, layout.chunk_elements());
      }
    }
    EXPECT_EQ(real, layout.elements());
    // Behind chunks of any length lies padding of none.
    if (shape.tensor_align != 1 && shape.ranks != 1) seen.resize(layout.elements());
    for (const int times : seen) ASSERT_EQ(times, 1);
  }
}

// Specification sparse-loco, 6.2: chunk k has blocks floor(k B / W) to floor((k + 1) B / W) - 1.
TEST(CompressedLayout, ChunksThatHaveWholeBlocks) {
  // 3, 1 and 2 blocks, the second group's last.
  const CompressedLayout layout({{20, 1}, {0, 0}, {5, 0}, {11, 0}}, 4, 8, Granularity::kFlat, 0,
                                false, std::nullopt, 1, 8);
  std::vector<std::pair<uint64_t, uint64_t>> chunks;
  for (uint32_t k = 0; k < 4; ++k) {
    const LayoutSection& s = layout.sections()[0];
    chunks.emplace_back(layout.chunk_begin(s, k), layout.chunk_count(s, k));
  }
  // Blocks begin at 0, 5, 13, 16, 24 and 32.
  EXPECT_EQ(chunks, (decltype(chunks){{0, 5}, {5, 11}, {16, 8}, {24, 12}}));
  EXPECT_EQ(layout.chunk_elements(), 16u);
  EXPECT_EQ(layout.flat_elements(), 64u);
  std::vector<std::array<uint64_t, 3>> parts;  // chunk, element, count
  for (const Piece& p : layout.tensor_pieces(0)) parts.push_back({p.chunk, p.offset, p.count});
  EXPECT_EQ(parts, (decltype(parts){{2, 0, 8}, {3, 8, 12}}));
  // Fewer blocks than servers: the last ones have them.
  const CompressedLayout few({{9, 0}}, 3, 8, Granularity::kFlat, 0, false, std::nullopt, 1, 8);
  const LayoutSection& s = few.sections()[0];
  EXPECT_EQ(few.chunk_count(s, 0), 0u);
  EXPECT_EQ(few.chunk_count(s, 1), 8u);
  EXPECT_EQ(few.chunk_count(s, 2), 1u);
}

TEST(CompressedLayout, ScalesOfTensorPiecesAreThoseOfTheChunk) {
  for (const Shape& shape : shapes()) {
    const CompressedLayout layout = layout_of(shape);
    std::vector<const Piece*> of_element(layout.flat_elements());
    std::vector<Piece> all;
    for (uint32_t k = 0; k < shape.ranks; ++k) {
      for (const Piece& p : worker_chunk(layout, k)) all.push_back(p);
    }
    for (const Piece& p : all) {
      for (uint64_t j = 0; j < p.count; ++j) of_element[p.flat + j] = &p;
    }
    for (uint32_t t = 0; t < layout.tensors().size(); ++t) {
      for (const Piece& p : layout.tensor_pieces(t)) {
        for (const uint64_t f : {p.flat, p.flat + p.count - 1}) {
          const Piece& other = *of_element[f];
          ASSERT_EQ(p.scale, other.scale);
          ASSERT_EQ(p.message, other.message);
          ASSERT_EQ(p.chunk, other.chunk);
          ASSERT_EQ(p.group, other.group);
        }
      }
    }
  }
}

TEST(CompressedLayout, InstancesFollowTheGranularityInGroupOrder) {
  const std::vector<LayoutTensor> tensors = {{7, 1}, {0, 0}, {9000, 0}, {1025, 1}, {3, 2}};
  const auto counts = [&](Granularity g, uint64_t bucket) {
    std::vector<uint64_t> out;
    for (const NormRange& r : CompressedLayout(tensors, 2, 8, g, bucket).worker_ranges(0))
      out.push_back(r.count);
    return out;
  };
  EXPECT_EQ(counts(Granularity::kFlat, 0), (std::vector<uint64_t>{10035}));
  EXPECT_EQ(counts(Granularity::kGroup, 0), (std::vector<uint64_t>{9000, 1032, 3}));
  EXPECT_EQ(counts(Granularity::kTensor, 0), (std::vector<uint64_t>{9000, 7, 1025, 3}));
  EXPECT_EQ(counts(Granularity::kBucket, 4000), (std::vector<uint64_t>{4000, 4000, 2035}));
  // One rank: the order of the flat space is that of the groups.
  const CompressedLayout flat(tensors, 1, 8, Granularity::kFlat);
  EXPECT_EQ(flat.tensor_pieces(2)[0].flat, 0u);
  EXPECT_EQ(flat.tensor_pieces(0)[0].flat, 9000u);
  EXPECT_EQ(flat.tensor_pieces(3)[0].flat, 9007u);
  EXPECT_EQ(flat.tensor_pieces(4)[0].flat, 10032u);
}

TEST(CompressedLayout, SectionsAreBucketsAndHaveMessagesOfTheirOwn) {
  const CompressedLayout buckets({{20000, 0}}, 3, 8, Granularity::kBucket, 8192);
  ASSERT_EQ(buckets.sections().size(), 3u);
  uint64_t chunk = 0, messages = 0;
  for (const LayoutSection& s : buckets.sections()) {
    EXPECT_EQ(s.flat_begin, 3 * chunk);
    EXPECT_EQ(s.server_begin, chunk);
    EXPECT_EQ(s.message_offset, messages);
    EXPECT_EQ(s.message_bytes, 8u);
    chunk += s.chunk;
    messages += 3 * s.message_bytes;
  }
  EXPECT_EQ(buckets.message_bytes(), messages);
  std::vector<std::byte> area(messages);
  EXPECT_TRUE(buckets.flagged(area).empty());
  area[24 + 2 * 8 + 4] = std::byte{1};  // the last message of the second section
  area[4] = std::byte{1};               // the first of the first
  EXPECT_EQ(buckets.flagged(area), (std::vector<uint32_t>{0, 2}));
  EXPECT_EQ(CompressedLayout({{5, 0}, {6, 0}}, 3, 8, Granularity::kTensor).sections().size(), 1u);
}

// Padding that is data: no element of the flat space is without a tensor, and a tensor's own pieces
// and those of the chunks agree about padding too.
TEST(CompressedLayout, PaddingThatIsDataFillsTheChunks) {
  for (const Shape& s : shapes()) {
    if (s.granularity == Granularity::kBucket || s.tensor_align != 1) continue;
    const CompressedLayout layout(s.tensors, s.ranks, s.align, s.granularity, 0, true, 7u);
    ASSERT_EQ(layout.elements_with_padding(), layout.flat_elements());
    ASSERT_EQ(layout.flat_elements(), layout_of(s).flat_elements());
    const size_t registered = layout.tensors().size();
    std::vector<std::pair<uint32_t, uint64_t>> owner(layout.flat_elements(), {kNoTensor, 0});
    for (uint32_t k = 0; k < layout.servers(); ++k) {
      for (const Piece& p : worker_chunk(layout, k)) {
        ASSERT_NE(p.tensor, kNoTensor);
        ASSERT_EQ(p.group == 7, p.tensor >= registered);
        for (uint64_t j = 0; j < p.count; ++j) owner[p.flat + j] = {p.tensor, p.offset + j};
      }
    }
    uint64_t seen = 0;
    for (uint32_t t = 0; t < registered + layout.padding().size(); ++t) {
      for (const Piece& p : layout.tensor_pieces(t)) {
        for (uint64_t j = 0; j < p.count; ++j)
          ASSERT_EQ(owner[p.flat + j], std::make_pair(t, p.offset + j));
        seen += p.count;
      }
    }
    ASSERT_EQ(seen, layout.flat_elements());
    ASSERT_LE(layout.padding().size(), layout.instances());
    for (const LayoutTensor& padding : layout.padding())
      ASSERT_LT(padding.count, s.align * s.ranks);
  }
}

TEST(TensorSequence, IsOrderedByGroupAndLeavesOutWhatIsNeverCompressed) {
  const TensorSequence sequence({{7, 1}, {0, 0}, {9000, 0}, {11, 0, false}, {3, 0}, {6, 0, false}});
  ASSERT_EQ(sequence.spans().size(), 3u);
  EXPECT_EQ(sequence.spans()[0].tensor, 2u);
  EXPECT_EQ(sequence.spans()[1].tensor, 4u);
  EXPECT_EQ(sequence.spans()[2].tensor, 0u);
  EXPECT_EQ(sequence.begin_of(0), 9003u);
  EXPECT_EQ(sequence.begin_of(5), 11u);  // of what is never compressed
  EXPECT_EQ(sequence.length(), 9010u);
  EXPECT_EQ(sequence.elements(), 9027u);
  EXPECT_EQ(sequence.uncompressed(), 24u);
  EXPECT_EQ(sequence.span_at(8999).tensor, 2u);
  EXPECT_EQ(sequence.span_at(9000).tensor, 4u);
  EXPECT_EQ(sequence.first_block_of(3), 3u);
}

TEST(TensorSequence, PaddingEndsEveryRun) {
  TensorSequence sequence({{10, 0}, {16, 0}, {3, 0}});
  EXPECT_EQ(sequence.pad({10, 26, 29}, 8, 5), (std::vector<uint64_t>{6, 0, 5}));
  EXPECT_EQ(sequence.begin_of(1), 16u);
  EXPECT_EQ(sequence.begin_of(2), 32u);
  ASSERT_EQ(sequence.padding().size(), 2u);
  EXPECT_EQ(sequence.begin_of(3), 10u);
  EXPECT_EQ(sequence.begin_of(4), 35u);
  EXPECT_EQ(sequence[4].count, 5u);
  EXPECT_EQ(sequence[4].group, 5u);
  EXPECT_EQ(sequence.span_at(36).tensor, 4u);
  EXPECT_EQ(sequence.elements_with_padding(), 40u);
  EXPECT_EQ(sequence.length(), 29u);
}

}  // namespace
}  // namespace sotto::test
