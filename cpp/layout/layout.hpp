// Passes that only move data: activations to channels-last, filters to the packed form.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "conv/problem.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv::layout {

// [batch, channels, pixels] (or [batch, pixels, channels]) to [batch, pixels, padded_channels]. The
// padding is written as zeros. round_tf32 rounds float32 to nearest TF32 on the way.
struct ChannelsLastProblem {
  int64_t batch = 0;
  int64_t channels = 0;
  int64_t padded_channels = 0;
  int64_t pixels = 0;
  Layout source = Layout::kChannelsFirst;
  DType dtype = DType::kFloat32;
  bool round_tf32 = false;
};
void to_channels_last(ChannelsLastProblem const& problem, void const* input, void* output,
                      cudaStream_t stream);

// A transposed convolution's weight to the filter [padded_k, T, R, S, padded_c] of the forward
// convolution it lowers to: taps reversed, channel axes swapped, padding zero. The bias [K], if
// any, is copied to [padded_k] with zeros behind.
struct PackedFilterProblem {
  conv::FilterSource source;
  int64_t padded_c = 0, padded_k = 0;
  DType dtype = DType::kFloat32;
  bool round_tf32 = false;
};
void pack_filter(PackedFilterProblem const& problem, void const* weight, void const* bias,
                 void* filter, void* packed_bias, cudaStream_t stream);

}  // namespace fusedconv::layout
