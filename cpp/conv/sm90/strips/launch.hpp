// From a row's shape to its entry in the table: launcher and metadata.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "conv/sm90/strips/kernel.hpp"
#include "conv/sm90/strips/params.hpp"
#include "conv/sm90/strips/rows.hpp"
#include "conv/sm90/tma.hpp"
#include "cuda/launch.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::strips {

// Of planes by sample and channel, `line` elements from one line to the next.
inline MapAxes plane_axes(int width, int64_t line, int height, int channels, int batch) {
  auto const pitch = cuuint64_t(line) * 2, plane = pitch * cuuint64_t(height),
             sample = plane * cuuint64_t(channels);
  MapAxes axes{};
  axes.extents = {cuuint64_t(width), cuuint64_t(height), cuuint64_t(channels), cuuint64_t(batch),
                  1};
  axes.strides = {pitch, plane, sample, sample * cuuint64_t(batch)};
  return axes;
}

inline Maps maps_of(Arguments const& a) {
  Config const& config = a.config;
  ConvProblem const& c = config.problem;
  auto const encode = [&](void const* tensor, MapAxes const& axes) {
    return encode_map(config.row->math, tensor, axes, config.row->name, c, a.batch);
  };
  Maps maps;
  MapAxes input = plane_axes(c.w, config.line, c.h, c.c, a.batch);
  input.box = {kPositions, 1, kChannels, 1, 1};
  input.swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  maps.lines = encode(a.input, input);
  input.box[0] = cuuint32_t(config.row->reach.tails() * kGranule);
  input.swizzle = CU_TENSOR_MAP_SWIZZLE_NONE;
  maps.tails = encode(a.input, input);
  MapAxes output = plane_axes(c.q, c.q, c.p, c.k, a.batch);
  output.box = {kPositions, 1, kStepChannels, 1, 1};  // a warp's
  output.swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  maps.output = encode(a.output, output);
  return maps;
}

template <class Traits>
void launch(Arguments const& a, cudaStream_t stream) {
  Config const& config = a.config;
  Schedule const& s = config.schedule;
  FUSEDCONV_CHECK(a.activation == Activation::kIdentity, config.row->name, ": activation: got ",
                  name_of(a.activation), ", expected identity");
  int64_t const lines = int64_t(a.batch) * config.problem.p;
  FUSEDCONV_CHECK(lines <= kMostLines, config.row->name, ": lines of the output: got ", lines,
                  ", expected at most ", kMostLines);
  auto const address = reinterpret_cast<std::uintptr_t>(a.output);
  FUSEDCONV_CHECK(address % kVectorBytes == 0, config.row->name, ": output's address: got ",
                  a.output, ", expected a multiple of ", kVectorBytes);
  Params const p = Params::of(a);
  int64_t const blocks = int64_t(s.strips) * s.blocks_n * p.sets;
  check_launch(config, a.batch, "cudaFuncSetAttribute",
               device::allow_shared_bytes<&convolve<Traits>>(s.shared_bytes));
  check_launch(config, a.batch, "launch",
               device::launch(&convolve<Traits>, unsigned(blocks), kThreads, s.shared_bytes, stream,
                              p, maps_of(a)));
}

template <Math kMath, Reach kReach>
void append_row(std::vector<Row>& rows) {
  rows.push_back({.name = detail::join("sm90_strips_", traits_of(kMath).name, "_", kReach.before),
                  .math = kMath,
                  .reach = kReach,
                  .launch = &launch<Traits<kMath, kReach>>});
}

template <Math kMath>
void append_rows(std::vector<Row>& rows) {
  append_row<kMath, Reach{0}>(rows);
  append_row<kMath, Reach{1}>(rows);
  append_row<kMath, Reach{2}>(rows);
}

}  // namespace fusedconv::conv::sm90::strips
