// From sums to outputs.
//
// A lane has columns 8 j + 2 q and the next at two positions: sums 4 j and 4 j + 1 at its row, 4 j
// + 2 and 4 j + 3 eight rows on.
#pragma once

#include <climits>
#include <cstdint>
#include <type_traits>

#include "conv/activate.hpp"
#include "conv/sm90/streams/params.hpp"
#include "conv/sm90/streams/traits.hpp"
#include "cuda/async.hpp"
#include "cuda/early.hpp"

namespace fusedconv::conv::sm90::streams {

struct Lane {
  int row;      // of the tile
  int eighth;   // of each eight rows
  int quarter;  // q

  __device__ __forceinline__ explicit Lane(int self) {
    int const thread = int(threadIdx.x) % kWarpgroup, lane = thread % 32;
    eighth = lane / 4;
    quarter = lane % 4;
    row = self * kRows + thread / 32 * 16 + eighth;
  }
  // The first of its columns of eight.
  __device__ __forceinline__ int column(int eight) const { return 8 * eight + 2 * quarter; }
};

// What is added to a column's sums, what they are multiplied by then and what is added to that;
// where its output of position 0 is in a sample, and where in the line, in front of it perhaps;
// kAbsent where there is no such channel.
inline constexpr int kAbsent = INT_MIN;  // in front of all lines
template <int kColumns>
struct Columns {
  float start[kColumns], scale[kColumns], shift[kColumns];
  int output[kColumns], in_line[kColumns];
};
static_assert(sizeof(Columns<64>) == 64 * kColumnBytes);

// Of the block's columns, which all consumers' threads leave for each other.
template <int kColumns>
__device__ __forceinline__ void leave_columns(Params const& p, Columns<kColumns>& columns,
                                              int self) {
  int const thread = self * kWarpgroup + int(threadIdx.x) % kWarpgroup;
  if (p.scale != nullptr || p.shift != nullptr) device::wait_for_launch_in_front();
  for (int i = thread; i < kColumns; i += kConsumers * kWarpgroup) {
    int channel, phase;
    p.stride(channel, phase, int(blockIdx.x) % p.groups * kColumns + i);
    bool const present = channel < p.output_channels;
    float const bias = present && p.bias != nullptr ? p.bias[channel] : 0.0f;
    float const shift = present && p.shift != nullptr ? p.shift[channel] : 0.0f;
    bool const scales = present && p.scale != nullptr;
    columns.start[i] = scales ? bias : bias + shift;
    columns.scale[i] = scales ? p.scale[channel] : 1.0f;
    columns.shift[i] = scales ? shift : 0.0f;
    columns.output[i] = present ? channel * p.output_length + phase - p.padding : kAbsent;
    columns.in_line[i] = present ? phase - p.padding : kAbsent;
  }
  device::sync_threads(1, kConsumers * kWarpgroup);
}

__device__ __forceinline__ float2 pair_at(float const* values) {
  return *reinterpret_cast<float2 const*>(values);
}

// Sums become results.
template <int kColumns, int kSums>
__device__ __forceinline__ void finish(Params const& p, Lane const& lane,
                                       Columns<kColumns> const& columns, float (&sums)[kSums]) {
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    float2 const start = pair_at(columns.start + lane.column(j));
#pragma unroll
    for (int i = 4 * j; i < 4 * j + 4; i += 2) {
      sums[i] += start.x;
      sums[i + 1] += start.y;
    }
  }
  if (p.scale != nullptr) {
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      float2 const scale = pair_at(columns.scale + lane.column(j));
      float2 const shift = pair_at(columns.shift + lane.column(j));
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 4; i += 2) {
        sums[i] = fmaf(sums[i], scale.x, shift.x);
        sums[i + 1] = fmaf(sums[i + 1], scale.y, shift.y);
      }
    }
  }
  activate<float>(p.activation, sums);
}

__device__ __forceinline__ void store_pair(float* to, float first, float second) {
  *reinterpret_cast<float2*>(to) = {first, second};
}

// Of an eight of columns, by the lane's four results. line: position 0 of its first row.
template <int kColumns>
__device__ __forceinline__ void store_pairs(Params const& p, Lane const& lane,
                                            Columns<kColumns> const& columns, float* line,
                                            int eight, float const* results) {
  int const output = columns.output[lane.column(eight)];
  if (output == kAbsent) return;
  float* const at = line + output;
  store_pair(at, results[0], results[1]);
  store_pair(at + 8 * p.stride.divisor, results[2], results[3]);
}

