// What a step multiplies by: a packed filter or, in its place, the weight as it lies.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include "conv/problem.hpp"
#include "fusedconv/check.hpp"
#include "program/step.hpp"

namespace fusedconv::conv {

// Copies read a weight from multiples of so many bytes on.
inline constexpr uintptr_t kWeightAlignment = 16;

// Whether a config's kernels read this weight as it lies where it begins at `weight`. A program
// serves weights at any address, so that its steps ask when they run.
template <class Config>
bool reads_weight_at(Config const& config, FilterSource const& source, void const* weight) {
  return config.reads_weight(source) && reinterpret_cast<uintptr_t>(weight) % kWeightAlignment == 0;
}

// `weight`, where it is present, is one that the config reads as it lies, described by `source`.
class FilterOperand {
 public:
  FilterOperand(Operand packed, Operand weight = {}, std::optional<FilterSource> source = {})
      : packed_(packed), weight_(weight), source_(std::move(source)) {
    FUSEDCONV_CHECK(weight_.present() == source_.has_value(), "source: got ",
                    source_ ? "one" : "none", ", expected one with a weight alone");
  }

  Operand packed() const { return packed_; }
  Operand weight() const { return weight_; }
  std::optional<FilterSource> const& source() const { return source_; }

  // Fills a launch's arguments.
  template <class Config, class Arguments>
  void fill(Config const& config, RunContext const& context, Arguments& arguments) const {
    arguments.filter = context.at(packed_);
    if (!source_) return;
    void const* const weight = context.at(weight_);
    if (!reads_weight_at(config, *source_, weight)) return;
    arguments.filter = weight;
    arguments.weight = &*source_;
  }

 private:
  Operand packed_, weight_;
  std::optional<FilterSource> source_;
};

}  // namespace fusedconv::conv
