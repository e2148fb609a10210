// From rows of products to outputs.
#pragma once

#include <cstdint>

#include "conv/activate.hpp"
#include "conv/segment.hpp"
#include "conv/sm90/col2im/params.hpp"
#include "cuda/async.hpp"
#include "cuda/math.hpp"

namespace fusedconv::conv::sm90::col2im {

inline constexpr int kConsumerBarrier = 1;

// A block's part of the problem.
struct Tile {
  int sample;
  int first[kMaxAxes];   // output
  int origin[kMaxAxes];  // of the box

  __device__ __forceinline__ explicit Tile(Params const& p) {
    int rest, tile[kMaxAxes];
    p.tiles_w(rest, tile[2], int(blockIdx.x));
    p.tiles_h(rest, tile[1], rest);
    p.tiles_d(sample, tile[0], rest);
#pragma unroll
    for (int i = 0; i < kMaxAxes; ++i) {
      Axis const& axis = p.axes[i];
      first[i] = tile[i] * p.tile[i];
      int const reached = tile[i] * (p.tile[i] / axis.problem.stride) + axis.lowest;
      origin[i] = max(0, min(reached, axis.problem.input - p.box[i]));
    }
  }
};

// Which products along an axis an output adds up: of taps of its phase from `begin` to `end`. Tap
// 0's are in row `row`, from column `column` on, those of others by steps.
struct alignas(16) Reach {
  int row, column, begin, end;
};
static_assert(sizeof(Reach) == kReachBytes);

// Where a row of products begins, in floats. Eight rows meet all banks as a warp leaves them, and
// so do sixteen neighbours as they are read, one column of each.
template <int kPitch>
__device__ __forceinline__ int begin_of(int row) {
  return row * kPitch + (row >> 1 & kMostSkew);
}

// From a tap to the next one of a phase: a tap_step of taps on, sub_dilation positions back.
struct Step {
  int rows, columns;

  __device__ __forceinline__ Step(Params const& p, int i)
      : rows(p.axes[i].sub_dilation * p.rows[i]), columns(p.axes[i].tap_step * p.columns[i]) {}
};

// Those of a tile's outputs along all axes in turn.
template <int kThreads>
__device__ __forceinline__ void list_reaches(Params const& p, Tile const& tile, Reach* reaches) {
#pragma unroll
  for (int i = 0; i < kMaxAxes; ++i) {
#pragma unroll 1
    for (int own = int(threadIdx.x); own < p.tile[i]; own += kThreads) {
      int quotient, residue;
      p.strides[i](quotient, residue, tile.first[i] + own);
      Phase const phase = p.axes[i].phase(residue);
      int const position = quotient + phase.shift - tile.origin[i];
      int const back = p.axes[i].sub_dilation;
      // Taps whose positions, position - tap * back, are in the box.
      int const beyond = position - (p.box[i] - 1);
      int const begin = beyond > 0 ? (beyond + back - 1) / back : 0;
      int const end = position < 0 ? 0 : min(phase.taps, position / back + 1);
      reaches[p.first_reach[i] + own] = {position * p.rows[i], phase.first_tap * p.columns[i],
                                         begin, end};
    }
  }
}

// What becomes of each channel's sums: they are multiplied by x, and y is added.
template <class T, int kThreads>
__device__ __forceinline__ void list_maps(Params const& p, float2* maps) {
#pragma unroll 1
  for (int k = int(threadIdx.x); k < p.output_channels; k += kThreads) {
    float const bias =
        p.bias != nullptr ? device::to_float(static_cast<T const*>(p.bias)[k]) : 0.0f;
    float const scale = p.scale != nullptr ? p.scale[k] : 1.0f;
    maps[k] = {scale, fmaf(bias, scale, p.shift != nullptr ? p.shift[k] : 0.0f)};
  }
}

// The products that an output pixel adds up, of any channel, given its first column. kShort: at
// most two taps along height and width, and one along depth.
template <int kPitch, bool kShort>
class Sums {
 public:
  // zeros: a row of them, for taps that meet nothing.
  __device__ __forceinline__ Sums(Params const& p, Reach const (&reach)[kMaxAxes],
                                  float const* rows, float const* zeros)
      : p_(p), reach_(reach), rows_(rows) {
    if constexpr (kShort) {
      auto const meets = [&](int axis, int tap) {
        return reach[axis].begin <= tap && tap < reach[axis].end;
      };
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        bool const met = meets(0, 0) && meets(1, i / 2) && meets(2, i % 2);
        met_[i] = met ? products_of(0, i / 2, i % 2) : zeros;
      }
    }
  }

  __device__ __forceinline__ float of(int column) const {
    if constexpr (kShort) {
      return ((met_[0][column] + met_[1][column]) + met_[2][column]) + met_[3][column];
    } else {
      float sum = 0.0f;
#pragma unroll 1
      for (int d = reach_[0].begin; d < reach_[0].end; ++d) {
#pragma unroll 1
        for (int h = reach_[1].begin; h < reach_[1].end; ++h) {
#pragma unroll 2
          for (int w = reach_[2].begin; w < reach_[2].end; ++w) {
            sum += products_of(d, h, w)[column];
          }
        }
      }
      return sum;
    }
  }

