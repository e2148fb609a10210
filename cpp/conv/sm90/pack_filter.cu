// The small steps around the Hopper convolution: packing its filter, merging its partial moments.
#include <cuda.h>

#include "conv/sm90_line.hpp"
#include "cuda/math.hpp"
#include "cuda/tile.hpp"
#include "cutlass/fast_math.h"
#include "fusedconv/check.hpp"
#include "groupnorm/moments.hpp"

namespace fusedconv::conv::sm90 {

CUtensorMap input_map(Arguments const& a, Math math);

namespace {

struct PackParams {
  FilterSource source;
  int64_t count;
  int taps_d, taps_h, taps_w;
  int blocks_m, chunks_per_stage, rows_per_stage, row_groups, chunk_groups;
  int64_t stage_elements;  // of one part
};

// One thread per element of the packed filter, in its order: [block of channels, stage, part, step,
// 64 channels' block, 16-byte half, channel, element], where a stage is a depth tap, a group of
// filter rows and a group of chunks, and a step is a chunk, a row and a column. Taps are reversed.
template <class T, int kParts>
__global__ void __launch_bounds__(256)
    pack_filter_kernel(PackParams const p, T const* __restrict__ weight, T* __restrict__ filter) {
  constexpr int kHalf = 16 / sizeof(T);
  int64_t const stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < p.count; i += stride) {
    int64_t rest = i;
    auto const take = [&rest](int extent) {
      int const result = int(rest % extent);
      rest /= extent;
      return result;
    };
    int const element = take(kHalf);
    int const row = take(kBlockM);
    int const half = take(2);
    int const block_m = take(p.blocks_m);
    int const s = take(p.taps_w);
    int const r = take(p.rows_per_stage);
    int const chunk = take(p.chunks_per_stage);
    int const chunk_group = take(p.chunk_groups);
    int const row_group = take(p.row_groups);
    int const d = take(p.taps_d);
    int const block_k = int(rest);
    int const c = ((chunk_group * p.chunks_per_stage + chunk) * 2 + half) * kHalf + element;
    int const k = (block_k * p.blocks_m + block_m) * kBlockM + row;
    T value = T(0.0f);
    if (c < p.source.c && k < p.source.k) {
      value = weight[c * p.source.stride_c + k * p.source.stride_k +
                     (p.taps_d - 1 - d) * p.source.stride_t +
                     (p.taps_h - 1 - (row_group * p.rows_per_stage + r)) * p.source.stride_r +
                     (p.taps_w - 1 - s) * p.source.stride_s];
    }
    T* const target =
        filter + i / p.stage_elements * p.stage_elements * kParts + i % p.stage_elements;
    if constexpr (sizeof(T) == 4) {
      if constexpr (kParts == 2) {
        float const big = device::big_tf32(value);
        target[0] = big;
        target[p.stage_elements] = device::round_to_tf32(value - big);
      } else {
        target[0] = device::round_to_tf32(value);
      }
    } else {
      target[0] = value;
    }
  }
}

struct MergeParams {
  Line line;
  cutlass::FastDivmod channels_per_group;
  int channels, groups;
  float eps;
};

// Valid positions of a line before a position.
__device__ __forceinline__ int valid_before(Line const& line, int width, int position) {
  int row, column, slice;
  line.pitch_w(row, column, min(position, line.positions));
  line.pitch_h(slice, row, row);
  int const rows = slice * line.p + min(row, line.p);
  return rows * width + (row < line.p ? min(column, width) : 0);
}

// One block per sample and group merges its tiles' channels.
__global__ void __launch_bounds__(256)
    merge_moments_kernel(MergeParams const p, groupnorm::Partial const* __restrict__ partials,
                         groupnorm::StatisticsTargets targets) {
  Line const& line = p.line;
  int const sample = int(blockIdx.x) / p.groups;
  int const first = int(blockIdx.x) % p.groups * p.channels_per_group.divisor;
  int const count = line.stat_tiles * p.channels_per_group.divisor;
  device::Moments running;
  for (int i = threadIdx.x; i < count; i += 256) {
    int tile, channel;
    p.channels_per_group(tile, channel, i);
    groupnorm::Partial const partial =
        partials[(int64_t(sample) * line.stat_tiles + tile) * p.channels + first + channel];
    int const strip = tile / line.strip_stat_tiles;
    int const begin = (tile - strip * line.strip_stat_tiles) * line.block_n;
    int const width = min(line.strip_width, line.q - strip * line.strip_width);
    int const valid =
        valid_before(line, width, begin + line.block_n) - valid_before(line, width, begin);
    running.merge(device::Moments::of(float(valid), partial));
  }
  device::Moments const total = device::merge_block<256>(running);
  if (threadIdx.x == 0) {
    device::store(targets, blockIdx.x, device::statistics_of(total, p.eps));
  }
}

// The driver's encoder, found through the runtime so that nothing links to the driver.
decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static auto const encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    FUSEDCONV_CUDA("cuTensorMapEncodeTiled",
                   cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                    cudaEnableDefault, &found));
    if (found != cudaDriverEntryPointSuccess || function == nullptr) {
      throw KernelFailure("sm90 convolve: the driver does not have cuTensorMapEncodeTiled");
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return encoder;
}

}  // namespace

