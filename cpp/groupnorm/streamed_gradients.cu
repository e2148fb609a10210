// stream.hpp has the procedure; statistics here are the sums that gradient.hpp names.
#include "groupnorm/streamed_gradients.hpp"

#include "cuda/math.hpp"
#include "cuda/sum.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"
#include "groupnorm/affine.hpp"
#include "groupnorm/gradient_images.hpp"
#include "groupnorm/gradient_lines.hpp"
#include "groupnorm/gradient_tiles.hpp"
#include "groupnorm/launch.hpp"
#include "groupnorm/stream_device.hpp"

namespace fusedconv::groupnorm {
namespace {

using device::Pack;
using device::RingCursor;
using device_stream::Extent;
using device_stream::first_word;
using device_stream::participant;
using device_stream::participants;
using device_stream::publish;
using device_stream::unpacked;
using device_stream::wait_asleep;
using device_stream::Walk;
using device_stream::Words;

constexpr int kStoreWarps = 4;
// Else a warp might take the end of a stage's use for that of its next one.
static_assert(kStoreWarps <= kTilesToShared);
// Nor may a group that takes every third tile, of stages, images, sums and units' terms.
static_assert(kReplacerGroups <= kTilesToShared && kReplacerGroups <= kImages);
static_assert(kSummerGroups <= kTilesToShared && kSummerGroups <= kPartials);
constexpr int kFirstReplacer = kSummerGroups * kSummers;
constexpr int kFirstAlone = kFirstReplacer + kReplacerGroups * kReplacers;  // of no such group
constexpr int kThreadsPerBlock = kFirstAlone + 3 * 32 + kStoreWarps * 32;

// The gradients of a tile's vector of 16 bytes of input; stage: where the tile begins.
template <class T, class G>
__device__ __forceinline__ Pack<G, 16 / sizeof(T)> gradients_at(unsigned char const* stage,
                                                                Tile const& tile, int vector) {
  constexpr int kWide = sizeof(G) / sizeof(T);
  unsigned char const* const first =
      stage + share_bytes(1 + kWide) + tile.lead * (16 * (kWide - 1));
  return Pack<G, 16 / sizeof(T)>::load(reinterpret_cast<G const*>(first + vector * (16 * kWide)));
}

// Of a tile, a thread's share of the sums of g and g xhat.
template <class T, class G, int kKnown>
__device__ __forceinline__ float2 sums_of(Tile const& tile, GradientAffine const& affine,
                                          Stream const& s, unsigned char const* stage, int thread) {
  constexpr int kVector = 16 / sizeof(T);
  // Where only distances from the mean are summed, their sum is scaled; of 16 bits values are
  // summed, and the mean is taken off once. What that loses is what GradientMap::of_value() does.
  constexpr bool kSumsValues = !kIsBehind<kKnown> && sizeof(T) == 2;
  Channel channel = tile.channel;
  if constexpr (!kIsBehind<kKnown>) channel.rstd = 1.0f;
  if constexpr (kSumsValues) channel.mean = 0.0f;
  float2 sums{};
  for_vectors<kSummers>(tile, thread, [&](int vector, bool is_ragged) {
    auto x = Pack<T, kVector>::load(reinterpret_cast<T const*>(stage + vector * 16));
    auto g = gradients_at<T, G>(stage, tile, vector);
    if (is_ragged) {
      clear_others(tile, s, vector, x.values);
      clear_others(tile, s, vector, g.values);
    }
    Point points[kVector];
    points_of<kKnown>(x, g, [&](int) { return channel; }, affine, points);
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      sums.x += points[e].gradient;
      sums.y = fmaf(points[e].gradient, points[e].normalized, sums.y);
    }
  });
  if constexpr (kSumsValues) sums.y = fmaf(-tile.channel.mean, sums.x, sums.y);
  return sums;
}

// kSummers threads, of group `group`, sum g and g xhat of each tile, which has one channel, for
// add_sums().
template <class T, class G, int kKnown>
__device__ __forceinline__ void take_sums(GradientAffine const& affine, Stream const& s,
                                          GradientShared& shared, unsigned char const* ring,
                                          int group, int thread) {
  RingCursor cursor;
  cursor.skip(group, s.stages);
  RingCursor taking;
  taking.skip(group, kPartials);
  int const tiles = int(device_stream::tiles_of_block(s));
  for (int i = group; i < tiles; i += kSummerGroups) {
    wait_asleep(&shared.barriers.full[cursor.stage], cursor.parity);
    Tile const tile = shared.tiles[cursor.stage];
    unsigned char const* const stage = ring + cursor.stage * kStageBytes + tile.lead * 16;
    float2 const sums = sums_of<T, G, kKnown>(tile, affine, s, stage, thread);
    wait_asleep(&shared.added[taking.stage], taking.parity ^ 1);
    shared.partial[taking.stage][thread] = sums;
    device::arrive(&shared.summed[taking.stage]);
    __syncwarp();
    if (thread % 32 == 0) device::arrive(&shared.barriers.free[cursor.stage]);
    cursor.step(kSummerGroups, s.stages);
    taking.step(kSummerGroups, kPartials);
  }
}

// One warp adds up each tile's sums, and publishes the block's share of each unit's weighted sums.
template <int kKnown>
__device__ __forceinline__ void add_sums(Stream const& s, GradientShared& shared,
                                         float2* __restrict__ partials, uint64_t* words, int lane) {
  RingCursor cursor;
  RingCursor adding;
  int unit_stage = 0;
  float2 weighted{};
  for (int64_t left = device_stream::tiles_of_block(s); left > 0; --left) {
    wait_asleep(&shared.summed[adding.stage], adding.parity);
    Tile const tile = shared.tiles[cursor.stage];
    float2 sums{};
#pragma unroll
    for (int i = 0; i < kSummers / 32; ++i) {
      float2 const share = shared.partial[adding.stage][32 * i + lane];
      sums.x += share.x;
      sums.y += share.y;
    }
    device::arrive(&shared.added[adding.stage]);
    device::arrive(&shared.barriers.free[cursor.stage]);
    sums = warp_sum(sums);
    if constexpr (!kIsBehind<kKnown>) sums.y *= tile.channel.rstd;
    if (lane == 0) partials[int64_t(tile.unit) * s.tiles + tile.index] = sums;
    weighted.x = fmaf(tile.channel.weight, sums.x, weighted.x);
    weighted.y = fmaf(tile.channel.weight, sums.y, weighted.y);
    if (tile.is_last) {
      weighted = {__shfl_sync(~0u, weighted.x, 0), __shfl_sync(~0u, weighted.y, 0)};
      if (lane < s.copies) {
        publish(words + first_word<kSumsWords>(s, lane, tile.unit) + participant(s, tile.index),
                weighted.x, weighted.y);
      }
      if (lane == 0) device::arrive(&shared.barriers.taken[unit_stage]);
      weighted = {};
      unit_stage = (unit_stage + 1) % kUnitStages;
    }
    cursor.advance(s.stages);
    adding.advance(kPartials);
  }
}

// One warp adds up all participants' shares of each unit, in the same order in every block. A
// unit's shares are asked for before the one before is added up: units come faster than words do.
__device__ __forceinline__ void merge_units(Stream const& s, float elements, GradientShared& shared,
                                            uint64_t const* words) {
  int const count = participants(s);
  float const share = 1.0f / elements;
  auto const words_of = [&](Walk const& walk) {
    return words + first_word<kSumsWords>(s, int(device_stream::member(s)) % s.copies, walk.unit);
  };
  RingCursor unit;
  Words<kSumsWords> asked;
  Walk walk(s);
  if (walk.valid(s)) asked.ask(words_of(walk), count);
  while (walk.valid(s)) {
    wait_asleep(&shared.barriers.taken[unit.stage], unit.parity);
    asked.complete(words_of(walk));
    auto const gathered = asked;
    unsigned const current = walk.unit;
    while (walk.valid(s) && walk.unit == current) walk.advance(s);
    if (walk.valid(s)) asked.ask(words_of(walk), count);
    float2 total{};
#pragma unroll
    for (int i = 0; i < kPolls; ++i) {
      float2 const value = unpacked(gathered.values[i][0]);
      total.x += value.x;
      total.y += value.y;
    }
    total = warp_sum(total);
    if (threadIdx.x % 32 == 0) {
      shared.terms[unit.stage] = {total.x * share, total.y * share};
      device::arrive(&shared.barriers.merged[unit.stage]);
    }
    unit.advance(kUnitStages);
  }
}

// A thread's share of a tile's input gradients, by put(vector, results), and their sum.
template <class T, class G, int kKnown, class Put>
__device__ __forceinline__ float replace(Tile const& tile, GroupTerms const& terms,
                                         GradientAffine const& affine, Stream const& s,
                                         unsigned char const* stage, int thread, Put const& put) {
  constexpr int kVector = 16 / sizeof(T);
  float sum = 0.0f;
  for_vectors<kReplacers>(tile, thread, [&](int vector, bool is_ragged) {
    auto const x = Pack<T, kVector>::load(reinterpret_cast<T const*>(stage + vector * 16));
    auto const g = gradients_at<T, G>(stage, tile, vector);
    float results[kVector];
    grad_inputs_of<kKnown>(
        x, g, [&](int) { return tile.channel; }, [&](int) { return terms; }, affine, results);
    put(vector, Pack<T, kVector>::of(results));
    if (is_ragged) clear_others(tile, s, vector, results);
#pragma unroll
    for (int e = 0; e < kVector; ++e) sum += results[e];
  });
  return sum;
}

// kReplacers threads, of group `group`, replace the input by its gradient, whose sums over a warp's
// share of each tile go to `sums`, unless that is null. kPiece: of an image, elements that are put
// at once; 0 where tiles have none.
template <class T, class G, int kKnown, int kPiece>
__device__ __forceinline__ void replace_tiles(GradientAffine const& affine, Stream const& s,
                                              GradientShared& shared, unsigned char* ring,
                                              float* __restrict__ sums, bool is_for_warps,
                                              int group, int thread) {
  RingCursor cursor;
  cursor.skip(group, s.stages);
  constexpr bool kHasImages = kPiece > 0;
  RingCursor filling;
  filling.skip(group, kImages);
  int const tiles = int(device_stream::tiles_of_block(s));
  for (int i = group; i < tiles; i += kReplacerGroups) {
    wait_asleep(&shared.barriers.full[cursor.stage], cursor.parity);
    Tile const tile = shared.tiles[cursor.stage];
    unsigned const unit = tile.ordinal % kUnitStages;
    wait_asleep(&shared.barriers.merged[unit], tile.ordinal / kUnitStages % 2);
    GroupTerms const terms = shared.terms[unit];
    unsigned char* const stage = ring + cursor.stage * kStageBytes + tile.lead * 16;
    if (kHasImages) wait_asleep(&shared.emptied[filling.stage], filling.parity ^ 1);
    uint32_t const image = device::shared_address(ring + s.stages * kStageBytes) +
                           filling.stage * kImageBytes + kImageStart;
    auto const put = [&](int vector, auto const& results) {
      if constexpr (kHasImages) {
        scatter<T, kPiece>(results, tile, s, image, vector);
      } else {
        results.store(reinterpret_cast<T*>(stage + vector * 16));
      }
    };
    float sum = replace<T, G, kKnown>(tile, terms, affine, s, stage, thread, put);
    if (kHasImages) {
      device::fence_async_proxy();
      device::arrive(&shared.barriers.free[cursor.stage]);
      device::arrive(&shared.filled[filling.stage]);
      filling.step(kReplacerGroups, kImages);
    } else {
      shared.barriers.finish(cursor.stage, is_for_warps);
    }
    cursor.step(kReplacerGroups, s.stages);
    if (sums == nullptr) continue;
    sum = device::warp_total(sum);
    if (thread % 32 == 0) {
      sums[(int64_t(tile.unit) * s.tiles + tile.index) * (kReplacers / 32) + thread / 32] = sum;
    }
  }
}

// kStoreWarps warps, a tile each, store the results line by line, together no faster than
// store_tiles() does: whole vectors where the output has them, which in the tile begin at any
// multiple of kPiece elements.
template <class T, int kPiece>
__device__ __forceinline__ void store_lines(T* output, Lines const& lines, Stream const& s,
                                            GradientShared& shared, unsigned char const* ring,
                                            int warp, int lane) {
  constexpr int kVector = 16 / sizeof(T);
  unsigned const planes = s.tiles / s.run_tiles;  // of a unit
  // Only planes that are one line begin within a vector, and the walk stays in the line.
  bool const is_one_line = lines.columns == int(s.run_elements);
  int const line_vectors = is_one_line ? 0x7fffffff : (lines.columns + kVector - 1) / kVector;
  int const step_lines = 32 / line_vectors;
  int const step_vectors = 32 - step_lines * line_vectors;
  int64_t const tiles = device_stream::tiles_of_block(s);
  // A warp waits for its own tiles alone: until it has freed a tile's stage, no other tile is
  // there. When it waits for its next one, all up to its last have landed; the tile before in the
  // next one's stage is finished once that has landed, other groups' earlier tiles may not be.
  RingCursor cursor;
  cursor.skip(warp, s.stages);
  uint64_t latest = 0;
  for (int64_t i = warp; i < tiles; i += kStoreWarps) {
    wait_asleep(&shared.barriers.full[cursor.stage], cursor.parity);
    wait_asleep(&shared.barriers.done[cursor.stage], cursor.parity);
    while (device_stream::nanoseconds() - latest < kStoreWarps * s.pace) {
    }
    latest = device_stream::nanoseconds();
    Tile const& tile = shared.tiles[cursor.stage];
    Extent const extent = tile.extent;
    int const first = max(extent.element, 0);
    int const end =
        min(extent.element + int(extent.vectors << s.vector_shift), int(s.run_elements));
    auto const* const values =
        reinterpret_cast<T const*>(ring + cursor.stage * kStageBytes + tile.lead * 16) -
        extent.element;
    T* const plane = output + (int64_t(tile.unit) * planes + extent.run) * lines.plane;
    int const skew =
        is_one_line ? int(reinterpret_cast<uintptr_t>(plane) / sizeof(T) % kVector) : 0;
    int line = first / lines.columns;
    int vector = (first - line * lines.columns + skew) / kVector + lane;
    int const skipped = vector / line_vectors;
    line += skipped;
    vector -= skipped * line_vectors;
#pragma unroll 2
    while (true) {
      int const column = vector * kVector - skew;
      int const at = line * lines.columns + column;
      if (at >= end) break;
      T* const target = plane + line * lines.pitch + column;
      // The tile's, and the line's, elements of the vector.
      int const low = first - at;
      int const high = min(end - at, lines.columns - column);
      if (low <= 0 && high >= kVector) {
        Pack<T, kVector> whole;
#pragma unroll
        for (int e = 0; e < kVector; e += kPiece) {
          auto const piece = Pack<T, kPiece>::load(values + at + e);
#pragma unroll
          for (int j = 0; j < kPiece; ++j) whole.values[e + j] = piece.values[j];
        }
        whole.store(target);
      } else {
#pragma unroll
        for (int e = 0; e < kVector; e += kPiece) {
          if (e >= low && e < high) Pack<T, kPiece>::load(values + at + e).store(target + e);
        }
      }
      line += step_lines;
      vector += step_vectors;
      if (vector >= line_vectors) {
        vector -= line_vectors;
        ++line;
      }
    }
    device::arrive(&shared.barriers.free[cursor.stage]);
    cursor.skip(kStoreWarps, s.stages);
  }
}

template <class T, class G, int kKnown>
__global__ void __launch_bounds__(kThreadsPerBlock, 1)
    gradients_stream(uint4 const* input, uint4 const* grad, uint4* output, GradientAffine affine,
                     float2* __restrict__ partials, uint64_t* words, Stream stream, float elements,
                     Lines lines, float* sums) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ GradientShared shared;
  bool const has_images = stream.line_elements > 0;
  TableEntry* const table = device_stream::fill_table<kThreadsPerBlock>(
      affine, ring + (stream.stages + (has_images ? kImageStages : 0)) * kStageBytes);
  shared.init(stream.stages, lines.columns > 0, has_images);
  __syncthreads();
  int const thread = int(threadIdx.x);
  if (thread < kFirstReplacer) {
    take_sums<T, G, kKnown>(affine, stream, shared, ring, thread / kSummers, thread % kSummers);
  } else if (thread < kFirstAlone) {
    auto const replace = [&](auto piece) {
      replace_tiles<T, G, kKnown, decltype(piece)::value>(
          affine, stream, shared, ring, sums, lines.columns > 0,
          (thread - kFirstReplacer) / kReplacers, (thread - kFirstReplacer) % kReplacers);
    };
    if (!has_images) {
      replace(std::integral_constant<int, 0>{});
    } else if (stream.line_elements % 2 == 0) {
      replace(std::integral_constant<int, 2>{});
    } else {
      replace(std::integral_constant<int, 1>{});
    }
  } else if (thread < kFirstAlone + 32) {
    merge_units(stream, elements, shared, words);
  } else if (thread < kFirstAlone + 64) {
    device_stream::load_tiles<kStreamedTensors, int(sizeof(G) / sizeof(T))>(
        {input, grad}, stream, shared.barriers, ring, shared.tiles,
        [&](unsigned tile) {
          return stream.line_elements > 0 ? Extent::of_lines(stream, tile)
                                          : Extent::of(stream, tile);
        },
        [&](Walk const& walk, Extent const& extent, auto const& units) {
          return tile_of(affine, stream, table, walk, extent, units);
        });
  } else if (thread < kFirstAlone + 96) {
    add_sums<kKnown>(stream, shared, partials, words, thread % 32);
  } else if (thread >= kFirstAlone + 96 && lines.columns > 0) {
    dispatch_piece(lines, [&](auto piece) {
      store_lines<T, decltype(piece)::value>(reinterpret_cast<T*>(output), lines, stream, shared,
                                             ring, (thread - kFirstAlone) / 32 - 3, thread % 32);
    });
  } else if (thread < kFirstAlone + 128 && stream.line_elements > 0) {
    store_images<T>(output, stream, shared, ring);
  } else if (thread == kFirstAlone + 96) {
    device_stream::store_tiles(output, stream, shared.barriers, ring);
  }
#else
  __trap();
#endif
}

