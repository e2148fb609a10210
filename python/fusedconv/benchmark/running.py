"""Runs every contender in processes of its own, on one device or on several at a time."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fusedconv.benchmark import records as files
from fusedconv.benchmark.cells import LAYOUTS, PASSES, PRECISIONS, Cell, select_cells
from fusedconv.benchmark.contenders import CONTENDERS, Contender
from fusedconv.benchmark.measuring import device_facts, failed
from fusedconv.models import SYSTEMS


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

    def began(self, cell: Cell, contender: str) -> None:
        """A contender's cell is being measured."""

    def measured(self, record: dict[str, Any], share: float) -> None:
        """A record is there; ``share`` of the expected time has been worked off."""


@dataclass(frozen=True)
class Job:
    """Cells that one process measures of one contender."""

    contender: Contender
    cells: tuple[Cell, ...]

    def expected(self, seconds: float) -> float:
        """Seconds it will take, roughly, of which ``seconds`` a cell for timing."""
        return len(self.cells) * (self.contender.overhead + seconds)

    def split(self, field: str) -> list[Job]:
        """One job for each value of a field of the cells."""
        values = dict.fromkeys(getattr(cell, field) for cell in self.cells)
        return [
            Job(self.contender, tuple(c for c in self.cells if getattr(c, field) == value))
            for value in values
        ]


def jobs(
    contenders: Iterable[str], chosen: Sequence[Cell], devices: int, seconds: float
) -> list[Job]:
    """One job a contender; for several devices also one a workload, and one a precision of those
    that would keep a device longer than half its share, longest first.

    Raises ValueError where no contender takes part in any of the cells.
    """
    contenders = tuple(dict.fromkeys(contenders))
    result = []
    for name in contenders:
        contender = CONTENDERS[name]
        mine = tuple(cell for cell in chosen if contender.takes_part(cell))
        if mine:
            result.append(Job(contender, mine))
    if not result:
        raise ValueError(
            f"contenders: got {', '.join(contenders)}, expected one at least that takes part in "
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


def _environment(index: int | None) -> dict[str, str]:
    """The child sees one device, as its first."""
    environment = dict(os.environ)
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

    def answers(self, request: dict[str, Any], index: int | None) -> Iterator[dict[str, Any]]:
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
                    env=_environment(index),
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
    name = job.contender.name
    request = {
        **common,
        "contender": name,
        "cells": [cell.fields() for cell in job.cells],
        "index": index,
    }
    done = 0
    try:
        for line in children.answers(request, index):
            if "began" in line:
                events.put(("began", (job.cells[line["began"]], name)))
            elif "record" in line:
                done += 1
                events.put(("record", (line["record"], job)))
            else:
                raise ContenderError(line["failed"], line["traceback"])
    except ContenderError as error:
        if children.stopped:
            return
        if job.contender.ours:
            fields = " ".join(job.cells[done].fields().values()) if done < len(job.cells) else ""
            raise ContenderError(f"{fields} {name}: {error}", error.traceback) from None
        for cell in job.cells[done:]:
            record = {**cell.fields(), "contender": name, **failed(str(error))}
            record |= {"shape": None, "floor_ms": None, "device": {"index": index}}
            events.put(("record", (record, job)))


def run(
    output: Path | None,
    *,
    workloads: Iterable[str] = tuple(SYSTEMS),
    precisions: Iterable[str] = PRECISIONS,
    layouts: Iterable[str] = LAYOUTS,
    passes: Iterable[str] = PASSES,
    contenders: Iterable[str] = tuple(CONTENDERS),
    device: torch.device | None = None,
    devices: Sequence[int] | None = None,
    seconds: float = 0.5,
    least: int = 10,
    small: bool = False,
    commit: str | None = None,
    observer: Observer | None = None,
) -> list[dict[str, Any]]:
    """Measures the chosen cells, and writes the records as they come.

    ``device`` is CUDA where there is a GPU, ``devices`` the ordinals of those to use at the same
    time, the first alone by default. ``seconds`` of timing per record, ``least`` repetitions at
    least; ``small`` takes sizes for a processor. A peer that fails is recorded with its error.

    Raises OSError or ValueError where ``output`` cannot be written or added to and ValueError where
    nothing is left to measure, before anything runs, and ContenderError where fusedconv fails.
    """
    if output is not None:
        files.check_writable(output)
    watch = observer or Observer()
    kind = device.type if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    indices: list[int | None] = [None] if kind != "cuda" else list(devices or (0,))
    waiting = deque(
        jobs(
            contenders, select_cells(workloads, precisions, layouts, passes), len(indices), seconds
        )
    )
    watch.planned(sum(len(job.cells) for job in waiting))
    total = sum(job.expected(seconds) for job in waiting)
    children = _Children()
    common = {"device": kind, "seconds": seconds, "least": least, "small": small}
    if kind == "cuda":
        # Not here: this process holds no memory of a device.
        ask = {**common, "measure": "rates", "index": indices[0]}
        (found,) = children.answers(ask, indices[0])
    else:
        found = {"device": device_facts(torch.device(kind), None), "rates": {}}
    head = files.header(found["device"], commit, found["rates"])
    common["rates"] = found["rates"]

    events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    threads = [
        threading.Thread(target=_work, args=(children, waiting, index, common, events))
        for index in indices
    ]
    records: list[dict[str, Any]] = []
    finished, worked = 0, 0.0
    try:
        for thread in threads:
            thread.start()
        while finished < len(threads):
            event, value = events.get()
            if event == "finished":
                finished += 1
            elif event == "raised":
                raise value
            elif event == "began":
                watch.began(*value)
            else:
                record, job = value
                record["run"] = f"{head['date']} {head['commit']}"
                records.append(record)
                worked += job.expected(seconds) / len(job.cells)
                if output is not None:
                    files.write(output, head, records)
                watch.measured(record, worked / total)
    finally:
        children.stop()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    return records
