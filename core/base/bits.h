// Bit arrays, most significant bit first: element i is bit 7 - i % 8 of byte i / 8.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>
#include <cstring>

#include "core/base/host_device.h"

namespace sotto {

SOTTO_HOST_DEVICE inline bool get_bit(const uint8_t* bits, uint64_t i) {
  return (bits[i >> 3] >> (7 - (i & 7))) & 1;
}

// Leaves the other bits of the byte as they are.
inline void set_bit(uint8_t* bits, uint64_t i, bool value) {
  const uint8_t mask = static_cast<uint8_t>(0x80u >> (i & 7));
  bits[i >> 3] = static_cast<uint8_t>(value ? bits[i >> 3] | mask : bits[i >> 3] & ~mask);
}

// For arrays whose bytes are shared between threads that touch different bits.
inline bool get_bit_shared(uint8_t* bits, uint64_t i) {
  const uint8_t byte = std::atomic_ref<uint8_t>(bits[i >> 3]).load(std::memory_order_relaxed);
  return (byte >> (7 - (i & 7))) & 1;
}
inline void clear_bit_shared(uint8_t* bits, uint64_t i) {
  const uint8_t keep = static_cast<uint8_t>(~(0x80u >> (i & 7)));
  std::atomic_ref<uint8_t>(bits[i >> 3]).fetch_and(keep, std::memory_order_relaxed);
}

// Sets `count` bits from bit `first` to 1, whole bytes at once.
inline void set_bits(uint8_t* bits, uint64_t first, uint64_t count) {
  while (count != 0 && (first & 7) != 0) {
    set_bit(bits, first++, true);
    --count;
  }
  std::memset(bits + (first >> 3), 0xff, count >> 3);
  first += count & ~uint64_t{7};
  for (count &= 7; count != 0; --count) set_bit(bits, first++, true);
}

// 64 bits from any position; element i + k is bit 63 - k. Reads only bytes that hold one of the 64.
inline uint64_t load_bits64(const uint8_t* bits, uint64_t i) {
  const uint8_t* p = bits + (i >> 3);
  const unsigned shift = static_cast<unsigned>(i & 7);
  uint64_t word;
  std::memcpy(&word, p, 8);
  if constexpr (std::endian::native == std::endian::little) word = __builtin_bswap64(word);
  if (shift == 0) return word;
  return word << shift | static_cast<uint64_t>(p[8]) >> (8 - shift);
}

// Population of `count` bits from bit `first`.
inline uint64_t count_bits(const uint8_t* bits, uint64_t first, uint64_t count) {
  uint64_t sum = 0;
  for (; count >= 64; first += 64, count -= 64) {
    sum += static_cast<uint64_t>(std::popcount(load_bits64(bits, first)));
  }
  for (; count != 0; ++first, --count) sum += get_bit(bits, first);
  return sum;
}

}  // namespace sotto
