#include "conv/sm90/boxes/weight/pack_input.hpp"

#include <algorithm>
#include <cstdint>

#include "conv/failure.hpp"
#include "conv/sm90/boxes/weight/params.hpp"
#include "cuda/math.hpp"

namespace fusedconv::conv::sm90::boxes::weight {
namespace {

constexpr int kPieces = kChunkBytes / kPieceBytes;  // of a channel's positions
constexpr int kPackThreads = kUnit * kPieces / 2;   // a tile's
constexpr int kPiecePositions = kPieceBytes / 4;
constexpr int64_t kMostBlocks = 1 << 20;

struct Extents {
  int d, h, w, batch, channels;
};

// One thread for two neighbouring pieces of a channel's positions. Neighbouring threads have
// neighbouring channels of the same positions. kWhole: a piece's positions are of one line of the
// box.
template <bool kWhole>
__global__ void __launch_bounds__(kPackThreads)
    pack_input_kernel(__grid_constant__ Params const p, Extents const e,
                      cutlass::FastDivmod const box_w, cutlass::FastDivmod const box_h,
                      cutlass::FastDivmod const box_d, float const* __restrict__ input,
                      unsigned char* __restrict__ packed) {
  int const positions = p.box_bytes / kChunkBytes;
  int64_t const tiles = p.slabs * p.all_channels;
  int const channel = int(threadIdx.x) % kUnit, pair = int(threadIdx.x) / kUnit;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    int const slab = int(tile / p.all_channels);
    int const c = int(tile - int64_t(slab) * p.all_channels) * kUnit + channel;
    Origin const at(p, slab);
    unsigned char* const row = packed + tile * kTileBytes + channel * kChunkBytes;
    float values[2][kPiecePositions];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int64_t pixel = 0;
      int columns = 0;  // of the piece that exist, from its first on
#pragma unroll
      for (int v = 0; v < kPiecePositions; ++v) {
        if (!kWhole || v == 0) {
          int const position = (pair * 2 + half) * kPiecePositions + v;
          int rest, w, h, d, n;
          box_w(rest, w, position);
          box_h(rest, h, rest);
          box_d(n, d, rest);
          w += at.w;
          h += at.h;
          d += at.d;
          n += at.sample;
          bool const inside =
              position < positions && c < e.channels && h < e.h && d < e.d && n < e.batch;
          pixel = ((int64_t(n) * e.d + d) * e.h + h) * e.w + w - v;
          columns = inside ? e.w - w + v : 0;
        }
        values[half][v] =
            v < columns ? device::round_to_tf32(input[(pixel + v) * e.channels + c]) : 0.0f;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const piece = (pair * 2 + half) ^ (channel % 8);
      float const(&own)[kPiecePositions] = values[half];
      *reinterpret_cast<float4*>(row + piece * kPieceBytes) =
          make_float4(own[0], own[1], own[2], own[3]);
    }
  }
}

}  // namespace

void pack_input(Config const& config, void const* input, void* packed, cudaStream_t stream) {
  Problem const& c = config.problem;
  Params const p = Params::of({.config = config});
  auto const blocks = unsigned(std::min(p.slabs * p.all_channels, kMostBlocks));
  Extents const extents{c.axes[0].output, c.axes[1].output, c.axes[2].output, int(config.batch),
                        c.output_channels};
  auto const kernel =
      p.box[2] % kPiecePositions == 0 ? &pack_input_kernel<true> : &pack_input_kernel<false>;
  kernel<<<blocks, kPackThreads, 0, stream>>>(
      p, extents, cutlass::FastDivmod(p.box[2]), cutlass::FastDivmod(p.box[1]),
      cutlass::FastDivmod(p.box[0]), static_cast<float const*>(input),
      static_cast<unsigned char*>(packed));
  conv::check_launch(config, int(config.batch), "pack_input", cudaGetLastError());
}

}  // namespace fusedconv::conv::sm90::boxes::weight
