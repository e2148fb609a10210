// Input and weight to shared memory, where a row is a pixel, or an output channel of a tap, with
// the chunk's input channels side by side.
//
// Asynchronous copies bring what lies across that order as it lies, and a pass over shared memory
// turns it. All of it is few instructions on purpose: every warp issues them, a block runs them
// once, and that takes longer than memory does.
#pragma once

#include <cstdint>
#include <type_traits>

#include "conv/mma_sync.hpp"
#include "conv/sm90/clusters/params.hpp"
#include "cuda/async.hpp"
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

// Pieces of kBytes of `count` rows, `pieces` of each: a thread has one piece of every so many rows.
// source(piece) is where a piece of the first row lies, present(row, piece) whether it does, or is
// zeros instead.
template <int kBytes, class Source, class Present>
__device__ __forceinline__ void copy_rows(int count, cutlass::FastDivmod const& pieces, int at_once,
                                          unsigned char* target, int target_pitch,
                                          int64_t source_pitch, Source const& source,
                                          Present const& present) {
  int first, piece;
  pieces(first, piece, int(threadIdx.x));
  if (first >= at_once) return;
#pragma unroll 1
  for (; piece < pieces.divisor; piece += kThreads) {
    unsigned char* to = target + first * target_pitch + piece * kBytes;
    unsigned char const* from = source(piece) + first * source_pitch;
    // Those of 2 bytes are no asynchronous copies.
#pragma unroll(kBytes == 2 ? 4 : 1)
    for (int row = first; row < count; row += at_once) {
      copy<kBytes>(to, from, present(row, piece));
      to += at_once * target_pitch;
      from += at_once * source_pitch;
    }
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
        p.chunk, p.weight_pieces, p.weights_at_once, raw, p.raw_weight_pitch,
        p.source.stride_c * kSize,
        [&](int piece) {
          int outer, inner;
          p.weight_run(outer, inner, piece * (kBytes / kSize));
          int64_t at = outer * p.outer_stride;
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
  // Channels last a row is a pixel, else a channel.
  bool const last = p.channels_last;
  dispatch_bytes(p.input_bytes, [&](auto bytes) {
    constexpr int kBytes = bytes.value;
    copy_rows<kBytes>(
        last ? slab.inputs : p.chunk, p.input_pieces, p.inputs_at_once,
        last ? rows : raw + p.chunk * p.raw_weight_pitch, last ? p.pitch : p.raw_input_pitch,
        int64_t(last ? p.channels : p.input_pixels) * kSize,
        [&](int piece) { return chunk.input + piece * kBytes; },
        [&](int row, int piece) {
          int const at = piece * (kBytes / kSize);
          return last ? at < chunk.valid : row < chunk.valid && at < slab.inputs;
        });
  });
  cutlass::arch::cp_async_fence();
}

// Turns lines of `length` elements, one a channel, to rows of channels: element i to row
// i / run * outer + i % run * inner.
struct Turn {
  unsigned char const* lines;
  int line_pitch;
  int length;
  int outer, inner;
  unsigned char* rows;

  __device__ __forceinline__ uint32_t row(Params const& p, int i) const {
    int quotient, rest;
    p.weight_run(quotient, rest, i);
    return device::shared_address(rows) + (quotient * outer + rest * inner) * p.pitch;
  }
};

// Of 16 bits: a warp turns 16 elements of 16 channels by two instructions, which move matrices of
// eight by eight.
__device__ __forceinline__ void turn_halves(Params const& p, Turn const& turn, uint32_t spare) {
  int const lane = threadIdx.x % 32, warp = uniform(int(threadIdx.x) / 32);
  int const matrix_element = lane / 16 * 8, matrix_channel = lane / 8 % 2 * 8;
  uint32_t const lines = device::shared_address(turn.lines) +
                         (matrix_channel + lane % 8) * turn.line_pitch + matrix_element * 2;
#pragma unroll 1
  for (int first = warp * 16; first < turn.length; first += kWarps * 16) {
    int const i = first + matrix_element + lane % 8;
    bool const inside = i < turn.length;
    uint32_t row = inside ? turn.row(p, i) + matrix_channel * 2 : spare;
    uint32_t line = lines + first * 2;
#pragma unroll 2
    for (int channel = 0; channel < p.chunk; channel += 16) {
      uint4 words;
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                   : "r"(line)
                   : "memory");
      device::store_matrices(row, words);
      line += 16 * turn.line_pitch;
      row += inside ? 32 : 0;
    }
  }
}

__device__ __forceinline__ void store_quad(uint32_t address, uint4 const& words) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words.x),
               "r"(words.y), "r"(words.z), "r"(words.w)
               : "memory");
}

