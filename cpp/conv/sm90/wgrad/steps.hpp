// The steps of the weight gradient. Both take the whole batch, that of the config's problem.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "conv/sm90/wgrad/add_partials.hpp"
#include "conv/sm90/wgrad/rows.hpp"
#include "conv/sm90/wgrad/small_part.hpp"
#include "conv/steps.hpp"
#include "fusedconv/check.hpp"
#include "program/step.hpp"

namespace fusedconv::conv::sm90::wgrad {

// Strict fp32 as a sum of products of TF32's: what rounding to TF32 leaves of an operand, its small
// part, is the operand of another product. Their order is that in which AddPartials adds them.
enum class Product : int { kSmallByBig, kBigBySmall, kBigByBig };
inline constexpr int kStrictProducts = 3;

}  // namespace fusedconv::conv::sm90::wgrad

namespace fusedconv {

template <>
inline constexpr std::array kNames<conv::sm90::wgrad::Product>{"small by big", "big by small",
                                                               "big by big"};

}  // namespace fusedconv

namespace fusedconv::conv::sm90::wgrad {

inline void check_whole(Config const& config, RunContext const& context) {
  expect<Config, int64_t>(config, "batch", context.samples, config.problem.n);
}

// partials: config.schedule.partial_bytes for each product, for AddPartials. Without a product the
// operands are all there is; each is rounded on the way to the tensor core.
class SumProducts final : public Step {
 public:
  SumProducts(Config const& config, Operand input, Operand grad_output, Operand partials,
              std::optional<Product> product)
      : config_(served(config)),
        input_(input),
        grad_output_(grad_output),
        partials_(partials),
        product_(product) {}

  std::string describe() const override {
    return detail::join(config_.row->name, " (weight gradient, ",
                        product_ ? detail::join(name_of(*product_), ", ") : std::string(),
                        config_.schedule.splits,
                        config_.schedule.splits == 1 ? " part)" : " parts)");
  }
  std::vector<Operand> operands() const override { return {input_, grad_output_, partials_}; }
  void run(RunContext const& context, void*) const override {
    check_whole(config_, context);
    int64_t const before = product_ ? int64_t(*product_) * config_.schedule.partial_elements() : 0;
    config_.row->launch({.config = config_,
                         .input = context.at(input_),
                         .grad_output = context.at(grad_output_),
                         .partials = context.at<float>(partials_) + before,
                         .big_by_big = product_ == Product::kBigByBig},
                        context.stream);
  }

 private:
  Config config_;
  Operand input_, grad_output_, partials_;
  std::optional<Product> product_;
};

// What rounding to TF32 leaves of a float32 tensor [N, channels, lines, columns] whose lines are
// padded to kLineAlignment bytes, laid out likewise: strict fp32's small part.
class SmallPart final : public Step {
 public:
  SmallPart(std::string name, int64_t lines, int64_t columns, Operand input, Operand output)
      : name_(std::move(name)), lines_(lines), columns_(columns), input_(input), output_(output) {}

  std::string describe() const override {
    return detail::join("what rounding to TF32 leaves of ", name_);
  }
  std::vector<Operand> operands() const override { return {input_, output_}; }
  void run(RunContext const& context, void*) const override {
    small_part(context.samples * lines_, columns_, context.at<float>(input_),
               context.at<float>(output_), context.stream);
  }

 private:
  std::string name_;  // of the input, for a person
  int64_t lines_;     // of a sample, in all channels
  int64_t columns_;
  Operand input_, output_;
};

// A contiguous weight [C, K, T, R, S] whose phases' planes are a problem's output channels.
inline FilterSource contiguous_weight(ConvProblem const& p, PhasePlanes const& phases) {
  auto const& [depth, height, width] = phases.axes;
  FilterSource result{.c = p.c,
                      .k = p.k / phases.count(),
                      .t = depth.kernel,
                      .r = height.kernel,
                      .s = width.kernel};
  result.stride_s = 1;
  result.stride_r = result.s;
  result.stride_t = result.r * result.stride_r;
  result.stride_k = result.t * result.stride_t;
  result.stride_c = result.k * result.stride_k;
  return result;
}

// grad_weight: of the problem's dtype; with phases that of the weight whose planes the problem's
// output channels are. It lies as `weight` says, without which it is contiguous [C, K, T, R, S].
// products: of SumProducts, kStrictProducts or 1.
class AddPartials final : public Step {
 public:
  AddPartials(Config const& config, Operand partials, Operand grad_weight,
              std::optional<PhasePlanes> const& phases, int products,
              std::optional<FilterSource> const& weight)
      : config_(served(config)),
        phases_(phases.value_or(
            PhasePlanes::whole(config.problem.t, config.problem.r, config.problem.s))),
        weight_(weight.value_or(contiguous_weight(config.problem, phases_))),
        partials_(partials),
        grad_weight_(grad_weight),
        products_(products) {
    FUSEDCONV_CHECK(products == 1 || products == kStrictProducts, "products: got ", products);
    ConvProblem const& c = config.problem;
    auto const& [depth, height, width] = phases_.axes;
    expect<Config, int64_t>(config, "output channels modulo phases", c.k % phases_.count(), 0);
    expect<Config, int64_t>(config, "taps of a phase along depth", depth.taps(), c.t);
    expect<Config, int64_t>(config, "taps of a phase along height", height.taps(), c.r);
    expect<Config, int64_t>(config, "taps of a phase along width", width.taps(), c.s);
    FilterSource const whole = contiguous_weight(c, phases_);
    expect<Config, int64_t>(config, "input channels of the weight", weight_.c, whole.c);
    expect<Config, int64_t>(config, "output channels of the weight", weight_.k, whole.k);
    expect<Config, int64_t>(config, "taps along depth", weight_.t, whole.t);
    expect<Config, int64_t>(config, "taps along height", weight_.r, whole.r);
    expect<Config, int64_t>(config, "taps along width", weight_.s, whole.s);
  }

  std::string describe() const override { return "add the weight gradient's parts"; }
  std::vector<Operand> operands() const override { return {partials_, grad_weight_}; }
  void run(RunContext const& context, void*) const override {
    check_whole(config_, context);
    add_partials(config_, phases_, weight_, products_, context.at<float>(partials_),
                 context.at(grad_weight_), context.stream);
  }

 private:
  Config config_;
  PhasePlanes phases_;
  FilterSource weight_;
  Operand partials_, grad_weight_;
  int products_;
};

}  // namespace fusedconv::conv::sm90::wgrad
