// stream.hpp has the procedure; statistics here are the sums that gradient.hpp names.
#include "groupnorm/streamed_gradients.hpp"

#include "cuda/math.hpp"
#include "cuda/sum.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"
#include "groupnorm/affine.hpp"
#include "groupnorm/gradient_device.hpp"
#include "groupnorm/gradient_lines.hpp"
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
using device_stream::Walk;
using device_stream::Words;

constexpr int kWorkerWarps = kWorkers / 32;
constexpr int kThreadsPerBlock = 2 * kWorkers + 3 * 32;
// A stage holds a tile of the input and, beside it, of the gradient.
constexpr int kTileVectors = kStageVectors / kStreamedTensors;  // of a thread, of each
constexpr int kTileBytes = kStageBytes / kStreamedTensors;

// What is known of a unit before its gradient: the forward pass's statistics.
struct UnitStatistics {
  float mean;
  float rstd;
};

struct GradientShared {
  device_stream::Barriers barriers;
  GroupTerms terms[kUnitStages];
  float2 partial[2][kWorkerWarps];
};
static_assert(sizeof(GradientShared) <= kStaticSharedBytes, "what the config sets aside");

// The statistics of a block's current unit. Those of its next unit are under way meanwhile.
class StatisticsAhead {
 public:
  __device__ __forceinline__ StatisticsAhead(GradientAffine const& affine, Stream const& s)
      : affine_(affine), peek_(s) {
    if (peek_.valid(s)) fetch();
  }

  __device__ __forceinline__ UnitStatistics enter(Stream const& s) {
    UnitStatistics const current = next_;
    unsigned const unit = peek_.unit;
    while (peek_.valid(s) && peek_.unit == unit) peek_.advance(s);
    if (peek_.valid(s)) fetch();
    return current;
  }

 private:
  __device__ __forceinline__ void fetch() {
    next_ = {affine_.mean[peek_.unit], affine_.rstd[peek_.unit]};
  }

  GradientAffine const& affine_;
  Walk peek_;
  UnitStatistics next_{};
};

__device__ __forceinline__ Channel channel_of(GradientAffine const& affine,
                                              UnitStatistics const& unit, TableEntry const* table,
                                              unsigned group_unit, unsigned run) {
  TableEntry const entry =
      table[group_unit % unsigned(affine.groups) * unsigned(affine.channels_per_group) + run];
  return {unit.mean, unit.rstd, entry.x, entry.y};
}

// kWorkers threads sum g and g xhat of each tile, which has one channel, and publish the block's
// share of each unit's weighted sums.
template <class T, bool kActivate>
__device__ __forceinline__ void take_sums(GradientAffine const& affine, Stream const& s,
                                          GradientShared& shared, unsigned char const* ring,
                                          TableEntry const* table, float2* __restrict__ partials,
                                          uint64_t* words, int thread) {
  constexpr int kVector = 16 / sizeof(T);
  constexpr int kBarrier = 1;
  int const warp = thread / 32;
  int const lane = thread % 32;
  StatisticsAhead ahead(affine, s);
  UnitStatistics statistics{};
  unsigned current = ~0u;
  RingCursor cursor;
  int unit_stage = 0;
  int buffer = 0;
  float2 weighted{};  // in warp 0
  for (Walk walk(s); walk.valid(s); cursor.advance(s.stages), buffer ^= 1) {
    if (walk.unit != current) {
      current = walk.unit;
      statistics = ahead.enter(s);
    }
    Extent const extent = Extent::of(s, walk.tile);
    Channel const channel = channel_of(affine, statistics, table, current, extent.run);
    device::wait(&shared.barriers.full[cursor.stage], cursor.parity);
    unsigned char const* const stage = ring + cursor.stage * kStageBytes + thread * 16;
    float2 sums{};
#pragma unroll
    for (int i = 0; i < kTileVectors; ++i) {
      if (unsigned(thread + i * kWorkers) < extent.vectors) {
        auto const x =
            Pack<T, kVector>::load(reinterpret_cast<T const*>(stage + i * kWorkers * 16));
        auto const g = Pack<T, kVector>::load(
            reinterpret_cast<T const*>(stage + kTileBytes + i * kWorkers * 16));
        Point points[kVector];
        points_of<kActivate>(x, g, [&](int) { return channel; }, affine, points);
#pragma unroll
        for (Point const& point : points) {
          sums.x += point.gradient;
          sums.y = fmaf(point.gradient, point.normalized, sums.y);
        }
      }
    }
    sums = warp_sum(sums);
    // Two buffers: warp 0 reads one while the others fill the other.
    if (lane == 0) shared.partial[buffer][warp] = sums;
    device::sync_threads(kBarrier, kWorkers);
    Walk const last = walk;
    walk.advance(s);
    bool const leaves = walk.unit != last.unit;
    if (warp == 0) {
      sums = warp_sum(lane < kWorkerWarps ? shared.partial[buffer][lane] : float2{});
      if (lane == 0) partials[int64_t(last.unit) * s.tiles + last.tile] = sums;
      weighted.x = fmaf(channel.weight, sums.x, weighted.x);
      weighted.y = fmaf(channel.weight, sums.y, weighted.y);
      if (leaves) {
        weighted = {__shfl_sync(~0u, weighted.x, 0), __shfl_sync(~0u, weighted.y, 0)};
        if (lane < s.copies) {
          publish(words + first_word<kSumsWords>(s, lane, last.unit) + participant(s, last),
                  weighted.x, weighted.y);
        }
        if (lane == 0) device::arrive(&shared.barriers.taken[unit_stage]);
        weighted = {};
      }
    }
    if (leaves) unit_stage = (unit_stage + 1) % kUnitStages;
  }
}

