"""Files of results: a header and one record for each contender and cell."""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import fusedconv
from fusedconv import selection, tuning, winners
from fusedconv.benchmark.cells import Cell
from fusedconv.benchmark.workloads import WORKLOADS
from fusedconv.replacing import check_replaceable, replacing, target

_CHOICE = """\
How fusedconv's kernels were chosen stands in chosen_by: by estimates ("cost"), by times ("tuned",
as the user's cache holds them, or with FUSEDCONV_AUTOTUNE=1 as the first calls find them, before
the timing), over both passes of a training step for torch's operators ("autograd"), or by
FUSEDCONV_KERNEL, whose value it is then."""

_PREPARED = "Gradients are set to None, and inputs become leaves, before the time of a step."

#: How the benchmark measures on GPUs.
METHOD = f"""\
The benchmark: the three systems next to what a user could pick instead.

Each record is one contender in one cell (workload, pass, precision, layout). torch keeps the cuDNN
plan of a convolution for as long as a process lives, whatever cudnn.benchmark says later, so every
contender runs in processes of its own, none of which meets another's plans. cudnn.benchmark is on
before the first call, but for eager and fusedconv, which run as torch comes; fusedconv with
cudnn.benchmark is measured beside where it calls cuDNN, in the gradients of a convolution. Several
devices may work at the same time, one process each; a record names its own.

Times are CUDA events around one call each, after a warm-up, medians with the 10th and 90th
percentile; inputs rotate over more memory than L2 holds.
{_PREPARED}
Weights arrive by load_state_dict and the affine parameters are not trivial; after the timing the
weights are changed in place and the output is checked against float64 again, so that a packing kept
too long shows. Outputs start as NaN wherever the allocator reuses memory.

{_CHOICE}

Floors: the larger of operations over the matrix rate and bytes over the copy rate, both measured
first, on the first device. Strict fp32 on tensor cores takes three TF32 products for one. Forward:
each input element read once and each output element written once. Forward and backward: three
convolutions' operations; bytes of the forward pass, plus output gradient and input read and input
gradient written.
"""

#: How it does on a processor.
INTERLEAVED_METHOD = f"""\
The benchmark: the three systems, and GroupNorm with an activation before or after it at the shapes
of real models, next to what a user could pick instead.

Each record is one contender in one cell (workload, pass, precision, layout). All contenders of a
cell run in one process and take turns: every round calls each once, who begins changes from round
to round and every second round runs backwards, so that what else the machine does meets all of them
alike. (On a GPU those that differ in cudnn.benchmark cannot, because torch keeps the cuDNN plan
that a convolution got first; a processor has no such plans.) Compiling comes before the timing.

Times are the wall clock's around one call each, after a warm-up, medians with the 10th and 90th
percentile; inputs rotate, in a round each contender takes another one. Forward passes run without
gradients; forward and backward give the gradients of the input, the weights and the biases for an
output gradient in the output's layout.
{_PREPARED}
Parameters arrive by load_state_dict, in the layout of the original's, and the affine ones are not
trivial; before the timing the output is checked against float64, and again after it, with weights
changed in place, so that a packing kept too long shows.

{_CHOICE}
"""

#: How it measures layers on GPUs.
LAYERS_METHOD = f"""\
The benchmark of layers: transposed convolutions of published models with what follows them there,
at the models' sizes, next to what a user could pick instead.

Each record is one contender in one cell (workload, pass, precision, layout). Those for which
cudnn.benchmark is on, before the first call, and fusedconv run in one process and take turns: every
round calls each twelve times, the first three of which do not count, as they find the others' code
in the host's caches; who begins changes from round to round and every second round runs backwards,
so that what else the host does meets all of them alike. torch keeps the cuDNN plan of a convolution
for as long as a process lives, so eager, for which cudnn.benchmark is off, has one of its own, and
torch's operators that serve parts of fusedconv's cells have it on. fusedconv computes LayerNorm
over channels and BatchNorm of inference by its function, which folds running statistics in each
call.
torch.compile's work is done before, in parallel processes, and nothing else runs on the device
during the timing.

Times are CUDA events around one call each, after a warm-up, medians with the 10th and 90th
percentile. Before each call the GPU writes several times the memory that its cache holds; meanwhile
the call is launched, so that times are the device's, without the launches before the first kernel
as far as they take no longer than that write. host_us is how long a call took to return.
Inputs rotate. {_PREPARED}
Weights arrive by load_state_dict, affine parameters and running statistics are not trivial; after
the timing the weights are changed in place and the output is checked against float64 again.

{_CHOICE}

Floors: the larger of operations over the matrix rate and bytes over the copy rate, both measured
first, on the first device. Strict fp32 on tensor cores takes three TF32 products for one. Forward:
each input element read once and each output element written once. Forward and backward: three
convolutions' operations; bytes of the forward pass, plus output gradient and input read and input
gradient written.
"""

