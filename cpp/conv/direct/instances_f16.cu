#include "conv/direct/launch.hpp"

namespace fusedconv::conv::direct {

Row row_f16() { return row_of<__half>(Math::kF16); }

}  // namespace fusedconv::conv::direct
