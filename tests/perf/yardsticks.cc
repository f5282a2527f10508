#include "tests/perf/yardsticks.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/perf/yardsticks.cc"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace sotto::perf {
namespace HWY_NAMESPACE {
namespace {
namespace hn = hwy::HWY_NAMESPACE;
using DF = HWY_FULL(float);

void axpy(float a, const float* x, float* y, uint64_t n) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  const auto factor = hn::Set(d, a);
  uint64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    for (size_t k = 0; k < 4 * lanes; k += lanes) {
      hn::StoreU(hn::Add(hn::LoadU(d, y + i + k), hn::Mul(factor, hn::LoadU(d, x + i + k))), d,
                 y + i + k);
    }
  }
  for (; i < n; ++i) y[i] += a * x[i];
}

// y is aligned to 64 bytes.
void fill(float value, float* y, uint64_t n) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  const auto v = hn::Set(d, value);
  uint64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    for (size_t k = 0; k < 4 * lanes; k += lanes) hn::Stream(v, d, y + i + k);
  }
  for (; i < n; ++i) y[i] = value;
  hwy::FlushStream();
}

template <bool kAdds>
void move(float c, const float* y, float* a, float* x, uint64_t n) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  const auto factor = hn::Set(d, c);
  uint64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    auto moved = hn::Mul(factor, hn::LoadU(d, a + i));
    if constexpr (kAdds) moved = hn::Add(moved, hn::LoadU(d, y + i));
    hn::StoreU(moved, d, a + i);
    hn::StoreU(moved, d, x + i);
  }
  for (; i < n; ++i) x[i] = a[i] = c * a[i] + (kAdds ? y[i] : 0);
}

void move_or_scale(float c, const float* y, float* a, float* x, uint64_t n) {
  y == nullptr ? move<false>(c, y, a, x, n) : move<true>(c, y, a, x, n);
}

void adam_traffic(const float* g, float* m, float* v, float* p, uint64_t n) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  const auto keep = hn::Set(d, 0.9f);
  const auto take = hn::Set(d, 0.1f);
  uint64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto gradient = hn::Mul(take, hn::LoadU(d, g + i));
    hn::StoreU(hn::Add(hn::Mul(keep, hn::LoadU(d, m + i)), gradient), d, m + i);
    hn::StoreU(hn::Add(hn::Mul(keep, hn::LoadU(d, v + i)), gradient), d, v + i);
    hn::StoreU(hn::Add(hn::Mul(keep, hn::LoadU(d, p + i)), gradient), d, p + i);
  }
  for (; i < n; ++i) {
    m[i] = 0.9f * m[i] + 0.1f * g[i];
    v[i] = 0.9f * v[i] + 0.1f * g[i];
    p[i] = 0.9f * p[i] + 0.1f * g[i];
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace sotto::perf
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sotto::perf {

HWY_EXPORT(axpy);
HWY_EXPORT(fill);
HWY_EXPORT(move_or_scale);
HWY_EXPORT(adam_traffic);

void axpy_in_place(float a, const float* x, float* y, uint64_t n) {
  HWY_DYNAMIC_DISPATCH(axpy)(a, x, y, n);
}
void fill_streaming(float value, float* y, uint64_t n) { HWY_DYNAMIC_DISPATCH(fill)(value, y, n); }
void move_and_copy(float c, const float* y, float* a, float* x, uint64_t n) {
  HWY_DYNAMIC_DISPATCH(move_or_scale)(c, y, a, x, n);
}
void four_loads_three_stores(const float* g, float* m, float* v, float* p, uint64_t n) {
  HWY_DYNAMIC_DISPATCH(adam_traffic)(g, m, v, p, n);
}

}  // namespace sotto::perf
#endif
