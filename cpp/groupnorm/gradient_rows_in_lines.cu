// Gradients channels last that convolutions in front read as planes: tiles of rows by channels pass
// through shared memory, and are stored channel by channel.
#include "cuda/launch.hpp"
#include "cuda/tile.hpp"
#include "groupnorm/gradient_lines.hpp"
#include "groupnorm/gradient_rows.hpp"
#include "groupnorm/gradient_rows_device.hpp"
#include "groupnorm/launch.hpp"

namespace fusedconv::groupnorm {
namespace {

using device::Pack;

// A tile in shared memory, [width][pitch], as pairs of neighbours. Where a channel's rows are among
// the 32 words of all banks depends on its column, so that neither the columns of a row nor the
// rows of a channel meet in a bank.
template <class T>
struct Tile {
  static constexpr int kWindow = 128 / int(sizeof(T));
  static constexpr int kBuffers = 2;

  __host__ __device__ static int pitch(int rows) {
    return (rows + kWindow - 1) / kWindow * kWindow;
  }
  static int bytes(PlaneTiles const& tiles, int vector) {
    return kBuffers * tiles.map.columns * vector * pitch(tiles.rows) * int(sizeof(T));
  }
  __device__ __forceinline__ static int row(int row, int column) {
    return row ^ (column * (8 / int(sizeof(T))) & (kWindow - 2));
  }
};

// sums, if any, [sample, channel, row block], of what is stored. From the last block on, as of what
// was summed up the last is still in the L2 cache.
template <class T, class G, int kVector, int kKnown, int kNeighbours>
__global__ void __launch_bounds__(kThreads, 2)
    grad_of_rows_in_lines(T const* __restrict__ input, G const* __restrict__ grad,
                          T* __restrict__ output, GradientAffine affine,
                          GroupTerms const* __restrict__ terms, int64_t pixels, int64_t block_rows,
                          int row_blocks, PlaneTiles tiles, Lines lines, LineStep step,
                          float* __restrict__ sums) {
  constexpr int kAhead = PlaneTiles::ahead(sizeof(T), sizeof(G));
  extern __shared__ float4 shared[];  // the tables, then tiles, then sums, [map.rows][width]
  RowMap const& map = tiles.map;
  Place const place(device::block_from_last(), map, kVector, pixels, block_rows, row_blocks,
                    affine.channels);
  RowGradient<kVector> const gradient(shared, place, map, affine, terms);
  int64_t const base = place.sample * pixels * affine.channels + place.channel;
  int64_t const begin = place.row_block * block_rows;
  int64_t const end = min(pixels, begin + block_rows);

  Pack<T, kVector> inputs[kAhead];
  Pack<G, kVector> grads[kAhead];
  auto const load = [&](int64_t row) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (row + j * map.rows >= place.end) continue;
      int64_t const at = base + (row + j * map.rows) * affine.channels;
      inputs[j] = Pack<T, kVector>::load(input + at);
      grads[j] = Pack<G, kVector>::load(grad + at);
    }
  };

  // What the thread stores: the same rows of a tile each time, of every so many channels.
  int const width = map.columns * kVector;
  int const served = min(width, affine.channels - place.slab);
  int const pitch = Tile<T>::pitch(tiles.rows);
  int const pieces = tiles.rows / kNeighbours;
  int const own_row = int(threadIdx.x) % pieces * kNeighbours;
  int const own_channel = int(threadIdx.x) / pieces;
  int const channel_step = kThreads / pieces;
  T* const planes = output + (place.sample * affine.channels + place.slab) * lines.plane;
  LineWalk walk(lines, int(begin) + own_row);

  [[maybe_unused]] float totals[kVector] = {};
  auto* tile = reinterpret_cast<T*>(shared);
  auto* other = tile + width * pitch;
  int64_t row = place.row;
  load(row);
  __syncthreads();  // the tables have been read
#pragma unroll 1
  for (int64_t first = begin; first < end; first += tiles.rows) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (row + j * map.rows >= place.end) continue;
      auto const result = gradient.template of<kKnown>(inputs[j], grads[j], affine);
      T* const cell = tile + place.column * kVector * pitch +
                      Tile<T>::row(j * map.rows + place.map_row, place.column);
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        cell[v * pitch] = result.values[v];
        totals[v] += device::to_float(result.values[v]);
      }
    }
    row += tiles.rows;
    load(row);
    __syncthreads();
    if (own_channel < channel_step && first + own_row < end) {
      for (int c = own_channel; c < served; c += channel_step) {
        T const* const from = tile + c * pitch + Tile<T>::row(own_row, c / kVector);
        Pack<T, kNeighbours>::load(from).store(planes + c * lines.plane + walk.offset);
      }
    }
    walk.advance(lines, step);
    T* const stored = tile;
    tile = other;
    other = stored;
  }
  if (sums == nullptr) return;
  store_sums(totals, reinterpret_cast<float*>(shared), place, map, affine.channels, row_blocks,
             sums);
}

}  // namespace

void input_gradient_of_rows_in_lines(GroupNormProblem const& p, GradientTensors const& tensors,
                                     GroupTerms const* terms, cudaStream_t stream) {
  GradientAffine const affine = gradient_affine_of(p, tensors);
  Split const split = split_rows_to_planes(p);
  dispatch_gradient_kernel(p, [&](auto zero, auto grad, auto active) {
    using T = decltype(zero);
    using G = decltype(grad);
    dispatch_gradients<T, G, active.value>(p, tensors, true, [&](auto vector, auto known) {
      constexpr int kVector = vector.value;
      auto const tiles =
          PlaneTiles::of(p.channels, kVector, PlaneTiles::ahead(sizeof(T), sizeof(G)));
      dim3 const grid =
          device::checked_grid("grad_of_rows_in_lines", p.batch * split.count, tiles.map.slabs);
      int const width = tiles.map.columns * kVector;
      int const shared =
          std::max({RowGradient<kVector>::table_bytes(width), Tile<T>::bytes(tiles, kVector),
                    width * tiles.map.rows * int(sizeof(float))});
      // Two neighbours of a line are stored at once where each line has whole pairs.
      device::dispatch_bool(tensors.columns % 2 == 0, [&](auto pairs) {
        device::launch(grad_of_rows_in_lines<T, G, kVector, known.value, 1 + pairs.value>, grid,
                       kThreads, shared, stream, static_cast<T const*>(tensors.input),
                       static_cast<G const*>(tensors.grad_output),
                       static_cast<T*>(tensors.grad_input), affine, terms, p.pixels, split.size,
                       split.count, tiles, Lines::of(p, tensors), LineStep::of(tensors, tiles.rows),
                       tensors.sums);
      });
    });
  });
  FUSEDCONV_CUDA("grad_of_rows_in_lines", cudaGetLastError());
}

}  // namespace fusedconv::groupnorm
