// stream.hpp has the procedure; statistics here are moments.
#include "groupnorm/streamed.hpp"

#include <algorithm>
#include <iterator>

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

constexpr int kMergers = 2;  // warps that take units in turn: one unit waits for words from afar
constexpr int kThreadsPerBlock = 2 * kWorkers + (kMergers + 2) * 32;
static_assert(kUnitStages % kMergers == 0, "a warp waits for every phase of its stages");

struct StreamShared {
  device_stream::Barriers barriers;
  Statistics statistics[kUnitStages];
  Moments partial[kWorkerWarps];
};
static_assert(sizeof(StreamShared) <= static_shared_bytes(1), "what the config sets aside");

// kWorkers threads normalise tiles in cursor.
template <class T, bool kActivate>
__device__ __forceinline__ void normalize_tiles(Affine const& affine, Stream const& s,
                                                StreamShared& shared, unsigned char* ring,
                                                TableEntry const* table, int thread) {
  constexpr int kVector = 16 / sizeof(T);
  using Values = Pack<T, kVector>;
  RingCursor cursor;
  RingCursor unit;
  unsigned current = ~0u;
  unsigned first_channel = 0;
  Statistics statistics{};
  for (Walk walk(s); walk.valid(s); walk.advance(s), cursor.advance(s.stages)) {
    if (walk.unit != current) {
      if (current != ~0u) unit.advance(kUnitStages);
      current = walk.unit;
      first_channel = current % unsigned(affine.groups) * unsigned(affine.channels_per_group);
      device::wait(&shared.barriers.merged[unit.stage], unit.parity);
      statistics = shared.statistics[unit.stage];
    }
    device::wait(&shared.barriers.full[cursor.stage], cursor.parity);
    Extent const extent = Extent::of(s, walk.tile);
    T* const stage = reinterpret_cast<T*>(ring + cursor.stage * kStageBytes) + thread * kVector;
    auto const channel_of = [&](unsigned vector) {
      TableEntry const entry = table[first_channel + vector / s.plane_vectors];
      return ChannelAffine::of(statistics, entry.x, entry.y);
    };
    unsigned const channel = extent.first / s.plane_vectors;
    bool const whole = extent.vectors == kWorkers * kStageVectors &&
                       extent.first + extent.vectors <= (channel + 1) * s.plane_vectors;
    if (whole) {  // usual with large planes: full, and of one channel
      ChannelAffine const constants = channel_of(extent.first);
      Values values[kStageVectors];
#pragma unroll
      for (int i = 0; i < kStageVectors; ++i)
        values[i] = Values::load(stage + i * kWorkers * kVector);
#pragma unroll
      for (int i = 0; i < kStageVectors; ++i) {
        normalized_pack<T, kActivate>(values[i], constants, affine)
            .store(stage + i * kWorkers * kVector);
      }
    } else {
#pragma unroll 1
      for (unsigned i = 0; thread + i * kWorkers < extent.vectors; ++i) {
        ChannelAffine const constants = channel_of(extent.first + thread + i * kWorkers);
        normalized_pack<T, kActivate>(Values::load(stage + i * kWorkers * kVector), constants,
                                      affine)
            .store(stage + i * kWorkers * kVector);
      }
    }
    shared.barriers.finish(cursor.stage, false);
  }
}

