#include "conv/sm90/boxes/launch.hpp"

namespace fusedconv::conv::sm90::boxes {

void append_bf16(std::vector<Row>& rows) {
  append_row<Math::kBF16, Shape{.columns = 384, .ping_pong = true}>(rows);
  append_row<Math::kBF16,
             Shape{.columns = 128, .ping_pong = true, .consumers = 4, .stationary = true}>(rows);
  append_row<Math::kBF16, Shape{.columns = 256}>(rows);
  append_row<Math::kBF16, Shape{.columns = 128}>(rows);
  append_row<Math::kBF16, Shape{.columns = 256, .segments = 4, .planes = true}>(rows);
  append_row<Math::kBF16, Shape{.columns = 128, .residents = 2}>(rows);
  append_row<Math::kBF16, Shape{.columns = 64, .residents = 2}>(rows);
  append_row<Math::kBF16, Shape{.columns = 128, .segments = 2, .residents = 2}>(rows);
  append_row<Math::kBF16, Shape{.columns = 64, .segments = 2, .residents = 2}>(rows);
  append_row<Math::kBF16, Shape{.columns = 128, .residents = 2, .halo = true}>(rows);
  append_row<Math::kBF16, Shape{.columns = 128, .segments = 4, .residents = 2}>(rows);
  append_row<Math::kBF16, Shape{.columns = 128, .segments = 2, .planes = true, .residents = 2}>(
      rows);
  append_row<Math::kBF16, Shape{.columns = 64, .segments = 2, .planes = true, .residents = 2}>(
      rows);
  append_row<Math::kBF16, Shape{.columns = 128, .segments = 2, .residents = 2, .halo = true}>(rows);
  append_row<Math::kBF16,
             Shape{.columns = 128, .segments = 8, .residents = 2, .alike = 4, .halo = true}>(rows);
}

}  // namespace fusedconv::conv::sm90::boxes
