#include "conv/sm90/tma.hpp"

#include <cuda_runtime_api.h>

#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90 {
namespace {

// The driver's encoder, found through the runtime so that nothing links to the driver.
decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static auto const encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    FUSEDCONV_CUDA("cuTensorMapEncodeTiled",
                   cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                    cudaEnableDefault, &found));
    if (found != cudaDriverEntryPointSuccess || function == nullptr) {
      throw KernelFailure(detail::join(
          "tensor maps: the driver does not have cuTensorMapEncodeTiled (query result ", int(found),
          ")"));
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return encoder;
}

CUtensorMapDataType data_type(Math math) {
  switch (traits_of(math).dtype) {
    case DType::kFloat16: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::kBFloat16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::kFloat32: break;
  }
  // Copies of type TFLOAT32 round to nearest, ties to even, and make denormal numbers zero.
  return math == Math::kTf32 ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
}

}  // namespace

CUresult try_encode_map(Math math, void const* tensor, MapAxes const& axes, CUtensorMap& map) {
  cuuint32_t const steps[5] = {1, 1, 1, 1, 1};
  return tensor_map_encoder()(
      &map, data_type(math), 5, const_cast<void*>(tensor), axes.extents.data(), axes.strides.data(),
      axes.box.data(), steps, CU_TENSOR_MAP_INTERLEAVE_NONE, axes.swizzle,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

CUtensorMap encode_map(Math math, void const* input, MapAxes const& axes, std::string const& row,
                       ConvProblem const& problem, int batch) {
  CUtensorMap map;
  CUresult const status = try_encode_map(math, input, axes, map);
  if (status != CUDA_SUCCESS) {
    throw KernelFailure(detail::join(row, ": cuTensorMapEncodeTiled failed with ", int(status),
                                     " for N=", batch, " C=", problem.c, " DHW=", problem.d, "x",
                                     problem.h, "x", problem.w, ", boxes of ", axes.box[0], "x",
                                     axes.box[1], "x", axes.box[2], "x", axes.box[3]));
  }
  return map;
}

CUtensorMap input_map(Arguments const& a) {
  ConvProblem const& c = a.config.problem;
  Schedule const& s = a.config.schedule;
  TileShape const& tile = a.config.tile();
  bool const first = a.config.layout == Layout::kChannelsFirst;
  auto const channels = cuuint64_t(c.c), batch = cuuint64_t(a.batch);
  auto const w = cuuint64_t(c.w), h = cuuint64_t(c.h), d = cuuint64_t(c.d);
  auto const k_block = cuuint32_t(tile.k()), row = cuuint32_t(s.input_row_elements);
  MapAxes axes{};
  if (first) {
    axes.extents = {w, h, d, channels, batch};
    axes.box = {row, 1, 1, k_block, 1};
  } else {
    axes.extents = {channels, w, h, d, batch};
    axes.box = {k_block, row, 1, 1, 1};
  }
  cuuint64_t stride = tile.element_bytes();
  for (int i = 0; i < 4; ++i) {
    stride *= axes.extents[i];
    axes.strides[i] = stride;
  }
  return encode_map(tile.math, a.input, axes, a.config.row->name, c, a.batch);
}

}  // namespace fusedconv::conv::sm90
