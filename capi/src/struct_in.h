// How structs that may grow cross the border, in the one place that knows the rule.
//
// In: the caller states its size of the struct. Fields that an older caller does not have read as
// zero, which means their default. A newer caller may pass a larger struct as long as what this
// library does not know is zero. Out: the caller states its size; it gets what it has room for, and
// zero in what this library does not know.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <type_traits>

#include "core/base/status.h"

namespace sotto::capi {

inline constexpr uint32_t kMaxStructBytes = 4096;

inline bool any_nonzero(const void* data, size_t from, size_t to) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (size_t i = from; i < to; ++i) {
    if (bytes[i] != 0) return true;
  }
  return false;
}

// v1_size: size of the struct when it was first released; no caller can have a smaller one. `name`
// is the argument's.
template <class T>
Status check_struct_size(const T* in, uint32_t v1_size, std::string_view name, uint32_t* size) {
  static_assert(std::is_trivially_copyable_v<T> && std::is_standard_layout_v<T>);
  if (in == nullptr) return invalid_argument("{} is NULL", name);
  std::memcpy(size, in, sizeof *size);
  if (*size >= v1_size && *size <= kMaxStructBytes) return ok_status();
  return invalid_argument("{}.struct_size is {}, allowed {} to {}: set it to sizeof of the struct",
                          name, *size, v1_size, kMaxStructBytes);
}

template <class T>
Status take(const T* in, T& out, uint32_t v1_size, std::string_view name) {
  uint32_t size = 0;
  SOTTO_TRY(check_struct_size(in, v1_size, name, &size));
  const size_t known = std::min<size_t>(size, sizeof(T));
  out = T{};
  std::memcpy(&out, in, known);
  if (any_nonzero(in, known, size)) {
    return unsupported(
        "{} has a field behind byte {} that this version of the library does not know, and it is "
        "not zero",
        name, sizeof(T));
  }
  return ok_status();
}

// Element `index` of an array of structs whose stride is the struct_size of the first.
template <class T>
Status take_element(const T* first, uint64_t index, uint32_t v1_size, std::string_view name,
                    T& out) {
  uint32_t stride = 0, size = 0;
  SOTTO_TRY(check_struct_size(first, v1_size, fmt::format("{}[0]", name), &stride));
  const auto* at =
      reinterpret_cast<const T*>(reinterpret_cast<const unsigned char*>(first) + index * stride);
  std::memcpy(&size, at, sizeof size);
  if (size != stride) {
    return invalid_argument(
        "{0}[{1}].struct_size is {2} but that of {0}[0], the stride of the array, is {3}", name,
        index, size, stride);
  }
  return take(at, out, v1_size, fmt::format("{}[{}]", name, index));
}

// Writes `value` (whose struct_size does not matter) to the caller's struct, which keeps its own
// struct_size.
template <class T>
Status put(const T& value, T* out, uint32_t v1_size, std::string_view name) {
  uint32_t size = 0;
  SOTTO_TRY(check_struct_size(out, v1_size, name, &size));
  const size_t known = std::min<size_t>(size, sizeof(T));
  std::memcpy(out, &value, known);
  std::memset(reinterpret_cast<unsigned char*>(out) + known, 0, size - known);
  std::memcpy(out, &size, sizeof size);
  return ok_status();
}

}  // namespace sotto::capi
