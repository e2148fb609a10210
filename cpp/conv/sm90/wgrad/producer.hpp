// The thread that fills the ring: of each step a line of the input and one of the gradient. In
// strict fp32 other warps split the input's lines once they have landed.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "conv/sm90/wgrad/params.hpp"
#include "conv/sm90/wgrad/traits.hpp"
#include "cuda/async.hpp"
#include "cuda/math.hpp"
#include "cuda/tile.hpp"
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
    // Who splits a line leaves it twice himself.
    bool const again = !Traits::kSplits && cursor.stage < kTwice;
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
  if (Traits::kTurn == 2 && share.steps(p, kTwice) % 2 != 0) put(0, 0, 0, kNoRow, kNoRow);
}

// kSplitterThreads threads replace the values of the input's lines by their big parts and leave the
// small ones beside them. Both have the line's swizzle.
template <class Traits>
__device__ __forceinline__ void split_lines(Params const& p, Barriers& barriers,
                                            unsigned char* shared, BlockWork const& work,
                                            int thread) {
  constexpr int kTwice = Traits::kFilterRows - 1;
  constexpr int kPieceBytes = 16;
  using Piece = device::Pack<float, kPieceBytes / int(sizeof(float))>;
  auto const offsets = Memory::of<Traits>(p, 0);
  uint32_t const to_small = offsets.small_input - offsets.input;
  uint32_t const to_second = p.stages * Traits::kInputBytes;
  device::RingCursor cursor;
  for (int left = kTwice + Share(p, work.split).steps(p, kTwice); left > 0; --left) {
    bool const again = cursor.stage < kTwice;
    unsigned char* const line = shared + offsets.input + cursor.stage * Traits::kInputBytes;
    wait_for(&barriers.full[cursor.stage], cursor.parity);
#pragma unroll 1
    for (int i = thread * kPieceBytes; i < Traits::kInputBytes;
         i += kSplitterThreads * kPieceBytes) {
      auto* const big = reinterpret_cast<float*>(line + i);
      auto* const small = reinterpret_cast<float*>(line + to_small + i);
      Piece bigs = Piece::load(big), smalls;
#pragma unroll
      for (int e = 0; e < int(kPieceBytes / sizeof(float)); ++e) {
        float const value = bigs.values[e];
        bigs.values[e] = device::big_tf32(value);
        smalls.values[e] = device::round_to_tf32(value - bigs.values[e]);
      }
      bigs.store(big);
      smalls.store(small);
      if (again) {
        bigs.store(reinterpret_cast<float*>(line + to_second + i));
        smalls.store(reinterpret_cast<float*>(line + to_second + to_small + i));
      }
    }
    device::fence_async_proxy();
    __syncwarp();
    if (threadIdx.x % 32 == 0) device::arrive(&barriers.split[cursor.stage]);
    cursor.advance(p.stages);
  }
}

}  // namespace fusedconv::conv::sm90::wgrad
