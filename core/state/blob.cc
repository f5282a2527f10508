#include "core/state/blob.h"
#include "core/base/text.h"

#include <algorithm>
#include <array>
#include <bit>
#include <memory>

namespace sotto {
namespace {

static_assert(std::endian::native == std::endian::little, "state blobs are little-endian");

constexpr char kMagic[] = "SOTTOST1";
constexpr uint64_t kHeaderBytes = 24;
constexpr uint64_t kTrailerBytes = 8;
constexpr uint32_t kMaxNameBytes = 255;

constexpr uint64_t kReadBytes = uint64_t{1} << 20;  // at a time, while the checksum is made

template <class T>
Result<T> load(const ByteSource& source, uint64_t at) {
  T value;
  SOTTO_TRY(source(at, std::as_writable_bytes(std::span<T>(&value, 1))));
  return value;
}

// A source whose bytes were hashed block by block. What it reads again has to be the same.
class CheckedSource {
 public:
  CheckedSource(ByteSource source, uint64_t end) : source_(std::move(source)), end_(end) {}

  // Every byte once: of all together the hash.
  Result<uint64_t> hash();
  Status read(uint64_t at, std::span<std::byte> out);

 private:
  Status fetch(uint64_t block);

  ByteSource source_;
  uint64_t end_;
  std::vector<uint64_t> hashes_;  // of every block, kReadBytes long but for the last
  std::vector<std::byte> held_;
  uint64_t block_ = UINT64_MAX;  // which one is held
};

Status CheckedSource::fetch(uint64_t block) {
  block_ = UINT64_MAX;
  held_.resize(std::min(end_ - block * kReadBytes, kReadBytes));
  SOTTO_TRY(source_(block * kReadBytes, held_));
  block_ = block;
  return ok_status();
}

Result<uint64_t> CheckedSource::hash() {
  Hasher64 hasher;
  for (uint64_t block = 0; block * kReadBytes < end_; ++block) {
    SOTTO_TRY(fetch(block));
    hasher.update(held_.data(), held_.size());
    hashes_.push_back(hash64(held_.data(), held_.size()));
  }
  return hasher.digest();
}

Status CheckedSource::read(uint64_t at, std::span<std::byte> out) {
  while (!out.empty()) {
    const uint64_t block = at / kReadBytes, first = at % kReadBytes;
    if (block != block_) {
      SOTTO_TRY(fetch(block));
      if (hash64(held_.data(), held_.size()) != hashes_[block]) {
        block_ = UINT64_MAX;
        return invalid_argument(
            "the state changes while it is read: of bytes {} to {} some were others before",
            block * kReadBytes, block * kReadBytes + held_.size() - 1);
      }
    }
    const uint64_t part = std::min<uint64_t>(out.size(), held_.size() - first);
    std::memcpy(out.data(), held_.data() + first, part);
    at += part;
    out = out.subspan(part);
  }
  return ok_status();
}

uint64_t padded(uint64_t bytes) { return (bytes + 7) / 8 * 8; }

Status damaged() {
  return invalid_argument("the state is damaged: its sections do not fit together");
}

}  // namespace

void BlobSize::add(std::string_view name, uint64_t bytes) {
  bytes_ += padded(4 + name.size() + 8 + bytes);
  ++sections_;
}

uint64_t BlobSize::total() const { return kHeaderBytes + bytes_ + kTrailerBytes; }

Status BlobStream::emit(const void* data, uint64_t bytes) {
  if (bytes == 0) return ok_status();
  hasher_.update(data, bytes);
  written_ += bytes;
  return sink_({static_cast<const std::byte*>(data), bytes});
}

Status BlobStream::start(const BlobSize& size) {
  const uint32_t version = kBlobVersion;
  const uint32_t sections = size.sections();
  const uint64_t total = size.total();
  std::array<std::byte, kHeaderBytes> header{};
  std::memcpy(header.data(), kMagic, 8);
  std::memcpy(&header[8], &version, 4);
  std::memcpy(&header[12], &sections, 4);
  std::memcpy(&header[16], &total, 8);
  return emit(header.data(), header.size());
}

Status BlobStream::end_section() {
  if (left_ != 0) return error(Code::kInternal, "a state section lacks {}", counted(left_, "byte"));
  constexpr std::array<std::byte, 8> kZeros{};
  return emit(kZeros.data(), padded(written_) - written_);
}

Status BlobStream::section(std::string_view name, uint64_t bytes) {
  SOTTO_TRY(end_section());
  const auto length = static_cast<uint32_t>(name.size());
  std::string head(reinterpret_cast<const char*>(&length), 4);
  head += name;
  head.append(reinterpret_cast<const char*>(&bytes), 8);
  SOTTO_TRY(emit(head.data(), head.size()));
  left_ = bytes;
  return ok_status();
}

Status BlobStream::put(const void* data, uint64_t bytes) {
  if (bytes > left_)
    return error(Code::kInternal, "a state section is too long by {}", bytes - left_);
  left_ -= bytes;
  return emit(data, bytes);
}

Status BlobStream::finish() {
  SOTTO_TRY(end_section());
  const uint64_t checksum = hasher_.digest();
  return sink_(std::as_bytes(std::span<const uint64_t>(&checksum, 1)));
}

void BlobWriter::add(std::string_view name, const void* data, uint64_t bytes) {
  const auto* first = static_cast<const std::byte*>(data);
  sections_.push_back({std::string(name), std::vector<std::byte>(first, first + bytes)});
}

std::vector<std::byte> BlobWriter::finish() && {
  BlobSize size;
  for (const Section& s : sections_) size.add(s.name, s.data.size());
  std::vector<std::byte> out;
  out.reserve(size.total());
  BlobStream stream([&](std::span<const std::byte> more) {
    out.insert(out.end(), more.begin(), more.end());
    return ok_status();
  });
  // Memory takes everything.
  (void)stream.start(size);
  for (const Section& s : sections_) {
    (void)stream.section(s.name, s.data.size());
    (void)stream.put(s.data.data(), s.data.size());
  }
  (void)stream.finish();
  return out;
}

Result<BlobReader> BlobReader::open(std::span<const std::byte> bytes) {
  return open(
      [bytes](uint64_t offset, std::span<std::byte> out) {
        if (!out.empty()) std::memcpy(out.data(), bytes.data() + offset, out.size());
        return ok_status();
      },
      bytes.size());
}

Result<BlobReader> BlobReader::open(ByteSource source, uint64_t bytes) {
  if (bytes < kHeaderBytes + kTrailerBytes) {
    return invalid_argument("the state has {}, too few for any state", counted(bytes, "byte"));
  }
  BlobReader reader;
  reader.source_ = std::move(source);
  char magic[8];
  SOTTO_TRY(reader.source_(0, std::as_writable_bytes(std::span<char>(magic))));
  if (std::memcmp(magic, kMagic, 8) != 0)
    return invalid_argument("this is no exported state (its first bytes differ)");
  SOTTO_ASSIGN(const auto version, load<uint32_t>(reader.source_, 8));
  if (version > kBlobVersion) {
    return unsupported("the state has format version {}, this library reads up to {}", version,
                       kBlobVersion);
  }
  SOTTO_ASSIGN(const auto total, load<uint64_t>(reader.source_, 16));
  if (total != bytes)
    return invalid_argument("the state is truncated: {} of {}", bytes, counted(total, "byte"));
  const uint64_t end = bytes - kTrailerBytes;
  SOTTO_TRY(reader.check_hash(end));
  SOTTO_ASSIGN(const auto count, load<uint32_t>(reader.source_, 12));
  SOTTO_TRY(reader.find_sections(count, end));
  return reader;
}

Status BlobReader::check_hash(uint64_t end) {
  const auto checked = std::make_shared<CheckedSource>(source_, end);
  SOTTO_ASSIGN(const uint64_t hash, checked->hash());
  SOTTO_ASSIGN(const auto checksum, load<uint64_t>(source_, end));
  if (checksum != hash) return invalid_argument("the state is damaged: its checksum does not fit");
  source_ = [checked](uint64_t at, std::span<std::byte> out) { return checked->read(at, out); };
  return ok_status();
}

Status BlobReader::find_sections(uint32_t count, uint64_t end) {
  uint64_t at = kHeaderBytes;
  for (uint32_t i = 0; i < count; ++i) {
    if (end - at < 4) return damaged();
    SOTTO_ASSIGN(const auto name_bytes, load<uint32_t>(source_, at));
    at += 4;
    if (name_bytes > kMaxNameBytes || end - at < uint64_t{name_bytes} + 8) return damaged();
    std::string name(name_bytes, '\0');
    SOTTO_TRY(source_(at, std::as_writable_bytes(std::span<char>(name))));
    at += name_bytes;
    SOTTO_ASSIGN(const auto data_bytes, load<uint64_t>(source_, at));
    at += 8;
    if (data_bytes > end - at) return damaged();
    if (!sections_.emplace(std::move(name), Extent{at, data_bytes}).second) return damaged();
    at += data_bytes;
    at = std::min(end, padded(at));
  }
  return at == end ? ok_status() : damaged();
}

std::vector<std::string> BlobReader::names() const {
  std::vector<std::string> out;
  for (const auto& [name, extent] : sections_) out.push_back(name);
  std::sort(out.begin(), out.end(), [this](const std::string& a, const std::string& b) {
    return sections_.at(a).offset < sections_.at(b).offset;
  });
  return out;
}

Result<uint64_t> BlobReader::bytes_of(std::string_view name) const {
  const auto it = sections_.find(name);
  if (it == sections_.end()) return invalid_argument("the state has no section \"{}\"", name);
  return it->second.bytes;
}

Status BlobReader::read(std::string_view name, uint64_t first, std::span<std::byte> out) const {
  const auto it = sections_.find(name);
  if (it == sections_.end() || first > it->second.bytes || out.size() > it->second.bytes - first)
    return invalid_argument("the state has no {} in section \"{}\"",
                            counted(first + out.size(), "byte"), name);
  return out.empty() ? ok_status() : source_(it->second.offset + first, out);
}

Result<std::string> BlobReader::text(std::string_view name) const {
  SOTTO_ASSIGN(const std::vector<char> data, values<char>(name));
  return std::string(data.begin(), data.end());
}

}  // namespace sotto
