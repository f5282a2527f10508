#include "core/kernels/pieces.h"
#include "core/kernels/registry.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "tests/support/kernel_cases.h"

namespace sotto::test {
namespace {

// Every element once, in order, with its place; block and lane of every piece agree with the
// original's counting.
void expect_same_elements(const std::vector<Piece>& whole,
                          const std::vector<std::vector<Piece>>& tables) {
  std::vector<Piece> parts;
  for (const auto& table : tables) parts.insert(parts.end(), table.begin(), table.end());
  size_t k = 0;
  uint64_t used = 0;
  for (const Piece& part : parts) {
    while (k < whole.size() && used == whole[k].count) ++k, used = 0;
    ASSERT_LT(k, whole.size());
    const Piece expected = sub_piece(whole[k], used, part.count);
    EXPECT_EQ(part.flat, expected.flat);
    EXPECT_EQ(part.offset, expected.offset);
    EXPECT_EQ(part.target, expected.target);
    EXPECT_EQ(part.block, expected.block);
    EXPECT_EQ(part.lane, expected.lane);
    EXPECT_EQ(part.tensor, expected.tensor);
    used += part.count;
    ASSERT_LE(used, whole[k].count);
  }
  EXPECT_EQ(piece_elements(parts), piece_elements(whole));
}

// No block is in two tables.
void expect_whole_blocks(const std::vector<std::vector<Piece>>& tables) {
  std::map<uint64_t, size_t> owner;
  for (size_t t = 0; t < tables.size(); ++t) {
    for (const Piece& p : tables[t]) {
      if (p.count == 0) continue;
      for (uint64_t b = p.block; b <= p.block + (p.lane + p.count - 1) / kNormBlock; ++b) {
        EXPECT_EQ(owner.emplace(b, t).first->second, t) << "block " << b;
      }
    }
  }
}

TEST(Pieces, CutsKeepElementsAndBlocks) {
  for (const Layout& layout : all_layouts()) {
    for (const std::vector<Piece>& pieces : {layout.by_chunk, layout.by_tensor}) {
      for (const uint64_t limit :
           {uint64_t{1}, kNormBlock, 3 * kNormBlock, uint64_t{65536}, uint64_t{1} << 40}) {
        const auto tables = cut_pieces(pieces, limit);
        expect_same_elements(pieces, tables);
        expect_whole_blocks(tables);
        for (const auto& table : tables)
          EXPECT_LE(piece_elements(table), std::max(limit, kNormBlock));
        if (limit == uint64_t{1} << 40) {
          EXPECT_LE(tables.size(), 1u);
        }
      }
    }
  }
}

TEST(Pieces, ALongPieceIsCutEvenly) {
  Piece p;
  p.flat = 5;
  p.lane = 100;
  p.count = 10 * kNormBlock - 100;
  const auto tables = cut_pieces(std::span(&p, 1), 4 * kNormBlock);
  ASSERT_EQ(tables.size(), 3u);
  EXPECT_EQ(tables[0].at(0).count, 4 * kNormBlock - 100);
  EXPECT_EQ(tables[1].at(0).count, 4 * kNormBlock);
  EXPECT_EQ(tables[2].at(0).count, 2 * kNormBlock);
  EXPECT_EQ(tables[1].at(0).lane, 0u);
  EXPECT_EQ(tables[1].at(0).block, 4u);
}

TEST(Pieces, SharesMakeUpTheTable) {
  for (const Layout& layout : all_layouts()) {
    for (const uint32_t shares : {1u, 2u, 3u, 7u, 64u}) {
      std::vector<std::vector<Piece>> tables(shares);
      for (uint32_t i = 0; i < shares; ++i) share_of_pieces(layout.by_chunk, i, shares, &tables[i]);
      expect_same_elements(layout.by_chunk, tables);
      expect_whole_blocks(tables);
      const uint64_t even = piece_elements(layout.by_chunk) / shares;
      for (const auto& table : tables) EXPECT_LE(piece_elements(table), even + 2 * kNormBlock);
    }
  }
}

TEST(Pieces, KernelsWithCountersAreNotCut) {
  EXPECT_FALSE(kernel_cuts(KernelId::kCountValid));
  EXPECT_FALSE(kernel_cuts(KernelId::kFill));
  EXPECT_TRUE(kernel_cuts(KernelId::kOnebitEncode));
}

}  // namespace
}  // namespace sotto::test
