// Gradients channels last: a thread keeps its channels and goes down the rows.
#include <type_traits>

#include "cuda/launch.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"
#include "groupnorm/gradient_rows.hpp"
#include "groupnorm/gradient_rows_device.hpp"
#include "groupnorm/launch.hpp"

namespace fusedconv::groupnorm {
namespace {

using device::Pack;

// Blocks of a multiprocessor: what their threads then load at a time, without spilling, is what
// memory likes best. Loading the next rows while computing takes registers and is slower.
template <class T>
constexpr int kResident = sizeof(T) == 2 ? 2 : 3;

// Calls body(row, input's values, gradient's values) for a thread's rows, from a sample's first on.
// Loads are behind the bodies of the rows before: in front of their own the compiler would move
// them there, one by one.
template <int kVector, class T, class G, class F>
__device__ __forceinline__ void for_each_row(T const* input, G const* grad, Place const& place,
                                             int step, int64_t channels, F&& body) {
  constexpr int kAhead = gradient_rows_ahead(sizeof(T), sizeof(G));
  Pack<T, kVector> inputs[kAhead];
  Pack<G, kVector> grads[kAhead];
  auto const load = [&](int64_t row) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (row + j * step >= place.end) continue;
      int64_t const at = (row + j * step) * channels;
      inputs[j] = Pack<T, kVector>::load(input + at);
      grads[j] = Pack<G, kVector>::load(grad + at);
    }
  };
  int64_t row = place.row;
  load(row);
#pragma unroll 1
  while (row < place.end) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (row + j * step < place.end) body(row + j * step, inputs[j], grads[j]);
    }
    row += kAhead * step;
    load(row);
  }
}

// Partial sums [sample, row block, channel].
template <class T, class G, int kVector, int kKnown>
__global__ void __launch_bounds__(kThreads, kResident<T>)
    sums_of_rows(T const* __restrict__ input, G const* __restrict__ grad, GradientAffine affine,
                 int64_t pixels, int64_t block_rows, int row_blocks, RowMap map,
                 float2* __restrict__ partials) {
  extern __shared__ float4 shared[];  // the table, then sums, [map.rows][width]
  Place const place(blockIdx.x, map, kVector, pixels, block_rows, row_blocks, affine.channels);
  int const width = map.columns * kVector;
  fill_table<kVector>(shared, map, place.slab, affine.channels, [&](int channel) {
    return entry_of(Channel::of(affine, place.sample, channel));
  });
  __syncthreads();
  Channel channels[kVector];
#pragma unroll
  for (int v = 0; v < kVector; ++v)
    channels[v] = channel_of(shared[v * map.columns + place.column]);
  __syncthreads();
  float2 sums[kVector] = {};
  int64_t const base = place.sample * pixels * affine.channels + place.channel;
  for_each_row<kVector>(input + base, grad + base, place, map.rows, affine.channels,
                        [&](int64_t, auto const& px, auto const& pg) {
                          Point points[kVector];
                          points_of<kKnown>(
                              px, pg, [&](int v) { return channels[v]; }, affine, points);
#pragma unroll
                          for (int v = 0; v < kVector; ++v) {
                            sums[v].x += points[v].gradient;
                            sums[v].y = fmaf(points[v].gradient, points[v].normalized, sums[v].y);
                          }
                        });
  auto* const totals = reinterpret_cast<float2*>(shared);
  if (place.map_row < map.rows) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      totals[place.map_row * width + place.column * kVector + v] = sums[v];
    }
  }
  add_rows(totals, map.rows, width, [](float2& a, float2 const& b) {
    a.x += b.x;
    a.y += b.y;
  });
  int64_t const first = (place.sample * row_blocks + place.row_block) * affine.channels;
  for (int i = int(threadIdx.x); i < width; i += kThreads) {
    if (place.slab + i < affine.channels) partials[first + place.slab + i] = totals[i];
  }
}

