// One launch of either kind of Hopper convolution, and what may go wrong with it. Config is one of
// theirs: it has a row with a name, a problem and a schedule.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "conv/failure.hpp"
#include "conv/problem.hpp"
#include "fusedconv/activation.hpp"
#include "fusedconv/check.hpp"
#include "groupnorm/statistics.hpp"

namespace fusedconv::conv::sm90 {

template <class Config, class Partial = groupnorm::Partial>
struct ConvolveArguments {
  Config const& config;
  int batch = 0;
  Activation activation = Activation::kIdentity;
  bool activates_output = true;  // else only the moments are of activated values
  void const* input = nullptr;
  void const* filter = nullptr;  // packed by pack_filter()
  void const* bias = nullptr;    // [K] of the tensors' type, or null
  void* output = nullptr;        // in the order that the kernel says
  Partial* partials = nullptr;   // [N, slots, K]; or null
};

// Tiles of a launch, which are counted in 32 bits.
template <class Config, class Partial>
int counted_tiles(ConvolveArguments<Config, Partial> const& a, int64_t tiles_per_sample) {
  int64_t const tiles = a.batch * tiles_per_sample;
  constexpr int64_t kMost = (int64_t(1) << 30) - 1;
  ConvProblem const& c = a.config.problem;
  FUSEDCONV_CHECK(tiles <= kMost, a.config.row->name, ": tiles: got ", tiles, " for N=", a.batch,
                  " C=", c.c, " K=", c.k, ", expected at most ", kMost);
  return int(tiles);
}

template <class Config>
void check_launch(Config const& config, int batch, char const* where, cudaError_t status) {
  if (status == cudaSuccess) return;
  ConvProblem const& c = config.problem;
  throw KernelFailure(detail::join(config.row->name, ": ", where, " failed with ",
                                   conv::failure_of(status), " for N=", batch, " C=", c.c,
                                   " K=", c.k, " DHW=", c.d, "x", c.h, "x", c.w, " ZPQ=", c.z, "x",
                                   c.p, "x", c.q, " TRS=", c.t, "x", c.r, "x", c.s, ", ",
                                   config.schedule.shared_bytes, " bytes of shared memory"));
}
template <class Config, class Partial>
void check_launch(ConvolveArguments<Config, Partial> const& a, char const* where,
                  cudaError_t status) {
  check_launch(a.config, a.batch, where, status);
}

}  // namespace fusedconv::conv::sm90
