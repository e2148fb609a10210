#include "conv/direct/launch.hpp"

namespace fusedconv::conv::direct {

Row row_f32() { return row_of<float>(Math::kF32); }

}  // namespace fusedconv::conv::direct