template <class T, class G, int kKnown>
void launch(StreamedConfig const& config, GroupNormProblem const& p, GradientTensors const& tensors,
            float2* partials, uint64_t* words, cudaStream_t stream) {
  auto const* input = static_cast<uint4 const*>(tensors.input);
  auto const* grad = static_cast<uint4 const*>(tensors.grad_output);
  auto* output = static_cast<uint4*>(tensors.grad_input);
  GradientAffine affine = gradient_affine_of(p, tensors);
  Stream s = config.stream;
  float elements = float(p.group_size());
  // Bulk copies store dense planes, of whole vectors: else some would go to a plane's neighbours.
  Lines lines = Lines::of(p, tensors);
  if (cut_in_lines<16 / int(sizeof(T))>(s, lines, 1 + int(sizeof(G) / sizeof(T)))) {
    lines = {};
  } else if (lines.columns == lines.pitch) {
    bool const whole = p.pixels % (16 / int(sizeof(T))) == 0;
    lines = whole ? Lines{} : Lines{int(p.pixels), int(p.pixels), p.pixels};
  }
  float* sums = tensors.sums;
  void* arguments[] = {&input, &grad, &output,   &affine, &partials,
                       &words, &s,    &elements, &lines,  &sums};
  device_stream::launch("streamed_gradients", gradients_stream<T, G, kKnown>, kThreadsPerBlock,
                        config, arguments, stream);
}

}  // namespace

