#include "groupnorm/streamed.hpp"

#include <algorithm>
#include <map>
#include <mutex>

#include "cuda/math.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"
#include "groupnorm/affine.hpp"
#include "groupnorm/moments.hpp"
#include "groupnorm/running_moments.hpp"
#include "groupnorm/stream_device.hpp"

namespace fusedconv::groupnorm {
namespace {

using device::Moments;
using device::Pack;
using device::RingCursor;
using device_stream::Cursor;
using device_stream::Extent;

constexpr int kWorkerWarps = kWorkers / 32;
constexpr int kMergers = 2;  // warps that take units in turn: one unit waits for words from afar
constexpr int kThreadsPerBlock = 2 * kWorkers + (kMergers + 2) * 32;
static_assert(kUnitSlots % kMergers == 0, "a warp waits for every phase of its slots");

struct StreamShared {
  device_stream::Barriers barriers;
  Statistics statistics[kUnitSlots];
  Moments partial[kWorkerWarps];
};

// kWorkers threads normalise chunks in place.
template <class T, bool kActivate>
__device__ __forceinline__ void normalize_chunks(Affine const& affine, Stream const& s,
                                                 StreamShared& shared, unsigned char* ring,
                                                 float2 const* table, int thread) {
  constexpr int kVector = 16 / sizeof(T);
  using Values = Pack<T, kVector>;
  RingCursor place;
  RingCursor unit;
  unsigned current = ~0u;
  unsigned first_channel = 0;
  Statistics statistics{};
  for (Cursor cursor(s); cursor.valid(s); cursor.advance(s), place.advance(s.slots)) {
    if (cursor.unit != current) {
      if (current != ~0u) unit.advance(kUnitSlots);
      current = cursor.unit;
      first_channel = current % unsigned(affine.groups) * unsigned(affine.channels_per_group);
      device::wait(&shared.barriers.merged[unit.stage], unit.parity);
      statistics = shared.statistics[unit.stage];
    }
    device::wait(&shared.barriers.full[place.stage], place.parity);
    Extent const extent = Extent::of(s, cursor.chunk);
    T* const slot = reinterpret_cast<T*>(ring + place.stage * kSlotBytes) + thread * kVector;
    auto const channel_of = [&](unsigned vector) {
      float2 const entry = table[first_channel + vector / s.plane_vectors];
      return ChannelAffine::of(statistics, entry.x, entry.y);
    };
    auto const normalized_values = [&](Values const& values, ChannelAffine const& channel) {
      Values result;
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        result.values[v] = device::from_float<T>(
            normalized<kActivate>(device::to_float(values.values[v]), channel, affine));
      }
      return result;
    };
    unsigned const channel = extent.first / s.plane_vectors;
    bool const whole = extent.vectors == kWorkers * kSlotVectors &&
                       extent.first + extent.vectors <= (channel + 1) * s.plane_vectors;
    if (whole) {  // usual with large planes: full, and of one channel
      ChannelAffine const constants = channel_of(extent.first);
      Values values[kSlotVectors];
#pragma unroll
      for (int i = 0; i < kSlotVectors; ++i)
        values[i] = Values::load(slot + i * kWorkers * kVector);
#pragma unroll
      for (int i = 0; i < kSlotVectors; ++i) {
        normalized_values(values[i], constants).store(slot + i * kWorkers * kVector);
      }
    } else {
#pragma unroll 1
      for (unsigned i = 0; thread + i * kWorkers < extent.vectors; ++i) {
        ChannelAffine const constants = channel_of(extent.first + thread + i * kWorkers);
        normalized_values(Values::load(slot + i * kWorkers * kVector), constants)
            .store(slot + i * kWorkers * kVector);
      }
    }
    shared.barriers.finish(place.stage);
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
  RingCursor place;
  int unit_slot = 0;
  RunningMoments<T> running;
  for (Cursor cursor(s); cursor.valid(s); place.advance(s.slots)) {
    device::wait(&shared.barriers.full[place.stage], place.parity);
    unsigned const vectors = Extent::of(s, cursor.chunk).vectors;
    T const* const slot =
        reinterpret_cast<T const*>(ring + place.stage * kSlotBytes) + thread * kVector;
    if (vectors == kWorkers * kSlotVectors) {
      float values[kSlotVectors * kVector];
#pragma unroll
      for (int i = 0; i < kSlotVectors; ++i) {
        auto const pack = Pack<T, kVector>::load(slot + i * kWorkers * kVector);
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
          values[i * kVector + v] = before<kActivate>(activation, device::to_float(pack.values[v]));
        }
      }
      running.add(values);
    } else {
#pragma unroll 1
      for (unsigned i = 0; thread + i * kWorkers < vectors; ++i) {
        auto const pack = Pack<T, kVector>::load(slot + i * kWorkers * kVector);
        float values[kVector];
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
          values[v] = before<kActivate>(activation, device::to_float(pack.values[v]));
        }
        running.add(values);
      }
    }
    Cursor const last = cursor;
    cursor.advance(s);
    if (cursor.unit == last.unit) continue;
    Moments own_moments = device::merge_warp(running.whole());
    if (lane == 0) shared.partial[warp] = own_moments;
    device::sync_threads(kBarrier, kWorkers);
    if (warp == 0) {
      own_moments =
          device::merge_warp<kWorkerWarps>(lane < kWorkerWarps ? shared.partial[lane] : Moments{})
              .of_first_lane();
      if (lane < s.copies) {
        uint64_t* const own = words + device_stream::first_word<kMomentsWords>(s, lane, last.unit) +
                              device_stream::participant(s, last) * kMomentsWords;
        device_stream::publish(own, own_moments.mean, own_moments.low);
        device_stream::publish(own + 1, own_moments.m2, 0.0f);
      }
      if (lane == 0) device::arrive(&shared.barriers.taken[unit_slot]);
    }
    unit_slot = (unit_slot + 1) % kUnitSlots;
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
  int const count = device_stream::participants(s);
  float const full = vector_values * float(s.chunk_vectors);
  float const last = vector_values * float(s.run_vectors - (s.chunks - 1) * s.chunk_vectors);
  // A participant whose first chunk is c < blocks holds rounds + (c <= rest) chunks.
  unsigned const rounds = (s.chunks - 1) / s.blocks;
  unsigned const rest = (s.chunks - 1) - rounds * s.blocks;
  unsigned current = ~0u;
  RingCursor unit;
  for (Cursor cursor(s); cursor.valid(s); cursor.advance(s)) {
    if (cursor.unit == current) continue;
    if (current != ~0u) unit.advance(kUnitSlots);
    current = cursor.unit;
    if (unit.stage % kMergers != merger) continue;
    // The block that holds the unit's first chunk.
    unsigned const first = blockIdx.x >= cursor.chunk ? blockIdx.x - cursor.chunk
                                                      : blockIdx.x + s.blocks - cursor.chunk;
    device::wait(&shared.barriers.taken[unit.stage], unit.parity);
    auto const gathered = device_stream::Words<kMomentsWords>::gather(
        words + device_stream::first_word<kMomentsWords>(s, int(blockIdx.x) % s.copies, current),
        count);
    // Lanes with words have one of the first poll.
    float const reference = device_stream::unpacked(gathered.values[0][0]).x;
    device::RelativeMoments parts;
#pragma unroll
    for (int i = 0; i < kPolls; ++i) {
      unsigned const source = lane + 32 * i;
      if (source >= unsigned(count)) continue;
      unsigned const chunk =
          s.chunks <= s.blocks ? source : source - first + (source < first ? s.blocks : 0);
      float const size = float(rounds - (chunk > rest)) * full + (chunk == rest ? last : full);
      float2 const value = device_stream::unpacked(gathered.values[i][0]);
      float const m2 = device_stream::unpacked(gathered.values[i][1]).x;
      parts.merge(Moments{size, value.x, value.y, m2}.about(reference));
    }
    Moments const total = device::merge_warp(Moments::of(reference, parts));
    if (lane == 0) {
      Statistics const statistics = device::statistics_of(total, eps);
      shared.statistics[unit.stage] = statistics;
      device::arrive(&shared.barriers.merged[unit.stage]);
      if (cursor.chunk == 0) device::store(saved, current, statistics);
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
    normalize_chunks<T, kActivate>(affine, stream, shared, ring, table, thread);
  } else if (thread < 2 * kWorkers) {
    take_moments<T, kActivate>(stream, affine.activation_before, shared, ring, words,
                               thread - kWorkers);
  } else if (thread < 2 * kWorkers + kMergers * 32) {
    merge_units(stream, thread / 32 - 2 * kWorkerWarps, 16.0f / sizeof(T), eps, shared, words,
                saved);
  } else if (thread == 2 * kWorkers + kMergers * 32) {
    device_stream::load_chunks<1>({input}, stream, shared.barriers, ring);
  } else if (thread == 2 * kWorkers + (kMergers + 1) * 32) {
    device_stream::store_chunks(output, stream, shared.barriers, ring);
  }
#else
  __trap();
#endif
}

template <class T, bool kActivate>
void launch(StreamPlan const& plan, Passes const& passes, GroupNormTensors const& tensors,
            uint64_t* words, cudaStream_t stream) {
  GroupNormProblem const& p = passes.problem;
  auto const kernel = normalize_stream<T, kActivate>;
  FUSEDCONV_CUDA(
      "groupnorm_streamed",
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared_bytes));
  auto const* input = static_cast<uint4 const*>(tensors.input);
  auto* output = static_cast<uint4*>(tensors.output);
  Affine affine = affine_of(p, tensors.weight, tensors.bias, nullptr);
  StatisticsTargets saved{.mean = tensors.mean, .rstd = tensors.rstd};
  Stream s = plan.stream;
  float eps = float(p.eps);
  void* arguments[] = {&input, &output, &affine, &saved, &words, &s, &eps};
  FUSEDCONV_CUDA("groupnorm_streamed",
                 cudaLaunchCooperativeKernel(kernel, dim3(s.blocks), dim3(kThreadsPerBlock),
                                             arguments, plan.shared_bytes, stream));
}

StreamPlan refused(std::string reason) {
  StreamPlan plan;
  plan.obstacle = std::move(reason);
  return plan;
}

// What plans ask a device for. Some of these queries take hundreds of microseconds, and gradients
// plan on every call.
struct DeviceLimits {
  bool bulk_copies;
  bool cooperative;
  int multiprocessors;
  int shared_bytes;  // of a block
  int64_t l2_bytes;
  double bytes_per_ns;  // of memory, by its clock; 0 where the driver does not say
};

DeviceLimits query_limits(int device) {
  auto const attribute = [device](cudaDeviceAttr which) {
    int value = 0;
    FUSEDCONV_CUDA("plan_stream", cudaDeviceGetAttribute(&value, which, device));
    return value;
  };
  // A device newer than those compiled for runs what was written for older ones.
  cudaFuncAttributes compiled{};
  FUSEDCONV_CUDA("plan_stream", cudaFuncGetAttributes(&compiled, normalize_stream<float, false>));
  return {compiled.ptxVersion >= 90,
          attribute(cudaDevAttrCooperativeLaunch) != 0,
          attribute(cudaDevAttrMultiProcessorCount),
          attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
          attribute(cudaDevAttrL2CacheSize),
          2e-6 * attribute(cudaDevAttrMemoryClockRate) *
              (attribute(cudaDevAttrGlobalMemoryBusWidth) / 8)};
}

DeviceLimits limits_of(int device) {
  // Absent: an H200, so that plans can be explained on any machine.
  if (device < 0) return {true, true, 132, 227 << 10, int64_t(60) << 20, 4917.0};
  static std::mutex mutex;
  static std::map<int, DeviceLimits> known;
  std::lock_guard const lock(mutex);
  auto const found = known.find(device);
  if (found != known.end()) return found->second;
  return known.emplace(device, query_limits(device)).first->second;
}

}  // namespace

