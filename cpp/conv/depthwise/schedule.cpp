#include "conv/depthwise/schedule.hpp"

#include <algorithm>
#include <string>

#include "fusedconv/check.hpp"
#include "fusedconv/types.hpp"

namespace fusedconv::conv::depthwise {
namespace {

constexpr int64_t kMostPixels = int64_t(1) << 30;  // of a channel

Schedule refused(std::string reason) {
  Schedule result;
  result.support = Support::no(std::move(reason));
  return result;
}

// Of the output padding 0 and 1.
bool is_known(AxisProblem const& axis) {
  int64_t const shortest = int64_t(kStride) * axis.input - 1;
  return axis.kernel == kTaps && axis.stride == kStride && axis.dilation == 1 &&
         axis.padding == kPadding && (axis.output == shortest || axis.output == shortest + 1);
}

}  // namespace

int Schedule::cluster(int64_t instances, int multiprocessors) const {
  int blocks = 1;
  while (blocks < parts && instances * blocks < multiprocessors) blocks *= 2;
  return blocks;
}

Schedule schedule_of(Problem const& p, Math math, Device const& device) {
  if (p.layout != Layout::kChannelsFirst) return refused("the layout is channels last");
  if (p.channels != 1 || p.output_channels != 1) {
    return refused(detail::join("a group has ", p.channels, " input and ", p.output_channels,
                                " output channels; one of each is served"));
  }
  if (!std::all_of(p.axes.begin(), p.axes.end(), is_known)) {
    return refused(
        "served are volumes, by filters of 3 taps with stride 2, padding 1 and dilation 1");
  }
  int64_t pixels = 1;
  for (AxisProblem const& axis : p.axes) pixels *= axis.output;
  if (pixels > kMostPixels) {
    return refused(
        detail::join("a channel has ", pixels, " pixels, up to ", kMostPixels, " are served"));
  }
  int const depth = p.axes[0].input, height = p.axes[1].input, width = p.axes[2].input;
  if (width > kMostWidth) {
    return refused(
        detail::join("a line has ", width, " inputs, up to ", kMostWidth, " are served"));
  }
  Schedule s;
  int const size = traits_of(math).element_bytes();
  int const vector = 16 / size;
  s.parts = depth >= kMostParts ? kMostParts : depth >= 2 ? 2 : 1;
  s.runs = int(ceil_div(width, kRun));
  // As many lines as there are threads for, the same in all tiles but the last.
  s.tiles = int(ceil_div(height, kThreads / s.runs));
  s.lines = int(ceil_div(height, s.tiles));
  s.tiles = int(ceil_div(height, s.lines));
  s.bulk = p.aligned && width % vector == 0;
  s.pitch = s.runs * kRun;
  s.slot_elements = int(round_up(int64_t(s.lines + 1) * s.pitch, vector));
  // Lines of outputs begin anywhere: a vector more holds what comes before whole 16 bytes.
  s.span_elements = int(round_up(int64_t(kStride) * s.lines * p.axes[2].output, vector)) + vector;
  auto const bytes = [&](int slots, int buffers) {
    return kBarrierBytes + kMomentsBytes +
           (slots * s.slot_elements + buffers * kPlanes * s.span_elements) * size;
  };
  int const room = device.shared_bytes_of(kResident);
  s.buffers = bytes(kLeastSlots, kMostBuffers) <= room ? kMostBuffers : kLeastBuffers;
  s.slots = kLeastSlots;
  while (s.slots < kMostSlots && bytes(s.slots + 1, s.buffers) <= room) ++s.slots;
  s.shared_bytes = bytes(s.slots, s.buffers);
  if (s.shared_bytes > device.shared_bytes) {
    return refused(detail::join("a tile takes ", s.shared_bytes, " bytes of shared memory, ",
                                device.shared_bytes, " are there"));
  }
  return s;
}

}  // namespace fusedconv::conv::depthwise
