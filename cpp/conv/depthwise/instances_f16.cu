#include "conv/depthwise/launch.hpp"

namespace fusedconv::conv::depthwise {

Row row_f16() { return row_of<__half>(Math::kF16); }

}  // namespace fusedconv::conv::depthwise
