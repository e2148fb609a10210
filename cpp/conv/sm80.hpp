// CUTLASS 2.x implicit-GEMM forward convolutions on mma.sync (sm_80 and later), as table rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "conv/convolution.hpp"
#include "cuda/math.hpp"
#include "cutlass/numeric_conversion.h"

// How CUTLASS's 3xTF32 operator splits a float. Its own choice truncates the big part, which leaves
// a small part of one sign and up to twice the size; the product small*small that 3xTF32 drops then
// biases every sum. Rounding the big part to nearest makes it zero-mean and a quarter of the size;
// of the small part the tensor core drops a bit at most. The operator offers no parameter for this,
// so its converter is specialised.
template <>
struct cutlass::NumericConverterFastF32<cutlass::FloatRoundStyle::round_toward_zero,
                                        cutlass::FloatRoundStyle::round_half_ulp_truncate> {
  using result_type = cutlass::Array<cutlass::tfloat32_t, 2>;
  using source_type = float;

  CUTLASS_DEVICE static result_type convert(float const& source) {
    float const big = fusedconv::device::big_tf32(source);
    result_type result;
    result[0] = cutlass::tfloat32_t::bitcast(__float_as_uint(big));
    result[1] = cutlass::tfloat32_t::bitcast(__float_as_uint(source - big));
    return result;
  }
  CUTLASS_DEVICE result_type operator()(float const& source) const { return convert(source); }
};

// How CUTLASS's main loop rounds floats to TF32. Before compute capability 9.0 it prefers to round
// ties away from zero.
template <int kCount>
struct cutlass::NumericArrayConverter<cutlass::tfloat32_t, float, kCount,
                                      cutlass::FloatRoundStyle::round_half_ulp_truncate,
                                      cutlass::transform::thread::UnaryTransform::Identity> {
  using result_type = cutlass::Array<cutlass::tfloat32_t, kCount>;
  using source_type = cutlass::Array<float, kCount>;

  CUTLASS_DEVICE static result_type convert(source_type const& source) {
    result_type result;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      uint32_t rounded = __float_as_uint(fusedconv::device::round_to_tf32(source[i]));
      // In order: rounding all of a fragment ahead of its products would take more registers.
      asm volatile("" : "+r"(rounded));
      result[i] = cutlass::tfloat32_t::bitcast(rounded);
    }
    return result;
  }
  CUTLASS_DEVICE result_type operator()(source_type const& source) const { return convert(source); }
};

// clang-format off: the device header uses the problem sizes without including them.
#include "cutlass/conv/conv2d_problem_size.h"
#include "cutlass/conv/conv3d_problem_size.h"
#include "cutlass/conv/kernel/default_conv2d_fprop.h"
#include "cutlass/conv/kernel/default_conv3d_fprop.h"
#include "cutlass/conv/device/implicit_gemm_convolution.h"
// clang-format on
#include "cutlass/epilogue/thread/linear_combination_params.h"
#include "cutlass/gemm/threadblock/threadblock_swizzle.h"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm80 {

// Epilogue functor in CUTLASS's form: activation(accumulator + bias), computed in fp32 on the
// accumulator before any rounding to the output's type. The bias arrives as the source tensor with
// strides of zero.
template <class ElementOutput_, int kElements>
class BiasActivation {
 public:
  using ElementOutput = ElementOutput_;
  using ElementAccumulator = float;
  using ElementCompute = float;
  static int const kCount = kElements;
  static bool const kIsHeavy = true;  // an exact erf: keep the epilogue's loops rolled
  using FragmentOutput = cutlass::Array<ElementOutput, kCount>;
  using FragmentSource = FragmentOutput;
  using FragmentAccumulator = cutlass::Array<float, kCount>;

  struct Params {
    Activation activation = Activation::kIdentity;
    bool has_bias = false;
  };

  CUTLASS_HOST_DEVICE explicit BiasActivation(Params const& params) : params_(params) {}

  CUTLASS_HOST_DEVICE bool is_source_needed() const { return params_.has_bias; }

  // The sum over channels may be cut into parts: the first adds the bias, each later one the sum so
  // far, which stands in the output, and the last applies the activation.
  CUTLASS_HOST_DEVICE void set_k_partition(int part, int parts) {
    if (part > 0) params_.has_bias = true;
    if (part < parts - 1) params_.activation = Activation::kIdentity;
  }

  CUTLASS_DEVICE FragmentOutput operator()(FragmentAccumulator const& accumulator,
                                           FragmentSource const& source) const {
    cutlass::NumericArrayConverter<float, ElementOutput, kCount> to_compute;
    FragmentAccumulator sum = to_compute(source);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) sum[i] += accumulator[i];
    return (*this)(sum);
  }

  CUTLASS_DEVICE FragmentOutput operator()(FragmentAccumulator const& accumulator) const {
    FragmentAccumulator result;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      result[i] = device::activate(params_.activation, accumulator[i]);
    }
    cutlass::NumericArrayConverter<ElementOutput, float, kCount> to_output;
    return to_output(result);
  }

 private:
  Params params_;
};

// The instruction, operand types and operator that stand behind a Math.
template <Math kMath>
struct MathTraits;

