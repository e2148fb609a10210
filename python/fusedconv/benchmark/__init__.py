"""The benchmark: the three systems next to what a user could pick instead.

Each record is one contender in one cell (workload, pass, precision, layout). torch keeps the cuDNN
plan of a convolution for as long as a process lives, whatever cudnn.benchmark says later, so every
contender runs in processes of its own, none of which meets another's plans. cudnn.benchmark is on
before the first call, but for eager and fusedconv, which run as torch comes; fusedconv with
cudnn.benchmark is measured beside where it calls cuDNN, in the gradients of a convolution. Several
devices may work at the same time, one process each; a record names its own.

Times are CUDA events around one call each, after a warm-up, medians with the 10th and 90th
percentile; inputs rotate over more memory than L2 holds. Weights arrive by load_state_dict and the
affine parameters are not trivial; after the timing the weights are changed in place and the output
is checked against float64 again, so that a packing kept too long shows. Outputs start as NaN
wherever the allocator reuses memory.

Floors: the larger of operations over the matrix rate and bytes over the copy rate, both measured
first, on the first device. Strict fp32 on tensor cores takes three TF32 products for one. Forward:
each input element read once and each output element written once. Forward and backward: three
convolutions' operations; bytes of the forward pass, plus output gradient and input read and input
gradient written.
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
from fusedconv.benchmark.records import check_writable, header
from fusedconv.benchmark.running import ContenderError, Observer, jobs, run
from fusedconv.benchmark.timing import Clock, floor_ms, measured_rates

__all__ = [
    "CONTENDERS",
    "DTYPES",
    "LAYOUTS",
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
