#include "conv/sm90/boxes/weight/add_partials.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>

#include "conv/failure.hpp"
#include "conv/filter_source.hpp"
#include "conv/sm90/boxes/weight/params.hpp"
#include "cuda/launch.hpp"
#include "cuda/math.hpp"
#include "cuda/tile.hpp"

namespace fusedconv::conv::sm90::boxes::weight {
namespace {

constexpr int kMostTapGroups = 8;    // of a block's threads
constexpr int kFewestSplits = 8;     // that two groups divide among them
constexpr int kManySplits = 32;      // that all groups do
constexpr int kFewestOwnSplits = 8;  // of a group then
constexpr int kFewestBlocks = 64;    // that read at copy rate together
constexpr int kFewestOutputs = 8;    // beside each other in accumulators
constexpr int kMostTileTaps = 32;    // beside each other
constexpr int kMostThreads = 1024;   // of a block
constexpr int kFour = 4;             // neighbours that a thread writes at once

// A block adds a tile: so many input channels by output channels by taps. It reads whole lines of
// accumulators and turns them in shared memory, so that it writes whole lines too, whether output
// channels or taps are beside each other in the weight.
struct Tile {
  int inputs, outputs, taps;
  int tap_groups, split_groups;  // of threads, which have taps or splits of their own
  int split_shift = 0;           // two to this are split_groups
  int row, pitch;                // of an input channel's sums, and that of rows in shared memory

  Tile(bool from_registers, FilterSource const& weight, int splits) {
    int64_t const all_taps = weight.taps();
    bool const taps_beside = all_taps > 1 && weight.stride_c != 1;
    taps = taps_beside ? int(ceil_div(all_taps, ceil_div(all_taps, kMostTileTaps))) : 1;
    // Fewer channels where there are many sums of each.
    bool const is_half = taps > 1 || splits >= kFewestSplits;
    bool const is_fourth = taps > kMostTileTaps / 2;
    inputs = from_registers && is_half ? 8 : 16;
    outputs = from_registers || !is_half ? kUnit : is_fourth ? kUnit / 4 : kUnit / 2;
    auto const blocks = [&] {
      return ceil_div(weight.k, inputs) * ceil_div(weight.c, outputs) * ceil_div(all_taps, taps);
    };
    while (!from_registers && splits >= kFewestSplits && outputs > kFewestOutputs &&
           blocks() < kFewestBlocks) {
      outputs /= 2;
    }
    tap_groups = std::min(taps, kMostTapGroups);
    if (splits >= kFewestSplits) {
      int const held = kMostThreads / (threads_of_group() * tap_groups);
      int const most = splits < kManySplits ? 2 : splits / kFewestOwnSplits;
      split_shift = std::bit_width(unsigned(std::clamp(held, 1, most))) - 1;
    }
    split_groups = 1 << split_shift;
    row = outputs * taps;
    // So that few threads of a warp write to one bank.
    pitch = row + (from_registers ? 4 : 8);
  }

  int threads_of_group() const { return inputs * outputs / 4; }
  int threads() const { return threads_of_group() * tap_groups * split_groups; }
  int shared_bytes() const { return split_groups * inputs * pitch * int(sizeof(float)); }

