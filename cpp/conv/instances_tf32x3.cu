// Strict fp32 by 3xTF32. Small warp tiles: the split operands double the fragments' registers.
#include "conv/sm80.hpp"

namespace fusedconv::conv::sm80 {
namespace {

template <int kM, int kN, int kK>
using Shape = cutlass::gemm::GemmShape<kM, kN, kK>;

template <int kDimensions>
using Rows = InstanceList<
    Sm80Traits<Math::kTf32x3, kDimensions, Shape<64, 64, 16>, Shape<32, 32, 16>, 3, 56>,
    Sm80Traits<Math::kTf32x3, kDimensions, Shape<128, 64, 16>, Shape<64, 32, 16>, 3, 60>,
    Sm80Traits<Math::kTf32x3, kDimensions, Shape<128, 128, 16>, Shape<32, 64, 16>, 3, 64>>;

}  // namespace

void append_tf32x3(std::vector<ConvRow>& rows) {
  Rows<2>::append(rows);
  Rows<3>::append(rows);
}

}  // namespace fusedconv::conv::sm80
