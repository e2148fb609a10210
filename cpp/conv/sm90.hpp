// Transposed convolutions of stride 1 on Hopper's warpgroup tensor cores: the schedule, without CUDA code.
//
// The output positions of a sample form one line: rows of `pitch_w` positions, `pitch_h` rows per slice
// of depth. The gap that a pitch leaves beside the data stands for the zeros that pad the input, so a
// filter tap is a constant distance along the line: a block stages a run of input positions once and
// reads it for every tap at a shifted address. With the padding k - 1 of a plain transposed convolution
// the pitch equals the output's own width and the line is the output plane itself.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "conv/convolution.hpp"
#include "fusedconv/types.hpp"
#include "groupnorm/groupnorm.hpp"

namespace fusedconv::conv::sm90 {

inline constexpr int kBlockM = 64;          // output channels of a warpgroup's tile
inline constexpr int kChunkBytes = 32;      // of channels: one step of the tensor core
inline constexpr int kMaxStageRows = 1024;  // positions staged at once
inline constexpr int kMaxSlots = 8;
inline constexpr int kMaxLineElements = 256;    // that a tensor copy's box takes along an axis
inline constexpr int kConsumers = 2;            // warpgroups
inline constexpr int kSharedLimit = 227 << 10;  // of a block on compute capability 9.0

// How the two consuming warpgroups share the work.
enum class Sharing : int {
  kTurns = 0,      // one tile each, in turns; the filter of 64 channels stays in shared memory
  kChannels = 1,   // one tile of positions, 64 channels each; filter and input pass through stages
  kPositions = 2,  // one tile of channels, neighbouring positions; as kChannels
};

constexpr int blocks_m(Sharing sharing) { return sharing == Sharing::kChannels ? 2 : 1; }
// Positions of a warpgroup's tile. Strict fp32 holds two accumulators.
constexpr int block_n(Math math) { return math == Math::kTf32x3 ? 128 : 256; }
constexpr int tile_positions(Math math, Sharing sharing) {
  return block_n(math) * (sharing == Sharing::kPositions ? 2 : 1);
}
constexpr int parts_of(Math math) { return math == Math::kTf32x3 ? 2 : 1; }
constexpr int element_bytes(Math math) { return math == Math::kF16 || math == Math::kBF16 ? 2 : 4; }
constexpr int chunk_channels(Math math) { return kChunkBytes / element_bytes(math); }

// What a launch of one problem looks like. All sizes are counts unless they say bytes.
struct Schedule {
  std::string obstacle;  // why the kernel does not serve the problem; empty where it does
  int block_n = 0;
  int pitch_w = 0;
  int pitch_h = 0;
  int strip_width = 0;  // output columns that a line covers
  int strips = 1;
  bool linear = false;  // the line is the output plane
  int positions = 0;    // of a line
  int tiles = 0;        // of a line
  int blocks_k = 0;     // tiles along the output's channels
  int chunks = 0;
  bool bulk = false;  // input lines come by tensor copies, else element by element
  int chunks_per_stage = 1;
  int rows_per_stage = 1;  // filter rows
  int row_step = 0;        // staged positions from one filter row's to the next's
  int stage_rows = 0;      // positions staged
  int plane_rows = 0;      // the same, padded against bank conflicts
  int stages = 0;          // of a tile
  int slots = 0;
  int line_elements = 0;  // of a line in the landing zone, per channel
  int lines = 0;          // that a stage may touch
  int landing_slots = 0;
  int landing_bytes = 0;  // of a stage
  int filter_stage_bytes = 0;
  int input_stage_bytes = 0;
  int shared_bytes = 0;
  int64_t filter_bytes = 0;  // packed
  int stat_tiles = 0;        // partial moments per sample and channel
};

// aligned: the input's address is a multiple of 16 bytes.
Schedule schedule_of(ConvProblem const& problem, Math math, Sharing sharing, Layout layout,
                     bool aligned, int shared_limit);

// What the kernel needs to know of the tensors beyond the schedule.
struct Arguments {
  ConvProblem problem;
  Schedule schedule;
  Layout layout = Layout::kChannelsFirst;  // of the input
  Activation activation = Activation::kIdentity;
  bool activates_output = true;  // else only the moments are of activated values
  void const* input = nullptr;
  void const* filter = nullptr;  // packed by pack_filter()
  void const* bias = nullptr;    // [K] of the tensors' type, or null
  // In the order of the kernel's accumulators (output_bytes() of them), for unpack(): its stores are whole
  // lines whatever the tensor's layout and row length.
  void* output = nullptr;
  groupnorm::Partial* partials = nullptr;  // [N, stat_tiles, K]; or null
  int multiprocessors = 0;
};

// Bytes of one sample.
constexpr int64_t output_bytes(ConvProblem const& p, Schedule const& s, Math math) {
  return int64_t(s.stat_tiles) * s.block_n * round_up(p.k, kBlockM) * element_bytes(math);
}
constexpr int64_t partial_bytes(ConvProblem const& p, Schedule const& s) {
  return int64_t(s.stat_tiles) * p.k * int64_t(sizeof(groupnorm::Partial));
}

// A transposed convolution's weight [C, K, T, R, S]: strides in elements.
struct FilterSource {
  int64_t c = 0, k = 0;
  int64_t stride_c = 0, stride_k = 0, stride_t = 0, stride_r = 0, stride_s = 0;
};

// To the order in which stages consume it: taps reversed, channel axes swapped, rounded or split in two.
void pack_filter(FilterSource const& source, ConvProblem const& problem, Schedule const& schedule,
                 Math math, Sharing sharing, void const* weight, void* filter, cudaStream_t stream);

// Partial moments to statistics [N, groups], merged in a fixed order.
void merge_moments(ConvProblem const& problem, Schedule const& schedule, int groups, double eps,
                   groupnorm::Partial const* partials, groupnorm::StatisticsTargets const& targets,
                   cudaStream_t stream);

// The convolution's output to normalised output of a dense layout, and, where conv_output is given, to
// itself in that layout. Channels-last output takes 16-byte stores where rows allow them.
struct UnpackTensors {
  void const* input = nullptr;
  void* output = nullptr;
  void* conv_output = nullptr;  // or null
  void const* weight = nullptr;
  void const* bias = nullptr;
  groupnorm::Statistics const* statistics = nullptr;  // null: no normalisation
};
void unpack(ConvProblem const& problem, Schedule const& schedule, groupnorm::Passes const& passes,
            UnpackTensors const& tensors, cudaStream_t stream);

// One compiled kernel. Python reads the metadata and passes back the row's index.
struct Row {
  std::string name;
  Math math;
  DType dtype;
  Sharing sharing;
  void (*launch)(Arguments const&, cudaStream_t);
};
std::vector<Row> const& rows();

// A row's launch for a problem of any batch size.
struct Plan {
  int row = 0;
  ConvProblem problem;
  Schedule schedule;
  Layout layout = Layout::kChannelsFirst;
  int multiprocessors = 0;
};

// Defined by the instance files.
void append_tf32(std::vector<Row>& rows);
void append_tf32x3(std::vector<Row>& rows);
void append_f16(std::vector<Row>& rows);
void append_bf16(std::vector<Row>& rows);

}  // namespace fusedconv::conv::sm90