// kWorkers threads take the block's partial moments of each unit.
template <class T, bool kActivate>
__device__ __forceinline__ void take_moments(Stream const& s, Activation activation,
                                             StreamShared& shared, unsigned char const* ring,
                                             uint64_t* words, int thread) {
  constexpr int kVector = 16 / sizeof(T);
  constexpr int kBarrier = 1;
  int const warp = thread / 32;
  int const lane = thread % 32;
  RingCursor cursor;
  int unit_stage = 0;
  RunningMoments<T> running;
  for (Walk walk(s); walk.valid(s); cursor.advance(s.stages)) {
    device::wait(&shared.barriers.full[cursor.stage], cursor.parity);
    unsigned const vectors = Extent::of(s, walk.tile).vectors;
    T const* const stage =
        reinterpret_cast<T const*>(ring + cursor.stage * kStageBytes) + thread * kVector;
    if (vectors == kWorkers * kStageVectors) {
      float values[kStageVectors * kVector];
#pragma unroll
      for (int i = 0; i < kStageVectors; ++i) {
        auto const pack = Pack<T, kVector>::load(stage + i * kWorkers * kVector);
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
          values[i * kVector + v] = before<kActivate>(activation, device::to_float(pack.values[v]));
        }
      }
      running.add(values);
    } else {
#pragma unroll 1
      for (unsigned i = 0; thread + i * kWorkers < vectors; ++i) {
        auto const pack = Pack<T, kVector>::load(stage + i * kWorkers * kVector);
        float values[kVector];
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
          values[v] = before<kActivate>(activation, device::to_float(pack.values[v]));
        }
        running.add(values);
      }
    }
    Walk const last = walk;
    walk.advance(s);
    if (walk.unit == last.unit) continue;
    Moments own_moments = device::merge_warp(running.whole());
    if (lane == 0) shared.partial[warp] = own_moments;
    device::sync_threads(kBarrier, kWorkers);
    if (warp == 0) {
      own_moments =
          device::merge_warp<kWorkerWarps>(lane < kWorkerWarps ? shared.partial[lane] : Moments{})
              .of_first_lane();
      if (lane < s.copies) {
        uint64_t* const own = words + first_word<kMomentsWords>(s, lane, last.unit) +
                              participant(s, last.tile) * kMomentsWords;
        publish(own, own_moments.mean, own_moments.low);
        publish(own + 1, own_moments.m2, 0.0f);
      }
      if (lane == 0) device::arrive(&shared.barriers.taken[unit_stage]);
    }
    unit_stage = (unit_stage + 1) % kUnitStages;
    device::sync_threads(kBarrier, kWorkers);
    running = {};
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
  unsigned current = ~0u;
  RingCursor unit;
  for (Walk walk(s); walk.valid(s); walk.advance(s)) {
    if (walk.unit == current) continue;
    if (current != ~0u) unit.advance(kUnitStages);
    current = walk.unit;
    if (unit.stage % kMergers != merger) continue;
    // The block that holds the unit's first tile.
    unsigned const first =
        blockIdx.x >= walk.tile ? blockIdx.x - walk.tile : blockIdx.x + s.blocks - walk.tile;
    device::wait(&shared.barriers.taken[unit.stage], unit.parity);
    auto const gathered = Words<kMomentsWords>::gather(
        words + first_word<kMomentsWords>(s, int(blockIdx.x) % s.copies, current), count);
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

template <class T, bool kActivate>
__global__ void __launch_bounds__(kThreadsPerBlock, 1)
    normalize_stream(uint4 const* input, uint4* output, Affine affine, StatisticsTargets saved,
                     uint64_t* words, Stream stream, float eps) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ StreamShared shared;
  TableEntry* const table =
      device_stream::fill_table<kThreadsPerBlock>(affine, ring + stream.stages * kStageBytes);
  shared.barriers.init(stream.stages, false, 0);
  __syncthreads();
  int const thread = int(threadIdx.x);
  if (thread < kWorkers) {
    normalize_tiles<T, kActivate>(affine, stream, shared, ring, table, thread);
  } else if (thread < 2 * kWorkers) {
    take_moments<T, kActivate>(stream, affine.activation_before, shared, ring, words,
                               thread - kWorkers);
  } else if (thread < 2 * kWorkers + kMergers * 32) {
    merge_units(stream, thread / 32 - 2 * kWorkerWarps, 16.0f / sizeof(T), eps, shared, words,
                saved);
  } else if (thread == 2 * kWorkers + kMergers * 32) {
    device_stream::load_tiles<1>(
        {input}, stream, shared.barriers, ring,
        [&](unsigned tile) { return Extent::of(stream, tile); },
        [](int, Walk const&, Extent const&) {});
  } else if (thread == 2 * kWorkers + (kMergers + 1) * 32) {
    device_stream::store_tiles(output, stream, shared.barriers, ring);
  }
#else
  __trap();
#endif
}

template <class T, bool kActivate>
void launch(StreamedConfig const& config, GroupNormProblem const& p,
            GroupNormTensors const& tensors, uint64_t* words, cudaStream_t stream) {
  auto const* input = static_cast<uint4 const*>(tensors.input);
  auto* output = static_cast<uint4*>(tensors.output);
  Affine affine = affine_of(p, tensors.weight, tensors.bias, nullptr);
  StatisticsTargets saved{.mean = tensors.mean, .rstd = tensors.rstd};
  Stream s = config.stream;
  float eps = float(p.eps);
  void* arguments[] = {&input, &output, &affine, &saved, &words, &s, &eps};
  device_stream::launch("normalize_streamed", normalize_stream<T, kActivate>, kThreadsPerBlock,
                        config, arguments, stream);
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
    launch<decltype(zero), active.value>(config, p, tensors, static_cast<uint64_t*>(workspace),
                                         stream);
  });
}

}  // namespace fusedconv::groupnorm
