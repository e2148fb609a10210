// Gradients of ungrouped transposed convolutions of few input channels, channels first. As those of
// depthwise ones (gradients.hpp), but what is loaded of the output's gradient serves all of the
// input's channels, and an element of it the many taps that meet it. So a block stages the lines
// that its tile of the input meets, an output channel at a time, as floats in shared memory, and a
// thread multiplies each that it reads with weights and with inputs in registers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "conv/transposed.hpp"
#include "fusedconv/support.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv::conv::direct::few {

inline constexpr int kThreads = 128;
inline constexpr int kWarps = kThreads / 32;
// A tile has rows of 32 positions along width, each of 4 threads with 8 neighbours.
inline constexpr int kPositions = 8;
inline constexpr int kLanes = 4;
inline constexpr int kTileWidth = kLanes * kPositions;
inline constexpr int kRows = kThreads / kLanes;
inline constexpr int kMostChannels = 4;
inline constexpr int kLeastKernel = 2, kMostKernel = 5;  // along width

// How a staged line lies: neighbouring threads, eight positions apart, find what they read
// together side by side. With stride 2 (kStride) column v of a thread, which its neighbour along
// width has 16 before, is at 4 v; the last thread's beyond the 16th are behind them all. Otherwise
// (kStride 0) each tap has columns of its own, whatever stride and dilation are.
template <int kStride, int kKernel>
struct Columns {
  static constexpr bool kShared = kStride > 0;
  static constexpr int kPasses = kShared ? kStride : kKernel;  // of a warp over a line
  static constexpr int kBeyond = kShared ? kKernel - kStride : 0;
  static constexpr int kValues = kShared ? kStride * (kPositions - 1) + kKernel : 0;
  static constexpr int kWhole = kTileWidth * kPasses;  // without those beyond
  static_assert(kBeyond >= 0 && kBeyond <= kLanes);

  // From a line to the next. Eight rows of four threads read without conflicts where the rows'
  // lines are an odd multiple of four apart.
  static constexpr int pitch() {
    int result = kWhole + (kBeyond > 0 ? kLanes * (kBeyond - 1) + 1 : 0);
    while (result * kPasses % 8 != 4) ++result;
    return result;
  }
};

// Entries of the list of a tile's lines, which batches of all warps read.
inline constexpr int kLineBatch = 8 * kWarps;
constexpr int line_slots(int64_t lines) { return int(round_up(lines, kLineBatch)); }

// Output channels whose products are summed before they are added to the input's gradient.
inline constexpr int kPieceChannels = 8;

// A row of channels of the weight in shared memory: as many floats as are loaded at once.
constexpr int weight_vector(int channels) { return channels == 3 ? 4 : channels; }

struct Config {
  Support support;
  TransposedProblem problem;
  DType dtype = DType::kFloat32;
  int64_t batch = 0;
  // Axes as the kernel sees them: depth, or height too, may be samples where the problem lacks it.
  AxisProblem axes[kMaxAxes];
  int64_t samples = 0;
  int64_t input_strides[kMaxAxes + 1] = {}, output_strides[kMaxAxes + 1] = {};  // sample, d, h, w
  int stride = 0;                                                               // of Columns
  int tile[2] = {}, lines[2] = {};        // along depth and height
  int tiles[kMaxAxes] = {};               // of a sample
  int pitch = 0, passes = 0, values = 0;  // of Columns; values that a thread reads of a line
  int shared_bytes = 0;

  int taps() const {
    return problem.axes[0].kernel * problem.axes[1].kernel * problem.axes[2].kernel;
  }
  // Blocks, of which each leaves a part of the weight's gradient.
  int64_t items() const { return samples * tiles[0] * tiles[1] * tiles[2]; }
  int parts() const;
  int numbers() const { return problem.output_channels * taps() * problem.channels; }
  // [parts, K, taps, C] in float32.
  int64_t partial_bytes() const { return int64_t(parts()) * numbers() * int64_t(sizeof(float)); }
};

Config config_of(TransposedProblem const& problem, DType dtype, int64_t batch);

// input, grad_output and grad_input are dense in NCHW, weight as `source` has it. grad_input is
// null where it is not wanted, or partials are.
struct Tensors {
  void const* input = nullptr;
  void const* grad_output = nullptr;
  void const* weight = nullptr;
  void* grad_input = nullptr;
  float* partials = nullptr;
};

void compute_gradients(Config const& config, FilterSource const& source, Tensors const& tensors,
                       cudaStream_t stream);

// Adds up the parts in a fixed order, into the weight's gradient as `target` has it.
void add_parts(Config const& config, FilterSource const& target, float const* partials,
               void* grad_weight, cudaStream_t stream);

}  // namespace fusedconv::conv::direct::few
