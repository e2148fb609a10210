#include "conv/sm90/wgrad/add_partials.hpp"

#include <cstdint>

#include "conv/sm90/arguments.hpp"
#include "conv/sm90/wgrad/params.hpp"
#include "cuda/launch.hpp"
#include "cuda/math.hpp"
#include "cuda/tile.hpp"

namespace fusedconv::conv::sm90::wgrad {
namespace {

constexpr int kThreads = 256;

struct Extents {
  int c, k, r;
};

// A thread for each accumulator of a task. Sums are in double: there are hundreds of parts, and a
// strict gradient is to lose less in them than a kernel that adds all products in float32.
template <class T>
__global__ void __launch_bounds__(kThreads)
    add_partials_kernel(Params const p, Extents const e, PhasePlanes const phases,
                        FilterSource const weight, T* __restrict__ grad_weight) {
  int const accumulator = int(blockIdx.x * kThreads + threadIdx.x);
  int const index = int(blockIdx.y);
  int64_t const first = partial_index(p, index, 0, 0, e.r) + accumulator;
  int64_t const stride = int64_t(p.warpgroups()) * e.r * (kBlock * kBlock);
  double sum = 0.0;
  float const* source = p.partials + first;
#pragma unroll 12
  for (int i = 0; i < p.splits; ++i, source += stride) sum += __ldcs(source);
  int rest = accumulator;
  auto const take = [&rest](int extent) {
    int const result = rest % extent;
    rest /= extent;
    return result;
  };
  int const odd_channel = take(2), lower_row = take(2);
  int const lane = take(32), warp = take(4);
  int const eight = take(kBlock / 8);
  int const r = take(e.r);
  int const group = p.groups > 1 ? rest : 0;
  int const s = rest - group;
  Task const task(p, index);
  int const k = (task.block_k * p.groups + group) * kBlock + warp * 16 + lower_row * 8 + lane / 4;
  int const c = task.block_c * kBlock + eight * 8 + lane % 4 * 2 + odd_channel;
  if (c >= e.c || k >= e.k) return;
  auto const to = phases.source(k, task.depth_tap, r, s);
  if (!to.exists()) return;
  int64_t const at = c * weight.stride_c + to.channel * weight.stride_k + to.t * weight.stride_t +
                     to.r * weight.stride_r + to.s * weight.stride_s;
  grad_weight[at] = device::from_float<T>(float(sum));
}

}  // namespace

void add_partials(Config const& config, PhasePlanes const& phases, FilterSource const& weight,
                  float const* partials, void* grad_weight, cudaStream_t stream) {
  ConvProblem const& c = config.problem;
  Params const p = Params::of({.config = config, .partials = const_cast<float*>(partials)});
  dim3 const grid(c.r * p.warpgroups() * kBlock * kBlock / kThreads, config.schedule.tasks);
  device::dispatch_type(config.traits().dtype, [&](auto zero) {
    using T = decltype(zero);
    device::launch(add_partials_kernel<T>, grid, kThreads, 0, stream, p, Extents{c.c, c.k, c.r},
                   phases, weight, static_cast<T*>(grad_weight));
  });
  check_launch(config, c.n, "add_partials", cudaGetLastError());
}

}  // namespace fusedconv::conv::sm90::wgrad
