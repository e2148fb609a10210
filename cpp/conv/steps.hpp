// Steps that several kinds of convolutions have. Config is one of theirs: it has a row with a name
// and launch(), a problem, a schedule, traits() and reads(), and its namespace pack_filter(); that
// of its problem, where it is not this one, weight_of() and output_channels_of(). Where its kernels
// take moments, it has partial_slots() of a sample, for as many partial moments of each output
// channel. Where it declares kPadsChannels, pack_filter() fills what the weight lacks of the
// config's channels with zeros. Where it declares kReadsWeight, its reads_weight() says of a source
// whether the filter may be that weight as it lies, which its Arguments have a place for. Where it
// declares kBeginsEarly, pack_filter() releases early and its Arguments say whether a launch may
// begin so.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "conv/filter_operand.hpp"
#include "conv/math_table.hpp"
#include "conv/problem.hpp"
#include "fusedconv/activation.hpp"
#include "fusedconv/check.hpp"
#include "fusedconv/groupnorm.hpp"
#include "fusedconv/types.hpp"
#include "groupnorm/describe.hpp"
#include "groupnorm/merge_partials.hpp"
#include "groupnorm/statistics.hpp"
#include "program/step.hpp"

namespace fusedconv::conv {

// The extents that a problem's weight has, and all its output channels.
inline FilterSource weight_of(ConvProblem const& p) {
  return {.c = p.c, .k = p.k, .t = p.t, .r = p.r, .s = p.s};
}
inline int64_t output_channels_of(ConvProblem const& p) { return p.k; }

// The same of a config, which may mean more by its problem's channels and taps.
template <class Config>
auto weight_of(Config const& config) -> decltype(weight_of(config.problem)) {
  return weight_of(config.problem);
}
template <class Config>
auto output_channels_of(Config const& config) -> decltype(output_channels_of(config.problem)) {
  return output_channels_of(config.problem);
}

// Partial moments to statistics [N, groups], of configs that have no function of their own for it.
template <class Config>
void merge_moments(Config const& config, GroupNormProblem const& problem,
                   groupnorm::Partial const* partials, groupnorm::StatisticsTargets const& targets,
                   cudaStream_t stream) {
  groupnorm::merge_partials(config.row->name, problem,
                            {partials, config.partial_slots(), output_channels_of(config)}, targets,
                            stream);
}
// Of a sample, in bytes.
template <class Config>
int64_t partial_bytes_of(Config const& config) {
  return config.partial_slots() * output_channels_of(config) * int64_t(sizeof(groupnorm::Partial));
}

// Returns the config for a constructor's list of members.
template <class Config>
Config const& served(Config const& config) {
  if (Support const& support = config.schedule.support; !support) {
    throw InvalidArgument(detail::join(config.row->name, ": ", support.reason));
  }
  if constexpr (requires { config.multiprocessors; }) {
    FUSEDCONV_CHECK(config.multiprocessors > 0, config.row->name, ": multiprocessors is ",
                    config.multiprocessors);
  }
  return config;
}

template <class Config, class T>
void expect(Config const& config, char const* what, T const& got, T const& expected) {
  if (got == expected) return;
  throw InvalidArgument(
      detail::join(config.row->name, ": ", what, ": got ", got, ", expected ", expected));
}

// Whether the pixels of a config's tensors may have more channels than its weight: whole 16 bytes.
template <class Config>
inline constexpr bool kPadsChannels = requires { requires Config::kPadsChannels; };

// Throws where channels are neither those of a config's pixels nor, where these may be padded,
// those that are padded to them.
template <class Config>
void expect_channels(Config const& config, char const* what, int64_t got, int64_t expected) {
  if constexpr (kPadsChannels<Config>) {
    if (round_up(got, 16 / size_of(config.traits().dtype)) == expected) return;
  }
  expect<Config, int64_t>(config, what, got, expected);
}

template <class Config>
FilterSource const& matching(Config const& config, FilterSource const& source) {
  FilterSource const c = weight_of(config);
  expect_channels(config, "input channels of the weight", source.c, c.c);
  expect_channels(config, "output channels of the weight", source.k, c.k);
  expect<Config, int64_t>(config, "taps along depth", source.t, c.t);
  expect<Config, int64_t>(config, "taps along height", source.r, c.r);
  expect<Config, int64_t>(config, "taps along width", source.s, c.s);
  return source;
}

// Whether a config's kernels read some weights as they lie.
template <class Config>
inline constexpr bool kReadsWeight = requires { requires Config::kReadsWeight; };

// Whether a config's kernels that pack release early, and what multiplies may begin early: it waits
// before it reads a packed filter, a scale or a shift.
template <class Config>
inline constexpr bool kBeginsEarly = requires { requires Config::kBeginsEarly; };

template <class Config>
FilterOperand const& matching(Config const& config, FilterOperand const& filter) {
  if (!filter.source()) return filter;
  bool reads = false;
  if constexpr (kReadsWeight<Config>)
    reads = config.reads_weight(matching(config, *filter.source()));
  expect(config, "whether the weight is read as it lies", reads, true);
  return filter;
}

template <class Config>
GroupNormProblem const& matching(Config const& config, GroupNormProblem const& problem) {
  expect<Config, int64_t>(config, "channels", problem.channels, output_channels_of(config));
  expect<Config, std::string>(config, "dtype", name_of(problem.dtype),
                              name_of(config.traits().dtype));
  return problem;
}

inline GroupNormProblem with_batch(GroupNormProblem problem, int64_t batch) {
  problem.batch = batch;
  return problem;
}

// weight to filter, config.schedule.filter_bytes of them; nothing where the convolution reads the
// weight as it lies.
template <class Config>
class PackFilter final : public Step {
 public:
  PackFilter(Config const& config, FilterSource const& source, Operand weight, Operand filter)
      : config_(served(config)),
        source_(matching(config, source)),
        weight_(weight),
        filter_(filter) {}

