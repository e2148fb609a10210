// Programs and what steps share.
#include "program/program.hpp"

#include <pybind11/stl.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "binding/binding.hpp"
#include "conv/filter_operand.hpp"
#include "fusedconv/check.hpp"
#include "program/query_device.hpp"
#include "program/replays.hpp"
#include "program/sequence.hpp"

namespace fusedconv::binding {
namespace {

// The addresses in a list, without the allocation of pybind11's own conversion: this is every
// call's path.
class Addresses {
 public:
  explicit Addresses(py::list const& list) : count_(int(list.size())) {
    FUSEDCONV_CHECK(count_ <= Sequence::kMostAddresses, "pointers: got ", count_);
    for (int i = 0; i < count_; ++i) {
      addresses_[i] = PyLong_AsSize_t(PyList_GET_ITEM(list.ptr(), i));
      if (addresses_[i] == std::size_t(-1) && PyErr_Occurred()) throw py::error_already_set();
    }
  }
  std::span<uintptr_t const> span() const { return {addresses_.data(), std::size_t(count_)}; }

 private:
  static_assert(sizeof(std::size_t) == sizeof(uintptr_t), "PyLong_AsSize_t reads addresses");
  int count_;
  std::array<uintptr_t, Sequence::kMostAddresses> addresses_;
};

using Add = void (Program::*)(std::shared_ptr<Step const>);

template <Add kAdd>
void add(Program& self, std::shared_ptr<Step> step) {
  (self.*kAdd)(std::move(step));
}

}  // namespace

void bind_program(py::module_& m) {
  m.def("query_device", &query_device, py::arg("index"),
        "What a CUDA device of this machine is. Raises KernelError where there is none.");
  py::class_<Operand>(m, "Operand", "Where a step finds a tensor; made by a Program, else absent.")
      .def(py::init<>())
      .def_property_readonly("present", &Operand::present);
  using conv::FilterOperand;
  py::class_<FilterOperand>(
      m, "FilterOperand", "A packed filter or, in its place, a weight that a config reads_weight.")
      .def(py::init<Operand>(), py::arg("packed"))
      .def(py::init<Operand, Operand, conv::FilterSource const&>(), py::arg("packed"),
           py::kw_only(), py::arg("weight"), py::arg("source"),
           "packed: for a weight that begins at no multiple of 16 bytes.");
  py::implicitly_convertible<Operand, FilterOperand>();
  py::class_<Step, std::shared_ptr<Step>>(m, "Step", "One pass over memory.")
      .def("describe", &Step::describe, "What the step does, in one line.");
  py::class_<Program, std::shared_ptr<Program>>(m, "Program",
                                                "Steps over chunks of a batch, run by one call.")
      .def(py::init<int, int64_t, int64_t>(), py::arg("device"), py::arg("batch"),
           py::arg("batch_chunk"))
      .def("tensor", &Program::tensor, py::arg("slot"), py::arg("bytes_per_sample"),
           "A tensor that run() takes: pointers[slot].")
      .def("scratch", &Program::scratch, py::arg("bytes_per_sample"), py::arg("bytes") = 0,
           "A part of the workspace, for one batch chunk.")
      .def("before", &add<&Program::before>, py::arg("step").none(false),
           "Adds a step that runs once, ahead of the first batch chunk.")
      .def("per_chunk", &add<&Program::per_chunk>, py::arg("step").none(false),
           "Adds a step that runs for each batch chunk.")
      .def("after", &add<&Program::after>, py::arg("step").none(false),
           "Adds a step that runs once, behind the last batch chunk.")
      .def_property_readonly("steps", &Program::steps, "Each step in one line, in order.")
      .def_property_readonly("workspace_bytes", &Program::workspace_bytes)
      .def_property_readonly("batch_chunk", &Program::batch_chunk)
      .def_property_readonly("graphs", &Program::graphs, "CUDA graphs that it keeps of its runs.")
      .def(
          "run",
          [](Program const& self, py::list const& pointers, uintptr_t workspace, uintptr_t stream) {
            self.run(Addresses(pointers).span(), workspace, stream);
          },
          py::arg("pointers"), py::arg("workspace"), py::arg("stream"),
          "Launches every step on the stream. pointers: a list of addresses by slot, 0 where a "
          "tensor is absent; workspace: workspace_bytes of them, aligned to 256. Does not "
          "synchronise.");
  m.def("stop_replays", &Replays::stop,
        "From now on no runs of the process are replayed as CUDA graphs.");
  py::class_<Sequence>(m, "Sequence", "Programs one after another, run by one call.")
      .def(py::init<int>(), py::arg("device"))
      .def_static(
          "address", [](int slot, int64_t offset) { return Operand{slot, offset, 0}; },
          py::arg("slot"), py::arg("offset") = 0, "Bytes behind an address that run() takes.")
      .def_static(
          "workspace", [](int64_t offset) { return Operand{Operand::kWorkspace, offset, 0}; },
          py::arg("offset"), "Bytes behind the beginning of the workspace.")
      .def("add", &Sequence::add, py::arg("program"), py::arg("pointers"),
           "Adds a program, whose own workspace begins where the sequence's does. pointers: where "
           "each of its slots is found, by address() and workspace(), or absent.")
      .def_property_readonly("graphs", &Sequence::graphs, "CUDA graphs that it keeps of its runs.")
      .def(
          "run",
          [](Sequence const& self, py::list const& addresses, uintptr_t workspace,
             uintptr_t stream) { self.run(Addresses(addresses).span(), workspace, stream); },
          py::arg("addresses"), py::arg("workspace"), py::arg("stream"),
          "As Program.run(), of all programs.");
}

}  // namespace fusedconv::binding
