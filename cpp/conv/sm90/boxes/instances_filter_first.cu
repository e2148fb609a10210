#include "conv/sm90/boxes/launch.hpp"

namespace fusedconv::conv::sm90::boxes {

// Of 16 bits, as lines of a weight's output channels are read.
void append_filter_first(std::vector<Row>& rows) {
  constexpr Shape kShape{.columns = 64,
                         .ping_pong = true,
                         .consumers = 3,
                         .stationary = true,
                         .halo = true,
                         .positions = 192,
                         .staged = 3};
  append_row<Math::kF16, kShape>(rows);
  append_row<Math::kBF16, kShape>(rows);
}

}  // namespace fusedconv::conv::sm90::boxes
