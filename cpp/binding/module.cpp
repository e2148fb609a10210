// The Python module fusedconv._C: tensors arrive as addresses, sizes and strides; no torch here.
#include <cstdlib>
#include <sstream>
#include <string>

#include "binding/binding.hpp"
#include "fusedconv/check.hpp"
#ifdef FUSEDCONV_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace fusedconv::binding {
namespace {

void bind_errors(py::module_& m) {
  static py::exception<KernelFailure> const kernel_error(m, "KernelError", PyExc_RuntimeError);
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (InvalidArgument const& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
    } catch (KernelFailure const& error) {
      PyErr_SetString(kernel_error.ptr(), error.what());
    }
  });
}

#ifdef FUSEDCONV_WITH_CUDA
py::list words(char const* text) {
  py::list result;
  std::istringstream stream(text);
  for (std::string word; stream >> word;) result.append(word);
  return result;
}
#endif

py::dict build_info() {
  py::dict build;
  build["version"] = FUSEDCONV_VERSION;
  build["sources"] = FUSEDCONV_SOURCES;
#ifdef __VERSION__
  build["compiler"] = __VERSION__;
#endif
#ifdef _OPENMP
  build["openmp"] = true;
#else
  build["openmp"] = false;
#endif
#ifdef FUSEDCONV_WITH_CUDA
  build["cuda"] = true;
  build["cuda_runtime"] = CUDART_VERSION;
  build["architectures"] = FUSEDCONV_CUDA_ARCHITECTURES;
  build["cutlass"] = FUSEDCONV_CUTLASS_VERSION;
  build["families"] = words(FUSEDCONV_FAMILIES);
#else
  build["cuda"] = false;
  build["families"] = py::list();
#endif
  return build;
}

}  // namespace
}  // namespace fusedconv::binding

PYBIND11_MODULE(_C, m) {
  using namespace fusedconv::binding;
  m.doc() = "Compiled kernels of fusedconv.";
  m.attr("build") = build_info();
  m.def(
      "environment_variable",
      [](char const* name) -> py::object {
        char const* const value = std::getenv(name);
        return value == nullptr ? py::none() : py::object(py::str(value));
      },
      py::arg("name"), "The value of an environment variable, None where it is not set.");
  bind_errors(m);
  bind_types(m);
  bind_cpu(m);
#ifdef FUSEDCONV_WITH_CUDA
  bind_program(m);
  bind_layout(m);
  bind_group_norm(m);
  bind_batch_norm(m);
  bind_layer_norm(m);
  bind_ungrouped(m);
#ifdef FUSEDCONV_WITH_SM80
  bind_sm80(m);
#endif
#ifdef FUSEDCONV_WITH_TAPS
  bind_taps(m);
#endif
#ifdef FUSEDCONV_WITH_DIRECT
  bind_direct(m);
#endif
#ifdef FUSEDCONV_WITH_FEW
  bind_few(m);
#endif
#ifdef FUSEDCONV_WITH_DEPTHWISE
  bind_depthwise(m);
#endif
#ifdef FUSEDCONV_WITH_SM90
  bind_sm90(m);
#endif
#endif
}