// Four floats, rounded to TF32 where kRounds.
template <bool kRounds>
__device__ __forceinline__ uint4 rounded(uint4 words) {
  if constexpr (kRounds) {
    auto const round = [](uint32_t& word) {
      word = __float_as_uint(device::round_to_tf32(__uint_as_float(word)));
    };
    round(words.x), round(words.y), round(words.z), round(words.w);
  }
  return words;
}

// Of floats: a thread turns an element of four channels.
template <bool kRounds>
__device__ __forceinline__ void turn_floats(Params const& p, Turn const& turn) {
  int const all = (turn.length + 31) / 32 * p.by_quads.divisor;
#pragma unroll 1
  for (int piece = uniform(int(threadIdx.x) / 32); piece < all; piece += kWarps) {
    int block, quad;
    p.by_quads(block, quad, piece);
    int const i = block * 32 + int(threadIdx.x) % 32;
    if (i >= turn.length) continue;
    uint32_t const from =
        device::shared_address(turn.lines) + quad * 4 * turn.line_pitch + i * int(sizeof(float));
    uint4 const words{device::load_word(from), device::load_word(from + turn.line_pitch),
                      device::load_word(from + 2 * turn.line_pitch),
                      device::load_word(from + 3 * turn.line_pitch)};
    store_quad(turn.row(p, i) + quad * 16, rounded<kRounds>(words));
  }
}

// Rounds rows of pixels to TF32 where they lie.
__device__ __forceinline__ void round_rows(Params const& p, int count, unsigned char* rows) {
  int const all = count * p.by_quads.divisor;
#pragma unroll 2
  for (int i = threadIdx.x; i < all; i += kThreads) {
    int row, quad;
    p.by_quads(row, quad, i);
    auto* const words = reinterpret_cast<uint4*>(rows + row * p.pitch + quad * 16);
    *words = rounded<true>(*words);
  }
}

// Rows of what copy_chunk() has brought. The weight's row of a tap and channel k is k rows behind
// the tap's; rows of padding channels hold anything, and only sums that nobody stores. Behind the
// input's pixels a row of zeros stands for what lies outside. Floats come out rounded to TF32 where
// products are of those.
template <Math kMath>
__device__ __forceinline__ void turn_chunk(Params const& p, Slab const& slab, unsigned char* shared,
                                           unsigned char* rows) {
  unsigned char const* const raw = shared + p.raw_offset;
  Turn turn{raw, p.raw_weight_pitch, p.columns * p.taps, p.outer_row, p.inner_row, shared};
#pragma unroll 1
  for (int operand = 0;; ++operand) {
    if constexpr (sizeof(typename Instruction<kMath>::Element) == 2) {
      turn_halves(p, turn, device::shared_address(shared + p.spare_offset));
    } else {
      turn_floats<kMath == Math::kTf32>(p, turn);
    }
    if (operand == 1 || p.channels_last) break;
    turn = {raw + p.chunk * p.raw_weight_pitch,
            p.raw_input_pitch,
            slab.inputs,
            p.weight_run.divisor,
            1,
            rows};
  }
  if constexpr (kMath == Math::kTf32) {
    if (p.channels_last) round_rows(p, slab.inputs, rows);
  }
  auto* const zeros = reinterpret_cast<uint32_t*>(rows + p.box * p.pitch);
#pragma unroll 1
  for (int i = threadIdx.x; i < p.pitch / 4; i += kThreads) zeros[i] = 0;
}

}  // namespace fusedconv::conv::sm90::clusters
