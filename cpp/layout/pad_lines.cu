#include "layout/pad_lines.hpp"

#include <numeric>

#include "cuda/launch.hpp"
#include "cuda/math.hpp"
#include "cuda/sum.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::layout {
namespace {

using device::Pack;

constexpr int kThreads = 256;

// Block (split of a plane). Loads are of kLoad elements, stores of 16 bytes.
template <class T, int kLoad>
__global__ void __launch_bounds__(kThreads)
    pad_planes(T const* __restrict__ input, uint4* __restrict__ output, float* __restrict__ sums,
               int columns, int pitch, int line_vectors, int64_t plane_elements, int plane_vectors,
               int split_vectors, int splits) {
  constexpr int kVector = 16 / int(sizeof(T));
  int64_t const plane = blockIdx.x / unsigned(splits);
  int const begin = int(blockIdx.x % unsigned(splits)) * split_vectors;
  int const end = min(plane_vectors, begin + split_vectors);
  T const* const source = input + plane * plane_elements;
  int const step_lines = kThreads / line_vectors, step_columns = kThreads % line_vectors;
  int line = (begin + int(threadIdx.x)) / line_vectors;
  int vector = (begin + int(threadIdx.x)) % line_vectors;
  float sum = 0.0f;
#pragma unroll 4
  for (int i = begin + int(threadIdx.x); i < end; i += kThreads) {
    Pack<T, kVector> packed;
#pragma unroll
    for (int part = 0; part < kVector; part += kLoad) {
      int const column = vector * kVector + part;
      // Loads do not straddle a line's end: its columns are a multiple of kLoad.
      if (column < columns) {
        auto const loaded = Pack<T, kLoad>::load(source + int64_t(line) * pitch + column);
#pragma unroll
        for (int e = 0; e < kLoad; ++e) packed.values[part + e] = loaded.values[e];
      }
    }
#pragma unroll
    for (T const& value : packed.values) sum += device::to_float(value);
    if (output != nullptr) output[plane * plane_vectors + i] = packed.words[0];
    line += step_lines;
    vector += step_columns;
    if (vector >= line_vectors) {
      vector -= line_vectors;
      ++line;
    }
  }
  if (sums == nullptr) return;
  sum = device::block_total<kThreads>(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// A block for each channel.
template <class T>
__global__ void __launch_bounds__(kThreads)
    add_parts(ChannelSums const p, float const* __restrict__ sums, T* __restrict__ totals) {
  int64_t const channel = blockIdx.x;
  float sum = 0.0f;
  for (int64_t i = threadIdx.x; i < p.batch * p.parts; i += kThreads) {
    sum += sums[(i / p.parts * p.channels + channel) * p.parts + i % p.parts];
  }
  sum = device::block_total<kThreads>(sum);
  if (threadIdx.x == 0) totals[channel] = device::from_float<T>(sum);
}

void check(LinesProblem const& p) {
  int64_t const limit = int64_t(1) << 31;
  FUSEDCONV_CHECK(p.columns > 0 && p.columns < limit, "columns: got ", p.columns);
  FUSEDCONV_CHECK(p.pitch >= p.columns && p.pitch < limit, "pitch: got ", p.pitch, " for ",
                  p.columns, " columns");
  FUSEDCONV_CHECK(p.plane_vectors() < limit, "lines: got ", p.lines, " of ", p.columns, " columns");
}

}  // namespace

void pad_lines(LinesProblem const& p, void const* input, void* output, float* sums,
               cudaStream_t stream) {
  check(p);
  FUSEDCONV_CHECK(device::is_aligned(output, 16), "pad_lines: output is not aligned to 16 bytes");
  int64_t const splits = p.splits();
  dim3 const grid = device::checked_grid("pad_lines", p.batch * p.channels * splits);
  device::dispatch_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    device::dispatch_vector<T>(input, std::gcd(p.columns, p.pitch), [&](auto load) {
      device::launch(pad_planes<T, load.value>, grid, kThreads, 0, stream,
                     static_cast<T const*>(input), static_cast<uint4*>(output), sums,
                     int(p.columns), int(p.pitch), int(p.line_vectors()), p.lines * p.pitch,
                     int(p.plane_vectors()), int(ceil_div(p.plane_vectors(), splits)), int(splits));
    });
  });
  FUSEDCONV_CUDA("pad_lines", cudaGetLastError());
}

void add_sums(ChannelSums const& p, float const* sums, void* totals, cudaStream_t stream) {
  dim3 const grid = device::checked_grid("add_sums", p.channels);
  device::dispatch_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    device::launch(add_parts<T>, grid, kThreads, 0, stream, p, sums, static_cast<T*>(totals));
  });
  FUSEDCONV_CUDA("add_sums", cudaGetLastError());
}

}  // namespace fusedconv::layout
