// Loops with known traffic that the benchmarks are compared with, on the best vector target of the
// processor.
#pragma once

#include <cstdint>

namespace sotto::perf {

// y += a * x: 12 bytes per element.
void axpy_in_place(float a, const float* x, float* y, uint64_t n);
// y = value with non-temporal stores: 4 bytes per element.
void fill_streaming(float value, float* y, uint64_t n);
// a *= c, x = a: 12 bytes per element. With y, a = c * a + y: 16.
void move_and_copy(float c, const float* y, float* a, float* x, uint64_t n);
// The traffic of Adam, 28 bytes per element: loads g, m, v, p; stores m, v, p; one multiplication
// and addition each.
void four_loads_three_stores(const float* g, float* m, float* v, float* p, uint64_t n);

}  // namespace sotto::perf
