// The container of exported state: named sections behind a header, with a checksum over everything.
//
//   offset  bytes
//        0      8  magic "SOTTOST1"
//        8      4  format version
//       12      4  number of sections
//       16      8  bytes of the whole blob
//       24         sections: name length (4), name, data length (8), data, zeros to a multiple of 8
//     end-8     8  XXH3 of everything before
//
// Little-endian. Names are unique.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/base/hash.h"
#include "core/base/status.h"
#include "core/base/text.h"

namespace sotto {

inline constexpr uint32_t kBlobVersion = 1;

// Takes bytes in order.
using ByteSink = std::function<Status(std::span<const std::byte>)>;
// Reads the bytes at an offset.
using ByteSource = std::function<Status(uint64_t offset, std::span<std::byte>)>;

// Bytes of a blob with sections of these names and lengths.
class BlobSize {
 public:
  void add(std::string_view name, uint64_t bytes);
  uint64_t total() const;
  uint32_t sections() const { return sections_; }

 private:
  uint64_t bytes_ = 0;
  uint32_t sections_ = 0;
};

// Writes a blob from its first byte to its last, without keeping it. Its size has to be known.
class BlobStream {
 public:
  explicit BlobStream(ByteSink sink) : sink_(std::move(sink)) {}
  Status start(const BlobSize& size);
  // A section, whose `bytes` bytes follow by put.
  Status section(std::string_view name, uint64_t bytes);
  Status put(const void* data, uint64_t bytes);
  Status finish();

 private:
  Status end_section();
  Status emit(const void* data, uint64_t bytes);

  ByteSink sink_;
  Hasher64 hasher_;
  uint64_t written_ = 0, left_ = 0;  // left_: of the section
};

// A whole blob in memory.
class BlobWriter {
 public:
  void add(std::string_view name, const void* data, uint64_t bytes);
  template <class T>
  void add(std::string_view name, const std::vector<T>& values) {
    static_assert(std::is_trivially_copyable_v<T>);
    add(name, values.data(), values.size() * sizeof(T));
  }
  void add(std::string_view name, std::string_view text) { add(name, text.data(), text.size()); }
  std::vector<std::byte> finish() &&;

 private:
  struct Section {
    std::string name;
    std::vector<std::byte> data;
  };
  std::vector<Section> sections_;
};

class BlobReader {
 public:
  // Reads everything once, to check it. INVALID_ARGUMENT: truncated, damaged or no state blob, and
  // later of a read: the source gives other bytes than it gave then;
  // UNSUPPORTED: a newer format; what the source gives. The source must outlive the reader.
  static Result<BlobReader> open(ByteSource source, uint64_t bytes);
  // Views into `bytes`, which must outlive the reader.
  static Result<BlobReader> open(std::span<const std::byte> bytes);

  bool has(std::string_view name) const { return sections_.find(name) != sections_.end(); }
  std::vector<std::string> names() const;  // of all sections, in order
  // INVALID_ARGUMENT if there is no such section.
  Result<uint64_t> bytes_of(std::string_view name) const;
  // A part of a section, which has it.
  Status read(std::string_view name, uint64_t first, std::span<std::byte> out) const;
  Result<std::string> text(std::string_view name) const;
  // Values of a section. INVALID_ARGUMENT if its length is no multiple of T's.
  template <class T>
  Result<uint64_t> count(std::string_view name) const {
    SOTTO_ASSIGN(const uint64_t bytes, bytes_of(name));
    if (bytes % sizeof(T) == 0) return bytes / sizeof(T);
    return invalid_argument("state section \"{}\" has {}, no multiple of {}", name,
                            counted(bytes, "byte"), sizeof(T));
  }
  template <class T>
  Result<std::vector<T>> values(std::string_view name) const {
    SOTTO_ASSIGN(const uint64_t n, count<T>(name));
    std::vector<T> out(n);
    SOTTO_TRY(read(name, 0, std::as_writable_bytes(std::span<T>(out))));
    return out;
  }

 private:
  struct Extent {
    uint64_t offset = 0, bytes = 0;
  };
  // From then on what is read has to be what was hashed.
  Status check_hash(uint64_t end);
  Status find_sections(uint32_t count, uint64_t end);

  ByteSource source_;
  std::map<std::string, Extent, std::less<>> sections_;
};

}  // namespace sotto
