#include "batchnorm/fold.hpp"

#include "cuda/math.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::batchnorm {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    fold_statistics(FoldProblem const p, void const* mean, void const* variance, void const* weight,
                    void const* bias, float* scale, float* shift) {
  int64_t const channel = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (channel >= p.channels) return;
  auto const at = [&](void const* tensor, DType dtype, float otherwise) {
    return tensor == nullptr ? otherwise : device::load_as_float(tensor, channel, dtype);
  };
  float const deviation = sqrtf(at(variance, p.statistics_dtype, 1.0f) + float(p.eps));
  float const slope = at(weight, p.affine_dtype, 1.0f) / deviation;
  scale[channel] = slope;
  shift[channel] = fmaf(-at(mean, p.statistics_dtype, 0.0f), slope, at(bias, p.affine_dtype, 0.0f));
}

}  // namespace

void fold(FoldProblem const& p, void const* mean, void const* variance, void const* weight,
          void const* bias, float* scale, float* shift, cudaStream_t stream) {
  if (p.channels == 0) return;
  dim3 const grid = device::checked_grid("fold_statistics", ceil_div(p.channels, kThreads));
  fold_statistics<<<grid, kThreads, 0, stream>>>(p, mean, variance, weight, bias, scale, shift);
  FUSEDCONV_CUDA("fold_statistics", cudaGetLastError());
}

}  // namespace fusedconv::batchnorm