CUtensorMap input_map(Arguments const& a, Math math) {
  ConvProblem const& c = a.problem;
  Schedule const& s = a.schedule;
  cuuint64_t const bytes = element_bytes(math);
  // Copies of type TFLOAT32 round to nearest, ties to even, and make denormal numbers zero.
  CUtensorMapDataType const type = math == Math::kF16    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                   : math == Math::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                   : math == Math::kTf32 ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
                                                         : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  bool const first = a.layout == Layout::kChannelsFirst;
  auto const channels = cuuint64_t(c.c), batch = cuuint64_t(c.n);
  auto const w = cuuint64_t(c.w), h = cuuint64_t(c.h), d = cuuint64_t(c.d);
  auto const chunk = cuuint32_t(chunk_channels(math)), line = cuuint32_t(s.line_elements);
  cuuint64_t const extents_first[5] = {w, h, d, channels, batch};
  cuuint64_t const extents_last[5] = {channels, w, h, d, batch};
  cuuint32_t const box_first[5] = {line, 1, 1, chunk, 1};
  cuuint32_t const box_last[5] = {chunk, line, 1, 1, 1};
  cuuint64_t const* const extents = first ? extents_first : extents_last;
  cuuint64_t strides[4];
  cuuint64_t stride = bytes;
  for (int i = 0; i < 4; ++i) {
    stride *= extents[i];
    strides[i] = stride;
  }
  cuuint32_t const steps[5] = {1, 1, 1, 1, 1};
  CUtensorMap map;
  CUresult const status = tensor_map_encoder()(
      &map, type, 5, const_cast<void*>(a.input), extents, strides, first ? box_first : box_last,
      steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw KernelFailure(detail::join("sm90 convolve: cuTensorMapEncodeTiled failed with ",
                                     int(status), " for N=", c.n, " C=", c.c, " DHW=", c.d, "x",
                                     c.h, "x", c.w, " line=", s.line_elements));
  }
  return map;
}

void pack_filter(FilterSource const& source, ConvProblem const& c, Schedule const& s, Math math,
                 Sharing sharing, void const* weight, void* filter, cudaStream_t stream) {
  PackParams p{};
  p.source = source;
  p.taps_d = c.t, p.taps_h = c.r, p.taps_w = c.s;
  p.blocks_m = blocks_m(sharing);
  p.chunks_per_stage = s.chunks_per_stage;
  p.rows_per_stage = s.rows_per_stage;
  p.row_groups = c.r / s.rows_per_stage;
  p.chunk_groups = s.chunks / s.chunks_per_stage;
  p.count = s.filter_bytes / parts_of(math) / element_bytes(math);
  p.stage_elements = s.filter_stage_bytes / parts_of(math) / element_bytes(math);
  int const blocks = int(std::min<int64_t>(ceil_div(p.count, 256), 2048));
  auto const launch = [&](auto zero, auto parts) {
    using T = decltype(zero);
    pack_filter_kernel<T, parts.value>
        <<<blocks, 256, 0, stream>>>(p, static_cast<T const*>(weight), static_cast<T*>(filter));
  };
  switch (math) {
    case Math::kTf32x3: launch(float{}, std::integral_constant<int, 2>{}); break;
    case Math::kF16: launch(__half{}, std::integral_constant<int, 1>{}); break;
    case Math::kBF16: launch(__nv_bfloat16{}, std::integral_constant<int, 1>{}); break;
    default: launch(float{}, std::integral_constant<int, 1>{}); break;
  }
  FUSEDCONV_CUDA("sm90 pack_filter", cudaGetLastError());
}

void merge_moments(ConvProblem const& c, Schedule const& s, int groups, double eps,
                   groupnorm::Partial const* partials, groupnorm::StatisticsTargets const& targets,
                   cudaStream_t stream) {
  MergeParams const p{.line = Line::of(c, s),
                      .channels_per_group = cutlass::FastDivmod(c.k / groups),
                      .channels = c.k,
                      .groups = groups,
                      .eps = float(eps)};
  dim3 const grid = device::checked_grid("sm90 merge_moments", int64_t(c.n) * groups);
  merge_moments_kernel<<<grid, 256, 0, stream>>>(p, partials, targets);
  FUSEDCONV_CUDA("sm90 merge_moments", cudaGetLastError());
}

}  // namespace fusedconv::conv::sm90
