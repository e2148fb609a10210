// The kernel behind sm90.hpp: one block per multiprocessor, a warpgroup that gathers input and two that
// multiply.
#pragma once

#include <algorithm>
#include <utility>

#include <cuda.h>

#include "conv/sm90_line.hpp"
#include "cuda/math.hpp"
#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/arch/mma_sm90_desc.hpp"
#include "cute/arch/mma_sm90_gmma.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/fast_math.h"
#include "fusedconv/check.hpp"
#include "groupnorm/moments.hpp"

namespace fusedconv::conv::sm90 {

namespace gmma = cute::SM90::GMMA;
using cutlass::arch::ClusterBarrier;
using cutlass::arch::ClusterTransactionBarrier;
using cutlass::arch::NamedBarrier;

inline constexpr int kGroupThreads = 128;  // a warpgroup
// With one more warp a thread could not have the 154 registers that an instruction of 64 x 256 needs.
inline constexpr int kThreads = (1 + kConsumers) * kGroupThreads;

inline constexpr int kConsumerRegisters = 200;
inline constexpr int kProducerRegisters = 104;

template <Math kMath>
struct Instruction;
template <>
struct Instruction<Math::kTf32> {
  using Element = float;
  using Mma = gmma::MMA_64x256x8_F32TF32TF32_SS_TN<>;
};
template <>
struct Instruction<Math::kTf32x3> {
  using Element = float;
  using Mma = gmma::MMA_64x128x8_F32TF32TF32_SS_TN<>;
};
template <>
struct Instruction<Math::kF16> {
  using Element = __half;
  using Mma = gmma::MMA_64x256x16_F32F16F16_SS<gmma::Major::K, gmma::Major::K>;
};
template <>
struct Instruction<Math::kBF16> {
  using Element = __nv_bfloat16;
  using Mma = gmma::MMA_64x256x16_F32BF16BF16_SS<gmma::Major::K, gmma::Major::K>;
};

struct Params {
  void const* input;
  unsigned char const* filter;
  void const* bias;
  void* output;
  groupnorm::Partial* partials;
  int64_t input_sample;    // elements of a sample
  int64_t channel_stride;  // of the input, elements
  int pixel_stride;
  int channels, out_channels;
  Line line;
  int d, h, w;
  int lower_d, lower_h, lower_w;
  int taps_w;
  int runs;                // of stages whose positions are the same
  int step_d, step_group;  // positions from one depth tap, one group of filter rows to the next
  int step_row;            // positions from one filter row to the next
  int step_column;
  int rows_per_stage, chunks_per_stage;
  int row_step, stage_rows, plane_rows;
  bool contiguous;      // a stage's positions are one run
  bool three_by_three;  // a stage has three rows of three taps
  bool wraps;           // groups of eight positions may cross rows
  bool bulk;
  int line_elements, lines, landing_slots, landing_bytes;
  bool fragments;    // unused
  bool wide_output;  // unused
  int stages, slots;
  int filter_stage_bytes, input_stage_bytes, filter_bytes;
  int tile_count;
  int blocks_64;
  cutlass::FastDivmod tiles, strips, blocks_k, row_groups, chunk_groups;
  cutlass::FastDivmod row_step_division;
  Activation activation;
  bool
      activates_output;  // else the convolution is stored, and only its moments are of activated values
};

#if defined(__CUDACC__)

// ---- small pieces --------------------------------------------------------------------------------

struct Slot {
  int index = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance(int slots) {
    if (++index == slots) {
      index = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ void skip(int count, int slots) {
    for (int i = 0; i < count; ++i) advance(slots);
  }
};

struct Tile {
  int sample, strip, index, block_k;
  __device__ __forceinline__ Tile(Params const& p, int tile) {
    p.blocks_k(tile, block_k, tile);
    p.tiles(tile, index, tile);
    p.strips(sample, strip, tile);
  }
};

struct alignas(16) Barriers {
  uint64_t full[kMaxSlots];
  uint64_t empty[kMaxSlots];
  uint64_t landed[kMaxSlots];
  uint64_t turned[kMaxSlots];
  uint64_t filter;
};

__device__ __forceinline__ void load_filter(uint32_t target, void const* source, uint32_t bytes,
                                            uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(target),
      "l"(source), "r"(bytes), "r"(cute::cast_smem_ptr_to_uint(barrier))
      : "memory");
}

// A predicate instead of a branch keeps the stores of several positions in one run of instructions.
__device__ __forceinline__ void store_shared(bool present, uint32_t target, uint32_t a, uint32_t b,
                                             uint32_t c, uint32_t d) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %5, 0;\n"
      "@p st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n"
      "}" ::"r"(target),
      "r"(a), "r"(b), "r"(c), "r"(d), "r"(uint32_t(present))
      : "memory");
}

// K-major core matrices of 8 rows times 16 bytes without swizzle: rows follow each other at 16 bytes,
// so any row may be the first one.
__device__ __forceinline__ uint64_t operand(uint32_t address, int plane_rows) {
  cute::GmmaDescriptor result;
  result.bitfield.start_address_ = uint16_t(address >> 4);
  result.bitfield.leading_byte_offset_ = uint16_t(plane_rows);
  result.bitfield.stride_byte_offset_ = 8;
  result.bitfield.layout_type_ = uint8_t(gmma::LayoutType::INTERLEAVE);
  return result.desc_;
}

template <class Mma, int... kIndex>
__device__ __forceinline__ void multiply(uint64_t a, uint64_t b, float (&sum)[sizeof...(kIndex)],
                                         bool accumulate, std::integer_sequence<int, kIndex...>) {
  Mma::fma(a, b, sum[kIndex]..., accumulate ? gmma::ScaleOut::One : gmma::ScaleOut::Zero);
}

