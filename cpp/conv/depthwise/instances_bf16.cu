#include "conv/depthwise/launch.hpp"

namespace fusedconv::conv::depthwise {

Row row_bf16() { return row_of<__nv_bfloat16>(Math::kBF16); }

}  // namespace fusedconv::conv::depthwise
