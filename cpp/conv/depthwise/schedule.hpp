// How a depthwise transposed convolution of volumes, with a normalisation of every channel behind
// it, is cut into blocks. Host code without CUDA.
//
// Filters of three taps with stride two and padding one along each axis: output 2 q reads input q
// by tap 1, output 2 q + 1 reads input q by tap 2 and input q + 1 by tap 0. The input is an eighth
// of the output, so that computing twice costs less than an output that is written, read and
// written once more: a first walk over a channel of a sample takes moments, a second one computes
// the same values again, normalises and stores them.
//
// A channel of a sample is an instance, and is cut along depth into parts, whose moments are merged
// in their order. A cluster of blocks has an instance, each of its blocks as many parts; where
// instances are enough for all multiprocessors a block has all of them. So a sample has the same
// bits in any batch.
//
// A plane of the input is cut into tiles of whole lines. A thread has a run of four inputs of one
// line and goes along depth: of each step it has the lines y and y + 1 of the planes z and z + 1,
// four by 27 products for 32 outputs, and reads the two lines of the second plane alone. All taps
// stay in registers.
#pragma once

#include <cstdint>

#include "conv/math_table.hpp"
#include "conv/transposed.hpp"
#include "fusedconv/device.hpp"
#include "fusedconv/support.hpp"

namespace fusedconv::conv::depthwise {

inline constexpr int kThreads = 256;
inline constexpr int kWarp = 32;
inline constexpr int kWarps = kThreads / kWarp;
inline constexpr int kResident = 2;  // blocks of a multiprocessor, as far as registers go
inline constexpr int kTaps = 3;
inline constexpr int kStride = 2;
inline constexpr int kPadding = 1;
inline constexpr int kRun = 4;                      // inputs along width of a thread
inline constexpr int kRunOutputs = kStride * kRun;  // of a line
inline constexpr int kMostWidth = kThreads * kRun;  // a tile has whole lines
inline constexpr int kPlanes = kStride;             // of outputs, of a step
// In shared memory: planes of the input, and steps whose outputs lie there. Copies of either kind
// wait for those in front, of outputs mostly: more are on their way where there is room.
inline constexpr int kLeastSlots = 3, kMostSlots = 8;
inline constexpr int kLeastBuffers = 2, kMostBuffers = 3;
inline constexpr int kMostParts = 4;
// The barriers of the slots, and moments of each part: of every warp, and merged.
inline constexpr int kBarrierBytes = kMostSlots * 8;
inline constexpr int kMomentsBytes = kMostParts * (kWarps + 1) * 16;

using Problem = TransposedProblem;

struct Schedule {
  Support support;
  int parts = 0;      // of an instance, a power of two
  int runs = 0;       // of a line
  int lines = 0;      // of the input, of a tile
  int tiles = 0;      // of a plane
  bool bulk = false;  // whether a tile's lines of a plane are one bulk copy
  // In shared memory, in elements: a line of the input, a tile's lines of a plane, and its outputs.
  int pitch = 0, slot_elements = 0, span_elements = 0;
  int slots = 0, buffers = 0;
  int shared_bytes = 0;

  // Planes of the input before a part.
  int first_plane(int part, Problem const& problem) const {
    return int(int64_t(problem.axes[0].input) * part / parts);
  }
  // Blocks of a cluster, a power of two: as few as leave no multiprocessor idle.
  int cluster(int64_t instances, int multiprocessors) const;
};

Schedule schedule_of(Problem const& problem, Math math, Device const& device);

}  // namespace fusedconv::conv::depthwise
