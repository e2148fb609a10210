#include "groupnorm/streamed_backward.hpp"

#include "cuda/math.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"
#include "groupnorm/affine.hpp"
#include "groupnorm/gradient.hpp"
#include "groupnorm/stream_device.hpp"

namespace fusedconv::groupnorm {
namespace {

using device::Pack;
using device::RingCursor;
using device_stream::Cursor;
using device_stream::Extent;

constexpr int kWorkerWarps = kWorkers / 32;
constexpr int kThreadsPerBlock = 2 * kWorkers + 3 * 32;
constexpr int kPieces = 2;  // a slot's input, and the gradient beside it
constexpr int kPieceVectors = kSlotVectors / kPieces;
constexpr int kPieceBytes = kSlotBytes / kPieces;

// What is known of a unit before its gradient: the forward pass's statistics.
struct UnitStatistics {
  float mean;
  float rstd;
};

struct GradientShared {
  device_stream::Barriers barriers;
  GroupTerms terms[kUnitSlots];
  float2 partial[2][kWorkerWarps];
};

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
  Cursor peek_;
  UnitStatistics next_{};
};

__device__ __forceinline__ Channel channel_of(GradientAffine const& affine,
                                              UnitStatistics const& unit, float2 const* table,
                                              unsigned group_unit, unsigned run) {
  float2 const entry =
      table[group_unit % unsigned(affine.groups) * unsigned(affine.channels_per_group) + run];
  return {unit.mean, unit.rstd, entry.x, entry.y};
}

// kWorkers threads sum g and g xhat of each chunk, which has one channel, and publish the block's
// share of each unit's weighted sums.
template <class T, bool kActivate>
__device__ __forceinline__ void take_sums(GradientAffine const& affine, Stream const& s,
                                          GradientShared& shared, unsigned char const* ring,
                                          float2 const* table, float2* __restrict__ partials,
                                          uint64_t* words, int thread) {
  constexpr int kVector = 16 / sizeof(T);
  constexpr int kBarrier = 1;
  int const warp = thread / 32;
  int const lane = thread % 32;
  StatisticsAhead ahead(affine, s);
  UnitStatistics statistics{};
  unsigned current = ~0u;
  RingCursor place;
  int unit_slot = 0;
  int buffer = 0;
  float2 weighted{};  // in warp 0
  for (Cursor cursor(s); cursor.valid(s); place.advance(s.slots), buffer ^= 1) {
    if (cursor.unit != current) {
      current = cursor.unit;
      statistics = ahead.enter(s);
    }
    Extent const extent = Extent::of(s, cursor.chunk);
    Channel const channel = channel_of(affine, statistics, table, current, extent.run);
    device::wait(&shared.barriers.full[place.stage], place.parity);
    unsigned char const* const slot = ring + place.stage * kSlotBytes + thread * 16;
    float2 sums{};
#pragma unroll
    for (int i = 0; i < kPieceVectors; ++i) {
      if (unsigned(thread + i * kWorkers) < extent.vectors) {
        auto const x = Pack<T, kVector>::load(reinterpret_cast<T const*>(slot + i * kWorkers * 16));
        auto const g = Pack<T, kVector>::load(
            reinterpret_cast<T const*>(slot + kPieceBytes + i * kWorkers * 16));
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
          Point const point = point_of<kActivate>(device::to_float(x.values[v]),
                                                  device::to_float(g.values[v]), channel, affine);
          sums.x += point.gradient;
          sums.y = fmaf(point.gradient, point.normalized, sums.y);
        }
      }
    }
    sums = warp_sum(sums);
    // Two buffers: warp 0 reads one while the others fill the other.
    if (lane == 0) shared.partial[buffer][warp] = sums;
    device::sync_threads(kBarrier, kWorkers);
    Cursor const last = cursor;
    cursor.advance(s);
    bool const leaves = cursor.unit != last.unit;
    if (warp == 0) {
      sums = warp_sum(lane < kWorkerWarps ? shared.partial[buffer][lane] : float2{});
      if (lane == 0) partials[int64_t(last.unit) * s.chunks + last.chunk] = sums;
      weighted.x = fmaf(channel.weight, sums.x, weighted.x);
      weighted.y = fmaf(channel.weight, sums.y, weighted.y);
      if (leaves) {
        weighted = {__shfl_sync(~0u, weighted.x, 0), __shfl_sync(~0u, weighted.y, 0)};
        if (lane < s.copies) {
          device_stream::publish(words + device_stream::first_word<kSumsWords>(s, lane, last.unit) +
                                     device_stream::participant(s, last),
                                 weighted.x, weighted.y);
        }
        if (lane == 0) device::arrive(&shared.barriers.taken[unit_slot]);
        weighted = {};
      }
    }
    if (leaves) unit_slot = (unit_slot + 1) % kUnitSlots;
  }
}

