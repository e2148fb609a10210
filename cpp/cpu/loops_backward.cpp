// The backward pass's loops for one instruction set.
#include "cpu/tables.hpp"

namespace fusedconv::cpu::FUSEDCONV_INSTRUCTION_SET {
namespace {

// The gradient of x from that of A(x).
template <class A>
FUSEDCONV_INLINE Floats gradient_through(Floats x, Floats grad) {
  if constexpr (A::kCode == Activation::kIdentity) {
    return grad;
  } else if constexpr (requires { A::host_gradient(x, grad); }) {
    return A::host_gradient(x, grad);
  } else {
    return grad * A::host_slope(x);
  }
}

// The gradient of the affine map's result, of a = before(x) - mean.
template <class After>
FUSEDCONV_INLINE Floats gradient_of_result(Floats grad, Floats a, Floats scale, Floats shift) {
  return gradient_through<After>(a * scale + shift, grad);
}

template <class T, class Before, class After>
void sums_of_run(void const* gradient, void const* data, int64_t count, float mean, float scale,
                 float shift, double* sums) {
  auto const* grad = static_cast<T const*>(gradient);
  auto const* x = static_cast<T const*>(data);
  sum_run(
      count,
      [=](auto access, int64_t i) __attribute__((always_inline)) {
        Floats const a = Before::host(access.read(x + i)) - mean;
        Floats const g =
            gradient_of_result<After>(access.read(grad + i), a, Floats{} + scale, Floats{} + shift);
        return Pair{g, g * a};
      },
      sums);
}

template <class T, class Before, class After>
void sums_of_rows(void const* gradient, void const* data, int64_t count, int64_t lanes,
                  float const* mean, float const* scale, float const* shift, float* sum,
                  float* moment) {
  auto const* grad = static_cast<T const*>(gradient);
  auto const* x = static_cast<T const*>(data);
  sum_rows(
      count, lanes,
      [=](auto access, int64_t i, int64_t lane) __attribute__((always_inline)) {
        Floats const a = Before::host(access.read(x + i)) - access.read(mean + lane);
        Floats const g = gradient_of_result<After>(
            access.read(grad + i), a, access.read(scale + lane), access.read(shift + lane));
        return Pair{g, g * a};
      },
      [=](int64_t i) __attribute__((always_inline)) {
        __builtin_prefetch(x + i);
        __builtin_prefetch(grad + i);
      },
      sum, moment);
}

template <class From, class To, class Before, class After>
void gradient_of_run(void const* gradient, void const* data, void* to, int64_t count, float mean,
                     float scale, float shift, float slope, float offset) {
  auto const* grad = static_cast<From const*>(gradient);
  auto const* input = static_cast<From const*>(data);
  auto* dx = static_cast<To*>(to);
  cover(count, [=](auto access, int64_t i) __attribute__((always_inline)) {
    Floats const x = access.read(input + i);
    Floats const a = Before::host(x) - mean;
    Floats const g =
        gradient_of_result<After>(access.read(grad + i), a, Floats{} + scale, Floats{} + shift);
    access.write(dx + i, gradient_through<Before>(x, g * scale - (a * slope + offset)));
  });
}

template <class From, class To, class Before, class After>
void gradient_of_rows(void const* gradient, void const* data, void* to, int64_t count,
                      int64_t lanes, float const* mean, float const* scale, float const* shift,
                      float const* slope, float const* offset) {
  auto const* grad = static_cast<From const*>(gradient);
  auto const* input = static_cast<From const*>(data);
  auto* dx = static_cast<To*>(to);
  for (; count > 0; count -= lanes, grad += lanes, input += lanes, dx += lanes) {
    cover(count < lanes ? count : lanes, [=](auto access,
                                             int64_t i) __attribute__((always_inline)) {
      Floats const x = access.read(input + i);
      Floats const a = Before::host(x) - access.read(mean + i);
      Floats const s = access.read(scale + i);
      Floats const g =
          gradient_of_result<After>(access.read(grad + i), a, s, access.read(shift + i));
      access.write(dx + i, gradient_through<Before>(
                               x, g * s - (a * access.read(slope + i) + access.read(offset + i))));
    });
  }
}

// ---- Without statistics of a group ----

template <class From, class To, class Before, class After>
void map_gradient_of_run(void const* gradient, void const* data, void* to, int64_t count,
                         float scale, float shift, double* sums) {
  auto const* grad = static_cast<From const*>(gradient);
  auto const* input = static_cast<From const*>(data);
  auto* dx = static_cast<To*>(to);
  sum_run(
      count,
      [=](auto access, int64_t i) __attribute__((always_inline)) {
        Floats const x = access.read(input + i);
        Floats const a = Before::host(x);
        Floats const g =
            gradient_of_result<After>(access.read(grad + i), a, Floats{} + scale, Floats{} + shift);
        access.write(dx + i, gradient_through<Before>(x, g * scale));
        return Pair{g, g * a};
      },
      sums);
}

template <class From, class To, class Before, class After>
void map_gradient_of_rows(void const* gradient, void const* data, void* to, int64_t count,
                          int64_t lanes, float const* scale, float const* shift, float* sum,
                          float* moment) {
  auto const* grad = static_cast<From const*>(gradient);
  auto const* input = static_cast<From const*>(data);
  auto* dx = static_cast<To*>(to);
  sum_rows(
      count, lanes,
      [=](auto access, int64_t i, int64_t lane) __attribute__((always_inline)) {
        Floats const x = access.read(input + i);
        Floats const a = Before::host(x);
        Floats const s = access.read(scale + lane);
        Floats const g =
            gradient_of_result<After>(access.read(grad + i), a, s, access.read(shift + lane));
        access.write(dx + i, gradient_through<Before>(x, g * s));
        return Pair{g, g * a};
      },
      [=](int64_t i) __attribute__((always_inline)) {
        __builtin_prefetch(input + i);
        __builtin_prefetch(grad + i);
      },
      sum, moment);
}

// Calls body(access, offset) with each of `count` elements in one vector, the last perhaps not
// full.
template <class Body>
FUSEDCONV_INLINE void partition(int64_t count, Body body) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) body(Whole{}, i);
  if (i < count) body(First{count - i}, i);
}

