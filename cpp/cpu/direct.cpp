// Along one axis, output o sums weight[t] input[i] over o + padding = stride i + dilation t. With
// o + padding = stride q + r and dilation t = stride m + r, phase r of the output's positions q
// sums its own taps of input q - m: a line of each phase is a sum of lines of the input, shifted by
// m and weighted, and the input's gradient one of lines of the output gradient's phases, shifted
// the other way. Lines are brought to float32 with zeros around them, so that sums know no borders.
#include "cpu/direct.hpp"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "cpu/huge_pages.hpp"
#include "cpu/schedule.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::cpu {
namespace {

using conv::AxisProblem;
using conv::TransposedProblem;

// Taps of the columns: each one's phase and shift, and its place in a row of the filter.
struct ColumnTap {
  int64_t phase, shift;
  int place;
};

// What all passes share: extents, and how lines lie in their buffers.
class Direct {
 public:
  Direct(TransposedProblem const& problem, DType dtype, int64_t batch)
      : dtype_(dtype),
        batch_(batch),
        groups_(problem.groups),
        inputs_(problem.channels),
        outputs_(problem.output_channels),
        depth_(problem.axes[0]),
        height_(problem.axes[1]),
        columns_(problem.axes[2]),
        input_lines_(int64_t(depth_.input) * height_.input),
        output_lines_(int64_t(depth_.output) * height_.output),
        filter_rows_(int64_t(depth_.kernel) * height_.kernel),
        taps_of_phase_(std::size_t(columns_.stride)) {
    for (int tap = 0; tap < columns_.kernel; ++tap) {
      int64_t const reached = int64_t(columns_.dilation) * tap;
      taps_.push_back({reached % columns_.stride, reached / columns_.stride, tap});
      taps_of_phase_[std::size_t(taps_.back().phase)].push_back(taps_.back());
      most_shift_ = std::max(most_shift_, taps_.back().shift);
    }
    first_position_ = columns_.padding / columns_.stride;
    positions_ = (columns_.padding + columns_.output - 1) / columns_.stride - first_position_ + 1;
    zeros_in_front_ = std::max<int64_t>(0, most_shift_ - first_position_);
    input_room_ =
        zeros_in_front_ + std::max<int64_t>(columns_.input, first_position_ + positions_) + kRoom;
    input_room_ = round_up(input_room_, kRoom);
    // Of an input's column and its taps' shifts.
    phase_room_ = round_up(columns_.input + most_shift_ + kRoom, kRoom);
  }

 protected:
  static constexpr int kFloat = index_of(DType::kFloat32);

  // The rows of the filter through which a line of one tensor meets one of the other.
  struct Meeting {
    int64_t filter_row, line;
  };

  // Appends, for an axis, the taps through which an output meets inputs, or an input outputs.
  struct Met {
    int tap, at;
  };
  static void inputs_of(AxisProblem const& axis, int output, std::vector<Met>& found) {
    found.clear();
    for (int tap = 0; tap < axis.kernel; ++tap) {
      int64_t const reached = int64_t(output) + axis.padding - int64_t(axis.dilation) * tap;
      if (reached < 0 || reached % axis.stride != 0) continue;
      int64_t const input = reached / axis.stride;
      if (input < axis.input) found.push_back({tap, int(input)});
    }
  }
  static void outputs_of(AxisProblem const& axis, int input, std::vector<Met>& found) {
    found.clear();
    for (int tap = 0; tap < axis.kernel; ++tap) {
      int64_t const output =
          int64_t(axis.stride) * input + int64_t(axis.dilation) * tap - axis.padding;
      if (output >= 0 && output < axis.output) found.push_back({tap, int(output)});
    }
  }

  // Room of one thread to list what a line meets and what is summed.
  struct Lists {
    std::vector<Met> depth, height;
    std::vector<Meeting> met;
    std::vector<float const*> sources;
    std::vector<float> weights;
  };
  void meet(Lists& lists, int64_t lines_of_slice) const {
    lists.met.clear();
    for (Met const& d : lists.depth) {
      for (Met const& h : lists.height) {
        lists.met.push_back(
            {int64_t(d.tap) * height_.kernel + h.tap, int64_t(d.at) * lines_of_slice + h.at});
      }
    }
  }
  void meet_inputs(int64_t output_line, Lists& lists) const {
    inputs_of(depth_, int(output_line / height_.output), lists.depth);
    inputs_of(height_, int(output_line % height_.output), lists.height);
    meet(lists, height_.input);
  }
  void meet_outputs(int64_t input_line, Lists& lists) const {
    outputs_of(depth_, int(input_line / height_.input), lists.depth);
    outputs_of(height_, int(input_line % height_.input), lists.height);
    meet(lists, height_.output);
  }

