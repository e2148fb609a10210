// The thread that fills the ring: of each step a line of the input and one of the gradient.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "conv/sm90/wgrad/params.hpp"
#include "conv/sm90/wgrad/traits.hpp"
#include "cuda/async.hpp"
#include "cute/arch/copy_sm90_tma.hpp"

namespace fusedconv::conv::sm90::wgrad {

template <class Traits>
__device__ __forceinline__ void produce(Params const& p, Barriers& barriers, unsigned char* shared,
                                        BlockWork const& work, CUtensorMap const& input_map,
                                        CUtensorMap const& grad_map) {
  constexpr int kTwice = Traits::kFilterRows - 1;
  constexpr auto kHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  constexpr int kNoRow = -1;  // which copies fill with zeros
  Task const task(p, work.task);
  auto const offsets = Memory::of<Traits>(p, 0);
  unsigned char* const input = shared + offsets.input;
  unsigned char* const grad = shared + offsets.grad;
  int const grad_channels = p.groups * kBlock;
  int const grad_bytes = grad_channels * p.pitch_bytes;
  int const channel_c = task.block_c * kBlock, channel_k = task.block_k * grad_channels;
  device::RingCursor cursor;
  cursor.parity = 1;
  auto const put = [&](int sample, int slice, int column, int row, int grad_row) {
    uint64_t* const full = &barriers.full[cursor.stage];
    wait_for(&barriers.empty[cursor.stage], cursor.parity);
    bool const again = cursor.stage < kTwice;
    device::arrive_and_expect(full, grad_bytes + (again ? 2 : 1) * Traits::kInputBytes);
    auto const copy_input = [&](int stage) {
      cute::SM90_TMA_LOAD_5D::copy(&input_map, full, kHint, input + stage * Traits::kInputBytes,
                                   column, row, slice, channel_c, sample);
    };
    copy_input(cursor.stage);
    if (again) copy_input(cursor.stage + p.stages);
    cute::SM90_TMA_LOAD_5D::copy(
        &grad_map, full, kHint, grad + cursor.stage * grad_bytes, column - p.lead, grad_row,
        slice + task.depth_tap * p.dilation_d - p.pad_d, channel_k, sample);
    cursor.advance(p.stages);
  };
  for (int i = 0; i < kTwice; ++i) put(0, 0, 0, kNoRow, kNoRow);
  Share const share(p, work.split);
  share.for_each_run(p, [&](int unit, int first, int last) {
    int sample, slice, strip;
    p.strips(slice, strip, unit);
    p.slices(sample, slice, slice);
    for (int row = first; row < last + kTwice; ++row) {
      put(sample, slice, strip * Traits::kStrip, row < last ? row : kNoRow, row - p.pad_h);
    }
  });
  // Steps come in pairs where they are half strips.
  if (Traits::kHalves == 1 && share.steps(p, kTwice) % 2 != 0) put(0, 0, 0, kNoRow, kNoRow);
}

}  // namespace fusedconv::conv::sm90::wgrad