// The same of a stride of two where the second phase begins at whole eight bytes: with the first of
// the position behind, which the lane of the next row has. Of a warp's 16 rows the first and the
// last have one that is stored by itself.
template <int kColumns>
__device__ __forceinline__ void store_late_pairs(Lane const& lane, Columns<kColumns> const& columns,
                                                 float* line, int eight, float const* results) {
  bool const first = lane.eighth == 0, last = lane.eighth == 7;
  int const next = (int(threadIdx.x) + 4) % 32;
  int const output = columns.output[lane.column(eight)];
  // The first lane gives the eighth row what its second is to be followed by.
  float const here = __shfl_sync(~0u, first ? results[2] : results[0], next);
  float const there = __shfl_sync(~0u, results[2], next);
  if (output == kAbsent) return;
  float* const at = line + output;
  if (first) *at = results[0];
  store_pair(at + 1, results[1], here);
  float* const behind = at + 2 * 8 + 1;
  if (last) {
    *behind = results[3];
  } else {
    store_pair(behind, results[3], there);
  }
}

// kCount eights of columns from the first on, of a whole tile. results: from kBegin's on.
template <int kFirst, int kCount, int kBegin, int kColumns>
__device__ __forceinline__ void store_eights(Params const& p, Lane const& lane,
                                             Columns<kColumns> const& columns, float* line,
                                             float const* results) {
  if (p.pairs) {
#pragma unroll
    for (int j = kFirst; j < kFirst + kCount; ++j) {
      store_pairs(p, lane, columns, line, j, results + 4 * (j - kBegin));
    }
  } else {
#pragma unroll
    for (int j = kFirst; j < kFirst + kCount; ++j) {
      store_late_pairs(lane, columns, line, j, results + 4 * (j - kBegin));
    }
  }
}

// body(part), known when compiled as registers' numbers have to be; of none beyond the last.
template <int kBegin, int kEnd, class Body>
__device__ __forceinline__ void dispatch_part(int part, Body const& body) {
  if constexpr (kEnd - kBegin == 1) {
    if (part == kBegin) body(std::integral_constant<int, kBegin>{});
  } else {
    constexpr int kMiddle = (kBegin + kEnd) / 2;
    if (part < kMiddle) {
      dispatch_part<kBegin, kMiddle>(part, body);
    } else {
      dispatch_part<kMiddle, kEnd>(part, body);
    }
  }
}

// Whether a tile's positions have all of their outputs, which are stored by pairs then. position:
// of its first row.
__device__ __forceinline__ bool is_whole(Params const& p, int position) {
  int const stride = p.stride.divisor;
  return (p.pairs || p.late_pairs) && position * stride >= p.padding &&
         (position + kTile) * stride - p.padding <= p.output_length;
}

// Of another tile's outputs those that there are, by themselves or by pairs. sample: where its
// outputs begin. row: the position of the lane's first.
template <bool kPairs, int kColumns, int kSums>
__device__ __forceinline__ void store_present(Params const& p, Lane const& lane,
                                              Columns<kColumns> const& columns, float* sample,
                                              int row, float const (&results)[kSums]) {
  constexpr int kWidth = kPairs ? 2 : 1;
  int const begin = row * p.stride.divisor, ahead = 8 * p.stride.divisor;
#pragma unroll
  for (int i = 0; i < kSums; i += kWidth) {
    int const column = lane.column(i / 4) + i % 2;
    int const from_begin = i / 2 % 2 * ahead;
    int const in_line = begin + from_begin + columns.in_line[column];
    if (in_line < 0 || in_line >= p.output_length) continue;
    float* const at = sample + begin + (from_begin + columns.output[column]);
    if constexpr (kPairs) {
      store_pair(at, results[i], results[i + 1]);
    } else {
      *at = results[i];
    }
  }
}
template <int kColumns, int kSums>
__device__ __forceinline__ void store_present(Params const& p, Lane const& lane,
                                              Columns<kColumns> const& columns, float* sample,
                                              int row, float const (&results)[kSums]) {
  if (p.pairs) {
    store_present<true>(p, lane, columns, sample, row, results);
  } else {
    store_present<false>(p, lane, columns, sample, row, results);
  }
}

}  // namespace fusedconv::conv::sm90::streams
