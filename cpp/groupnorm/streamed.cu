// stream.hpp has the procedure; statistics here are moments.
#include "groupnorm/streamed.hpp"

#include <algorithm>
#include <iterator>
#include <type_traits>

#include "cuda/math.hpp"
#include "cuda/pair_sums.hpp"
#include "cuda/sum.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"
#include "groupnorm/affine.hpp"
#include "groupnorm/half_gelu.hpp"
#include "groupnorm/launch.hpp"
#include "groupnorm/moments.hpp"
#include "groupnorm/running_moments.hpp"
#include "groupnorm/stream_device.hpp"
#include "groupnorm/stream_tiles.hpp"

namespace fusedconv::groupnorm {
namespace {

using device::Moments;
using device::Pack;
using device::RingCursor;
using device_stream::Extent;
using device_stream::first_word;
using device_stream::Held;
using device_stream::KindOf;
using device_stream::kMergers;
using device_stream::kPartials;
using device_stream::kThreadsPerBlock;
using device_stream::participant;
using device_stream::participants;
using device_stream::Place;
using device_stream::place_of;
using device_stream::publish;
using device_stream::StreamShared;
using device_stream::unpacked;
using device_stream::Walk;
using device_stream::Words;

// A vector of a tile, from where that was loaded.
template <class Kind>
__device__ __forceinline__ void load_activated(Place const& tile, unsigned vector,
                                               Affine const& affine,
                                               float (&values)[Kind::kVector]) {
  using T = typename Kind::T;
  Pack<T, Kind::kVector>::load(reinterpret_cast<T const*>(tile.source + vector)).to_floats(values);
  activate_in_front<Kind::kKnown>(affine, values);
}

// kWorkers threads normalise tiles in cursor.
template <class Kind>
__device__ __forceinline__ void normalize_tiles(Affine affine, Stream const& s,
                                                StreamShared& shared, unsigned char* ring,
                                                TableEntry const* table, int thread) {
  using T = typename Kind::T;
  constexpr int kVector = Kind::kVector;
  if constexpr (Kind::kActivates) affine.activation_before = Activation::kIdentity;
  auto const normalise = [&](auto& values, auto const& channel, T* place) {
    normalize_values<Kind::kBehind>(values, channel, affine);
    Pack<T, kVector>::of(values).store(place);
  };
  RingCursor cursor;
  unsigned current = ~0u;
  Statistics statistics{};
  for (int64_t left = device_stream::tiles_of_block(s); left > 0; --left) {
    device::wait(&shared.barriers.full[cursor.stage], cursor.parity);
    Place const tile = shared.places[cursor.stage];
    if (tile.ordinal != current) {
      current = tile.ordinal;
      device::wait(&shared.barriers.merged[current % kUnitStages], current / kUnitStages % 2);
      statistics = shared.statistics[current % kUnitStages];
    }
    // That statistics are there says so too, by a way that racecheck does not follow.
    if constexpr (Kind::kActivates) {
      device::wait(&shared.activated[cursor.stage], cursor.parity);
    }
    bool is_wide = false;
    if constexpr (Kind::kKeepsHalves) is_wide = shared.places[cursor.stage].is_wide;
    T* const stage = reinterpret_cast<T*>(ring + cursor.stage * kStageBytes) + thread * kVector;
    auto const constants_of = [&](unsigned channel) {
      TableEntry const entry = table[channel];
      return ChannelAffine::of(statistics, entry.x, entry.y);
    };
    if (tile.vectors == kWorkers * Kind::kVectors && tile.left >= tile.vectors * kVector &&
        !is_wide) {
      // Usual with large planes: full, and of one channel.
      ChannelAffine const constants = constants_of(tile.channel);
      Held<Kind> held[Kind::kVectors];
#pragma unroll
      for (int i = 0; i < Kind::kVectors; ++i) {
        held[i] = Held<Kind>::load(stage + i * kWorkers * kVector);
      }
#pragma unroll
      for (int i = 0; i < Kind::kVectors; ++i) {
        float values[kVector];
        held[i].to_floats(values);
        normalise(values, [&](int) { return constants; }, stage + i * kWorkers * kVector);
      }
    } else {
#pragma unroll 1
      for (unsigned i = thread; i < tile.vectors; i += kWorkers) {
        Place const vector = tile.at(i * kVector, s.plane_elements);
        ChannelAffine const own = constants_of(vector.channel);
        // A plane has a vector's elements at least.
        ChannelAffine const next = vector.left < kVector ? constants_of(vector.channel + 1) : own;
        T* const place = stage + (i - thread) * kVector;
        float values[kVector];
        if (is_wide) {
          load_activated<Kind>(tile, i, affine, values);
        } else {
          Held<Kind>::load(place).to_floats(values);
        }
        normalise(values, [&](int v) { return unsigned(v) < vector.left ? own : next; }, place);
      }
    }
    shared.barriers.finish(cursor.stage, false);
    cursor.advance(s.stages);
  }
}

// A thread's values in kVectors vectors of a stage, activated there first.
template <class Kind, int kVectors>
__device__ __forceinline__ void activated_values(typename Kind::T* stage, Affine const& affine,
                                                 float (&values)[kVectors * Kind::kVector]) {
  using T = typename Kind::T;
  constexpr int kVector = Kind::kVector;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    T* const place = stage + i * kWorkers * kVector;
    float own[kVector];
    Pack<T, kVector>::load(place).to_floats(own);
    if constexpr (Kind::kActivates) {
      activate_in_front<Kind::kKnown>(affine, own);
      Held<Kind>::store(own, place);
    }
#pragma unroll
    for (int v = 0; v < kVector; ++v) values[i * kVector + v] = own[v];
  }
}

// kWorkers threads take moments of the block's part of each unit, each its own, for add_moments().
template <class Kind>
__device__ __forceinline__ void take_moments(Stream const& s, Affine const& affine,
                                             StreamShared& shared, unsigned char* ring,
                                             int thread) {
  using T = typename Kind::T;
  constexpr int kVector = Kind::kVector;
  RingCursor cursor;
  RingCursor taking;
  RunningMoments<T> running;
  for (int64_t left = device_stream::tiles_of_block(s); left > 0; --left) {
    device::wait(&shared.barriers.full[cursor.stage], cursor.parity);
    Place const& tile = shared.places[cursor.stage];
    unsigned const vectors = tile.vectors;
    bool const is_last = tile.is_last;
    T* const stage = reinterpret_cast<T*>(ring + cursor.stage * kStageBytes) + thread * kVector;
    if (vectors == kWorkers * Kind::kVectors) {
      float values[Kind::kVectors * kVector];
      activated_values<Kind, Kind::kVectors>(stage, affine, values);
      running.add(values);
    } else {
#pragma unroll 1
      for (unsigned i = thread; i < vectors; i += kWorkers) {
        float values[kVector];
        activated_values<Kind, 1>(stage + (i - thread) * kVector, affine, values);
        running.add(values);
      }
    }
    if constexpr (Kind::kActivates) device::arrive(&shared.activated[cursor.stage]);
    device::arrive(&shared.barriers.free[cursor.stage]);
    cursor.advance(s.stages);
    if (!is_last) continue;
    device::wait(&shared.added[taking.stage], taking.parity ^ 1);
    Moments const own = running.whole();
    shared.partial[taking.stage][thread] = make_float4(own.count, own.mean, own.low, own.m2);
    device::arrive(&shared.summed[taking.stage]);
    taking.advance(kPartials);
    running = {};
  }
}

// The same in half precision: values are replaced by pairs, and tensor cores sum them up about one
// of the first tile's, for each four lanes of a warp. Where sums of a tile are not finite, or
// values so small that bfloat16 is as fine, a warp takes moments of that tile once more, in
// float32, from where it was loaded.
template <class Kind>
__device__ __forceinline__ void take_moments_of_halves(Stream const& s, Affine const& affine,
                                                       StreamShared& shared, unsigned char* ring,
                                                       int thread) {
  using T = typename Kind::T;
  using Sums = device::PairSums;
  constexpr int kPairs = Kind::kVector / 2;
  static_assert(kPairs == 4, "what sums are added of");
  using Vector = Pack<__half, Kind::kVector>;
  RingCursor cursor;
  RingCursor taking;
  Sums sums;
  RunningMoments<T> wide;
  int vectors = 0;
  float reference = 0.0f;
  bool has_reference = false;  // as a warp
  for (int64_t left = device_stream::tiles_of_block(s); left > 0; --left) {
    device::wait(&shared.barriers.full[cursor.stage], cursor.parity);
    Place& tile = shared.places[cursor.stage];
    unsigned const count = tile.vectors;
    bool const is_last = tile.is_last;
    auto* const stage =
        reinterpret_cast<__half*>(ring + cursor.stage * kStageBytes) + thread * Kind::kVector;
    if (!has_reference && unsigned(thread / 32 * 32) < count) {
      // Of the warp's first lane, which has a vector.
      auto const first = halves::gelu(halves::of_bfloat16(Vector::load(stage).bits[0]));
      float const value = device::to_pair<__half>(__shfl_sync(~0u, first, 0)).x;
      reference = value - value == 0.0f ? value : 0.0f;
      has_reference = true;
    }
    halves::Pair const references = halves::of(reference);
    Sums own;
    auto const replace = [&](Vector vector, __half* place, halves::Pair(&deviations)[kPairs]) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        vector.bits[i] = halves::gelu(halves::of_bfloat16(vector.bits[i]));
        deviations[i] = halves::subtract(vector.bits[i], references);
      }
      vector.store(place);
    };
    int own_vectors = 0;
    if (count == kWorkers * Kind::kVectors) {
      Vector held[Kind::kVectors];
#pragma unroll
      for (int i = 0; i < Kind::kVectors; ++i) {
        held[i] = Vector::load(stage + i * kWorkers * Kind::kVector);
      }
#pragma unroll
      for (int i = 0; i < Kind::kVectors; ++i) {
        halves::Pair deviations[kPairs];
        replace(held[i], stage + i * kWorkers * Kind::kVector, deviations);
        own.add(deviations, deviations);
      }
      own_vectors = Kind::kVectors;
    } else {
      // All lanes of a warp add at once, those beyond the tile zeros.
#pragma unroll 1
      for (unsigned first = 0; first < count; first += kWorkers) {
        halves::Pair deviations[kPairs] = {};
        if (first + thread < count) {
          auto* const place = stage + first * Kind::kVector;
          replace(Vector::load(place), place, deviations);
          ++own_vectors;
        }
        own.add(deviations, deviations);
      }
    }
    constexpr float kSmall = 0x1p-10f;  // of which half precision has ten bits or less
    constexpr float kFour = 4 * Kind::kVectors * Kind::kVector;  // values of four lanes, at most
    bool const is_small =
        fabsf(reference) < kSmall && __all_sync(~0u, own.totals().x < kFour * (kSmall * kSmall));
    if (own.are_finite() && !is_small) {
      sums.add(own);
      vectors += own_vectors;
    } else {
      for (unsigned i = thread; i < count; i += kWorkers) {
        float values[Kind::kVector];
        load_activated<Kind>(tile, i, affine, values);
        wide.add(values);
      }
      tile.is_wide = true;
    }
    device::arrive(&shared.activated[cursor.stage]);
    device::arrive(&shared.barriers.free[cursor.stage]);
    cursor.advance(s.stages);
    if (!is_last) continue;
    float2 const totals = sums.totals();
    float const elements = device::warp_total<4>(float(vectors * Kind::kVector));
    Moments total;
    if (elements > 0.0f) {
      total = device::shifted_moments(elements, reference, totals.y, totals.x);
    }
    if (__any_sync(~0u, wide.count > 0.0f)) total.merge(device::merge_warp<4>(wide.whole()));
    device::wait(&shared.added[taking.stage], taking.parity ^ 1);
    if (thread % 4 == 0) {
      shared.partial[taking.stage][thread / 4] =
          make_float4(total.count, total.mean, total.low, total.m2);
    }
    device::arrive(&shared.summed[taking.stage]);
    taking.advance(kPartials);
    sums = {};
    wide = {};
    vectors = 0;
    has_reference = false;
  }
}

