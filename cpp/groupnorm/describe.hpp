// Words that the steps' descriptions share.
#pragma once

#include <initializer_list>
#include <string>

#include "fusedconv/activation.hpp"
#include "fusedconv/check.hpp"
#include "groupnorm/stream.hpp"

namespace fusedconv::groupnorm {

// Empty where there is nothing to do.
inline std::string step_name(Activation activation) {
  return activation == Activation::kIdentity ? std::string() : name_of(activation);
}

// The parts that are not empty.
inline std::string join_parts(char const* separator, std::initializer_list<std::string> parts) {
  std::string result;
  for (std::string const& part : parts) {
    if (part.empty()) continue;
    if (!result.empty()) result += separator;
    result += part;
  }
  return result;
}

inline std::string place_of(StreamedConfig const& config) {
  Stream const& s = config.stream;
  std::string const each = s.teams > 1 ? detail::join(s.teams, " times ") : "";
  return detail::join("groups in the shared memory of ", each, s.blocks, " multiprocessors");
}

}  // namespace fusedconv::groupnorm