 private:
  __device__ __forceinline__ float const* products_of(int d, int h, int w) const {
    int const tap[kMaxAxes] = {d, h, w};
    int row = 0, column = 0;
#pragma unroll
    for (int i = 0; i < kMaxAxes; ++i) {
      Step const step(p_, i);
      row += reach_[i].row - tap[i] * step.rows;
      column += reach_[i].column + tap[i] * step.columns;
    }
    return rows_ + (begin_of<kPitch>(row) + column);
  }

  Params const& p_;
  Reach const (&reach_)[kMaxAxes];
  float const* rows_;
  float const* met_[kShort ? 4 : 1];
};

// A line of a tile's outputs, or as much of it as is staged together: contiguous in memory, and at
// the same offset from 16 bytes in shared memory.
template <class T>
struct Piece {
  static constexpr int kVector = Segment<T>::kVector;
  int d, h, w;  // its first output in the tile
  T* target;
  int staged;  // elements before it
  int lead;

  __device__ __forceinline__ Piece(Params const& p, Tile const& tile, int first, int own) {
    int line, which;
    p.line_pieces(line, which, first + own);
    p.height(d, h, line);
    w = which * p.piece.divisor;
    int64_t const lines = int64_t(tile.sample) * p.output_extent[0] + tile.first[0] + d;
    int64_t const line_of_output = lines * p.output_extent[1] + tile.first[1] + h;
    target = static_cast<T*>(p.output) +
             (line_of_output * p.output_extent[2] + tile.first[2] + w) * p.output_channels;
    lead = int(reinterpret_cast<uintptr_t>(target) / sizeof(T)) & (kVector - 1);
    staged = own * p.piece_pitch + lead;
  }

  // Elements; the tile's last lines and pixels may lie beyond the output.
  __device__ __forceinline__ int length(Params const& p, Tile const& tile) const {
    bool const inside =
        tile.first[0] + d < p.output_extent[0] && tile.first[1] + h < p.output_extent[1];
    int const pixels =
        min(min(p.piece.divisor, p.tile[2] - w), p.output_extent[2] - (tile.first[2] + w));
    return inside ? max(pixels, 0) * p.output_channels : 0;
  }
};

// The tile's outputs, some pieces at a time: staged by threads, of which neighbours have
// neighbouring pixels, and copied from there.
template <class T, int kThreads, int kPitch, bool kShort>
__device__ __forceinline__ void store_all(Params const& p, Tile const& tile, Reach const* reaches,
                                          float2 const* maps, float const* rows, float const* zeros,
                                          T* staged) {
  int const channels = p.output_channels, own_thread = int(threadIdx.x);
#pragma unroll 1
  for (int first = 0; first < p.pieces; first += p.round_pieces) {
#pragma unroll 1
    for (int unit = own_thread; unit < p.round_units; unit += kThreads) {
      int share, own, x, pixel;
      p.round_pixels(share, pixel, unit);
      p.piece(own, x, pixel);
      if (first + own >= p.pieces) continue;
      Piece<T> const piece(p, tile, first, own);
      if (piece.w + x >= p.tile[2]) continue;
      Reach const reach[kMaxAxes] = {reaches[p.first_reach[0] + piece.d],
                                     reaches[p.first_reach[1] + piece.h],
                                     reaches[p.first_reach[2] + piece.w + x]};
      Sums<kPitch, kShort> const sums(p, reach, rows, zeros);
      T* const target = staged + piece.staged + x * channels;
      int const end = min((share + 1) * p.share_channels, channels);
#pragma unroll 1
      for (int k = share * p.share_channels; k < end; k += kTogether) {
        float values[kTogether];
#pragma unroll
        for (int v = 0; v < kTogether; ++v) {
          int const own_channel = min(k + v, end - 1);
          float2 const map = maps[own_channel];
          values[v] = fmaf(sums.of(own_channel * p.channel_columns), map.x, map.y);
        }
        activate<T>(p.activation, values);
#pragma unroll
        for (int v = 0; v < kTogether; ++v) {
          if (k + v < end) target[k + v] = device::from_float<T>(values[v]);
        }
      }
    }
    device::fence_async_proxy();
    device::sync_threads(kConsumerBarrier, kThreads);
#pragma unroll 1
    for (int own = own_thread; own < min(p.round_pieces, p.pieces - first); own += kThreads) {
      Piece<T> const piece(p, tile, first, own);
      store_by_bulk(Segment<T>{.source = staged + piece.staged,
                               .target = piece.target,
                               .lead = piece.lead,
                               .length = piece.length(p, tile)});
    }
    device::wait_stores_read();
    if (first + p.round_pieces < p.pieces) device::sync_threads(kConsumerBarrier, kThreads);
  }
}

}  // namespace fusedconv::conv::sm90::col2im
