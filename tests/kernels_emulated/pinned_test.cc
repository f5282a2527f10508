// Kernels get memory that a CUDA device reaches: the emulator's target refuses other memory, so
// that the tests of kernels are fit for a real device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/kernels/bytes.h"
#include "tests/cuda/pinned_new.h"
#include "tests/support/kernel_targets.h"

namespace sotto::test {
namespace {

using ::testing::HasSubstr;

// kPack of one tensor.
struct PackCall {
  Piece piece;
  PackArgs args{};
  void* list[1];
  Operand operands[2];
  KernelCall call;

  PackCall(void* const* tensors, void* flat) {
    piece.count = 8;
    args.element_bytes = 4;
    operands[0].data = const_cast<void**>(tensors);
    operands[1].data = flat;
    call.id = KernelId::kPack;
    call.pieces = {&piece, 1};
    call.args = &args;
    call.operands = operands;
  }
};

TEST(PinnedOperands, OnlyMemoryThatADeviceReachesIsTaken) {
  const std::vector<KernelTarget> targets = kernel_targets();
  Device& device = *targets[0].device;
  std::vector<uint32_t> from{1, 2, 3, 4, 5, 6, 7, 8}, to(8), word{kCommit};
  uint32_t on_stack[8] = {kCommit};
  const std::vector<void*> list{from.data()}, list_to_stack{on_stack};
  void* const stack_list[] = {from.data()};
  PackCall good(list.data(), to.data());
  good.call.predicate = word.data();
  good.call.expect = kCommit;
  const Status status = device.launch(0, good.call, {});
  EXPECT_TRUE(status.ok()) << status.text();
  EXPECT_EQ(to, from);
  good.call.predicate = on_stack;
  EXPECT_THAT(device.launch(0, good.call, {}).text(), HasSubstr("the predicate is at"));
  EXPECT_THAT(device.launch(0, PackCall(stack_list, to.data()).call, {}).text(),
              HasSubstr("operand 0 is at"));
  EXPECT_THAT(device.launch(0, PackCall(list_to_stack.data(), to.data()).call, {}).text(),
              HasSubstr("tensor 0 of operand 0 is at"));
  EXPECT_THAT(device.launch(0, PackCall(list.data(), on_stack).call, {}).text(),
              HasSubstr("operand 1 is at"));
}

}  // namespace
}  // namespace sotto::test