// ---- gathering -----------------------------------------------------------------------------------

// Offsets (in pixels) of the staged positions that a thread loads: position first + step * i; -1 for
// the zeros around the input.
template <int kCount>
__device__ __forceinline__ void locate(Params const& p, int column0, int position0, int first,
                                       int step, int (&offsets)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    int const row = first + step * i;
    int position = position0 + row;
    if (!p.contiguous) {
      int tap, rest;
      p.row_step_division(tap, rest, row);
      position = position0 + tap * p.step_row + rest;
    }
    int line, column, slice;
    p.line.pitch_w(line, column, position);
    p.line.pitch_h(slice, line, line);
    column += column0;
    line -= p.lower_h;
    slice -= p.lower_d;
    bool const inside = row < p.stage_rows && unsigned(column) < unsigned(p.w) &&
                        unsigned(line) < unsigned(p.h) && unsigned(slice) < unsigned(p.d);
    offsets[i] = inside ? (slice * p.h + line) * p.w + column : -1;
  }
}

// Stages one 16-byte piece of a position: four floats, rounded, or split in two. Tensor copies have
// rounded already where that is the mode.
template <Math kMath, bool kLanded>
__device__ __forceinline__ void stage(bool present, uint32_t target, uint32_t small_offset,
                                      float const (&v)[4]) {
  float big[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kMath == Math::kTf32x3) {
      big[i] = device::big_tf32(v[i]);
    } else {
      big[i] = kLanded ? v[i] : device::round_to_tf32(v[i]);
    }
  }
  store_shared(present, target, __float_as_uint(big[0]), __float_as_uint(big[1]),
               __float_as_uint(big[2]), __float_as_uint(big[3]));
  if constexpr (kMath == Math::kTf32x3) {
    uint32_t small[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) small[i] = __float_as_uint(device::round_to_tf32(v[i] - big[i]));
    store_shared(present, target + small_offset, small[0], small[1], small[2], small[3]);
  }
}

// One chunk of channels, loaded element by element along positions: for inputs whose lines are not whole
// multiples of 16 bytes.
template <Math kMath, int kRows>
__device__ __forceinline__ void gather_elements(Params const& p,
                                                typename Instruction<kMath>::Element const* base,
                                                int channels, uint32_t target, uint32_t small,
                                                int thread, int const (&offsets)[kRows]) {
  using T = typename Instruction<kMath>::Element;
  constexpr int kChannels = chunk_channels(kMath);
  constexpr int kAtOnce = 16 / kChannels;
  static_assert(kRows % kAtOnce == 0);
#pragma unroll
  for (int first = 0; first < kRows; first += kAtOnce) {
    if (first * kGroupThreads >= p.stage_rows) break;
    T values[kAtOnce][kChannels];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int const offset = offsets[first + i];
      T const* const source = base + int64_t(offset) * p.pixel_stride;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        values[i][c] = T(0.0f);
        if (offset >= 0 && c < channels) values[i][c] = __ldg(source + c * p.channel_stride);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int const row = thread + (first + i) * kGroupThreads;
      bool const present = row < p.stage_rows;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t const address = target + (half * p.plane_rows + row) * 16;
        if constexpr (sizeof(T) == 4) {
          float const(&v)[8] = values[i];
          float const piece[4] = {v[half * 4], v[half * 4 + 1], v[half * 4 + 2], v[half * 4 + 3]};
          stage<kMath, false>(present, address, small, piece);
        } else {
          device::Pack<T, 8> piece;
#pragma unroll
          for (int c = 0; c < 8; ++c) piece.values[c] = values[i][half * 8 + c];
          store_shared(present, address, piece.bits[0], piece.bits[1], piece.bits[2],
                       piece.bits[3]);
        }
      }
    }
  }
}

// ---- landing -------------------------------------------------------------------------------------

// Columns before a strip's first one: tensor copies start at multiples of 16 bytes.
template <Math kMath, Layout kLayout>
__device__ __forceinline__ int lead(Params const& p, int strip) {
  if (kLayout == Layout::kChannelsLast) return 0;
  return (strip * p.line.strip_width - p.lower_w) & (16 / element_bytes(kMath) - 1);
}

// A warp starts the tensor copies of stage number `stage` of a tile, or of the tiles after it: one copy per
// line and chunk, zeros outside the input. Channels first lands as [chunk, line, channel, column], channels
// last as [chunk, line, column, channel].
template <Math kMath, Sharing kSharing, Layout kLayout>
__device__ __forceinline__ void load_stage(Params const& p, CUtensorMap const& map, int index,
                                           int stage, uint64_t* barrier, unsigned char* landing) {
  while (stage >= p.stages) {
    stage -= p.stages;
    index += gridDim.x;
  }
  if (index >= p.tile_count) return;
  Tile const tile(p, index);
  int d, group, chunk_group;
  p.chunk_groups(group, chunk_group, stage);
  p.row_groups(d, group, group);
  int const position =
      tile.index * tile_positions(kMath, kSharing) + d * p.step_d + group * p.step_group;
  int const line0 = p.line.pitch_w.div(position);
  int const column =
      tile.strip * p.line.strip_width - p.lower_w - lead<kMath, kLayout>(p, tile.strip);
  int const lane = threadIdx.x % 32;
  if (lane == 0) ClusterTransactionBarrier::arrive_and_expect_tx(barrier, p.landing_bytes);
  int const copy_bytes = p.line_elements * kChunkBytes;
  for (int i = lane; i < p.lines; i += 32) {
    int slice, line;
    p.line.pitch_h(slice, line, line0 + i);
    slice -= p.lower_d;
    line -= p.lower_h;
    unsigned char* target = landing + i * copy_bytes;
    int channel = chunk_group * p.chunks_per_stage * chunk_channels(kMath);
    for (int chunk = 0; chunk < p.chunks_per_stage; ++chunk) {
      constexpr auto kNormal = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
      if constexpr (kLayout == Layout::kChannelsFirst) {
        cute::SM90_TMA_LOAD_5D::copy(&map, barrier, kNormal, target, column, line, slice, channel,
                                     tile.sample);
      } else {
        cute::SM90_TMA_LOAD_5D::copy(&map, barrier, kNormal, target, channel, column, line, slice,
                                     tile.sample);
      }
      channel += chunk_channels(kMath);
      target += p.lines * copy_bytes;
    }
  }
  __syncwarp();
}