// One warp adds up all participants' shares of each unit, in the same order in every block.
__device__ __forceinline__ void merge_units(Stream const& s, float elements, GradientShared& shared,
                                            uint64_t const* words) {
  int const count = participants(s);
  unsigned current = ~0u;
  RingCursor unit;
  for (Walk walk(s); walk.valid(s); walk.advance(s)) {
    if (walk.unit == current) continue;
    if (current != ~0u) unit.advance(kUnitStages);
    current = walk.unit;
    device::wait(&shared.barriers.taken[unit.stage], unit.parity);
    auto const gathered = Words<kSumsWords>::gather(
        words + first_word<kSumsWords>(s, int(blockIdx.x) % s.copies, current), count);
    float2 total{};
#pragma unroll
    for (int i = 0; i < kPolls; ++i) {
      float2 const value = unpacked(gathered.values[i][0]);
      total.x += value.x;
      total.y += value.y;
    }
    total = warp_sum(total);
    if (threadIdx.x % 32 == 0) {
      shared.terms[unit.stage] = {total.x / elements, total.y / elements};
      device::arrive(&shared.barriers.merged[unit.stage]);
    }
  }
}

// kWorkers threads replace the input by its gradient.
template <class T, bool kActivate>
__device__ __forceinline__ void replace_tiles(GradientAffine const& affine, Stream const& s,
                                              GradientShared& shared, unsigned char* ring,
                                              TableEntry const* table, int thread) {
  constexpr int kVector = 16 / sizeof(T);
  StatisticsAhead ahead(affine, s);
  UnitStatistics statistics{};
  GroupTerms terms{};
  RingCursor cursor;
  RingCursor unit;
  unsigned current = ~0u;
  for (Walk walk(s); walk.valid(s); walk.advance(s), cursor.advance(s.stages)) {
    if (walk.unit != current) {
      if (current != ~0u) unit.advance(kUnitStages);
      current = walk.unit;
      statistics = ahead.enter(s);
      device::wait(&shared.barriers.merged[unit.stage], unit.parity);
      terms = shared.terms[unit.stage];
    }
    Extent const extent = Extent::of(s, walk.tile);
    Channel const channel = channel_of(affine, statistics, table, current, extent.run);
    device::wait(&shared.barriers.full[cursor.stage], cursor.parity);
    unsigned char* const stage = ring + cursor.stage * kStageBytes + thread * 16;
#pragma unroll
    for (int i = 0; i < kTileVectors; ++i) {
      if (unsigned(thread + i * kWorkers) < extent.vectors) {
        auto* const target = reinterpret_cast<T*>(stage + i * kWorkers * 16);
        auto const x = Pack<T, kVector>::load(target);
        auto const g = Pack<T, kVector>::load(
            reinterpret_cast<T const*>(stage + kTileBytes + i * kWorkers * 16));
        grad_input_of<kActivate>(
            x, g, [&](int) { return channel; }, [&](int) { return terms; }, affine)
            .store(target);
      }
    }
    shared.barriers.finish(cursor.stage);
  }
}

