// What kernels leave for each other about moments: plain data, no device code. A mean is the sum of
// two floats, mean + low: in one float a mean of 10,000 deviations would be off by up to half a
// thousandth of one.
#pragma once

#include <cstdint>

namespace fusedconv::groupnorm {

// Of a part of a group.
struct alignas(16) Partial {
  float count;
  float mean;
  float low;
  float m2;  // sum of squared deviations
};

// Of a group, that are merged: a thread counts beyond them by what it has under way.
inline constexpr int64_t kMostPartials = 0x7fffffff - 8 * 1024;

// Of a group.
struct alignas(16) Statistics {
  float mean;
  float low;
  float rstd;
};

// Where a kernel leaves statistics, by sample and group. Any may be null; mean and rstd are what a
// backward pass reads.
struct StatisticsTargets {
  Statistics* statistics = nullptr;
  float* mean = nullptr;
  float* rstd = nullptr;
};

}  // namespace fusedconv::groupnorm
