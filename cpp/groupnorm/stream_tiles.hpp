// What the roles of streamed normalisation share: tiles, as they are announced and held, and
// barriers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/math.hpp"
#include "groupnorm/affine.hpp"
#include "groupnorm/stream_device.hpp"

namespace fusedconv::groupnorm::device_stream {

using device::Pack;

inline constexpr int kMergers =
    2;  // warps that take units in turn: one unit waits for words from afar
inline constexpr int kPartials = 2;  // units whose moments by thread may be there
inline constexpr int kThreadsPerBlock = 2 * kWorkers + (kMergers + 3) * 32;
static_assert(kUnitStages % kMergers == 0, "a warp waits for every phase of its stages");

// What a kernel does: kKnown_ says what it knows of the activations; with kActivates_ there is one
// in front, for which who takes a tile's moments replaces it by what is activated. It is computed
// once then, and the moments are of what is normalised.
template <class T_, int kKnown_, bool kActivates_, bool kInHalves_ = false>
struct KindOf {
  using T = T_;
  static constexpr int kKnown = kKnown_;
  static constexpr bool kActivates = kActivates_;
  // Of an activation that is called, the one behind is left.
  static constexpr int kBehind =
      kActivates && kKnown != kAnyActivation ? int(kNoActivation) : kKnown;
  static constexpr bool kKeepsHalves = kInHalves_;
  static constexpr bool kKeepsFloats =  // as keeps_floats()
      kActivates && sizeof(T) == 2 && kKnown != kReluBefore && !kKeepsHalves;
  static constexpr int kVector = 16 / sizeof(T);
  static constexpr int kVectors = kStageVectors / (kKeepsFloats ? 2 : 1);  // of a thread, in a tile
};

// A thread's vector of a tile: as it was loaded or, activated, in its place, maybe in another type
// of 16 bits; where that is float32 and twice as long, the second half is as far behind as half a
// stage.
template <class Kind>
struct Held {
  using T = typename Kind::T;
  static constexpr int kVector = Kind::kVector;
  using Stored = std::conditional_t<Kind::kKeepsFloats, float,
                                    std::conditional_t<Kind::kKeepsHalves, __half, T>>;
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
  bool is_wide;      // values are not kept: half precision has not their range
  uint4 const* source;

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

// Where a tile lies.
__device__ __forceinline__ Place place_of(Affine const& affine, Stream const& s, uint4 const* input,
                                          Walk const& walk, Extent const& extent,
                                          LaneUnits const& units) {
  unsigned const first = extent.first << s.vector_shift;
  unsigned const plane = first / s.plane_elements;
  unsigned const group = unit_in_tensor(s, walk.unit) % unsigned(affine.groups);
  return {extent.vectors,
          group * unsigned(affine.channels_per_group) + plane,
          (plane + 1) * s.plane_elements - first,
          units.ordinal,
          units.is_last,
          false,
          input + first_vector(s, walk.unit) + extent.first};
}

}  // namespace fusedconv::groupnorm::device_stream
