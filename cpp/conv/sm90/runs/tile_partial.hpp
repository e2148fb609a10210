// What the convolution leaves of a tile's moments.
#pragma once

namespace fusedconv::conv::sm90::runs {

// Of a channel's pixels in a tile, which the reader counts: with counts all would be a third more
// memory. As groupnorm::Partial else.
struct TilePartial {
  float mean, low, m2;
};

}  // namespace fusedconv::conv::sm90::runs