// One warp stores the results line by line, no faster than store_tiles() does, and leaves the sum
// of each tile: what kPiece neighbours have in common with lines is dispatch_piece()'s.
template <class T, int kPiece>
__device__ __forceinline__ void store_lines(T* output, Lines const& lines, float* sums,
                                            Stream const& s, device_stream::Barriers& barriers,
                                            unsigned char const* ring) {
  constexpr int kVector = 16 / sizeof(T);
  constexpr int kStep = 32 * kPiece;
  int const lane = int(threadIdx.x % 32);
  LineStep const step{kStep / lines.columns, kStep % lines.columns};
  unsigned const planes = s.tiles / s.run_tiles;  // of a unit
  RingCursor cursor;
  uint64_t latest = 0;
  for (Walk walk(s); walk.valid(s); walk.advance(s), cursor.advance(s.stages)) {
    device::wait(&barriers.done[cursor.stage], cursor.parity);
    while (device_stream::nanoseconds() - latest < s.pace) {
    }
    latest = device_stream::nanoseconds();
    Extent const extent = Extent::of(s, walk.tile);
    int const first = int(extent.first - extent.run * s.run_vectors) * kVector;
    int const count = int(extent.vectors) * kVector;
    auto const* const tile = reinterpret_cast<T const*>(ring + cursor.stage * kStageBytes);
    T* const plane = output + (int64_t(walk.unit) * planes + extent.run) * lines.plane;
    LineWalk place(lines, first + lane * kPiece);
    float sum = 0.0f;
#pragma unroll 4
    for (int i = lane * kPiece; i < count; i += kStep) {
      auto const values = Pack<T, kPiece>::load(tile + i);
      values.store(plane + place.offset);
#pragma unroll
      for (T const& value : values.values) sum += device::to_float(value);
      place.advance(lines, step);
    }
    __syncwarp();
    if (lane == 0) device::arrive(&barriers.free[cursor.stage]);
    if (sums == nullptr) continue;
    sum = device::warp_total(sum);
    if (lane == 0) sums[int64_t(walk.unit) * s.tiles + walk.tile] = sum;
  }
}

template <class T, bool kActivate>
__global__ void __launch_bounds__(kThreadsPerBlock, 1)
    gradients_stream(uint4 const* input, uint4 const* grad, uint4* output, GradientAffine affine,
                     float2* __restrict__ partials, uint64_t* words, Stream stream, float elements,
                     Lines lines, float* sums) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ GradientShared shared;
  TableEntry* const table =
      device_stream::fill_table<kThreadsPerBlock>(affine, ring + stream.stages * kStageBytes);
  shared.barriers.init(stream.stages);
  __syncthreads();
  int const thread = int(threadIdx.x);
  if (thread < kWorkers) {
    replace_tiles<T, kActivate>(affine, stream, shared, ring, table, thread);
  } else if (thread < 2 * kWorkers) {
    take_sums<T, kActivate>(affine, stream, shared, ring, table, partials, words,
                            thread - kWorkers);
  } else if (thread < 2 * kWorkers + 32) {
    merge_units(stream, elements, shared, words);
  } else if (thread == 2 * kWorkers + 32) {
    device_stream::load_tiles<kStreamedTensors>({input, grad}, stream, shared.barriers, ring);
  } else if (thread >= 2 * kWorkers + 64 && lines.columns > 0) {
    dispatch_piece(lines, [&](auto piece) {
      store_lines<T, decltype(piece)::value>(reinterpret_cast<T*>(output), lines, sums, stream,
                                             shared.barriers, ring);
    });
  } else if (thread == 2 * kWorkers + 64) {
    device_stream::store_tiles(output, stream, shared.barriers, ring);
  }
#else
  __trap();
#endif
}

template <class T, bool kActivate>
void launch(StreamedConfig const& config, GroupNormProblem const& p, GradientTensors const& tensors,
            float2* partials, uint64_t* words, cudaStream_t stream) {
  auto const* input = static_cast<uint4 const*>(tensors.input);
  auto const* grad = static_cast<uint4 const*>(tensors.grad_output);
  auto* output = static_cast<uint4*>(tensors.grad_input);
  GradientAffine affine = gradient_affine_of(p, tensors);
  Stream s = config.stream;
  float elements = float(p.group_size());
  Lines lines = Lines::of(p, tensors);
  float* sums = tensors.sums;
  void* arguments[] = {&input, &grad, &output,   &affine, &partials,
                       &words, &s,    &elements, &lines,  &sums};
  device_stream::launch("streamed_gradients", gradients_stream<T, kActivate>, kThreadsPerBlock,
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
  dispatch_kernel(p, [&](auto zero, auto active) {
    launch<decltype(zero), active.value>(config.streamed, p, tensors, partials,
                                         static_cast<uint64_t*>(workspace), stream);
  });
}

}  // namespace fusedconv::groupnorm