StreamPlan plan_stream(GroupNormProblem const& p, int tensors, bool aligned, int device) {
  int64_t const vector = 16 / size_of(p.dtype);
  if (p.layout != Layout::kChannelsFirst) return refused("a group is not one run in memory");
  if (!aligned) return refused("an address is not a multiple of 16 bytes");
  if (p.pixels % vector != 0) {
    return refused(detail::join("a plane of ", p.pixels, " elements is not whole 16-byte vectors"));
  }
  DeviceLimits const limits = limits_of(device);
  if (!limits.bulk_copies) {
    return refused("the device runs no code with bulk copies (compute capability 9.0)");
  }
  if (!limits.cooperative) return refused("the device has no cooperative launches");
  int64_t const units = p.batch * p.groups;
  int64_t const limit = int64_t(1) << 31;
  if (units < 1 || units >= limit) return refused(detail::join("there are ", units, " groups"));
  if (p.group_size() >= limit) return refused("a group has 2^31 elements or more");

  StreamPlan plan;
  Stream& s = plan.stream;
  s.units = unsigned(units);
  s.plane_vectors = unsigned(p.pixels / vector);
  s.unit_vectors = p.group_size() / vector;
  s.run_vectors = tensors == 1 ? unsigned(s.unit_vectors) : s.plane_vectors;
  s.chunk_vectors = unsigned(kWorkers * kSlotVectors / tensors);
  s.run_chunks = unsigned(ceil_div(s.run_vectors, s.chunk_vectors));
  s.chunks = s.run_chunks * unsigned(tensors == 1 ? 1 : p.channels_per_group());
  s.blocks = unsigned(std::min<int64_t>({limits.multiprocessors, kMaxBlocks, units * s.chunks}));
  s.step_units = s.blocks / s.chunks;
  s.step_chunks = s.blocks % s.chunks;
  int const table = int(round_up(p.channels * int64_t(sizeof(float2)), 128));
  s.slots = std::min<int>(kMaxSlots, (limits.shared_bytes - table - (2 << 10)) / kSlotBytes);
  int64_t const held = ceil_div(s.chunks, s.blocks);
  if (held + 1 > s.slots) {
    return refused(detail::join("a group needs ", held, " of a block's ", s.slots,
                                " slots of shared memory, and one must be free"));
  }
  s.copies = tensors == 1 ? 2 : 4;
  plan.words =
      s.copies * units * std::min(s.chunks, s.blocks) * (tensors == 1 ? kMomentsWords : kSumsWords);
  // Per block: a chunk's bytes, loaded and stored, at the rate of a copy, which is 0.87 of what the
  // memory's clock gives. What fits L2 is not held up.
  double const moved = double(s.chunk_vectors) * 16 * (tensors + 1);
  int64_t const total = p.batch * p.channels * p.pixels * size_of(p.dtype) * (tensors + 1);
  if (limits.bytes_per_ns > 0 && total > 2 * limits.l2_bytes) {
    // Gradients have fewer units in the ring, and need their stores spread further.
    s.pace =
        unsigned((tensors == 1 ? 0.965 : 1.1) * moved * s.blocks / (0.87 * limits.bytes_per_ns));
  }
  plan.shared_bytes = s.slots * kSlotBytes + table;
  return plan;
}

