// The binding's rooms: each file binds the types and functions of one room of the library.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace fusedconv::binding {

namespace py = pybind11;

// Python hands over addresses of tensors; 0 stands for an absent one.
template <class T>
T* address(uintptr_t value) {
  return reinterpret_cast<T*>(value);
}

void bind_types(py::module_& m);
void bind_cpu(py::module_& m);
#ifdef FUSEDCONV_WITH_CUDA
void bind_program(py::module_& m);
void bind_layout(py::module_& m);
void bind_sm80(py::module_& m);
void bind_sm90(py::module_& m);
void bind_sm90_boxes(py::module_& room);
void bind_sm90_clusters(py::module_& room);
void bind_sm90_col2im(py::module_& room);
void bind_sm90_lines(py::module_& room);
void bind_sm90_phases(py::module_& room);
void bind_sm90_runs(py::module_& room);
void bind_sm90_streams(py::module_& room);
void bind_sm90_strips(py::module_& room);
void bind_sm90_taps(py::module_& room);
void bind_sm90_wgrad(py::module_& room);
void bind_taps(py::module_& m);
void bind_direct(py::module_& m);
void bind_few(py::module_& m);
void bind_depthwise(py::module_& m);
void bind_group_norm(py::module_& m);
void bind_batch_norm(py::module_& m);
void bind_layer_norm(py::module_& m);
void bind_ungrouped(py::module_& m);
#endif

}  // namespace fusedconv::binding
