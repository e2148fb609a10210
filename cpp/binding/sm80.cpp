// The convolutions that run from compute capability 8.0 on.
#include <pybind11/stl.h>

#include <memory>

#include "binding/binding.hpp"
#include "conv/sm80/steps.hpp"

namespace fusedconv::binding {

void bind_sm80(py::module_& m) {
  using namespace conv::sm80;
  py::module_ room = m.def_submodule("sm80", "Convolutions for compute capability 8.0 and later.");
  py::class_<Row>(room, "Row", "One compiled kernel.")
      .def_readonly("name", &Row::name)
      .def_readonly("architecture", &Row::architecture)
      .def_readonly("dimensions", &Row::dimensions)
      .def_readonly("math", &Row::math)
      .def_property_readonly(
          "tile", [](Row const& row) { return py::make_tuple(row.tile_m, row.tile_n, row.tile_k); })
      .def_readonly("warps", &Row::warps)
      .def_readonly("stages", &Row::stages)
      .def_readonly("alignment", &Row::alignment)
      .def_readonly("shared_bytes", &Row::shared_bytes)
      .def_readonly("max_filter_extent", &Row::max_filter_extent)
      .def_readonly("max_tensor_bytes", &Row::max_tensor_bytes)
      .def_readonly("efficiency", &Row::efficiency)
      .def_readonly("longest_sum", &Row::longest_sum)
      .def_readonly("most_parts", &Row::most_parts);
  room.def("rows", &rows, py::return_value_policy::reference, "The compiled kernels.");
  py::class_<Convolve, Step, std::shared_ptr<Convolve>>(room, "Convolve",
                                                        "Convolution, bias, activation.")
      .def(py::init<Row const&, conv::ConvProblem const&, Activation, Operand, Operand, Operand,
                    Operand>(),
           py::arg("row"), py::kw_only(), py::arg("problem"), py::arg("activation"),
           py::arg("input"), py::arg("filter"), py::arg("bias"), py::arg("output"));
}

}  // namespace fusedconv::binding
