#include "conv/sm90/boxes/weight/schedule.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "conv/sm90/splits.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::sm90::boxes::weight {
namespace {

// Slabs that make a block worth its partial sums.
constexpr int64_t kFewestSteps = 4;
constexpr int64_t kMostSlabs = int64_t(1) << 30;
constexpr int kMostTasks = 0xffff;  // what a grid's second axis takes

Schedule refused(std::string reason) {
  Schedule result;
  result.support = Support::no(std::move(reason));
  return result;
}

// What boxes with halos are of.
Support supports_halo(Problem const& p) {
  for (int axis = 0; axis < kMaxAxes; ++axis) {
    AxisProblem const& own = p.axes[axis];
    if (own.stride != 1) {
      return Support::no(detail::join("its stride is ", own.stride, ", 1 is served"));
    }
    if (axis > 0 && own.kernel != kHaloTaps) {
      return Support::no(detail::join("its filter has ", own.kernel, " taps along an axis, ",
                                      kHaloTaps, " are served"));
    }
  }
  return Support::yes();
}

Slabs halo_slabs(Problem const& p, int64_t batch) {
  Slabs slabs;
  slabs.box = {1, kHaloPositions, kHaloPositions, 1};
  for (int axis = 0; axis < kMaxAxes; ++axis) {
    slabs.count[axis] = int(ceil_div(p.axes[axis].output, slabs.box[axis]));
    if (axis > 0) slabs.reach[axis] = p.axes[axis].dilation * (kHaloTaps - 1);
  }
  slabs.count[kMaxAxes] = int(batch);
  return slabs;
}

}  // namespace

Schedule schedule_of(Problem const& p, int64_t batch, Math math, Block const& block,
                     Device const& device) {
  Shape const shape{.columns = kFewestSegment};  // any: taps and sources are the same
  Schedule s;
  s.gather = boxes::schedule_of(p, Direction::kGathers, math, shape, device);
  if (!s.gather.support) return refused(s.gather.support.reason);
  s.all_channels = int(ceil_div(p.output_channels, kUnit));
  s.channel_blocks = int(ceil_div(s.all_channels, block.channels));
  s.unit_chunks = int(ceil_div(p.channels, kUnit));
  s.units = int(s.gather.taps.size()) * s.unit_chunks;
  s.unit_blocks = int(ceil_div(s.units, block.units));
  int64_t const tasks = int64_t(s.channel_blocks) * s.unit_blocks;
  if (block.halo) {
    if (Support const support = supports_halo(p); !support) return refused(support.reason);
    s.slabs = halo_slabs(p, batch);
    int const rows = s.slabs.copied();
    int const longest = std::max(s.slabs.extent(1), s.slabs.extent(2));
    if (longest > kMostBoxExtent) return refused("its taps lie too far apart");
    s.halo_bytes = int(round_up(rows * kChunkBytes, kSwizzleBytes));
  } else {
    s.slabs = s.gather.slabs(batch, block.positions());
  }
  int64_t const slabs = s.slabs.all();
  if (slabs >= kMostSlabs || tasks > kMostTasks) {
    return refused(detail::join(tasks, " tasks of ", slabs, " slabs are more than are counted"));
  }
  s.tasks = int(tasks);
  // Halos' slabs are some nine times those of others in what they multiply.
  s.splits = block.halo ? splits_of(s.tasks, slabs, 1, 1.0, 0.025)
                        : splits_of(s.tasks, slabs, kFewestSteps);
  s.stage_bytes = Memory::stage_bytes(block, s.halo_bytes);
  s.stages = kMostStages;
  while (s.stages > 0 && Memory::bytes(s.stages, s.stage_bytes) > device.shared_bytes) --s.stages;
  if (s.stages < (block.halo ? kFewestHaloStages : kFewestStages)) {
    return refused("its stages do not fit the shared memory of a multiprocessor");
  }
  s.shared_bytes = Memory::bytes(s.stages, s.stage_bytes);
  if (block.packs()) s.packed_bytes = slabs * s.all_channels * kTileBytes;
  s.reads_once = std::ranges::all_of(p.axes, [](AxisProblem const& axis) {
    return axis.kernel == axis.stride && axis.dilation == 1 && axis.padding == 0 &&
           axis.input == int64_t(axis.output) * axis.stride;
  });
  s.bias_parts = int(s.splits * s.gather.taps.size()) * block.bias_shares();
  s.partial_bytes =
      tasks * s.splits * block.channels * block.units * kUnit * kUnit * int64_t(sizeof(float));
  return s;
}

}  // namespace fusedconv::conv::sm90::boxes::weight
