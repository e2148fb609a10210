// The schedule of a weight gradient whose operands tensor copies bring. Host code without CUDA.
//
// The gradient of weight[c, k, t] sums input[i, c] grad[stride i + dilation t - padding, k] over
// positions i. A step is a slab of positions, the instruction's K: of the input kUnit channels
// each, and of the gradient units of kUnit output channels at a tap, from the phase of its pixels
// that the tap reads. Both are channels last, and tensor copies bring boxes of the gradient.
//
// In 16 bits the instruction reads operands whose positions are apart: M counts input channels, N
// units, boxes of both. TF32 has no such operands: M counts a unit's output channels, which threads
// load to registers; N counts input channels with positions beside each other, as a pass in front
// has packed them, or as warps of the block transpose boxes in shared memory: that saves the pass
// where memory bounds the products, and takes longer where shared memory does.
//
// Of a filter whose planes are of three by three taps, with stride 1, in 16 bits also: a box of the
// gradient with a halo has what all taps of a plane read, and three warpgroups have a line of taps
// each, whose pixels the instruction finds one beside the other in it.
//
// Positions outside are zeros of one operand beside what the other has there: an infinite value may
// leave NaN in more taps than it is a factor of.
//
// The positions of a task, a block of channels by units, are split among blocks, whose partial sums
// are added in a fixed order; a block that has all of them, and few, may write the gradient itself.
#pragma once

#include <cstdint>

#include "conv/math_table.hpp"
#include "conv/sm90/boxes/schedule.hpp"
#include "fusedconv/device.hpp"
#include "fusedconv/support.hpp"

namespace fusedconv::conv::sm90::boxes::weight {

inline constexpr int kUnit = 64;                        // channels
inline constexpr int kTileBytes = kSlab * kChunkBytes;  // of a slab and kUnit channels
inline constexpr int kFewestStages = 3;
inline constexpr int kConsumerWarps = 4;
// Additions after which accumulators are added to the block's partial sums: the tensor core drops
// bits in every addition to an accumulator. After 512 of them sums of one sign are 3e-5 of
// themselves too small; a fourth of them would cost up to a fourth of the time.
inline constexpr int kFlushAdditions = 512;
// With halos: taps of a plane's line, and lines of a plane, of which each consumer has one.
inline constexpr int kHaloTaps = 3;
// Positions of a box's line, which are an instruction's K, and lines of a box.
inline constexpr int kHaloPositions = 16;
inline constexpr int kFewestHaloStages = 2;

// What a compiled kernel fixes: kConsumers warpgroups have input channels of their own and share
// all units, or the other way round.
struct Block {
  int channels = 0;             // of the input, times kUnit
  int units = 0;                // of the gradient
  bool from_registers = false;  // the gradient, as TF32 needs it
  bool transposes = false;      // boxes of the input, then; else they are packed before
  bool halo = false;            // units are taps of a plane, of the same channels

  constexpr int consumers() const { return halo ? kHaloTaps : kConsumers; }
  constexpr bool packs() const { return from_registers && !transposes; }
  constexpr int tiles() const { return channels + units; }  // of a stage
  // Of a slab, and how many boxes of kChunkBytes of each pixel kUnit channels are.
  constexpr int positions() const {
    return halo ? kHaloPositions * kHaloPositions : from_registers ? kSlab / 2 : kSlab;
  }
  constexpr int unit_boxes() const { return from_registers ? 2 : 1; }
  // To each accumulator, of a slab.
  constexpr int additions() const { return positions() / (from_registers ? 8 : 16); }
  // Whether its kernels sum the bias's gradient on the way, and in how many shares of a unit's
  // positions: each of the consumers' warps has one unit's, or all have their own rows.
  constexpr bool sums_bias() const { return !packs() && !halo; }
  constexpr int bias_shares() const {
    return from_registers ? 1 : kConsumers * kConsumerWarps / units;
  }
};

struct Schedule {
  Support support;
  boxes::Schedule gather;  // of the input's gradient: which pixels the taps read
  int all_channels = 0;    // of the input, times kUnit
  int channel_blocks = 0;  // of these
  int unit_chunks = 0;     // of output channels, at a tap
  int units = 0;           // of all taps
  int unit_blocks = 0;
  int tasks = 0;
  int splits = 0;  // blocks of a task
  Slabs slabs;
  int halo_bytes = 0;  // of a box of the gradient with a halo
  int stage_bytes = 0;
  int stages = 0;
  int shared_bytes = 0;
  int64_t packed_bytes = 0;  // of the input, where it is packed
  int64_t partial_bytes = 0;
  bool reads_once = false;  // each pixel of the gradient, at one tap
  int bias_parts = 0;       // of each output channel's sum, where a block sums it on the way
};

// problem: of the input's gradient, which gathers: its channels are output channels of the
// transposed convolution, its output is the input.
Schedule schedule_of(Problem const& problem, int64_t batch, Math math, Block const& block,
                     Device const& device);

// Of shared memory: the ring and barriers.
struct Memory {
  static constexpr int kBarrierBytes = 256;

  // halo_bytes: of a box of the gradient, where that has a halo.
  static constexpr int stage_bytes(Block const& block, int halo_bytes = 0) {
    return block.halo ? block.positions() * kChunkBytes + halo_bytes : block.tiles() * kTileBytes;
  }
  static constexpr int bytes(int stages, int stage_bytes) {
    return stages * stage_bytes + kBarrierBytes;
  }
};

}  // namespace fusedconv::conv::sm90::boxes::weight
