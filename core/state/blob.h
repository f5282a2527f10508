// The container of exported state: named sections behind a header, with a checksum over everything.
//
//   offset  bytes
//        0      8  magic "SOTTOST1"
//        8      4  format version
//       12      4  number of sections
//       16      8  bytes of the whole blob
//       24         sections: name length (4), name, data length (8), data, zeros up to a multiple
//       of 8
//     end-8     8  XXH3 of everything before
//
// Little-endian. Names are unique.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/base/status.h"

namespace sotto {

inline constexpr uint32_t kBlobVersion = 1;

class BlobWriter {
 public:
  BlobWriter();
  void add(std::string_view name, const void* data, uint64_t bytes);
  template <class T>
  void add(std::string_view name, const std::vector<T>& values) {
    static_assert(std::is_trivially_copyable_v<T>);
    add(name, values.data(), values.size() * sizeof(T));
  }
  void add(std::string_view name, std::string_view text) { add(name, text.data(), text.size()); }
  std::vector<std::byte> finish() &&;

 private:
  void append(const void* data, uint64_t bytes);
  void pad();

  std::vector<std::byte> bytes_;
  uint32_t sections_ = 0;
};

class BlobReader {
 public:
  // INVALID_ARGUMENT: truncated, damaged or no state blob; UNSUPPORTED: a newer format. Views into
  // `bytes`, which must outlive the reader.
  static Result<BlobReader> open(std::span<const std::byte> bytes);

  bool has(std::string_view name) const { return sections_.find(name) != sections_.end(); }
  // INVALID_ARGUMENT if there is no such section.
  Result<std::span<const std::byte>> section(std::string_view name) const;
  Result<std::string> text(std::string_view name) const;
  // INVALID_ARGUMENT if the section's length is no multiple of T's.
  template <class T>
  Result<std::vector<T>> values(std::string_view name) const {
    SOTTO_ASSIGN(const std::span<const std::byte> data, section(name));
    if (data.size() % sizeof(T) != 0) {
      return invalid_argument("state section \"{}\" has {} bytes, no multiple of {}", name,
                              data.size(), sizeof(T));
    }
    std::vector<T> out(data.size() / sizeof(T));
    if (!out.empty()) std::memcpy(out.data(), data.data(), data.size());
    return out;
  }

 private:
  std::map<std::string, std::span<const std::byte>, std::less<>> sections_;
};

}  // namespace sotto
