// Strict fp32 by 3xTF32. Small warp tiles: the split operands double the fragments' registers.
#include "conv/sm80/launch.hpp"

namespace fusedconv::conv::sm80 {
namespace {

template <int kDimensions, class Tile, class Warp>
using Kernel = Traits<Math::kTf32x3, kDimensions, Tile, Warp, 3>;

template <int kDimensions>
void append(std::vector<Row>& rows) {
  rows.push_back(row_of<Kernel<kDimensions, Shape<64, 64, 16>, Shape<32, 32, 16>>>(0.113));
  rows.push_back(row_of<Kernel<kDimensions, Shape<128, 64, 16>, Shape<64, 32, 16>>>(0.121));
  rows.push_back(row_of<Kernel<kDimensions, Shape<128, 128, 16>, Shape<32, 64, 16>>>(0.129));
}

}  // namespace

void append_tf32x3(std::vector<Row>& rows) {
  append<2>(rows);
  append<3>(rows);
}

}  // namespace fusedconv::conv::sm80