  // Elements of a tensor before a line of a channel; channels are counted over all groups.
  int64_t input_offset(int64_t sample, int64_t channel, int64_t line) const {
    return ((sample * groups_ * inputs_ + channel) * input_lines_ + line) * columns_.input;
  }
  int64_t output_offset(int64_t sample, int64_t channel, int64_t line) const {
    return ((sample * groups_ * outputs_ + channel) * output_lines_ + line) * columns_.output;
  }
  // Of the taps of a filter's row.
  int64_t weight_offset(int64_t input, int64_t output, int64_t filter_row) const {
    return ((input * outputs_ + output) * filter_rows_ + filter_row) * columns_.kernel;
  }

  // `count` elements to float32 at `to + before`, zeros in the rest of its `room`.
  void read(void const* from, int64_t offset, int64_t count, int64_t before, int64_t room,
            float* to) const {
    std::fill_n(to, before, 0.0f);
    forward_.apply_to_run[index_of(dtype_)][kFloat][0](at(from, dtype_, offset), to + before, count,
                                                       0.0f, 1.0f, 0.0f);
    std::fill(to + before + count, to + room, 0.0f);
  }
  void write(float const* from, void* to, int64_t offset, int64_t count) const {
    forward_.apply_to_run[kFloat][index_of(dtype_)][0](from, at(to, dtype_, offset), count, 0.0f,
                                                       1.0f, 0.0f);
  }
  void read_input(void const* input, int64_t sample, int64_t channel, int64_t line,
                  float* to) const {
    read(input, input_offset(sample, channel, line), columns_.input, zeros_in_front_, input_room_,
         to);
  }
  // The phases of a line of the output's gradient, phase_room_ each; `whole` has room for all.
  void read_phases(void const* grad, int64_t sample, int64_t channel, int64_t line, float* whole,
                   float* phases) const {
    int64_t const room = phase_room_ * columns_.stride;
    float* const to = columns_.stride == 1 ? phases : whole;
    // Columns behind those that taps reach are in no product.
    int64_t const before = std::min<int64_t>(columns_.padding, room);
    int64_t const count = std::min<int64_t>(columns_.output, room - before);
    read(grad, output_offset(sample, channel, line), count, before, room, to);
    if (columns_.stride > 1) direct_.part(whole, columns_.stride, phase_room_, phases);
  }

  DType dtype_;
  int64_t batch_, groups_, inputs_, outputs_;  // channels of a group
  AxisProblem depth_, height_, columns_;
  int64_t input_lines_, output_lines_, filter_rows_;
  std::vector<ColumnTap> taps_;
  std::vector<std::vector<ColumnTap>> taps_of_phase_;
  int64_t most_shift_ = 0;
  // Of the output's columns: positions of each phase, from the first on.
  int64_t first_position_, positions_;
  int64_t zeros_in_front_;  // of a line of the input
  int64_t input_room_, phase_room_;
  ForwardLoops const& forward_ = loops().forward;
  DirectLoops const& direct_ = loops().direct;
};

// Lines that a unit of work has, so that it has about kPart elements.
int64_t lines_of_unit(int64_t lines, int64_t elements_of_line) {
  return std::clamp<int64_t>(kPart / std::max<int64_t>(1, elements_of_line), 1, lines);
}

// Calls body(sample and group, first line, one behind the last, thread) for units of so many lines.
template <class Body>
void for_each_unit(int64_t planes, int64_t lines, int64_t elements_of_line, int threads,
                   Body body) {
  int64_t const lines_each = lines_of_unit(lines, elements_of_line);
  int64_t const blocks = ceil_div(lines, lines_each);
  Schedule const schedule(planes * blocks, lines_each * elements_of_line, 0, 1, threads);
  auto const nothing = [](auto...) {};
  schedule.run(nothing, nothing, [&](int64_t unit, int64_t, int64_t, int64_t thread) {
    int64_t const first = unit % blocks * lines_each;
    body(unit / blocks, first, std::min(lines, first + lines_each), thread);
  });
}

class Convolution final : Direct {
 public:
  using Direct::Direct;

