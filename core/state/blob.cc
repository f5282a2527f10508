#include "core/state/blob.h"

#include <bit>

#include "core/base/hash.h"
#include "core/base/text.h"

namespace sotto {
namespace {

static_assert(std::endian::native == std::endian::little, "state blobs are little-endian");

constexpr char kMagic[] = "SOTTOST1";
constexpr uint64_t kHeaderBytes = 24;
constexpr uint64_t kTrailerBytes = 8;
constexpr uint32_t kMaxNameBytes = 255;

template <class T>
T load(std::span<const std::byte> bytes, uint64_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

}  // namespace

BlobWriter::BlobWriter() {
  const uint32_t version = kBlobVersion;
  const uint32_t sections = 0;
  const uint64_t total = 0;
  append(kMagic, 8);
  append(&version, 4);
  append(&sections, 4);
  append(&total, 8);
}

void BlobWriter::append(const void* data, uint64_t bytes) {
  const auto* first = static_cast<const std::byte*>(data);
  bytes_.insert(bytes_.end(), first, first + bytes);
}

void BlobWriter::pad() { bytes_.resize((bytes_.size() + 7) / 8 * 8, std::byte{0}); }

void BlobWriter::add(std::string_view name, const void* data, uint64_t bytes) {
  const auto length = static_cast<uint32_t>(name.size());
  append(&length, 4);
  append(name.data(), length);
  append(&bytes, 8);
  append(data, bytes);
  pad();
  ++sections_;
}

std::vector<std::byte> BlobWriter::finish() && {
  const uint64_t total = bytes_.size() + kTrailerBytes;
  std::memcpy(bytes_.data() + 12, &sections_, 4);
  std::memcpy(bytes_.data() + 16, &total, 8);
  const uint64_t checksum = hash64(bytes_.data(), bytes_.size());
  append(&checksum, 8);
  return std::move(bytes_);
}

Result<BlobReader> BlobReader::open(std::span<const std::byte> bytes) {
  if (bytes.size() < kHeaderBytes + kTrailerBytes) {
    return invalid_argument("the state has {} bytes, too few for any state", bytes.size());
  }
  if (std::memcmp(bytes.data(), kMagic, 8) != 0)
    return invalid_argument("this is no exported state (its first bytes differ)");
  const auto version = load<uint32_t>(bytes, 8);
  if (version > kBlobVersion) {
    return unsupported("the state has format version {}, this library reads up to {}", version,
                       kBlobVersion);
  }
  const auto total = load<uint64_t>(bytes, 16);
  if (total != bytes.size())
    return invalid_argument("the state is truncated: {} of {} bytes", bytes.size(), total);
  const uint64_t end = bytes.size() - kTrailerBytes;
  if (load<uint64_t>(bytes, end) != hash64(bytes.data(), end)) {
    return invalid_argument("the state is damaged: its checksum does not fit");
  }
  const auto damaged = [] {
    return invalid_argument("the state is damaged: its sections do not fit together");
  };
  BlobReader reader;
  const auto count = load<uint32_t>(bytes, 12);
  uint64_t at = kHeaderBytes;
  for (uint32_t i = 0; i < count; ++i) {
    if (end - at < 4) return damaged();
    const auto name_bytes = load<uint32_t>(bytes, at);
    at += 4;
    if (name_bytes > kMaxNameBytes || end - at < uint64_t{name_bytes} + 8) return damaged();
    std::string name(reinterpret_cast<const char*>(bytes.data() + at), name_bytes);
    at += name_bytes;
    const auto data_bytes = load<uint64_t>(bytes, at);
    at += 8;
    if (data_bytes > end - at) return damaged();
    if (!reader.sections_.emplace(std::move(name), bytes.subspan(at, data_bytes)).second)
      return damaged();
    at += data_bytes;
    at = std::min(end, (at + 7) / 8 * 8);
  }
  if (at != end) return damaged();
  return reader;
}

Result<std::span<const std::byte>> BlobReader::section(std::string_view name) const {
  const auto it = sections_.find(name);
  if (it == sections_.end()) return invalid_argument("the state has no section \"{}\"", name);
  return it->second;
}

Result<std::string> BlobReader::text(std::string_view name) const {
  SOTTO_ASSIGN(const std::span<const std::byte> data, section(name));
  return std::string(reinterpret_cast<const char*>(data.data()), data.size());
}

}  // namespace sotto