// One warp merges those of all threads, and publishes the block's partial moments of each unit.
template <class Kind>
__device__ __forceinline__ void add_moments(Stream const& s, StreamShared& shared, uint64_t* words,
                                            int lane) {
  constexpr int kShares = kWorkers / 32 / (Kind::kKeepsHalves ? 4 : 1);
  RingCursor adding;
  int unit_stage = 0;
  unsigned current = ~0u;
  for (Walk walk(s); walk.valid(s); walk.advance(s)) {
    if (walk.unit == current) continue;
    current = walk.unit;
    device::wait(&shared.summed[adding.stage], adding.parity);
    auto const& partial = shared.partial[adding.stage];
    float const reference = partial[0].y;  // the first thread has values of every tile
    device::RelativeMoments shares[kShares];
#pragma unroll
    for (int i = 0; i < kShares; ++i) {
      float4 const own = partial[32 * i + lane];
      shares[i] = Moments{own.x, own.y, own.z, own.w}.about(reference);
    }
#pragma unroll
    for (int step = kShares / 2; step > 0; step /= 2) {
#pragma unroll
      for (int i = 0; i < step; ++i) shares[i].merge(shares[i + step]);
    }
    device::arrive(&shared.added[adding.stage]);
    adding.advance(kPartials);
    Moments const total = device::merge_warp(Moments::of(reference, shares[0]));
    if (lane < s.copies) {
      // A unit of which blocks have one tile at most has it here.
      uint64_t* const own = words + first_word<kMomentsWords>(s, lane, current) +
                            participant(s, walk.tile) * kMomentsWords;
      publish(own, total.mean, total.low);
      publish(own + 1, total.m2, 0.0f);
    }
    if (lane == 0) device::arrive(&shared.barriers.taken[unit_stage]);
    unit_stage = (unit_stage + 1) % kUnitStages;
  }
}

