#include "conv/convolution.hpp"

namespace fusedconv::conv {
namespace sm80 {

void append_tf32(std::vector<ConvRow>& rows);
void append_tf32x3(std::vector<ConvRow>& rows);
void append_f16(std::vector<ConvRow>& rows);
void append_bf16(std::vector<ConvRow>& rows);

}  // namespace sm80

std::vector<ConvRow> const& conv_rows() {
  static std::vector<ConvRow> const rows = [] {
    std::vector<ConvRow> result;
    sm80::append_tf32(result);
    sm80::append_tf32x3(result);
    sm80::append_f16(result);
    sm80::append_bf16(result);
    return result;
  }();
  return rows;
}

}  // namespace fusedconv::conv
