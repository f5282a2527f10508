// The layout that the unique ids of all backends share: 128 bytes, little-endian.
//
//   offset  bytes
//        0      8  magic "SOTTOID1"
//        8      2  version of this layout
//       10      2  kind: which backend made it
//       12      2  port where its maker listens (0: none)
//       14      2  length of the address text
//       16      8  token: differs between ids
//       24      8  process token of the maker
//       32     88  address text, padded with zeros
//      120      8  XXH3 of bytes 0 .. 119
//
// Threads: any.
#pragma once

#include <cstdint>
#include <string>

#include "core/base/status.h"
#include "core/iface/rendezvous.h"

namespace sotto {

enum class IdKind : uint16_t { kInproc = 1, kTcp = 2 };

inline constexpr uint16_t kUniqueIdVersion = 1;
inline constexpr size_t kUniqueIdTextBytes = 88;

struct UniqueIdFields {
  IdKind kind = IdKind::kInproc;
  uint16_t port = 0;
  uint64_t token = 0;
  uint64_t process_token = 0;
  std::string
      addresses;  // where the maker listens, separated by commas; at most kUniqueIdTextBytes bytes
};

// INVALID_ARGUMENT if the addresses are too long.
Result<UniqueId> encode_unique_id(const UniqueIdFields& fields);
// INVALID_ARGUMENT if the bytes are no unique id or were damaged on their way; PROTOCOL if another
// version made it. A kind that this build does not know is passed on: Backend::knows decides.
Result<UniqueIdFields> decode_unique_id(const UniqueId& id);

// 64 bits from the system's random source, never 0.
uint64_t random_token();
// The same number in the whole process, another one in every other process (a forked child
// included). Never 0.
uint64_t process_token();

}  // namespace sotto
