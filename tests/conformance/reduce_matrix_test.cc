// Every reduction of every dtype against a reference that shares no code with the kernels, on every
// kind and size of world.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "core/base/hash.h"
#include "tests/support/core_ranks.h"

namespace sotto::test {
namespace {

constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMin,
                             ReduceOp::kMax, ReduceOp::kProd, ReduceOp::kBitOr};

// A 16-bit float: bits of exponent and of mantissa.
template <int kExponent, int kMantissa>
struct Small {
  uint16_t bits;

  double value() const {
    const int exponent = bits >> kMantissa & ((1 << kExponent) - 1);
    const int mantissa = bits & ((1 << kMantissa) - 1);
    const int bias = (1 << (kExponent - 1)) - 1;
    const double sign = bits >> 15 != 0 ? -1 : 1;
    if (exponent == (1 << kExponent) - 1)
      return mantissa != 0 ? std::nan("") : sign * std::numeric_limits<double>::infinity();
    if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - kMantissa);
    return sign * std::ldexp(mantissa + (1 << kMantissa), exponent - bias - kMantissa);
  }

  // The value that x has when it is rounded to this type, ties to even.
  static double round(double x) {
    if (!std::isfinite(x) || x == 0) return x;
    const int bias = (1 << (kExponent - 1)) - 1;
    const int exponent = std::max(std::ilogb(x), 1 - bias);
    const double unit = std::ldexp(1.0, exponent - kMantissa);
    const double rounded = std::nearbyint(x / unit) * unit;
    const double limit = std::ldexp(2.0 - std::ldexp(1.0, -kMantissa), bias);
    return std::fabs(rounded) > limit ? std::copysign(HUGE_VAL, x) : rounded;
  }
};
using Half = Small<5, 10>;
using Brain = Small<8, 7>;

template <class T>
constexpr bool kIsSmall = std::is_same_v<T, Half> || std::is_same_v<T, Brain>;

// Element i of rank r: any integer; floats of very different size, some infinite or NaN.
template <class T>
T element(int32_t rank, uint64_t i) {
  const uint64_t key[] = {static_cast<uint64_t>(rank), i};
  uint64_t random = hash64(key, sizeof key, 77);
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(random);
  } else if constexpr (kIsSmall<T>) {
    return T{static_cast<uint16_t>(random)};
  } else {
    if (random % 61 == 0) return std::numeric_limits<T>::infinity();
    if (random % 67 == 0) return std::numeric_limits<T>::quiet_NaN();
    const auto mantissa = static_cast<T>(static_cast<int32_t>(random >> 32));
    return std::ldexp(mantissa, static_cast<int>(random % 60) - 60);
  }
}

// Floats: the arithmetic of `T`, for 16-bit floats that of float. NaN in any operand stays.
template <class T>
T fold_float(ReduceOp op, T a, T b) {
  if (op == ReduceOp::kProd) return a * b;
  if (op == ReduceOp::kSum || op == ReduceOp::kMean) return a + b;
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
  return op == ReduceOp::kMin ? std::min(a, b) : std::max(a, b);
}

__extension__ typedef __int128 Wide;
__extension__ typedef unsigned __int128 UnsignedWide;

// A mean: the exact sum, and the quotient towards zero.
template <class T>
T exact_mean(int32_t size, uint64_t i) {
  Wide sum = 0;
  for (int32_t r = 0; r < size; ++r) sum += static_cast<Wide>(element<T>(r, i));
  return static_cast<T>(sum / size);
}

template <class T>
T fold_integer(ReduceOp op, T a, T b) {
  // Modulo 2^128 is modulo 2^64 and less, too.
  const auto wide_a = static_cast<UnsignedWide>(a);
  const auto wide_b = static_cast<UnsignedWide>(b);
  switch (op) {
    case ReduceOp::kMin: return static_cast<Wide>(a) < static_cast<Wide>(b) ? a : b;
    case ReduceOp::kMax: return static_cast<Wide>(a) < static_cast<Wide>(b) ? b : a;
    case ReduceOp::kBitOr: return static_cast<T>(wide_a | wide_b);
    case ReduceOp::kProd: return static_cast<T>(wide_a * wide_b);
    default: return static_cast<T>(wide_a + wide_b);
  }
}

// What element i of the result has to be, as a value.
template <class T>
auto expected(ReduceOp op, int32_t size, uint64_t i) {
  if constexpr (std::is_integral_v<T>) {
    if (op == ReduceOp::kMean) return exact_mean<T>(size, i);
    T all = element<T>(0, i);
    for (int32_t r = 1; r < size; ++r) all = fold_integer(op, all, element<T>(r, i));
    return all;
  } else if constexpr (kIsSmall<T>) {
    auto all = static_cast<float>(element<T>(0, i).value());
    for (int32_t r = 1; r < size; ++r)
      all = fold_float(op, all, static_cast<float>(element<T>(r, i).value()));
    if (op == ReduceOp::kMean) all = all / static_cast<float>(size);
    return T::round(static_cast<double>(all));
  } else {
    T all = element<T>(0, i);
    for (int32_t r = 1; r < size; ++r) all = fold_float(op, all, element<T>(r, i));
    return op == ReduceOp::kMean ? all / static_cast<T>(size) : all;
  }
}

template <class T>
bool is_equal(T got, ReduceOp op, int32_t size, uint64_t i) {
  const auto want = expected<T>(op, size, i);
  if constexpr (std::is_integral_v<T>) {
    return got == want;
  } else if constexpr (kIsSmall<T>) {
    return got.value() == want || (std::isnan(got.value()) && std::isnan(want));
  } else {
    return got == want || (std::isnan(got) && std::isnan(want));
  }
}

