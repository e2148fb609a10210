// stream.hpp has the procedure; statistics here are moments.
#include "groupnorm/streamed.hpp"

#include <algorithm>
#include <iterator>
#include <type_traits>

#include "cuda/math.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"
#include "groupnorm/affine.hpp"
#include "groupnorm/launch.hpp"
#include "groupnorm/moments.hpp"
#include "groupnorm/running_moments.hpp"
#include "groupnorm/stream_device.hpp"

namespace fusedconv::groupnorm {
namespace {

using device::Moments;
using device::Pack;
using device::RingCursor;
using device_stream::Extent;
using device_stream::first_word;
using device_stream::participant;
using device_stream::participants;
using device_stream::publish;
using device_stream::unpacked;
using device_stream::Walk;
using device_stream::Words;

constexpr int kMergers = 2;   // warps that take units in turn: one unit waits for words from afar
constexpr int kPartials = 2;  // units whose moments by thread may be there
constexpr int kThreadsPerBlock = 2 * kWorkers + (kMergers + 3) * 32;
static_assert(kUnitStages % kMergers == 0, "a warp waits for every phase of its stages");

// What a kernel does: kKnown_ says what it knows of the activations; with kActivates_ there is one
// in front, for which who takes a tile's moments replaces it by what is activated. It is computed
// once then, and the moments are of what is normalised.
template <class T_, int kKnown_, bool kActivates_>
struct KindOf {
  using T = T_;
  static constexpr int kKnown = kKnown_;
  static constexpr bool kActivates = kActivates_;
  // Of an activation that is called, the one behind is left.
  static constexpr int kBehind =
      kActivates && kKnown != kAnyActivation ? int(kNoActivation) : kKnown;
  static constexpr bool kKeepsFloats =
      kActivates && sizeof(T) == 2 && kKnown != kReluBefore;  // as keeps_floats()
  static constexpr int kVector = 16 / sizeof(T);
  static constexpr int kVectors = kStageVectors / (kKeepsFloats ? 2 : 1);  // of a thread, in a tile
};

// A thread's vector of a tile: as it was loaded or, activated, in its place; where that is in
// float32 and twice as long, the second half is as far behind as half a stage.
template <class Kind>
struct Held {
  using T = typename Kind::T;
  static constexpr int kVector = Kind::kVector;
  using Stored = std::conditional_t<Kind::kKeepsFloats, float, T>;
  static constexpr int kParts = Kind::kKeepsFloats ? 2 : 1;
  static constexpr int kPart = kVector / kParts;
  using Part = Pack<Stored, kPart>;

  Part parts[kParts];

  __device__ __forceinline__ static Stored* part_of(T* place, int i) {
    return reinterpret_cast<Stored*>(reinterpret_cast<unsigned char*>(place) + i * kStageBytes / 2);
  }
  __device__ __forceinline__ static Held load(T* place) {
    Held result;
#pragma unroll
    for (int i = 0; i < kParts; ++i) result.parts[i] = Part::load(part_of(place, i));
    return result;
  }
  __device__ __forceinline__ void to_floats(float (&values)[kVector]) const {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      float own[kPart];
      parts[i].to_floats(own);
#pragma unroll
      for (int e = 0; e < kPart; ++e) values[i * kPart + e] = own[e];
    }
  }
  __device__ __forceinline__ static void store(float const (&values)[kVector], T* place) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      float own[kPart];
#pragma unroll
      for (int e = 0; e < kPart; ++e) own[e] = values[i * kPart + e];
      Part::of(own).store(part_of(place, i));
    }
  }
};

// A stage's tile, as the thread that loads it leaves it for all who wait for it.
struct alignas(16) Place {
  unsigned vectors;
  unsigned channel;  // of the first element, of all
  unsigned left;     // elements of that channel from there on
  unsigned ordinal;  // of the unit among the block's
  bool is_last;      // of the block's in the unit

  // The same of the vector that begins so many elements behind.
  __device__ __forceinline__ Place at(unsigned elements, unsigned plane_elements) const {
    Place result = *this;
    if (elements < left) {
      result.left = left - elements;
    } else {
      unsigned const behind = elements - left, planes = behind / plane_elements;
      result.channel = channel + 1 + planes;
      result.left = (planes + 1) * plane_elements - behind;
    }
    return result;
  }
};

struct StreamShared {
  device_stream::Barriers barriers;
  uint64_t activated[kMaxStages];  // a stage's tile has been
  uint64_t summed[kPartials];      // a unit's moments by thread are there
  uint64_t added[kPartials];       // and read
  Place places[kMaxStages];
  Statistics statistics[kUnitStages];
  float4 partial[kPartials][kWorkers];  // as Moments

  __device__ __forceinline__ void init(int stages) {
    int const i = int(threadIdx.x);
    if (i < stages) device::init_barrier(&activated[i], kWorkers);
    if (i < kPartials) {
      device::init_barrier(&summed[i], kWorkers);
      device::init_barrier(&added[i], 32);
    }
    barriers.init(stages, false, kWorkers);
  }
};
static_assert(sizeof(StreamShared) <= static_shared_bytes(1), "what the config sets aside");

