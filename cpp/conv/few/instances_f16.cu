#include "conv/few/launch.hpp"

namespace fusedconv::conv::few {

Row row_f16() { return row_of<Math::kF16>(); }

}  // namespace fusedconv::conv::few
