"""Every kernel that serves a problem, timed in turns, as records."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fusedconv import selection, winners
from fusedconv.benchmark import records as files
from fusedconv.benchmark.measuring import device_facts
from fusedconv.benchmark.regret import ENTRY_FIELDS, fields, regrets, title
from fusedconv.benchmark.running import Observer
from fusedconv.benchmark.timing import floor_ms, measured_rates
from fusedconv.device import device_record
from fusedconv.plan import Candidate
from fusedconv.problem import ForwardProblem, Problem
from fusedconv.timing import Clock
from fusedconv.tuning import calls, suspended, undisturbed
from fusedconv.winners import Piece, Winner

#: Seconds of timing a kernel, and repetitions.
SECONDS, LEAST, MOST = 0.1, 7, 100
#: What tells records of kernels apart; ``asked`` is "all" or the names of kernels or providers.
KEY = ("problem", "device", "versions", "asked")
#: What regrets and plots read of them.
FIELDS = (
    *(*KEY, "workload", "pass", "precision", "layout"),
    *("parts", "flops", "bytes", "chosen", "kernels", "run"),
)
#: How kernels are measured.
METHOD = """\
The benchmark of kernels: every kernel that serves a problem, torch's own operators included.

Each record is one problem: a forward pass, one that saves for the backward pass, or a backward pass
with its parts, which kernels compute alone or together. All kernels run in one process, on the same
tensors, and take turns: every round calls each once, who begins changes from round to round and
every second round runs backwards. Times are CUDA events around one run of a plan each (on a
processor the wall clock's), after a warm-up, in the order in which they were taken, with median,
10th and 90th percentile; before each run the GPU writes several times the memory that its cache
holds, and the run is launched meanwhile. cudnn.benchmark is as torch comes: off.

"chosen" are the kernels of the lowest estimates, whatever was tuned. The regret of a problem is
their time over that of the fastest kernels, by medians; a backward pass's time is the sum over its
pieces. As the fastest are picked by the same times, noise raises it.
"""
_PASSES = {True: "forward, saving", False: "forward"}


@dataclass(frozen=True)
class Source:
    """Problems by one name: ``find`` gives them, perhaps by running what asks them."""

    workload: str | None
    title: str
    find: Callable[[], Iterable[Problem]]


def _pieces(pieces: Iterable[Piece]) -> list[dict[str, Any]]:
    return [{"parts": list(parts), "kernel": kernel} for parts, kernel in pieces]


@dataclass(frozen=True)
class Question:
    """A problem on a device, of which the kernels of some ``names`` are asked for, or all."""

    problem: Problem
    device: torch.device
    names: tuple[str, ...] | None
    workload: str | None = None

    @property
    def forward(self) -> ForwardProblem:
        return self.problem if isinstance(self.problem, ForwardProblem) else self.problem.forward

    def fields(self) -> dict[str, Any]:
        """What its record says before anything is measured."""
        entry = winners.entry(self.problem, device_record(self.device), Winner(()))
        forward = self.forward
        whole = isinstance(self.problem, ForwardProblem)
        return {
            **{name: getattr(entry, name) for name in ENTRY_FIELDS},
            "asked": "all" if self.names is None else sorted(self.names),
            # The pass without precision and layout, where it has no name.
            "workload": self.workload or str(forward).split(", ")[0],
            "pass": _PASSES[forward.save] if whole else "backward",
            "precision": forward.precision,
            "layout": forward.layout,
            "parts": list(self.problem.parts),
            "flops": forward.conv_flops if whole else None,
            "bytes": forward.minimal_bytes if whole else None,
        }

    def candidates(self) -> dict[Piece, Candidate]:
        """The kernels that serve it or parts of it, by the pieces that they compute."""
        return {
            (parts, each.kernel.name): each
            for parts, (_, found) in selection.pieces(
                self.problem, device_record(self.device)
            ).items()
            for each in found
            if each.support and (self.names is None or each.kernel.is_named(self.names))
        }

    def refusals(self) -> str:
        """Why kernels that are asked for do not serve it, each reason once."""
        reasons = {
            f"{each.kernel.name}: {each.support.reason}": None
            for _, found in selection.pieces(self.problem, device_record(self.device)).values()
            for each in found
            if not each.support and (self.names is None or each.kernel.is_named(self.names))
        }
        return "; ".join(reasons) or "none of them computes any of its parts"

    def measure(self, clock: Clock) -> dict[str, Any]:
        """Its record. Where its tensors find no memory, that says so in "error"; "refused" says why
        no kernel that is asked for serves it."""
        candidates = self.candidates()
        choice = selection.choose(self.problem, device_record(self.device), tuned=False)
        chosen = [(piece.parts, candidate.kernel.name) for piece, candidate in choice.chosen]
        result = {**self.fields(), "chosen": _pieces(chosen), "kernels": []}
        if not candidates:
            return {**result, "refused": self.refusals()[:500]}
        try:
            with undisturbed(self.device):
                ready, failed = calls(self.problem, self.device, self.names)
                timings = clock.interleave([[call] for call in ready.values()])
        except RuntimeError as error:
            return {**result, "error": str(error)[:500]}
        measured: dict[Piece, dict[str, Any]] = {
            piece: {**timing.fields(), "times_ms": [round(t, 6) for t in timing.milliseconds]}
            for piece, timing in zip(ready, timings, strict=True)
        }
        measured |= {piece: {"median_ms": None, "error": e[:500]} for piece, e in failed.items()}
        result["kernels"] = [
            {
                **_pieces([piece])[0],
                "provider": candidates[piece].kernel.provider,
                "estimate_ms": candidates[piece].cost,
                **fields,
            }
            for piece, fields in measured.items()
        ]
        return result


def questions(
    sources: Iterable[Source],
    device: torch.device,
    names: tuple[str, ...] | None,
    observer: Observer,
) -> list[Question]:
    """The different problems of all sources; those by one name after the first are numbered."""
    found: dict[Problem, Question] = {}
    for source in sources:
        observer.began(f"problems of {source.title}")
        counts: dict[str, int] = {}
        with suspended():
            problems = list(source.find())
        for problem in problems:
            question = Question(problem, device, names, source.workload)
            if question.workload is not None:
                kind = question.fields()["pass"]
                counts[kind] = counts.get(kind, 0) + 1
                if counts[kind] > 1:
                    name = f"{question.workload} ({counts[kind]})"
                    question = dataclasses.replace(question, workload=name)
            found.setdefault(problem, question)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return list(found.values())


def _where(record: Mapping[str, Any]) -> str:
    """On what it was measured."""
    return files.key_of(record, ("device", "versions"))


def run(
    output: Path | None,
    sources: Sequence[Source],
    device: torch.device,
    *,
    names: tuple[str, ...] | None = None,
    seconds: float | None = None,
    least: int | None = None,
    commit: str | None = None,
    resume: bool = False,
    observer: Observer | None = None,
    tuned: Mapping[str, winners.Entry] | None = None,
) -> list[dict[str, Any]]:
    """Measures every kernel of each problem, and writes the records as they come, with their
    regret. Returns them, and what ``output`` holds beside of the same device, build and versions.

    ``names`` of kernels or providers leave the others out. ``seconds`` of timing a kernel,
    ``least`` repetitions at least. ``resume`` keeps what ``output`` holds of the same problems,
    device, build, versions and names. ``tuned`` are winners as ``regret.regrets`` takes them.

    Raises OSError or ValueError where ``output`` cannot be written or added to, before anything is
    measured, and NoKernelError where nothing serves a problem.
    """
    if output is not None:
        files.check_writable(output, KEY)
    watch = observer or Observer()
    asked = questions(sources, device, names, watch)
    keys = {files.key_of(question.fields(), KEY): question for question in asked}
    here = {_where(question.fields()) for question in asked}
    written = [] if output is None or not output.exists() else files.read(output, KEY)
    known = {files.key_of(record, KEY): record for record in written if _where(record) in here}
    done = {key for key, record in known.items() if resume and "error" not in record}
    left = {key: question for key, question in keys.items() if key not in done}
    watch.planned(len(left))
    if not left:
        if output is not None and tuned:
            head = files.load(output, KEY)["header"]
            files.write(output, head, (), KEY, regret=fields(regrets(known.values(), tuned)))
        return list(known.values())
    facts = device_facts(device, device.index or 0)
    head = files.header(facts, commit, measured_rates(device), METHOD)
    stamp = f"{head['date']} {head['commit']}"
    clock = Clock(
        device,
        SECONDS if seconds is None else seconds,
        LEAST if least is None else least,
        MOST,
        flushes=True,
    )
    # Timing takes as long for each kernel.
    shares = {key: len(question.candidates()) for key, question in left.items()}
    worked, total = 0, sum(shares.values())
    for key, question in left.items():
        watch.began(title(question.fields()))
        record = question.measure(clock)
        flops, moved = record["flops"], record["bytes"]
        record["floor_ms"] = (
            None
            if flops is None
            else floor_ms(flops, moved, 0, record["precision"], "forward", head["rates"])
        )
        known[key] = {**record, "run": stamp}
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if output is not None:
            found = regrets(known.values(), tuned)
            files.write(output, head, known.values(), KEY, regret=fields(found))
        worked += shares[key]
        watch.measured(known[key], worked / total if total else 1.0)
    return list(known.values())
