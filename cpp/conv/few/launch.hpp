// From a way of forming products to its row.
#pragma once

#include "conv/failure.hpp"
#include "conv/few/kernel.hpp"
#include "conv/few/rows.hpp"
#include "cuda/launch.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::few {

template <Math kMath, bool kDeep, bool kMoments, class Known>
void launch_kernel(Arguments const& a, cudaStream_t stream) {
  constexpr auto kernel = &convolve_few<kMath, kDeep, kMoments, Known>;
  Schedule const& s = a.config.schedule;
  int64_t const blocks = a.batch * s.sample_tiles() * s.channel_blocks;
  constexpr int64_t kMost = 0x7fffffff;
  FUSEDCONV_CHECK(blocks <= kMost, a.config.row->name, ": blocks: got ", blocks,
                  ", expected at most ", kMost);
  // Outputs come last there.
  int const bytes = s.shared_bytes - (a.output == nullptr ? s.staged_bytes : 0);
  conv::check_launch(a.config, a.batch, "cudaFuncSetAttribute",
                     device::allow_shared_bytes<kernel>(s.shared_bytes));
  device::launch(kernel, unsigned(blocks), kThreads, bytes, stream, Params::of<kMath>(a));
  conv::check_launch(a.config, a.batch, "launch", cudaGetLastError());
}

// Calls body with what a kernel knows of the activations.
template <Math kMath, class Body>
void dispatch_known(Arguments const& a, Body const& body) {
  if (a.norm != nullptr && a.norm->activation_after != Activation::kIdentity) return body(Any());
  switch (a.activation) {
    case Activation::kIdentity: return body(Before<activations::Identity>());
    case Activation::kRelu: return body(Before<activations::Relu>());
    case Activation::kGelu: return body(Before<activations::Gelu>());
    case Activation::kSilu:
      if constexpr (kMath == Math::kBF16) {
        if (is_rough<kMath>(a)) return body(RoughSilu());
      }
      return body(Before<activations::Silu>());
    default: return body(Any());
  }
}

template <Math kMath>
void launch(Arguments const& a, cudaStream_t stream) {
  device::dispatch_bool(a.config.problem.axes[0].kernel > 1, [&](auto deep) {
    device::dispatch_bool(a.partials != nullptr, [&](auto moments) {
      dispatch_known<kMath>(a, [&](auto known) {
        launch_kernel<kMath, deep.value, moments.value, decltype(known)>(a, stream);
      });
    });
  });
}

template <Math kMath>
Row row_of() {
  return {
      .name = detail::join("few_", traits_of(kMath).name), .math = kMath, .launch = &launch<kMath>};
}

}  // namespace fusedconv::conv::few
