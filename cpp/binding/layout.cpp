// Steps that only move data.
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <string>
#include <utility>

#include "binding/binding.hpp"
#include "layout/steps.hpp"

namespace fusedconv::binding {

void bind_layout(py::module_& m) {
  using namespace layout;
  py::module_ room = m.def_submodule("layout", "Steps that only move data.");
  py::class_<ToChannelsLast, Step, std::shared_ptr<ToChannelsLast>>(
      room, "ToChannelsLast", "A tensor to channels-last rows, padded with zeros.")
      .def(py::init([](int64_t channels, int64_t padded_channels, int64_t pixels, Layout source,
                       DType dtype, bool round_tf32, Operand input, Operand output,
                       std::string name) {
             return std::make_shared<ToChannelsLast>(
                 std::move(name),
                 ChannelsLastProblem{.channels = channels,
                                     .padded_channels = padded_channels,
                                     .pixels = pixels,
                                     .source = source,
                                     .dtype = dtype,
                                     .round_tf32 = round_tf32},
                 input, output);
           }),
           py::kw_only(), py::arg("channels"), py::arg("padded_channels"), py::arg("pixels"),
           py::arg("source"), py::arg("dtype"), py::arg("round_tf32"), py::arg("input"),
           py::arg("output"), py::arg("name") = "input");
  py::class_<PackFilter, Step, std::shared_ptr<PackFilter>>(
      room, "PackFilter", "A weight to the filter [padded_k, T, R, S, padded_c], a bias with it.")
      .def(py::init([](conv::FilterSource const& source, int64_t padded_c, int64_t padded_k,
                       DType dtype, bool round_tf32, Operand weight, Operand bias, Operand filter,
                       Operand packed_bias) {
             return std::make_shared<PackFilter>(PackedFilterProblem{.source = source,
                                                                     .padded_c = padded_c,
                                                                     .padded_k = padded_k,
                                                                     .dtype = dtype,
                                                                     .round_tf32 = round_tf32},
                                                 weight, bias, filter, packed_bias);
           }),
           py::kw_only(), py::arg("source"), py::arg("padded_c"), py::arg("padded_k"),
           py::arg("dtype"), py::arg("round_tf32"), py::arg("weight"), py::arg("bias"),
           py::arg("filter"), py::arg("packed_bias"));
  py::class_<ChannelSums>(room, "ChannelSums",
                          "Sums of planes in parts, for AddSums, and the type of their totals.")
      .def(py::init([](int64_t batch, int64_t channels, int64_t parts, DType dtype) {
             return ChannelSums{
                 .batch = batch, .channels = channels, .parts = parts, .dtype = dtype};
           }),
           py::kw_only(), py::arg("batch"), py::arg("channels"), py::arg("parts"), py::arg("dtype"))
      .def_property_readonly("bytes", &ChannelSums::bytes);
  py::class_<LinesProblem>(room, "LinesProblem",
                           "A tensor [batch, channels, lines, columns] whose lines begin at "
                           "multiples of pitch, and its lines padded to whole 16 bytes.")
      .def(py::init([](int64_t batch, int64_t channels, int64_t lines, int64_t columns,
                       int64_t pitch, DType dtype) {
             return LinesProblem{.batch = batch,
                                 .channels = channels,
                                 .lines = lines,
                                 .columns = columns,
                                 .pitch = pitch,
                                 .dtype = dtype};
           }),
           py::kw_only(), py::arg("batch"), py::arg("channels"), py::arg("lines"),
           py::arg("columns"), py::arg("pitch"), py::arg("dtype"))
      .def_property_readonly("sample_bytes", &LinesProblem::sample_bytes, "Padded.")
      .def("sums", &LinesProblem::sums, "What PadLines leaves.");
  py::class_<PadLines, Step, std::shared_ptr<PadLines>>(
      room, "PadLines", "Lines padded to whole 16 bytes, sums by channel, or both.")
      .def(py::init<std::string, LinesProblem const&, Operand, Operand, Operand>(), py::arg("name"),
           py::kw_only(), py::arg("problem"), py::arg("input"), py::arg("output"), py::arg("sums"));
  py::class_<PhasesProblem>(
      room, "PhasesProblem",
      "A tensor [batch, channels, *extents] whose lines begin at multiples of pitch, and its phase "
      "planes of so many positions, with lines padded to whole 16 bytes, or flat, with planes that "
      "are.")
      .def(py::init([](int64_t batch, int64_t channels, std::array<int, 3> const& extents,
                       int64_t pitch, std::array<int, 3> const& positions,
                       conv::PhasePlanes const& phases, bool flat, DType dtype) {
             return PhasesProblem{.batch = batch,
                                  .channels = channels,
                                  .extents = extents,
                                  .pitch = pitch,
                                  .positions = positions,
                                  .phases = phases,
                                  .flat = flat,
                                  .dtype = dtype};
           }),
           py::kw_only(), py::arg("batch"), py::arg("channels"), py::arg("extents"),
           py::arg("pitch"), py::arg("positions"), py::arg("phases"), py::arg("flat"),
           py::arg("dtype"))
      .def_property_readonly("sample_bytes", &PhasesProblem::sample_bytes, "Of the planes.")
      .def_property_readonly("aligned", &PhasesProblem::aligned,
                             "Whether lines of the planes begin at multiples of 16 bytes.")
      .def_property_readonly("holds_all", &PhasesProblem::holds_all,
                             "Whether each element of the tensor is in some plane.")
      .def("sums", &PhasesProblem::sums, "What SplitPhases leaves, where planes hold all.");
  py::class_<SplitPhases, Step, std::shared_ptr<SplitPhases>>(
      room, "SplitPhases",
      "Phase planes [batch, channels, phases, *positions], zero outside the tensor, and sums by "
      "channel on the way.")
      .def(py::init<std::string, PhasesProblem const&, Operand, Operand, Operand>(),
           py::arg("name"), py::kw_only(), py::arg("problem"), py::arg("input"), py::arg("output"),
           py::arg("sums"));
  py::class_<AddSums, Step, std::shared_ptr<AddSums>>(
      room, "AddSums", "Totals by channel, [channels], of their parts.")
      .def(py::init<std::string, ChannelSums const&, Operand, Operand, std::optional<int64_t>>(),
           py::arg("name"), py::kw_only(), py::arg("problem"), py::arg("sums"), py::arg("totals"),
           py::arg("samples") = py::none(),
           "samples: of the run, where they are not the problem's batch.");
}

}  // namespace fusedconv::binding
