// The compiled kernels of the family, and how one of them serves a problem.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "conv/problem.hpp"
#include "conv/sm90/arguments.hpp"
#include "conv/sm90/schedule.hpp"
#include "fusedconv/device.hpp"
#include "fusedconv/types.hpp"
#include "groupnorm/statistics.hpp"

namespace fusedconv::conv::sm90 {

struct Config;
// The output is in the order of the kernel's accumulators, for finalize(): its stores are whole
// cache lines whatever the tensor's layout and row length.
using Arguments = ConvolveArguments<Config>;

// One compiled kernel.
struct Row {
  std::string name;
  TileShape tile;
  void (*launch)(Arguments const&, cudaStream_t);
};

// Every row, in a fixed order.
std::vector<Row> const& rows();

// Defined by the instance files.
void append_tf32(std::vector<Row>& rows);
void append_tf32x3(std::vector<Row>& rows);
void append_f16(std::vector<Row>& rows);
void append_bf16(std::vector<Row>& rows);

// How a row serves a problem of any batch size on a device.
struct Config {
  Row const* row;  // of rows()
  ConvProblem problem;
  Layout layout;  // of the input
  int multiprocessors;
  Schedule schedule;

  // aligned: the input's address is a multiple of 16 bytes.
  Config(Row const& row, ConvProblem const& problem, Layout layout, bool aligned,
         Device const& device);

  TileShape const& tile() const { return row->tile; }
  MathTraits const& traits() const { return row->tile.traits(); }
  // How the input is read, for a person.
  std::string reads() const;
  // Of a sample.
  int tiles() const { return schedule.strips * schedule.tiles_n * schedule.tiles_m; }
  int taps_per_stage() const {
    return schedule.filter_rows_per_stage * problem.s * schedule.k_blocks_per_stage;
  }
  int64_t output_bytes_per_sample() const {
    return int64_t(schedule.warpgroup_tiles) * schedule.block_n * round_up(problem.k, kBlockM) *
           tile().element_bytes();
  }
  // Partial moments of a channel in a sample.
  int64_t partial_slots() const { return schedule.warpgroup_tiles; }
};

}  // namespace fusedconv::conv::sm90
