// Structs that optimizers and exchanges take arrays of. Texts in them are borrowed.
#ifndef SOTTO_CPP_PARAMS_HPP
#define SOTTO_CPP_PARAMS_HPP

#include <cstdint>
#include <string>
#include <type_traits>

#include "buffer.hpp"

namespace sotto {
inline namespace SOTTO_CPP_ABI {

namespace detail {

// A string that is gone when the struct which borrows it is used.
template <class S>
using if_temporary_string = typename std::enable_if<std::is_same<S, std::string>::value>::type;

}  // namespace detail

// One tensor of an optimizer: sotto_param with setters. The name, NULL for "param<index>", is
// borrowed until the optimizer has been created: not that of a temporary string.
class param : public sotto_param {
 public:
  param(text called, const out_tensor& live) noexcept : sotto_param(initial()) {
    sotto_param::name = called.c_str();
    sotto_param::param = live.get();
  }
  template <class S, class = detail::if_temporary_string<S>>
  param(S&& called, const out_tensor& live) = delete;

  param& grad(const in_tensor& tensor) noexcept {
    sotto_param::grad = tensor.get();
    return *this;
  }
  param& model_copy(const out_tensor& tensor) noexcept {
    sotto_param::model_copy = tensor.get();
    return *this;
  }
  param& mask(const in_tensor& tensor) noexcept {
    sotto_param::mask = tensor.get();
    return *this;
  }
  param& group(std::uint32_t index) noexcept {
    sotto_param::group = index;
    return *this;
  }
  param& models(std::uint64_t n) noexcept {
    sotto_param::models = n;
    return *this;
  }

 private:
  static sotto_param initial() noexcept {
    sotto_param c = SOTTO_PARAM_INIT;
    return c;
  }
};
static_assert(sizeof(param) == sizeof(sotto_param) && std::is_standard_layout<param>::value,
              "an array of param is one of sotto_param");

// The parts of one tensor: a number per rank in each of the arrays, which are borrowed.
class parts : public sotto_parts {
 public:
  parts() noexcept : sotto_parts(initial()) {}

  parts& in(span<const std::uint64_t> counts) noexcept {
    in_counts = counts.data();
    return *this;
  }
  parts& in(span<const std::uint64_t> counts, span<const std::uint64_t> offsets) noexcept {
    in_offsets = offsets.data();
    return in(counts);
  }
  parts& out(span<const std::uint64_t> counts) noexcept {
    out_counts = counts.data();
    return *this;
  }
  parts& out(span<const std::uint64_t> counts, span<const std::uint64_t> offsets) noexcept {
    out_offsets = offsets.data();
    return out(counts);
  }

 private:
  static sotto_parts initial() noexcept {
    sotto_parts c = SOTTO_PARTS_INIT;
    return c;
  }
};
static_assert(sizeof(parts) == sizeof(sotto_parts) && std::is_standard_layout<parts>::value,
              "an array of parts is one of sotto_parts");

// One array of a DeepSpeed checkpoint. The name is borrowed.
class named_array : public sotto_named_array {
 public:
  named_array(text called, const in_tensor& array) noexcept : sotto_named_array(initial()) {
    sotto_named_array::name = called.c_str();
    sotto_named_array::values = array.get();
  }
  template <class S, class = detail::if_temporary_string<S>>
  named_array(S&& called, const in_tensor& array) = delete;

 private:
  static sotto_named_array initial() noexcept {
    sotto_named_array c = SOTTO_NAMED_ARRAY_INIT;
    return c;
  }
};
static_assert(sizeof(named_array) == sizeof(sotto_named_array) &&
                  std::is_standard_layout<named_array>::value,
              "an array of named_array is one of sotto_named_array");

}  // namespace SOTTO_CPP_ABI
}  // namespace sotto

#endif  // SOTTO_CPP_PARAMS_HPP
