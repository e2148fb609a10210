// The compiled kernels whose operands tensor copies bring, and how one serves a problem.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "conv/problem.hpp"
#include "conv/sm90/boxes/schedule.hpp"
#include "fusedconv/activation.hpp"
#include "fusedconv/groupnorm.hpp"
#include "fusedconv/types.hpp"
#include "groupnorm/statistics.hpp"

namespace fusedconv::conv::sm90::boxes {

struct Config;

// LayerNorm over the channels of a pixel, in front of the activation.
struct PixelNorm {
  void const* weight = nullptr;  // [K] of dtype, or null
  void const* bias = nullptr;
  DType dtype = DType::kFloat32;
  float eps = 0.0f;
};

// GroupNorm behind the biased sum, in front of the activation, by statistics of [N, groups].
struct GroupStatistics {
  groupnorm::Statistics const* statistics = nullptr;
  void const* weight = nullptr;  // [K] of dtype, or null
  void const* bias = nullptr;
  DType dtype = DType::kFloat32;
  int groups = 0, channels = 0;  // of a group
};

struct Arguments {
  Config const& config;
  int batch = 0;
  Activation activation = Activation::kIdentity;
  void const* input = nullptr;           // channels first where the row reads planes, else last
  void const* filter = nullptr;          // packed by pack_filter(), or the weight
  FilterSource const* weight = nullptr;  // how that lies, which the config reads as it is
  void const* bias = nullptr;            // [K] of the tensors' type, or null
  float const* scale = nullptr;          // [K], or null: times the biased sum
  float const* shift = nullptr;          // [K], or null: added to that
  int own_channels = 0;    // K, or 0: those of the output's pixels, which may be padded
  void* output = nullptr;  // in the problem's layout
  void* saved = nullptr;   // as output, or null: the biased sum, which the rest then reads
  PixelNorm const* norm = nullptr;
  GroupStatistics const* group = nullptr;
  // Moments of activated values: [N, slots, K], or null. The output then may be null, and is before
  // the activation unless that activates_output.
  groupnorm::Partial* partials = nullptr;
  bool activates_output = true;
  bool begins_early = false;  // may: what is in front releases early
};

// One compiled kernel.
struct Row {
  std::string name;
  Math math;
  Shape shape;
  void (*launch)(Arguments const&, cudaStream_t);
};

// Every row, in a fixed order.
std::vector<Row> const& rows();

// Defined by the instance files.
void append_tf32(std::vector<Row>& rows);
void append_f16(std::vector<Row>& rows);
void append_bf16(std::vector<Row>& rows);
void append_filter_first(std::vector<Row>& rows);

// How a row serves a problem of any batch size on a device.
struct Config {
  // See conv/steps.hpp.
  static constexpr bool kScales = true, kPadsChannels = true, kSaves = true, kReadsWeight = true,
                        kBeginsEarly = true;

  Row const* row;  // of rows()
  Problem problem;
  int multiprocessors;
  Schedule schedule;

  Config(Row const& row, Problem const& problem, Device const& device,
         Direction direction = Direction::kScatters);

  // How the input is read, for a person.
  std::string reads() const { return row->shape.planes ? "nchw" : "nhwc"; }
  MathTraits const& traits() const { return traits_of(row->math); }
  // Whether copies read a weight that begins at a multiple of 16 bytes as it lies: one whose
  // channels are beside each other, of a convolution that gathers, or whose output channels are, of
  // 16 bits, of one that scatters.
  bool reads_weight(FilterSource const& weight) const;
  // Of one slab or two, which a block multiplies at a time.
  int64_t tiles(int64_t batch) const;
  // Positions of a sample that products are of, with those beside the image, where the filter is
  // their first operand.
  int64_t multiplied() const;
  // Whether a block has all channels of its pixels, so that it can normalise them.
  bool holds_pixels() const;
  // Whether slabs of one sample, as moments ask for, are nearly as few as those of any.
  bool suits_moments() const;
  // Partial moments of a channel in a sample.
  int64_t partial_slots() const;
};

}  // namespace fusedconv::conv::sm90::boxes
