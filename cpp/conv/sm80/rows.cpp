#include "conv/sm80/rows.hpp"

namespace fusedconv::conv::sm80 {

std::vector<Row> const& rows() {
  static std::vector<Row> const rows = [] {
    std::vector<Row> result;
    append_tf32(result);
    append_tf32x3(result);
    append_f16(result);
    append_bf16(result);
    return result;
  }();
  return rows;
}

}  // namespace fusedconv::conv::sm80
