// The checksum of frames is the same whatever the processor can do: ranks compare it.
#include "core/base/hash.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "core/base/hash_functions.h"

namespace sotto::test {
namespace {

std::vector<unsigned char> bytes_of(size_t count) {
  std::vector<unsigned char> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<unsigned char>(i * 131 + i / 251);
  return bytes;
}

constexpr size_t kSizes[] = {0, 1, 16, 88, 240, 241, 1024, 4097, 131072, 300001};

TEST(Hash, KnownValue) { EXPECT_EQ(hash64(""), 0x2d06800538d394c2u); }

TEST(Hash, InstructionSetsAgree) {
  if (!__builtin_cpu_supports("avx2")) GTEST_SKIP() << "SKIPPED: this processor has no AVX2";
  for (const size_t size : kSizes) {
    const auto bytes = bytes_of(size);
    for (const uint64_t seed : {uint64_t{0}, uint64_t{77}}) {
      EXPECT_EQ(kHashAvx2.hash(bytes.data(), size, seed),
                kHashBaseline.hash(bytes.data(), size, seed))
          << size;
    }
  }
}

TEST(Hash, PiecesHashLikeTheWhole) {
  for (const size_t size : kSizes) {
    const auto bytes = bytes_of(size);
    for (const size_t piece : {size_t{1}, size_t{100}, size_t{65537}}) {
      if (size / piece > 5000) continue;
      Hasher64 hasher;
      for (size_t at = 0; at < size; at += piece)
        hasher.update(bytes.data() + at, std::min(piece, size - at));
      EXPECT_EQ(hasher.digest(), hash64(bytes.data(), size)) << size << " in pieces of " << piece;
    }
  }
}

}  // namespace
}  // namespace sotto::test
