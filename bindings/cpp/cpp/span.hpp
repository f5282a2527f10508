// Views of memory and of texts that are borrowed during a call.
#ifndef SOTTO_CPP_SPAN_HPP
#define SOTTO_CPP_SPAN_HPP

#include <cstddef>
#include <string>
#include <type_traits>
#include <utility>

#include "config.hpp"

namespace sotto {
inline namespace SOTTO_CPP_ABI {

namespace detail {

// Element type of what has data() and size(): containers, std::span, std::array, spans of others.
template <class C, class = decltype(std::declval<C&>().size())>
using element_of = typename std::remove_pointer<decltype(std::declval<C&>().data())>::type;

template <class From, class To>
using if_viewable = typename std::enable_if<std::is_convertible<From (*)[], To (*)[]>::value>::type;

}  // namespace detail

// Elements one behind the other. Made of a pointer and a count, an array, or anything that has
// data() and size().
template <class T>
class span {
 public:
  span() noexcept : data_(nullptr), size_(0) {}
  span(T* data, std::size_t size) noexcept : data_(data), size_(size) {}
  template <class U, std::size_t N, class = detail::if_viewable<U, T>>
  span(U (&array)[N]) noexcept : data_(array), size_(N) {}
  template <class C, class E = detail::element_of<C>, class = detail::if_viewable<E, T>>
  span(C&& container) noexcept : data_(container.data()), size_(container.size()) {}

  T* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }
  bool empty() const noexcept { return size_ == 0; }
  T* begin() const noexcept { return data_; }
  T* end() const noexcept { return data_ + size_; }
  T& operator[](std::size_t i) const { return data_[i]; }

 private:
  T* data_;
  std::size_t size_;
};

// Bytes of any kind, read only: a pointer and a count, or a container of chars, bytes or uint8_t.
class bytes {
 public:
  bytes() noexcept : data_(nullptr), size_(0) {}
  bytes(const void* data, std::size_t size) noexcept : data_(data), size_(size) {}
  template <class C, class E = detail::element_of<C>,
            class = typename std::enable_if<sizeof(E) == 1>::type>
  bytes(const C& container) noexcept : data_(container.data()), size_(container.size()) {}

  const void* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }

 private:
  const void* data_;
  std::size_t size_;
};

// A text that ends with a zero byte: a literal or a std::string. Without one it is NULL.
class text {
 public:
  text() noexcept : data_(nullptr) {}
  text(const char* data) noexcept : data_(data) {}
  text(const std::string& string) noexcept : data_(string.c_str()) {}

  const char* c_str() const noexcept { return data_; }

 private:
  const char* data_;
};

}  // namespace SOTTO_CPP_ABI
}  // namespace sotto

#endif  // SOTTO_CPP_SPAN_HPP
