"""The benchmark: the three systems next to what a user could pick instead.

How it measures stands in ``records.METHOD``, which every file of results holds.
"""

from fusedconv.benchmark.cells import (
    DTYPES,
    LAYOUTS,
    PASSES,
    PRECISIONS,
    Cell,
    memory_format,
    select_cells,
)
from fusedconv.benchmark.contenders import CONTENDERS, Rewrite
from fusedconv.benchmark.measuring import device_facts, kernel_name, precision_mode
from fusedconv.benchmark.records import METHOD, check_writable, header
from fusedconv.benchmark.running import ContenderError, Observer, jobs, run
from fusedconv.benchmark.timing import Clock, floor_ms, measured_rates

__all__ = [
    "CONTENDERS",
    "DTYPES",
    "LAYOUTS",
    "METHOD",
    "PASSES",
    "PRECISIONS",
    "Cell",
    "Clock",
    "ContenderError",
    "Observer",
    "Rewrite",
    "check_writable",
    "device_facts",
    "floor_ms",
    "header",
    "jobs",
    "kernel_name",
    "measured_rates",
    "memory_format",
    "precision_mode",
    "run",
    "select_cells",
]
