#include "cpu/schedule.hpp"

#include <cmath>

#include "cpu/huge_pages.hpp"
#include "fusedconv/check.hpp"

namespace fusedconv::cpu {

namespace {

template <class E>
void check_code(char const* name, E value) {
  int const code = static_cast<int>(value);
  FUSEDCONV_CHECK(code >= 0 && code < static_cast<int>(kNames<E>.size()), name, ": got code ",
                  code);
}

}  // namespace

void check(GroupNormProblem const& problem, int threads) {
  FUSEDCONV_CHECK(threads >= 1, "threads: got ", threads);
  FUSEDCONV_CHECK(problem.batch >= 0, "batch: got ", problem.batch);
  FUSEDCONV_CHECK(problem.channels >= 0, "channels: got ", problem.channels);
  FUSEDCONV_CHECK(problem.pixels >= 0, "pixels: got ", problem.pixels);
  FUSEDCONV_CHECK(problem.groups >= 1, "groups: got ", problem.groups);
  FUSEDCONV_CHECK(problem.channels % problem.groups == 0, "channels: got ", problem.channels,
                  ", which groups = ", problem.groups, " does not divide");
  for (DType const dtype : {problem.dtype, problem.output_dtype, problem.affine_dtype}) {
    check_code("dtype", dtype);
  }
  for (Activation const activation : {problem.activation_before, problem.activation_after}) {
    check_code("activation", activation);
  }
  FUSEDCONV_CHECK(problem.input_row_channels() == problem.channels, "row_channels: got ",
                  problem.row_channels, " for ", problem.channels, " channels");
  FUSEDCONV_CHECK(!std::isnan(problem.eps), "eps: got ", problem.eps);
}

void check_dtypes(GroupNormProblem const& problem) {
  bool const converts = problem.dtype == problem.output_dtype || problem.dtype == DType::kFloat32 ||
                        problem.output_dtype == DType::kFloat32;
  FUSEDCONV_CHECK(converts, "output_dtype: got ", name_of(problem.output_dtype),
                  " for an input of ", name_of(problem.dtype));
}

void check_gradients(GroupNormProblem const& problem, int threads) {
  check(problem, threads);
  FUSEDCONV_CHECK(problem.output_layout == problem.input_layout, "output_layout: got ",
                  name_of(problem.output_layout), ", input_layout is ",
                  name_of(problem.input_layout));
  FUSEDCONV_CHECK(problem.output_dtype == problem.dtype || problem.output_dtype == DType::kFloat32,
                  "output_dtype: got ", name_of(problem.output_dtype), " for an input of ",
                  name_of(problem.dtype));
}

void check_one_activation(GroupNormProblem const& problem) {
  FUSEDCONV_CHECK(problem.activation_before == Activation::kIdentity ||
                      problem.activation_after == Activation::kIdentity,
                  "activation_after: got ", name_of(problem.activation_after), " behind ",
                  name_of(problem.activation_before));
}

void prepare_output(GroupNormProblem const& problem, GroupNormTensors const& tensors) {
  FUSEDCONV_CHECK(tensors.input != nullptr, "input: got null");
  FUSEDCONV_CHECK(tensors.output != nullptr, "output: got null");
  if (tensors.input == tensors.output) {
    bool const same =
        problem.dtype == problem.output_dtype && problem.input_layout == problem.output_layout;
    FUSEDCONV_CHECK(same, "output: got the input, expected another tensor, for an output of ",
                    name_of(problem.output_dtype), " ", name_of(problem.output_layout),
                    " and an input of ", name_of(problem.dtype), " ",
                    name_of(problem.input_layout));
    return;
  }
  advise_huge_pages(tensors.output, problem.batch * problem.channels * problem.pixels *
                                        size_of(problem.output_dtype));
}

void read_affine(DType dtype, void const* from, int64_t count, float otherwise, float* to) {
  if (from == nullptr) {
    std::fill_n(to, count, otherwise);
  } else {
    ForwardLoops const& table = loops().forward;
    table.apply_to_run[index_of(dtype)][index_of(DType::kFloat32)][0](from, to, count, 0.0f, 1.0f,
                                                                      0.0f);
  }
}

}  // namespace fusedconv::cpu
