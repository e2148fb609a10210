#include "conv/sm90/streams/launch.hpp"

namespace fusedconv::conv::sm90::streams {

void append_tf32(std::vector<Row>& rows) { append_rows<Math::kTf32>(rows); }

}  // namespace fusedconv::conv::sm90::streams
