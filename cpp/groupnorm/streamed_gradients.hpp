// Gradients with the input and the output's gradient read from DRAM once; see stream.hpp.
#pragma once

#include <cuda_runtime_api.h>

#include "fusedconv/device.hpp"
#include "groupnorm/gradient.hpp"
#include "groupnorm/stream.hpp"

namespace fusedconv::groupnorm {

inline constexpr int kStreamedTensors = 2;  // the input, and the gradient

// Threads that take a tile's sums, and those that replace it. Groups of both take tiles in turn:
// what one does for a tile is a long chain of operations that wait for each other.
inline constexpr int kSummers = 64;
inline constexpr int kSummerGroups = 4;
inline constexpr int kReplacers = 128;
inline constexpr int kReplacerGroups = 3;

// Of a tile as it lies in padded lines.
inline constexpr int kImageBytes = kStageBytes / kStreamedTensors;
inline constexpr int kImageStart = 16;
// Vectors of which stores are multiples, but of runs cut too short for that: of sectors that a
// store fills in part all go through the cache once more.
inline constexpr int kImageUnit = kLineVectors;
// A tile fits its share of a stage, too, with what it begins within.
constexpr int most_image_vectors(int tensors) {
  int const image = (kImageBytes - kImageStart - 32) / 16;
  int const tile = share_bytes(tensors) / 16 - kLineVectors;
  return (image < tile ? image : tile) / kImageUnit * kImageUnit;
}
static_assert(most_image_vectors(kStreamedTensors) == 504);
inline constexpr int kMostImageColumns = 1 << 15;  // fewer than these

struct StreamedGradientConfig : GradientBuffers {
  StreamedConfig streamed;
};

// aligned: the addresses of all three tensors are multiples of 16 bytes. columns, pitch: of the
// lines that the result goes to, in elements; 0 where it is dense.
StreamedGradientConfig streamed_gradient_config(GroupNormProblem const& problem, bool aligned,
                                                int columns, int pitch, Device const& device);

// Fills tensors.grad_input, and the partial sums, for merge_gradient_sums(). The config must be of
// the same problem and of the device that runs it. workspace: config.streamed.words_bytes(). A
// cooperative launch: every block must be resident.
void streamed_gradients(StreamedGradientConfig const& config, GroupNormProblem const& problem,
                        GradientTensors const& tensors, float2* partials, void* workspace,
                        cudaStream_t stream);

}  // namespace fusedconv::groupnorm
