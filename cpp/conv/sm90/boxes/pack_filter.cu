#include <algorithm>

#include "conv/sm90/boxes/params.hpp"
#include "conv/sm90/boxes/passes.hpp"
#include "cuda/launch.hpp"
#include "cuda/math.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::boxes {
namespace {

constexpr int kPackThreads = 256;
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
  int first_row[kMostPhases], rows[kMostPhases];  // by set
  TapPlace places[kMostFilterTaps];
};

// One thread for 16 bytes of a column's channels at a tap. Neighbouring threads have the taps and
// columns of the same channels, which are neighbours in a dense weight.
template <class T, bool kRounds>
__global__ void __launch_bounds__(kPackThreads)
    pack_filter_kernel(__grid_constant__ PackParams const p, uint32_t count,
                       T const* __restrict__ weight, unsigned char* __restrict__ filter) {
  constexpr int kVector = kPieceBytes / int(sizeof(T));
  constexpr int kPieces = kChunkBytes / kPieceBytes;
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
    TapPlace const place = p.places[tap];
    if (place.set == TapPlace::kNone) continue;
    int64_t const at = k * p.source.stride_k + tap % p.source.s * p.source.stride_s +
                       tap / p.source.s % p.source.r * p.source.stride_r +
                       tap / (p.source.s * p.source.r) * p.source.stride_t;
    device::Pack<T, kVector> pack;
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      int const channel = (chunk * kPieces + piece) * kVector + c;
      T value = T(0.0f);
      if (k < p.output_channels && channel < p.channels) {
        value = weight[at + channel * p.source.stride_c];
      }
      if constexpr (kRounds) value = device::round_to_tf32(value);
      pack.values[c] = value;
    }
    int const rows = p.rows[place.set];
    int64_t const first =
        (int64_t(p.first_row[place.set]) * p.channel_blocks + int64_t(k / p.segment) * rows) *
        p.chunks;
    int64_t const row = first + int64_t(chunk) * rows + place.row + k % p.segment;
    // Swizzled by the row's number in its block, which begins at a whole eight.
    pack.store(
        reinterpret_cast<T*>(filter + row * kChunkBytes + (piece ^ int(row % 8)) * kPieceBytes));
  }
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
  auto const& axes = s.axes;
  for (std::size_t number = 0; number < s.sets.size(); ++number) {
    PhaseSet const& set = s.sets[number];
    p.first_row[number] = set.first_row;
    p.rows[number] = set.rows;
    for (int i = 0; i < set.count; ++i) {
      int row = 0;  // of the set's tap
      for (int tap = set.first_tap; tap < set.first_tap + set.taps; ++tap) {
        uint32_t const mask = s.masks[tap];
        if ((mask >> i & 1) != 0) {
          int filter_tap = 0;
          for (int a = 0; a < kMaxAxes; ++a) {
            Phase const phase = axes[a].phase(s.phases[set.first + i][a]);
            int const j = (phase.shift - s.taps[tap][a]) / axes[a].sub_dilation;
            filter_tap =
                filter_tap * axes[a].problem.kernel + phase.first_tap + j * axes[a].tap_step;
          }
          int const before = shape.segments == 1 ? i : std::popcount(mask & ((1u << i) - 1));
          p.places[filter_tap] = {.row = uint16_t(row + before * s.segment),
                                  .set = uint16_t(number)};
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
  int const blocks = int(std::min<int64_t>(ceil_div(s.filter_pieces, kPackThreads), kMaxBlocks));
  device::dispatch_type(config.traits().dtype, [&](auto zero) {
    using T = decltype(zero);
    device::launch(pack_filter_kernel<T, sizeof(T) == 4>, blocks, kPackThreads, 0, stream, p,
                   uint32_t(s.filter_pieces), static_cast<T const*>(weight),
                   static_cast<unsigned char*>(filter));
  });
  FUSEDCONV_CUDA(detail::join(config.row->name, ": pack filter"), cudaGetLastError());
}

}  // namespace fusedconv::conv::sm90::boxes