// A thread's share of a stage's positions and where they land, in bytes.
template <Math kMath, Layout kLayout>
struct Turn {
  // Channels last: two threads a position. Channels first: one, or for 16 bits one for two positions.
  static constexpr bool kPairs = kLayout == Layout::kChannelsFirst && element_bytes(kMath) == 2;
  static constexpr int kLanes = kLayout == Layout::kChannelsLast ? 2 : 1;
  static constexpr int kPositions = kPairs ? 2 : 1;
  static constexpr int kStep = kGroupThreads * kPositions / kLanes;
  static constexpr int kCount = kMaxStageRows / kStep;
  static constexpr int kAtOnce = kPairs ? 2 : 4;
  static_assert(kCount % kAtOnce == 0);
  int offsets[kCount];
  bool odd;  // pairs lie at odd multiples of two bytes

  __device__ __forceinline__ static int row(int i) {
    return int(threadIdx.x) % kGroupThreads / kLanes * kPositions + i * kStep;
  }

  __device__ __forceinline__ void locate(Params const& p, int strip, int first) {
    int const before = lead<kMath, kLayout>(p, strip);
    odd = before % 2 != 0;
    int line0, column0;
    p.line.pitch_w(line0, column0, first);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i / kAtOnce * kAtOnce * kStep >= p.stage_rows) break;
      int line, column;
      p.line.pitch_w(line, column,
                     column0 + min(row(i), (p.stage_rows - 1) / kPositions * kPositions));
      offsets[i] = line * p.line_elements * kChunkBytes +
                   (column + before) * (kLanes == 2 ? kChunkBytes : element_bytes(kMath)) +
                   (kLanes == 2 ? int(threadIdx.x) % 2 * 16 : 0);
    }
  }

  // From the landing zone to the order of the tensor core, split where that is the mode. All loads
  // of a round come before its stores; positions behind the last one load what that one does.
  // `ready` is called between the first loads and the first stores.
  template <class Ready>
  __device__ __forceinline__ void turn(Params const& p, int landing_offset, uint32_t target,
                                       uint32_t small, Ready&& ready) const {
    extern __shared__ __align__(1024) unsigned char shared[];
    unsigned char const* const landing = shared + landing_offset;
    int const channel_bytes = p.line_elements * element_bytes(kMath);
    uint32_t const plane = uint32_t(p.plane_rows) * 16;
#pragma unroll
    for (int first = 0; first < kCount; first += kAtOnce) {
      if (first * kStep >= p.stage_rows) break;
      if constexpr (kLanes == 2) {
        uint4 values[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          values[i] = *reinterpret_cast<uint4 const*>(landing + offsets[first + i]);
        }
        if (first == 0) ready();
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          uint32_t const address = target + threadIdx.x % 2 * plane + uint32_t(row(first + i)) * 16;
          bool const present = row(first + i) < p.stage_rows;
          if constexpr (element_bytes(kMath) == 4) {
            float const piece[4] = {__uint_as_float(values[i].x), __uint_as_float(values[i].y),
                                    __uint_as_float(values[i].z), __uint_as_float(values[i].w)};
            stage<kMath, true>(present, address, small, piece);
          } else {
            store_shared(present, address, values[i].x, values[i].y, values[i].z, values[i].w);
          }
        }
      } else {
        constexpr int kChannels = chunk_channels(kMath);
        uint32_t values[kAtOnce][kChannels];
        if (kPairs && odd) {
#pragma unroll
          for (int c = 0; c < kChannels; ++c) {
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
              auto const* const source = reinterpret_cast<uint16_t const*>(
                  landing + c * channel_bytes + offsets[first + i]);
              values[i][c] = source[0] | uint32_t(source[1]) << 16;
            }
          }
        } else {
#pragma unroll
          for (int c = 0; c < kChannels; ++c) {
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
              values[i][c] = *reinterpret_cast<uint32_t const*>(landing + c * channel_bytes +
                                                                offsets[first + i]);
            }
          }
        }
        if (first == 0) ready();
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          uint32_t const address = target + uint32_t(row(first + i)) * 16;
          bool const present = row(first + i) < p.stage_rows;
          if constexpr (kPairs) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                // Every second four lanes store their second position first: eight lanes then touch all
                // banks once.
                int const second = threadIdx.x / 4 % 2 ^ e;
                uint32_t words[4];
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                  words[k] =
                      __byte_perm(values[i][half * 8 + 2 * k], values[i][half * 8 + 2 * k + 1],
                                  second == 0 ? 0x5410 : 0x7632);
                }
                store_shared(present, address + half * plane + second * 16, words[0], words[1],
                             words[2], words[3]);
              }
            }
          } else {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              float const piece[4] = {__uint_as_float(values[i][half * 4]),
                                      __uint_as_float(values[i][half * 4 + 1]),
                                      __uint_as_float(values[i][half * 4 + 2]),
                                      __uint_as_float(values[i][half * 4 + 3])};
              stage<kMath, true>(present, address + half * plane, small, piece);
            }
          }
        }
      }
    }
  }
};

