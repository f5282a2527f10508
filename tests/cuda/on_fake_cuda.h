// Fixtures on the fake CUDA runtime, as it is by default: nothing may be left in it.
#pragma once

#include <gtest/gtest.h>

#include "tests/emulation/cuda/fake_cuda.h"

namespace sotto::test {

// Fixture: testing::Test, or one with parameters.
template <class Fixture>
class OnFakeCuda : public Fixture {
 protected:
  void SetUp() override {
    fake_cuda::clear_faults();
    fake_cuda::configure({});
  }
  void TearDown() override {
    fake_cuda::clear_faults();
    fake_cuda::drain();
    EXPECT_EQ(fake_cuda::live(), fake_cuda::Live{}) << fake_cuda::live().text();
  }
};

}  // namespace sotto::test
