#include "layout/split_phases.hpp"

#include <algorithm>
#include <bit>
#include <numeric>
#include <type_traits>

#include "cuda/launch.hpp"
#include "cuda/math.hpp"
#include "cuda/sum.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::layout {
namespace {

using device::Pack;

constexpr int kThreads = 128;
constexpr int kNoLine = -1;

struct Params {
  int64_t source_elements;  // of a channel of the tensor
  int64_t pitch;
  int extents[conv::kMaxAxes];
  int positions[conv::kMaxAxes];
  conv::PhasePlanes phases;
  int64_t target_elements;  // of a plane
  int line_elements, line_vectors;
  int lines, tile_lines, segments, segment_vectors, tiles;

  static Params of(PhasesProblem const& p);
};

Params Params::of(PhasesProblem const& p) {
  Params result{};
  result.pitch = p.pitch;
  result.source_elements = int64_t(p.extents[0]) * p.extents[1] * p.pitch;
  for (int i = 0; i < conv::kMaxAxes; ++i) {
    result.extents[i] = p.extents[i];
    result.positions[i] = p.positions[i];
  }
  result.phases = p.phases;
  result.target_elements = p.plane_elements();
  result.line_elements = int(p.line_elements());
  result.line_vectors = int(p.line_vectors());
  result.lines = int(p.lines());
  result.tile_lines = int(p.tile_lines());
  result.segments = int(p.segments());
  result.segment_vectors = int(p.segment_vectors());
  result.tiles = int(p.tiles());
  return result;
}

// A thread's rows and columns of a block's, which threads take in turn along rows of `width`.
struct Walk {
  int row, column;

  __device__ __forceinline__ explicit Walk(int width)
      : row(int(threadIdx.x) / width),
        column(int(threadIdx.x) % width),
        width_(width),
        step_rows_(kThreads / width),
        step_columns_(kThreads % width) {}
  __device__ __forceinline__ void advance() {
    row += step_rows_;
    column += step_columns_;
    if (column >= width_) {
      column -= width_;
      ++row;
    }
  }

