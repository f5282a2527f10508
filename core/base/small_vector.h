// A vector whose first elements lie in the object itself: arguments of a call, of which there are
// mostly a few, so that a call allocates nothing.
#pragma once

#include <boost/container/small_vector.hpp>  // header-only
#include <cstddef>
#include <vector>

namespace sotto {

template <class T, size_t N = 4>
class SmallVector : public boost::container::small_vector<T, N> {
  using Base = boost::container::small_vector<T, N>;

 public:
  using Base::Base;
  SmallVector(const std::vector<T>& v) : Base(v.begin(), v.end()) {}  // NOLINT: for assignments

  // Pointers, so that std::span takes it: the iterators of Boost 1.74 are not of C++20.
  T* begin() { return Base::data(); }
  T* end() { return Base::data() + Base::size(); }
  const T* begin() const { return Base::data(); }
  const T* end() const { return Base::data() + Base::size(); }
};

}  // namespace sotto
