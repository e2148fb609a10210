#include "cpu/loops.hpp"

#include <cstdlib>
#include <string_view>

#include "fusedconv/check.hpp"

// What the build has, the widest first.
#ifdef FUSEDCONV_X86
#define FUSEDCONV_INSTRUCTION_SETS(X) X(avx512_bf16) X(avx512) X(avx2) X(baseline)
#else
#define FUSEDCONV_INSTRUCTION_SETS(X) X(baseline)
#endif

#define FUSEDCONV_DECLARE(name)              \
  namespace fusedconv::cpu::name {           \
  extern ForwardLoops const forward_loops;   \
  extern BackwardLoops const backward_loops; \
  extern DirectLoops const direct_loops;     \
  extern ProductLoops const product_loops;   \
  }
FUSEDCONV_INSTRUCTION_SETS(FUSEDCONV_DECLARE)
#undef FUSEDCONV_DECLARE

namespace fusedconv::cpu {
namespace {

bool runs(std::string_view name) {
#ifdef FUSEDCONV_X86
  __builtin_cpu_init();
  bool const avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  bool const avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (name == "avx512_bf16") return avx512 && __builtin_cpu_supports("avx512bf16");
  if (name == "avx512") return avx512;
  if (name == "avx2") return avx2;
#endif
  return name == "baseline";
}

std::vector<Loops> available() {
  std::vector<Loops> found;
#define FUSEDCONV_ADD(name)                                                                \
  if (runs(#name)) {                                                                       \
    found.push_back({#name, name::forward_loops, name::backward_loops, name::direct_loops, \
                     name::product_loops});                                                \
  }
  FUSEDCONV_INSTRUCTION_SETS(FUSEDCONV_ADD)
#undef FUSEDCONV_ADD
  return found;
}

Loops chosen() {
  constexpr char const* kVariable = "FUSEDCONV_INSTRUCTION_SET";
  std::vector<Loops> const found = available();
  char const* const wanted = std::getenv(kVariable);
  if (wanted == nullptr || *wanted == '\0') return found.front();
  std::string names;
  for (Loops const& one : found) {
    if (std::string_view(wanted) == one.instruction_set) return one;
    names += (names.empty() ? "" : ", ") + std::string(one.instruction_set);
  }
  throw InvalidArgument(detail::join(kVariable, ": got \"", wanted, "\", expected one of ", names));
}

}  // namespace

Loops const& loops() {
  static Loops const found = chosen();
  return found;
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (Loops const& one : available()) names.emplace_back(one.instruction_set);
  return names;
}

}  // namespace fusedconv::cpu
