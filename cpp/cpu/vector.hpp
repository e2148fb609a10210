// Vectors of float32 as wide as the instruction set that a source is compiled for, and elements of
// each dtype read into them and written from them.
//
// Sources that include this are compiled once for each instruction set, which names their namespace
// FUSEDCONV_INSTRUCTION_SET. They may call nothing that is not inlined: the linker would keep one
// instruction set's copy for all.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>
#include <utility>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "fusedconv/activation.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv::cpu::FUSEDCONV_INSTRUCTION_SET {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif
inline constexpr int kWidth = kVectorBytes / 4;

typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef int32_t Integers __attribute__((vector_size(kVectorBytes)));
typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
typedef uint16_t Halves __attribute__((vector_size(kVectorBytes / 2)));

// An element of 16 bits; both are read and written through their bits.
struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

FUSEDCONV_INLINE Integers lane_index() {
  return []<int... lane>(std::integer_sequence<int, lane...>) __attribute__((always_inline)) {
    return Integers{lane...};
  }(std::make_integer_sequence<int, kWidth>{});
}

// ---- Shuffles ----

// Vectors whose elements alternate: the first halves of a and b, or the second.
template <int begin>
FUSEDCONV_INLINE Floats interleave(Floats a, Floats b) {
  return [=]<int... lane>(std::integer_sequence<int, lane...>) __attribute__((always_inline)) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, (begin + lane / 2 + lane % 2 * kWidth)...);
#else
    return __builtin_shuffle(a, b, Integers{(begin + lane / 2 + lane % 2 * kWidth)...});
#endif
  }(std::make_integer_sequence<int, kWidth>{});
}

// The elements of a and then of b at even places, or at odd ones.
template <int parity>
FUSEDCONV_INLINE Floats every_second(Floats a, Floats b) {
  return [=]<int... lane>(std::integer_sequence<int, lane...>) __attribute__((always_inline)) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, (2 * lane + parity)...);
#else
    return __builtin_shuffle(a, b, Integers{(2 * lane + parity)...});
#endif
  }(std::make_integer_sequence<int, kWidth>{});
}

// ---- Conversions ----

// Instructions by name where there are some: of these vectors compilers convert halves, or element
// by element, and integer arithmetic for float16 takes ten operations.

FUSEDCONV_INLINE Words zero_extend(Halves bits) {
#if defined(__AVX512F__)
  return std::bit_cast<Words>(_mm512_maskz_cvtepu16_epi32(0xffff, std::bit_cast<__m256i>(bits)));
#elif defined(__AVX2__)
  return std::bit_cast<Words>(_mm256_cvtepu16_epi32(std::bit_cast<__m128i>(bits)));
#else
  return __builtin_convertvector(bits, Words);
#endif
}

FUSEDCONV_INLINE Halves low_halves(Words words) {
#if defined(__AVX512F__)
  return std::bit_cast<Halves>(_mm512_maskz_cvtepi32_epi16(0xffff, std::bit_cast<__m512i>(words)));
#else
  return __builtin_convertvector(words, Halves);
#endif
}

FUSEDCONV_INLINE Floats widen(BFloat16, Halves bits) {
  return std::bit_cast<Floats>(zero_extend(bits) << 16);
}

FUSEDCONV_INLINE Halves narrow(BFloat16, Floats x) {
#if defined(__AVX512BF16__) && defined(__AVX512F__)
  constexpr int kDenormal = 0x20;  // which the instruction takes for zeros
  bool const usual = _mm512_fpclass_ps_mask(x, kDenormal) == 0;
  if (usual) [[likely]]
    return std::bit_cast<Halves>(_mm512_cvtneps_pbh(x));
#endif
  Words const bits = std::bit_cast<Words>(x);
  Words const rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  Words const nan = (bits >> 16 & 0x8000u) | 0x7fc0u;
  return low_halves(x != x ? nan : rounded);
}

FUSEDCONV_INLINE Floats widen(Float16, Halves bits) {
#if defined(__AVX512F__)
  return _mm512_maskz_cvtph_ps(0xffff, std::bit_cast<__m256i>(bits));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(std::bit_cast<__m128i>(bits));
#else
  Words const wide = zero_extend(bits);
  Words const magnitude = (wide & 0x7fffu) << 13;
  Words const exponent = magnitude & 0x0f800000u;
  Words const normal =
      magnitude + (112u << 23) + (exponent == 0x0f800000u ? Words{} + (112u << 23) : Words{});
  // A denormal gets an implicit one, which the subtraction of 2^-14 takes off again.
  Floats const denormal = std::bit_cast<Floats>(magnitude + (113u << 23)) - 0x1p-14f;
  Words const value = exponent == 0u ? std::bit_cast<Words>(denormal) : normal;
  return std::bit_cast<Floats>(value | (wide & 0x8000u) << 16);
#endif
}

