#include "ungrouped/gradient.hpp"

#include <limits>

#include "cuda/launch.hpp"
#include "cuda/store.hpp"
#include "cuda/sum.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"
#include "groupnorm/launch.hpp"
#include "groupnorm/support.hpp"
#include "ungrouped/passes.hpp"

namespace fusedconv::ungrouped {
namespace {

constexpr int kChannels = 32;  // of a block that adds up parts
// Of the parts, a thread each: as many as a block may have, since a thread waits for most of its
// parts one after another.
constexpr int kSlices = 32;
constexpr int kMostSlabs = 0xffff;  // of 32 channels, side by side

struct Targets {
  void* totals[kMostSums];
  DType dtypes[kMostSums];
};

// Block (channels, sum).
__global__ void __launch_bounds__(kChannels* kSlices)
    add_parts_of_channels(float const* __restrict__ partials, int parts, int sums, int channels,
                          Targets const targets) {
  int const sum = int(blockIdx.y);
  if (targets.totals[sum] == nullptr) return;
  int const channel = int(blockIdx.x) * kChannels + int(threadIdx.x) % kChannels;
  bool const exists = channel < channels;
  float const total = device::total_of_parts<kSlices>(
      exists ? partials + int64_t(sum) * channels + channel : nullptr, parts,
      int64_t(sums) * channels);
  if (!exists || int(threadIdx.x) >= kChannels) return;
  device::store_from_float(targets.totals[sum], channel, targets.dtypes[sum], total);
}

}  // namespace

GradientConfig gradient_config(GroupNormProblem const& p, Kind kind) {
  GradientConfig config;
  config.problem = p;
  config.kind = kind;
  groupnorm::check(p);
  bool const first = p.input_layout == Layout::kChannelsFirst;
  int const most = first ? kMostColumnChannels : kMostRowChannels;
  auto const refuse = [&](std::string reason) {
    config.support = Support::no(std::move(reason));
    return config;
  };
  if (Support const form = groupnorm::supports_gradient_form(p); !form) return refuse(form.reason);
  if (groupnorm::has_wide_gradient(p) && kind != Kind::kLayer) {
    return refuse("output and input dtype differ, which is served of LayerNorm alone");
  }
  if (kind == Kind::kIdentity && p.activation_before != Activation::kIdentity) {
    return refuse("an activation alone is described as one behind");
  }
  if (p.batch == 0 || p.pixels == 0) return refuse("the input is empty");
  if (p.batch * p.channels > std::numeric_limits<int>::max()) {
    return refuse(detail::join("batch x channels is ", p.batch * p.channels));
  }
  if (kind == Kind::kLayer && p.channels > most) {
    return refuse(detail::join("a pixel has ", p.channels, " channels, up to ", most,
                               " are held in registers"));
  }
  config.parts = !first                 ? parts_of_rows(p, kind)
                 : kind == Kind::kLayer ? parts_of_columns(p)
                                        : parts_of_planes(p);
  // Blocks of a launch.
  if (config.parts * p.channels > std::numeric_limits<int>::max() ||
      p.channels > int64_t(kMostSlabs) * 32) {
    return refuse(detail::join("channels are ", p.channels, " in ", config.parts, " parts"));
  }
  config.support = Support::yes();
  return config;
}

void gradient(GradientConfig const& config, GradientTensors const& tensors, cudaStream_t stream) {
  if (config.problem.input_layout == Layout::kChannelsLast) {
    gradient_of_rows(config, tensors, stream);
  } else if (config.kind == Kind::kLayer) {
    gradient_of_columns(config, tensors, stream);
  } else {
    gradient_of_planes(config, tensors, stream);
  }
}

void add_parts(GradientConfig const& config, float const* partials,
               ChannelGradients const& gradients, cudaStream_t stream) {
  GroupNormProblem const& p = config.problem;
  Targets const targets{{gradients.conv_bias, gradients.bias, gradients.weight},
                        {p.dtype, p.affine_dtype, p.affine_dtype}};
  int const sums = sums_of(config.kind);
  dim3 const grid =
      device::checked_grid("add_parts_of_channels", ceil_div(p.channels, kChannels), sums);
  device::launch(add_parts_of_channels, grid, kChannels * kSlices, 0, stream, partials,
                 int(config.parts), sums, int(p.channels), targets);
  FUSEDCONV_CUDA("add_parts_of_channels", cudaGetLastError());
}

}  // namespace fusedconv::ungrouped
