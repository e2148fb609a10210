// The forward pass's loops for one instruction set.
#include "cpu/tables.hpp"

namespace fusedconv::cpu::FUSEDCONV_INSTRUCTION_SET {
namespace {

template <class T, class A>
void moments_of_run(void const* data, int64_t count, float pivot, double* sums) {
  auto const* x = static_cast<T const*>(data);
  sum_run(
      count,
      [=](auto access, int64_t i) __attribute__((always_inline)) {
        Floats const d = A::host(access.read(x + i)) - pivot;
        return Pair{d, d * d};
      },
      sums);
}

template <class T, class A>
void moments_of_rows(void const* data, int64_t count, int64_t lanes, float const* pivot, float* sum,
                     float* square) {
  auto const* x = static_cast<T const*>(data);
  sum_rows(
      count, lanes,
      [=](auto access, int64_t i, int64_t lane) __attribute__((always_inline)) {
        Floats const d = A::host(access.read(x + i)) - access.read(pivot + lane);
        return Pair{d, d * d};
      },
      [=](int64_t i) __attribute__((always_inline)) { __builtin_prefetch(x + i); }, sum, square);
}

template <class From, class To, class Before, class After>
void apply_to_run(void const* from, void* to, int64_t count, float mean, float scale, float shift) {
  auto const* x = static_cast<From const*>(from);
  auto* y = static_cast<To*>(to);
  cover(count, [=](auto access, int64_t i) __attribute__((always_inline)) {
    access.write(y + i, After::host((Before::host(access.read(x + i)) - mean) * scale + shift));
  });
}

template <class From, class To, class Before, class After>
void apply_to_rows(void const* from, void* to, int64_t count, int64_t lanes, float const* mean,
                   float const* scale, float const* shift) {
  auto const* x = static_cast<From const*>(from);
  auto* y = static_cast<To*>(to);
  for (; count > 0; count -= lanes, x += lanes, y += lanes) {
    cover(count < lanes ? count : lanes,
          [=](auto access, int64_t i) __attribute__((always_inline)) {
            Floats const a = Before::host(access.read(x + i)) - access.read(mean + i);
            access.write(y + i, After::host(a * access.read(scale + i) + access.read(shift + i)));
          });
  }
}

template <class To>
void transpose(float const* x, int64_t rows, int64_t columns, void* to, int64_t stride) {
  auto* y = static_cast<To*>(to);
  int64_t row = 0;
  for (; row + kWidth <= rows; row += kWidth) {
    int64_t column = 0;
    for (; column + kWidth <= columns; column += kWidth) {
      // Interleaving the two halves of a list of vectors as often as its length has bits turns
      // rows into columns.
      Floats tile[kWidth], turned[kWidth];
      for (int i = 0; i < kWidth; ++i) tile[i] = load(x + (row + i) * columns + column);
      for (int step = 1; step < kWidth; step *= 2) {
        for (int i = 0; i < kWidth / 2; ++i) {
          turned[2 * i] = interleave<0>(tile[i], tile[i + kWidth / 2]);
          turned[2 * i + 1] = interleave<kWidth / 2>(tile[i], tile[i + kWidth / 2]);
        }
        for (int i = 0; i < kWidth; ++i) tile[i] = turned[i];
      }
      for (int i = 0; i < kWidth; ++i) store(y + (column + i) * stride + row, tile[i]);
    }
    for (; column < columns; ++column) {
      float line[kWidth];
      for (int i = 0; i < kWidth; ++i) line[i] = x[(row + i) * columns + column];
      store(y + column * stride + row, load(line));
    }
  }
  if (row == rows) return;
  for (int64_t column = 0; column < columns; ++column) {
    float line[kWidth] = {};
    for (int64_t i = row; i < rows; ++i) line[i - row] = x[i * columns + column];
    store_first(y + column * stride + row, load(line), rows - row);
  }
}

constexpr ForwardLoops table() {
  ForwardLoops loops{};
  for_each_index<kDTypes>([&](auto from) {
    using From = Element<from>;
    loops.transpose[from] = transpose<From>;
    for_each_index<kActivations>([&](auto code) {
      loops.moments_of_run[from][code] = moments_of_run<From, ActivationOf<code>>;
      loops.moments_of_rows[from][code] = moments_of_rows<From, ActivationOf<code>>;
    });
    for_each_index<kDTypes>([&](auto to) {
      using To = Element<to>;
      if constexpr (kConverts<From, To>) {
        for_each_index<kPlaces>([&](auto place) {
          loops.apply_to_run[from][to][place] = apply_to_run<From, To, Before<place>, After<place>>;
          loops.apply_to_rows[from][to][place] =
              apply_to_rows<From, To, Before<place>, After<place>>;
        });
      }
    });
  });
  return loops;
}

}  // namespace

extern constinit ForwardLoops const forward_loops = table();

}  // namespace fusedconv::cpu::FUSEDCONV_INSTRUCTION_SET
