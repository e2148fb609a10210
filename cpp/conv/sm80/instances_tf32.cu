// TF32 rows. The filter's output channels are the tile's N: 64 for narrow layers, 128 for wide
// ones.
#include "conv/sm80/launch.hpp"

namespace fusedconv::conv::sm80 {
namespace {

template <Math kMath, int kDimensions, class Tile, class Warp>
using Kernel = Traits<kMath, kDimensions, Tile, Warp, 4>;

template <int kDimensions>
void append_rounded(std::vector<Row>& rows) {
  constexpr Math kMath = Math::kTf32Rounded;
  rows.push_back(row_of<Kernel<kMath, kDimensions, Shape<128, 64, 16>, Shape<64, 32, 16>>>(0.279));
  rows.push_back(row_of<Kernel<kMath, kDimensions, Shape<128, 128, 16>, Shape<64, 64, 16>>>(0.348));
  rows.push_back(row_of<Kernel<kMath, kDimensions, Shape<256, 64, 16>, Shape<64, 64, 16>>>(0.289));
}

template <int kDimensions>
void append_rounding(std::vector<Row>& rows) {
  constexpr Math kMath = Math::kTf32;
  rows.push_back(row_of<Kernel<kMath, kDimensions, Shape<128, 64, 16>, Shape<64, 32, 16>>>(0.267));
  rows.push_back(row_of<Kernel<kMath, kDimensions, Shape<128, 128, 16>, Shape<64, 64, 16>>>(0.299));
  rows.push_back(row_of<Kernel<kMath, kDimensions, Shape<256, 64, 16>, Shape<64, 64, 16>>>(0.289));
}

}  // namespace

void append_tf32(std::vector<Row>& rows) {
  append_rounded<2>(rows);
  append_rounded<3>(rows);
  append_rounding<2>(rows);
  append_rounding<3>(rows);
}

}  // namespace fusedconv::conv::sm80