#: What tells records of contenders apart.
KEY = ("workload", "pass", "dtype", "precision", "layout", "contender")
#: What summaries and plots read of them.
FIELDS = (*KEY, "shape", "median_ms", "floor_ms")
#: What a header says of where its records were measured; a file holds those of one such place.
MACHINE = ("device", "threads", "instruction_set", "torch", "cudnn")

#: Where the package lies in a checkout of its repository.
_IN_CHECKOUT = "python/fusedconv/__init__.py"


class OtherMachineError(ValueError):
    """A file whose records were measured on another device or by another torch."""


def source_commit() -> str:
    """HEAD of the checkout that the package is imported from. Where it is from none, as an
    installed one is even below somebody's checkout: its version."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(fusedconv.__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if git("ls-files", "--full-name", "__init__.py") == _IN_CHECKOUT:
            return git("rev-parse", "--short", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        pass
    return fusedconv.__version__


def header(
    device: dict[str, Any], commit: str | None, rates: dict[str, float], method: str | None = None
) -> dict[str, Any]:
    """What a figure is worth nothing without; ``device`` as ``measuring.device_facts`` gives it."""
    return {
        "device": device["name"],
        **{key: device[key] for key in ("threads", "instruction_set") if key in device},
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "fusedconv": winners.build(),
        "commit": commit or source_commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "rates": rates,
        "method": (method or METHOD).strip(),
    }


def key_of(record: Mapping[str, Any], key: Sequence[str] = KEY) -> str:
    """What tells a record from others, by the fields that ``key`` names."""
    return json.dumps([record[field] for field in key], sort_keys=True)


def load(path: Path, key: Sequence[str] = KEY) -> dict[str, Any]:
    """A file with its "header" and "records", which have the fields of ``key``; ValueError where it
    holds something else, OSError where it cannot be read."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        content["header"].items()
        for record in content["records"]:
            key_of(record, key)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"output: got {path}, expected a file of this benchmark's records"
        ) from None
    return content


def read(path: Path, key: Sequence[str] = KEY) -> list[dict[str, Any]]:
    """The records of a file; raises as ``load``."""
    records: list[dict[str, Any]] = load(path, key)["records"]
    return records


def check_writable(path: Path, key: Sequence[str] = KEY) -> None:
    """Makes the folder. Raises OSError where the file cannot be written, ValueError where another
    one is in its place."""
    target(path)
    if path.exists():
        read(path, key)
    check_replaceable(path)


def check_machine(path: Path, head: Mapping[str, Any]) -> None:
    """OtherMachineError where the file's header names another device, torch or cuDNN than
    ``head``."""
    known = load(path)["header"]
    differing = [name for name in MACHINE if known.get(name) != head.get(name)]

    def said(header: Mapping[str, Any]) -> str:
        return ", ".join(f"{name} {header.get(name) or 'unknown'}" for name in differing)

    if differing:
        raise OtherMachineError(
            f"output: got {path}, measured with {said(known)}; expected one measured with "
            f"{said(head)}, or a new one"
        )


def _chosen_as_now(record: Mapping[str, Any]) -> bool:
    """Whether a record's kernels were chosen as the variables of the environment now ask for: by
    FUSEDCONV_KERNEL, or tuned where FUSEDCONV_AUTOTUNE is 1; by either times or estimates where
    neither is set, whatever the user's cache has held since."""
    by = set(record.get("chosen_by", "").split("+")) - {""}  # a peer's, or nothing of ours
    forced = selection.forced_kernels()
    if forced is not None:
        return by <= {forced}
    return by <= ({"tuned", "autograd"} if tuning.is_active() else {"tuned", "cost", "autograd"})


def held(path: Path, commit: str, size: str) -> set[tuple[Cell, str]]:
    """The cells and contenders of which a file holds a record made by this build at ``commit``, of
    kernels chosen as they would be now, at a ``size`` of ``models.SIZES``; one that failed before
    it had a shape is of any."""

    def is_of_size(record: Mapping[str, Any]) -> bool:
        workload, shape = WORKLOADS.get(record["workload"]), record.get("shape")
        return shape is None or (workload is not None and shape == list(workload.shape(size)))

    return {
        (Cell.of(record), record["contender"])
        for record in read(path)
        if record.get("run", "").split()[-1:] == [commit]
        and record.get("fusedconv") == winners.build()
        and is_of_size(record)
        and _chosen_as_now(record)
    }


def write(
    path: Path,
    head: dict[str, Any],
    records: Iterable[dict[str, Any]],
    key: Sequence[str] = KEY,
    **others: Any,
) -> None:
    """Replaces the records that were measured anew in the file, and keeps the others. ``others``
    are further entries of the file."""
    old = read(path, key) if path.exists() else []
    kept = {key_of(record, key): record for record in (*old, *records)}
    heads = {"header": head, **others}
    entries = [f'"{name}": {json.dumps(value, indent=1)}' for name, value in heads.items()]
    # A line a record: no larger than it must be, and differences are of records.
    lines = ",\n".join(map(json.dumps, kept.values()))
    entries.append(f'"records": [\n{lines}\n]')
    with replacing(path) as file:
        file.write("{" + ",\n".join(entries) + "}\n")
