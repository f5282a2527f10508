// Kernels get memory that a CUDA device reaches: the emulator's target refuses other memory, so
// that the tests of kernels are fit for a real device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <memory>

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

// Of a size that no kernel's operands have.
char* allocate(size_t bytes) { return new char[bytes]; }

struct OwnAllocations {
  OwnAllocations() {
    setenv("PINNED_ALLOCATIONS", "own", 1);
    pin_what_this_thread_allocates();
  }
  ~OwnAllocations() {
    unsetenv("PINNED_ALLOCATIONS");
    pin_what_this_thread_allocates();
  }
};

TEST(PinnedOperands, WhatIsWrittenBesideThemIsFound) {
  pin_what_this_thread_allocates();
  for (const size_t bytes : {size_t{1}, size_t{15}, size_t{16}, size_t{4096}, size_t{3} << 20}) {
    for (const ptrdiff_t beside : {ptrdiff_t{-16}, ptrdiff_t{-1}, ptrdiff_t{0}, ptrdiff_t{15}}) {
      const auto overrun = [&] {
        volatile char* const at = allocate(bytes);
        at[beside < 0 ? beside : static_cast<ptrdiff_t>(bytes) + beside] = 1;
        delete[] at;
      };
      EXPECT_DEATH(overrun(), beside < 0 ? "pinned_new: something was written in front of "
                                         : "pinned_new: something was written behind ");
    }
    char* const at = allocate(bytes);
    std::memset(at, 1, bytes);
    delete[] at;
  }
}

TEST(PinnedOperands, MayBeAllocationsOfTheirOwn) {
  const OwnAllocations own;
  EXPECT_DEATH(
      {
        volatile char* const at = allocate(5);
        at[-64] = 1;
        delete[] at;
      },
      "pinned_new: something was written in front of 5 bytes");
  std::vector<std::unique_ptr<char[]>> all;
  for (size_t bytes = 1; bytes < 3000; bytes = 2 * bytes + 1) {
    char* const at = allocate(bytes);
    all.emplace_back(at);
    EXPECT_TRUE(is_pinned(at) && is_pinned(at + bytes - 1));
    EXPECT_FALSE(is_pinned(at - 1)) << bytes;
    EXPECT_FALSE(is_pinned(at + bytes)) << bytes;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(at) % 16, 0u);
  }
  char* const first = all[0].get();
  all.clear();
  EXPECT_FALSE(is_pinned(first));
}

// Memory of both kinds goes back to where it came from.
TEST(PinnedOperands, MayBeOfBothKinds) {
  pin_what_this_thread_allocates();
  char* const of_arena = allocate(777);
  {
    const OwnAllocations own;
    char* const of_its_own = allocate(777);
    EXPECT_TRUE(is_pinned(of_arena) && is_pinned(of_its_own));
    EXPECT_TRUE(is_pinned(of_arena + 777)) << "its block is larger";
    EXPECT_FALSE(is_pinned(of_its_own + 777));
    delete[] of_arena;
    delete[] of_its_own;
  }
  delete[] allocate(777);
}

}  // namespace
}  // namespace sotto::test
