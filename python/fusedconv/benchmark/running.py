"""Runs the contenders in processes of their own, on one device or on several at a time."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fusedconv.benchmark import records as files
from fusedconv.benchmark.cells import LAYOUTS, Cell, check_names, select_cells
from fusedconv.benchmark.contenders import CONTENDERS, Contender
from fusedconv.benchmark.measuring import device_facts, failed
from fusedconv.benchmark.suites import DEFAULT_SUITE, SUITES, default_device, sharing

#: Processes that compile ahead, at most: each takes some gigabytes of the device and of memory.
_COMPILERS = 16


class ContenderError(RuntimeError):
    """A process of the benchmark failed whose failure is no result; ``traceback`` is what it left
    behind, empty where that is nothing."""

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


class Observer:
    """Told what happens while a benchmark runs; by default it ignores that."""

    def planned(self, count: int) -> None:
        """So many records will be measured."""

    def began(self, title: str) -> None:
        """What ``title`` says is being measured."""

    def measured(self, record: dict[str, Any], share: float) -> None:
        """A record is there; ``share`` of the expected time has been worked off."""


@dataclass(frozen=True)
class Job:
    """Cells that one process measures, of several contenders in turns."""

    contenders: tuple[Contender, ...]
    cells: tuple[Cell, ...]

    @property
    def title(self) -> str:
        return ", ".join(contender.name for contender in self.contenders)

    @property
    def ours(self) -> bool:
        return any(contender.ours for contender in self.contenders)

    @property
    def count(self) -> int:
        """Of its records."""
        return len(self.contenders) * len(self.cells)

    def expected(self, seconds: float) -> float:
        """Seconds it will take, roughly, of which ``seconds`` a record for timing."""
        return len(self.cells) * sum(seconds + each.overhead for each in self.contenders)

    def split(self, field: str) -> list[Job]:
        """One job for each value of a field of the cells."""
        values = dict.fromkeys(getattr(cell, field) for cell in self.cells)
        return [
            Job(self.contenders, tuple(c for c in self.cells if getattr(c, field) == value))
            for value in values
        ]


def _interleaved(contenders: Sequence[Contender], chosen: Sequence[Cell], kind: str) -> list[Job]:
    """Jobs of all who take part in a cell: one where all do in every cell."""
    cells: dict[tuple[Contender, ...], list[Cell]] = {}
    for cell in chosen:
        present = tuple(each for each in contenders if each.takes_part(cell, kind))
        if present:
            cells.setdefault(present, []).append(cell)
    return [Job(present, tuple(theirs)) for present, theirs in cells.items()]


def jobs(
    contenders: Iterable[str],
    chosen: Sequence[Cell],
    devices: int,
    seconds: float,
    kind: str = "cuda",
    together: bool = False,
) -> list[Job]:
    """The jobs on devices of a ``kind``, by torch's type of it, ``together`` as ``Suite`` has it.

    Contenders that take turns share a job. For several devices there is one also for each workload,
    and one for each precision of those that would keep a device longer than half its share, longest
    first.

    Raises ValueError where a contender is unknown or none takes part in any of the cells.
    """
    names = tuple(dict.fromkeys(contenders))
    check_names("contenders", names, CONTENDERS)
    known = [CONTENDERS[name] for name in names]
    groups = sharing(known, kind, together)
    result = [job for group in groups for job in _interleaved(group, chosen, kind)]
    if not result:
        raise ValueError(
            f"contenders: got {', '.join(names)}, expected one at least that takes part in "
            "the chosen cells"
        )
    if devices == 1:
        return result
    limit = sum(job.expected(seconds) for job in result) / devices / 2
    result = [part for job in result for part in job.split("workload")]
    result = [
        part
        for job in result
        for part in (job.split("precision") if job.expected(seconds) > limit else [job])
    ]
    return sorted(result, key=lambda job: job.expected(seconds), reverse=True)


def _command() -> list[str]:
    return [sys.executable, "-m", "fusedconv.benchmark.child"]


def _environment(index: int | None, alone: bool = True) -> dict[str, str]:
    """The child sees one device, as its first. One that is not ``alone`` compiles by itself, not
    by a process for each of the processor's cores."""
    environment = dict(os.environ)
    if not alone:
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    if index is not None:
        visible = [v for v in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if v]
        environment["CUDA_VISIBLE_DEVICES"] = visible[index] if visible else str(index)
    return environment


