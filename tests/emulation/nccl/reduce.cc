#include "tests/emulation/nccl/reduce.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace sotto::fake_nccl {
namespace {

template <class T>
auto wide(T x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half2float(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __bfloat162float(x);
  } else {
    return x;
  }
}

template <class T, class W>
T narrow(W x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return static_cast<T>(x);
  }
}

// Integers wrap around.
template <class T, class W>
T sum(W x, W y) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(static_cast<uint64_t>(x) + static_cast<uint64_t>(y));
  else
    return narrow<T>(x + y);
}
template <class T, class W>
T product(W x, W y) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(static_cast<uint64_t>(x) * static_cast<uint64_t>(y));
  else
    return narrow<T>(x * y);
}

template <class T>
void reduce_as(void* to, const void* from, size_t n, ncclRedOp_t op) {
  auto* a = static_cast<T*>(to);
  const auto* b = static_cast<const T*>(from);
  for (size_t i = 0; i < n; ++i) {
    const auto x = wide(a[i]), y = wide(b[i]);
    switch (op) {
      case ncclProd: a[i] = product<T>(x, y); break;
      case ncclMax: a[i] = narrow<T>(std::max(x, y)); break;
      case ncclMin: a[i] = narrow<T>(std::min(x, y)); break;
      default: a[i] = sum<T>(x, y);
    }
  }
}

template <class T>
void divide_as(void* to, size_t n, int ranks) {
  auto* a = static_cast<T*>(to);
  for (size_t i = 0; i < n; ++i) {
    using W = decltype(wide(a[i]));
    a[i] = narrow<T>(wide(a[i]) / static_cast<W>(ranks));
  }
}

// Calls f with a value of the element's type.
template <class F>
bool with_type(ncclDataType_t type, F f) {
  switch (type) {
    case ncclInt8: f(int8_t{}); return true;
    case ncclUint8: f(uint8_t{}); return true;
    case ncclInt32: f(int32_t{}); return true;
    case ncclUint32: f(uint32_t{}); return true;
    case ncclInt64: f(int64_t{}); return true;
    case ncclUint64: f(uint64_t{}); return true;
    case ncclFloat16: f(__half{}); return true;
    case ncclBfloat16: f(__nv_bfloat16{}); return true;
    case ncclFloat32: f(float{}); return true;
    case ncclFloat64: f(double{}); return true;
    default: return false;
  }
}

}  // namespace

size_t type_bytes(ncclDataType_t type) {
  size_t bytes = 0;
  with_type(type, [&](auto x) { bytes = sizeof x; });
  return bytes;
}

bool reduce_into(void* to, const void* from, size_t n, ncclDataType_t type, ncclRedOp_t op) {
  if (op < ncclSum || op > ncclAvg) return false;
  return with_type(type, [&](auto x) { reduce_as<decltype(x)>(to, from, n, op); });
}

void divide(void* to, size_t n, ncclDataType_t type, int ranks) {
  with_type(type, [&](auto x) { divide_as<decltype(x)>(to, n, ranks); });
}

ncclResult_t reduce_in_order(Comm& c, uint32_t code, const void* mine, std::vector<char>* sum,
                             size_t n, ncclDataType_t type, ncclRedOp_t op) {
  const size_t bytes = n * type_bytes(type);
  std::vector<char> theirs(bytes);
  for (int r = 0; r < c.size; ++r) {
    const void* from = mine;
    if (r != c.rank) {
      if (const auto e = c.receive(r, code, theirs.data(), bytes); e != ncclSuccess) return e;
      from = theirs.data();
    }
    if (r == 0) {
      sum->assign(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
    } else {
      reduce_into(sum->data(), from, n, type, op);
    }
  }
  if (op == ncclAvg) divide(sum->data(), n, type, c.size);
  return ncclSuccess;
}

ncclResult_t send_to_all(Comm& c, uint32_t code, const void* data, size_t bytes, bool parts) {
  for (int r = 0; r < c.size; ++r) {
    if (r == c.rank) continue;
    const auto e = c.send(r, code, parts ? part(data, bytes, r) : data, bytes);
    if (e != ncclSuccess) return e;
  }
  return ncclSuccess;
}

}  // namespace sotto::fake_nccl
