#include "core/iface/unique_id.h"

#include <errno.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <stdexcept>

#include "core/base/hash.h"

namespace sotto {
namespace {

constexpr char kMagic[] = "SOTTOID1";
constexpr size_t kMagicBytes = 8;
constexpr size_t kVersionAt = 8;
constexpr size_t kKindAt = 10;
constexpr size_t kPortAt = 12;
constexpr size_t kTextBytesAt = 14;
constexpr size_t kTokenAt = 16;
constexpr size_t kProcessAt = 24;
constexpr size_t kTextAt = 32;
constexpr size_t kChecksumAt = kTextAt + kUniqueIdTextBytes;
static_assert(kChecksumAt + 8 == sizeof(UniqueId));

template <class T>
void put(UniqueId& id, size_t at, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) id[at + i] = static_cast<uint8_t>(value >> (8 * i));
}

template <class T>
T get(const UniqueId& id, size_t at) {
  uint64_t value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) value |= uint64_t{id[at + i]} << (8 * i);
  return static_cast<T>(value);
}

}  // namespace

Result<UniqueId> encode_unique_id(const UniqueIdFields& fields) {
  if (fields.addresses.size() > kUniqueIdTextBytes) {
    return invalid_argument("unique id: the addresses \"{}\" take {} bytes, at most {} fit",
                            fields.addresses, fields.addresses.size(), kUniqueIdTextBytes);
  }
  UniqueId id{};
  std::copy_n(kMagic, kMagicBytes, id.begin());
  put<uint16_t>(id, kVersionAt, kUniqueIdVersion);
  put<uint16_t>(id, kKindAt, static_cast<uint16_t>(fields.kind));
  put<uint16_t>(id, kPortAt, fields.port);
  put<uint16_t>(id, kTextBytesAt, static_cast<uint16_t>(fields.addresses.size()));
  put<uint64_t>(id, kTokenAt, fields.token);
  put<uint64_t>(id, kProcessAt, fields.process_token);
  std::copy(fields.addresses.begin(), fields.addresses.end(), id.begin() + kTextAt);
  put<uint64_t>(id, kChecksumAt, hash64(id.data(), kChecksumAt));
  return id;
}

Result<UniqueIdFields> decode_unique_id(const UniqueId& id) {
  if (!std::equal(kMagic, kMagic + kMagicBytes, id.begin())) {
    return invalid_argument("the {} bytes are not a unique id (made by sotto_unique_id_create)",
                            id.size());
  }
  if (const auto version = get<uint16_t>(id, kVersionAt); version != kUniqueIdVersion) {
    return error(Code::kProtocol, "unique id of version {}, this library reads version {}", version,
                 kUniqueIdVersion);
  }
  if (get<uint64_t>(id, kChecksumAt) != hash64(id.data(), kChecksumAt)) {
    return invalid_argument("the unique id was damaged on its way: its checksum does not fit");
  }
  UniqueIdFields fields;
  fields.kind = static_cast<IdKind>(get<uint16_t>(id, kKindAt));
  fields.port = get<uint16_t>(id, kPortAt);
  fields.token = get<uint64_t>(id, kTokenAt);
  fields.process_token = get<uint64_t>(id, kProcessAt);
  const size_t text = get<uint16_t>(id, kTextBytesAt);
  if (text > kUniqueIdTextBytes) {
    return invalid_argument("unique id: address text of {} bytes, at most {} fit", text,
                            kUniqueIdTextBytes);
  }
  fields.addresses.assign(id.begin() + kTextAt,
                          id.begin() + kTextAt + static_cast<ptrdiff_t>(text));
  return fields;
}

uint64_t random_token() {
  uint64_t token = 0;
  while (token == 0) {
    const ssize_t n = getrandom(&token, sizeof token, 0);
    if (n == sizeof token || (n < 0 && errno == EINTR)) continue;
    // A kernel without getrandom. Not std::random_device, which asks for a newer C library where it
    // is linked statically.
    std::ifstream source("/dev/urandom", std::ios::binary);
    if (!source.read(reinterpret_cast<char*>(&token), sizeof token)) {
      throw std::runtime_error("no random numbers: neither getrandom() nor /dev/urandom has any");
    }
  }
  return token;
}

uint64_t process_token() {
  static const uint64_t seed = random_token();
  const auto pid = static_cast<uint64_t>(getpid());  // a forked child inherits the seed
  const uint64_t token = hash64(&pid, sizeof pid, seed);
  return token == 0 ? 1 : token;
}

}  // namespace sotto