  void run(DirectTensors const& t, int threads) {
    advise_huge_pages(
        t.output, batch_ * groups_ * outputs_ * output_lines_ * columns_.output * size_of(dtype_));
    int64_t const staged = inputs_ * filter_rows_ * input_room_;
    int64_t const phase = round_up(positions_ + kRoom, kRoom);
    int64_t const room = staged + 2 * int64_t(columns_.stride) * phase;
    Buffer<float> const buffer(threads * room);
    std::vector<Lists> lists(static_cast<std::size_t>(threads));
    for_each_unit(batch_ * groups_, output_lines_, outputs_ * columns_.output, threads,
                  [&](int64_t plane, int64_t first, int64_t last, int64_t thread) {
                    float* const lines = buffer.get() + thread * room;
                    for (int64_t line = first; line < last; ++line) {
                      convolve(t, plane / groups_, plane % groups_, line, lines, lines + staged,
                               phase, lists[static_cast<std::size_t>(thread)]);
                    }
                  });
  }

 private:
  // phases: of one line, then interleaved.
  void convolve(DirectTensors const& t, int64_t sample, int64_t group, int64_t line, float* staged,
                float* phases, int64_t phase_room, Lists& lists) const {
    meet_inputs(line, lists);
    auto const met = int64_t(lists.met.size());
    for (int64_t c = 0; c < inputs_; ++c) {
      for (int64_t i = 0; i < met; ++i) {
        read_input(t.input, sample, group * inputs_ + c, lists.met[std::size_t(i)].line,
                   staged + (c * met + i) * input_room_);
      }
    }
    int64_t const stride = columns_.stride;
    float* const whole = phases + stride * phase_room;
    for (int64_t k = 0; k < outputs_; ++k) {
      int64_t const channel = group * outputs_ + k;
      float const start = t.bias == nullptr ? 0.0f : t.bias[channel];
      for (int64_t phase = 0; phase < stride; ++phase) {
        lists.sources.clear();
        lists.weights.clear();
        for (int64_t c = 0; c < inputs_; ++c) {
          for (int64_t i = 0; i < met; ++i) {
            float const* const weights =
                t.weight +
                weight_offset(group * inputs_ + c, k, lists.met[std::size_t(i)].filter_row);
            float const* const line_at =
                staged + (c * met + i) * input_room_ + zeros_in_front_ + first_position_;
            for (ColumnTap const& tap : taps_of_phase_[std::size_t(phase)]) {
              lists.sources.push_back(line_at - tap.shift);
              lists.weights.push_back(weights[tap.place]);
            }
          }
        }
        auto const terms = int64_t(lists.sources.size());
        direct_.add_products(lists.sources.data(), lists.weights.data(), terms,
                             std::max<int64_t>(1, terms / inputs_), positions_, start,
                             phases + phase * phase_room);
      }
      float const* from = phases;
      if (stride > 1) {
        direct_.join(phases, phase_room, stride, positions_, whole);
        from = whole;
      }
      write(from + columns_.padding % stride, t.output, output_offset(sample, channel, line),
            columns_.output);
    }
  }
};

class InputGradient final : Direct {
 public:
  using Direct::Direct;

  void run(DirectTensors const& t, int threads) {
    advise_huge_pages(t.grad_input,
                      batch_ * groups_ * inputs_ * input_lines_ * columns_.input * size_of(dtype_));
    int64_t const line_room = columns_.stride * phase_room_;
    int64_t const staged = outputs_ * filter_rows_ * line_room;
    int64_t const room = staged + line_room + phase_room_;
    Buffer<float> const buffer(threads * room);
    std::vector<Lists> lists(static_cast<std::size_t>(threads));
    for_each_unit(batch_ * groups_, input_lines_, inputs_ * columns_.input, threads,
                  [&](int64_t plane, int64_t first, int64_t last, int64_t thread) {
                    float* const lines = buffer.get() + thread * room;
                    for (int64_t line = first; line < last; ++line) {
                      differentiate(t, plane / groups_, plane % groups_, line, lines,
                                    lines + staged, lists[static_cast<std::size_t>(thread)]);
                    }
                  });
  }