// The warpgroup that fills stages with what has landed, or from memory.
template <Math kMath, Sharing kSharing, Layout kLayout, bool kBulk>
__device__ __forceinline__ void produce(Params const& p, Barriers& barriers, uint32_t filter_ring,
                                        uint32_t input_ring, CUtensorMap const& map,
                                        int landing_offset) {
  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char* const landing_ring = shared + landing_offset;
  using T = typename Instruction<kMath>::Element;
  constexpr int kChannels = chunk_channels(kMath);
  constexpr bool kResident = kSharing == Sharing::kTurns;
  constexpr int kRows = kMaxStageRows / kGroupThreads;
  int const thread = threadIdx.x % kGroupThreads;
  uint32_t const small = uint32_t(p.input_stage_bytes) / 2;
  constexpr int kWarps = kGroupThreads / 32;
  Slot slot, landing;
  Slot left;  // the landing slot of the stage before, which all warps have left
  Turn<kMath, kLayout> turn;
  int offsets[kRows];
  int turned = 0;  // stages
  if (kBulk && thread < 32) {
    for (int i = 0; i < p.landing_slots; ++i) {
      load_stage<kMath, kSharing, kLayout>(p, map, blockIdx.x, i, &barriers.landed[i],
                                           landing_ring + i * p.landing_bytes);
    }
  }
  for (int index = blockIdx.x; index < p.tile_count; index += gridDim.x) {
    Tile const tile(p, index);
    T const* const sample = static_cast<T const*>(p.input) + tile.sample * p.input_sample;
    int stage = 0;
    for (int run = 0; run < p.runs; ++run) {  // of stages that differ in their channels alone
      int d, group;
      p.row_groups(d, group, run);
      int const first =
          tile.index * tile_positions(kMath, kSharing) + d * p.step_d + group * p.step_group;
      if constexpr (kBulk) {
        turn.locate(p, tile.strip, first);
      } else {
        locate(p, tile.strip * p.line.strip_width - p.lower_w, first, thread, kGroupThreads,
               offsets);
      }
      for (int chunk_group = 0; chunk_group < p.chunk_groups.divisor; ++chunk_group) {
        // What has landed is read while the slot is still in use.
        auto const wait_for_slot = [&] {
          ClusterBarrier::wait(&barriers.empty[slot.index], slot.phase ^ 1);
        };
        if (!kBulk || !kResident) wait_for_slot();
        if (!kResident && thread == 0) {
          ClusterTransactionBarrier::arrive_and_expect_tx(&barriers.full[slot.index],
                                                          p.filter_stage_bytes);
          load_filter(filter_ring + slot.index * p.filter_stage_bytes,
                      p.filter + (int64_t(tile.block_k) * p.stages + stage) * p.filter_stage_bytes,
                      p.filter_stage_bytes, &barriers.full[slot.index]);
        }
        uint32_t target = input_ring + slot.index * p.input_stage_bytes;
        if constexpr (kBulk) {
          ClusterBarrier::wait(&barriers.landed[landing.index], landing.phase);
        }
        for (int chunk = 0; chunk < p.chunks_per_stage; ++chunk) {
          if constexpr (kBulk) {
            turn.turn(p,
                      landing_offset + landing.index * p.landing_bytes +
                          chunk * p.lines * p.line_elements * kChunkBytes,
                      target, small, [&] {
                        if (kResident && chunk == 0) wait_for_slot();
                      });
          } else {
            int const channel = (chunk_group * p.chunks_per_stage + chunk) * kChannels;
            gather_elements<kMath>(p, sample + channel * p.channel_stride, p.channels - channel,
                                   target, small, thread, offsets);
          }
          target += 2 * p.plane_rows * 16;
        }
        cutlass::arch::fence_view_async_shared();
        __syncwarp();
        if (thread % 32 == 0) {
          ClusterBarrier::arrive(&barriers.full[slot.index]);
          if (kBulk) ClusterBarrier::arrive(&barriers.turned[landing.index]);
        }
        slot.advance(p.slots);
        if constexpr (kBulk) {
          landing.advance(p.landing_slots);
          // The warps take turns at starting copies, into the slot that the stage before has left.
          if (turned > 0) {
            if (turned % kWarps == thread / 32) {
              ClusterBarrier::wait(&barriers.turned[left.index], left.phase);
              load_stage<kMath, kSharing, kLayout>(p, map, index, stage - 1 + p.landing_slots,
                                                   &barriers.landed[left.index],
                                                   landing_ring + left.index * p.landing_bytes);
            }
            left.advance(p.landing_slots);
          }
          ++turned;
        }
        ++stage;
      }
    }
  }
}

// ---- multiplying ---------------------------------------------------------------------------------

// exp2 and reciprocal to two units in the last place; denormal results are zero.
__device__ __forceinline__ float quick_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ float quick_reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// x Phi(x) with Phi = 1 / (1 + 2^-h): h(x) = log2(Phi / (1 - Phi)) is odd and smooth, and a polynomial of
// degree nine (least maximum error of x Phi(x), found by weighted least squares) keeps the result within
// 3.4e-6 of the erf form, apart from the last places of exp2 and reciprocal: far below what rounding
// operands to TF32 or 16 bits costs.
__device__ __forceinline__ float quick_gelu(float x) {
  float const square = x * x;
  float h = -3.21037604e-06f;
  h = fmaf(h, square, 8.79097413e-05f);
  h = fmaf(h, square, 0.00036204786f);
  h = fmaf(h, square, -0.105229977f);
  h = fmaf(h, square, -2.30204378f);
  return x * quick_reciprocal(1.0f + quick_exp2(x * h));
}

