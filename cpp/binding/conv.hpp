// What files that bind convolutions share.
#pragma once

#include <memory>
#include <vector>

#include "binding/binding.hpp"
#include "conv/reading.hpp"
#include "conv/steps.hpp"

namespace fusedconv::binding {

// A property that is a field of a config's schedule.
template <class Config, class Schedule, class T>
auto scheduled(T Schedule::* field) {
  return [field](Config const& config) { return config.schedule.*field; };
}

// Of a family whose kernels read the weight as it lies: rows and configs, which may have more.
template <class Config>
py::class_<Config> bind_reading(py::module_& m,
                                std::vector<typename Config::Row> const& (*rows)()) {
  using Row = typename Config::Row;
  py::class_<Row>(m, "Row", "The compiled kernels of a type.")
      .def_readonly("name", &Row::name)
      .def_readonly("math", &Row::math);
  m.def("rows", rows, py::return_value_policy::reference, "The compiled kernels.");
  return py::class_<Config>(m, "Config",
                            "How a row serves a problem of any batch size on a device.")
      .def(py::init<Row const&, conv::TransposedProblem const&, conv::FilterSource const&,
                    Device const&>(),
           py::arg("row"), py::kw_only(), py::arg("problem"), py::arg("source"), py::arg("device"))
      .def_property_readonly("support", scheduled<Config>(&Config::Schedule::support));
}

// What callers ask of a room beside: scales, whether it takes a scale and shift of each channel,
// and takes_moments, whether it takes moments of what it activates.
template <class Config>
void bind_convolve(py::module_& m) {
  using Convolve = conv::Convolve<Config>;
  m.attr("scales") = conv::kScales<Config>;
  m.attr("takes_moments") = conv::kTakesMoments<Config>;
  py::class_<Convolve, Step, std::shared_ptr<Convolve>>(
      m, "Convolve",
      "Convolution, bias, scale and shift, activation, and partial moments of activated values.")
      .def(py::init<Config const&, Activation, bool, Operand, conv::FilterOperand const&, Operand,
                    Operand, Operand, Operand, Operand, Operand, int>(),
           py::arg("config"), py::kw_only(), py::arg("activation"), py::arg("activates_output"),
           py::arg("input"), py::arg("filter"), py::arg("bias"), py::arg("output"),
           py::arg("partials"), py::arg("scale") = Operand(), py::arg("shift") = Operand(),
           py::arg("saved") = Operand(), py::arg("channels") = 0,
           "scale, shift: float32 of each channel behind the bias, where the config has them. "
           "saved: the biased sum beside the output, likewise. channels: of bias, scale and shift, "
           "where the output's pixels may be padded; 0 for as many.");
}

template <class Config>
void bind_merge_moments(py::module_& m) {
  using Merge = conv::MergeMoments<Config>;
  py::class_<Merge, Step, std::shared_ptr<Merge>>(
      m, "MergeMoments", "Partial moments to statistics by sample and group.")
      .def(py::init<Config const&, GroupNormProblem const&, Operand, Operand, Operand, Operand>(),
           py::arg("config"), py::kw_only(), py::arg("problem"), py::arg("partials"),
           py::arg("statistics"), py::arg("mean"), py::arg("rstd"));
}

template <class Config>
void bind_convolve_steps(py::module_& m) {
  bind_convolve<Config>(m);
  bind_merge_moments<Config>(m);
}

template <class Config>
void bind_pack_filter(py::module_& m) {
  using Pack = conv::PackFilter<Config>;
  py::class_<Pack, Step, std::shared_ptr<Pack>>(
      m, "PackFilter", "A weight to the order in which the convolution consumes it.")
      .def(py::init<Config const&, conv::FilterSource const&, Operand, Operand>(),
           py::arg("config"), py::kw_only(), py::arg("source"), py::arg("weight"),
           py::arg("filter"));
}

// Of those that read a packed filter.
template <class Config>
void bind_shared_steps(py::module_& m) {
  bind_pack_filter<Config>(m);
  bind_convolve_steps<Config>(m);
}

}  // namespace fusedconv::binding
