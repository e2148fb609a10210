// bfloat16 rows, fp32 accumulation.
#include "conv/sm80.hpp"

namespace fusedconv::conv::sm80 {
namespace {

template <int kM, int kN, int kK>
using Shape = cutlass::gemm::GemmShape<kM, kN, kK>;

template <int kDimensions, class Tile, class Warp, int kTeraflops>
using Row = Sm80Traits<Math::kBF16, kDimensions, Tile, Warp, 4, kTeraflops>;

template <int kDimensions>
using Rows = InstanceList<Row<kDimensions, Shape<128, 64, 32>, Shape<64, 32, 32>, 217>,
                          Row<kDimensions, Shape<128, 128, 32>, Shape<64, 64, 32>, 320>,
                          Row<kDimensions, Shape<256, 64, 32>, Shape<64, 64, 32>, 226>>;

}  // namespace

void append_bf16(std::vector<ConvRow>& rows) {
  Rows<2>::append(rows);
  Rows<3>::append(rows);
}

}  // namespace fusedconv::conv::sm80
