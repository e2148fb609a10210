// The kernel of few_channels.hpp.
#pragma once

#include <algorithm>
#include <type_traits>

#include "conv/direct/gradients/few_channels.hpp"
#include "cuda/math.hpp"
#include "cutlass/fast_math.h"

namespace fusedconv::conv::direct::few {

struct Params {
  Tensors tensors;
  DType dtype;
  FilterSource source;
  AxisProblem axes[kMaxAxes];
  int64_t input_strides[kMaxAxes + 1], output_strides[kMaxAxes + 1];
  int64_t input_channel, output_channel;  // strides
  int output_channels, numbers;           // of the weight, of an output channel
  int tile[2], lines[2], line_slots;
  int reached[kMaxAxes];  // outputs that inputs meet
  int width;              // columns that a tile meets
  int items, blocks;
  cutlass::FastDivmod tiles_d, tiles_h, tiles_w, kernel_h;
};

// A line that is staged: bytes from the first line of the tile that is, and to its place. Those of
// a tile are padded with the last once more to whole batches of all warps.
struct Line {
  unsigned from, to;
};

template <class T>
__device__ __forceinline__ T* at(T* base, unsigned bytes) {
  using Byte = std::conditional_t<std::is_const_v<T>, char const, char>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(base) + bytes);
}

// Shared memory, in this order: weights of an output channel, sums of warps, lines, tile.
__host__ __device__ inline int weight_floats(int taps, int channels) {
  return (taps * weight_vector(channels) + 3) / 4 * 4;
}
__host__ __device__ inline int sum_floats(int numbers) { return (kWarps * numbers + 3) / 4 * 4; }

// What a block stages of each output channel.
struct Stage {
  float* tile;
  Line const* lines;
  int count;    // of lines
  int column;   // of the output, the first of the tile
  int first;    // the lane's, from `column`
  int step;     // columns from its pass to the next, where Columns are not shared
  int columns;  // of the output, that are met
};

// Elements that a thread loads before it stores the first.
constexpr int kLoads = 8;

