#include "conv/sm90/wgrad/small_part.hpp"

#include <algorithm>

#include "conv/sm90/wgrad/schedule.hpp"
#include "cuda/launch.hpp"
#include "cuda/math.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::wgrad {
namespace {

constexpr int kThreads = 256;
constexpr int kLoads = 4;  // of a thread, under way together
constexpr int kVector = kLineAlignment / int(sizeof(float));
using Vector = device::Pack<float, kVector>;

__device__ __forceinline__ float small_part_of(float value) {
  return value - device::round_to_tf32(value);
}

__global__ void __launch_bounds__(kThreads)
    small_parts(float const* __restrict__ input, float* __restrict__ output, int64_t elements) {
  int64_t const vectors = elements / kVector;
  int64_t const first = int64_t(blockIdx.x) * (kThreads * kLoads) + threadIdx.x;
  Vector loaded[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    int64_t const at = first + i * kThreads;
    if (at < vectors) loaded[i] = Vector::load(input + at * kVector);
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    int64_t const at = first + i * kThreads;
    if (at >= vectors) break;
#pragma unroll
    for (float& value : loaded[i].values) value = small_part_of(value);
    loaded[i].store(output + at * kVector);
  }
  // The last line may end where its memory does.
  int64_t const rest = vectors * kVector + threadIdx.x;
  if (blockIdx.x == 0 && rest < elements) output[rest] = small_part_of(input[rest]);
}

}  // namespace

void small_part(int64_t lines, int64_t columns, float const* input, float* output,
                cudaStream_t stream) {
  FUSEDCONV_CHECK(device::is_aligned(input, kLineAlignment), "small_part: input: got address ",
                  input, ", expected a multiple of ", kLineAlignment);
  int64_t const pitch = padded(columns, int(sizeof(float)));
  int64_t const elements = (lines - 1) * pitch + columns;
  int64_t const vectors = std::max<int64_t>(1, elements / kVector);
  dim3 const grid =
      device::checked_grid("small_part", ceil_div(vectors, int64_t(kThreads * kLoads)));
  device::launch(small_parts, grid, kThreads, 0, stream, input, output, elements);
  FUSEDCONV_CUDA("small_part", cudaGetLastError());
}

}  // namespace fusedconv::conv::sm90::wgrad
