#include "cpu/batch_norm.hpp"

#include <cmath>

#include "cpu/schedule.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::cpu {
namespace {

void check(BatchNormTensors const& tensors) {
  FUSEDCONV_CHECK(tensors.channels >= 0, "channels: got ", tensors.channels);
  FUSEDCONV_CHECK(!std::isnan(tensors.eps), "eps: got ", tensors.eps);
  bool const given = tensors.channels == 0 || (tensors.mean && tensors.variance);
  FUSEDCONV_CHECK(given, "mean, variance: got null");
}

double reciprocal_deviation(float variance, double eps) {
  return 1.0 / std::sqrt(static_cast<double>(variance) + eps);
}

}  // namespace

void fold_batch_norm(BatchNormTensors const& tensors, float* scale, float* shift) {
  check(tensors);
  int64_t const channels = tensors.channels;
  FUSEDCONV_CHECK(channels == 0 || (scale && shift), "scale, shift: got null");
  Buffer<float> const values(2 * channels);
  float *const mean = values.get(), *const variance = mean + channels;
  read_affine(tensors.statistics_dtype, tensors.mean, channels, 0.0f, mean);
  read_affine(tensors.statistics_dtype, tensors.variance, channels, 1.0f, variance);
  read_affine(tensors.affine_dtype, tensors.weight, channels, 1.0f, scale);
  read_affine(tensors.affine_dtype, tensors.bias, channels, 0.0f, shift);
  for (int64_t i = 0; i < channels; ++i) {
    double const exact =
        static_cast<double>(scale[i]) * reciprocal_deviation(variance[i], tensors.eps);
    scale[i] = static_cast<float>(exact);
    shift[i] =
        static_cast<float>(static_cast<double>(shift[i]) - static_cast<double>(mean[i]) * exact);
  }
}

void fold_batch_norm_gradients(BatchNormTensors const& tensors, FoldGradients const& gradients) {
  check(tensors);
  int64_t const channels = tensors.channels;
  Buffer<float> const values(5 * channels);
  float *const mean = values.get(), *const variance = mean + channels,
               *const grad_scale = variance + channels, *const grad_shift = grad_scale + channels,
               *const grad_weight = grad_shift + channels;
  read_affine(tensors.statistics_dtype, tensors.mean, channels, 0.0f, mean);
  read_affine(tensors.statistics_dtype, tensors.variance, channels, 1.0f, variance);
  read_affine(DType::kFloat32, gradients.scale, channels, 0.0f, grad_scale);
  read_affine(DType::kFloat32, gradients.shift, channels, 0.0f, grad_shift);
  for (int64_t i = 0; i < channels; ++i) {
    double const inner = static_cast<double>(grad_scale[i]) -
                         static_cast<double>(mean[i]) * static_cast<double>(grad_shift[i]);
    grad_weight[i] = static_cast<float>(inner * reciprocal_deviation(variance[i], tensors.eps));
  }
  auto* const store =
      loops().forward.apply_to_run[index_of(DType::kFloat32)][index_of(tensors.affine_dtype)][0];
  if (gradients.weight != nullptr) {
    store(grad_weight, gradients.weight, channels, 0.0f, 1.0f, 0.0f);
  }
  if (gradients.bias != nullptr) store(grad_shift, gradients.bias, channels, 0.0f, 1.0f, 0.0f);
}

}  // namespace fusedconv::cpu
