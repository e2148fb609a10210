#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "conv/failure.hpp"
#include "conv/sm90/col2im/rows.hpp"
#include "cuda/launch.hpp"
#include "cuda/math.hpp"
#include "cutlass/fast_math.h"

namespace fusedconv::conv::sm90::col2im {
namespace {

constexpr int kThreads = 256;

struct Order {
  FilterSource source;
  bool lines;  // of columns for each channel, else rows of channels for each column
  int64_t elements;
  cutlass::FastDivmod inner, k, s, r;
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    pack_filter_kernel(__grid_constant__ Order const order, T const* weight, T* filter) {
  int64_t const i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= order.elements) return;
  int outer, inner;
  order.inner(outer, inner, int(i));
  int const channel = order.lines ? outer : inner, column = order.lines ? inner : outer;
  int rest, k, s, r, t;
  order.k(rest, k, column);
  order.s(rest, s, rest);
  order.r(t, r, rest);
  FilterSource const& f = order.source;
  T value = T(0.0f);
  if (t < f.t) {
    value = weight[channel * f.stride_c + k * f.stride_k + t * f.stride_t + r * f.stride_r +
                   s * f.stride_s];
  }
  if constexpr (sizeof(T) == 4) value = device::round_to_tf32(value);
  filter[i] = value;
}

template <class T>
void launch(Config const& config, Order const& order, void const* weight, void* filter,
            cudaStream_t stream) {
  auto const blocks = unsigned(ceil_div(order.elements, kThreads));
  conv::check_launch(config, 1, "launch of the pass that packs the filter",
                     device::launch(&pack_filter_kernel<T>, blocks, kThreads, 0, stream, order,
                                    static_cast<T const*>(weight), static_cast<T*>(filter)));
}

}  // namespace

void pack_filter(Config const& config, FilterSource const& source, void const* weight, void* filter,
                 cudaStream_t stream) {
  int const columns = config.schedule.columns;
  bool const lines = config.traits().element_bytes() == 2;
  Order const order{.source = source,
                    .lines = lines,
                    .elements = source.c * columns,
                    .inner = cutlass::FastDivmod(lines ? columns : int(source.c)),
                    .k = cutlass::FastDivmod(int(source.k)),
                    .s = cutlass::FastDivmod(int(source.s)),
                    .r = cutlass::FastDivmod(int(source.r))};
  switch (config.traits().dtype) {
    case DType::kFloat32: return launch<float>(config, order, weight, filter, stream);
    case DType::kFloat16: return launch<__half>(config, order, weight, filter, stream);
    case DType::kBFloat16: return launch<__nv_bfloat16>(config, order, weight, filter, stream);
  }
}

}  // namespace fusedconv::conv::sm90::col2im
