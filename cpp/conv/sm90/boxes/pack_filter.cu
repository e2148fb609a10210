#include <algorithm>

#include "conv/filter_source.hpp"
#include "conv/sm90/boxes/params.hpp"
#include "conv/sm90/boxes/passes.hpp"
#include "cuda/early.hpp"
#include "cuda/launch.hpp"
#include "cuda/math.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::boxes {
namespace {

constexpr int kPackThreads = 128;
constexpr int kMaxBlocks = 1 << 16;

// Where a filter's tap goes: no phase that has outputs may have it.
struct TapPlace {
  uint16_t row;  // among those of its set, a channel block and a chunk
  uint16_t set = kNone;

  static constexpr uint16_t kNone = 0xffff;
};

struct PackParams {
  FilterSource source;
  // channels, output_channels: the source's; padded: output channels of all blocks.
  int taps, channels, output_channels, padded_channels;
  int segment, channel_blocks, chunks;
  int line;                                       // columns, where the filter is lines
  int first_row[kMostPhases], rows[kMostPhases];  // by set
  TapPlace places[kMostFilterTaps];

  // Elements from a filter's first tap to another.
  __device__ __forceinline__ int64_t offset_of(int tap) const {
    return tap % source.s * source.stride_s + tap / source.s % source.r * source.stride_r +
           tap / (source.s * source.r) * source.stride_t;
  }
};

constexpr int kPieces = kChunkBytes / kPieceBytes;
template <class T>
inline constexpr int kVector = kPieceBytes / int(sizeof(T));

// The packed filter's row of an output channel at a tap, for a chunk of channels; -1 where no block
// of columns has the tap. Those of the eight channels from a whole eight on follow each other.
__device__ __forceinline__ int64_t row_of(PackParams const& p, int tap, int k, int chunk) {
  TapPlace const place = p.places[tap];
  if (place.set == TapPlace::kNone) return -1;
  int const rows = p.rows[place.set], block = k / p.segment;
  int64_t const first =
      (int64_t(p.first_row[place.set]) * p.channel_blocks + int64_t(block) * rows) * p.chunks;
  return first + int64_t(chunk) * rows + place.row + (k - block * p.segment);
}

// A piece: 16 bytes of a row, swizzled by the row's number in its block, which begins at a whole
// eight.
template <class T>
__device__ __forceinline__ void store_piece(int64_t row, int piece,
                                            device::Pack<T, kVector<T>> const& pack,
                                            unsigned char* filter) {
  if (row < 0) return;
  pack.store(
      reinterpret_cast<T*>(filter + row * kChunkBytes + (piece ^ int(row % 8)) * kPieceBytes));
}

template <class T, bool kRounds>
__device__ __forceinline__ T packed(T value) {
  if constexpr (kRounds) value = device::round_to_tf32(value);
  return value;
}

// One thread for a piece. Neighbouring threads have the taps and columns of the same channels,
// which are neighbours in a dense weight.
template <class T, bool kRounds>
__global__ void __launch_bounds__(kPackThreads)
    pack_filter_kernel(__grid_constant__ PackParams const p, uint32_t count,
                       T const* __restrict__ weight, unsigned char* __restrict__ filter) {
  device::release_early();
  for (uint32_t i = blockIdx.x * kPackThreads + threadIdx.x; i < count;
       i += gridDim.x * kPackThreads) {
    uint32_t rest = i;
    auto const take = [&rest](int64_t extent) {
      int const result = int(rest % uint32_t(extent));
      rest /= uint32_t(extent);
      return result;
    };
    int const tap = take(p.taps), k = take(p.padded_channels), piece = take(kPieces);
    int const chunk = int(rest);
    int64_t const at = k * p.source.stride_k + p.offset_of(tap);
    device::Pack<T, kVector<T>> pack;
#pragma unroll
    for (int c = 0; c < kVector<T>; ++c) {
      int const channel = (chunk * kPieces + piece) * kVector<T> + c;
      T value = T(0.0f);
      if (k < p.output_channels && channel < p.channels) {
        value = weight[at + channel * p.source.stride_c];
      }
      pack.values[c] = packed<T, kRounds>(value);
    }
    store_piece(row_of(p, tap, k, chunk), piece, pack, filter);
  }
}

// The same of a weight whose channels are neighbours, whole vectors of them: one thread for a
// piece, and eight for those of a row.
template <class T, bool kRounds>
__global__ void __launch_bounds__(kPackThreads)
    pack_filter_rows_kernel(__grid_constant__ PackParams const p, uint32_t count,
                            T const* __restrict__ weight, unsigned char* __restrict__ filter) {
  device::release_early();
  uint32_t const i = blockIdx.x * kPackThreads + threadIdx.x;
  if (i >= count) return;
  int const piece = int(i % kPieces), k = int(i / kPieces % p.padded_channels);
  uint32_t const rest = i / (kPieces * p.padded_channels);
  int const tap = int(rest % p.taps), chunk = int(rest / p.taps);
  int const channel = (chunk * kPieces + piece) * kVector<T>;
  device::Pack<T, kVector<T>> pack;
  if (k < p.output_channels && channel < p.channels) {
    pack = device::Pack<T, kVector<T>>::load(weight + k * p.source.stride_k + p.offset_of(tap) +
                                             channel);
  }
#pragma unroll
  for (T& value : pack.values) value = packed<T, kRounds>(value);
  store_piece(row_of(p, tap, k, chunk), piece, pack, filter);
}

// Elements that follow each other in a weight, which a thread loads at once.
constexpr int kRun = 4;

// The same of a dense weight whose channels lie farthest apart: output channels, with all taps of
// each, or with kTapsFirst taps with all output channels, follow each other. A thread transposes a
// run of them for the channels of a piece, and eight threads have the pieces of its rows.
template <class T, bool kRounds, bool kTapsFirst>
__global__ void __launch_bounds__(kPackThreads)
    pack_filter_runs_kernel(__grid_constant__ PackParams const p, uint32_t count,
                            T const* __restrict__ weight, unsigned char* __restrict__ filter) {
  device::release_early();
  uint32_t const i = blockIdx.x * kPackThreads + threadIdx.x;
  if (i >= count) return;
  uint32_t const runs = uint32_t(p.padded_channels) * p.taps / kRun;
  int const piece = int(i % kPieces), chunk = int(i / kPieces / runs);
  int const first = int(i / kPieces % runs) * kRun;
  int tap = 0, k = 0;
  int64_t at = first;
  bool present = first < p.output_channels * p.taps;
  if constexpr (kTapsFirst) {
    tap = first / p.padded_channels;
    k = first % p.padded_channels;
    at = tap * int64_t(p.output_channels) + k;
    present = k < p.output_channels;
  }
  device::Pack<T, kRun> loaded[kVector<T>];
#pragma unroll
  for (int c = 0; c < kVector<T>; ++c) {
    int const channel = (chunk * kPieces + piece) * kVector<T> + c;
    if (present && channel < p.channels) {
      loaded[c] = device::Pack<T, kRun>::load(weight + channel * p.source.stride_c + at);
    }
  }
  int64_t row = kTapsFirst ? row_of(p, tap, k, chunk) : 0;
#pragma unroll
  for (int j = 0; j < kRun; ++j) {
    device::Pack<T, kVector<T>> pack;
#pragma unroll
    for (int c = 0; c < kVector<T>; ++c) pack.values[c] = packed<T, kRounds>(loaded[c].values[j]);
    if constexpr (!kTapsFirst) row = row_of(p, (first + j) % p.taps, (first + j) / p.taps, chunk);
    store_piece(row, piece, pack, filter);
    if (kTapsFirst && row >= 0) ++row;
  }
}

// Lines of output channels, swizzled as copies of such lines are: a thread has the pieces of a
// channel at kTogether taps that follow each other in the weight.
template <class T, int kTogether>
__global__ void __launch_bounds__(kPackThreads)
    pack_filter_lines_kernel(__grid_constant__ PackParams const p, uint32_t count,
                             T const* __restrict__ weight, unsigned char* __restrict__ filter) {
  device::release_early();
  uint32_t const i = blockIdx.x * kPackThreads + threadIdx.x;
  if (i >= count) return;
  uint32_t const groups = p.taps / kTogether, pieces = p.padded_channels / kVector<T>;
  int const tap = int(i % groups) * kTogether, k = int(i / groups % pieces) * kVector<T>;
  int const channel = int(i / groups / pieces);
  T const* const source = weight + channel * p.source.stride_c + p.offset_of(tap);
  device::Pack<T, kTogether> loaded[kVector<T>];
#pragma unroll
  for (int j = 0; j < kVector<T>; ++j) {
    if (k + j < p.output_channels && channel < p.channels) {
      loaded[j] = device::Pack<T, kTogether>::load(source + (k + j) * p.source.stride_k);
    }
  }
  constexpr int kChunk = kChunkBytes / int(sizeof(T));
  int const chunk = channel / kChunk, within = k % p.segment, line = within / p.line;
  int const line_bytes = p.line * int(sizeof(T));
  uint32_t at = line * p.line * kChunkBytes + (channel - chunk * kChunk) * line_bytes +
                (within - line * p.line) * int(sizeof(T));
  at ^= (at >> 7 & (line_bytes / kPieceBytes - 1)) * kPieceBytes;
#pragma unroll
  for (int t = 0; t < kTogether; ++t) {
    int64_t const row = row_of(p, tap + t, k - within, chunk);
    if (row < 0) continue;
    device::Pack<T, kVector<T>> pack;
#pragma unroll
    for (int j = 0; j < kVector<T>; ++j) pack.values[j] = loaded[j].values[t];
    pack.store(reinterpret_cast<T*>(filter + row * kChunkBytes + at));
  }
}

// How a weight's elements follow each other, as far as it matters.
enum class Order { kAny, kRows, kRuns, kTapsFirst };

Order order_of(PackParams const& p, void const* weight, int vector) {
  FilterSource const& f = p.source;
  int64_t const taps = f.taps();
  if (!device::is_aligned(weight, kPieceBytes)) return Order::kAny;
  if (f.stride_c == 1 && f.c % vector == 0) {
    return lines_begin_at(f, vector) ? Order::kRows : Order::kAny;
  }
  if (f.stride_c != f.k * taps || f.stride_c % kRun != 0) return Order::kAny;
  // Padded output channels are whole eights.
  if (f.stride_k == taps && taps_follow(f, 1)) return Order::kRuns;
  return f.stride_k == 1 && taps_follow(f, f.k) && f.k % kRun == 0 ? Order::kTapsFirst
                                                                   : Order::kAny;
}

// Whether a thread loads kRun taps of an output channel at once.
bool loads_taps(FilterSource const& f, void const* weight, int element_bytes) {
  return f.taps() % kRun == 0 && taps_follow(f, 1) && f.stride_k % kRun == 0 &&
         f.stride_c % kRun == 0 && device::is_aligned(weight, kRun * element_bytes);
}

void place_taps(Config const& config, PackParams& p) {
  Schedule const& s = config.schedule;
  Shape const& shape = config.row->shape;
  if (s.direction == Direction::kGathers) {
    p.rows[0] = s.sets[0].rows;
    for (std::size_t tap = 0; tap < s.taps.size(); ++tap) {
      p.places[tap] = {.row = uint16_t(tap * shape.columns), .set = 0};
    }
    return;
  }
  for (std::size_t number = 0; number < s.sets.size(); ++number) {
    PhaseSet const& set = s.sets[number];
    p.first_row[number] = set.first_row;
    p.rows[number] = set.rows;
    for (int i = 0; i < set.count; ++i) {
      int row = 0;  // of the set's tap
      for (int tap = set.first_tap; tap < set.first_tap + set.taps; ++tap) {
        uint32_t const mask = s.masks[tap];
        if ((mask >> i & 1) != 0) {
          int const before = std::popcount(mask & ((1u << i) - 1));
          p.places[s.filter_taps[s.first_filter_taps[tap] + before]] = {
              .row = uint16_t(row + before * s.segment), .set = uint16_t(number)};
        }
        row += shape.segments == 1 ? shape.columns : std::popcount(mask) * shape.segment_columns();
      }
    }
  }
}

}  // namespace

