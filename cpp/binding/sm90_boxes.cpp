// The convolutions whose operands tensor copies bring.
#include <pybind11/stl.h>

#include <memory>

#include "binding/binding.hpp"
#include "binding/conv.hpp"
#include "conv/sm90/boxes/steps.hpp"
#include "conv/sm90/boxes/weight/steps.hpp"

namespace fusedconv::binding {
namespace {

void bind_weight(py::module_& room) {
  using namespace conv::sm90::boxes::weight;
  using conv::sm90::boxes::Problem;
  py::module_ m = room.def_submodule("weight", "Weight gradients by tensor copies.");
  py::class_<Row>(m, "Row", "One compiled kernel.")
      .def_readonly("name", &Row::name)
      .def_readonly("math", &Row::math)
      .def_property_readonly(
          "channels", [](Row const& row) { return row.block.channels * kUnit; },
          "Input channels of a block.")
      .def_property_readonly(
          "columns", [](Row const& row) { return row.block.units * kUnit; },
          "Output channels of taps of a block.")
      .def_property_readonly(
          "packs", [](Row const& row) { return row.block.packs(); },
          "Whether the input is packed before, as TF32 needs it.")
      .def_property_readonly(
          "positions", [](Row const& row) { return row.block.positions(); }, "Of a slab.")
      .def_property_readonly(
          "halo", [](Row const& row) { return row.block.halo; },
          "Whether a box of the gradient has what all taps of a plane read.")
      .def_property_readonly(
          "transposes", [](Row const& row) { return row.block.transposes; },
          "Whether blocks transpose it instead.");
  m.def("rows", &rows, py::return_value_policy::reference, "The compiled kernels.");
  py::class_<Config>(m, "Config", "How a row serves a problem of a given batch on a device.")
      .def(py::init<Row const&, Problem const&, int64_t, Device const&>(), py::arg("row"),
           py::kw_only(), py::arg("problem"), py::arg("batch"), py::arg("device"),
           "problem: of the input's gradient, as boxes.Config takes it to gather.")
      .def_property_readonly("support", scheduled<Config>(&Schedule::support))
      .def_property_readonly("tasks", scheduled<Config>(&Schedule::tasks),
                             "Blocks of input channels by units of output channels at a tap.")
      .def_property_readonly("splits", scheduled<Config>(&Schedule::splits), "Blocks of a task.")
      .def_property_readonly(
          "slabs", [](Config const& config) { return config.schedule.slabs.all(); },
          "Boxes of positions.")
      .def_property_readonly("stages", scheduled<Config>(&Schedule::stages))
      .def_property_readonly("stage_bytes",
                             [](Config const& config) { return config.schedule.stage_bytes; })
      .def_property_readonly("shared_bytes", scheduled<Config>(&Schedule::shared_bytes))
      .def_property_readonly("packed_bytes", scheduled<Config>(&Schedule::packed_bytes),
                             "Of the input, 0 where it is read as it lies.")
      .def_property_readonly("partial_bytes", scheduled<Config>(&Schedule::partial_bytes))
      .def_property_readonly("sums_bias", &Config::sums_bias,
                             "Whether the bias's gradient can be summed beside.")
      .def("writes", &Config::writes, py::arg("weight"),
           "Whether the row writes a gradient that lies so itself, and leaves no parts.")
      .def_property_readonly("bias_parts", scheduled<Config>(&Schedule::bias_parts),
                             "Sums of a channel that are left then.");
  py::class_<PackInput, Step, std::shared_ptr<PackInput>>(
      m, "PackInput", "The input as rows with packed_bytes read it, rounded to TF32.")
      .def(py::init<Config const&, Operand, Operand>(), py::arg("config"), py::kw_only(),
           py::arg("input"), py::arg("packed"));
  py::class_<SumProducts, Step, std::shared_ptr<SumProducts>>(
      m, "SumProducts",
      "The weight gradient, in parts or whole; both tensors are dense, channels last.")
      .def(py::init<Config const&, Operand, Operand, Operand, conv::FilterSource const&, Operand,
                    Operand, int>(),
           py::arg("config"), py::kw_only(), py::arg("input"), py::arg("grad_output"),
           py::arg("partials"), py::arg("target"), py::arg("grad_weight"),
           py::arg("bias_sums") = Operand{}, py::arg("bias_channels") = 0,
           "grad_weight: absent, or in place of partials where the config writes target, which is "
           "the gradient's extents and strides; `c` its output channels. bias_sums: where the "
           "config sums_bias, bias_parts of each of bias_channels.");
  py::class_<AddPartials, Step, std::shared_ptr<AddPartials>>(
      m, "AddPartials", "The weight gradient from its parts, in a fixed order.")
      .def(py::init<Config const&, conv::FilterSource const&, Operand, Operand>(),
           py::arg("config"), py::kw_only(), py::arg("target"), py::arg("partials"),
           py::arg("grad_weight"),
           "target: the gradient's extents and strides; `c` its output channels.");
}

}  // namespace

void bind_sm90_boxes(py::module_& room) {
  using namespace conv::sm90::boxes;
  py::module_ m = room.def_submodule("boxes", "Convolutions of any stride by tensor copies.");
  py::class_<Row>(m, "Row", "One compiled kernel.")
      .def_readonly("name", &Row::name)
      .def_readonly("math", &Row::math)
      .def_property_readonly(
          "columns", [](Row const& row) { return row.shape.columns; },
          "Of a block: output channels of phases.")
      .def_property_readonly(
          "boxes", [](Row const& row) { return row.shape.slabs(); },
          "Of positions that a block multiplies at a time; of one, groups of warps take turns.")
      .def_property_readonly(
          "stationary", [](Row const& row) { return row.shape.stationary; },
          "Whether a multiprocessor has one block of columns, whose filter stays in shared memory.")
      .def_property_readonly(
          "halo", [](Row const& row) { return row.shape.halo; },
          "Whether a box has what all taps of a chunk and a plane read.")
      .def_property_readonly(
          "positions", [](Row const& row) { return row.shape.positions; }, "Of a box, at most.")
      .def_property_readonly(
          "filter_first", [](Row const& row) { return row.shape.filter_first(); },
          "Whether the filter is the products' first operand and positions the second.")
      .def_property_readonly(
          "alike", [](Row const& row) { return row.shape.alike; },
          "Neighbouring segments whose phases have the same taps, multiplied at once.")
      .def_property_readonly(
          "segments", [](Row const& row) { return row.shape.segments; },
          "Of a block's columns: phases that are neighbours, where there are several.")
      .def_property_readonly(
          "planes", [](Row const& row) { return row.shape.planes; },
          "Whether it reads channels first.")
      .def_property_readonly(
          "residents", [](Row const& row) { return row.shape.residents; },
          "Blocks of a multiprocessor.");
  m.def("rows", &rows, py::return_value_policy::reference, "The compiled kernels.");
  py::class_<Config>(m, "Config", "How a row serves a problem of any batch size on a device.")
      .def(py::init([](Row const& row, Problem const& problem, Device const& device, bool gathers) {
             auto const direction = gathers ? Direction::kGathers : Direction::kScatters;
             return Config(row, problem, device, direction);
           }),
           py::arg("row"), py::kw_only(), py::arg("problem"), py::arg("device"),
           py::arg("gathers") = false,
           "gathers: an ordinary convolution of the problem's axes, whose filter's `c` is what it "
           "reads; else a transposed one.")
      .def_property_readonly("support", scheduled<Config>(&Schedule::support))
      .def_property_readonly("reads", &Config::reads)
      .def_property_readonly("phases", scheduled<Config>(&Schedule::phases),
                             "Residues by axis, those of a set beside each other.")
      .def_property_readonly(
          "sets",
          [](Config const& config) {
            std::vector<std::array<int, 4>> result;
            for (PhaseSet const& set : config.schedule.sets) {
              result.push_back({set.first, set.count, set.first_tap, set.taps});
            }
            return result;
          },
          "Of phases in a block: first phase, phases, first tap, taps.")
      .def_property_readonly("shifts", scheduled<Config>(&Schedule::taps),
                             "Of each tap: the input position less the output's, by axis.")
      .def_property_readonly("masks", scheduled<Config>(&Schedule::masks),
                             "Of each tap: bits of the set's phases that have it.")
      .def_property_readonly("sources", scheduled<Config>(&Schedule::sources),
                             "Of what is gathered from: residues by axis of the pixels read.")
      .def_property_readonly("tap_sources", scheduled<Config>(&Schedule::tap_sources),
                             "Of each tap: which source it reads.")
      .def_property_readonly("segment", scheduled<Config>(&Schedule::segment),
                             "Columns of a phase in a block.")
      .def_property_readonly("channel_blocks", scheduled<Config>(&Schedule::channel_blocks))
      .def_property_readonly("blocks", scheduled<Config>(&Schedule::blocks), "Of columns.")
      .def_property_readonly("chunks", scheduled<Config>(&Schedule::chunks), "Of channels.")
      .def_property_readonly("stages", scheduled<Config>(&Schedule::stages))
      .def_property_readonly("shared_bytes", scheduled<Config>(&Schedule::shared_bytes))
      .def_property_readonly("halo_bytes", scheduled<Config>(&Schedule::halo_bytes),
                             "Of a box with a halo, in shared memory.")
      .def_property_readonly("kept_bytes", scheduled<Config>(&Schedule::kept_bytes),
                             "Of a filter that stays there.")
      .def_property_readonly("filter_bytes", scheduled<Config>(&Schedule::filter_bytes), "Packed.")
      .def_property_readonly("line", scheduled<Config>(&Schedule::line),
                             "Columns of a filter's line; 0 where the filter is rows of channels.")
      .def_property_readonly("filter_taps", scheduled<Config>(&Schedule::filter_taps),
                             "The filter's, of each tap's phases in turn, where it scatters.")
      .def("reads_weight", &Config::reads_weight, py::arg("weight"),
           "Whether a weight is read as it lies, of an address that is a multiple of 16 bytes.")
      .def("launch_tiles", &Config::tiles, py::arg("batch"),
           "Pairs of boxes, which a block multiplies at a time.")
      .def_property_readonly("multiplied", &Config::multiplied,
                             "Positions of a sample that products are of, of a row whose filter is "
                             "the first operand.")
      .def_property_readonly("holds_pixels", &Config::holds_pixels,
                             "Whether a block has all channels of its pixels.")
      .def_property_readonly("suits_moments", &Config::suits_moments,
                             "Whether boxes of one sample each are nearly as few as those of any.")
      .def_property_readonly("partial_slots", &Config::partial_slots,
                             "Partial moments of a channel in a sample.")
      .def_property_readonly("partial_bytes_per_sample", &conv::partial_bytes_of<Config>)
      .def(
          "box",
          [](Config const& config, int64_t batch) { return config.schedule.slabs(batch).box; },
          py::arg("batch"), "Positions of a consumer by axis, and samples.");
  m.attr("box_positions") = kSlab;
  m.attr("halo_stages") = kHaloStages;
  m.attr("chunk_bytes") = kChunkBytes;
  bind_pack_filter<Config>(m);
  bind_convolve_steps<Config>(m);
  py::class_<ConvolveNormalizing, Step, std::shared_ptr<ConvolveNormalizing>>(
      m, "ConvolveNormalizing",
      "Convolution, bias, LayerNorm over the channels of a pixel or GroupNorm by statistics, and "
      "activation.")
      .def(py::init<Config const&, GroupNormProblem const&, Operand, conv::FilterOperand const&,
                    Operand, Operand, Operand, Operand, Operand>(),
           py::arg("config"), py::kw_only(), py::arg("norm"), py::arg("input"), py::arg("filter"),
           py::arg("bias"), py::arg("statistics") = Operand{}, py::arg("weight"),
           py::arg("norm_bias"), py::arg("output"));
  bind_weight(m);
}

}  // namespace fusedconv::binding