// A warp waits for all participants' partial moments of each of its units that the block holds a
// part of, and merges them in the same order in every block.
__device__ __forceinline__ void merge_units(Stream const& s, int merger, float vector_values,
                                            float eps, StreamShared& shared, uint64_t const* words,
                                            StatisticsTargets const& saved) {
  int const lane = threadIdx.x % 32;
  int const count = participants(s);
  float const full = vector_values * float(s.tile_vectors);
  float const last = vector_values * float(s.run_vectors - (s.tiles - 1) * s.tile_vectors);
  // A participant whose first tile is c < blocks holds rounds + (c <= rest) tiles.
  unsigned const rounds = (s.tiles - 1) / s.blocks;
  unsigned const rest = (s.tiles - 1) - rounds * s.blocks;
  unsigned const own = device_stream::member(s);
  unsigned current = ~0u;
  RingCursor unit;
  for (Walk walk(s); walk.valid(s); walk.advance(s)) {
    if (walk.unit == current) continue;
    if (current != ~0u) unit.advance(kUnitStages);
    current = walk.unit;
    if (unit.stage % kMergers != merger) continue;
    // The block that holds the unit's first tile.
    unsigned const first = own >= walk.tile ? own - walk.tile : own + s.blocks - walk.tile;
    device::wait(&shared.barriers.taken[unit.stage], unit.parity);
    auto const gathered = Words<kMomentsWords>::gather(
        words + first_word<kMomentsWords>(s, int(own) % s.copies, current), count);
    // Lanes with words have one of the first poll.
    float const reference = unpacked(gathered.values[0][0]).x;
    device::RelativeMoments parts;
#pragma unroll
    for (int i = 0; i < kPolls; ++i) {
      unsigned const source = lane + 32 * i;
      if (source >= unsigned(count)) continue;
      unsigned const tile =
          s.tiles <= s.blocks ? source : source - first + (source < first ? s.blocks : 0);
      float const size = float(rounds - (tile > rest)) * full + (tile == rest ? last : full);
      float2 const value = unpacked(gathered.values[i][0]);
      float const m2 = unpacked(gathered.values[i][1]).x;
      parts.merge(Moments{size, value.x, value.y, m2}.about(reference));
    }
    Moments const total = device::merge_warp(Moments::of(reference, parts));
    if (lane == 0) {
      Statistics const statistics = device::statistics_of(total, eps);
      shared.statistics[unit.stage] = statistics;
      device::arrive(&shared.barriers.merged[unit.stage]);
      if (walk.tile == 0) {
        device::store(saved, device_stream::unit_in_tensor(s, current), statistics);
      }
    }
  }
}

