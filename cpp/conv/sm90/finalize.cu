// From the order of the convolution's accumulators to a tensor, normalised on the way.
#include <cstdint>
#include <type_traits>

#include "conv/sm90/passes.hpp"
#include "conv/sm90/raster.hpp"
#include "cuda/async.hpp"
#include "cuda/launch.hpp"
#include "cuda/math.hpp"
#include "cuda/store_shared.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"
#include "groupnorm/affine.hpp"
#include "groupnorm/launch.hpp"

namespace fusedconv::conv::sm90 {
namespace {

using groupnorm::Affine;
using groupnorm::ChannelAffine;

constexpr int kThreads = 256;
constexpr int kColumns = 128;  // positions of a block

struct Params {
  Raster raster;
  Affine affine;
  int64_t pixels;
  int channels;
  int blocks_m;
  int strips;
  int width;  // channels first: elements that a store may take where pixels allow it
  bool wide;  // channels last: 16-byte stores
};

// A block transposes 64 channels of 128 positions in shared memory:
// 1. It loads what two warps' worth of accumulators hold, 16 bytes a thread, and normalises it.
// 2. Channels first goes out in runs of positions, channels last in 16-byte runs of channels.
// 3. The same again for the convolution itself, where that is wanted.
template <class T, class U, bool kChannelsFirst, int kKnown>
__global__ void __launch_bounds__(kThreads)
    finalize_kernel(Params const p, T const* __restrict__ input, U* __restrict__ output,
                    T* __restrict__ conv_output) {
  constexpr int kVector = 16 / sizeof(T);
  constexpr int kLoads = kBlockM * kColumns / kVector / kThreads;
  // Rows of the tile, padded against bank conflicts by whole 16 bytes.
  constexpr auto row_of = [](int bytes) {
    return kChannelsFirst ? kColumns + 8 : kBlockM + 16 / bytes;
  };
  constexpr int kRows = kChannelsFirst ? kBlockM : kColumns;
  static_assert(sizeof(T) <= sizeof(U), "the tile holds either type");
  __shared__ __align__(16) U tile[kRows * row_of(sizeof(U))];

  Raster const& raster = p.raster;
  int block = int(device::block_from_last());
  int const parts = raster.block_n / kColumns;
  int const part = block % parts;
  block /= parts;
  // Strips side by side come at the same time: they share the cache lines at their borders.
  int const strip = block % p.strips;
  block /= p.strips;
  int const block_m = block % p.blocks_m;
  block /= p.blocks_m;
  int const tile_index = block % raster.strip_warpgroup_tiles;
  int const sample = block / raster.strip_warpgroup_tiles;
  int const position0 = tile_index * raster.block_n + part * kColumns;
  if (position0 >= raster.positions) return;

  // 64 threads for the 16 channels of an accumulating warp.
  int const warp = threadIdx.x / 64;
  int const lane = threadIdx.x % 32;
  int const channel0 = block_m * kBlockM;
  int const row = warp * 16 + lane / 4;
  int const column = lane % 4 * 2;
  T const* const source =
      input +
      (((int64_t(sample) * p.strips + strip) * raster.strip_warpgroup_tiles + tile_index) *
           p.blocks_m * kBlockM +
       block_m * kBlockM + warp * 16) *
          raster.block_n +
      part * (16 * kColumns) + threadIdx.x % 64 * kVector;
  device::Pack<T, kVector> loaded[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    loaded[i] = device::Pack<T, kVector>::load(source + i * 64 * kVector);
  }
  ChannelAffine const constants[2] = {ChannelAffine::of(p.affine, sample, channel0 + row),
                                      ChannelAffine::of(p.affine, sample, channel0 + row + 8)};

  // Vector i holds, for one or two octets, two positions of two channels.
  auto const put = [&](auto normalize) {
    using Result = decltype(normalize(T{}, 0));
    constexpr int kRow = row_of(sizeof(Result));
    auto* const elements = reinterpret_cast<Result*>(tile);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      device::Pack<Result, 2> pairs[kVector / 2];
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        pairs[j / 2].values[j % 2] = normalize(loaded[i].values[j], j % 4 / 2);
      }
      int const octet0 = (threadIdx.x % 64 / 32 + 2 * i) * (kVector / 4);
      if constexpr (!kChannelsFirst && sizeof(Result) == 2) {
        // Eight channels of eight positions are a matrix: of two octets, two below each other.
        int const position = (octet0 + lane / 16) * 8 + lane % 8;
        Result* const at = elements + position * kRow + warp * 16 + lane / 8 % 2 * 8;
        device::store_matrices_transposed(
            device::shared_address(at),
            {pairs[0].bits[0], pairs[1].bits[0], pairs[2].bits[0], pairs[3].bits[0]});
      } else {
#pragma unroll
        for (int j = 0; j < kVector; j += 2) {
          int const r = row + j % 4 / 2 * 8;
          int const c = (octet0 + j / 4) * 8 + column;
          if constexpr (kChannelsFirst) {
            pairs[j / 2].store(elements + r * kRow + c);
          } else {
            elements[c * kRow + r] = pairs[j / 2].values[0];
            elements[(c + 1) * kRow + r] = pairs[j / 2].values[1];
          }
        }
      }
    }
  };