template <class After>
void pixel_sums_of_run(float const* h, float* grad, int64_t count, float scale, float shift,
                       float* gradient, float* projection, float* sums) {
  Pair total{};
  partition(count, [&](auto access, int64_t i) __attribute__((always_inline)) {
    Floats const normalised = access.read(h + i);
    Floats const g = gradient_of_result<After>(access.read(grad + i), normalised, Floats{} + scale,
                                               Floats{} + shift);
    access.write(grad + i, g);
    Floats const weighted = g * scale;
    access.write(gradient + i, access.read(gradient + i) + weighted);
    access.write(projection + i, access.read(projection + i) + weighted * normalised);
    total += Pair{g, g * normalised};
  });
  store(sums, load(sums) + total.first);
  store(sums + kRoom, load(sums + kRoom) + total.second);
}

template <class To, class Before>
void pixel_gradient_of_run(float const* g, float const* h, float const* x, void* to, int64_t count,
                           float scale, float const* gradient, float const* projection,
                           float const* rstd, float* sums) {
  auto* dx = static_cast<To*>(to);
  Floats total{};
  partition(count, [&](auto access, int64_t i) __attribute__((always_inline)) {
    Floats const rest =
        access.read(gradient + i) + access.read(h + i) * access.read(projection + i);
    Floats d = (access.read(g + i) * scale - rest) * access.read(rstd + i);
    if constexpr (Before::kCode != Activation::kIdentity) {
      d = gradient_through<Before>(access.read(x + i), d);
    }
    access.write(dx + i, d);
    total += d;
  });
  store(sums, load(sums) + total);
}

constexpr BackwardLoops table() {
  BackwardLoops loops{};
  for_each_index<kDTypes>([&](auto from) {
    using From = Element<from>;
    for_each_index<kPlaces>([&](auto place) {
      loops.sums_of_run[from][place] = sums_of_run<From, Before<place>, After<place>>;
      loops.sums_of_rows[from][place] = sums_of_rows<From, Before<place>, After<place>>;
    });
    for_each_index<kDTypes>([&](auto to) {
      using To = Element<to>;
      if constexpr (std::is_same_v<From, To> || std::is_same_v<To, float>) {
        for_each_index<kPlaces>([&](auto place) {
          loops.gradient_of_run[from][to][place] =
              gradient_of_run<From, To, Before<place>, After<place>>;
          loops.gradient_of_rows[from][to][place] =
              gradient_of_rows<From, To, Before<place>, After<place>>;
          loops.map_gradient_of_run[from][to][place] =
              map_gradient_of_run<From, To, Before<place>, After<place>>;
          loops.map_gradient_of_rows[from][to][place] =
              map_gradient_of_rows<From, To, Before<place>, After<place>>;
        });
      }
    });
    for_each_index<kActivations>([&](auto code) {
      loops.pixel_gradient_of_run[from][code] =
          pixel_gradient_of_run<Element<from>, ActivationOf<code>>;
    });
  });
  for_each_index<kActivations>(
      [&](auto code) { loops.pixel_sums_of_run[code] = pixel_sums_of_run<ActivationOf<code>>; });
  return loops;
}

}  // namespace

extern constinit BackwardLoops const backward_loops = table();

}  // namespace fusedconv::cpu::FUSEDCONV_INSTRUCTION_SET
