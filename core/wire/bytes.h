// Little-endian integers and counted strings, written and read with bounds checks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

namespace sotto::wire {

// Writes at a fixed place, where the caller has room for it.
template <class T>
void put_at(uint8_t* out, T value) {
  static_assert(std::is_unsigned_v<T>);
  for (size_t i = 0; i < sizeof(T); ++i) out[i] = static_cast<uint8_t>(value >> (8 * i));
}
template <class T>
T get_at(const uint8_t* in) {
  static_assert(std::is_unsigned_v<T>);
  uint64_t value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) value |= uint64_t{in[i]} << (8 * i);
  return static_cast<T>(value);
}

class ByteWriter {
 public:
  template <class T>
  void number(T value) {
    static_assert(std::is_integral_v<T>);
    using U = std::make_unsigned_t<T>;
    uint8_t bytes[sizeof(T)];
    put_at<U>(bytes, static_cast<U>(value));
    out_.append(reinterpret_cast<const char*>(bytes), sizeof bytes);
  }
  // Length (32 bits) and bytes.
  void text(std::string_view text) {
    number(static_cast<uint32_t>(text.size()));
    out_.append(text);
  }
  std::string take() { return std::move(out_); }

 private:
  std::string out_;
};

// After the first read beyond the end every read gives 0 or "" and ok() is false.
class ByteReader {
 public:
  explicit ByteReader(std::span<const uint8_t> in) : in_(in) {}

  template <class T>
  T number() {
    static_assert(std::is_integral_v<T>);
    if (!take(sizeof(T))) return T{0};
    return static_cast<T>(get_at<std::make_unsigned_t<T>>(in_.data() + at_ - sizeof(T)));
  }
  std::string_view text() {
    const uint32_t bytes = number<uint32_t>();
    if (!take(bytes)) return {};
    return {reinterpret_cast<const char*>(in_.data()) + at_ - bytes, bytes};
  }
  uint64_t left() const { return in_.size() - at_; }
  bool ok() const { return ok_; }
  // All bytes were read, and none was missing.
  bool finished() const { return ok_ && left() == 0; }

 private:
  bool take(uint64_t bytes) {
    ok_ = ok_ && bytes <= left();
    if (ok_) at_ += bytes;
    return ok_;
  }

  std::span<const uint8_t> in_;
  size_t at_ = 0;
  bool ok_ = true;
};

}  // namespace sotto::wire