FUSEDCONV_INLINE Halves narrow(Float16, Floats x) {
#if defined(__AVX512F__)
  return std::bit_cast<Halves>(_mm512_maskz_cvtps_ph(0xffff, x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  return std::bit_cast<Halves>(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#else
  Words const bits = std::bit_cast<Words>(x);
  Words const magnitude = bits & 0x7fffffffu;
  Words const normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  // 0.5 has the unit in the last place of a float16 denormal: the addition rounds to it.
  Words const denormal =
      std::bit_cast<Words>(std::bit_cast<Floats>(magnitude) + 0.5f) - 0x3f000000u;
  Words const special = magnitude > 0x7f800000u ? Words{} + 0x7e00u : Words{} + 0x7c00u;
  Words const finite = magnitude < (113u << 23) ? denormal : normal;
  Words const value = magnitude >= (143u << 23) ? special : finite;
  return low_halves(value | (bits >> 16 & 0x8000u));
#endif
}

// ---- Memory ----

FUSEDCONV_INLINE Floats load(float const* from) {
  Floats x;
  __builtin_memcpy(&x, from, sizeof(x));
  return x;
}
FUSEDCONV_INLINE void store(float* to, Floats x) { __builtin_memcpy(to, &x, sizeof(x)); }

template <class T>
FUSEDCONV_INLINE Floats load(T const* from) {
  Halves bits;
  __builtin_memcpy(&bits, from, sizeof(bits));
  return widen(T{}, bits);
}
template <class T>
FUSEDCONV_INLINE void store(T* to, Floats x) {
  Halves const bits = narrow(T{}, x);
  __builtin_memcpy(to, &bits, sizeof(bits));
}

// Fewer elements than a vector has; zeros behind them.
template <class T>
FUSEDCONV_INLINE Floats load_first(T const* from, int64_t count) {
  T buffer[kWidth] = {};
  for (int64_t i = 0; i < count; ++i) buffer[i] = from[i];
  return load(buffer);
}
template <class T>
FUSEDCONV_INLINE void store_first(T* to, Floats x, int64_t count) {
  T buffer[kWidth];
  store(buffer, x);
  for (int64_t i = 0; i < count; ++i) to[i] = buffer[i];
}

// How a loop's body reads and writes the elements behind a pointer: a vector, or fewer.
struct Whole {
  template <class T>
  FUSEDCONV_INLINE Floats read(T const* from) const {
    return load(from);
  }
  template <class T>
  FUSEDCONV_INLINE void write(T* to, Floats x) const {
    store(to, x);
  }
};
struct First {
  int64_t count;
  template <class T>
  FUSEDCONV_INLINE Floats read(T const* from) const {
    return load_first(from, count);
  }
  template <class T>
  FUSEDCONV_INLINE void write(T* to, Floats x) const {
    store_first(to, x, count);
  }
};

// ---- Loops ----

// Calls body(access, offset) until each of `count` elements was in a vector, some of them in two.
template <class Body>
FUSEDCONV_INLINE void cover(int64_t count, Body body) {
  if (count < kWidth) {
    if (count > 0) body(First{count}, int64_t{0});
    return;
  }
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) body(Whole{}, i);
  if (i < count) body(Whole{}, count - kWidth);
}

struct Pair {
  Floats first, second;
  FUSEDCONV_INLINE void operator+=(Pair const& other) {
    first += other.first;
    second += other.second;
  }
};

FUSEDCONV_INLINE Pair only(Integers lanes, Pair const& x) {
  return {lanes ? x.first : Floats{}, lanes ? x.second : Floats{}};
}

// Calls add(pair) for pairs term(access, offset) that hold each of `count` elements once, and zeros
// in other lanes.
template <class Term, class Add>
FUSEDCONV_INLINE void sum_rest(int64_t begin, int64_t count, Term term, Add add) {
  int64_t i = begin;
  for (; i + kWidth <= count; i += kWidth) add(i, term(Whole{}, i));
  int const rest = static_cast<int>(count - i);
  if (rest == 0) return;
  if (count >= kWidth) {
    add(count - kWidth, only(lane_index() >= kWidth - rest, term(Whole{}, count - kWidth)));
  } else {
    add(0, only(lane_index() < rest, term(First{count}, int64_t{0})));
  }
}

// Sums of so many terms go into sums of their own: adding one value again and again rounds the same
// way each time, and what activations make equal, they make so often.
inline constexpr int64_t kTerms = 16;

// Adds both sums of term(access, offset) over `count` elements to `sums`.
template <class Term>
FUSEDCONV_INLINE void sum_run(int64_t count, Term term, double* sums) {
  constexpr int kIndependent = 4;  // hides the adder's latency
  constexpr int64_t kStep = kIndependent * kWidth;
  for (int64_t i = 0; i < count;) {
    Pair total[kIndependent] = {};
    int64_t const end = count - i < kTerms * kTerms * kStep ? count : i + kTerms * kTerms * kStep;
    while (i + kStep <= end) {
      Pair sum[kIndependent] = {};
      int64_t const last = end - i < kTerms * kStep ? end : i + kTerms * kStep;
      for (; i + kStep <= last; i += kStep) {
#pragma GCC unroll 4
        for (int k = 0; k < kIndependent; ++k) sum[k] += term(Whole{}, i + k * kWidth);
      }
      for (int k = 0; k < kIndependent; ++k) total[k] += sum[k];
    }
    if (i < end) {
      sum_rest(i, end, term, [&](int64_t, Pair const& x) { total[0] += x; });
      i = end;
    }
    total[0] += total[1];
    total[2] += total[3];
    total[0] += total[2];
    for (int lane = 0; lane < kWidth; ++lane) {
      sums[0] += static_cast<double>(total[0].first[lane]);
      sums[1] += static_cast<double>(total[0].second[lane]);
    }
  }
}

// The sums of term(access, offset, lane) over rows of `lanes` elements, for each lane. The last row
// may be shorter. The arrays of sums have room for a vector behind the last lane. fetch(offset)
// asks for memory that a term reads later: strips of long rows are too far apart for the processor
// to foresee.
template <class Term, class Fetch>
FUSEDCONV_INLINE void sum_rows(int64_t count, int64_t lanes, Term term, Fetch fetch, float* first,
                               float* second) {
  int64_t const full = count - count % lanes;
  for (int64_t lane = 0; lane < lanes; lane += kWidth) {
    store(first + lane, Floats{});
    store(second + lane, Floats{});
  }
  // Block by block, so that memory is read in order; within a block strips of vectors.
  for (int64_t begin = 0; begin < full; begin += kTerms * lanes) {
    int64_t const end = full - begin < kTerms * lanes ? full : begin + kTerms * lanes;
    auto const strip = [=]<int vectors>(std::integral_constant<int, vectors>, auto access,
                                        int64_t lane, auto kept) __attribute__((always_inline)) {
      Pair sum[vectors] = {};
      for (int64_t row = begin; row < end; row += lanes) {
#pragma GCC unroll 4
        for (int k = 0; k < vectors; ++k) {
          fetch(row + lane + k * kWidth + kTerms * lanes);
          sum[k] += term(access, row + lane + k * kWidth, lane + k * kWidth);
        }
      }
      for (int k = 0; k < vectors; ++k) {
        int64_t const at = lane + k * kWidth;
        Pair const x = kept(sum[k]);
        store(first + at, load(first + at) + x.first);
        store(second + at, load(second + at) + x.second);
      }
    };
    auto const all = [](Pair const& x) __attribute__((always_inline)) { return x; };
    using Four = std::integral_constant<int, 4>;
    using One = std::integral_constant<int, 1>;
    if (lanes < kWidth) {
      strip(One{}, First{lanes}, 0, all);
      continue;
    }
    int64_t lane = 0;
    for (; lane + 4 * kWidth <= lanes; lane += 4 * kWidth) strip(Four{}, Whole{}, lane, all);
    for (; lane + kWidth <= lanes; lane += kWidth) strip(One{}, Whole{}, lane, all);
    if (lane < lanes) {
      int const rest = static_cast<int>(lanes - lane);
      strip(One{}, Whole{}, lanes - kWidth, [=](Pair const& x) __attribute__((always_inline)) {
        return only(lane_index() >= kWidth - rest, x);
      });
    }
  }
  sum_rest(
      0, count - full,
      [=](auto access, int64_t lane)
          __attribute__((always_inline)) { return term(access, full + lane, lane); },
      [=](int64_t lane, Pair const& x) __attribute__((always_inline)) {
        store(first + lane, load(first + lane) + x.first);
        store(second + lane, load(second + lane) + x.second);
      });
}

}  // namespace fusedconv::cpu::FUSEDCONV_INSTRUCTION_SET