template <class T, class C>
__device__ __forceinline__ void stage_lines(Stage const& s, T const* __restrict__ grad) {
  constexpr int kBatch = std::max(1, kLoads / C::kPasses);
  int const lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  int const first = s.column + s.first;
  int const step = C::kShared ? kPositions : s.step;
  bool exists[C::kPasses];
#pragma unroll
  for (int i = 0; i < C::kPasses; ++i) {
    exists[i] = unsigned(first + i * step) < unsigned(s.columns);
  }
  T const* const source = grad + first;
#pragma unroll 1
  for (int line = warp; line < s.count; line += kWarps * kBatch) {
    T values[kBatch][C::kPasses];
    unsigned places[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      Line const each = s.lines[line + b * kWarps];
      places[b] = each.to;
      T const* const from = at(source, each.from);
#pragma unroll
      for (int i = 0; i < C::kPasses; ++i) {
        if (exists[i]) values[b][i] = from[i * step];
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      float* const to = at(s.tile + lane, places[b]);
#pragma unroll
      for (int i = 0; i < C::kPasses; ++i) {
        if (exists[i]) to[i * 32] = device::to_float(values[b][i]);
      }
    }
  }
  if constexpr (C::kBeyond > 0) {
    int const beyond = s.column + C::kWhole;
    if (beyond >= s.columns) return;
#pragma unroll 1
    for (int i = int(threadIdx.x); i < s.count * C::kBeyond; i += kThreads) {
      Line const each = s.lines[i / C::kBeyond];
      int const extra = i % C::kBeyond, column = beyond + extra;
      if (unsigned(column) < unsigned(s.columns)) {
        at(s.tile + C::kWhole + extra * kLanes, each.to)[0] =
            device::to_float(at(grad, each.from)[column]);
      }
    }
  }
}

__device__ __forceinline__ void prefetch([[maybe_unused]] void const* address) {
#ifdef __CUDA_ARCH__
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}

// Asks for the lines of an output channel that is staged next, whose loads then wait for the second
// level cache and not for memory.
template <class T>
__device__ __forceinline__ void prefetch_lines(Stage const& s, T const* grad, int width) {
  constexpr int kRun = 64 / int(sizeof(T));  // what is fetched together
  int const from = max(0, s.column), to = min(s.columns, s.column + width);
  for (int column = from; column < to + kRun - 1; column += kRun) {
#pragma unroll 1
    for (int i = int(threadIdx.x); i < s.count; i += kThreads) {
      prefetch(at(grad, s.lines[i].from) + min(column, to - 1));
    }
  }
}

template <class T, int kKernel, int kChannels>
__device__ __forceinline__ void stage_weights(Params const& p, int channel, float* weights) {
  T const* const weight = static_cast<T const*>(p.tensors.weight) + channel * p.source.stride_k;
#pragma unroll 1
  for (int i = int(threadIdx.x); i < p.numbers; i += kThreads) {
    int const tap = i / kChannels, c = i % kChannels;
    int const row = tap / kKernel, s = tap % kKernel;
    int t, r;
    p.kernel_h(t, r, row);
    weights[tap * weight_vector(kChannels) + c] =
        device::to_float(weight[c * p.source.stride_c + t * p.source.stride_t +
                                r * p.source.stride_r + s * p.source.stride_s]);
  }
}

// Of neighbours along width, `count` of which exist.
template <class T>
__device__ __forceinline__ void load(float (&values)[kPositions], T const* source, int count) {
  using Run = device::Pack<T, kPositions>;
  if (count == kPositions && reinterpret_cast<uintptr_t>(source) % 16 == 0) {
    Run const run = Run::load(source);
#pragma unroll
    for (int q = 0; q < kPositions; ++q) values[q] = device::to_float(run.values[q]);
    return;
  }
#pragma unroll
  for (int q = 0; q < kPositions; ++q) {
    values[q] = q < count ? device::to_float(source[q]) : 0.0f;
  }
}

template <class T>
__device__ __forceinline__ void store(float const (&values)[kPositions], T* target, int count) {
  using Run = device::Pack<T, kPositions>;
  if (count == kPositions && reinterpret_cast<uintptr_t>(target) % 16 == 0) {
    Run run;
#pragma unroll
    for (int q = 0; q < kPositions; ++q) run.values[q] = device::from_float<T>(values[q]);
    run.store(target);
    return;
  }
#pragma unroll
  for (int q = 0; q < kPositions; ++q) {
    if (q < count) target[q] = device::from_float<T>(values[q]);
  }
}

template <class F>
__device__ __forceinline__ void with_type(DType dtype, F&& body) {
  switch (dtype) {
    case DType::kFloat32: return body(float{});
    case DType::kFloat16: return body(__half{});
    case DType::kBFloat16: return body(__nv_bfloat16{});
  }
}

// Adds kCount values over a warp's lanes: each step halves the values that a lane is left with, of
// which one half goes to the lane's partner. Which total a lane has in the end is total_of(lane);
// some are had by several.
template <int kCount, int kMask = 16>
__device__ __forceinline__ float share_totals(float (&values)[kCount]) {
  if constexpr (kMask == 0) {
    static_assert(kCount == 1, "at most as many values as lanes");
    return values[0];
  } else {
    constexpr int kHalf = (kCount + 1) / 2;
    bool const upper = (threadIdx.x & unsigned(kMask)) != 0;
    float halves[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      float keeps = values[i], gives = values[i];
      if (i + kHalf < kCount) {
        keeps = upper ? values[i + kHalf] : values[i];
        gives = upper ? values[i] : values[i + kHalf];
      }
      halves[i] = keeps + __shfl_xor_sync(~0u, gives, kMask);
    }
    return share_totals<kHalf, kMask / 2>(halves);
  }
}
template <int kCount, int kMask = 16>
__device__ __forceinline__ int total_of(int lane) {
  if constexpr (kMask == 0) {
    return 0;
  } else {
    constexpr int kHalf = (kCount + 1) / 2;
    int const index = total_of<kHalf, kMask / 2>(lane);
    return (lane & kMask) != 0 && index + kHalf < kCount ? index + kHalf : index;
  }
}

// That share a multiprocessor, as their registers allow.
constexpr int blocks_of(int channels, int kernel) {
  return channels == 4 || (channels == 3 && kernel > 3) ? 3 : 4;
}

// Positions of the input by output channels of the block's items. Sums of the weight's gradient are
// a thread's over its positions, then a warp's after each line of taps, which keeps few of them in
// registers, then the block's.
template <int kStride, int kKernel, int kChannels, bool kInput, bool kWeighs>
__global__ void __launch_bounds__(kThreads, blocks_of(kChannels, kKernel))
    gradients(Params const p) {
  using C = Columns<kStride, kKernel>;
  constexpr int kPitch = C::pitch();
  constexpr int kVector = weight_vector(kChannels);
  constexpr int kSums = kKernel * kChannels;
  extern __shared__ float4 shared[];
  int const lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  int const row = int(threadIdx.x) / kLanes, l = int(threadIdx.x) % kLanes;
  int const kernel_d = p.axes[0].kernel, kernel_h = p.axes[1].kernel;
  float* const weights = reinterpret_cast<float*>(shared);
  float* const sums_of_warps = weights + weight_floats(p.numbers / kChannels, kChannels);
  Line* const lines =
      reinterpret_cast<Line*>(sums_of_warps + (kWeighs ? sum_floats(p.numbers) : 0));
  int const tile_lines = p.lines[0] * p.lines[1];
  float* const tile = reinterpret_cast<float*>(lines + p.line_slots);
  // Of the input's gradient, [C][8] of each thread: one chain of sums over all output channels
  // would err by more.
  float* const pieces = tile + tile_lines * kPitch + threadIdx.x;
  int const row_d = row / p.tile[1], row_h = row % p.tile[1];

#pragma unroll 1
  for (int item = int(blockIdx.x); item < p.items; item += p.blocks) {
    int rest, w0, h0, d0, sample;
    p.tiles_w(rest, w0, item);
    p.tiles_h(rest, h0, rest);
    p.tiles_d(sample, d0, rest);
    d0 *= p.tile[0];
    h0 *= p.tile[1];
    w0 *= kTileWidth;
    // The lines of the tile that lie in the output; the others stay zero.
    int const z = d0 * p.axes[0].stride - p.axes[0].padding;
    int const y = h0 * p.axes[1].stride - p.axes[1].padding;
    int const first_z = max(0, -z), first_y = max(0, -y);
    int const count_z = max(0, min(p.lines[0], p.reached[0] - z) - first_z);
    int const count_y = max(0, min(p.lines[1], p.reached[1] - y) - first_y);
    __syncthreads();
    for (int i = int(threadIdx.x); i < tile_lines * kPitch; i += kThreads) tile[i] = 0.0f;
    int const line_count = count_z * count_y;
    unsigned const element_bytes = p.dtype == DType::kFloat32 ? 4 : 2;
#pragma unroll 1
    for (int i = int(threadIdx.x); line_count > 0 && i < p.line_slots; i += kThreads) {
      int const line = min(i, line_count - 1), of_z = line / count_y, of_y = line % count_y;
      lines[i] = {unsigned(of_z * p.output_strides[1] + of_y * p.output_strides[2]) * element_bytes,
                  unsigned(((first_z + of_z) * p.lines[1] + first_y + of_y) * kPitch * 4)};
    }
    int64_t const grad_at = sample * p.output_strides[0] + (z + first_z) * p.output_strides[1] +
                            (y + first_y) * p.output_strides[2];
    Stage stage{.tile = tile,
                .lines = lines,
                .count = line_count,
                .column = w0 * p.axes[2].stride - p.axes[2].padding,
                .first = 0,
                .step = 0,
                .columns = p.reached[2]};
    if constexpr (C::kShared) {
      stage.first = lane % kLanes * kPositions * kStride + lane / kLanes;
    } else {
      stage.step = p.axes[2].dilation;
      stage.first = (lane % kLanes * kPositions + lane / kLanes) * p.axes[2].stride;
    }

    // The thread's positions. Rows beyond the tile multiply zeros by another row's lines.
    int const d = d0 + row_d, h = h0 + row_h, w = w0 + l * kPositions;
    bool const has_row = row_d < p.tile[0] && d < p.axes[0].input && h < p.axes[1].input;
    int const count = has_row ? max(0, min(kPositions, p.axes[2].input - w)) : 0;
    int64_t const input_at =
        sample * p.input_strides[0] + d * p.input_strides[1] + h * p.input_strides[2] + w;
    float const* const begin =
        tile + l +
        (has_row ? row_d * p.axes[0].stride * p.lines[1] + row_h * p.axes[1].stride : 0) * kPitch;
    float inputs[kChannels][kPositions];
    if constexpr (kWeighs) {
      with_type(p.dtype, [&](auto zero) {
        using T = decltype(zero);
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          load(inputs[c], static_cast<T const*>(p.tensors.input) + input_at + c * p.input_channel,
               count);
        }
      });
    }
    float totals[kChannels][kPositions] = {};
    auto const add_piece = [&](bool is_first) {
#pragma unroll
      for (int i = 0; i < kChannels * kPositions; ++i) {
        float& total = totals[i / kPositions][i % kPositions];
        pieces[i * kThreads] = is_first ? total : pieces[i * kThreads] + total;
        total = 0.0f;
      }
    };

#pragma unroll 1
    for (int k = 0; k <= p.output_channels; ++k) {
      __syncthreads();
      if (kWeighs && k > 0) {
        // Of the output channel before.
        float* const partials =
            p.tensors.partials + (int64_t(blockIdx.x) * p.output_channels + k - 1) * p.numbers;
#pragma unroll 1
        for (int i = int(threadIdx.x); i < p.numbers; i += kThreads) {
          float sum = 0.0f;
#pragma unroll
          for (int from = 0; from < kWarps; ++from) sum += sums_of_warps[from * p.numbers + i];
          partials[i] = item == int(blockIdx.x) ? sum : partials[i] + sum;
        }
      }
      if (k == p.output_channels) break;
      with_type(p.dtype, [&](auto zero) {
        using T = decltype(zero);
        if constexpr (kInput) stage_weights<T, kKernel, kChannels>(p, k, weights);
        stage_lines<T, C>(
            stage, static_cast<T const*>(p.tensors.grad_output) + grad_at + k * p.output_channel);
      });
      __syncthreads();
      if (k + 1 < p.output_channels) {
        with_type(p.dtype, [&](auto zero) {
          using T = decltype(zero);
          prefetch_lines(
              stage,
              static_cast<T const*>(p.tensors.grad_output) + grad_at + (k + 1) * p.output_channel,
              p.width);
        });
      }
#pragma unroll 1
      for (int t = 0; t < kernel_d; ++t) {
#pragma unroll 1
        for (int r = 0; r < kernel_h; ++r) {
          float const* const line =
              begin + (t * p.axes[0].dilation * p.lines[1] + r * p.axes[1].dilation) * kPitch;
          float const* const beyond = line + (l < kLanes - 1 ? 1 : C::kWhole - l);
          float given[C::kShared ? C::kValues : kPositions];
          if constexpr (C::kShared) {
#pragma unroll
            for (int v = 0; v < C::kValues; ++v) {
              constexpr int kOwn = kStride * kPositions;
              given[v] = v < kOwn ? line[v * kLanes] : beyond[(v - kOwn) * kLanes];
            }
          }
          int const taps = (t * kernel_h + r) * kKernel;
          float sums[kSums] = {};
#pragma unroll
          for (int s = 0; s < kKernel; ++s) {
            using Vector = std::conditional_t<kVector == 4, float4,
                                              std::conditional_t<kVector == 2, float2, float>>;
            union {
              Vector vector;
              float values[kVector];
            } weight;
            if constexpr (kInput) {
              weight.vector = reinterpret_cast<Vector const*>(weights)[taps + s];
            }
            if constexpr (!C::kShared) {
#pragma unroll
              for (int q = 0; q < kPositions; ++q) given[q] = line[(s * kPositions + q) * kLanes];
            }
#pragma unroll
            for (int q = 0; q < kPositions; ++q) {
              float const value = given[C::kShared ? kStride * q + s : q];
#pragma unroll
              for (int c = 0; c < kChannels; ++c) {
                if constexpr (kInput) {
                  totals[c][q] = fmaf(value, weight.values[c], totals[c][q]);
                }
                if constexpr (kWeighs) {
                  sums[s * kChannels + c] = fmaf(value, inputs[c][q], sums[s * kChannels + c]);
                }
              }
            }
          }
          if constexpr (kWeighs) {
            float const total = share_totals(sums);
            sums_of_warps[warp * p.numbers + taps * kChannels + total_of<kSums>(lane)] = total;
          }
        }
      }
      if constexpr (kInput) {
        bool const ends = k % kPieceChannels == kPieceChannels - 1;
        if (ends && k + 1 < p.output_channels) add_piece(k < kPieceChannels);
      }
    }
    if constexpr (kInput) {
      if (p.output_channels > kPieceChannels) {
#pragma unroll
        for (int i = 0; i < kChannels * kPositions; ++i) {
          totals[i / kPositions][i % kPositions] += pieces[i * kThreads];
        }
      }
      with_type(p.dtype, [&](auto zero) {
        using T = decltype(zero);
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          store(totals[c], static_cast<T*>(p.tensors.grad_input) + input_at + c * p.input_channel,
                count);
        }
      });
    }
  }
}

}  // namespace fusedconv::conv::direct::few
