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

// Of all consumers, for so many channels.
constexpr int values_bytes(int channels) {
  int const consumer = ((4 + 2 * kWarps) * channels + kWarps) * int(sizeof(float));
  return kConsumers * consumer;
}
static_assert(values_bytes(32) == kConsumers * int(sizeof(Values<32>)));

}  // namespace fusedconv::conv::sm90::phases
