#include "conv/few/launch.hpp"

namespace fusedconv::conv::few {

Row row_tf32() { return row_of<Math::kTf32>(); }

}  // namespace fusedconv::conv::few