template <class Kind>
__global__ void __launch_bounds__(kThreadsPerBlock, 1)
    normalize_stream(uint4 const* input, uint4* output, Affine affine, StatisticsTargets saved,
                     uint64_t* words, Stream stream, float eps) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ StreamShared shared;
  TableEntry* const table =
      device_stream::fill_table<kThreadsPerBlock>(affine, ring + stream.stages * kStageBytes);
  int const thread = int(threadIdx.x);
  constexpr int kFirstAlone = 2 * kWorkers;  // thread of no such group
  shared.init(stream.stages);
  __syncthreads();
  if (thread < kWorkers) {
    normalize_tiles<Kind>(affine, stream, shared, ring, table, thread);
  } else if (thread < kFirstAlone) {
    if constexpr (Kind::kKeepsHalves) {
      take_moments_of_halves<Kind>(stream, affine, shared, ring, thread - kWorkers);
    } else {
      take_moments<Kind>(stream, affine, shared, ring, thread - kWorkers);
    }
  } else if (thread < kFirstAlone + kMergers * 32) {
    merge_units(stream, (thread - kFirstAlone) / 32, float(Kind::kVector), eps, shared, words,
                saved);
  } else if (thread < kFirstAlone + (kMergers + 1) * 32) {
    add_moments<Kind>(stream, shared, words, thread % 32);
  } else if (thread < kFirstAlone + (kMergers + 2) * 32) {
    device_stream::load_tiles<1>(
        {input}, stream, shared.barriers, ring, shared.places,
        [&](unsigned tile) { return Extent::of(stream, tile); },
        [&](Walk const& walk, Extent const& extent, auto const& units) {
          return place_of(affine, stream, input, walk, extent, units);
        });
  } else if (thread == kFirstAlone + (kMergers + 2) * 32) {
    device_stream::store_tiles(output, stream, shared.barriers, ring);
  }