  // Whether a row lies in the weight as it does here, in whole fours.
  bool writes_fours(FilterSource const& w) const {
    bool const whole = taps == w.taps() && w.stride_c == taps && taps_follow(w, 1) &&
                       (w.k == 1 || w.stride_k % kFour == 0);
    bool const beside = taps == 1 && w.stride_c == 1 && lines_begin_at(w, kFour);
    return (whole || beside) && w.c * taps % kFour == 0;
  }
};

struct AddParams {
  Tile tile;
  FilterSource weight;
  int all_taps;
  Block block;
  int splits, channel_blocks;
  int tap_units, chunk_units;  // from a unit to that of the next tap and chunk
  int64_t accumulators;        // of a task's split
  cutlass::FastDivmod group_threads, tap_groups, row, taps, units, channels, weight_s, weight_r;
};

template <class T>
struct alignas(kFour * sizeof(T)) Four {
  T values[kFour];
};

template <class T, bool kFromRegisters, bool kWritesFours>
__global__ void __launch_bounds__(kMostThreads)
    add_partials_kernel(__grid_constant__ AddParams const p, float const* __restrict__ partials,
                        T* __restrict__ grad_weight) {
  extern __shared__ __align__(16) float sums[];
  __shared__ int64_t tap_offsets[kMostTileTaps];
  Tile const& tile = p.tile;
  int const first_input = int(blockIdx.x) * tile.inputs;
  int const first_output = int(blockIdx.y) * tile.outputs;
  int const first_tap = int(blockIdx.z) * tile.taps;
  int const taps = min(tile.taps, p.all_taps - first_tap);
  if (int(threadIdx.x) < taps) {
    int line, t, r, s;
    p.weight_s(line, s, first_tap + int(threadIdx.x));
    p.weight_r(t, r, line);
    tap_offsets[threadIdx.x] =
        s * p.weight.stride_s + r * p.weight.stride_r + t * p.weight.stride_t;
  }

  // Fours of a thread's accumulators: two neighbouring columns of a row, and of the row 8 below.
  int group, four, split_group, tap_group;
  p.group_threads(group, four, int(threadIdx.x));
  p.tap_groups(split_group, tap_group, group);
  int const first_split = p.splits * split_group >> tile.split_shift;
  int const last_split = p.splits * (split_group + 1) >> tile.split_shift;
  int const lane = four % 32;
  int channel_block, own_channels;  // times kUnit
  p.channels(channel_block, own_channels, first_input / kUnit);
  int const input0 = first_input % kUnit, output0 = first_output % kUnit;
  int const chunk = first_output / kUnit;
  constexpr int kEight = 8 * kUnit;  // accumulators of eight columns
  for (int tap = tap_group; tap < taps; tap += tile.tap_groups) {
    int const number = (first_tap + tap) * p.tap_units + chunk * p.chunk_units;
    int unit_block, unit;
    p.units(unit_block, unit, number);
    int eight, within, input, output, next_column, next_row;
    if constexpr (kFromRegisters) {
      eight = (unit * p.block.channels + own_channels) * (kUnit / 8) + input0 / 8;
      within = four * 4;
      input = four / 128 * 8 + lane % 4 * 2;
      output = channel_of_row(four / 32 % 4, 0, lane / 4);
      next_column = tile.pitch;
      next_row = channel_of_row(0, 1, 0) * tile.taps;
    } else {
      int part = own_channels, units = p.block.units;
      if (p.block.channels == 1) {  // consumers divide the units
        units /= p.block.consumers();
        part = unit / units;
        unit -= part * units;
      }
      eight = (part * units + unit) * (kUnit / 8) + output0 / 8;
      within = four / 32 * kEight + input0 / 16 * 128 + lane * 4;
      input = lane / 4;
      output = four / 32 * 8 + lane % 4 * 2;
      next_column = tile.taps;
      next_row = 8 * tile.pitch;
    }
    int64_t const task = int64_t(unit_block) * p.channel_blocks + channel_block;
    float const* source = partials + (task * p.splits + first_split) * p.accumulators +
                          int64_t(eight) * kEight + within;
    float4 sum{};
#pragma unroll 8
    for (int i = first_split; i < last_split; ++i, source += p.accumulators) {
      float4 const part = __ldcs(reinterpret_cast<float4 const*>(source));
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    float* const to =
        sums + (split_group * tile.inputs + input) * tile.pitch + output * tile.taps + tap;
    to[0] = sum.x, to[next_column] = sum.y;
    to[next_row] = sum.z, to[next_row + next_column] = sum.w;
  }
  __syncthreads();

  constexpr int kWidth = kWritesFours ? kFour : 1;
  int const all = tile.inputs * tile.row / kWidth;
  int const row_end = int(min(int64_t(tile.outputs), p.weight.c - first_output)) * tile.taps;
  T* const first = grad_weight + first_input * p.weight.stride_k + first_output * p.weight.stride_c;
  for (int i = int(threadIdx.x); i < all; i += int(blockDim.x)) {
    int input, rest;
    p.row(input, rest, i);
    rest *= kWidth;
    if (first_input + input >= p.weight.k || rest >= row_end) continue;
    struct alignas(kWidth * sizeof(float)) Sums {
      float of[kWidth];
    } sum{};
    for (int group = 0; group < tile.split_groups; ++group) {
      auto const own =
          *reinterpret_cast<Sums const*>(sums + (group * tile.inputs + input) * tile.pitch + rest);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) sum.of[e] += own.of[e];
    }
    T* const to = first + input * p.weight.stride_k;
    if constexpr (kWritesFours) {
      Four<T> four;
#pragma unroll
      for (int e = 0; e < kFour; ++e) four.values[e] = device::from_float<T>(sum.of[e]);
      *reinterpret_cast<Four<T>*>(to + (tile.taps == 1 ? tap_offsets[0] : 0) + rest) = four;
    } else {
      int output, tap;
      p.taps(output, tap, rest);
      if (tap < taps)
        to[output * p.weight.stride_c + tap_offsets[tap]] = device::from_float<T>(sum.of[0]);
    }
  }
}

}  // namespace

void add_partials(Config const& config, FilterSource const& weight, float const* partials,
                  void* grad_weight, cudaStream_t stream) {
  Block const& block = config.row->block;
  Schedule const& s = config.schedule;
  Tile const tile(block.from_registers, weight, s.splits);
  int64_t const taps = weight.taps();
  bool const writes_fours = tile.writes_fours(weight) &&
                            device::is_aligned(grad_weight, kFour * size_of(config.traits().dtype));
  AddParams const p{.tile = tile,
                    .weight = weight,
                    .all_taps = int(taps),
                    .block = block,
                    .splits = s.splits,
                    .channel_blocks = s.channel_blocks,
                    .tap_units = block.halo ? 1 : s.unit_chunks,
                    .chunk_units = block.halo ? int(taps) : 1,
                    .accumulators = int64_t(block.channels) * block.units * kUnit * kUnit,
                    .group_threads = cutlass::FastDivmod(tile.threads_of_group()),
                    .tap_groups = cutlass::FastDivmod(tile.tap_groups),
                    .row = cutlass::FastDivmod(tile.row / (writes_fours ? kFour : 1)),
                    .taps = cutlass::FastDivmod(tile.taps),
                    .units = cutlass::FastDivmod(block.units),
                    .channels = cutlass::FastDivmod(block.channels),
                    .weight_s = cutlass::FastDivmod(int(weight.s)),
                    .weight_r = cutlass::FastDivmod(int(weight.r))};
  dim3 const grid(unsigned(ceil_div(weight.k, tile.inputs)),
                  unsigned(ceil_div(weight.c, tile.outputs)), unsigned(ceil_div(taps, tile.taps)));
  int const batch = int(config.batch);
  device::dispatch_type(config.traits().dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr bool kFromRegisters = sizeof(T) == sizeof(float);  // TF32's, which the row is of
    device::dispatch_bool(writes_fours, [&](auto fours) {
      constexpr auto kernel = &add_partials_kernel<T, kFromRegisters, fours>;
      conv::check_launch(config, batch, "cudaFuncSetAttribute",
                         device::allow_shared_bytes<kernel>(tile.shared_bytes()));
      device::launch(kernel, grid, tile.threads(), tile.shared_bytes(), stream, p, partials,
                     static_cast<T*>(grad_weight));
    });
  });
  conv::check_launch(config, batch, "add_partials", cudaGetLastError());
}

}  // namespace fusedconv::conv::sm90::boxes::weight
