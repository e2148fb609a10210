"""What the gradients by tensor copies are estimated to take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusedconv.device import Device
from fusedconv.kernels.cuda import boxes_costs
from fusedconv.kernels.cuda.boxes_costs import Work, launch_cycles
from fusedconv.kernels.cuda.transposing import padded_elements
from fusedconv.problem import ForwardProblem


@dataclass(frozen=True)
class CostConstants:
    """What the estimates multiply, in cycles of a multiprocessor where nothing else is said."""

    #: The input's, over what the forward rows' constants say.
    gathers: float
    #: The input's again, by a row of more than 64 columns whose blocks share a
    #: multiprocessor: the pixels that they read come twice as often.
    shared: float
    #: A slab's products, over their cycles at full rate, in 16 bits, and in TF32 by the input
    #: channels that an instruction takes, of an input that is packed and one that is transposed
    #: beside.
    products: float
    from_registers: Mapping[int, float]
    transposing: Mapping[int, float]
    #: A byte that a slab copies.
    copied: float
    #: A slab beside the longer of these.
    slab: float
    #: A block beside its slabs.
    block: float
    #: Reading partial sums and writing the gradient, over their time at copy rate; an addition of
    #: many to the same sum.
    partials: float
    split: float
    #: Packing the input, likewise.
    packed: float
    #: All of it where bytes bound it, likewise.
    moved: float
    #: Passes that transpose, pad or cut a tensor, over their time at copy rate.
    transposed: float


#: Fitted to the times of 21 convolutions, mostly layers of real models, channels last, on an H200;
#: ``transposing`` to those of 15 layers on an H100, partial sums to those of 21 layers in bf16 on
#: another H200.
COSTS = CostConstants(
    gathers=1.1,
    shared=1.15,
    products=0.98,
    from_registers={64: 1.9, 128: 1.2, 256: 1.0},
    transposing={64: 3.0, 256: 1.9},
    copied=0.017,
    slab=100.0,
    block=9000.0,
    partials=1.2,
    split=115.0,
    packed=1.5,
    moved=1.3,
    transposed=1.4,
)
#: Bytes of an element times multiplications and additions of a multiprocessor in a cycle.
PRODUCT_BYTES_PER_CYCLE = 4096


def input_cycles(
    config: Any, row: Any, forward: ForwardProblem, device: Device, costs: CostConstants
) -> float:
    """Of the input's gradient by a row of ``_C.sm90.boxes.rows()``."""
    work = Work(row, config, "nhwc", forward.dtype.itemsize)
    tiles = config.launch_tiles(forward.batch)
    cycles = costs.gathers * launch_cycles(work, tiles, device, boxes_costs.COSTS)
    return cycles * costs.shared if row.residents > 1 and row.columns > 64 else cycles


def weight_milliseconds(
    config: Any,
    row: Any,
    forward: ForwardProblem,
    device: Device,
    costs: CostConstants,
    *,
    writes: bool,
) -> float:
    """Of the weight's gradient by a row of ``_C.sm90.boxes.weight.rows()``: of its launches, but
    for what a launch takes by itself. ``writes``: it leaves no partial sums."""
    area = row.channels * row.columns * row.positions
    full_rate = area * forward.dtype.itemsize / PRODUCT_BYTES_PER_CYCLE
    products = costs.products
    if row.packs:
        products = costs.from_registers[row.channels]
    elif row.transposes:
        products = costs.transposing[row.channels]
    slab = costs.slab + max(full_rate * products, config.stage_bytes * costs.copied)
    waves = math.ceil(config.tasks * config.splits / max(1, device.multiprocessors))
    cycles = waves * (math.ceil(config.slabs / config.splits) * slab + costs.block)
    total = max(cycles * 1e3 / device.clock_hertz, bytes_milliseconds(forward, device, costs))
    if not writes:
        total += costs.partials * device.copy_milliseconds(config.partial_bytes)
        total += costs.split * config.splits * 1e3 / device.clock_hertz
    return total + costs.packed * device.copy_milliseconds(2 * config.packed_bytes)


def bytes_milliseconds(forward: ForwardProblem, device: Device, costs: CostConstants) -> float:
    """What reading and writing takes, of either gradient."""
    elements = padded_elements(forward.input_shape, forward.dtype)
    elements += padded_elements(forward.output_shape, forward.dtype)
    return costs.moved * device.copy_milliseconds(elements * forward.dtype.itemsize)
