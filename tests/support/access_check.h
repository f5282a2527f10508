// Whether a call did what its kernel's description (core/kernels) says: bytes of operands that are
// read are as they were; of operands that are written, those alone have changed that it may touch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/kernels/registry.h"

namespace sotto::test {

// Made before a call whose operands this thread can reach; asked after it.
class AccessCheck {
 public:
  explicit AccessCheck(const KernelCall& call);

  // "" or what is wrong. Before the call: operands that are absent and may not be. After it: bytes
  // of an operand that is read have changed.
  const std::string& missing() const { return missing_; }
  std::string changed() const;

 private:
  struct Copy {
    const char* operand;
    const std::byte* at;
    std::vector<std::byte> bytes;
  };
  const char* kernel_;
  std::string missing_;
  std::vector<Copy> copies_;
};

// Bytes that a call may write.
struct WrittenBytes {
  const std::byte* at;
  uint64_t bytes;
};
// Appends those of all operands. False if the description does not say them all.
bool written_bytes(const KernelCall& call, std::vector<WrittenBytes>* out);

}  // namespace sotto::test