// sums, if any, [sample, channel, row block], of what is stored. From the last block on, as of what
// was summed up the last is still in the L2 cache.
template <class T, class G, int kVector, int kKnown, bool kSums>
__global__ void __launch_bounds__(kThreads, kResident<T>)
    grad_of_rows(T const* __restrict__ input, G const* __restrict__ grad, T* __restrict__ output,
                 GradientAffine affine, GroupTerms const* __restrict__ terms, int64_t pixels,
                 int64_t block_rows, int row_blocks, RowMap map, float* __restrict__ sums) {
  extern __shared__ float4 shared[];  // the tables, then sums, [map.rows][width]
  Place const place(device::block_from_last(), map, kVector, pixels, block_rows, row_blocks,
                    affine.channels);
  RowGradient<kVector> const gradient(shared, place, map, affine, terms);
  [[maybe_unused]] float totals[kVector] = {};
  int64_t const base = place.sample * pixels * affine.channels + place.channel;
  for_each_row<kVector>(input + base, grad + base, place, map.rows, affine.channels,
                        [&](int64_t row, auto const& px, auto const& pg) {
                          auto const result = gradient.template of<kKnown>(px, pg, affine);
                          result.store(output + base + row * affine.channels);
                          if constexpr (kSums) {
#pragma unroll
                            for (int v = 0; v < kVector; ++v)
                              totals[v] += device::to_float(result.values[v]);
                          }
                        });
  if constexpr (kSums) {
    store_sums(totals, reinterpret_cast<float*>(shared), place, map, affine.channels, row_blocks,
               sums);
  }
}

}  // namespace

void sum_gradients_of_rows(GroupNormProblem const& p, GradientTensors const& tensors,
                           GradientSum* partials, cudaStream_t stream) {
  GradientAffine const affine = gradient_affine_of(p, tensors);
  Split const split = split_gradients(p);
  dispatch_gradient_kernel(p, [&](auto zero, auto grad, auto active) {
    using T = decltype(zero);
    using G = decltype(grad);
    dispatch_gradients<T, G, active.value>(p, tensors, true, [&](auto vector, auto known) {
      RowMap const map = RowMap::of(p.channels, vector.value);
      dim3 const grid = device::checked_grid("sums_of_rows", p.batch * split.count, map.slabs);
      int const width = map.columns * vector.value;
      int const shared = width * std::max(int(sizeof(float4)), map.rows * int(sizeof(GradientSum)));
      device::launch(sums_of_rows<T, G, vector.value, known.value>, grid, kThreads, shared, stream,
                     static_cast<T const*>(tensors.input),
                     static_cast<G const*>(tensors.grad_output), affine, p.pixels, split.size,
                     split.count, map, partials);
    });
  });
  FUSEDCONV_CUDA("sums_of_rows", cudaGetLastError());
}

void input_gradient_of_rows(GroupNormProblem const& p, GradientTensors const& tensors,
                            GroupTerms const* terms, cudaStream_t stream) {
  if (tensors.columns != 0) return input_gradient_of_rows_in_lines(p, tensors, terms, stream);
  GradientAffine const affine = gradient_affine_of(p, tensors);
  Split const split = split_gradient_rows(p);
  dispatch_gradient_kernel(p, [&](auto zero, auto grad, auto active) {
    using T = decltype(zero);
    using G = decltype(grad);
    dispatch_gradients<T, G, active.value>(p, tensors, true, [&](auto vector, auto known) {
      RowMap const map = RowMap::of(p.channels, vector.value);
      dim3 const grid = device::checked_grid("grad_of_rows", p.batch * split.count, map.slabs);
      int const width = map.columns * vector.value;
      int const shared = std::max(RowGradient<vector.value>::table_bytes(width),
                                  width * map.rows * int(sizeof(float)));
      device::dispatch_bool(tensors.sums != nullptr, [&](auto sums) {
        device::launch(grad_of_rows<T, G, vector.value, known.value, sums.value>, grid, kThreads,
                       shared, stream, static_cast<T const*>(tensors.input),
                       static_cast<G const*>(tensors.grad_output),
                       static_cast<T*>(tensors.grad_input), affine, terms, p.pixels, split.size,
                       split.count, map, tensors.sums);
      });
    });
  });
  FUSEDCONV_CUDA("grad_of_rows", cudaGetLastError());
}

}  // namespace fusedconv::groupnorm