StreamPlan plan_streamed(Passes const& passes, int64_t batch, bool aligned, int device) {
  GroupNormProblem p = passes.problem;
  p.batch = batch;
  if (passes.output_dtype != p.dtype) return refused("output and input dtype differ");
  if (passes.output_layout != p.layout) return refused("output and input layout differ");
  if (passes.row_channels != p.channels) return refused("rows of channels are padded");
  return plan_stream(p, 1, aligned, device);
}

int64_t streamed_workspace_bytes(StreamPlan const& plan) {
  return plan.words * int64_t(sizeof(uint64_t));
}

void normalize_streamed(StreamPlan const& plan, Passes const& passes,
                        GroupNormTensors const& tensors, void* workspace, cudaStream_t stream) {
  GroupNormProblem const& p = passes.problem;
  FUSEDCONV_CHECK(plan.stream.slots > 0, "normalize_streamed: ", plan.obstacle);
  FUSEDCONV_CHECK(device::is_aligned(tensors.input, 16) && device::is_aligned(tensors.output, 16),
                  "normalize_streamed: input or output is not aligned to 16 bytes");
  FUSEDCONV_CUDA("groupnorm_streamed",
                 cudaMemsetAsync(workspace, 0xff, streamed_workspace_bytes(plan), stream));
  bool const activate =
      p.activation_before != Activation::kIdentity || p.activation_after != Activation::kIdentity;
  device::dispatch_type(p.dtype, [&](auto zero) {
    device::dispatch_bool(activate, [&](auto active) {
      launch<decltype(zero), active.value>(plan, passes, tensors, static_cast<uint64_t*>(workspace),
                                           stream);
    });
  });
}

}  // namespace fusedconv::groupnorm
