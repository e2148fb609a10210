// float16 rows, fp32 accumulation.
#include "conv/sm80/launch.hpp"

namespace fusedconv::conv::sm80 {
namespace {

template <int kDimensions, class Tile, class Warp>
using Kernel = Traits<Math::kF16, kDimensions, Tile, Warp, 4>;

template <int kDimensions>
void append(std::vector<Row>& rows) {
  rows.push_back(row_of<Kernel<kDimensions, Shape<128, 64, 32>, Shape<64, 32, 32>>>(0.219));
  rows.push_back(row_of<Kernel<kDimensions, Shape<128, 128, 32>, Shape<64, 64, 32>>>(0.323));
  rows.push_back(row_of<Kernel<kDimensions, Shape<256, 64, 32>, Shape<64, 64, 32>>>(0.228));
}

}  // namespace

void append_f16(std::vector<Row>& rows) {
  append<2>(rows);
  append<3>(rows);
}

}  // namespace fusedconv::conv::sm80