 private:
  void differentiate(DirectTensors const& t, int64_t sample, int64_t group, int64_t line,
                     float* staged, float* whole, Lists& lists) const {
    meet_outputs(line, lists);
    auto const met = int64_t(lists.met.size());
    int64_t const line_room = columns_.stride * phase_room_;
    for (int64_t k = 0; k < outputs_; ++k) {
      for (int64_t i = 0; i < met; ++i) {
        read_phases(t.grad_output, sample, group * outputs_ + k, lists.met[std::size_t(i)].line,
                    whole, staged + (k * met + i) * line_room);
      }
    }
    float* const sum = whole + line_room;
    for (int64_t c = 0; c < inputs_; ++c) {
      int64_t const channel = group * inputs_ + c;
      lists.sources.clear();
      lists.weights.clear();
      for (int64_t k = 0; k < outputs_; ++k) {
        for (int64_t i = 0; i < met; ++i) {
          float const* const weights =
              t.weight + weight_offset(channel, k, lists.met[std::size_t(i)].filter_row);
          float const* const phases = staged + (k * met + i) * line_room;
          for (ColumnTap const& tap : taps_) {
            lists.sources.push_back(phases + tap.phase * phase_room_ + tap.shift);
            lists.weights.push_back(weights[tap.place]);
          }
        }
      }
      auto const terms = int64_t(lists.sources.size());
      direct_.add_products(lists.sources.data(), lists.weights.data(), terms,
                           std::max<int64_t>(1, terms / outputs_), columns_.input, 0.0f, sum);
      write(sum, t.grad_input, input_offset(sample, channel, line), columns_.input);
    }
  }
};

// Sums of a block of lines are in float32 vectors, line by line, and those of blocks in double.
class WeightGradient final : Direct {
 public:
  using Direct::Direct;

  void run(DirectTensors const& t, int threads) {
    int64_t const lines = batch_ * input_lines_;
    int64_t const filter = inputs_ * outputs_ * filter_rows_ * columns_.kernel;
    int64_t const line_room = columns_.stride * phase_room_;
    int64_t const room = inputs_ * input_room_ + 2 * line_room + filter * kRoom;
    int64_t const elements_of_line = (inputs_ + outputs_) * columns_.input;
    int64_t const lines_each = lines_of_unit(lines, elements_of_line);
    int64_t const blocks = ceil_div(lines, lines_each);
    Buffer<float> const buffer(threads * room);
    Buffer<double> const partial(groups_ * blocks * filter);
    std::vector<Lists> lists(static_cast<std::size_t>(threads));
    for_each_unit(groups_, lines, elements_of_line, threads,
                  [&](int64_t group, int64_t first, int64_t last, int64_t thread) {
                    float* const sums = buffer.get() + thread * room;
                    std::fill_n(sums, filter * kRoom, 0.0f);
                    for (int64_t line = first; line < last; ++line) {
                      add(t, group, line, sums, sums + filter * kRoom,
                          lists[static_cast<std::size_t>(thread)]);
                    }
                    double* const to =
                        partial.get() + (group * blocks + first / lines_each) * filter;
                    for (int64_t i = 0; i < filter; ++i) {
                      to[i] = 0.0;
                      for (int64_t lane = 0; lane < kRoom; ++lane) {
                        to[i] += static_cast<double>(sums[i * kRoom + lane]);
                      }
                    }
                  });
    for (int64_t group = 0; group < groups_; ++group) {
      for (int64_t i = 0; i < filter; ++i) {
        double sum = 0.0;
        for (int64_t block = 0; block < blocks; ++block) {
          sum += partial[(group * blocks + block) * filter + i];
        }
        t.grad_weight[group * filter + i] = static_cast<float>(sum);
      }
    }
  }

