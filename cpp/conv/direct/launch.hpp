// From a type to its row: which kernel serves a schedule.
#pragma once

#include <cuda_runtime_api.h>

#include <limits>
#include <utility>

#include "conv/direct/doubled.hpp"
#include "conv/direct/pixels.hpp"
#include "conv/direct/planes.hpp"
#include "conv/direct/rows.hpp"
#include "conv/failure.hpp"
#include "cuda/launch.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::direct {

// Blocks of a launch.
unsigned checked_blocks(Arguments const& arguments);

template <class T, int kTaps, int kChannels>
void launch_planes(Arguments const& a, cudaStream_t stream) {
  constexpr auto kernel = &convolve_planes<T, kTaps, kChannels>;
  Schedule const& s = a.config.schedule;
  FUSEDCONV_CHECK(!s.stores_runs || device::is_aligned(a.output, 16), a.config.row->name,
                  ": output: got an address that is no multiple of 16 bytes");
  conv::check_launch(a.config, a.batch, "cudaFuncSetAttribute",
                     device::allow_shared_bytes<kernel>(s.shared_bytes));
  device::launch(kernel, checked_blocks(a), kThreads, s.shared_bytes, stream, Params::of(a),
                 (s.shared_bytes - kMomentsBytes) / s.teams);
  conv::check_launch(a.config, a.batch, "launch", cudaGetLastError());
}

template <class T>
void launch_doubled(Arguments const& a, cudaStream_t stream) {
  FUSEDCONV_CHECK(device::is_aligned(a.output, 16), a.config.row->name,
                  ": output: got an address that is no multiple of 16 bytes");
  DoubledParams const p = DoubledParams::of(a, kDoubledRun<T>);
  conv::check_launch(a.config, a.batch, "launch",
                     device::launch(&double_planes<T>, unsigned(ceil_div(p.count, kThreads)),
                                    kThreads, 0, stream, p));
}

template <class T, int kVector>
void launch_pixels(Arguments const& a, cudaStream_t stream) {
  constexpr auto kernel = &convolve_pixels<T, kVector>;
  int const bytes = a.config.schedule.shared_bytes;
  conv::check_launch(a.config, a.batch, "cudaFuncSetAttribute",
                     device::allow_shared_bytes<kernel>(bytes));
  device::launch(kernel, checked_blocks(a), kThreads, bytes, stream, Params::of(a));
  conv::check_launch(a.config, a.batch, "launch", cudaGetLastError());
}

template <class T>
void launch(Arguments const& a, cudaStream_t stream) {
  Schedule const& s = a.config.schedule;
  if (a.config.problem.layout == Layout::kChannelsLast) {
    constexpr int kWidest = 16 / int(sizeof(T));
    return s.vector == 1 ? launch_pixels<T, 1>(a, stream) : launch_pixels<T, kWidest>(a, stream);
  }
  // An int counts units.
  bool const doubles =
      s.doubles && DoubledParams::units_of(a, kDoubledRun<T>) <= std::numeric_limits<int>::max();
  if (doubles && a.partials == nullptr) return launch_doubled<T>(a, stream);
  if (s.run_taps == kGeneral) return launch_planes<T, kGeneral, 1>(a, stream);
  [&]<int... kTaps>(std::integer_sequence<int, kTaps...>) {
    auto const of = [&]<int kEach>(std::integral_constant<int, kEach>) {
      constexpr int kSeveral = channels_of(int(sizeof(T)), kRunTaps[kEach].kernel);
      s.unit_channels == 1 ? launch_planes<T, kEach, 1>(a, stream)
                           : launch_planes<T, kEach, kSeveral>(a, stream);
      return true;
    };
    (void)((s.run_taps == kTaps && of(std::integral_constant<int, kTaps>{})) || ...);
  }(std::make_integer_sequence<int, kRunTapsCount>{});
}

template <class T>
Row row_of(Math math) {
  return {
      .name = detail::join("direct_", traits_of(math).name), .math = math, .launch = &launch<T>};
}

}  // namespace fusedconv::conv::direct
