// How kernel calls are spread over thread blocks: what prepare() makes of them.
#include <gtest/gtest.h>

#include <cstring>

#include "cuda/kernels/prepare.h"
#include "cuda/kernels/tables.h"
#include "tests/support/kernel_cases.h"

namespace sotto::test {
namespace {

KernelCall call_of(KernelId id, std::span<const Piece> pieces, const void* args) {
  KernelCall call;
  call.id = id;
  call.pieces = pieces;
  call.args = args;
  return call;
}

template <class T>
std::vector<T> table(const cuda::PreparedKernel& kernel, uint64_t offset, size_t count) {
  std::vector<T> values(count);
  if (count != 0) std::memcpy(values.data(), kernel.tables.data() + offset, count * sizeof(T));
  return values;
}

const SourceArgs kSource{};

TEST(PrepareKernel, AThousandSmallTensorsAreOneLaunchOfFewBlocks) {
  std::vector<uint64_t> sizes;
  for (uint64_t t = 0; t < 1000; ++t) sizes.push_back(1 + t % 40);
  const Layout layout = make_layout(sizes, 1, 8);
  const auto kernel = cuda::prepare(call_of(KernelId::kAdam, layout.by_tensor, &kSource)).take();
  EXPECT_EQ(kernel.blocks, (layout.elements() + kNormBlock - 1) / kNormBlock);
  EXPECT_EQ(kernel.list_tensors, 1000u);
  EXPECT_EQ(kernel.operands, 7u);
  EXPECT_EQ(kernel.lists, 1u << 0 | 1u << 3);
}

TEST(PrepareKernel, EveryElementIsInOneRunAndQuadsAreAlignedAsTheFlatSpaceIs) {
  for (const Layout& layout : all_layouts()) {
    const auto kernel = cuda::prepare(call_of(KernelId::kAdam, layout.by_tensor, &kSource)).take();
    const auto work = table<cuda::Work>(kernel, kernel.offsets.work, kernel.blocks);
    std::vector<uint8_t> seen(layout.padded);
    for (const cuda::Work& w : work) {
      uint32_t end = 0;
      const auto runs =
          table<cuda::Run>(kernel, kernel.offsets.runs + w.first_run * sizeof(cuda::Run), w.runs);
      for (const cuda::Run& run : runs) {
        const Piece& piece = layout.by_tensor[run.piece];
        EXPECT_GE(run.position, end);
        end = run.position + run.count;
        EXPECT_LE(end, kNormBlock);
        EXPECT_EQ(run.position % 4, (piece.flat + run.first) % 4);
        for (uint64_t i = 0; i < run.count; ++i) ++seen[piece.flat + run.first + i];
      }
    }
    const uint64_t n = layout.elements();
    EXPECT_EQ(seen, [&] {
      std::vector<uint8_t> once(layout.padded, 0);
      std::fill_n(once.begin(), n, uint8_t{1});
      return once;
    }());
  }
}

TEST(PrepareKernel, BlockSumsHaveAThreadBlockPerNormBlockWithPadding) {
  const Layout layout = make_layout({5, 20000, 3, 16384, 77, 70001}, 4, 512, 2);
  EncodeArgs args{};
  const auto kernel =
      cuda::prepare(call_of(KernelId::kOnebitEncode, layout.by_chunk, &args)).take();
  EXPECT_EQ(kernel.blocks, layout.chunk_blocks);
  const auto work = table<cuda::Work>(kernel, kernel.offsets.work, kernel.blocks);
  for (size_t b = 0; b < work.size(); ++b) EXPECT_EQ(work[b].block, b);
}

TEST(PrepareKernel, TablesHaveNoAddressesOfTheHost) {
  const std::vector<NormRange> here = make_layout({100, 9000, 1}, 1, 8).tensor_ranges;
  const std::vector<NormRange> there = here;
  const TensorArgs a{here.data(), here.size(), true}, b{there.data(), there.size(), true};
  const auto first = cuda::prepare(call_of(KernelId::kLambScalars, {}, &a)).take();
  const auto second = cuda::prepare(call_of(KernelId::kLambScalars, {}, &b)).take();
  EXPECT_EQ(first.tables, second.tables);
  EXPECT_EQ(std::memcmp(first.args, second.args, sizeof first.args), 0);
  EXPECT_EQ(first.tables.size() % cuda::kTableAlignment, 0u);
  EXPECT_EQ(table<NormRange>(first, first.offsets.ranges, 3)[1].count, 9000u);
}

TEST(PrepareKernel, NothingToDoHasNoBlocks) {
  EXPECT_EQ(cuda::prepare(call_of(KernelId::kAdam, {}, &kSource))->blocks, 0u);
  const FillArgs fill{1};
  KernelCall call = call_of(KernelId::kFill, {}, &fill);
  EXPECT_EQ(cuda::prepare(call)->blocks, 0u);
  call.bytes = uint64_t{1} << 40;
  EXPECT_EQ(cuda::prepare(call)->blocks, 1024u);
  Piece padding;
  padding.tensor = kNoTensor;
  padding.count = 100;
  const std::vector<Piece> pieces = {padding};
  EXPECT_EQ(cuda::prepare(call_of(KernelId::kAdam, pieces, &kSource))->blocks, 0u);
}

TEST(PrepareKernel, WhatCannotBeDescribedIsRefused) {
  std::vector<Piece> pieces = make_layout({100, 200}, 1, 8).by_chunk;
  std::swap(pieces[0], pieces[1]);
  EncodeArgs args{};
  const auto disorder = cuda::prepare(call_of(KernelId::kOnebitEncode, pieces, &args));
  ASSERT_FALSE(disorder.ok());
  EXPECT_NE(disorder.status().text().find("not in ascending order"), std::string::npos);
  EXPECT_FALSE(cuda::prepare(call_of(KernelId::kCount, {}, nullptr)).ok());
}

}  // namespace
}  // namespace sotto::test
