// TF32 rows. The filter's output channels are the tile's N: 64 for narrow layers, 128 for wide ones.
#include "conv/sm80.hpp"

namespace fusedconv::conv::sm80 {
namespace {

template <int kM, int kN, int kK>
using Shape = cutlass::gemm::GemmShape<kM, kN, kK>;

template <Math kMath, int kDimensions, class Tile, class Warp, int kTeraflops>
using Row = Sm80Traits<kMath, kDimensions, Tile, Warp, 4, kTeraflops>;

template <int kDimensions>
using RoundedRows =
    InstanceList<Row<Math::kTf32Rounded, kDimensions, Shape<128, 64, 16>, Shape<64, 32, 16>, 138>,
                 Row<Math::kTf32Rounded, kDimensions, Shape<128, 128, 16>, Shape<64, 64, 16>, 172>,
                 Row<Math::kTf32Rounded, kDimensions, Shape<256, 64, 16>, Shape<64, 64, 16>, 143>>;

template <int kDimensions>
using RoundingRows =
    InstanceList<Row<Math::kTf32, kDimensions, Shape<128, 64, 16>, Shape<64, 32, 16>, 132>,
                 Row<Math::kTf32, kDimensions, Shape<128, 128, 16>, Shape<64, 64, 16>, 148>,
                 Row<Math::kTf32, kDimensions, Shape<256, 64, 16>, Shape<64, 64, 16>, 143>>;

}  // namespace

void append_tf32(std::vector<ConvRow>& rows) {
  RoundedRows<2>::append(rows);
  RoundedRows<3>::append(rows);
  RoundingRows<2>::append(rows);
  RoundingRows<3>::append(rows);
}

}  // namespace fusedconv::conv::sm80