// One warp adds up all participants' shares of each unit, in the same order in every block.
__device__ __forceinline__ void merge_units(Stream const& s, float elements, GradientShared& shared,
                                            uint64_t const* words) {
  int const count = device_stream::participants(s);
  unsigned current = ~0u;
  RingCursor unit;
  for (Cursor cursor(s); cursor.valid(s); cursor.advance(s)) {
    if (cursor.unit == current) continue;
    if (current != ~0u) unit.advance(kUnitSlots);
    current = cursor.unit;
    device::wait(&shared.barriers.taken[unit.stage], unit.parity);
    auto const gathered = device_stream::Words<kSumsWords>::gather(
        words + device_stream::first_word<kSumsWords>(s, int(blockIdx.x) % s.copies, current),
        count);
    float2 total{};
#pragma unroll
    for (int i = 0; i < kPolls; ++i) {
      float2 const value = device_stream::unpacked(gathered.values[i][0]);
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
__device__ __forceinline__ void replace_chunks(GradientAffine const& affine, Stream const& s,
                                               GradientShared& shared, unsigned char* ring,
                                               float2 const* table, int thread) {
  constexpr int kVector = 16 / sizeof(T);
  StatisticsAhead ahead(affine, s);
  UnitStatistics statistics{};
  GroupTerms terms{};
  RingCursor place;
  RingCursor unit;
  unsigned current = ~0u;
  for (Cursor cursor(s); cursor.valid(s); cursor.advance(s), place.advance(s.slots)) {
    if (cursor.unit != current) {
      if (current != ~0u) unit.advance(kUnitSlots);
      current = cursor.unit;
      statistics = ahead.enter(s);
      device::wait(&shared.barriers.merged[unit.stage], unit.parity);
      terms = shared.terms[unit.stage];
    }
    Extent const extent = Extent::of(s, cursor.chunk);
    Channel const channel = channel_of(affine, statistics, table, current, extent.run);
    device::wait(&shared.barriers.full[place.stage], place.parity);
    unsigned char* const slot = ring + place.stage * kSlotBytes + thread * 16;
#pragma unroll
    for (int i = 0; i < kPieceVectors; ++i) {
      if (unsigned(thread + i * kWorkers) < extent.vectors) {
        auto* const target = reinterpret_cast<T*>(slot + i * kWorkers * 16);
        auto const x = Pack<T, kVector>::load(target);
        auto const g = Pack<T, kVector>::load(
            reinterpret_cast<T const*>(slot + kPieceBytes + i * kWorkers * 16));
        Pack<T, kVector> result;
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
          result.values[v] = device::from_float<T>(
              grad_input_of<kActivate>(device::to_float(x.values[v]), device::to_float(g.values[v]),
                                       channel, terms, affine));
        }
        result.store(target);
      }
    }
    shared.barriers.finish(place.stage);
  }
}

template <class T, bool kActivate>
__global__ void __launch_bounds__(kThreadsPerBlock, 1)
    gradients_stream(uint4 const* input, uint4 const* grad, uint4* output, GradientAffine affine,
                     float2* __restrict__ partials, uint64_t* words, Stream stream,
                     float elements) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ GradientShared shared;
  auto* const table = reinterpret_cast<float2*>(ring + stream.slots * kSlotBytes);
  for (int c = threadIdx.x; c < affine.channels; c += kThreadsPerBlock) {
    table[c] =
        make_float2(affine.weight ? device::load_as_float(affine.weight, c, affine.dtype) : 1.0f,
                    affine.bias ? device::load_as_float(affine.bias, c, affine.dtype) : 0.0f);
  }
  shared.barriers.init(stream.slots);
  __syncthreads();
  int const thread = int(threadIdx.x);
  if (thread < kWorkers) {
    replace_chunks<T, kActivate>(affine, stream, shared, ring, table, thread);
  } else if (thread < 2 * kWorkers) {
    take_sums<T, kActivate>(affine, stream, shared, ring, table, partials, words,
                            thread - kWorkers);
  } else if (thread < 2 * kWorkers + 32) {
    merge_units(stream, elements, shared, words);
  } else if (thread == 2 * kWorkers + 32) {
    device_stream::load_chunks<kPieces>({input, grad}, stream, shared.barriers, ring);
  } else if (thread == 2 * kWorkers + 64) {
    device_stream::store_chunks(output, stream, shared.barriers, ring);
  }
#else
  __trap();
#endif
}

template <class T, bool kActivate>
void launch(StreamPlan const& plan, GroupNormProblem const& p, GradientTensors const& tensors,
            float2* partials, uint64_t* words, cudaStream_t stream) {
  auto const kernel = gradients_stream<T, kActivate>;
  FUSEDCONV_CUDA(
      "groupnorm gradients: streamed",
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared_bytes));
  auto const* input = static_cast<uint4 const*>(tensors.input);
  auto const* grad = static_cast<uint4 const*>(tensors.grad_output);
  auto* output = static_cast<uint4*>(tensors.grad_input);
  GradientAffine affine = gradient_affine_of(p, tensors);
  Stream s = plan.stream;
  float elements = float(p.group_size());
  void* arguments[] = {&input, &grad, &output, &affine, &partials, &words, &s, &elements};
  FUSEDCONV_CUDA("groupnorm gradients: streamed",
                 cudaLaunchCooperativeKernel(kernel, dim3(s.blocks), dim3(kThreadsPerBlock),
                                             arguments, plan.shared_bytes, stream));
}

}  // namespace

