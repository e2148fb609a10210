// What consumers keep in shared memory beside operands: values of channels, and sums of moments.
#pragma once

#include "conv/sm90/phases/schedule.hpp"

namespace fusedconv::conv::sm90::phases {

inline constexpr int kWarps = 4;  // of a consumer

// A consumer's, by the block's channels. The pivots are what moments are counted from; each warp
// leaves its sums about them, and of how many values.
template <int kChannels>
struct Values {
  float bias[kChannels];
  float scale[kChannels], shift[kChannels];
  float pivot[kChannels];
  float sums[kWarps][kChannels], squares[kWarps][kChannels];
  float counts[kWarps];
};

// Of all consumers.
constexpr int values_bytes(Shape const& shape) {
  int const consumer = ((4 + 2 * kWarps) * shape.channels + kWarps) * int(sizeof(float));
  return shape.consumers() * consumer;
}
static_assert(values_bytes({.axes = 2, .channels = 32}) ==
              Shape{.axes = 2, .channels = 32}.consumers() * int(sizeof(Values<32>)));

}  // namespace fusedconv::conv::sm90::phases
