#include "conv/depthwise/launch.hpp"

namespace fusedconv::conv::depthwise {

Row row_f32() { return row_of<float>(Math::kF32); }

}  // namespace fusedconv::conv::depthwise
