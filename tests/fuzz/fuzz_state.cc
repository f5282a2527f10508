// State import: any bytes are either a snapshot that can be written again, or an error with a text.
// The bytes are tried as they are, and with length and checksum repaired, so that what lies behind
// the checksum is reached.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "core/base/hash.h"
#include "core/state/optim_state.h"

namespace {

void check(std::span<const std::byte> bytes) {
  const sotto::Result<sotto::OptimSnapshot> snapshot = sotto::decode_optim(bytes);
  if (!snapshot.ok()) {
    if (snapshot.status().text().empty()) std::abort();
    return;
  }
  if (!sotto::decode_optim(sotto::encode_optim(*snapshot)).ok()) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto bytes = std::span(reinterpret_cast<const std::byte*>(data), size);
  check(bytes);
  if (size < 32) return 0;
  std::vector<std::byte> repaired(bytes.begin(), bytes.end());
  const uint64_t total = size;
  std::memcpy(repaired.data() + 16, &total, 8);
  const uint64_t checksum = sotto::hash64(repaired.data(), size - 8);
  std::memcpy(repaired.data() + size - 8, &checksum, 8);
  check(repaired);
  return 0;
}
