// Tensors: sotto_buffer from the memory of a program, its dtype from the element type.
#ifndef SOTTO_CPP_BUFFER_HPP
#define SOTTO_CPP_BUFFER_HPP

#include <cstdint>
#include <type_traits>

#include "span.hpp"

namespace sotto {
inline namespace SOTTO_CPP_ABI {

// IEEE half precision and bfloat16, as bits. Programs that have types of their own for them
// specialise dtype_of.
struct float16 {
  std::uint16_t bits;
};
struct bfloat16 {
  std::uint16_t bits;
};

// The dtype of an element type, in value. Integers of 8, 16, 32 and 64 bits, float, double,
// float16, bfloat16; not char, bool and wchar_t.
template <class T, class = void>
struct dtype_of;

namespace detail {

template <class T>
using if_number = typename std::enable_if<
    std::is_integral<T>::value && sizeof(T) <= 8 && !std::is_same<T, bool>::value &&
    !std::is_same<T, char>::value && !std::is_same<T, wchar_t>::value &&
#if defined(__cpp_char8_t)
    !std::is_same<T, char8_t>::value &&
#endif
    !std::is_same<T, char16_t>::value && !std::is_same<T, char32_t>::value>::type;

// What a list of buffers is made of, but for such lists themselves.
struct buffer_list {};
template <class C>
using if_not_list = typename std::enable_if<
    !std::is_base_of<buffer_list, typename std::decay<C>::type>::value>::type;

}  // namespace detail

template <class T>
struct dtype_of<T, detail::if_number<T>> {
  static constexpr sotto_dtype value =
      (std::is_signed<T>::value ? SOTTO_INT8 : SOTTO_UINT8) + ((sizeof(T) - 1) * 8 << 8);
};
template <>
struct dtype_of<float> {
  static constexpr sotto_dtype value = SOTTO_FLOAT32;
};
template <>
struct dtype_of<double> {
  static constexpr sotto_dtype value = SOTTO_FLOAT64;
};
template <>
struct dtype_of<float16> {
  static constexpr sotto_dtype value = SOTTO_FLOAT16;
};
template <>
struct dtype_of<bfloat16> {
  static constexpr sotto_dtype value = SOTTO_BFLOAT16;
};

// Where memory is: the CPU unless something else is said.
struct device {
  sotto_device_type type;
  std::int32_t id;

  static device cpu() noexcept { return {SOTTO_DEVICE_CPU, 0}; }
  static device cuda(std::int32_t number) noexcept { return {SOTTO_DEVICE_CUDA, number}; }
  static device cuda_host() noexcept { return {SOTTO_DEVICE_CUDA_HOST, 0}; }
};

// `count` elements at `data`, which is borrowed. Whether an operation writes them is the matter of
// the function that the buffer is given to: constness ends here.
template <class T>
sotto_buffer buffer_of(T* data, std::uint64_t count, device where = device::cpu()) noexcept {
  typedef typename std::remove_cv<T>::type element;
  return {const_cast<element*>(data), count, dtype_of<element>::value, where.type, where.id, 0};
}

// All elements of a container, an array or a span in host memory.
template <class C, class E = detail::element_of<C>>
sotto_buffer buffer_of(C&& container) noexcept {
  return buffer_of(container.data(), container.size());
}
template <class T, std::size_t N>
sotto_buffer buffer_of(T (&array)[N]) noexcept {
  return buffer_of(array, N);
}

// Dtype and count without memory, for functions that take buffers "like" these.
template <class T>
sotto_buffer buffer_like(std::uint64_t count, device where = device::cpu()) noexcept {
  return buffer_of(static_cast<T*>(nullptr), count, where);
}

// One buffer: a sotto_buffer, or made of a container or an array of numbers. Of memory that is
// written the elements must not be const.
template <bool Written>
class tensor {
 public:
  tensor(const sotto_buffer& buffer) noexcept : buffer_(buffer) {}
  template <class T>
  tensor(T* data, std::uint64_t count) noexcept : buffer_(buffer_of(data, count)) {
    static_assert(!Written || !std::is_const<T>::value, "memory that is written cannot be const");
  }
  template <class C, class E = detail::element_of<C>>
  tensor(C&& container) noexcept : tensor(container.data(), container.size()) {}
  template <class T, std::size_t N>
  tensor(T (&array)[N]) noexcept : tensor(array, N) {}

  const sotto_buffer& get() const noexcept { return buffer_; }

 private:
  sotto_buffer buffer_;
};
using in_tensor = tensor<false>;
using out_tensor = tensor<true>;

// The buffers of a call: one, made as a tensor is, or a container or an array of sotto_buffer.
template <bool Written>
class buffers : detail::buffer_list {
 public:
  buffers() noexcept : one_(), list_(nullptr), size_(0), single_(false) {}
  buffers(const sotto_buffer& one) noexcept : one_(one), list_(nullptr), size_(1), single_(true) {}
  template <class C, class = detail::if_not_list<C>, class E = detail::element_of<C>>
  buffers(C&& container) noexcept : buffers(container.data(), container.size()) {}
  template <class T, std::size_t N>
  buffers(T (&array)[N]) noexcept : buffers(array, N) {}

  const sotto_buffer* data() const noexcept { return single_ ? &one_ : list_; }
  std::size_t size() const noexcept { return size_; }

 private:
  buffers(const sotto_buffer* list, std::size_t n) noexcept
      : one_(), list_(list), size_(n), single_(false) {}
  buffers(sotto_buffer* list, std::size_t n) noexcept
      : one_(), list_(list), size_(n), single_(false) {}
  template <class T>
  buffers(T* data, std::size_t n) noexcept : buffers(tensor<Written>(data, n).get()) {}

  sotto_buffer one_;
  const sotto_buffer* list_;
  std::size_t size_;
  bool single_;
};
using in_buffers = buffers<false>;
using out_buffers = buffers<true>;

}  // namespace SOTTO_CPP_ABI
}  // namespace sotto

#endif  // SOTTO_CPP_BUFFER_HPP
