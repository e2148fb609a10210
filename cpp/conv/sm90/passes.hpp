// The passes around the convolution: they pack its filter and bring its output into a tensor's
// order.
#pragma once

#include <cuda_runtime_api.h>

#include <array>

#include "conv/phase_planes.hpp"
#include "conv/problem.hpp"
#include "conv/sm90/phase_blocks.hpp"
#include "conv/sm90/rows.hpp"
#include "fusedconv/groupnorm.hpp"
#include "groupnorm/statistics.hpp"

namespace fusedconv::conv::sm90 {

// The order in which stages consume a filter.
struct FilterOrder {
  Math math;
  int taps_d, taps_h, taps_w;
  int blocks_m, tiles_m;  // of kBlockM output channels in a tile; tiles
  int k_blocks;           // of all input channels
  // Of a stage, and stages; those beyond the last depth tap are zeros.
  int k_blocks_per_stage, filter_rows, k_iterations;
  // Whether the two halves of a k-block alternate by channel, else the second follows the first.
  bool interleaves_halves;
  int zeros = 0;    // 32-bit words behind the packed filter that become zero
  Phases phases{};  // that are output channels
  PhaseBlocks phase_blocks{};
  // Of the filter's taps along depth, height and width those before a position's own, where phases
  // are output channels; along width alone where they are blocks.
  std::array<int, kMaxAxes> before{};
  // Which the filter's input channels are of; of a tensor that is none, one with a tap for each of
  // the weight's.
  PhasePlanes planes;
  bool reverses_taps = true;  // where no phases are output channels
};

// Taps as the order says, channel axes swapped, rounded or split in two.
void pack_filter(FilterOrder const& order, FilterSource const& source, void const* weight,
                 void* filter, cudaStream_t stream);
void pack_filter(Config const& config, FilterSource const& source, void const* weight, void* filter,
                 cudaStream_t stream);

struct FinalizeTensors {
  void const* input = nullptr;  // the convolution's output, in the order of its accumulators
  void* output = nullptr;
  void* conv_output = nullptr;  // or null
  void const* weight = nullptr;
  void const* bias = nullptr;
  groupnorm::Statistics const* statistics = nullptr;  // null: no normalisation
};

// The convolution's output to normalised output of a dense layout, and, where conv_output is given,
// to itself in that layout. Channels-last output takes 16-byte stores where rows allow them.
void finalize(Config const& config, GroupNormProblem const& problem, FinalizeTensors const& tensors,
              cudaStream_t stream);

}  // namespace fusedconv::conv::sm90