void pack_filter(Config const& config, FilterSource const& source, void const* weight, void* filter,
                 cudaStream_t stream) {
  Schedule const& s = config.schedule;
  if (s.filter_bytes == 0) return;
  PackParams p{};
  p.source = source;
  p.taps = int(source.t * source.r * source.s);
  p.channels = int(source.c);
  p.output_channels = int(source.k);
  p.padded_channels = s.segment * s.channel_blocks;
  p.segment = s.segment;
  p.channel_blocks = s.channel_blocks;
  p.chunks = s.chunks;
  place_taps(config, p);
  p.line = s.line;
  int const element = config.traits().element_bytes();
  int const vector = kPieceBytes / element;
  Order const order = order_of(p, weight, vector);
  // Of rows or of any order a thread has a piece.
  bool const runs = order == Order::kRuns || order == Order::kTapsFirst;
  bool const lines = s.line > 0, together = lines && loads_taps(source, weight, element);
  int64_t const count = (lines ? together : runs) ? s.filter_pieces / kRun : s.filter_pieces;
  int64_t const wanted = ceil_div(count, kPackThreads);
  bool const strides = order == Order::kAny && !lines;
  int const blocks = int(strides ? std::min<int64_t>(wanted, kMaxBlocks) : wanted);
  device::dispatch_type(config.traits().dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr bool kRounds = sizeof(T) == 4;
    auto const kernel = lines && together            ? pack_filter_lines_kernel<T, kRun>
                        : lines                      ? pack_filter_lines_kernel<T, 1>
                        : order == Order::kRows      ? pack_filter_rows_kernel<T, kRounds>
                        : order == Order::kRuns      ? pack_filter_runs_kernel<T, kRounds, false>
                        : order == Order::kTapsFirst ? pack_filter_runs_kernel<T, kRounds, true>
                                                     : pack_filter_kernel<T, kRounds>;
    device::launch(kernel, blocks, kPackThreads, 0, stream, p, uint32_t(count),
                   static_cast<T const*>(weight), static_cast<unsigned char*>(filter));
  });
  FUSEDCONV_CUDA(detail::join(config.row->name, ": pack filter"), cudaGetLastError());
}

}  // namespace fusedconv::conv::sm90::boxes
