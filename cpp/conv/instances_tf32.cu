// TF32 rows. The filter's output channels are the tile's N: 64 for narrow layers, 128 for wide ones.
#include "conv/sm80.hpp"

namespace fusedconv::conv::sm80 {
namespace {

template <int kM, int kN, int kK>
using Shape = cutlass::gemm::GemmShape<kM, kN, kK>;

template <Math kMath, int kDimensions>
using Rows = InstanceList<Sm80Traits<kMath, kDimensions, Shape<128, 64, 16>, Shape<64, 32, 16>, 4>,
                          Sm80Traits<kMath, kDimensions, Shape<128, 64, 32>, Shape<64, 32, 32>, 3>,
                          Sm80Traits<kMath, kDimensions, Shape<128, 128, 16>, Shape<64, 64, 16>, 4>,
                          Sm80Traits<kMath, kDimensions, Shape<256, 64, 16>, Shape<64, 64, 16>, 4>>;

}  // namespace

void append_tf32(std::vector<ConvRow>& rows) {
  Rows<Math::kTf32Rounded, 2>::append(rows);
  Rows<Math::kTf32Rounded, 3>::append(rows);
  Rows<Math::kTf32, 2>::append(rows);
  Rows<Math::kTf32, 3>::append(rows);
}

}  // namespace fusedconv::conv::sm80
