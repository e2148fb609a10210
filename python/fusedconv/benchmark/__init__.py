"""The benchmark: systems, layers and GroupNorm next to what a user could pick instead.

How it measures stands in ``records.METHOD`` (GPUs), ``records.LAYERS_METHOD`` (layers there),
``records.INTERLEAVED_METHOD`` (processors) and ``kernels.METHOD`` (every kernel of a problem);
every file of results holds its own.
"""

from fusedconv.benchmark.cells import (
    ALL_PRECISIONS,
    DTYPES,
    LAYOUTS,
    PASSES,
    PRECISIONS,
    Cell,
    memory_format,
    select_cells,
)
from fusedconv.benchmark.contenders import CONTENDERS, Rewrite
from fusedconv.benchmark.layers import LAYERS, LayerWorkload
from fusedconv.benchmark.measuring import device_facts, kernel_name, precision_mode
from fusedconv.benchmark.problems import cell_problems
from fusedconv.benchmark.records import METHOD, OtherMachineError, check_writable, header, read
from fusedconv.benchmark.running import ContenderError, Observer, jobs, run
from fusedconv.benchmark.suites import DEFAULT_SUITE, SUITES, Suite, default_device
from fusedconv.benchmark.summary import Summary, peer_summaries, summary_lines, times
from fusedconv.benchmark.timing import floor_ms, measured_rates
from fusedconv.benchmark.workloads import NORMS, WORKLOADS, NormWorkload, Workload
from fusedconv.timing import Clock, Timing

__all__ = [
    "ALL_PRECISIONS",
    "CONTENDERS",
    "DEFAULT_SUITE",
    "DTYPES",
    "LAYERS",
    "LAYOUTS",
    "METHOD",
    "NORMS",
    "PASSES",
    "PRECISIONS",
    "SUITES",
    "WORKLOADS",
    "Cell",
    "Clock",
    "ContenderError",
    "LayerWorkload",
    "NormWorkload",
    "Observer",
    "OtherMachineError",
    "Rewrite",
    "Suite",
    "Summary",
    "Timing",
    "Workload",
    "cell_problems",
    "check_writable",
    "default_device",
    "device_facts",
    "floor_ms",
    "header",
    "jobs",
    "kernel_name",
    "measured_rates",
    "memory_format",
    "peer_summaries",
    "precision_mode",
    "read",
    "run",
    "select_cells",
    "summary_lines",
    "times",
]