class _Children:
    """The processes that run, so that all can be ended at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self.stopped = False

    def answers(
        self, request: dict[str, Any], index: int | None, alone: bool = True
    ) -> Iterator[dict[str, Any]]:
        """Lines that a process answers with; ContenderError where it ends in another way."""
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            with self._lock:
                if self.stopped:
                    return
                process = subprocess.Popen(
                    _command(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=_environment(index, alone),
                    text=True,
                )
                self._running.add(process)
            try:
                with process:
                    assert process.stdin is not None and process.stdout is not None
                    # One that ends before it reads says why by its status.
                    with contextlib.suppress(BrokenPipeError), process.stdin as channel:
                        channel.write(json.dumps(request) + "\n")
                    try:
                        for line in process.stdout:
                            yield json.loads(line)
                        status = process.wait()
                    finally:
                        process.kill()
            finally:
                with self._lock:
                    self._running.discard(process)
            if status != 0:
                errors.seek(0)
                left = errors.read().strip()
                last = left.splitlines()[-1:]
                raise ContenderError(
                    f"its process ended with status {status}: {''.join(last)}", left
                )

    def stop(self) -> None:
        with self._lock:
            self.stopped = True
            for process in self._running:
                process.kill()


def _work(
    children: _Children,
    waiting: deque[Job],
    index: int | None,
    common: dict[str, Any],
    events: queue.SimpleQueue[tuple[str, Any]],
) -> None:
    """One device's share: jobs until none is left. Ends with a "finished" event."""
    try:
        while not children.stopped:
            try:
                job = waiting.popleft()
            except IndexError:
                break
            _do(children, job, index, common, events)
    except BaseException as error:
        events.put(("raised", error))
    finally:
        events.put(("finished", None))


def _do(
    children: _Children,
    job: Job,
    index: int | None,
    common: dict[str, Any],
    events: queue.SimpleQueue[tuple[str, Any]],
) -> None:
    request = {
        **common,
        "contenders": [contender.name for contender in job.contenders],
        "cells": [cell.fields() for cell in job.cells],
        "index": index,
    }
    done = 0
    try:
        for line in children.answers(request, index):
            if "began" in line:
                events.put(("began", f"{job.cells[line['began']].title} {job.title}"))
            elif "records" in line:
                done += 1
                events.put(("records", (line["records"], job)))
            else:
                raise ContenderError(line["failed"], line["traceback"])
    except ContenderError as error:
        if children.stopped:
            return
        if job.ours:
            fields = " ".join(job.cells[done].fields().values()) if done < len(job.cells) else ""
            raise ContenderError(f"{fields} {job.title}: {error}", error.traceback) from None
        nothing = {"shape": None, "floor_ms": None, "device": {"index": index}}
        nothing |= failed(str(error))
        for cell in job.cells[done:]:
            records = [
                {**cell.fields(), "contender": contender.name, **nothing}
                for contender in job.contenders
            ]
            events.put(("records", (records, job)))


def _compile_ahead(
    children: _Children, waiting: Iterable[Job], index: int | None, common: dict[str, Any]
) -> None:
    """Lets parallel processes do torch.compile's work, into torch's cache on disk. Not that which
    chooses by times, which other processes on the device falsify."""
    cells: dict[str, list[Cell]] = {}
    for job in waiting:
        for contender in job.contenders:
            if contender.compile_mode == "default":
                cells.setdefault(contender.name, []).extend(job.cells)
    processes = min(_COMPILERS, len(os.sched_getaffinity(0)))
    requests = [
        {
            **common,
            "measure": "nothing",
            "contenders": [name],
            "cells": [cell.fields() for cell in theirs[first::processes]],
            "index": index,
        }
        for name, theirs in cells.items()
        for first in range(min(processes, len(theirs)))
    ]

    def work(request: dict[str, Any]) -> None:
        # What fails, fails again where it is measured.
        with contextlib.suppress(ContenderError):
            deque(children.answers(request, index, alone=False), 0)

    with ThreadPoolExecutor(processes) as pool:
        try:
            deque(pool.map(work, requests), 0)
        except BaseException:
            children.stop()
            raise


