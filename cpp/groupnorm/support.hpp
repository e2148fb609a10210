// Refusals that several configs have in common.
#pragma once

#include "fusedconv/check.hpp"
#include "fusedconv/groupnorm.hpp"
#include "fusedconv/support.hpp"

namespace fusedconv::groupnorm {

// Of kernels that write a dense tensor as they read it.
inline Support supports_same_form(GroupNormProblem const& p) {
  if (p.output_dtype != p.dtype) return Support::no("output and input dtype differ");
  if (p.output_layout != p.input_layout) return Support::no("output and input layout differ");
  if (p.input_row_channels() != p.channels) return Support::no("rows of channels are padded");
  return Support::yes();
}

// Of kernels of gradients, whose problem's output_dtype is that of the output's gradient: float32
// where autocast had the output in it.
inline bool has_wide_gradient(GroupNormProblem const& p) {
  return p.output_dtype == DType::kFloat32 && size_of(p.dtype) == 2;
}
inline Support supports_gradient_form(GroupNormProblem const& p) {
  GroupNormProblem same = p;
  if (has_wide_gradient(p)) same.output_dtype = p.dtype;
  return supports_same_form(same);
}

inline void check_supported(char const* step, Support const& support) {
  if (!support) throw InvalidArgument(detail::join(step, ": ", support.reason));
}

}  // namespace fusedconv::groupnorm
