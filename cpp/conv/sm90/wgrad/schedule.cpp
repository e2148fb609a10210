#include "conv/sm90/wgrad/schedule.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "conv/sm90/architecture.hpp"
#include "conv/sm90/schedule.hpp"
#include "conv/sm90/splits.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::wgrad {
namespace {

constexpr int kFewestStages = 4;
// Steps that make a block worth its partial sums.
constexpr int64_t kFewestSteps = 8;
constexpr int64_t kMostSteps = int64_t(1) << 30;
constexpr int64_t kMostTasks = 0xffff;  // what a grid's second axis takes

Schedule refused(std::string reason) {
  Schedule result;
  result.support = Support::no(std::move(reason));
  return result;
}

}  // namespace

Schedule schedule_of(ConvProblem const& p, Math math, int filter_rows, Layout layout,
                     Device const& device) {
  if (Support const runs = supports_architecture(device); !runs) return refused(runs.reason);
  if (layout != Layout::kChannelsFirst) return refused("reads NCHW; the input is channels last");
  if (p.r != filter_rows) {
    return refused(detail::join("a filter of ", filter_rows, " rows, not ", p.r));
  }
  if (p.s > kMaxFilterColumns) {
    return refused(detail::join("a filter of up to ", kMaxFilterColumns, " columns, not ", p.s));
  }
  if ((p.s > 1 && p.dilation_w != 1) || (p.r > 1 && p.dilation_h != 1)) {
    return refused(
        detail::join("dilation is ", p.dilation_h, "x", p.dilation_w, ", only 1 is served"));
  }
  int const element = traits_of(math).element_bytes();
  int const unit = kLineAlignment / element;
  int const before = p.s - 1 - p.lower_padding_w;  // columns of the gradient before the input's
  if (before < 0 || before > p.s - 1) {
    return refused(
        detail::join("padding of its columns is ", before, ", only 0 to ", p.s - 1, " is served"));
  }

  Schedule s;
  s.parts = traits_of(math).parts;
  if (int64_t(p.w) * element <= kHalfStripBytes) s.halves = 1;
  int const strip = s.strip_bytes() / element;
  s.strips = int(ceil_div(p.w, strip));
  s.lead = before > 0 ? unit : 0;
  int const columns = int(round_up(s.lead + strip + p.s - 1 - before, unit));
  // Lanes of eight channels read at once: lines of an odd number of 16 bytes lie in other banks.
  s.pitch_bytes = columns * element;
  if (s.pitch_bytes / kLineAlignment % 2 == 0) s.pitch_bytes += kLineAlignment;
  if (p.s == 1) {
    int64_t const blocks = ceil_div(p.k, kBlock);
    s.groups = int(ceil_div(blocks, ceil_div(blocks, kMaxWarpgroups)));
  }
  // The first stages' lines of the input are there twice, so that those of a filter's rows always
  // lie side by side.
  int const twice = p.r - 1;
  int const left = device.shared_bytes - kHeaderBytes - twice * s.input_bytes();
  s.stages = std::min(kMaxStages, left / (s.input_bytes() + s.grad_bytes()));
  if (s.stages < kFewestStages) {
    return refused(detail::join("its pipeline of ", kFewestStages, " stages exceeds the ",
                                device.shared_bytes, " bytes of shared memory"));
  }
  s.shared_bytes =
      kHeaderBytes + twice * s.input_bytes() + s.stages * (s.input_bytes() + s.grad_bytes());
  s.blocks_c = int(ceil_div(p.c, kBlock));
  s.blocks_k = int(ceil_div(p.k, s.groups * kBlock));
  int64_t const tasks = int64_t(s.blocks_c) * s.blocks_k * p.t;
  int64_t const units = int64_t(p.n) * p.d * s.strips;
  s.steps = units * (p.h + p.r - 1);
  if (s.steps >= kMostSteps || tasks > kMostTasks) {
    return refused(detail::join(tasks, " tasks of ", s.steps, " steps are more than are counted"));
  }
  s.tasks = int(tasks);
  s.splits = int(std::min<int64_t>(splits_of(s.tasks, s.steps, kFewestSteps), units * p.h));
  s.partial_bytes =
      tasks * s.splits * p.r * p.s * s.groups * kBlock * kBlock * int64_t(sizeof(float));
  return s;
}

}  // namespace fusedconv::conv::sm90::wgrad
