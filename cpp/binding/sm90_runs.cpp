// The convolutions of compute capability 9.0 whose positions come from registers.
#include <pybind11/stl.h>

#include <array>
#include <memory>

#include "binding/binding.hpp"
#include "binding/conv.hpp"
#include "conv/sm90/runs/passes.hpp"
#include "conv/sm90/runs/steps.hpp"

namespace fusedconv::binding {

using namespace conv::sm90::runs;

void bind_sm90_runs(py::module_& room) {
  py::module_ m = room.def_submodule("runs", "Convolutions whose positions come from registers.");
  py::class_<Row>(m, "Row", "One compiled kernel for each activation.")
      .def_readonly("name", &Row::name)
      .def_readonly("math", &Row::math)
      .def_property_readonly(
          "window",
          [](Row const& row) { return py::make_tuple(row.window.before, row.window.after); },
          "Columns of the input before and after an output's that the filter reaches.")
      .def_readonly("interleaves", &Row::interleaves,
                    "Sub-pixel phases, which are output channels of its problems.");
  m.def("rows", &rows, py::return_value_policy::reference, "The compiled kernels.");
  py::class_<Tiling>(m, "Tiling", "Tiles of one shape.")
      .def_readonly("strips", &Tiling::strips)
      .def_readonly("quads", &Tiling::quads, "Of a strip's row.")
      .def_readonly("tile_quads", &Tiling::tile_quads, "Neighbours in a strip, row after row.")
      .def_readonly("column0", &Tiling::column0)
      .def_readonly("tiles", &Tiling::tiles, "Of a strip, in a slice.")
      .def_readonly("columns", &Tiling::columns, "Of a stage's box.")
      .def_readonly("lines", &Tiling::lines, "Of a stage's box.")
      .def_readonly("bytes", &Tiling::bytes, "Of a stage's box.");
  py::class_<Config>(m, "Config", "How a row serves a problem of any batch size on a device.")
      .def(py::init([](Row const& row, conv::ConvProblem const& problem,
                       std::array<std::array<int, 3>, 3> const& phases, Layout layout, bool aligned,
                       bool padded_lines, Device const& device) {
             auto const axis = [&](int i) {
               return conv::Phases::Axis{phases[i][0], phases[i][1], phases[i][2]};
             };
             return Config(row, problem, {axis(0), axis(1), axis(2)}, layout, aligned, padded_lines,
                           device);
           }),
           py::arg("row"), py::kw_only(), py::arg("problem"),
           py::arg("phases") = std::array<std::array<int, 3>, 3>{{{1, 1, 0}, {1, 1, 0}, {1, 1, 0}}},
           py::arg("layout"), py::arg("aligned"), py::arg("padded_lines") = false,
           py::arg("device"),
           "phases: along depth, height and width the stride, the weight's taps, the padding.")
      .def_property_readonly(
          "row", [](Config const& config) -> Row const& { return *config.row; },
          py::return_value_policy::reference)
      .def_property_readonly("support", scheduled<Config>(&Schedule::support))
      .def_property_readonly("tilings", scheduled<Config>(&Schedule::tilings),
                             "Of strips of full width, and of the last.")
      .def_property_readonly("is_staggered", scheduled<Config>(&Schedule::is_staggered),
                             "Whether the quads of every other row begin two columns further left.")
      .def_property_readonly("tiles", scheduled<Config>(&Schedule::tiles),
                             "Of a sample, for each block of output channels.")
      .def_property_readonly("blocks_n", scheduled<Config>(&Schedule::blocks_n),
                             "Of output channels.")
      .def_property_readonly("k_iterations", scheduled<Config>(&Schedule::k_iterations),
                             "Of a tile.")
      .def_property_readonly(
          "block_steps",
          [](Config const& config) {
            std::vector<std::array<int, 2>> result;
            for (BlockSteps const& steps : config.schedule.block_steps) {
              result.push_back({steps.k_iterations, steps.filter_rows});
            }
            return result;
          },
          "Of a tile, by phase along depth and height, where phases have taps of their own: "
          "k-iterations and filter rows of each.")
      .def_property_readonly(
          "phase_taps",
          [](Config const& config) {
            conv::sm90::PhaseBlocks const& blocks = config.schedule.phase_blocks;
            std::array<std::vector<std::array<int, 2>>, 2> result;
            if (!blocks.present()) return result;
            for (int i = 0; i < config.phases.d.count; ++i) {
              result[0].push_back({blocks.depth[i].lowest, blocks.depth[i].count});
            }
            for (int i = 0; i < config.phases.h.count; ++i) {
              result[1].push_back({blocks.height[i].lowest, blocks.height[i].count});
            }
            return result;
          },
          "By phase along depth and along height: input position less the output's of the first of "
          "its taps, and how many there are.")
      .def_property_readonly(
          "consumers", [](Config const& config) { return consumers_of(config.row->math); },
          "Warpgroups of a block, each with tiles of its own.")
      .def_property_readonly("streams_filter", scheduled<Config>(&Schedule::streams_filter))
      .def_property_readonly("box_bytes", scheduled<Config>(&Schedule::box_bytes),
                             "Of a stage for one consumer.")
      .def_property_readonly("filter_stage_bytes", scheduled<Config>(&Schedule::filter_stage_bytes),
                             "Of a stage, where the filter passes through them.")
      .def_property_readonly("stages", scheduled<Config>(&Schedule::stages))
      .def_property_readonly("shared_bytes", scheduled<Config>(&Schedule::shared_bytes))
      .def_property_readonly("filter_bytes", scheduled<Config>(&Schedule::filter_bytes), "Packed.")
      .def_property_readonly("partial_bytes_per_sample", &Config::partial_bytes_per_sample);
  bind_shared_steps<Config>(m);
  py::class_<PackPhases, Step, std::shared_ptr<PackPhases>>(
      m, "PackPhases",
      "A strided weight, for the convolution of its output gradient's phase planes to the input's "
      "gradient; source has the channel axes swapped.")
      .def(py::init<Config const&, conv::FilterSource const&, conv::PhasePlanes const&, Operand,
                    Operand>(),
           py::arg("config"), py::kw_only(), py::arg("source"), py::arg("phases"),
           py::arg("weight"), py::arg("filter"));
  m.def("merges_in_passing", &merges_in_passing, py::arg("config"), py::arg("problem"),
        "Whether NormalizeMerging takes less time than MergeMoments and a pass behind it, on "
        "problem.batch samples.");
  py::class_<NormalizeMerging, Step, std::shared_ptr<NormalizeMerging>>(
      m, "NormalizeMerging", "Partial moments to statistics, and normalisation, in one pass.")
      .def(py::init<Config const&, GroupNormProblem const&, Operand, Operand, Operand, Operand,
                    Operand, Operand, Operand>(),
           py::arg("config"), py::kw_only(), py::arg("problem"), py::arg("input"),
           py::arg("partials"), py::arg("mean"), py::arg("rstd"), py::arg("weight"),
           py::arg("bias"), py::arg("output"));
}

}  // namespace fusedconv::binding
