// The numbers that the kernels of a step read of the parameter groups: arrays of GroupScalars, or
// of what a family of kernels derives from it. A plan has those that its kernels name, and an
// algorithm writes them.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

#include "core/kernels/call.h"

namespace sotto {

struct ScalarsType {
  uint64_t bytes;
  GroupScalars* (*construct)(void* at);  // with its defaults
};
template <class T>
inline constexpr ScalarsType kScalarsType{
    sizeof(T), [](void* at) -> GroupScalars* {
      static_assert(std::is_base_of_v<GroupScalars, T> && std::is_trivially_copyable_v<T>);
      return std::construct_at(static_cast<T*>(at));
    }};

// An array of a plan: host memory, written before the start, and its copy on the device.
struct ScalarsArray {
  const ScalarsType* type;  // kScalarsType of it
  uint32_t host, device;    // slots
};

// The numbers of one group, with the defaults of their type.
class ScalarsRef {
 public:
  ScalarsRef(const ScalarsType& type, void* at) : type_(&type), scalars_(type.construct(at)) {}
  GroupScalars* operator->() const { return scalars_; }
  // Null: they are of another type.
  template <class T>
  T* as() const {
    return type_ == &kScalarsType<T> ? static_cast<T*>(scalars_) : nullptr;
  }

 private:
  const ScalarsType* type_;
  GroupScalars* scalars_;
};

}  // namespace sotto
