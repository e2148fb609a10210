// Small transposed convolutions with all that follows them, in one launch of clusters.
#include <pybind11/stl.h>

#include <memory>

#include "binding/binding.hpp"
#include "binding/conv.hpp"
#include "conv/sm90/clusters/steps.hpp"

namespace fusedconv::binding {

void bind_sm90_clusters(py::module_& room) {
  using namespace conv::sm90::clusters;
  py::module_ m = room.def_submodule("clusters", "Small convolutions in one launch of clusters.");
  py::class_<Row>(m, "Row", "The compiled kernels of a way of forming products.")
      .def_readonly("name", &Row::name)
      .def_readonly("math", &Row::math);
  m.def("rows", &rows, py::return_value_policy::reference, "The compiled kernels.");
  py::class_<Config>(m, "Config", "How a row serves a problem of any batch size on a device.")
      .def(py::init<Row const&, Problem const&, conv::FilterSource const&, int, Device const&>(),
           py::arg("row"), py::kw_only(), py::arg("problem"), py::arg("source"),
           py::arg("norm_groups"), py::arg("device"), "norm_groups: 0 where none is normalised.")
      .def_property_readonly("support", scheduled<Config>(&Schedule::support))
      .def_property_readonly("outer", scheduled<Config>(&Schedule::outer),
                             "The axis along which slabs lie.")
      .def_property_readonly("columns", scheduled<Config>(&Schedule::columns),
                             "Output channels of a cluster.")
      .def_property_readonly("column_blocks", scheduled<Config>(&Schedule::column_blocks),
                             "Clusters of a sample.")
      .def_property_readonly("slabs", scheduled<Config>(&Schedule::slabs),
                             "Parts of the positions, in a cluster.")
      .def_property_readonly("shares", scheduled<Config>(&Schedule::shares),
                             "Parts of the input channels, in a cluster.")
      .def_property_readonly("slab", scheduled<Config>(&Schedule::slab),
                             "Positions along the outer axis.")
      .def_property_readonly("share_channels", scheduled<Config>(&Schedule::share_channels))
      .def_property_readonly("chunk", scheduled<Config>(&Schedule::chunk),
                             "Channels that are staged at once.")
      .def_property_readonly("chunks", scheduled<Config>(&Schedule::chunks))
      .def_property_readonly("box", scheduled<Config>(&Schedule::box), "Staged pixels.")
      .def_property_readonly("slab_outputs", scheduled<Config>(&Schedule::slab_outputs), "Pixels.")
      .def_property_readonly("shared_bytes", scheduled<Config>(&Schedule::shared_bytes),
                             "Of a block.")
      .def_property_readonly("resident", scheduled<Config>(&Schedule::resident),
                             "Clusters that the device holds at once, roughly.")
      .def_property_readonly("block_cycles", scheduled<Config>(&Schedule::block_cycles),
                             "Estimated.");
  m.attr("most_blocks") = kMostBlocks;
  py::class_<Forward, Step, std::shared_ptr<Forward>>(
      m, "Forward", "Convolution, bias, activation, normalisation and activation.")
      .def(py::init<Config const&, GroupNormProblem const&, Operand, Operand, Operand, Operand,
                    Operand, Operand, Operand, Operand, Operand>(),
           py::arg("config"), py::kw_only(), py::arg("norm"), py::arg("input"), py::arg("weight"),
           py::arg("bias"), py::arg("norm_weight"), py::arg("norm_bias"), py::arg("output"),
           py::arg("conv_output"), py::arg("mean"), py::arg("rstd"));
}

}  // namespace fusedconv::binding
