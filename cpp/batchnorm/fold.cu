#include "batchnorm/fold.hpp"

#include "cuda/early.hpp"
#include "cuda/launch.hpp"
#include "cuda/store.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::batchnorm {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    fold_statistics(FoldProblem const p, void const* mean, void const* variance, void const* weight,
                    void const* bias, float* scale, float* shift) {
  device::release_early();
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

__global__ void __launch_bounds__(kThreads)
    gradients_of_fold(FoldProblem const p, void const* mean, void const* variance,
                      FoldGradients const g) {
  int64_t const channel = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (channel >= p.channels) return;
  float const scale = g.scale == nullptr ? 0.0f : g.scale[channel];
  float const shift = g.shift == nullptr ? 0.0f : g.shift[channel];
  if (g.weight != nullptr) {
    float const center = device::load_as_float(mean, channel, p.statistics_dtype);
    float const deviation =
        sqrtf(device::load_as_float(variance, channel, p.statistics_dtype) + float(p.eps));
    device::store_from_float(g.weight, channel, p.affine_dtype,
                             fmaf(-center, shift, scale) / deviation);
  }
  if (g.bias != nullptr) device::store_from_float(g.bias, channel, p.affine_dtype, shift);
}

}  // namespace

void fold(FoldProblem const& p, void const* mean, void const* variance, void const* weight,
          void const* bias, float* scale, float* shift, cudaStream_t stream) {
  if (p.channels == 0) return;
  dim3 const grid = device::checked_grid("fold_statistics", ceil_div(p.channels, kThreads));
  device::launch(fold_statistics, grid, kThreads, 0, stream, p, mean, variance, weight, bias, scale,
                 shift);
  FUSEDCONV_CUDA("fold_statistics", cudaGetLastError());
}

void fold_gradients(FoldProblem const& p, void const* mean, void const* variance,
                    FoldGradients const& gradients, cudaStream_t stream) {
  if (p.channels == 0) return;
  dim3 const grid = device::checked_grid("gradients_of_fold", ceil_div(p.channels, kThreads));
  device::launch(gradients_of_fold, grid, kThreads, 0, stream, p, mean, variance, gradients);
  FUSEDCONV_CUDA("gradients_of_fold", cudaGetLastError());
}

}  // namespace fusedconv::batchnorm
