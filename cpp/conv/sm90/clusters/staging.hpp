// Input and weight to shared memory, where a row is a pixel, or an output channel of a tap, with
// the chunk's input channels side by side.
//
// Asynchronous copies bring what lies across that order as it lies, and a pass over shared memory
// turns it. All of it is small code on purpose: a block runs it once, and fetching instructions
// that are met for the first time takes longer than executing them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "conv/mma_sync.hpp"
#include "conv/sm90/clusters/params.hpp"
#include "cuda/math.hpp"
#include "cutlass/arch/memory_sm80.h"

namespace fusedconv::conv::sm90::clusters {

// Copies kBytes, or fills them with zeros; a cp.async from 4 bytes on.
template <int kBytes>
__device__ __forceinline__ void copy(unsigned char* target, unsigned char const* source,
                                     bool present) {
  if constexpr (kBytes == 16) {
    cutlass::arch::cp_async_zfill<16, cutlass::arch::CacheOperation::Global>(target, source,
                                                                             present);
  } else if constexpr (kBytes >= 4) {
    cutlass::arch::cp_async_zfill<kBytes, cutlass::arch::CacheOperation::Always>(target, source,
                                                                                 present);
  } else {
    *reinterpret_cast<uint16_t*>(target) =
        present ? *reinterpret_cast<uint16_t const*>(source) : uint16_t(0);
  }
}

// Pieces of kBytes of `count` rows, `pieces` of each: target(row, piece), source(row, piece) and
// present(row, piece) say from where to where, and what is zeros instead.
template <int kBytes, class Target, class Source, class Present>
__device__ __forceinline__ void copy_rows(int count, cutlass::FastDivmod const& pieces,
                                          Target const& target, Source const& source,
                                          Present const& present) {
  int const all = count * pieces.divisor;
#pragma unroll 1
  for (int i = threadIdx.x; i < all; i += kThreads) {
    int row, piece;
    pieces(row, piece, i);
    copy<kBytes>(target(row, piece), source(row, piece), present(row, piece));
  }
}

// Calls body with the bytes of an access as an integral constant.
template <class Body>
__device__ __forceinline__ void dispatch_bytes(int bytes, Body const& body) {
  switch (bytes) {
    case 16: return body(std::integral_constant<int, 16>{});
    case 8: return body(std::integral_constant<int, 8>{});
    case 4: return body(std::integral_constant<int, 4>{});
    default: return body(std::integral_constant<int, 2>{});
  }
}

// Where a chunk lies in memory.
template <class T>
struct Chunk {
  unsigned char const* input;   // the slab's first pixel, the chunk's first channel
  unsigned char const* weight;  // the cluster's first output channel, the same input channel
  int valid;                    // channels, of p.chunk

