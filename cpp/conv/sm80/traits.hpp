// CUTLASS 2.x implicit-GEMM forward convolutions on mma.sync (sm_80 and later).
#pragma once

#include <cstdint>
#include <type_traits>

#include "conv/math_table.hpp"
#include "conv/sm80/epilogue.hpp"
#include "conv/sm80/rounding.hpp"

// clang-format off: the device header uses the problem sizes without including them.
#include "cutlass/conv/conv2d_problem_size.h"
#include "cutlass/conv/conv3d_problem_size.h"
#include "cutlass/conv/kernel/default_conv2d_fprop.h"
#include "cutlass/conv/kernel/default_conv3d_fprop.h"
#include "cutlass/conv/device/implicit_gemm_convolution.h"
// clang-format on
#include "cutlass/epilogue/thread/linear_combination_params.h"
#include "cutlass/gemm/threadblock/threadblock_swizzle.h"

namespace fusedconv::conv::sm80 {

template <int kM, int kN, int kK>
using Shape = cutlass::gemm::GemmShape<kM, kN, kK>;

// The instruction, operand types and operator that stand behind a Math.
template <Math kMath>
struct Operands;

struct Tf32Operands {
  using ElementOutput = float;
  using Instruction = cutlass::gemm::GemmShape<16, 8, 8>;
};
template <>
struct Operands<Math::kTf32> : Tf32Operands {
  using Element = float;
  using Operator = cutlass::arch::OpMultiplyAdd;
};
template <>
struct Operands<Math::kTf32Rounded> : Tf32Operands {
  using Element = cutlass::tfloat32_t;
  using Operator = cutlass::arch::OpMultiplyAdd;
};
template <>
struct Operands<Math::kTf32x3> : Tf32Operands {
  using Element = float;
  using Operator = cutlass::arch::OpMultiplyAddFastF32;
};
template <>
struct Operands<Math::kF16> {
  using Element = cutlass::half_t;
  using ElementOutput = Element;
  using Instruction = cutlass::gemm::GemmShape<16, 8, 16>;
  using Operator = cutlass::arch::OpMultiplyAdd;
};
template <>
struct Operands<Math::kBF16> {
  using Element = cutlass::bfloat16_t;
  using ElementOutput = Element;
  using Instruction = cutlass::gemm::GemmShape<16, 8, 16>;
  using Operator = cutlass::arch::OpMultiplyAdd;
};

// The one place where a kernel's compile-time choices stand.
template <Math kMath_, int kDimensions_, class Tile_, class Warp_, int kStages_>
struct Traits {
  using Tile = Tile_;
  using Warp = Warp_;
  using Element = typename Operands<kMath_>::Element;
  using ElementOutput = typename Operands<kMath_>::ElementOutput;
  static constexpr Math kMath = kMath_;
  static constexpr int kDimensions = kDimensions_;
  static constexpr int kStages = kStages_;
  // Every access is 16 bytes.
  static constexpr int kAlignment = 128 / cutlass::sizeof_bits<Element>::value;

  static_assert(kDimensions == 2 || kDimensions == 3, "CUTLASS iterates two or three axes");
  static_assert(Tile::kK == Warp::kK, "slices of K per warp would need a reduction");
  static_assert(Tile::kM % Warp::kM == 0 && Tile::kN % Warp::kN == 0, "warps tile the block");
  static_assert(cutlass::sizeof_bits<ElementOutput>::value == 8 * traits_of(kMath).element_bytes(),
                "the output has the dtype that the table of math states");
  static_assert(kStages >= 3, "cp.async needs a multistage mainloop");

  using Epilogue = BiasActivation<ElementOutput, 128 / cutlass::sizeof_bits<ElementOutput>::value>;
  using Layout = std::conditional_t<kDimensions == 2, cutlass::layout::TensorNHWC,
                                    cutlass::layout::TensorNDHWC>;
  using Swizzle = cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>;
  using Arch = cutlass::arch::Sm80;
  using Instruction = typename Operands<kMath_>::Instruction;
  using Operator = typename Operands<kMath_>::Operator;

  template <int kDims, class Unused = void>
  struct KernelOf {
    using type = typename cutlass::conv::kernel::DefaultConv2dFprop<
        Element, Layout, Element, Layout, ElementOutput, Layout, float,
        cutlass::arch::OpClassTensorOp, Arch, Tile, Warp, Instruction, Epilogue, Swizzle, kStages,
        Operator, cutlass::conv::IteratorAlgorithm::kOptimized,
        cutlass::conv::StrideSupport::kUnity>::Kernel;
  };
  template <class Unused>
  struct KernelOf<3, Unused> {
    using type = typename cutlass::conv::kernel::DefaultConv3dFprop<
        Element, Layout, Element, Layout, ElementOutput, Layout, float,
        cutlass::arch::OpClassTensorOp, Arch, Tile, Warp, Instruction, Epilogue, Swizzle, kStages,
        Operator, cutlass::conv::IteratorAlgorithm::kOptimized,
        cutlass::conv::StrideSupport::kUnity>::Kernel;
  };
  // A struct of its own shortens every mangled symbol by a few hundred characters.
  struct Kernel : KernelOf<kDimensions>::type {};
  using Device = cutlass::conv::device::ImplicitGemmConvolution<Kernel>;

  // Rounding errors of a long sum grow with its length. Strict fp32 cuts it where eager's own would
  // be passed otherwise: one more trip of the output through memory per part.
  static constexpr int kLongestSum = 1024;
  static constexpr int kMostParts = kMath == Math::kTf32x3 ? 4 : 1;
};

}  // namespace fusedconv::conv::sm80
