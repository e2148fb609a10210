// The loops of convolutions of few channels for one instruction set.
#include "cpu/tables.hpp"

namespace fusedconv::cpu::FUSEDCONV_INSTRUCTION_SET {
namespace {

template <int kVectors>
FUSEDCONV_INLINE void add_products_of(float const* const* sources, float const* weights,
                                      int64_t terms, int64_t group, int64_t at, float start,
                                      float* to) {
  Floats total[kVectors];
  for (Floats& each : total) each = Floats{} + start;
  for (int64_t term = 0; term < terms;) {
    int64_t const end = terms - term < group ? terms : term + group;
    Floats sum[kVectors] = {};
    for (; term < end; ++term) {
      float const* const source = sources[term] + at;
      Floats const weight = Floats{} + weights[term];
#pragma GCC unroll 4
      for (int k = 0; k < kVectors; ++k) sum[k] += weight * load(source + k * kWidth);
    }
    for (int k = 0; k < kVectors; ++k) total[k] += sum[k];
  }
  for (int k = 0; k < kVectors; ++k) store(to + at + k * kWidth, total[k]);
}

void add_products(float const* const* sources, float const* weights, int64_t terms, int64_t group,
                  int64_t count, float start, float* to) {
  constexpr int kVectors = 4;  // hide the adder's latency and share a weight
  int64_t at = 0;
  for (; at + kVectors * kWidth <= count; at += kVectors * kWidth) {
    add_products_of<kVectors>(sources, weights, terms, group, at, start, to);
  }
  for (; at < count; at += kWidth) {
    add_products_of<1>(sources, weights, terms, group, at, start, to);
  }
}

template <int kTaps>
FUSEDCONV_INLINE void add_dots_of(float const* x, float const* const* sources, int64_t count,
                                  float* sums) {
  Floats sum[kTaps] = {};
  for (int64_t at = 0; at < count; at += kWidth) {
    Floats const value = load(x + at);
#pragma GCC unroll 4
    for (int tap = 0; tap < kTaps; ++tap) sum[tap] += value * load(sources[tap] + at);
  }
  for (int tap = 0; tap < kTaps; ++tap) {
    store(sums + tap * kRoom, load(sums + tap * kRoom) + sum[tap]);
  }
}

void add_dots(float const* x, float const* const* sources, int64_t taps, int64_t count,
              float* sums) {
  int64_t tap = 0;
  for (; tap + 4 <= taps; tap += 4) add_dots_of<4>(x, sources + tap, count, sums + tap * kRoom);
  for (; tap < taps; ++tap) add_dots_of<1>(x, sources + tap, count, sums + tap * kRoom);
}

void join(float const* phases, int64_t room, int64_t stride, int64_t count, float* to) {
  if (stride == 2) {
    for (int64_t i = 0; i < count; i += kWidth) {
      Floats const even = load(phases + i), odd = load(phases + room + i);
      store(to + 2 * i, interleave<0>(even, odd));
      store(to + 2 * i + kWidth, interleave<kWidth / 2>(even, odd));
    }
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t phase = 0; phase < stride; ++phase) {
      to[i * stride + phase] = phases[phase * room + i];
    }
  }
}

void part(float const* x, int64_t stride, int64_t room, float* phases) {
  if (stride == 2) {
    for (int64_t i = 0; i < room; i += kWidth) {
      Floats const first = load(x + 2 * i), second = load(x + 2 * i + kWidth);
      store(phases + i, every_second<0>(first, second));
      store(phases + room + i, every_second<1>(first, second));
    }
    return;
  }
  for (int64_t i = 0; i < room; ++i) {
    for (int64_t phase = 0; phase < stride; ++phase) {
      phases[phase * room + i] = x[i * stride + phase];
    }
  }
}

}  // namespace

extern constinit DirectLoops const direct_loops = {
    .add_products = add_products, .add_dots = add_dots, .join = join, .part = part};

}  // namespace fusedconv::cpu::FUSEDCONV_INSTRUCTION_SET
