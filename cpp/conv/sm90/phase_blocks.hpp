// Blocks of the sub-pixel phases of a strided transposed convolution that have taps of their own.
// No CUDA here.
//
// A block of columns is of one phase along depth and height, whose taps it has alone, and of all
// phases along width: of the lower half of these in the first half of its columns, of the upper in
// the second. An input before a position is read by the lower half alone and one behind it by the
// upper, so that such a tap multiplies half of the columns.
//
// Column 8 j + 2 t + e of a half is of channel q / half_phases * 4 + t of the block's and of phase
// q modulo half_phases of the half, with q = 2 j + e: a lane of the tensor core, which has some t
// and all j and e, then has every phase of a channel along width.
#pragma once

#include <cstdint>

#include "conv/axis.hpp"

namespace fusedconv::conv::sm90 {

inline constexpr int kMostRowPhases = 8;  // along depth, and along height
inline constexpr int kPhaseColumns = 64;  // of a block

struct PhaseBlocks {
  struct Taps {
    int16_t lowest = 0;  // input position less the output's of the first
    int16_t count = 1;
  };
  int half_phases = 0;  // along width in a half of the columns; 0 where phases share all taps
  int channel_blocks = 1;
  Taps depth[kMostRowPhases]{};
  Taps height[kMostRowPhases]{};

  constexpr bool present() const { return half_phases > 0; }
  // Of the tensor, in a block.
  FUSEDCONV_HOST_DEVICE int channels() const { return kPhaseColumns / 2 / half_phases; }

  struct Column {
    int channel;  // of the block's
    int phase;    // along width
  };
  FUSEDCONV_HOST_DEVICE Column column(int index) const {
    int const in_half = index % (kPhaseColumns / 2);
    int const slot = in_half / 8 * 2 + in_half % 2;
    return {slot / half_phases * 4 + in_half % 8 / 2,
            index / (kPhaseColumns / 2) * half_phases + slot % half_phases};
  }
};

}  // namespace fusedconv::conv::sm90