struct Tf32Base {
  using ElementOutput = float;
  using Instruction = cutlass::gemm::GemmShape<16, 8, 8>;
  static constexpr DType kDType = DType::kFloat32;
};
template <>
struct MathTraits<Math::kTf32> : Tf32Base {
  using Element = float;
  using Operator = cutlass::arch::OpMultiplyAdd;
  static constexpr char const* kName = "tf32";
};
template <>
struct MathTraits<Math::kTf32Rounded> : Tf32Base {
  using Element = cutlass::tfloat32_t;
  using Operator = cutlass::arch::OpMultiplyAdd;
  static constexpr char const* kName = "tf32_rounded";
};
template <>
struct MathTraits<Math::kTf32x3> : Tf32Base {
  using Element = float;
  using Operator = cutlass::arch::OpMultiplyAddFastF32;
  static constexpr char const* kName = "tf32x3";
};
template <>
struct MathTraits<Math::kF16> {
  using Element = cutlass::half_t;
  using ElementOutput = Element;
  using Instruction = cutlass::gemm::GemmShape<16, 8, 16>;
  using Operator = cutlass::arch::OpMultiplyAdd;
  static constexpr DType kDType = DType::kFloat16;
  static constexpr char const* kName = "f16";
};
template <>
struct MathTraits<Math::kBF16> {
  using Element = cutlass::bfloat16_t;
  using ElementOutput = Element;
  using Instruction = cutlass::gemm::GemmShape<16, 8, 16>;
  using Operator = cutlass::arch::OpMultiplyAdd;
  static constexpr DType kDType = DType::kBFloat16;
  static constexpr char const* kName = "bf16";
};

// The one place where a kernel's compile-time choices stand, and the rate by which it is chosen
// (ConvRow::teraflops).
template <Math kMath_, int kDimensions_, class Tile_, class Warp_, int kStages_, int kTeraflops_>
struct Sm80Traits {
  using MathOf = MathTraits<kMath_>;
  using Tile = Tile_;
  using Warp = Warp_;
  using Element = typename MathOf::Element;
  using ElementOutput = typename MathOf::ElementOutput;
  static constexpr Math kMath = kMath_;
  static constexpr int kDimensions = kDimensions_;
  static constexpr int kStages = kStages_;
  static constexpr int kTeraflops = kTeraflops_;
  // Every access is 16 bytes.
  static constexpr int kAlignment = 128 / cutlass::sizeof_bits<Element>::value;

  static_assert(kDimensions == 2 || kDimensions == 3, "CUTLASS iterates two or three axes");
  static_assert(Tile::kK == Warp::kK, "slices of K per warp would need a reduction");
  static_assert(Tile::kM % Warp::kM == 0 && Tile::kN % Warp::kN == 0, "warps tile the block");
  static_assert(kStages >= 3, "cp.async needs a multistage mainloop");
  static_assert(kTeraflops > 0, "a row without a rate cannot be chosen");

  using Epilogue = BiasActivation<ElementOutput, 128 / cutlass::sizeof_bits<ElementOutput>::value>;
  using Layout = std::conditional_t<kDimensions == 2, cutlass::layout::TensorNHWC,
                                    cutlass::layout::TensorNDHWC>;
  using Swizzle = cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>;
  using Arch = cutlass::arch::Sm80;
  using Instruction = typename MathOf::Instruction;
  using Operator = typename MathOf::Operator;

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

  static std::string name() {
    return detail::join("sm80_conv", kDimensions, "d_", MathOf::kName, "_", int(Tile::kM), "x",
                        int(Tile::kN), "x", int(Tile::kK), "_w", int(Warp::kM), "x", int(Warp::kN),
                        "_s", kStages);
  }

  // Rounding errors of a long sum grow with its length. Strict fp32 cuts it where eager's own would
  // be passed otherwise: one more trip of the output through memory per part.
  static constexpr int kLongestSum = 1024;
  static constexpr int kMostParts = kMath == Math::kTf32x3 ? 4 : 1;

  static int parts_of(ConvProblem const& p) {
    int64_t const depth = int64_t(p.c) * p.t * p.r * p.s;
    return int(std::min<int64_t>({ceil_div(depth, kLongestSum), p.c / Tile::kK, kMostParts}));
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

  static void launch(ConvArguments const& arguments, cudaStream_t stream) {
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

  static ConvRow row() {
    return ConvRow{
        .name = name(),
        .family = "sm80",
        .architecture = 80,
        .dimensions = kDimensions,
        .math = kMath,
        .dtype = MathOf::kDType,
        .tile_m = Tile::kM,
        .tile_n = Tile::kN,
        .tile_k = Tile::kK,
        .warps = Device::kWarpCount,
        .stages = kStages,
        .alignment = kAlignment,
        .shared_bytes = int(sizeof(typename Kernel::SharedStorage)),
        .max_filter_extent = 32,  // one bit of a 32-bit predicate mask per filter position
        .max_tensor_bytes = (int64_t(1) << 31) - 1,
        .teraflops = kTeraflops,
        .longest_sum = kLongestSum,
        .most_parts = kMostParts,
        .launch = &launch,
        .workspace_bytes = &workspace_bytes,
    };
  }
};

template <class... Traits>
struct InstanceList {
  static void append(std::vector<ConvRow>& rows) { (rows.push_back(Traits::row()), ...); }
};

// Defined by the instance files, one list each.
void append_tf32(std::vector<ConvRow>& rows);
void append_tf32x3(std::vector<ConvRow>& rows);
void append_f16(std::vector<ConvRow>& rows);
void append_bf16(std::vector<ConvRow>& rows);

}  // namespace fusedconv::conv::sm80