  std::string describe() const override {
    if (reads_weight()) return "pack filter, if the weight begins at no multiple of 16 bytes";
    MathTraits const& math = config_.traits();
    if (math.dtype != DType::kFloat32) return "pack filter";
    return math.parts == 2 ? "pack filter (split in two TF32 parts)"
                           : "pack filter (rounded to TF32)";
  }
  std::vector<Operand> operands() const override { return {weight_, filter_}; }
  void run(RunContext const& context, void*) const override {
    void const* const weight = context.at(weight_);
    if constexpr (kReadsWeight<Config>) {
      if (reads_weight_at(config_, source_, weight)) return;
    }
    pack_filter(config_, source_, weight, context.at(filter_), context.stream);
  }
  Leaves leaves(RunContext const& context) const override {
    if constexpr (kReadsWeight<Config>) {
      if (reads_weight_at(config_, source_, context.at(weight_))) return Leaves::kNothing;
    }
    return kBeginsEarly<Config> ? Leaves::kReleases : Leaves::kAll;
  }

 private:
  bool reads_weight() const {
    if constexpr (kReadsWeight<Config>) return config_.reads_weight(source_);
    return false;
  }

  Config config_;
  FilterSource source_;
  Operand weight_, filter_;
};

// Whether a config's Arguments have a scale and a shift of each channel behind the bias.
template <class Config>
inline constexpr bool kScales = requires { requires Config::kScales; };

// Whether they have a place for the biased sum beside the output.
template <class Config>
inline constexpr bool kSaves = requires { requires Config::kSaves; };

// Declared for its return type.
template <class Arguments>
Arguments arguments_of(void (*launch)(Arguments const&, cudaStream_t));

template <class Config>
using ArgumentsOf = decltype(arguments_of(std::declval<Config const&>().row->launch));

// What it leaves of moments.
template <class Config>
using PartialOf = std::remove_pointer_t<decltype(ArgumentsOf<Config>::partials)>;

// Whether a config's convolution takes moments of what it activates, and may store what it was.
template <class Config>
inline constexpr bool kTakesMoments = requires(ArgumentsOf<Config> arguments) {
  arguments.partials;
  arguments.activates_output;
};

// What a step's line says where it stores the biased sum too.
inline constexpr char const* kSavesSum = "save";

// Convolution, bias, scale and shift of each channel, activation, and by tile and channel the
// moments of activated values. Without activates_output it is stored before the activation; what is
// `saved` is the biased sum. bias, partials, scale, shift and saved may be absent, and the output
// where moments alone are wanted; bias, scale and shift have `channels`, where the output's pixels
// may be padded.
template <class Config>
class Convolve final : public Step {
 public:
  Convolve(Config const& config, Activation activation, bool activates_output, Operand input,
           FilterOperand const& filter, Operand bias, Operand output, Operand partials,
           Operand scale, Operand shift, Operand saved, int channels)
      : config_(served(config)),
        activation_(activation),
        activates_output_(activates_output),
        input_(input),
        filter_(matching(config, filter)),
        bias_(bias),
        output_(output),
        partials_(partials),
        scale_(scale),
        shift_(shift),
        saved_(saved),
        channels_(channels) {
    if (channels > 0) {
      expect_channels(config, "output channels", channels, output_channels_of(config));
    }
    expect(config, "saved", saved.present(), saved.present() && kSaves<Config>);
    bool const scales = scale.present() || shift.present();
    expect(config, "scale and shift", scales, scales && kScales<Config>);
    if constexpr (!kTakesMoments<Config>) {
      expect(config, "partials", partials.present(), false);
      expect(config, "activates_output", activates_output, true);
    }
  }

