// Random bits from a counter (SplitMix64), for values of tests: in registers alone, so that
// ThreadSanitizer has no state to watch. A generator of the standard library's kind.
#pragma once

#include <cstdint>

namespace sotto::test {

class RandomBits {
 public:
  using result_type = uint32_t;
  explicit RandomBits(uint64_t seed = 0) : counter_(seed * 0xd1342543de82ef95u) {}
  static constexpr result_type min() { return 0; }
  static constexpr result_type max() { return 0xffffffffu; }
  result_type operator()() {
    uint64_t z = counter_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return static_cast<result_type>(z >> 32);
  }

 private:
  uint64_t counter_;
};

}  // namespace sotto::test
