// What becomes of a line's sums: a warp adds the bias to those of its 16 output channels, and
// stores them by shared memory and a tensor copy.
#pragma once

#include <cstdint>

#include "conv/sm90/strips/params.hpp"
#include "conv/sm90/strips/traits.hpp"
#include "cuda/async.hpp"
#include "cuda/math.hpp"
#include "cute/arch/copy_sm90_tma.hpp"

namespace fusedconv::conv::sm90::strips {

template <class Traits>
class Outputs {
 public:
  // staged: the warp's.
  __device__ __forceinline__ Outputs(Params const& p, Block const& block, unsigned char* staged,
                                     int warp, int lane)
      : staged_(staged), lane_(lane), channel0_(block.channel0 + warp * kStepChannels) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int const channel = channel0_ + lane / 4 + 8 * r;
      bias_[r] = p.bias != nullptr && channel < p.channels
                     ? device::to_float(static_cast<T const*>(p.bias)[channel])
                     : 0.0f;
    }
  }

  // Sum 4 j + 2 r + e is of channel lane / 4 + 8 r, position 8 j + lane % 4 * 2 + e.
  __device__ __forceinline__ void store(Maps const& maps, int sample, int line, int column,
                                        float const (&sums)[kSums]) const {
    if (lane_ == 0) device::wait_stores_read();
    __syncwarp();
    stage(sums);
    device::fence_async_proxy();
    __syncwarp();
    if (lane_ != 0) return;
    cute::SM90_TMA_STORE_5D::copy(&maps.output, staged_, column, line, channel0_, sample, 0);
    device::commit_stores();
  }

 private:
  using T = typename Traits::Element;

  // Two neighbours of a unit.
  __device__ __forceinline__ uint32_t pair(float const (&sums)[kSums], int unit, int r) const {
    float const* const at = sums + unit * 4 + 2 * r;
    return device::Pack<T, 2>::of({at[0] + bias_[r], at[1] + bias_[r]}).bits[0];
  }

  // As tensor copies read them. Eight channels of eight positions are a matrix.
  __device__ __forceinline__ void stage(float const (&sums)[kSums]) const {
    int const row = lane_ % 16;
    uint32_t const own = device::shared_address(staged_) + row * kPitch;
#pragma unroll
    for (int unit = 0; unit < kPositions / kGranule; unit += 2) {
      device::store_matrices(own + ((unit + lane_ / 16) ^ row % 8) * kVectorBytes,
                             {pair(sums, unit, 0), pair(sums, unit, 1), pair(sums, unit + 1, 0),
                              pair(sums, unit + 1, 1)});
    }
  }

  unsigned char* staged_;
  int lane_, channel0_;
  float bias_[2];
};

}  // namespace fusedconv::conv::sm90::strips