  std::string describe() const override {
    bool const scales = scale_.present() || shift_.present();
    return groupnorm::join_parts(
        " + ",
        {detail::join(config_.row->name, " (", config_.reads(), ")"), bias_.present() ? "bias" : "",
         saved_.present() ? kSavesSum : "", scales ? "affine" : "",
         groupnorm::step_name(activation_), partials_.present() ? "moments" : ""});
  }
  std::vector<Operand> operands() const override {
    return {input_,    filter_.packed(), filter_.weight(), bias_, output_,
            partials_, scale_,           shift_,           saved_};
  }
  void run(RunContext const& context, void*) const override {
    ArgumentsOf<Config> arguments{.config = config_,
                                  .batch = int(context.samples),
                                  .activation = activation_,
                                  .input = context.at(input_),
                                  .bias = context.at(bias_),
                                  .output = context.at(output_)};
    if constexpr (kReadsWeight<Config>) {
      filter_.fill(config_, context, arguments);
    } else {
      arguments.filter = context.at(filter_.packed());
    }
    if constexpr (kTakesMoments<Config>) {
      arguments.activates_output = activates_output_;
      arguments.partials = context.at<PartialOf<Config>>(partials_);
    }
    if constexpr (kScales<Config>) {
      arguments.scale = context.at<float>(scale_);
      arguments.shift = context.at<float>(shift_);
    }
    if constexpr (kSaves<Config>) arguments.saved = context.at(saved_);
    if constexpr (kPadsChannels<Config>) arguments.own_channels = channels_;
    if constexpr (kBeginsEarly<Config>) arguments.begins_early = context.begins_early;
    config_.row->launch(arguments, context.stream);
  }

 private:
  Config config_;
  Activation activation_;
  bool activates_output_;
  Operand input_;
  FilterOperand filter_;
  Operand bias_, output_, partials_, scale_, shift_, saved_;
  int channels_;
};

// problem.batch is the run's. mean and rstd may be absent.
template <class Config>
class MergeMoments final : public Step {
 public:
  MergeMoments(Config const& config, GroupNormProblem const& problem, Operand partials,
               Operand statistics, Operand mean, Operand rstd)
      : config_(served(config)),
        problem_(matching(config, problem)),
        partials_(partials),
        statistics_(statistics),
        mean_(mean),
        rstd_(rstd) {}

  std::string describe() const override { return "merge moments"; }
  std::vector<Operand> operands() const override { return {partials_, statistics_, mean_, rstd_}; }
  void run(RunContext const& context, void*) const override {
    merge_moments(config_, with_batch(problem_, context.samples),
                  context.at<PartialOf<Config>>(partials_),
                  {.statistics = context.at<groupnorm::Statistics>(statistics_),
                   .mean = context.at<float>(mean_),
                   .rstd = context.at<float>(rstd_)},
                  context.stream);
  }

 private:
  Config config_;
  GroupNormProblem problem_;
  Operand partials_, statistics_, mean_, rstd_;
};

}  // namespace fusedconv::conv