#else
  __trap();
#endif
}

template <class Kind>
void launch(StreamedConfig const& config, GroupNormProblem const& p,
            GroupNormTensors const& tensors, uint64_t* words, cudaStream_t stream) {
  auto const* input = static_cast<uint4 const*>(tensors.input);
  auto* output = static_cast<uint4*>(tensors.output);
  Affine affine = affine_of(p, tensors.weight, tensors.bias, nullptr);
  StatisticsTargets saved{.mean = tensors.mean, .rstd = tensors.rstd};
  Stream s = config.stream;
  float eps = float(p.eps);
  void* arguments[] = {&input, &output, &affine, &saved, &words, &s, &eps};
  device_stream::launch("normalize_streamed", normalize_stream<Kind>, kThreadsPerBlock, config,
                        arguments, stream);
}

}  // namespace

bool streams_on(int architecture) {
  constexpr int kCompiled[] = {__CUDA_ARCH_LIST__};
  return std::ranges::find(kCompiled, 10 * architecture) != std::end(kCompiled);
}

void normalize_streamed(StreamedConfig const& config, GroupNormProblem const& p,
                        GroupNormTensors const& tensors, void* workspace, cudaStream_t stream) {
  FUSEDCONV_CHECK(device::is_aligned(tensors.input, 16) && device::is_aligned(tensors.output, 16),
                  "normalize_streamed: input or output is not aligned to 16 bytes");
  FUSEDCONV_CUDA("normalize_streamed",
                 cudaMemsetAsync(workspace, 0xff, config.words_bytes(), stream));
  dispatch_kernel(p, [&](auto zero, auto active) {
    using T = decltype(zero);
    auto const start = [&](auto known) {
      if constexpr (std::is_same_v<T, __nv_bfloat16> && known.value == kQuickGeluBefore) {
        if (config.in_halves) {
          return launch<KindOf<T, known.value, true, true>>(
              config, p, tensors, static_cast<uint64_t*>(workspace), stream);
        }
      }
      auto const start_kind = [&](auto activates) {
        launch<KindOf<T, known.value, activates.value>>(config, p, tensors,
                                                        static_cast<uint64_t*>(workspace), stream);
      };
      if constexpr (known.value == kAnyActivation) {
        device::dispatch_bool(activates_before(p), start_kind);
      } else {
        using Before = typename Known<known.value>::Before;
        start_kind(std::bool_constant<!std::is_void_v<Before>>{});
      }
    };
    if constexpr (sizeof(T) == 4) {
      dispatch_known<active.value, kQuickGeluBefore, kQuickSiluBefore, kReluBefore, kQuickSiluAfter,
                     kGeluBefore, kSiluAfter>(p, start);
    } else {
      dispatch_known<active.value, kQuickGeluBefore, kQuickSiluBefore, kReluBefore,
                     kQuickSiluAfter>(p, start);
    }
  });
}

}  // namespace fusedconv::groupnorm
