// From a kernel's traits to its row of the table.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "conv/sm80/rows.hpp"
#include "conv/sm80/traits.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm80 {

template <class Traits>
struct Launch {
  using Tile = typename Traits::Tile;
  using Layout = typename Traits::Layout;
  using Device = typename Traits::Device;
  static constexpr int kDimensions = Traits::kDimensions;

  static std::string name() {
    using Warp = typename Traits::Warp;
    return detail::join("sm80_conv", kDimensions, "d_", traits_of(Traits::kMath).name, "_",
                        int(Tile::kM), "x", int(Tile::kN), "x", int(Tile::kK), "_w", int(Warp::kM),
                        "x", int(Warp::kN), "_s", Traits::kStages);
  }

  static int parts_of(ConvProblem const& p) {
    int64_t const depth = int64_t(p.c) * p.t * p.r * p.s;
    return int(std::min<int64_t>(
        {ceil_div(depth, Traits::kLongestSum), p.c / Tile::kK, Traits::kMostParts}));
  }

  static auto problem_size(ConvProblem const& p) {
    using cutlass::conv::Mode;
    int const parts = std::max(1, parts_of(p));
    if constexpr (kDimensions == 2) {
      return cutlass::conv::Conv2dProblemSize(
          p.n, p.h, p.w, p.c, p.k, p.r, p.s, p.p, p.q, p.lower_padding_h, p.lower_padding_w, 1, 1,
          p.dilation_h, p.dilation_w, Mode::kCrossCorrelation, parts);
    } else {
      return cutlass::conv::Conv3dProblemSize(
          p.n, p.d, p.h, p.w, p.c, p.k, p.t, p.r, p.s, p.z, p.p, p.q, p.lower_padding_d,
          p.lower_padding_h, p.lower_padding_w, 1, 1, 1, p.dilation_d, p.dilation_h, p.dilation_w,
          Mode::kCrossCorrelation, parts);
    }
  }

  static Layout packed(int n, int d, int h, int w, int c) {
    if constexpr (kDimensions == 2) {
      return Layout::packed({n, h, w, c});
    } else {
      return Layout::packed({n, d, h, w, c});
    }
  }

  static void run(Arguments const& arguments, cudaStream_t stream) {
    using Element = typename Traits::Element;
    using ElementOutput = typename Traits::ElementOutput;
    ConvProblem const& p = arguments.problem;
    auto* input = static_cast<Element*>(const_cast<void*>(arguments.input));
    auto* filter = static_cast<Element*>(const_cast<void*>(arguments.filter));
    auto* bias = static_cast<ElementOutput*>(const_cast<void*>(arguments.bias));
    auto* output = static_cast<ElementOutput*>(arguments.output);
    typename Device::Arguments device_arguments(
        problem_size(p), {input, packed(p.n, p.d, p.h, p.w, p.c)},
        {filter, packed(p.k, p.t, p.r, p.s, p.c)},
        {bias, Layout(typename Layout::Stride(typename Layout::Stride::Index(0)))},
        {output, packed(p.n, p.z, p.p, p.q, p.k)}, {arguments.activation, bias != nullptr});
    check(Device::can_implement(device_arguments), "can_implement", p);
    Device op;
    check(op.initialize(device_arguments, arguments.workspace, stream), "initialize", p);
    check(op.run(stream), "launch", p);
  }

  static void check(cutlass::Status status, char const* where, ConvProblem const& p) {
    if (status == cutlass::Status::kSuccess) return;
    cudaError_t const cuda_status = cudaGetLastError();
    throw KernelFailure(detail::join(
        name(), ": ", where, " failed with ", cutlassGetStatusString(status), " (",
        cudaGetErrorString(cuda_status), ") for N=", p.n, " C=", p.c, " K=", p.k, " DHW=", p.d, "x",
        p.h, "x", p.w, " ZPQ=", p.z, "x", p.p, "x", p.q, " TRS=", p.t, "x", p.r, "x", p.s));
  }

  // Semaphores of a sum cut into parts, one per tile of the output.
  static int64_t workspace_bytes(ConvProblem const& p) {
    if (parts_of(p) <= 1) return 0;
    int64_t const pixels = int64_t(p.n) * p.z * p.p * p.q;
    // The swizzle may round the grid up to a multiple of its width.
    return (ceil_div(pixels, Tile::kM) + 8) * (ceil_div(p.k, Tile::kN) + 8) * int64_t(sizeof(int));
  }
};

// efficiency: the part of the tensor cores' dense rate for the precision, as the data sheet states
// it, that the kernel reaches on a large problem with bias and GELU. Measured on an H200, whose
// rates are 494.7 TFLOP/s in TF32, which 3xTF32 counts by too, and 989.4 in 16 bits.
template <class Traits>
Row row_of(double efficiency) {
  using Launcher = Launch<Traits>;
  using Tile = typename Traits::Tile;
  return Row{
      .name = Launcher::name(),
      .architecture = Traits::Arch::kMinComputeCapability,
      .dimensions = Traits::kDimensions,
      .math = Traits::kMath,
      .tile_m = Tile::kM,
      .tile_n = Tile::kN,
      .tile_k = Tile::kK,
      .warps = Traits::Device::kWarpCount,
      .stages = Traits::kStages,
      .alignment = Traits::kAlignment,
      .shared_bytes = int(sizeof(typename Traits::Kernel::SharedStorage)),
      .max_filter_extent = 32,  // one bit of a 32-bit predicate mask per filter position
      .max_tensor_bytes = (int64_t(1) << 31) - 1,
      .efficiency = efficiency,
      .longest_sum = Traits::kLongestSum,
      .most_parts = Traits::kMostParts,
      .launch = &Launcher::run,
      .workspace_bytes = &Launcher::workspace_bytes,
  };
}

}  // namespace fusedconv::conv::sm80