 private:
  int width_, step_rows_, step_columns_;
};

// The elements of a load go to the rows of the width's phases, `pitch` elements apart in `rows`:
// the first, which position `reached` of all phases together reaches, and others behind it. Those
// that are not in [first, end) are left out. Returns the sum of the others. kStride: the width's, 0
// where it is not known when compiling.
template <int kStride, class T, int kLoad>
__device__ __forceinline__ float sort(Pack<T, kLoad> const& loaded, T* rows, int pitch, int stride,
                                      int reached, int first, int end) {
  float sum = 0.0f;
  auto const put = [&](T* target, int e) {
    if (e < first || e >= end) return;
    *target = loaded.values[e];
    sum += device::to_float(loaded.values[e]);
  };
  if constexpr (kStride > 0) {
#pragma unroll
    for (int i = 0; i < std::min(kStride, kLoad); ++i) {
      // Below zero where the first elements are left out; shifts and masks then round down.
      int const at = reached + i;
      T* const target =
          rows + (at & kStride - 1) * pitch + (at >> std::countr_zero(unsigned(kStride)));
#pragma unroll
      for (int e = i; e < kLoad; e += kStride) put(target + (e - i) / kStride, e);
    }
  } else {
    int phase = (reached + kLoad * stride) % stride;
    T* target = rows + phase * pitch + (reached + kLoad * stride) / stride - kLoad;
#pragma unroll
    for (int e = 0; e < kLoad; ++e) {
      put(target, e);
      target += pitch;
      if (++phase == stride) {
        phase = 0;
        target += 1 - stride * pitch;
      }
    }
  }
  return sum;
}

// A block takes a tile of a channel: a segment of some lines.
// 1. It finds where its lines come from and go to, and zeros the tile in shared memory.
// 2. It reads the tensor's lines, kLoad elements at a time, and sorts them by phases of the width.
// 3. It writes the phases' lines, kStore elements at a time.
// kStride: as of sort().
template <class T, int kLoad, int kStore, int kStride>
__global__ void __launch_bounds__(kThreads)
    split_planes(Params const p, T const* __restrict__ input, T* __restrict__ output,
                 float* __restrict__ sums) {
  constexpr int kVector = 16 / int(sizeof(T));
  __shared__ uint4 tile[PhasesProblem::kTileVectors];
  __shared__ int64_t sources[PhasesProblem::kMostTileLines];  // of the tensor's channel
  __shared__ int64_t targets[PhasesProblem::kMostTileLines];  // of the planes' channel
  auto const& [depth, height, width] = p.phases.axes;
  int64_t const channel = blockIdx.x / unsigned(p.tiles);
  int const index = int(blockIdx.x % unsigned(p.tiles));
  int const first_vector = index % p.segments * p.segment_vectors;
  int const vectors = min(p.segment_vectors, p.line_vectors - first_vector);
  int const first_line = index / p.segments * p.tile_lines;
  int const lines = min(p.tile_lines, p.lines - first_line);
  for (int i = int(threadIdx.x); i < lines; i += kThreads) {
    int const rows = height.stride * p.positions[1];
    int const z = (first_line + i) / rows, y = (first_line + i) % rows;
    int const from_z = z - depth.padding, from_y = y - height.padding;
    bool const inside =
        from_z >= 0 && from_z < p.extents[0] && from_y >= 0 && from_y < p.extents[1];
    sources[i] = inside ? (int64_t(from_z) * p.extents[1] + from_y) * p.pitch : kNoLine;
    int const phase = (z % depth.stride * height.stride + y % height.stride) * width.stride;
    int const line = z / depth.stride * p.positions[1] + y / height.stride;
    targets[i] = phase * p.target_elements + int64_t(line) * p.line_elements;
  }
  int const rows = lines * width.stride;
  for (int i = int(threadIdx.x); i < rows * vectors; i += kThreads) tile[i] = uint4{};
  __syncthreads();

  // Columns of the tensor: where the segment's first position lies, and what it reads.
  int const origin = first_vector * kVector * width.stride - width.padding;
  int const first = max(0, origin);
  int const end = min(p.extents[2], origin + vectors * kVector * width.stride);
  int const first_load = first / kLoad;
  int const loads = max(0, (end + kLoad - 1) / kLoad - first_load);
  int const row_elements = vectors * kVector;
  T const* const plane = input + channel * p.source_elements;
  T* const elements = reinterpret_cast<T*>(tile);
  float sum = 0.0f;
  if (loads > 0) {
#pragma unroll 4
    for (Walk walk(loads); walk.row < lines; walk.advance()) {
      if (sources[walk.row] == kNoLine) continue;
      int const column = (first_load + walk.column) * kLoad;
      auto const loaded = Pack<T, kLoad>::load(plane + sources[walk.row] + column);
      T* const target = elements + walk.row * width.stride * row_elements;
      // Most are whole: tests of their elements then fall away.
      bool const whole = column >= first && column + kLoad <= end;
      sum += whole ? sort<kStride>(loaded, target, row_elements, width.stride, column - origin, 0,
                                   kLoad)
                   : sort<kStride>(loaded, target, row_elements, width.stride, column - origin,
                                   first - column, end - column);
    }
  }
  __syncthreads();

  T* const planes =
      output + channel * p.phases.count() * p.target_elements + first_vector * kVector;
  int const stores =
      min(row_elements, p.positions[2] - first_vector * kVector + kStore - 1) / kStore;
#pragma unroll 4
  for (Walk walk(stores); walk.row < rows; walk.advance()) {
    int const line = kStride > 0 ? walk.row / std::max(1, kStride) : walk.row / width.stride;
    int const phase = walk.row - line * width.stride;
    int const column = walk.column * kStore;
    T* const target = planes + targets[line] + phase * p.target_elements + column;
    Pack<T, kStore>::load(elements + walk.row * row_elements + column).store(target);
  }
  if (sums == nullptr) return;
  sum = device::block_total<kThreads>(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

void check(PhasesProblem const& p) {
  int64_t const limit = int64_t(1) << 31;
  for (int i = 0; i < conv::kMaxAxes; ++i) {
    conv::PhaseAxis const& axis = p.phases.axes[i];
    FUSEDCONV_CHECK(p.extents[i] > 0, "extents: got ", p.extents[i]);
    FUSEDCONV_CHECK(p.positions[i] > 0 && int64_t(axis.stride) * p.positions[i] < limit / 2,
                    "positions: got ", p.positions[i], " with stride ", axis.stride);
  }
  FUSEDCONV_CHECK(p.phases.axes[2].stride <= PhasesProblem::kTileVectors, "stride: got ",
                  p.phases.axes[2].stride);
  FUSEDCONV_CHECK(p.pitch >= p.extents[2] && p.pitch < limit, "pitch: got ", p.pitch, " for ",
                  p.extents[2], " columns");
  FUSEDCONV_CHECK(p.phases.count() * p.plane_lines() < limit && p.tiles() < limit,
                  "planes of a channel: got ", p.phases.count(), " of ", p.plane_lines(), " lines");
}

}  // namespace

void split_phases(PhasesProblem const& p, void const* input, void* output, float* sums,
                  cudaStream_t stream) {
  check(p);
  FUSEDCONV_CHECK(device::is_aligned(output, 16),
                  "split_phases: output is not aligned to 16 bytes");
  FUSEDCONV_CHECK(sums == nullptr || p.holds_all(), "split_phases: sums of what planes leave out");
  Params const params = Params::of(p);
  dim3 const grid = device::checked_grid("split_phases", p.batch * p.channels * p.tiles());
  device::dispatch_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    device::dispatch_vector<T>(input, std::gcd(int64_t(p.extents[2]), p.pitch), [&](auto load) {
      auto const launch_strided = [&](auto store, auto stride) {
        device::launch(split_planes<T, load.value, store.value, stride.value>, grid, kThreads, 0,
                       stream, params, static_cast<T const*>(input), static_cast<T*>(output), sums);
      };
      auto const launch = [&](auto store) {
        switch (p.phases.axes[2].stride) {
          case 2: return launch_strided(store, std::integral_constant<int, 2>{});
          case 4: return launch_strided(store, std::integral_constant<int, 4>{});
          case 8: return launch_strided(store, std::integral_constant<int, 8>{});
          default: return launch_strided(store, std::integral_constant<int, 0>{});
        }
      };
      constexpr int kVector = 16 / int(sizeof(T));
      if (p.aligned()) return launch(std::integral_constant<int, kVector>{});
      launch(std::integral_constant<int, 1>{});
    });
  });
  FUSEDCONV_CUDA("split_phases", cudaGetLastError());
}

}  // namespace fusedconv::layout