struct Case {
  Comm& comm;
  Dtype dtype;
  ReduceOp op;
  uint64_t n;
};

Call make_call(const Case& c, OpKind kind, uint64_t n) {
  Call call;
  call.request.kind = kind;
  call.request.rank = c.comm.rank();
  call.request.size = c.comm.size();
  call.request.reduce = c.op;
  call.request.counts = {n};
  call.request.dtypes = {c.dtype};
  call.request.in_place = {0};
  return call;
}

// All-reduce of n elements and reduce-scatter of n elements per rank; adds the bits of the former
// to `digest`.
template <class T>
Status reduce_both(const Case& c, uint64_t* digest) {
  const auto size = static_cast<uint64_t>(c.comm.size());
  std::vector<T> in(c.n * size), all(c.n), part(c.n);
  for (uint64_t i = 0; i < in.size(); ++i) in[i] = element<T>(c.comm.rank(), i);
  Call reduce = make_call(c, OpKind::kAllReduce, c.n);
  reduce.in = {in.data()};
  reduce.out = {all.data()};
  SOTTO_TRY(c.comm.finish(c.comm.start(std::move(reduce), {})));
  *digest = hash64(all.data(), all.size() * sizeof(T), *digest);
  Call scatter = make_call(c, OpKind::kReduceScatter, c.n);
  scatter.in = {in.data()};
  scatter.out = {part.data()};
  SOTTO_TRY(c.comm.finish(c.comm.start(std::move(scatter), {})));
  const uint64_t mine = c.n * static_cast<uint64_t>(c.comm.rank());
  for (uint64_t i = 0; i < c.n; ++i) {
    if (!is_equal(all[i], c.op, c.comm.size(), i))
      return error(Code::kInternal, "{} op {}, n {}: all_reduce [{}]", dtype_name(c.dtype),
                   static_cast<int>(c.op), c.n, i);
    if (!is_equal(part[i], c.op, c.comm.size(), mine + i))
      return error(Code::kInternal, "{} op {}, n {}: reduce_scatter [{}]", dtype_name(c.dtype),
                   static_cast<int>(c.op), c.n, i);
  }
  return ok_status();
}

Status reduce_as(const Case& c, uint64_t* digest) {
  switch (c.dtype) {
    case Dtype::kI8: return reduce_both<int8_t>(c, digest);
    case Dtype::kI16: return reduce_both<int16_t>(c, digest);
    case Dtype::kU16: return reduce_both<uint16_t>(c, digest);
    case Dtype::kI32: return reduce_both<int32_t>(c, digest);
    case Dtype::kI64: return reduce_both<int64_t>(c, digest);
    case Dtype::kU8: return reduce_both<uint8_t>(c, digest);
    case Dtype::kU32: return reduce_both<uint32_t>(c, digest);
    case Dtype::kU64: return reduce_both<uint64_t>(c, digest);
    case Dtype::kF16: return reduce_both<Half>(c, digest);
    case Dtype::kBF16: return reduce_both<Brain>(c, digest);
    case Dtype::kF32: return reduce_both<float>(c, digest);
    case Dtype::kF64: return reduce_both<double>(c, digest);
  }
  return error(Code::kInternal, "dtype");
}

Status whole_matrix(Comm& comm, const std::vector<uint64_t>& sizes) {
  uint64_t digest = 0;
  for (const Dtype dtype :
       {Dtype::kI8, Dtype::kI16, Dtype::kI32, Dtype::kI64, Dtype::kU8, Dtype::kU16, Dtype::kU32,
        Dtype::kU64, Dtype::kF16, Dtype::kBF16, Dtype::kF32, Dtype::kF64}) {
    for (const ReduceOp op : kOps) {
      if (op == ReduceOp::kBitOr && dtype_is_float(dtype)) continue;
      for (const uint64_t n : sizes) SOTTO_TRY(reduce_as({comm, dtype, op, n}, &digest));
    }
  }
  std::string mine(sizeof digest, '\0');
  std::memcpy(mine.data(), &digest, sizeof digest);
  SOTTO_ASSIGN(const std::vector<std::string> digests, comm.exchange(mine));
  for (const std::string& other : digests) {
    if (other != mine) return error(Code::kInternal, "ranks have different bits");
  }
  return ok_status();
}

class ReduceMatrix : public ::testing::TestWithParam<std::tuple<std::string, int32_t>> {};

TEST_P(ReduceMatrix, EqualsTheReference) {
  const auto& [kind, size] = GetParam();
  const bool delays = kind != "inproc" && kind != "tcp" && kind != "ordered";
  // Whole groups of vectors and a rest. Every combination without delays; with them, the ones that
  // one size reaches.
  const std::vector<uint64_t> sizes =
      delays ? std::vector<uint64_t>{270} : std::vector<uint64_t>{9, 1025};
  const Status status = run_world(world_of(kind, size), [&](const std::shared_ptr<Comm>& comm) {
    return whole_matrix(*comm, sizes);
  });
  EXPECT_TRUE(status.ok()) << status.text();
}

INSTANTIATE_TEST_SUITE_P(Worlds, ReduceMatrix,
                         ::testing::Combine(::testing::ValuesIn(world_kinds()),
                                            ::testing::Values(1, 2, 3, 4, 7, 8)),
                         [](const auto& p) {
                           return std::get<0>(p.param) + "_" + std::to_string(std::get<1>(p.param));
                         });

// Chunks and segments instead of one hop.
TEST(ReduceMatrixLarge, EqualsTheReference) {
  const Status status = run_world(world_of("inproc", 3), [](const std::shared_ptr<Comm>& comm) {
    return whole_matrix(*comm, {40003});
  });
  EXPECT_TRUE(status.ok()) << status.text();
}

}  // namespace
}  // namespace sotto::test