template <Math kMath, Activation kActivation>
__device__ __forceinline__ float activate(float x) {
  if constexpr (kMath != Math::kTf32x3) {
    if constexpr (kActivation == Activation::kGelu) return quick_gelu(x);
    if constexpr (kActivation == Activation::kGeluTanh) {
      // 0.5 (1 + tanh(y)) = 1 / (1 + 2^(-2 y log2(e)))
      float const h = x * fmaf(-0.10294324f, x * x, -2.3022082f);
      return x * quick_reciprocal(1.0f + quick_exp2(h));
    }
    if constexpr (kActivation == Activation::kSilu) {
      return x * quick_reciprocal(1.0f + quick_exp2(-1.44269504f * x));
    }
  }
  return device::activate(kActivation, x);
}

// A tile's accumulator is finished in pieces by one loop: as straight code for all its elements the
// epilogue would wait for instructions most of its time. Registers have no index, hence the switch.
inline constexpr int kPiece = 16;

template <int kFirst, int kSize>
__device__ __forceinline__ void take_piece(float const (&sum)[kSize], int piece,
                                           float (&v)[kPiece]) {
  if (piece == kFirst) {
#pragma unroll
    for (int i = 0; i < kPiece; ++i) v[i] = sum[kFirst * kPiece + i];
  } else if constexpr ((kFirst + 1) * kPiece < kSize) {
    take_piece<kFirst + 1>(sum, piece, v);
  }
}

// Elements of an accumulator fragment alternate between two channels, two by two.
template <Math kMath, Activation kActivation>
__device__ __forceinline__ void activate_piece(float (&v)[kPiece]) {
#pragma unroll
  for (float& value : v) value = activate<kMath, kActivation>(value);
}

template <Math kMath>
__device__ __forceinline__ void activate_piece(Activation activation, float (&v)[kPiece]) {
  switch (activation) {
    case Activation::kIdentity: return;
    case Activation::kRelu: return activate_piece<kMath, Activation::kRelu>(v);
    case Activation::kGelu: return activate_piece<kMath, Activation::kGelu>(v);
    case Activation::kGeluTanh: return activate_piece<kMath, Activation::kGeluTanh>(v);
    case Activation::kSilu: return activate_piece<kMath, Activation::kSilu>(v);
  }
}

// Sums about a shift that is one of the values, so that a large mean costs no precision.
struct ShiftedMoments {
  float shift = 0.0f, sum = 0.0f, squares = 0.0f;
  __device__ __forceinline__ void add(float value) {
    float const difference = value - shift;
    sum += difference;
    squares = fmaf(difference, difference, squares);
  }
  __device__ __forceinline__ device::Moments moments(int count) const {
    return count == 0 ? device::Moments{}
                      : device::shifted_moments(float(count), shift, sum, squares);
  }
};

template <class T>
__device__ __forceinline__ uint32_t packed(float low, float high) {
  device::Pack<T, 2> pack;
  pack.values[0] = device::from_float<T>(low);
  pack.values[1] = device::from_float<T>(high);
  return pack.bits[0];
}

// A lane's elements of a piece, in 16-byte vectors that lie 32 lanes apart.
template <class T>
__device__ __forceinline__ void store_piece(T* target, float const (&values)[kPiece]) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < kPiece; i += 4) {
      *reinterpret_cast<float4*>(target + i * 32) =
          make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPiece; i += 8) {
      *reinterpret_cast<uint4*>(target + i * 32) = make_uint4(
          packed<T>(values[i], values[i + 1]), packed<T>(values[i + 2], values[i + 3]),
          packed<T>(values[i + 4], values[i + 5]), packed<T>(values[i + 6], values[i + 7]));
    }
  }
}

