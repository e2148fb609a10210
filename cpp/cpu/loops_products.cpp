// The loops of matrix products for one instruction set.
#include "cpu/tables.hpp"

namespace fusedconv::cpu::FUSEDCONV_INSTRUCTION_SET {
namespace {

// Accumulators of all rows, a block's columns and one value fill the registers: 32 or 16 of them.
#if defined(__AVX512F__)
constexpr int kVectors = 4;
#else
constexpr int kVectors = 2;
#endif
constexpr int64_t kColumns = kVectors * kWidth;

// value(i, row) are the rows' elements.
template <class Value>
FUSEDCONV_INLINE void multiply(Value value, float const* columns, int64_t depth, float* sums,
                               int64_t pitch, bool adds) {
  Floats sum[kProductRows][kVectors] = {};
  for (int64_t i = 0; i < depth; ++i) {
    Floats column[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) column[v] = load(columns + i * kColumns + v * kWidth);
#pragma GCC unroll 6
    for (int row = 0; row < kProductRows; ++row) {
      Floats const x = Floats{} + value(i, row);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[row][v] += x * column[v];
    }
  }
#pragma GCC unroll 6
  for (int row = 0; row < kProductRows; ++row) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* const to = sums + row * pitch + v * kWidth;
      store(to, adds ? load(to) + sum[row][v] : sum[row][v]);
    }
  }
}

void multiply_packed(float const* rows, float const* columns, int64_t depth, float* sums,
                     int64_t pitch, bool adds) {
  multiply([=](int64_t i, int row)
               __attribute__((always_inline)) { return rows[i * kProductRows + row]; },
           columns, depth, sums, pitch, adds);
}

void multiply_rows(float const* rows, int64_t stride, float const* columns, int64_t depth,
                   float* sums, int64_t pitch, bool adds) {
  static_assert(kProductRows == 6);
  float const* const behind = rows + 3 * stride;  // two pointers and two distances reach all rows
  multiply(
      [=](int64_t i, int row) __attribute__((always_inline)) {
        return row < 3 ? rows[i + row * stride] : behind[i + (row - 3) * stride];
      },
      columns, depth, sums, pitch, adds);
}

}  // namespace

extern constinit ProductLoops const product_loops = {
    .columns = kColumns, .multiply_packed = multiply_packed, .multiply_rows = multiply_rows};

}  // namespace fusedconv::cpu::FUSEDCONV_INSTRUCTION_SET