 private:
  // Products of a line, counted over the samples, with all that its taps reach; sums are
  // [inputs, outputs, filter rows, columns, lanes].
  void add(DirectTensors const& t, int64_t group, int64_t line_of_all, float* sums, float* staged,
           Lists& lists) const {
    int64_t const sample = line_of_all / input_lines_, line = line_of_all % input_lines_;
    meet_outputs(line, lists);
    for (int64_t c = 0; c < inputs_; ++c) {
      read(t.input, input_offset(sample, group * inputs_ + c, line), columns_.input, 0, input_room_,
           staged + c * input_room_);
    }
    float* const phases = staged + inputs_ * input_room_;
    float* const whole = phases + columns_.stride * phase_room_;
    for (Meeting const& met : lists.met) {
      for (int64_t k = 0; k < outputs_; ++k) {
        read_phases(t.grad_output, sample, group * outputs_ + k, met.line, whole, phases);
        lists.sources.clear();
        for (ColumnTap const& tap : taps_) {
          lists.sources.push_back(phases + tap.phase * phase_room_ + tap.shift);
        }
        for (int64_t c = 0; c < inputs_; ++c) {
          direct_.add_dots(staged + c * input_room_, lists.sources.data(), columns_.kernel,
                           columns_.input, sums + weight_offset(c, k, met.filter_row) * kRoom);
        }
      }
    }
  }
};

void check(char const* kernel, TransposedProblem const& problem, DType dtype, int64_t batch,
           int threads) {
  auto const at_least = [kernel](char const* name, int64_t value, int64_t least) {
    FUSEDCONV_CHECK(value >= least, kernel, ": ", name, ": got ", value, ", expected at least ",
                    least);
  };
  at_least("threads", threads, 1);
  at_least("batch", batch, 1);
  at_least("channels", problem.channels, 1);
  at_least("output_channels", problem.output_channels, 1);
  at_least("groups", problem.groups, 1);
  for (AxisProblem const& axis : problem.axes) {
    at_least("input", axis.input, 1);
    at_least("output", axis.output, 1);
    at_least("kernel", axis.kernel, 1);
    at_least("stride", axis.stride, 1);
    at_least("dilation", axis.dilation, 1);
    at_least("padding", axis.padding, 0);
  }
  int const stride = problem.axes[2].stride, code = int(dtype);
  FUSEDCONV_CHECK(stride <= kMostColumnStride, kernel, ": stride: got ", stride,
                  " along the last axis, expected at most ", kMostColumnStride);
  FUSEDCONV_CHECK(code >= 0 && code < kDTypes, kernel, ": dtype: got code ", code);
  FUSEDCONV_CHECK(problem.layout == Layout::kChannelsFirst, kernel,
                  ": layout: got channels last, expected channels first");
}

void check_pointer(char const* kernel, char const* name, void const* pointer) {
  FUSEDCONV_CHECK(pointer != nullptr, kernel, ": ", name, ": got null");
}

}  // namespace

void direct_convolution(TransposedProblem const& problem, DType dtype, int64_t batch,
                        DirectTensors const& tensors, int threads) {
  constexpr auto kKernel = "direct_convolution";
  check(kKernel, problem, dtype, batch, threads);
  check_pointer(kKernel, "input", tensors.input);
  check_pointer(kKernel, "weight", tensors.weight);
  check_pointer(kKernel, "output", tensors.output);
  Convolution(problem, dtype, batch).run(tensors, threads);
}

void direct_input_gradient(TransposedProblem const& problem, DType dtype, int64_t batch,
                           DirectTensors const& tensors, int threads) {
  constexpr auto kKernel = "direct_input_gradient";
  check(kKernel, problem, dtype, batch, threads);
  check_pointer(kKernel, "grad_output", tensors.grad_output);
  check_pointer(kKernel, "weight", tensors.weight);
  check_pointer(kKernel, "grad_input", tensors.grad_input);
  InputGradient(problem, dtype, batch).run(tensors, threads);
}

void direct_weight_gradient(TransposedProblem const& problem, DType dtype, int64_t batch,
                            DirectTensors const& tensors, int threads) {
  constexpr auto kKernel = "direct_weight_gradient";
  check(kKernel, problem, dtype, batch, threads);
  check_pointer(kKernel, "input", tensors.input);
  check_pointer(kKernel, "grad_output", tensors.grad_output);
  check_pointer(kKernel, "grad_weight", tensors.grad_weight);
  WeightGradient(problem, dtype, batch).run(tensors, threads);
}

}  // namespace fusedconv::cpu
