"""One process of the benchmark: ``python -m fusedconv.benchmark.child``.

A job comes as one line of JSON on standard input; what is found goes out as lines of JSON on
standard output. The job ``{"measure": "rates"}`` asks for the device's rates; one with
``{"measure": "nothing"}`` only compiles its contenders' models of its cells, for processes that
come later; any other runs contenders through cells.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

from fusedconv.benchmark.cells import Cell
from fusedconv.benchmark.contenders import CONTENDERS, Contender
from fusedconv.benchmark.measuring import (
    compile_ahead,
    conv_flops,
    device_facts,
    failed,
    measure,
    prepare,
)
from fusedconv.benchmark.timing import floor_ms, measured_rates
from fusedconv.timing import Clock

Emit = Callable[[dict[str, Any]], None]


def _measured(
    contenders: list[Contender],
    cell: Cell,
    job: dict[str, Any],
    device: torch.device,
    clock: Clock,
) -> list[dict[str, Any]]:
    """What is found of each contender; a failure is raised where ours is among them."""
    common: dict[str, Any] = {"shape": None, "floor_ms": None}
    try:
        setup = prepare(cell, device, job["size"])
        common["shape"] = list(setup.shape)
        common["floor_ms"] = floor_ms(
            conv_flops(setup.original, setup.shape),
            setup.input_bytes,
            setup.output_bytes,
            cell.precision,
            cell.pass_,
            job["rates"],
        )
        found = measure(setup, contenders, clock)
    except Exception as error:
        if any(contender.ours for contender in contenders):
            raise
        found = {contender.name: failed(error) for contender in contenders}
    return [{**common, **found[contender.name]} for contender in contenders]


def _compile(contenders: list[Contender], job: dict[str, Any], device: torch.device) -> None:
    """Who measures meets what fails here, and says so."""
    for fields in job["cells"]:
        for contender in contenders:
            with contextlib.suppress(Exception):
                compile_ahead(prepare(Cell.of(fields), device, job["size"]), contender)
            torch.compiler.reset()


def serve(job: dict[str, Any], emit: Emit) -> None:
    """Does a job. A failure of ours ends it with a "failed" line, one of a peer is its record."""
    device = torch.device(job["device"])
    facts = device_facts(device, job["index"])
    if job.get("measure") == "rates":
        emit({"device": facts, "rates": measured_rates(device)})
        return
    contenders = [CONTENDERS[name] for name in job["contenders"]]
    if job.get("measure") == "nothing":
        _compile(contenders, job, device)
        return
    clock = Clock(
        device, job["seconds"], job["least"], job["most"], job["flushes"], job["in_a_row"]
    )
    for number, fields in enumerate(job["cells"]):
        emit({"began": number})
        try:
            found = _measured(contenders, Cell.of(fields), job, device, clock)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            emit({"failed": text, "traceback": traceback.format_exc()})
            return
        if any(contender.compile_mode is not None for contender in contenders):
            torch.compiler.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        records = [
            {**fields, "contender": contender.name, "device": facts, **result}
            for contender, result in zip(contenders, found, strict=True)
        ]
        emit({"records": records})


def main() -> None:
    # Whatever prints in this process prints to standard error.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def emit(line: dict[str, Any]) -> None:
        channel.write(json.dumps(line) + "\n")
        channel.flush()

    serve(json.loads(sys.stdin.readline()), emit)


if __name__ == "__main__":
    main()
