#include "conv/sm90/boxes/weight/add_partials.hpp"

#include <cstdint>

#include "conv/failure.hpp"
#include "conv/sm90/boxes/weight/params.hpp"
#include "cuda/launch.hpp"
#include "cuda/math.hpp"
#include "cuda/tile.hpp"

namespace fusedconv::conv::sm90::boxes::weight {
namespace {

constexpr int kAddThreads = 256;

// A thread for each accumulator of a task.
template <class T>
__global__ void __launch_bounds__(kAddThreads)
    add_partials_kernel(__grid_constant__ Params const p, Block const block,
                        FilterSource const target, T* __restrict__ grad_weight) {
  int const accumulator = int(blockIdx.x * kAddThreads + threadIdx.x);
  int const index = int(blockIdx.y);
  float const* source = p.partials + partial_index(p, index, 0, block) + accumulator;
  int64_t const stride = partial_index(p, 0, 1, block);
  float sum = 0.0f;
#pragma unroll 12
  for (int i = 0; i < p.splits; ++i, source += stride) sum += __ldcs(source);
  int rest = accumulator;
  auto const take = [&rest](int extent) {
    int const result = rest % extent;
    rest /= extent;
    return result;
  };
  // Fours of a thread's accumulators: two neighbouring columns of a row, and of the row 8 below.
  int const odd_column = take(2), lower_row = take(2);
  int const lane = take(32), warp = take(4);
  Task const task(p, index);
  int const first_channel = task.channel_block * block.channels * kUnit;
  int number, input, within;  // of units, of input channels, of a unit's output channels
  if (block.from_registers) {
    int const column = take(block.channels * kUnit / 8) * 8 + lane % 4 * 2 + odd_column;
    number = rest;
    input = first_channel + column;
    within = channel_of_row(warp, lower_row, lane / 4);
  } else {
    bool const divides_channels = block.channels > 1;
    int const columns = block.units * kUnit / (divides_channels ? 1 : kConsumers);
    int const column = take(columns / 8) * 8 + lane % 4 * 2 + odd_column;
    number = (divides_channels ? 0 : rest * columns / kUnit) + column / kUnit;
    input = first_channel + (divides_channels ? rest * kUnit : 0) + warp * 16 + lower_row * 8 +
            lane / 4;
    within = column % kUnit;
  }
  number += task.unit_block * block.units;
  if (number >= p.units) return;
  Unit const unit(p, number);
  int const output = unit.channel + within;
  if (input >= target.k || output >= target.c) return;
  int const s = unit.tap % int(target.s), r = unit.tap / int(target.s) % int(target.r),
            t = unit.tap / int(target.s * target.r);
  grad_weight[input * target.stride_k + output * target.stride_c + t * target.stride_t +
              r * target.stride_r + s * target.stride_s] = device::from_float<T>(sum);
}

}  // namespace

void add_partials(Config const& config, FilterSource const& target, float const* partials,
                  void* grad_weight, cudaStream_t stream) {
  Block const& block = config.row->block;
  Params const p = Params::of({.config = config, .partials = const_cast<float*>(partials)});
  dim3 const grid(block.channels * block.units * kUnit * kUnit / kAddThreads,
                  config.schedule.tasks);
  device::dispatch_type(config.traits().dtype, [&](auto zero) {
    using T = decltype(zero);
    device::launch(add_partials_kernel<T>, grid, kAddThreads, 0, stream, p, block, target,
                   static_cast<T*>(grad_weight));
  });
  conv::check_launch(config, int(config.batch), "add_partials", cudaGetLastError());
}

}  // namespace fusedconv::conv::sm90::boxes::weight
