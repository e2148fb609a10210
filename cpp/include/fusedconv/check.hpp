// Errors: one exception type for misuse, one for a kernel that failed. Nothing prints or exits.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace fusedconv {

// The arguments do not describe a problem that the kernel serves; becomes ValueError.
struct InvalidArgument : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// A launch or a library call failed; becomes fusedconv.KernelError.
struct KernelFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

namespace detail {

template <class... Parts>
std::string join(Parts const&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace detail
}  // namespace fusedconv

// FUSEDCONV_CHECK(condition, "name: got ", value): the condition's own text says what was expected.
#define FUSEDCONV_CHECK(condition, ...)                                       \
  do {                                                                        \
    if (!(condition)) {                                                       \
      throw ::fusedconv::InvalidArgument(                                     \
          ::fusedconv::detail::join(__VA_ARGS__, ", expected ", #condition)); \
    }                                                                         \
  } while (false)

// FUSEDCONV_CUDA(kernel_name, call): throws when a CUDA status is not success.
#define FUSEDCONV_CUDA(kernel, ...)                                                 \
  do {                                                                              \
    cudaError_t const fusedconv_status = (__VA_ARGS__);                             \
    if (fusedconv_status != cudaSuccess) {                                          \
      cudaGetLastError(); /* which somebody else's check would find */              \
      throw ::fusedconv::KernelFailure(::fusedconv::detail::join(                   \
          kernel, ": ", cudaGetErrorName(fusedconv_status), " (",                   \
          cudaGetErrorString(fusedconv_status), ") at ", __FILE__, ":", __LINE__)); \
    }                                                                               \
  } while (false)
