#include "layernorm/layer_norm.hpp"

#include "fusedconv/check.hpp"
#include "groupnorm/launch.hpp"
#include "layernorm/passes.hpp"

namespace fusedconv::layernorm {

void check(GroupNormProblem const& p) {
  groupnorm::check(p);
  FUSEDCONV_CHECK(p.output_layout == p.input_layout, "layer_norm: output layout: got ",
                  name_of(p.output_layout), " for input of ", name_of(p.input_layout));
  FUSEDCONV_CHECK(p.output_dtype == p.dtype || p.output_dtype == DType::kFloat32,
                  "layer_norm: output dtype: got ", name_of(p.output_dtype), " for input of ",
                  name_of(p.dtype));
  FUSEDCONV_CHECK(p.input_row_channels() == p.channels, "layer_norm: row_channels: got ",
                  p.row_channels);
}

void layer_norm(GroupNormProblem const& p, GroupNormTensors const& tensors, cudaStream_t stream) {
  check(p);
  if (p.batch == 0 || p.pixels == 0) return;
  bool const first = p.input_layout == Layout::kChannelsFirst;
  (first ? layer_norm_channels_first : layer_norm_channels_last)(p, tensors, stream);
}

}  // namespace fusedconv::layernorm
