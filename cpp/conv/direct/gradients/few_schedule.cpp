#include <algorithm>
#include <limits>

#include "conv/direct/gradients/few_channels.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::conv::direct::few {
namespace {

// Of a block, so that four of them share a multiprocessor of compute capability 9.0; what a larger
// filter or stride needs may be more.
constexpr int kFewBytes = 56 << 10;
constexpr int kMostBytes = 96 << 10;
constexpr int kMostParts = 2048;
constexpr int64_t kMostPartialBytes = 64 << 20;
constexpr int64_t kMostInt = std::numeric_limits<int>::max();

// Lines that tiles of so many rows meet along an axis.
int64_t lines_of(AxisProblem const& axis, int rows) {
  return int64_t(axis.stride) * (rows - 1) + int64_t(axis.dilation) * (axis.kernel - 1) + 1;
}

template <int kStride, int kKernel>
void set_columns(Config& config) {
  using C = Columns<kStride, kKernel>;
  config.stride = kStride;
  config.pitch = C::pitch();
  config.passes = C::kPasses;
  config.values = C::kShared ? C::kValues : kPositions * kKernel;
}

void set_columns(Config& config, AxisProblem const& width) {
  bool const shared = width.stride == 2 && width.dilation == 1;
  switch (width.kernel) {
    case 2: return set_columns<0, 2>(config);
    case 3: return shared ? set_columns<2, 3>(config) : set_columns<0, 3>(config);
    case 4: return shared ? set_columns<2, 4>(config) : set_columns<0, 4>(config);
    case 5: return shared ? set_columns<2, 5>(config) : set_columns<0, 5>(config);
  }
}

// Lets samples stand for an axis that the problem lacks, so that tiles have rows of several.
void set_axes(Config& config) {
  TransposedProblem const& p = config.problem;
  std::copy(p.axes.begin(), p.axes.end(), config.axes);
  int64_t input = 1, output = 1;
  for (int axis = kMaxAxes; axis > 0; --axis) {
    config.input_strides[axis] = input;
    config.output_strides[axis] = output;
    input *= p.axes[axis - 1].input;
    output *= p.axes[axis - 1].output;
  }
  config.input_strides[0] = input * p.channels;
  config.output_strides[0] = output * p.output_channels;
  config.samples = config.batch;
  auto const is_absent = [](AxisProblem const& a) {
    return a.input == 1 && a.output == 1 && a.kernel == 1 && a.padding == 0;
  };
  // Bytes from a tile's first line to another are counted in 32 bits.
  if (!is_absent(p.axes[0]) || config.batch > kMostInt ||
      config.output_strides[0] * kRows > kMostInt / 4) {
    return;
  }
  int const axis = is_absent(p.axes[1]) ? 1 : 0;
  config.axes[axis] = {.input = int(config.batch), .output = int(config.batch)};
  config.input_strides[axis + 1] = config.input_strides[0];
  config.output_strides[axis + 1] = config.output_strides[0];
  config.samples = 1;
}

int64_t shared_bytes(Config const& config, int64_t lines) {
  int64_t const weights =
      round_up(int64_t(config.taps()) * weight_vector(config.problem.channels), 4);
  int64_t const sums = round_up(int64_t(kWarps) * config.taps() * config.problem.channels, 4);
  int64_t const pieces = int64_t(config.problem.channels) * kPositions * kThreads;
  return (weights + sums + pieces + 2 * line_slots(lines) + lines * config.pitch) *
         int64_t(sizeof(float));
}

// Chooses the tile whose blocks stage the fewest lines beside what they multiply.
void set_tile(Config& config) {
  AxisProblem const &depth = config.axes[0], &height = config.axes[1];
  // Instructions of a warp for each output channel.
  int64_t const multiplies = int64_t(config.taps()) * config.problem.channels * kPositions * 2;
  int64_t const line = 3 * config.passes + 3;
  auto const search = [&](int64_t most_bytes) {
    int64_t best = 0;
    for (int h = 1; h <= std::min(kRows, height.input); ++h) {
      int const d = std::min(kRows / h, depth.input);
      int64_t const lines_d = lines_of(depth, d), lines_h = lines_of(height, h);
      if (lines_d > most_bytes || lines_h > most_bytes) continue;
      int64_t const bytes = shared_bytes(config, lines_d * lines_h);
      if (bytes > most_bytes) continue;
      int64_t const tiles = ceil_div(depth.input, d) * ceil_div(height.input, h);
      int64_t const cost = tiles * (multiplies + lines_d * lines_h * line / kWarps);
      if (best != 0 && cost >= best) continue;
      best = cost;
      config.tile[0] = d;
      config.tile[1] = h;
      config.lines[0] = int(lines_d);
      config.lines[1] = int(lines_h);
      config.shared_bytes = int(bytes);
    }
    return best != 0;
  };
  if (!search(kFewBytes) && !search(kMostBytes)) return;
  config.tiles[0] = int(ceil_div(depth.input, config.tile[0]));
  config.tiles[1] = int(ceil_div(height.input, config.tile[1]));
  config.tiles[2] = int(ceil_div(config.axes[2].input, kTileWidth));
}

std::string refusal(Config& config) {
  TransposedProblem const& p = config.problem;
  if (p.groups != 1) return detail::join("groups is ", p.groups, ", 1 is served");
  if (p.channels > kMostChannels) {
    return detail::join(p.channels, " input channels, up to ", kMostChannels, " are served");
  }
  if (p.layout != Layout::kChannelsFirst) return "channels last, NCHW is served";
  int const kernel = p.axes[2].kernel;
  if (kernel < kLeastKernel || kernel > kMostKernel) {
    return detail::join("the filter has ", kernel, " taps along width, ", kLeastKernel, " to ",
                        kMostKernel, " are served");
  }
  int64_t pixels = 1, outputs = 1, taps = 1;
  for (AxisProblem const& axis : p.axes) {
    pixels *= axis.input;
    outputs *= axis.output;
    taps *= axis.kernel;
    constexpr int64_t kMost = 1 << 30;
    // Positions of whole tiles, and outputs that they would meet.
    int64_t const met = int64_t(axis.stride) * (axis.input + kTileWidth) +
                        int64_t(axis.dilation) * (axis.kernel - 1);
    if (std::max({pixels, outputs, met}) >= kMost) {
      return detail::join("pixels of a plane and along an axis are counted to ", kMost);
    }
  }
  if (config.batch == 0 || pixels == 0 || outputs == 0) return "the input is empty";
  if (taps * p.output_channels * p.channels > kMostInt / 8) {
    return detail::join("a weight of ", taps, " taps and ", p.output_channels, " output channels");
  }
  set_axes(config);
  set_columns(config, p.axes[2]);
  set_tile(config);
  if (config.shared_bytes == 0) {
    return detail::join("what a tile meets of the output exceeds ", kMostBytes,
                        " bytes of shared memory");
  }
  // Blocks count on beyond the last item by as many as there are.
  if (config.items() > kMostInt / 2)
    return detail::join("a batch of ", config.batch, " is too large");
  return {};
}

}  // namespace

int Config::parts() const {
  int64_t const most = kMostPartialBytes / (int64_t(numbers()) * int64_t(sizeof(float)));
  return int(std::min({items(), std::max<int64_t>(most, 1), int64_t(kMostParts)}));
}

Config config_of(TransposedProblem const& problem, DType dtype, int64_t batch) {
  Config config;
  config.problem = problem;
  config.dtype = dtype;
  config.batch = batch;
  std::string reason = refusal(config);
  config.support = reason.empty() ? Support::yes() : Support::no(std::move(reason));
  return config;
}

}  // namespace fusedconv::conv::direct::few
