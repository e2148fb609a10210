// The inner loops of the processor's kernels. Each instruction set has its own tables of them;
// loops() gives those of the processor at hand.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fusedconv/activation.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv::cpu {

inline constexpr int kDTypes = static_cast<int>(kNames<DType>.size());
inline constexpr int kActivations = static_cast<int>(kNames<Activation>.size());
// One activation, in front of the affine map or behind it; the identity is in front.
inline constexpr int kPlaces = 2 * kActivations - 1;

constexpr int place_of(Activation before, Activation after) {
  return after == Activation::kIdentity ? static_cast<int>(before)
                                        : kActivations - 1 + static_cast<int>(after);
}

// Elements of a "run" have one mean, scale and shift. "Rows" are `lanes` elements long, the last
// perhaps shorter, and have arrays of them. The affine map of x is (x - mean) * scale + shift.

// Adds to sums[0] and sums[1] the sums of a - pivot and its square, where a = activation(x).
using MomentsOfRun = void(void const* x, int64_t count, float pivot, double* sums);
// The same for each lane, in place of what the arrays held; they have room for kRoom more.
using MomentsOfRows = void(void const* x, int64_t count, int64_t lanes, float const* pivot,
                           float* sum, float* square);

// y = after(affine(before(x))).
using ApplyToRun = void(void const* x, void* y, int64_t count, float mean, float scale,
                        float shift);
using ApplyToRows = void(void const* x, void* y, int64_t count, int64_t lanes, float const* mean,
                         float const* scale, float const* shift);

// y[column * stride + row] = x[row * columns + column].
using Transpose = void(float const* x, int64_t rows, int64_t columns, void* y, int64_t stride);

// Adds to sums[0] and sums[1] the sums of g and g * (a - mean), where a = before(x) and
// g = grad * after'(affine(a)).
using GradientSumsOfRun = void(void const* grad, void const* x, int64_t count, float mean,
                               float scale, float shift, double* sums);
using GradientSumsOfRows = void(void const* grad, void const* x, int64_t count, int64_t lanes,
                                float const* mean, float const* scale, float const* shift,
                                float* sum, float* moment);

// dx = before'(x) * (g * scale - (a - mean) * slope - offset).
using GradientOfRun = void(void const* grad, void const* x, void* dx, int64_t count, float mean,
                           float scale, float shift, float slope, float offset);
using GradientOfRows = void(void const* grad, void const* x, void* dx, int64_t count, int64_t lanes,
                            float const* mean, float const* scale, float const* shift,
                            float const* slope, float const* offset);

// How many floats an array of lanes has beyond the lanes.
inline constexpr int64_t kRoom = 16;

// dx = before'(x) * g * scale, with a and g as above and a mean of zero. Of a run, adds the sums of
// g and g * a to sums[0] and sums[1]; of rows, leaves each lane's.
using MapGradientOfRun = void(void const* grad, void const* x, void* dx, int64_t count, float scale,
                              float shift, double* sums);
using MapGradientOfRows = void(void const* grad, void const* x, void* dx, int64_t count,
                               int64_t lanes, float const* scale, float const* shift, float* sum,
                               float* moment);

// Of one channel of normalised pixels h: grad becomes g = grad * after'(h * scale + shift);
// scale * g and scale * g * h are added to the pixels' `gradient` and `projection`, which have room
// for kRoom more, and the sums of g and g * h to the first floats of sums[0] and sums[kRoom], as
// many as a vector has.
using PixelSumsOfRun = void(float const* h, float* grad, int64_t count, float scale, float shift,
                            float* gradient, float* projection, float* sums);
// dx = before'(x) * (scale * g - gradient - h * projection) * rstd; its sum is added to sums[0] as
// above. x is not read where `before` is the identity.
using PixelGradientOfRun = void(float const* g, float const* h, float const* x, void* dx,
                                int64_t count, float scale, float const* gradient,
                                float const* projection, float const* rstd, float* sums);

// By dtype of what is read, dtype of what is written, activation or place of it. Null where one
// dtype of 16 bits would be read and the other written.
struct ForwardLoops {
  MomentsOfRun* moments_of_run[kDTypes][kActivations];
  MomentsOfRows* moments_of_rows[kDTypes][kActivations];
  ApplyToRun* apply_to_run[kDTypes][kDTypes][kPlaces];
  ApplyToRows* apply_to_rows[kDTypes][kDTypes][kPlaces];
  Transpose* transpose[kDTypes];
};
struct BackwardLoops {
  GradientSumsOfRun* sums_of_run[kDTypes][kPlaces];
  GradientSumsOfRows* sums_of_rows[kDTypes][kPlaces];
  GradientOfRun* gradient_of_run[kDTypes][kDTypes][kPlaces];
  GradientOfRows* gradient_of_rows[kDTypes][kDTypes][kPlaces];
  MapGradientOfRun* map_gradient_of_run[kDTypes][kDTypes][kPlaces];
  MapGradientOfRows* map_gradient_of_rows[kDTypes][kDTypes][kPlaces];
  PixelSumsOfRun* pixel_sums_of_run[kActivations];                   // by the activation behind
  PixelGradientOfRun* pixel_gradient_of_run[kDTypes][kActivations];  // by the one in front
};

// Of convolutions of few channels, on lines in float32. Arrays have room for kRoom more than they
// hold; loops read and write whole vectors.

// to[i] = start + the sum of weights[term] * sources[term][i]; terms are summed by groups of so
// many.
using AddProducts = void(float const* const* sources, float const* weights, int64_t terms,
                         int64_t group, int64_t count, float start, float* to);
// Adds to sums[tap * kRoom + lane] the sum of x[i] * sources[tap][i] over a lane's i; what is
// behind `count` is zeros.
using AddDots = void(float const* x, float const* const* sources, int64_t taps, int64_t count,
                     float* sums);
// to[i * stride + phase] = phases[phase * room + i], for i < count.
using Join = void(float const* phases, int64_t room, int64_t stride, int64_t count, float* to);
// phases[phase * room + i] = x[i * stride + phase], for i < room, which is whole vectors.
using Part = void(float const* x, int64_t stride, int64_t room, float* phases);

struct DirectLoops {
  AddProducts* add_products;
  AddDots* add_dots;
  Join* join;
  Part* part;
};

// Of matrix products in float32, by blocks of kProductRows rows and as many columns as one
// instruction set's registers hold. Adds to the block's sums, or replaces them.
inline constexpr int kProductRows = 6;
// sums[row * pitch + column] (+)= the sum over i < depth of rows[i * kProductRows + row] *
// columns[i * columns of a block + column].
using MultiplyPacked = void(float const* rows, float const* columns, int64_t depth, float* sums,
                            int64_t pitch, bool adds);
// The same of rows that lie `stride` elements apart.
using MultiplyRows = void(float const* rows, int64_t stride, float const* columns, int64_t depth,
                          float* sums, int64_t pitch, bool adds);

struct ProductLoops {
  int64_t columns;  // of a block
  MultiplyPacked* multiply_packed;
  MultiplyRows* multiply_rows;
};

struct Loops {
  char const* instruction_set;
  ForwardLoops const& forward;
  BackwardLoops const& backward;
  DirectLoops const& direct;
  ProductLoops const& products;
};

// Those of the widest instruction set that both the build and the processor have. The environment
// variable FUSEDCONV_INSTRUCTION_SET, read once, names a narrower one; InvalidArgument where it
// names none that is there.
Loops const& loops();

// The names of the instruction sets that both have, the widest first.
std::vector<std::string> instruction_sets();

}  // namespace fusedconv::cpu
