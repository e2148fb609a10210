// The one form of a refusal: whether a kernel serves a problem, and why not.
#pragma once

#include <string>
#include <utility>

namespace fusedconv {

struct Support {
  std::string reason;  // empty where the problem is served

  explicit operator bool() const { return reason.empty(); }
  static Support yes() { return {}; }
  static Support no(std::string reason) { return {std::move(reason)}; }
};

}  // namespace fusedconv
