#include "conv/sm90/col2im/launch.hpp"

namespace fusedconv::conv::sm90::col2im {

void append_bf16(std::vector<Row>& rows) { append_rows<Math::kBF16>(rows); }

}  // namespace fusedconv::conv::sm90::col2im
