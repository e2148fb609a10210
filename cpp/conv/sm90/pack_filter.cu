// The weight of a transposed convolution, in the order in which stages consume it.
#include <algorithm>
#include <cstdint>

#include "conv/sm90/passes.hpp"
#include "cuda/launch.hpp"
#include "cuda/math.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 2048;

struct Params {
  FilterSource source;
  FilterOrder order;
  int64_t count, stage_units;  // 16 bytes each, of one part
  bool splits_phases;          // else the filter's channels and taps are the weight's
};

// One thread for 16 bytes of the packed filter, in its order: [tile of output channels,
// k-iteration, part, tap, 64 channels' block, 16-byte half, channel, element], where a k-iteration
// is a depth tap, a number of filter rows and a number of k-blocks, and taps count k-blocks, rows
// and columns. K-iterations beyond the last depth tap are zeros.
template <class T, int kParts>
__global__ void __launch_bounds__(kThreads)
    pack_filter_kernel(Params const p, T const* __restrict__ weight, T* __restrict__ filter) {
  constexpr int kHalf = 16 / sizeof(T);
  FilterOrder const& order = p.order;
  unsigned const stride = gridDim.x * blockDim.x;
  if (blockIdx.x == 0) {
    auto* const behind = reinterpret_cast<uint32_t*>(filter + p.count * kHalf * kParts);
    for (int i = int(threadIdx.x); i < order.zeros; i += kThreads) behind[i] = 0;
  }
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < unsigned(p.count); i += stride) {
    unsigned rest = i;
    auto const take = [&rest](unsigned extent) {
      int const result = int(rest % extent);
      rest /= extent;
      return result;
    };
    int const row = take(kBlockM);
    int const half = take(2);
    int const block_m = take(order.blocks_m);
    int const s = take(order.taps_w);
    int const r = take(order.filter_rows);
    int const k_block = take(order.k_blocks_per_stage);
    int iteration = take(order.k_iterations);
    int const tile_m = int(rest);
    int const iterations_c = order.k_blocks / order.k_blocks_per_stage;
    int const iterations_h = order.taps_h / order.filter_rows;
    int const iteration_c = iteration % iterations_c;
    iteration /= iterations_c;
    int const iteration_h = iteration % iterations_h;
    int const d = iteration / iterations_h;
    int const block_c = (iteration_c * order.k_blocks_per_stage + k_block) * 2 * kHalf;
    int const first_c = block_c + (order.interleaves_halves ? half : half * kHalf);
    int const step_c = order.interleaves_halves ? 2 : 1;
    int k = (tile_m * order.blocks_m + block_m) * kBlockM + row;
    int depth = d, height = iteration_h * order.filter_rows + r, width = s;
    bool exists = d < order.taps_d;
    unsigned target = i;
    Phases const& phases = order.phases;
    if (PhaseBlocks const& blocks = order.phase_blocks; blocks.present()) {
      int phase_h = tile_m / blocks.channel_blocks;
      int const phase_d = phase_h / phases.h.count;
      phase_h %= phases.h.count;
      auto const& [column_channel, phase_w] = blocks.column(row);
      k = tile_m % blocks.channel_blocks * blocks.channels() + column_channel;
      int const rows = blocks.height[phase_h].count;
      // A block's rows follow each other without those that only other phases have.
      if (r >= rows) continue;
      exists = d < blocks.depth[phase_d].count;
      depth = phases.d.tap(phase_d, blocks.depth[phase_d].lowest + d);
      height = phases.h.tap(phase_h, blocks.height[phase_h].lowest + r);
      width = phases.w.tap(phase_w, s - order.before[2]);
      unsigned const tap_units = 2 * kBlockM;
      unsigned const in_block = unsigned((d * iterations_c + iteration_c) * rows + r);
      target = unsigned(tile_m * order.k_iterations) * unsigned(p.stage_units) +
               (in_block * order.taps_w + s) * tap_units + half * kBlockM + row;
    } else if (phases.all() > 1) {
      int phase = k % phases.all();
      k /= phases.all();
      auto const of_phase = [&phase](Phases::Axis const& axis, int delta) {
        int const residue = phase % axis.count;
        phase /= axis.count;
        return axis.tap(residue, delta);
      };
      width = of_phase(phases.w, width - order.before[2]);
      height = of_phase(phases.h, height - order.before[1]);
      depth = of_phase(phases.d, depth - order.before[0]);
    } else if (order.reverses_taps) {
      depth = order.taps_d - 1 - depth;
      height = order.taps_h - 1 - height;
      width = order.taps_w - 1 - width;
    }
    exists = exists && k < p.source.k;
    T const* const of_channel = weight + k * p.source.stride_k;
    device::Pack<T, kHalf> parts[kParts];
#pragma unroll
    for (int e = 0; e < kHalf; ++e) {
      int const c = first_c + e * step_c;
      PhasePlanes::Source from{c, depth, height, width};
      if (p.splits_phases) from = order.planes.source(c, depth, height, width);
      T value = T(0.0f);
      bool const has_tap = unsigned(from.t) < p.source.t && unsigned(from.r) < p.source.r &&
                           unsigned(from.s) < p.source.s;
      if (exists && from.channel < p.source.c && has_tap) {
        value = of_channel[from.channel * p.source.stride_c + from.t * p.source.stride_t +
                           from.r * p.source.stride_r + from.s * p.source.stride_s];
      }
      if constexpr (sizeof(T) == 4 && kParts == 2) {
        parts[0].values[e] = device::big_tf32(value);
        parts[1].values[e] = device::round_to_tf32(value - parts[0].values[e]);
      } else if constexpr (sizeof(T) == 4) {
        parts[0].values[e] = device::round_to_tf32(value);
      } else {
        parts[0].values[e] = value;
      }
    }
    unsigned const stage = target / unsigned(p.stage_units);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      parts[part].store(filter +
                        (target + (int64_t(stage) * (kParts - 1) + part) * p.stage_units) * kHalf);
    }
  }
}

}  // namespace

