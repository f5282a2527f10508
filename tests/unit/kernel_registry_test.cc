// The descriptions of kernels, and what is looked up in them.
#include "core/kernels/registry.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "core/plan/plan.h"

namespace sotto {
namespace {

std::vector<KernelId> all_kernels() {
  std::vector<KernelId> ids;
  for (uint16_t id = 0; id < static_cast<uint16_t>(KernelId::kCount); ++id)
    ids.push_back(KernelId{id});
  return ids;
}

TEST(KernelRegistry, EveryKernelIsDescribed) {
  std::set<std::string> names;
  for (const KernelId id : all_kernels()) {
    const KernelSpec& spec = kernel_spec(id);
    EXPECT_TRUE(names.insert(spec.name).second) << spec.name;
    EXPECT_FALSE(spec.operands.empty()) << spec.name;
    bool writes = false;
    for (size_t k = 0; k < spec.operands.size(); ++k) {
      const OperandSpec& operand = spec.operands[k];
      ASSERT_NE(operand.name, nullptr) << spec.name << ", operand " << k;
      EXPECT_EQ(operand.element == Element::kByArguments, operand.bits_of != nullptr)
          << spec.name << ", " << operand.name;
      writes = writes || operand.access == Access::kWrite || operand.access == Access::kReadWrite;
    }
    EXPECT_TRUE(writes) << spec.name;
  }
  EXPECT_STREQ(kernel_name(KernelId::kCount), "unknown");
  EXPECT_TRUE(kernel_spec(KernelId::kCount).operands.empty());
}

TEST(KernelRegistry, DescriptionsAreInTheOrderOfTheCall) {
  const auto operands = kernel_spec(KernelId::kOnebitLambEncode).operands;
  const char* const expected[] = {"g",          "floats", "bits", "messages", "c",
                                  "old_scales", "bits",   "sums", "valid",    "flags",
                                  "scalars",    "states", "clip"};
  ASSERT_EQ(operands.size(), std::size(expected));
  for (size_t k = 0; k < operands.size(); ++k) EXPECT_STREQ(operands[k].name, expected[k]);
  kernels::AdamOperands<Operand> named_operands{};
  int memory[2];
  named_operands.g.data = &memory[0];
  named_operands.valid.data = &memory[1];
  const KernelCall call = call_of<kernels::Adam>(named_operands);
  ASSERT_EQ(call.operands.size(), 7u);
  EXPECT_EQ(call.operands[0].data, &memory[0]);
  EXPECT_EQ(call.operands[6].data, &memory[1]);
  EXPECT_EQ(call.of<kernels::Adam>().valid.data, &memory[1]);
}

TEST(KernelRegistry, AnUndoHasTheOperandsOfWhatItTakesBack) {
  size_t undos = 0;
  for (const KernelId id : all_kernels()) {
    const KernelId undo = kernel_spec(id).undo;
    if (undo == KernelId::kCount) continue;
    ++undos;
    const auto done = kernel_spec(id).operands, taken_back = kernel_spec(undo).operands;
    ASSERT_EQ(done.size(), taken_back.size()) << kernel_name(id);
    for (size_t k = 0; k < done.size(); ++k)
      EXPECT_STREQ(done[k].name, taken_back[k].name) << kernel_name(id);
    EXPECT_EQ(kernel_spec(undo).undo, KernelId::kCount);
  }
  EXPECT_EQ(undos, 5u);
}

TEST(KernelRegistry, ArgumentsDecideWhetherAReductionHasLists) {
  ReduceArgs args{};
  EXPECT_EQ(list_operands(KernelId::kReduce, &args), 0b101u);
  args.own_flat = true;
  EXPECT_EQ(list_operands(KernelId::kReduce, &args), 0b100u);
  args.out_flat = true;
  EXPECT_EQ(list_operands(KernelId::kReduce, &args), 0u);
}

TEST(KernelRegistry, TouchedBytesFollowPiecesBasesAndElements) {
  const PackArgs args{100, 2};
  std::vector<Piece> pieces(2);
  pieces[0] = {.flat = 100, .offset = 4, .target = 0, .count = 3, .block = 0, .tensor = 1};
  pieces[1] = {.flat = 103, .offset = 0, .target = 0, .count = 5, .block = 0, .tensor = 2};
  KernelCall call;
  call.id = KernelId::kPack;
  call.args = &args;
  call.pieces = pieces;
  std::vector<TouchedBytes> tensors, flat;
  ASSERT_TRUE(touched_bytes(call, 0, &tensors));
  ASSERT_TRUE(touched_bytes(call, 1, &flat));
  ASSERT_EQ(tensors.size(), 2u);
  EXPECT_EQ(tensors[0].tensor, 1u);
  EXPECT_EQ(tensors[0].offset, 8u);
  EXPECT_EQ(tensors[0].bytes, 6u);
  EXPECT_EQ(tensors[1].tensor, 2u);
  ASSERT_EQ(flat.size(), 2u);
  EXPECT_EQ(flat[1].tensor, kNoTensor);
  EXPECT_EQ(flat[1].offset, 6u);
  EXPECT_EQ(flat[1].bytes, 10u);
}

}  // namespace
}  // namespace sotto
