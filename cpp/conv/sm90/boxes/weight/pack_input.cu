#include "conv/sm90/boxes/weight/pack_input.hpp"

#include <algorithm>
#include <cstdint>

#include "conv/failure.hpp"
#include "conv/sm90/boxes/weight/params.hpp"
#include "cuda/launch.hpp"
#include "cuda/math.hpp"

namespace fusedconv::conv::sm90::boxes::weight {
namespace {

constexpr int kPieces = kChunkBytes / kPieceBytes;  // of a channel's positions
constexpr int kVector = 4;                          // channels of a thread
constexpr int kTileThreads = kUnit / kVector * kPieces;
constexpr int kPackThreads = 2 * kTileThreads;
constexpr int kPiecePositions = kPieceBytes / 4;
constexpr int64_t kMostBlocks = 1 << 20;

struct Extents {
  int d, h, w, batch, channels;
};

// One thread for a piece of kVector channels' positions. Eight neighbours have the pieces of the
// same channels, so that whole rows are written. kWhole: a piece's positions are of one line of the
// box.
template <bool kWhole>
__global__ void __launch_bounds__(kPackThreads)
    pack_input_kernel(__grid_constant__ Params const p, Extents const e,
                      cutlass::FastDivmod const box_w, cutlass::FastDivmod const box_h,
                      cutlass::FastDivmod const box_d, float const* __restrict__ input,
                      unsigned char* __restrict__ packed) {
  int const positions = p.box_bytes / kChunkBytes;
  int64_t const tiles = p.slabs * p.all_channels;
  int const piece = int(threadIdx.x) % kPieces;
  int const first = int(threadIdx.x) % kTileThreads / kPieces * kVector;  // of the channels
  int64_t const step = int64_t(gridDim.x) * (kPackThreads / kTileThreads);
  for (int64_t tile =
           int64_t(blockIdx.x) * (kPackThreads / kTileThreads) + int(threadIdx.x) / kTileThreads;
       tile < tiles; tile += step) {
    int const slab = int(tile / p.all_channels);
    int const c = int(tile - int64_t(slab) * p.all_channels) * kUnit + first;
    Origin const at(p, slab);
    float4 pixels[kPiecePositions];
    int64_t pixel = 0;
    int columns = 0;  // of the piece that exist, from its first on
#pragma unroll
    for (int v = 0; v < kPiecePositions; ++v) {
      if (!kWhole || v == 0) {
        int const position = piece * kPiecePositions + v;
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
      pixels[v] = float4{};
      if (v < columns) {
        pixels[v] = *reinterpret_cast<float4 const*>(input + (pixel + v) * e.channels + c);
      }
    }
    auto const store = [&](int i, float float4::* channel) {
      int const row = first + i;
      *reinterpret_cast<float4*>(packed + tile * kTileBytes + row * kChunkBytes +
                                 (piece ^ (row % 8)) * kPieceBytes) =
          make_float4(
              device::round_to_tf32(pixels[0].*channel), device::round_to_tf32(pixels[1].*channel),
              device::round_to_tf32(pixels[2].*channel), device::round_to_tf32(pixels[3].*channel));
    };
    store(0, &float4::x);
    store(1, &float4::y);
    store(2, &float4::z);
    store(3, &float4::w);
  }
}

}  // namespace

void pack_input(Config const& config, void const* input, void* packed, cudaStream_t stream) {
  Problem const& c = config.problem;
  Params const p = Params::of({.config = config});
  auto const blocks =
      unsigned(std::min(ceil_div(p.slabs * p.all_channels, int64_t(2)), kMostBlocks));
  Extents const extents{c.axes[0].output, c.axes[1].output, c.axes[2].output, int(config.batch),
                        c.output_channels};
  auto const kernel =
      p.box[2] % kPiecePositions == 0 ? &pack_input_kernel<true> : &pack_input_kernel<false>;
  device::launch(kernel, blocks, kPackThreads, 0, stream, p, extents, cutlass::FastDivmod(p.box[2]),
                 cutlass::FastDivmod(p.box[1]), cutlass::FastDivmod(p.box[0]),
                 static_cast<float const*>(input), static_cast<unsigned char*>(packed));
  conv::check_launch(config, int(config.batch), "pack_input", cudaGetLastError());
}

}  // namespace fusedconv::conv::sm90::boxes::weight
