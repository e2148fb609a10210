// Tiles of streamed gradients as they lie in padded lines: one bulk copy stores one, pads included,
// where warps that store line by line take an eighth of all instructions, and write sectors in
// part.
#pragma once

#include <cstdint>

#include "cuda/async.hpp"
#include "cuda/store_shared.hpp"
#include "groupnorm/gradient_lines.hpp"
#include "groupnorm/gradient_tiles.hpp"

namespace fusedconv::groupnorm {

// Images lie behind the ring, which has fewer stages then. What the first and last vectors hold of
// other tiles goes before and behind an image.
inline constexpr int kImageStages = ceil_div(kImages * kImageBytes, kStageBytes);

// Puts a vector of a tile's results where they are in its lines, which begin at `image`.
template <class T, int kPiece, int kVector>
__device__ __forceinline__ void scatter(device::Pack<T, kVector> const& results, Tile const& tile,
                                        Stream const& s, uint32_t image, int vector) {
  int const padding = int(s.line_vectors * kVector - s.line_elements);
  int const element = vector * kVector - int(tile.extent.skip);
  int const position = element + int(tile.extent.column);
  int const lines = int(__umulhi(unsigned(max(position, 0)), s.elements_inverse));
  int const left = (lines + 1) * int(s.line_elements) - position;  // elements of the first's line
  // Of the first element's line, and the next one.
  uint32_t const here = image + (element + lines * padding) * int(sizeof(T));
  uint32_t there = here + padding * int(sizeof(T));
  // Else the compiler selects what to add, which takes an operation more.
  asm("" : "+r"(there));
#pragma unroll
  for (int e = 0; e < kVector; e += kPiece) {
    uint32_t const target = (e == 0 || e < left ? here : there) + e * int(sizeof(T));
    if constexpr (kPiece * sizeof(T) == 8) {
      device::store_shared(target, make_uint2(results.bits[e], results.bits[e + 1]));
    } else if constexpr (kPiece * sizeof(T) == 4) {
      device::store_shared(target, results.bits[e / kPiece]);
    } else {
      device::store_shared(target, uint16_t(results.bits[e / 2] >> e % 2 * 16));
    }
  }
}

// A warp stores tiles that lie as in padded lines, one by one at the pace of store_tiles(). What
// follows a plane's last line may be nobody's.
template <class T>
__device__ __forceinline__ void store_images(uint4* output, Stream const& s, GradientShared& shared,
                                             unsigned char* ring) {
  constexpr unsigned kVector = 16 / sizeof(T);
  int const lane = int(threadIdx.x) % 32;
  unsigned const planes = s.tiles / s.run_tiles;  // of a unit
  unsigned const rest = s.line_elements - (s.line_vectors - 1) * kVector;
  device::RingCursor cursor;
  unsigned latest = 0;
  for (device_stream::LaneWalk walk(s); walk.count() > 0; walk.advance(s)) {
    unsigned const run = walk.tile().tile / s.run_tiles;
    unsigned const begin = (walk.tile().tile - run * s.run_tiles) * s.tile_vectors;
    bool const is_last = begin + s.tile_vectors >= s.run_vectors;
    unsigned const vectors = is_last ? s.run_vectors - begin - 1 : s.tile_vectors;
    uint4* const target =
        output + (int64_t(walk.tile().unit) * planes + run) * s.run_vectors + begin;
    for (int turn = 0; turn < walk.count(); ++turn) {
      if (lane == turn) {
        unsigned char const* const image =
            ring + s.stages * kStageBytes + cursor.stage * kImageBytes + kImageStart;
        device::wait(&shared.filled[cursor.stage], cursor.parity);
        while (unsigned(device_stream::nanoseconds()) - latest < s.pace) {
        }
        latest = unsigned(device_stream::nanoseconds());
        if (vectors > 0) {
          device::bulk_store(target, device::shared_address(image), vectors * 16);
        }
        if (is_last) {
          for (unsigned e = 0; e < rest; ++e) {
            reinterpret_cast<T*>(target + vectors)[e] =
                reinterpret_cast<T const*>(image + vectors * 16)[e];
          }
        }
        device::wait_stores_read();
        device::arrive(&shared.emptied[cursor.stage]);
      }
      latest = __shfl_sync(~0u, latest, turn);
      cursor.advance(kImages);
    }
  }
}

// Cuts runs of so many `tensors` as they lie in padded lines, in as many tiles, and says whether
// that serves: a tile and what it begins within fit a stage, a vector is of two lines at most, and
// quotients are exact.
template <int kVector>
bool cut_in_lines(Stream& s, Lines const& lines, int tensors) {
  if (lines.columns < kVector || lines.pitch - lines.columns >= kVector ||
      lines.pitch == lines.columns || lines.columns >= kMostImageColumns) {
    return false;
  }
  int64_t const vectors = lines.plane / kVector;
  auto const all_hold = [&](int64_t tile_vectors) {
    return (s.run_tiles - 1) * tile_vectors < vectors;  // something
  };
  int64_t const least = ceil_div(vectors, s.run_tiles), whole = round_up(least, kImageUnit);
  int64_t const tile_vectors = all_hold(whole) ? whole : least;
  int64_t const line_vectors = lines.pitch / kVector;
  if (tile_vectors > most_image_vectors(tensors) || s.stages < kTilesToShared + kImageStages ||
      ceil_div(s.tiles, s.blocks) + 1 + kImageStages > s.stages || !all_hold(tile_vectors) ||
      vectors * line_vectors >= int64_t(1) << 32) {
    return false;
  }
  auto const inverse = [](int64_t number) { return unsigned(ceil_div(int64_t(1) << 32, number)); };
  s.stages -= kImageStages;
  s.tile_vectors = unsigned(tile_vectors);
  s.run_vectors = unsigned(vectors);
  s.line_elements = unsigned(lines.columns);
  s.line_vectors = unsigned(line_vectors);
  s.elements_inverse = inverse(lines.columns);
  s.vectors_inverse = inverse(line_vectors);
  return true;
}

}  // namespace fusedconv::groupnorm
