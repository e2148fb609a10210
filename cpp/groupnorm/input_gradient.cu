#include <type_traits>

#include "cuda/launch.hpp"
#include "cuda/math.hpp"
#include "cuda/sum.hpp"
#include "cuda/tile.hpp"
#include "fusedconv/check.hpp"
#include "groupnorm/gradient.hpp"
#include "groupnorm/gradient_device.hpp"
#include "groupnorm/gradient_lines.hpp"
#include "groupnorm/gradient_rows.hpp"
#include "groupnorm/launch.hpp"
#include "groupnorm/partition.hpp"

namespace fusedconv::groupnorm {
namespace {

using device::Pack;

// How the output lies: dense, in which case it may be summed, or in padded lines, which are.
enum class Form { kDense, kSummed, kLines };

// Channels first. Block (split, plane).
template <class T, class G, int kVector, int kKnown, Form kForm>
__global__ void __launch_bounds__(kThreads)
    grad_of_planes(T const* __restrict__ input, G const* __restrict__ grad, T* __restrict__ output,
                   GradientAffine affine, GroupTerms const* __restrict__ terms, int64_t pixels,
                   int64_t split_size, int splits, Lines lines, LineStep step,
                   float* __restrict__ sums) {
  int const plane = int(blockIdx.x / unsigned(splits));
  int const sample = plane / affine.channels;
  int const index = plane % affine.channels;
  int64_t const begin = int64_t(blockIdx.x % unsigned(splits)) * split_size;
  auto const channel = Channel::of(affine, sample, index);
  GroupTerms const group = terms[sample * affine.groups + index / affine.channels_per_group];
  int64_t const base = int64_t(plane) * pixels + begin;
  int64_t const size = min(split_size, pixels - begin);
  // Lines are of whole vectors from the first element on.
  AlignedRun<kVector> const run(kForm == Form::kLines ? 0 : base, size);
  int64_t const first = base + run.head;
  [[maybe_unused]] float sum = 0.0f;
  // Of the thread's next values: it goes over them in their order.
  LineWalk place{};
  if constexpr (kForm == Form::kLines) {
    place = LineWalk(lines, int(begin) + int(threadIdx.x) * kVector);
  }
  auto const put = [&](int64_t at, auto const& px, auto const& pg) {
    auto const result = grad_input_of<kKnown>(
        px, pg, [&](int) { return channel; }, [&](int) { return group; }, affine);
    if constexpr (kForm == Form::kLines) {
      store_in_lines(result, output + plane * lines.plane, place, lines);
      place.advance(lines, step);
    } else {
      result.store(output + at);
    }
    if constexpr (kForm != Form::kDense) {
#pragma unroll
      for (T const& value : result.values) sum += device::to_float(value);
    }
  };
  constexpr int kAhead = 2;
  int64_t i = threadIdx.x;
  for (; i + (kAhead - 1) * kThreads < run.vectors; i += kAhead * kThreads) {
    Pack<T, kVector> px[kAhead];
    Pack<G, kVector> pg[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      px[j] = Pack<T, kVector>::load(input + first + (i + j * kThreads) * kVector);
      pg[j] = Pack<G, kVector>::load(grad + first + (i + j * kThreads) * kVector);
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) put(first + (i + j * kThreads) * kVector, px[j], pg[j]);
  }
  for (; i < run.vectors; i += kThreads) {
    int64_t const at = first + i * kVector;
    put(at, Pack<T, kVector>::load(input + at), Pack<G, kVector>::load(grad + at));
  }
  if constexpr (kVector > 1 && kForm != Form::kLines) {
    if (int(threadIdx.x) < run.singles) {
      int64_t const at = base + run.single(threadIdx.x);
      put(at, Pack<T, 1>::load(input + at), Pack<G, 1>::load(grad + at));
    }
  }
  if constexpr (kForm != Form::kDense) {
    if (sums == nullptr) return;
    sum = device::block_total<kThreads>(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
  }
}

template <class F>
void dispatch_form(GradientTensors const& tensors, bool in_lines, F&& body) {
  if (in_lines) return body(std::integral_constant<Form, Form::kLines>{});
  if (tensors.sums != nullptr) return body(std::integral_constant<Form, Form::kSummed>{});
  body(std::integral_constant<Form, Form::kDense>{});
}

template <class T, class G, bool kActivate>
void launch(GroupNormProblem const& p, GradientTensors const& tensors, GroupTerms const* terms,
            cudaStream_t stream) {
  auto const* x = static_cast<T const*>(tensors.input);
  auto const* g = static_cast<G const*>(tensors.grad_output);
  auto* output = static_cast<T*>(tensors.grad_input);
  GradientAffine const affine = gradient_affine_of(p, tensors);
  bool const in_lines = tensors.columns > 0 && tensors.pitch != tensors.columns;
  Split const split = split_planes(p, tensors.columns > 0);
  dim3 const grid = device::checked_grid("grad_of_planes", p.batch * p.channels * split.count);
  dispatch_gradients<T, G, kActivate>(p, tensors, !in_lines, [&](auto vector, auto known) {
    constexpr int kVector = vector.value;
    dispatch_form(tensors, in_lines, [&](auto form) {
      device::launch(grad_of_planes<T, G, kVector, known.value, form.value>, grid, kThreads, 0,
                     stream, x, g, output, affine, terms, p.pixels, split.size, split.count,
                     Lines::of(p, tensors), LineStep::of(tensors, kThreads * kVector),
                     tensors.sums);
    });
  });
  FUSEDCONV_CUDA("input_gradient", cudaGetLastError());
}

}  // namespace

void input_gradient(GroupNormProblem const& p, GradientTensors const& tensors,
                    GroupTerms const* terms, cudaStream_t stream) {
  if (p.input_layout == Layout::kChannelsLast) {
    return input_gradient_of_rows(p, tensors, terms, stream);
  }
  dispatch_gradient_kernel(p, [&](auto zero, auto grad, auto active) {
    launch<decltype(zero), decltype(grad), active.value>(p, tensors, terms, stream);
  });
}

}  // namespace fusedconv::groupnorm
