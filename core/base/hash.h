// XXH3 (xxHash, Yann Collet): the checksum of frames and state blobs and the hash of signatures.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace sotto {

uint64_t hash64(const void* data, size_t bytes, uint64_t seed = 0);
inline uint64_t hash64(std::string_view text, uint64_t seed = 0) {
  return hash64(text.data(), text.size(), seed);
}

// The same hash over data that arrives in pieces.
class Hasher64 {
 public:
  Hasher64();
  Hasher64(const Hasher64&) = delete;
  Hasher64& operator=(const Hasher64&) = delete;
  void reset();
  void update(const void* data, size_t bytes);
  uint64_t digest() const;

 private:
  alignas(64) unsigned char state_[576];
};

}  // namespace sotto