  auto const write = [&](auto* target) {
    using Result = std::remove_pointer_t<decltype(target)>;
    constexpr int kRow = row_of(sizeof(Result));
    auto const* const elements = reinterpret_cast<Result const*>(tile);
    int const thread_lane = threadIdx.x % 32;
    if constexpr (kChannelsFirst) {
      // A lane keeps four neighbouring positions for all rows, half an octet.
      Result* const planes = target + (int64_t(sample) * p.channels + channel0) * p.pixels;
      int const rows = min(kBlockM, p.channels - channel0);
      int const first = thread_lane * 4;
      Octet const octet(raster, strip, position0 + first / 8 * 8);
      int const k = first % 8;
      int const pixel = octet.pixel(k);
      bool valid[4];
      bool run = true;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        valid[i] = octet.valid_either(k + i);
        run &= valid[i] && octet.pixel(k + i) == pixel + i;
      }
      // Elements that one store may take: rows of the output begin where they like.
      int const width = !run ? 1 : pixel % 4 == 0 ? p.width : pixel % 2 == 0 ? min(p.width, 2) : 1;
#pragma unroll 4
      for (int r = int(threadIdx.x) / 32; r < rows; r += kThreads / 32) {
        auto const values = device::Pack<Result, 4>::load(elements + r * kRow + first);
        Result* const plane = planes + r * p.pixels;
        if (width == 4) {
          values.store(plane + pixel);
        } else if (width == 2) {
#pragma unroll
          for (int i = 0; i < 4; i += 2) {
            device::Pack<Result, 2> pair;
            pair.values[0] = values.values[i];
            pair.values[1] = values.values[i + 1];
            pair.store(plane + pixel + i);
          }
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (valid[i]) plane[octet.pixel(k + i)] = values.values[i];
          }
        }
      }
    } else {
      constexpr int kWide = 16 / sizeof(Result);
      constexpr int kLanes = kBlockM / kWide;  // of a position
      int const channel = thread_lane % kLanes * kWide;
      int const left = p.channels - channel0 - channel;
      Result* const channels =
          target + int64_t(sample) * p.pixels * p.channels + channel0 + channel;
#pragma unroll 4
      for (int c = int(threadIdx.x) / kLanes; c < kColumns; c += kThreads / kLanes) {
        Octet const octet(raster, strip, position0 + c / 8 * 8);
        if (!octet.valid_either(c % 8) || left <= 0) continue;
        auto const values = device::Pack<Result, kWide>::load(elements + c * kRow + channel);
        Result* const pixel = channels + int64_t(octet.pixel(c % 8)) * p.channels;
        if (p.wide && left >= kWide) {
          values.store(pixel);
        } else {
#pragma unroll
          for (int i = 0; i < kWide; ++i) {
            if (i < left) pixel[i] = values.values[i];
          }
        }
      }
    }
  };

  put([&](T value, int which) {
    return device::from_float<U>(
        groupnorm::normalized<kKnown>(device::to_float(value), constants[which], p.affine));
  });
  __syncthreads();
  write(output);
  if (conv_output != nullptr) {
    __syncthreads();
    put([](T value, int) { return value; });
    __syncthreads();
    write(conv_output);
  }
}

}  // namespace

void finalize(Config const& config, GroupNormProblem const& problem, FinalizeTensors const& tensors,
              cudaStream_t stream) {
  ConvProblem const& c = config.problem;
  Schedule const& s = config.schedule;
  bool const first = problem.output_layout == Layout::kChannelsFirst;
  Params p{};
  p.raster = Raster::of(c, s);
  p.affine = groupnorm::affine_of(problem, tensors.weight, tensors.bias, tensors.statistics);
  p.pixels = int64_t(c.z) * c.p * c.q;
  p.channels = c.k;
  p.blocks_m = int(ceil_div(c.k, kBlockM));
  p.strips = s.strips;
  bool const aligned =
      device::is_aligned(tensors.output, 16) &&
      (tensors.conv_output == nullptr || device::is_aligned(tensors.conv_output, 16));
  p.width = !aligned ? 1 : p.pixels % 4 == 0 ? 4 : p.pixels % 2 == 0 ? 2 : 1;
  p.wide = aligned && c.k * size_of(problem.dtype) % 16 == 0;
  dim3 const grid = device::checked_grid(
      "sm90 finalize", problem.batch * s.warpgroup_tiles * p.blocks_m * (s.block_n / kColumns));
  device::dispatch_type(problem.dtype, [&](auto t) {
    using T = decltype(t);
    auto const launch = [&](auto u) {
      using U = decltype(u);
      auto const launch_as = [&](auto known) {
        device::dispatch_bool(first, [&](auto channels_first) {
          FUSEDCONV_CUDA(
              "sm90 finalize",
              device::launch(&finalize_kernel<T, U, channels_first.value, known.value>, grid,
                             kThreads, 0, stream, p, static_cast<T const*>(tensors.input),
                             static_cast<U*>(tensors.output),
                             static_cast<T*>(tensors.conv_output)));
        });
      };
      // A value at a time, a call for each would take longer than memory.
      groupnorm::dispatch_known<true, groupnorm::kNoActivation, groupnorm::kReluBefore,
                                groupnorm::kReluAfter, groupnorm::kQuickGeluBefore,
                                groupnorm::kQuickGeluAfter, groupnorm::kQuickSiluBefore,
                                groupnorm::kQuickSiluAfter>(problem, launch_as);
    };
    if (problem.output_dtype == problem.dtype) {
      launch(T{});
    } else {
      launch(float{});
    }
  });
}

}  // namespace fusedconv::conv::sm90