StreamPlan plan_streamed_gradients(GroupNormProblem const& p, bool aligned, int device) {
  StreamPlan plan = plan_stream(p, kPieces, aligned, device);
  // Chunks do not straddle planes: small planes would leave most of a slot empty.
  if (plan.obstacle.empty() && plan.stream.plane_vectors < plan.stream.chunk_vectors / 2) {
    plan.obstacle = "planes are smaller than half a chunk";
  }
  return plan;
}

void streamed_gradients(StreamPlan const& plan, GroupNormProblem const& p,
                        GradientTensors const& tensors, float2* partials, uint64_t* words,
                        cudaStream_t stream) {
  FUSEDCONV_CHECK(plan.obstacle.empty(), "streamed_gradients: ", plan.obstacle);
  FUSEDCONV_CUDA("groupnorm gradients: streamed",
                 cudaMemsetAsync(words, 0xff, plan.words * sizeof(uint64_t), stream));
  bool const activate =
      p.activation_before != Activation::kIdentity || p.activation_after != Activation::kIdentity;
  device::dispatch_type(p.dtype, [&](auto zero) {
    device::dispatch_bool(activate, [&](auto active) {
      launch<decltype(zero), active.value>(plan, p, tensors, partials, words, stream);
    });
  });
}

}  // namespace fusedconv::groupnorm
