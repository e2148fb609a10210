// How streams are cut, for a device that need not be there.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>

#include "fusedconv/check.hpp"
#include "groupnorm/streamed.hpp"
#include "groupnorm/streamed_gradients.hpp"
#include "groupnorm/support.hpp"

namespace fusedconv::groupnorm {
namespace {

// What a copy moves of what the memory's clock and width give.
constexpr double kCopyEfficiency = 0.87;

// Nanoseconds between a block's stores: a tile's bytes, loaded and stored, at the rate of a copy.
// Where a unit takes more than half of the ring, gradients need their stores spread further. What
// fits L2 is not held up, nor what runs where the memory's rate is not known.
unsigned pace_of(GroupNormProblem const& p, Stream const& s, int tensors, Device const& device) {
  int64_t const total = p.batch * p.channels * p.pixels * size_of(p.dtype) * (tensors + 1);
  if (device.dram_bytes_per_second <= 0.0 || total <= 2 * device.l2_bytes) return 0;
  double const moved = double(s.tile_vectors) * 16 * (tensors + 1);
  bool const crowded = tensors > 1 && 2 * ceil_div(s.tiles, s.blocks) > s.stages;
  double const spread = crowded ? 1.05 : 0.965;
  double const bytes_per_ns = kCopyEfficiency * 1e-9 * device.dram_bytes_per_second;
  return unsigned(spread * moved * s.blocks * s.teams / bytes_per_ns);
}

// The most teams that leave no block out.
unsigned teams_of(unsigned blocks, unsigned tiles, int64_t units) {
  int64_t const most = std::min<int64_t>(blocks * kTeamTiles / tiles, units / kTeamUnits);
  for (unsigned teams = unsigned(std::min<int64_t>(most, blocks)); teams > 1; --teams) {
    if (blocks % teams == 0) return teams;
  }
  return 1;
}

}  // namespace

StreamedConfig stream_config(GroupNormProblem const& p, int tensors, bool aligned,
                             int64_t fewest_tiles, Device const& device, bool in_halves) {
  StreamedConfig config;
  config.in_halves = in_halves;
  auto const refused = [&](std::string reason) {
    config.support = Support::no(std::move(reason));
    return config;
  };
  if (device.architecture < 90) {
    return refused(
        detail::join("needs compute capability 9.0, the device has ", device.architecture));
  }
  if (!streams_on(device.architecture)) {
    return refused(detail::join("is not compiled for compute capability ", device.architecture));
  }
  config.support = tensors == 1 ? supports_same_form(p) : supports_gradient_form(p);
  if (!config.support) return config;
  int64_t const vector = 16 / size_of(p.dtype);
  if (p.input_layout != Layout::kChannelsFirst) return refused("a group is not one run in memory");
  if (!aligned) return refused("an address is not a multiple of 16 bytes");
  if (p.group_size() % vector != 0) {
    return refused(
        detail::join("a group of ", p.group_size(), " elements is not whole 16-byte vectors"));
  }
  if (tensors == 1 && p.pixels < vector) {
    return refused(detail::join("planes of ", p.pixels, " elements are smaller than 16 bytes"));
  }
  int64_t const units = p.batch * p.groups;
  int64_t const limit = int64_t(1) << 31;
  if (units < 1 || units >= limit) return refused(detail::join("there are ", units, " groups"));
  if (p.pixels < 1) return refused("the input is empty");
  if (p.group_size() >= limit) return refused("a group has 2^31 elements or more");

  Stream& s = config.stream;
  s.units = unsigned(units);
  s.plane_elements = unsigned(p.pixels);
  s.unit_vectors = p.group_size() / vector;
  s.from_last = tensors == 1;
  s.vector_shift = unsigned(std::countr_zero(uint64_t(vector)));
  s.run_elements = unsigned(tensors == 1 ? p.group_size() : p.pixels);
  // Planes begin at multiples of what their size and a vector have in common.
  int64_t const before = vector - std::gcd(vector, int64_t(s.run_elements));
  s.run_vectors = unsigned(ceil_div(before + s.run_elements, vector));
  // Planes begin anywhere, and of a load that begins within a line of the cache each piece is of
  // two.
  s.lead_mask = tensors == 1 ? 0 : kLineVectors - 1;
  s.tile_vectors = unsigned(share_bytes(tensors)) / 16 - s.lead_mask;
  if (tensors == 1 && keeps_floats(p, in_halves)) s.tile_vectors /= 2;
  s.run_tiles = unsigned(ceil_div(s.run_vectors, s.tile_vectors));
  if (s.run_tiles < fewest_tiles) {
    s.run_tiles = unsigned(fewest_tiles);
    s.tile_vectors = unsigned(ceil_div(s.run_vectors, s.run_tiles));
  }
  if (ceil_div(s.run_elements, vector) <= (s.run_tiles - 1) * s.tile_vectors) {
    return refused(detail::join("planes of ", p.pixels, " elements are of up to ", s.run_tiles,
                                " tiles, some of one less"));
  }
  s.tiles = s.run_tiles * unsigned(tensors == 1 ? 1 : p.channels_per_group());
  auto const blocks =
      unsigned(std::min<int64_t>({device.multiprocessors, kMaxBlocks, units * s.tiles}));
  // Of gradients a warp adds up each tile, and fewer tiles under way cost more than they gain.
  s.teams = tensors == 1 ? teams_of(blocks, s.tiles, units) : 1;
  s.blocks = blocks / s.teams;
  s.step_units = s.blocks / s.tiles * s.teams;
  s.step_tiles = s.blocks % s.tiles;
  int const table = int(round_up(p.channels * int64_t(sizeof(TableEntry)), 128));
  int const left = device.shared_bytes - table - static_shared_bytes(tensors);
  s.stages = std::min<int>(kMaxStages, left / kStageBytes);
  if (s.stages < kTilesToShared) {
    return refused(detail::join("shared memory has ", std::max(0, s.stages),
                                " stages beside the weights of ", p.channels, " channels, ",
                                kTilesToShared, " are needed"));
  }
  int64_t const held = ceil_div(s.tiles, s.blocks);
  if (held + 1 > s.stages) {
    return refused(detail::join("a group needs ", held, " of a block's ", s.stages,
                                " stages of shared memory, and one must be free"));
  }
  s.copies = tensors == 1 ? 2 : 4;
  config.words =
      s.copies * units * std::min(s.tiles, s.blocks) * (tensors == 1 ? kMomentsWords : kSumsWords);
  s.pace = pace_of(p, s, tensors, device);
  config.shared_bytes = s.stages * kStageBytes + table;
  return config;
}

StreamedConfig streamed_config(GroupNormProblem const& p, bool aligned, Device const& device,
                               bool saves) {
  return stream_config(p, 1, aligned, 1, device, !saves && may_be_in_halves(p));
}

StreamedGradientConfig streamed_gradient_config(GroupNormProblem const& p, bool aligned,
                                                int columns, int pitch, Device const& device) {
  StreamedGradientConfig config;
  int const tensors = kStreamedTensors + has_wide_gradient(p);
  int64_t fewest_tiles = 1;
  if (columns * size_of(p.dtype) >= 16 && columns < kMostImageColumns && pitch > columns) {
    // So many that each fits an image, as it lies in padded lines.
    int64_t const padded = p.pixels / columns * pitch * size_of(p.dtype) / 16;
    fewest_tiles = ceil_div(padded, most_image_vectors(tensors));
  }
  config.streamed = stream_config(p, tensors, aligned, fewest_tiles, device);
  if (!config.streamed.support) config.streamed = stream_config(p, tensors, aligned, 1, device);
  config.support = config.streamed.support;
  if (!config.support) return config;
  Stream const& s = config.streamed.stream;
  // Tiles do not straddle planes: small planes would leave most of a stage empty.
  if (s.run_vectors < s.tile_vectors / 2) {
    config.support = Support::no("planes are smaller than half a tile");
    return config;
  }
  config.set_sizes(p, int(s.run_tiles));
  config.channel_sums = int(s.run_tiles) * (kReplacers / 32);
  return config;
}

}  // namespace fusedconv::groupnorm
