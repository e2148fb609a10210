#include "conv/few/launch.hpp"

namespace fusedconv::conv::few {

Row row_bf16() { return row_of<Math::kBF16>(); }

}  // namespace fusedconv::conv::few
