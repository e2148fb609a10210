// The inner loops of the processor's GroupNorm, each compiled for several instruction sets.
#pragma once

#include <cstdint>

#include "fusedconv/activation.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv::cpu {

struct Moments {
  double mean = 0.0;
  double m2 = 0.0;  // the sum of squared deviations
};

// Elements of a dtype, from `offset` on, to float32 and back.
void widen(DType dtype, void const* base, int64_t offset, float* to, int64_t count);
void narrow(DType dtype, float const* from, void* base, int64_t offset, int64_t count);

// x and y may be the same array; where the activation is the identity, y is left alone.
void activate(Activation activation, float const* x, float* y, int64_t count);

// Merges a block of [rows, lanes] into the lanes' running moments over `rows_before` rows. Lanes
// beside `center`, `deviation` and `square` are scratch. `deviation` corrects what rounding left in
// `center`: a large mean costs no accuracy.
void add_block(float const* __restrict x, int64_t rows, int64_t lanes, double rows_before,
               float* __restrict center, float* __restrict deviation, float* __restrict square,
               double* __restrict mean, double* __restrict m2);

// The moments of a group of `elements`, whose lanes are runs of `run` from `begin` on, `stride`
// apart. A lane has the moments of rows[lane] elements.
Moments merge_lanes(int64_t begin, int64_t end, int64_t stride, int64_t run, int64_t elements,
                    double const* rows, double const* mean, double const* m2);

// y = (x - mean) * scale + shift. The arrays of mean, scale and shift repeat every `lanes`
// elements.
void apply_to_lanes(float const* x, float* y, int64_t count, int64_t lanes, float const* mean,
                    float const* scale, float const* shift);

// The same. Each element of mean, scale and shift serves `pixels` elements, the first of them
// `skip` fewer.
void apply_to_pixels(float const* x, float* y, int64_t count, int64_t pixels, int64_t skip,
                     float const* mean, float const* scale, float const* shift);

}  // namespace fusedconv::cpu