// One thread says where tiles lie, as it loads them.
class Announcer {
 public:
  __device__ __forceinline__ Announcer(Affine const& affine, Stream const& s, Place* places)
      : affine_(affine), stream_(s), places_(places) {}

  __device__ __forceinline__ void operator()(int stage, Walk const& walk, Extent const& extent) {
    if (walk.unit != unit_) {
      unit_ = walk.unit;
      ++ordinal_;
      first_channel_ = unit_ % unsigned(affine_.groups) * unsigned(affine_.channels_per_group);
    }
    Walk next = walk;
    next.advance(stream_);
    unsigned const first = extent.first << stream_.vector_shift;
    unsigned const plane = first / stream_.plane_elements;
    places_[stage] = {extent.vectors, first_channel_ + plane,
                      (plane + 1) * stream_.plane_elements - first, ordinal_,
                      next.unit != walk.unit};
  }

 private:
  Affine const& affine_;
  Stream const& stream_;
  Place* places_;
  unsigned unit_ = ~0u;
  unsigned ordinal_ = ~0u;
  unsigned first_channel_ = 0;
};

// kWorkers threads normalise tiles in cursor.
template <class Kind>
__device__ __forceinline__ void normalize_tiles(Affine affine, Stream const& s,
                                                StreamShared& shared, unsigned char* ring,
                                                TableEntry const* table, int thread) {
  using T = typename Kind::T;
  constexpr int kVector = Kind::kVector;
  if constexpr (Kind::kActivates) affine.activation_before = Activation::kIdentity;
  auto const normalise = [&](Held<Kind> const& held, auto const& channel, T* place) {
    float values[kVector];
    held.to_floats(values);
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
    T* const stage = reinterpret_cast<T*>(ring + cursor.stage * kStageBytes) + thread * kVector;
    auto const constants_of = [&](unsigned channel) {
      TableEntry const entry = table[channel];
      return ChannelAffine::of(statistics, entry.x, entry.y);
    };
    if (tile.vectors == kWorkers * Kind::kVectors && tile.left >= tile.vectors * kVector) {
      // Usual with large planes: full, and of one channel.
      ChannelAffine const constants = constants_of(tile.channel);
      Held<Kind> held[Kind::kVectors];
#pragma unroll
      for (int i = 0; i < Kind::kVectors; ++i) {
        held[i] = Held<Kind>::load(stage + i * kWorkers * kVector);
      }
#pragma unroll
      for (int i = 0; i < Kind::kVectors; ++i) {
        normalise(held[i], [&](int) { return constants; }, stage + i * kWorkers * kVector);
      }
    } else {
#pragma unroll 1
      for (unsigned i = thread; i < tile.vectors; i += kWorkers) {
        Place const vector = tile.at(i * kVector, s.plane_elements);
        ChannelAffine const own = constants_of(vector.channel);
        // A plane has a vector's elements at least.
        ChannelAffine const next = vector.left < kVector ? constants_of(vector.channel + 1) : own;
        T* const place = stage + (i - thread) * kVector;
        normalise(
            Held<Kind>::load(place), [&](int v) { return unsigned(v) < vector.left ? own : next; },
            place);
      }
    }
    shared.barriers.finish(cursor.stage, false);
    cursor.advance(s.stages);
  }
}

// The activation in front. That it makes NaN of infinity does not matter, whose group's deviations
// are NaN anyway.
template <class Kind>
__device__ __forceinline__ void activate_in_front(Affine const& affine,
                                                  float (&values)[Kind::kVector]) {
  if constexpr (Kind::kKnown == kQuickGeluBefore) {
    using activations::Gelu;
#pragma unroll
    for (float& x : values) {
      float const a = fabsf(x);
      x = fmaf(-a, device::quick_exp2(Gelu::quick_log2_tail(a)), device::maximum(x, 0.0f));
    }
  } else {
    activate<Kind::kKnown>(affine.activation_before, affine.quick, values);
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
      activate_in_front<Kind>(affine, own);
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

// One warp merges those of all threads, and publishes the block's partial moments of each unit.
__device__ __forceinline__ void add_moments(Stream const& s, StreamShared& shared, uint64_t* words,
                                            int lane) {
  constexpr int kShares = kWorkers / 32;
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
    Moments const total = device::merge_warp(Moments::of(reference, shares[0])).of_first_lane();
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
      if (walk.tile == 0) device::store(saved, current, statistics);
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
    take_moments<Kind>(stream, affine, shared, ring, thread - kWorkers);
  } else if (thread < kFirstAlone + kMergers * 32) {
    merge_units(stream, (thread - kFirstAlone) / 32, float(Kind::kVector), eps, shared, words,
                saved);
  } else if (thread < kFirstAlone + (kMergers + 1) * 32) {
    add_moments(stream, shared, words, thread % 32);
  } else if (thread == kFirstAlone + (kMergers + 1) * 32) {
    Announcer announcer(affine, stream, shared.places);
    device_stream::load_tiles<1>(
        {input}, stream, shared.barriers, ring,
        [&](unsigned tile) { return Extent::of(stream, tile); },
        [&](int stage, Walk const& walk, Extent const& extent) { announcer(stage, walk, extent); });
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