void pack_filter(FilterOrder const& order, FilterSource const& source, void const* weight,
                 void* filter, cudaStream_t stream) {
  MathTraits const& math = traits_of(order.math);
  Params p{};
  p.source = source;
  p.order = order;
  p.splits_phases = order.planes.count() > 1 || order.planes.dilates();
  p.stage_units = int64_t(order.filter_rows) * order.taps_w * order.k_blocks_per_stage *
                  order.blocks_m * kBlockM * kKBlockBytes / 16;
  p.count = p.stage_units * order.k_iterations * order.tiles_m;
  FUSEDCONV_CHECK(p.count < int64_t(1) << 31, "sm90 pack_filter: got ", p.count, " times 16 bytes");
  int const blocks = int(std::min<int64_t>(ceil_div(p.count, kThreads), kMaxBlocks));
  device::dispatch_type(math.dtype, [&](auto zero) {
    using T = decltype(zero);
    auto const launch = [&](auto parts) {
      device::launch(pack_filter_kernel<T, parts.value>, blocks, kThreads, 0, stream, p,
                     static_cast<T const*>(weight), static_cast<T*>(filter));
    };
    if constexpr (sizeof(T) == 4) {
      if (math.parts == 2) return launch(std::integral_constant<int, 2>{});
    }
    launch(std::integral_constant<int, 1>{});
  });
  FUSEDCONV_CUDA("sm90 pack_filter", cudaGetLastError());
}

void pack_filter(Config const& config, FilterSource const& source, void const* weight, void* filter,
                 cudaStream_t stream) {
  ConvProblem const& c = config.problem;
  Schedule const& s = config.schedule;
  pack_filter({.math = config.tile().math,
               .taps_d = c.t,
               .taps_h = c.r,
               .taps_w = c.s,
               .blocks_m = config.tile().blocks_m(),
               .tiles_m = s.tiles_m,
               .k_blocks = s.k_blocks,
               .k_blocks_per_stage = s.k_blocks_per_stage,
               .filter_rows = s.filter_rows_per_stage,
               .k_iterations = s.k_iterations,
               .interleaves_halves = false,
               .planes = PhasePlanes::whole(c.t, c.r, c.s)},
              source, weight, filter, stream);
}

}  // namespace fusedconv::conv::sm90