  __device__ __forceinline__ Chunk(Params const& p, Slab const& slab, int sample, int first_column,
                                   int first_channel, int end) {
    int64_t const image = int64_t(sample) * p.channels * p.input_pixels;
    int64_t const first = p.channels_last
                              ? int64_t(slab.first_input) * p.channels + first_channel
                              : int64_t(first_channel) * p.input_pixels + slab.first_input;
    input = reinterpret_cast<unsigned char const*>(static_cast<T const*>(p.input) + image + first);
    weight = reinterpret_cast<unsigned char const*>(static_cast<T const*>(p.weight) +
                                                    first_channel * p.source.stride_c +
                                                    first_column * p.source.stride_k);
    valid = min(p.chunk, end - first_channel);
  }
};

// Begins the copies of a chunk: channels last of the input's rows themselves, else of what turn()
// makes rows of.
template <class T>
__device__ __forceinline__ void copy_chunk(Params const& p, Slab const& slab, Chunk<T> const& chunk,
                                           unsigned char* shared, unsigned char* rows) {
  constexpr int kSize = int(sizeof(T));
  unsigned char* const raw = shared + p.raw_offset;
  dispatch_bytes(p.weight_bytes, [&](auto bytes) {
    constexpr int kBytes = bytes.value;
    copy_rows<kBytes>(
        p.chunk, p.weight_pieces,
        [&](int channel, int piece) { return raw + channel * p.raw_weight_pitch + piece * kBytes; },
        [&](int channel, int piece) {
          int outer, inner;
          p.weight_run(outer, inner, piece * (kBytes / kSize));
          int64_t at = channel * p.source.stride_c + outer * p.outer_stride;
          if (p.even_taps) {
            at += inner * p.inner_stride;
          } else {
            int d, h, w;
            p.kernel_w(h, w, inner);
            p.kernel_h(d, h, h);
            at += d * p.source.stride_t + h * p.source.stride_r + w * p.source.stride_s;
          }
          return chunk.weight + at * kSize;
        },
        [&](int channel, int) { return channel < chunk.valid; });
  });
  if (p.channels_last) {
    dispatch_bytes(p.input_bytes, [&](auto bytes) {
      constexpr int kBytes = bytes.value;
      copy_rows<kBytes>(
          slab.inputs, p.input_pieces,
          [&](int pixel, int piece) { return rows + pixel * p.pitch + piece * kBytes; },
          [&](int pixel, int piece) {
            return chunk.input + int64_t(pixel) * p.channels * kSize + piece * kBytes;
          },
          [&](int, int piece) { return piece * (kBytes / kSize) < chunk.valid; });
    });
  } else {
    unsigned char* const raw_input = raw + p.chunk * p.raw_weight_pitch;
    dispatch_bytes(p.input_bytes, [&](auto bytes) {
      constexpr int kBytes = bytes.value;
      copy_rows<kBytes>(
          p.chunk, p.input_pieces,
          [&](int channel, int piece) {
            return raw_input + channel * p.raw_input_pitch + piece * kBytes;
          },
          [&](int channel, int piece) {
            return chunk.input + int64_t(channel) * p.input_pixels * kSize + piece * kBytes;
          },
          [&](int channel, int piece) {
            return channel < chunk.valid && piece * (kBytes / kSize) < slab.inputs;
          });
    });
  }
  cutlass::arch::cp_async_fence();
}

// Turns lines of `length` elements, one a channel, to rows of channels: element i to row
// i / run * outer + i % run * inner. Eight neighbouring elements by four words of channels are a
// warp's, whose stores meet all banks.
template <class T>
__device__ __forceinline__ void turn(Params const& p, unsigned char const* lines, int line_pitch,
                                     int length, cutlass::FastDivmod const& run, int outer,
                                     int inner, unsigned char* rows) {
  constexpr int kChannels = 4 / int(sizeof(T));  // of a word
  int const quads = p.chunk / kChannels / 4;
  int const step = kThreads / 4;
#pragma unroll 1
  for (int i = int(threadIdx.x) / 4; i < length; i += step) {
    int quotient, rest;
    run(quotient, rest, i);
    unsigned char* const row = rows + (quotient * outer + rest * inner) * p.pitch;
    unsigned char const* const line = lines + i * int(sizeof(T));
#pragma unroll 2
    for (int quad = 0; quad < quads; ++quad) {
      int const word = quad * 4 + int(threadIdx.x) % 4;
      unsigned char const* const from = line + word * kChannels * line_pitch;
      uint32_t value;
      if constexpr (kChannels == 2) {
        value = uint32_t(*reinterpret_cast<uint16_t const*>(from)) |
                uint32_t(*reinterpret_cast<uint16_t const*>(from + line_pitch)) << 16;
      } else {
        value = *reinterpret_cast<uint32_t const*>(from);
      }
      *reinterpret_cast<uint32_t*>(row + word * 4) = value;
    }
  }
}

// Rows of what copy_chunk() has brought. The weight's row tap * p.tap_rows + k is channel k of the
// tap; rows of padding channels hold anything, and only sums that nobody stores. Behind the input's
// pixels a row of zeros stands for what lies outside.
template <class T>
__device__ __forceinline__ void turn_chunk(Params const& p, Slab const& slab, unsigned char* shared,
                                           unsigned char* rows) {
  unsigned char const* const raw = shared + p.raw_offset;
  turn<T>(p, raw, p.raw_weight_pitch, p.columns * p.taps, p.weight_run, p.outer_row, p.inner_row,
          shared);
  if (!p.channels_last) {
    turn<T>(p, raw + p.chunk * p.raw_weight_pitch, p.raw_input_pitch, slab.inputs, p.weight_run,
            p.weight_run.divisor, 1, rows);
  }
  auto* const zeros = reinterpret_cast<uint32_t*>(rows + p.box * p.pitch);
#pragma unroll 1
  for (int i = threadIdx.x; i < p.pitch / 4; i += kThreads) zeros[i] = 0;
}

}  // namespace fusedconv::conv::sm90::clusters