void streamed_gradients(StreamedGradientConfig const& config, GroupNormProblem const& p,
                        GradientTensors const& tensors, float2* partials, void* workspace,
                        cudaStream_t stream) {
  FUSEDCONV_CHECK(
      device::is_aligned(tensors.input, 16) && device::is_aligned(tensors.grad_output, 16) &&
          device::is_aligned(tensors.grad_input, 16),
      "streamed_gradients: input, grad_output or grad_input is not aligned to 16 bytes");
  FUSEDCONV_CUDA("streamed_gradients",
                 cudaMemsetAsync(workspace, 0xff, config.streamed.words_bytes(), stream));
  dispatch_gradient_kernel(p, [&](auto zero, auto grad, auto active) {
    using T = decltype(zero);
    using G = decltype(grad);
    auto const start = [&](auto known) {
      launch<T, G, known.value>(config.streamed, p, tensors, partials,
                                static_cast<uint64_t*>(workspace), stream);
    };
    if constexpr (sizeof(T) == 4 && active.value) {
      if (known_activations(p) == kGeluBefore) {
        return start(std::integral_constant<int, kGeluBefore>{});
      }
    }
    dispatch_known<active.value, kQuickGeluBefore, kQuickGeluAfter, kQuickSiluBefore,
                   kQuickSiluAfter, kReluBefore, kReluAfter>(p, start);
  });
}

}  // namespace fusedconv::groupnorm