// Adds the bias, activates, stores the tile and reduces each channel's partial moments. A thread holds two
// channels, eight apart, and of each eight positions two: an accumulator fragment of the instruction.
template <Math kMath, bool kWraps, int kSize>
__device__ __forceinline__ void finish_tile(Params const& p, float const (&accumulator)[kSize],
                                            Tile const& tile, int position0, int channel0,
                                            float bias0, float bias1) {
  using T = typename Instruction<kMath>::Element;
  int const lane = threadIdx.x % 32;
  int const row = channel0 + lane / 4;  // channels row and row + 8
  int const column = lane % 4 * 2;
  Group const own(p.line, tile.strip, position0 + lane * 8);
  bool const keep0 = row < p.out_channels;
  bool const keep1 = row + 8 < p.out_channels;
  int64_t const stat_tile = int64_t(tile.sample) * p.line.stat_tiles +
                            tile.strip * p.line.strip_stat_tiles + position0 / block_n(kMath);
  // A warp's accumulators are 16 channels of the tile.
  T* const fragment = static_cast<T*>(p.output) +
                      (stat_tile * p.blocks_64 * kBlockM + channel0) * block_n(kMath) +
                      lane * (16 / sizeof(T));
  ShiftedMoments moments0, moments1;
  int const count = own.count_of_columns<kSize / 4>();
  bool shifted = false;
#pragma unroll 1
  for (int piece = 0; piece < kSize / kPiece; ++piece) {
    float values[kPiece];
    Group groups[kPiece / 4];
#pragma unroll
    for (int j = 0; j < kPiece / 4; ++j) {
      groups[j] = own.broadcast<kWraps>(piece * (kPiece / 4) + j);
    }
    take_piece<0>(accumulator, piece, values);
#pragma unroll
    for (int i = 0; i < kPiece; ++i) values[i] += i % 4 < 2 ? bias0 : bias1;
    if (!p.activates_output) store_piece(fragment + piece * kPiece * 32, values);
    activate_piece<kMath>(p.activation, values);
    if (p.activates_output) store_piece(fragment + piece * kPiece * 32, values);
    if (!shifted) {
#pragma unroll
      for (int j = kPiece / 4 - 1; j >= 0; --j) {
#pragma unroll
        for (int e = 1; e >= 0; --e) {
          if (groups[j].valid<kWraps>(column + e)) {
            moments0.shift = values[4 * j + e];
            moments1.shift = values[4 * j + 2 + e];
            shifted = true;
          }
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kPiece / 4; ++j) {
      Group const& group = groups[j];
      float const* const v = values + 4 * j;
      bool const valid0 = group.valid<kWraps>(column);
      bool const valid1 = group.valid<kWraps>(column + 1);
      if (valid0) {
        moments0.add(v[0]);
        moments1.add(v[2]);
      }
      if (valid1) {
        moments0.add(v[1]);
        moments1.add(v[3]);
      }
    }
  }
  if (p.partials == nullptr) return;
  auto const total0 = device::merge_warp<4>(moments0.moments(count));
  auto const total1 = device::merge_warp<4>(moments1.moments(count));
  if (lane % 4 == 0) {
    groupnorm::Partial* const target = p.partials + stat_tile * p.out_channels;
    if (keep0) target[row] = total0.partial();
    if (keep1) target[row + 8] = total1.partial();
  }
}

// A warpgroup that multiplies and finishes tiles.
template <Math kMath, Sharing kSharing>
__device__ __forceinline__ void consume(Params const& p, Barriers& barriers, uint32_t filter_ring,
                                        uint32_t input_ring, int group) {
  using T = typename Instruction<kMath>::Element;
  using Mma = typename Instruction<kMath>::Mma;
  constexpr int kN = block_n(kMath);
  using Indices = std::make_integer_sequence<int, kN / 2>;
  constexpr bool kTakeTurns = kSharing == Sharing::kTurns;
  constexpr int kBlockBytes = kBlockM * kChunkBytes;
  constexpr int kStepBytes = kBlockBytes * blocks_m(kSharing);
  constexpr int kTurnBarrier = 1;  // and the next: the turns of the two warpgroups
  int const warp = threadIdx.x % kGroupThreads / 32;
  bool const first_lane = threadIdx.x % 32 == 0;
  // Filter block and positions of this warpgroup within the tile.
  uint32_t const own_filter = kSharing == Sharing::kChannels ? group * kBlockBytes : 0;
  int const own_positions = kSharing == Sharing::kPositions ? group * kN : 0;
  [[maybe_unused]] int const filter_small = p.filter_stage_bytes / 2 >> 4;
  [[maybe_unused]] int const input_small = p.input_stage_bytes / 2 >> 4;
  int const turn = kTakeTurns ? group : 0;
  if constexpr (kTakeTurns) ClusterBarrier::wait(&barriers.filter, 0);

  Slot slot;
  if (kTakeTurns && group == 1) {
    slot.skip(p.stages, p.slots);
    NamedBarrier::arrive(2 * kGroupThreads, kTurnBarrier);  // the other warpgroup goes first
  }
  float sum[kN / 2];
  for (int index = blockIdx.x + turn * gridDim.x; index < p.tile_count;
       index += (kTakeTurns ? 2 : 1) * gridDim.x) {
    Tile const tile(p, index);
    int const channel0 =
        (tile.block_k * blocks_m(kSharing) + (kSharing == Sharing::kChannels ? group : 0)) *
            kBlockM +
        warp * 16;
    float bias[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const channel = channel0 + threadIdx.x % 32 / 4 + 8 * i;
      if (p.bias != nullptr && channel < p.out_channels) {
        bias[i] = device::to_float(static_cast<T const*>(p.bias)[channel]);
      }
    }
    // Only one warpgroup at a time waits for stages: a parity tells two phases apart, not three.
    if constexpr (kTakeTurns) NamedBarrier::sync(2 * kGroupThreads, kTurnBarrier + group);
    [[maybe_unused]] int previous = 0;
    for (int s = 0; s < p.stages; ++s) {
      ClusterBarrier::wait(&barriers.full[slot.index], slot.phase);
      uint32_t const filter_address =
          filter_ring + (kTakeTurns ? s : slot.index) * p.filter_stage_bytes + own_filter;
      uint64_t a = operand(filter_address, kBlockM);
      uint64_t const b0 =
          operand(input_ring + slot.index * p.input_stage_bytes + own_positions * 16, p.plane_rows);
      if constexpr (kMath == Math::kTf32x3) {
        // The tensor core drops bits in every addition to an accumulator, which a long sum would show. So a
        // filter row is summed by itself, the small products first, and added with rounding.
        if (s == 0) {
#pragma unroll
          for (float& value : sum) value = 0.0f;
        }
        for (int chunk = 0; chunk < p.chunks_per_stage; ++chunk) {
          for (int r = 0; r < p.rows_per_stage; ++r) {
            uint64_t const b = b0 + uint64_t(chunk * 2 * p.plane_rows + r * p.row_step);
            float row[kN / 2];
            cute::warpgroup_arrive();
            for (int t = 0; t < p.taps_w; ++t) {
              uint64_t const at = a + uint64_t(t * (kStepBytes >> 4));
              uint64_t const bt = b + uint64_t(t * p.step_column);
              multiply<Mma>(at, bt + input_small, row, t > 0, Indices{});
              multiply<Mma>(at + filter_small, bt, row, true, Indices{});
            }
            for (int t = 0; t < p.taps_w; ++t) {
              multiply<Mma>(a + uint64_t(t * (kStepBytes >> 4)), b + uint64_t(t * p.step_column),
                            row, true, Indices{});
            }
            cute::warpgroup_commit_batch();
            cute::warpgroup_wait<0>();
#pragma unroll
            for (int i = 0; i < kN / 2; ++i) {
              cute::warpgroup_fence_operand(row[i]);
              sum[i] += row[i];
            }
            a += uint64_t(p.taps_w * (kStepBytes >> 4));
          }
        }
        if (first_lane) ClusterBarrier::arrive(&barriers.empty[slot.index]);
      } else {
        auto const step = [&](uint64_t b, bool accumulate) {
          multiply<Mma>(a, b, sum, accumulate, Indices{});
          a += kStepBytes >> 4;
        };
        // Once the first step of this stage has begun, the previous stage is through.
        cute::warpgroup_arrive();
        step(b0, s > 0);
        cute::warpgroup_commit_batch();
        if (s > 0) {
          cute::warpgroup_wait<1>();
          if (first_lane) ClusterBarrier::arrive(&barriers.empty[previous]);
        }
        cute::warpgroup_arrive();
        if (p.three_by_three) {
#pragma unroll
          for (int i = 1; i < 9; ++i) {
            step(b0 + uint64_t(i / 3 * p.row_step + i % 3 * p.step_column), true);
          }
        } else {
          for (int chunk = 0; chunk < p.chunks_per_stage; ++chunk) {
            for (int r = 0; r < p.rows_per_stage; ++r) {
              uint64_t b = b0 + uint64_t(chunk * 2 * p.plane_rows + r * p.row_step);
              for (int t = 0; t < p.taps_w; ++t) {
                if (chunk + r + t > 0) step(b, true);
                b += p.step_column;
              }
            }
          }
        }
        cute::warpgroup_commit_batch();
      }
      previous = slot.index;
      slot.advance(p.slots);
    }
    if constexpr (kTakeTurns) {
      slot.skip(p.stages, p.slots);
      NamedBarrier::arrive(2 * kGroupThreads, kTurnBarrier + 1 - group);
    }
    if constexpr (kMath != Math::kTf32x3) {
      cute::warpgroup_wait<0>();
#pragma unroll
      for (float& value : sum) cute::warpgroup_fence_operand(value);
      if (first_lane) ClusterBarrier::arrive(&barriers.empty[previous]);
    }

    // The second block of channels of the last tile may hold none.
    if (channel0 >= p.blocks_64 * kBlockM) continue;
    int const position0 = tile.index * tile_positions(kMath, kSharing) + own_positions;
    if (p.wraps) {
      finish_tile<kMath, true>(p, sum, tile, position0, channel0, bias[0], bias[1]);
    } else {
      finish_tile<kMath, false>(p, sum, tile, position0, channel0, bias[0], bias[1]);
    }
  }
}

template <Math kMath, Sharing kSharing, Layout kLayout>
__global__ void __launch_bounds__(kThreads, 1)
    convolve(__grid_constant__ Params const p, __grid_constant__ CUtensorMap const map) {
#if defined(CUTE_ARCH_MMA_SM90A_ENABLED)
  extern __shared__ __align__(1024) unsigned char shared[];
  constexpr bool kResident = kSharing == Sharing::kTurns;
  auto& barriers = *reinterpret_cast<Barriers*>(shared);
  uint32_t const filter_ring = cute::cast_smem_ptr_to_uint(shared) + 1024;
  int const filter_ring_bytes = kResident ? p.filter_bytes : p.slots * p.filter_stage_bytes;
  // Tensor copies land at multiples of 128 bytes, and what precedes the zone is a multiple of that.
  unsigned char* const landing_ring = shared + 1024 + filter_ring_bytes;
  uint32_t const input_ring =
      cute::cast_smem_ptr_to_uint(landing_ring) + uint32_t(p.landing_slots * p.landing_bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.slots; ++i) {
      ClusterBarrier::init(&barriers.full[i], kGroupThreads / 32 + (kResident ? 0 : 1));
      ClusterBarrier::init(&barriers.empty[i], kGroupThreads / 32 * (kResident ? 1 : kConsumers));
    }
    for (int i = 0; i < p.landing_slots; ++i) {
      ClusterBarrier::init(&barriers.landed[i], 1);
      ClusterBarrier::init(&barriers.turned[i], kGroupThreads / 32);
    }
    ClusterBarrier::init(&barriers.filter, 1);
    cutlass::arch::fence_barrier_init();
    cutlass::arch::fence_view_async_shared();
    if (kResident) {
      ClusterTransactionBarrier::arrive_and_expect_tx(&barriers.filter, p.filter_bytes);
      load_filter(filter_ring, p.filter, p.filter_bytes, &barriers.filter);
    }
  }
  __syncthreads();
  int const group = threadIdx.x / kGroupThreads;
  if (group < kConsumers) {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    consume<kMath, kSharing>(p, barriers, filter_ring, input_ring, group);
  } else {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    if (p.bulk) {
      produce<kMath, kSharing, kLayout, true>(p, barriers, filter_ring, input_ring, map,
                                              1024 + filter_ring_bytes);
    } else {
      produce<kMath, kSharing, kLayout, false>(p, barriers, filter_ring, input_ring, map,
                                               1024 + filter_ring_bytes);
    }
  }
#endif
}

// ---- launching -----------------------------------------------------------------------------------

inline Params params_of(Arguments const& a, Sharing sharing) {
  ConvProblem const& c = a.problem;
  Schedule const& s = a.schedule;
  bool const first = a.layout == Layout::kChannelsFirst;
  int64_t const in_pixels = int64_t(c.d) * c.h * c.w;
  Params p{};
  p.input = a.input;
  p.filter = static_cast<unsigned char const*>(a.filter);
  p.bias = a.bias;
  p.output = a.output;
  p.partials = a.partials;
  p.input_sample = in_pixels * c.c;
  p.channel_stride = first ? in_pixels : 1;
  p.pixel_stride = first ? 1 : c.c;
  p.channels = c.c;
  p.out_channels = c.k;
  p.line = Line::of(c, s);
  p.d = c.d, p.h = c.h, p.w = c.w;
  p.lower_d = c.lower_padding_d, p.lower_h = c.lower_padding_h, p.lower_w = c.lower_padding_w;
  p.taps_w = c.s;
  p.row_groups = cutlass::FastDivmod(c.r / s.rows_per_stage);
  p.chunk_groups = cutlass::FastDivmod(s.chunks / s.chunks_per_stage);
  p.runs = c.t * (c.r / s.rows_per_stage);
  p.step_row = c.dilation_h * s.pitch_w;
  p.step_d = c.dilation_d * s.pitch_h * s.pitch_w;
  p.step_group = s.rows_per_stage * p.step_row;
  p.step_column = c.dilation_w;
  p.rows_per_stage = s.rows_per_stage;
  p.chunks_per_stage = s.chunks_per_stage;
  p.row_step = s.row_step, p.stage_rows = s.stage_rows, p.plane_rows = s.plane_rows;
  p.contiguous = s.row_step == p.step_row || s.rows_per_stage == 1;
  p.three_by_three = s.rows_per_stage == 3 && c.s == 3 && s.chunks_per_stage == 1;
  p.wraps = !s.linear && s.pitch_w % 8 != 0;
  p.bulk = s.bulk;
  p.line_elements = s.line_elements, p.lines = s.lines;
  p.landing_slots = s.landing_slots, p.landing_bytes = s.landing_bytes;
  p.stages = s.stages, p.slots = s.slots;
  p.filter_stage_bytes = s.filter_stage_bytes, p.input_stage_bytes = s.input_stage_bytes;
  p.filter_bytes = sharing == Sharing::kTurns ? int(s.filter_bytes) : 0;
  int64_t const tiles = int64_t(c.n) * s.strips * s.tiles * s.blocks_k;
  FUSEDCONV_CHECK(tiles < (int64_t(1) << 30), "sm90 convolve: N=", c.n, " C=", c.c, " K=", c.k,
                  " makes ", tiles, " tiles, less than 2**30 are expected");
  p.tile_count = int(tiles);
  p.blocks_64 = int(ceil_div(c.k, kBlockM));
  p.tiles = cutlass::FastDivmod(s.tiles);
  p.strips = cutlass::FastDivmod(s.strips);
  p.blocks_k = cutlass::FastDivmod(s.blocks_k);
  p.row_step_division = cutlass::FastDivmod(std::max(1, s.row_step));
  p.activation = a.activation;
  p.activates_output = a.activates_output;
  return p;
}

// The input as a tensor of five axes, for copies of one line of a chunk of channels; rounded to
// TF32 on the way where that is the mode.
CUtensorMap input_map(Arguments const& a, Math math);

inline std::string name_of(Math math, Sharing sharing) {
  char const* const maths[] = {"tf32", "tf32_rounded", "tf32x3", "f16", "bf16"};
  char const* const sharings[] = {"turns", "channels", "positions"};
  return detail::join("sm90_conv_", maths[int(math)], "_", kBlockM * blocks_m(sharing), "x",
                      tile_positions(math, sharing), "_", sharings[int(sharing)]);
}

template <Math kMath, Sharing kSharing, Layout kLayout>
void launch_layout(Arguments const& a, cudaStream_t stream) {
  auto const kernel = &convolve<kMath, kSharing, kLayout>;
  Params const p = params_of(a, kSharing);
  int const blocks = std::min(p.tile_count, a.multiprocessors);
  auto const check = [&](char const* where, cudaError_t status) {
    if (status == cudaSuccess) return;
    ConvProblem const& c = a.problem;
    throw KernelFailure(detail::join(
        name_of(kMath, kSharing), ": ", where, " failed with ", cudaGetErrorName(status), " (",
        cudaGetErrorString(status), ") for N=", c.n, " C=", c.c, " K=", c.k, " DHW=", c.d, "x", c.h,
        "x", c.w, " ZPQ=", c.z, "x", c.p, "x", c.q, " TRS=", c.t, "x", c.r, "x", c.s, ", ",
        a.schedule.shared_bytes, " bytes of shared memory"));
  };
  check("cudaFuncSetAttribute",
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             a.schedule.shared_bytes));
  CUtensorMap const map = a.schedule.bulk ? input_map(a, kMath) : CUtensorMap{};
  kernel<<<blocks, kThreads, a.schedule.shared_bytes, stream>>>(p, map);
  check("launch", cudaGetLastError());
}

template <Math kMath, Sharing kSharing>
void launch(Arguments const& a, cudaStream_t stream) {
  if (a.layout == Layout::kChannelsFirst) {
    launch_layout<kMath, kSharing, Layout::kChannelsFirst>(a, stream);
  } else {
    launch_layout<kMath, kSharing, Layout::kChannelsLast>(a, stream);
  }
}

template <Math kMath, Sharing kSharing>
Row row() {
  constexpr DType kDType = kMath == Math::kF16    ? DType::kFloat16
                           : kMath == Math::kBF16 ? DType::kBFloat16
                                                  : DType::kFloat32;
  return {.name = name_of(kMath, kSharing),
          .math = kMath,
          .dtype = kDType,
          .sharing = kSharing,
          .launch = &launch<kMath, kSharing>};
}

#endif  // __CUDACC__

}  // namespace fusedconv::conv::sm90
