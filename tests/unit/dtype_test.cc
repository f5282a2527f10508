#include "core/base/dtype.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

namespace sotto {
namespace {

// The 16-bit value nearest to f, ties to even, found by search over all finite values with the
// decoder under test replaced by exact arithmetic in double.
double f16_value(uint16_t h) {
  const double sign = (h & 0x8000) ? -1.0 : 1.0;
  const int exponent = (h >> 10) & 31;
  const int mantissa = h & 1023;
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(1024 + mantissa, exponent - 25);
}

TEST(Dtype, HalfDecodesEveryPattern) {
  for (uint32_t h = 0; h < 0x10000; ++h) {
    const float f = f16_to_f32(static_cast<uint16_t>(h));
    if (((h >> 10) & 31) == 31) {
      EXPECT_EQ(std::isinf(f), (h & 1023) == 0) << h;
      EXPECT_EQ(std::isnan(f), (h & 1023) != 0) << h;
    } else {
      EXPECT_EQ(static_cast<double>(f), f16_value(static_cast<uint16_t>(h))) << h;
      EXPECT_EQ(std::signbit(f), (h & 0x8000) != 0) << h;
    }
  }
}

TEST(Dtype, HalfEncodeInvertsDecode) {
  for (uint32_t h = 0; h < 0x10000; ++h) {
    const bool nan = ((h >> 10) & 31) == 31 && (h & 1023) != 0;
    const uint16_t back = f32_to_f16(f16_to_f32(static_cast<uint16_t>(h)));
    EXPECT_EQ(back, nan ? (h | 0x200) : h) << h;
  }
}

TEST(Dtype, HalfRoundsToNearestEven) {
  for (uint32_t h = 0; h + 1 < 0x7c00; ++h) {
    const double low = f16_value(static_cast<uint16_t>(h));
    const double high = f16_value(static_cast<uint16_t>(h + 1));
    const float middle = static_cast<float>((low + high) / 2);
    const uint16_t even = static_cast<uint16_t>((h & 1) ? h + 1 : h);
    EXPECT_EQ(f32_to_f16(middle), even) << h;
    EXPECT_EQ(f32_to_f16(std::nextafter(middle, 0.0f)), h) << h;
    EXPECT_EQ(f32_to_f16(std::nextafter(middle, 1e9f)), h + 1) << h;
  }
  EXPECT_EQ(f32_to_f16(65519.0f), 0x7bff);
  EXPECT_EQ(f32_to_f16(65520.0f), 0x7c00);
  EXPECT_EQ(f32_to_f16(-1e30f), 0xfc00);
  EXPECT_EQ(f32_to_f16(1e-30f), 0);
}

TEST(Dtype, Bf16RoundsToNearestEvenAndKeepsNan) {
  EXPECT_EQ(f32_to_bf16(std::bit_cast<float>(0x3f808000u)), 0x3f80);
  EXPECT_EQ(f32_to_bf16(std::bit_cast<float>(0x3f818000u)), 0x3f82);
  EXPECT_EQ(f32_to_bf16(std::bit_cast<float>(0x3f808001u)), 0x3f81);
  EXPECT_EQ(f32_to_bf16(std::bit_cast<float>(0x7f7fffffu)), 0x7f80);
  EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(std::bit_cast<float>(0x7f800001u)))));
  EXPECT_EQ(f32_to_bf16(std::bit_cast<float>(0x00000001u)), 0);
  EXPECT_EQ(f32_to_bf16(std::bit_cast<float>(0x00018000u)), 2);
}

}  // namespace
}  // namespace sotto
