#include "conv/sm80/rows.hpp"

#include "conv/collected.hpp"

namespace fusedconv::conv::sm80 {

std::vector<Row> const& rows() {
  static std::vector<Row> const all =
      collected<Row>({&append_tf32, &append_tf32x3, &append_f16, &append_bf16});
  return all;
}

}  // namespace fusedconv::conv::sm80