def _left(waiting: Iterable[Job], output: Path | None, commit: str, size: str) -> list[Job]:
    """The jobs without the cells of which the file holds every record at this commit and size."""
    held = set() if output is None or not output.exists() else files.held(output, commit, size)
    left = []
    for job in waiting:
        cells = tuple(
            cell
            for cell in job.cells
            if any((cell, contender.name) not in held for contender in job.contenders)
        )
        if cells:
            left.append(Job(job.contenders, cells))
    return left


def run(
    output: Path | None,
    *,
    workloads: Iterable[str] | None = None,
    precisions: Iterable[str] | None = None,
    layouts: Iterable[str] = LAYOUTS,
    passes: Iterable[str] | None = None,
    contenders: Iterable[str] | None = None,
    suite: str = DEFAULT_SUITE,
    device: torch.device | None = None,
    devices: Sequence[int] | None = None,
    seconds: float | None = None,
    least: int | None = None,
    small: bool = False,
    commit: str | None = None,
    resume: bool = False,
    observer: Observer | None = None,
) -> list[dict[str, Any]]:
    """Measures the chosen cells, and writes the records as they come.

    ``device`` is ``default_device()`` by default, ``devices`` the ordinals of those to use at the
    same time, the first alone by default; what else is None is as ``SUITES`` says for ``suite`` and
    the device. ``seconds`` of timing per record, ``least`` repetitions at least; ``small`` takes
    sizes that run in moments. ``resume`` leaves out the cells of which ``output`` holds every
    record of this commit, build and size. A peer that fails is recorded with its error.

    Raises OSError or ValueError where ``output`` cannot be written or added to and ValueError where
    nothing can be measured, before anything runs but the device's rates, and ContenderError where
    fusedconv fails. The records of ``output`` are of one device and torch: OtherMachineError where
    these are others.
    """
    if output is not None:
        files.check_writable(output)
    watch = observer or Observer()
    kind = (device or default_device()).type
    chosen = SUITES[suite][kind]
    seconds = chosen.seconds if seconds is None else seconds
    indices: list[int | None] = [None] if kind != "cuda" else list(devices or (0,))
    cells = select_cells(
        chosen.workloads if workloads is None else workloads,
        chosen.precisions if precisions is None else precisions,
        layouts,
        chosen.passes if passes is None else passes,
        kind,
    )
    contenders = chosen.contenders if contenders is None else contenders
    waiting = deque(jobs(contenders, cells, len(indices), seconds, kind, chosen.together))
    commit = commit or files.source_commit()
    size = "small" if small else chosen.size
    children = _Children()
    common = {
        "device": kind,
        "seconds": seconds,
        "least": chosen.least if least is None else least,
        "most": chosen.most,
        "flushes": chosen.flushes,
        "in_a_row": chosen.in_a_row,
        "size": size,
    }
    if kind == "cuda":
        # Not here: this process holds no memory of a device.
        ask = {**common, "measure": "rates", "index": indices[0]}
        (found,) = children.answers(ask, indices[0])
    else:
        found = {"device": device_facts(torch.device(kind), None), "rates": {}}
    head = files.header(found["device"], commit, found["rates"], chosen.method)
    common["rates"] = found["rates"]
    if output is not None and output.exists():
        files.check_machine(output, head)
    if resume:
        waiting = deque(_left(waiting, output, commit, size))
    watch.planned(sum(job.count for job in waiting))
    if not waiting:
        return []
    total = sum(job.expected(seconds) for job in waiting)

    events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    threads = [
        threading.Thread(target=_work, args=(children, waiting, index, common, events))
        for index in indices
    ]
    records: list[dict[str, Any]] = []
    finished, worked = 0, 0.0
    try:
        if chosen.compiles_ahead:
            _compile_ahead(children, waiting, indices[0], common)
        for thread in threads:
            thread.start()
        while finished < len(threads):
            event, value = events.get()
            if event == "finished":
                finished += 1
            elif event == "raised":
                raise value
            elif event == "began":
                watch.began(value)
            else:
                new, job = value
                stamp = f"{head['date']} {head['commit']}"
                by = {"run": stamp, "fusedconv": head["fusedconv"]}
                records += [{**record, **by} for record in new]
                if output is not None:
                    files.write(output, head, records)
                for record in records[-len(new) :]:
                    worked += job.expected(seconds) / job.count
                    watch.measured(record, worked / total)
    finally:
        children.stop()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    return records
