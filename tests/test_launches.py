"""Launches that are noted and repeated, without a GPU: with programs that note their addresses."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad

import fusedconv
from fusedconv import _C, noting, selection
from fusedconv.kernels.cuda import launches
from fusedconv.kernels.cuda.launches import Launches, launches_of
from fusedconv.ops import repeating
from fusedconv.plan import BackwardPlan, ForwardPlan, JoinedPlan


class Operand:
    """Absent, or ("address", slot, offset) or ("workspace", offset)."""

    def __init__(self, *place):
        self.place = place


class Sequence:
    def __init__(self, device):
        self.added = []
        self.runs = []

    @staticmethod
    def address(slot, offset=0):
        return Operand("address", slot, offset)

    @staticmethod
    def workspace(offset):
        return Operand("workspace", offset)

    def add(self, program, pointers):
        self.added.append((program, [pointer.place for pointer in pointers]))

    def run(self, addresses, workspace, stream):
        self.runs.append((addresses, workspace))


def empty(shape, strides, dtype):
    return torch.empty_strided(shape, strides, dtype=dtype)


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch):
    monkeypatch.setattr(launches, "_C", SimpleNamespace(Sequence=Sequence, Operand=Operand))
    monkeypatch.setattr(launches, "raw_stream", lambda index: 0)
    monkeypatch.setattr(launches, "allocator", lambda device: empty)
    monkeypatch.setattr(repeating, "_is_of_cuda", lambda tensors: True)


def aligned(*shape):
    """A tensor that begins at 16 bytes, as every tensor of torch on CUDA."""
    whole = torch.rand(torch.Size(shape).numel() + 16)
    first = -whole.data_ptr() // 4 % 4
    return whole[first : first + torch.Size(shape).numel()].view(shape)


def allocated(notes, *shape):
    tensor = aligned(*shape)
    notes.allocated.append(tensor)
    return tensor


def two_programs(input, weight):
    """A call that leaves something between its programs."""
    with noting.noting() as notes:
        between, result = allocated(notes, 10), allocated(notes, 3, 4)
        noting.note_run("first", (input, None, between), 100)
        noting.note_run("second", (between[2:], weight[1:], result), 300)
    return notes, result


def test_tensors_of_a_call_become_addresses_and_parts_of_a_workspace():
    input, weight = aligned(8), aligned(2, 4)
    notes, result = two_programs(input, weight)
    known = launches_of(notes, (input, weight), (None, result))
    assert isinstance(known, Launches)
    first, second = known._sequence.added
    # The programs' own workspaces lie at the beginning, one after another in time.
    assert first == ("first", [("address", 0, 0), (), ("workspace", 512)])
    assert second == ("second", [("workspace", 520), ("address", 1, 16), ("address", 2, 0)])

    others = aligned(8), aligned(2, 4)
    nothing, found = known.run(others)
    assert nothing is None and found.shape == (3, 4) and found.dtype == torch.float32
    ((addresses, workspace),) = known._sequence.runs
    assert addresses == [*(each.data_ptr() for each in others), found.data_ptr()]
    assert workspace and found is not result


def test_what_is_large_has_memory_of_its_own(monkeypatch):
    monkeypatch.setattr(launches, "_MOST_SHARED_BYTES", 39)
    input, weight = aligned(8), aligned(2, 4)
    notes, result = two_programs(input, weight)
    known = launches_of(notes, (input, weight), (result,))
    assert known._sequence.added[0][1][2] == ("address", 2, 0)
    assert [shape for shape, *_ in known._allocated] == [(10,), (3, 4)]
    (found,) = known.run((input, weight))
    assert found.shape == (3, 4)


def test_other_tensors_are_not_taken():
    input, weight = aligned(8), aligned(2, 4)
    notes, result = two_programs(input, weight)
    known = launches_of(notes, (input, weight), (result,))
    assert known.run((aligned(9), weight)) is None
    assert known.run((aligned(8).double(), weight)) is None
    assert known.run((aligned(16)[::2], weight)) is None
    assert known.run((aligned(8).requires_grad_(), weight)) is None
    assert known.run((aligned(9)[1:], weight)) is None  # not at 16 bytes
    assert known._sequence.runs == []


@pytest.mark.parametrize("why", ["did more", "no run", "shared", "unaligned", "unknown", "copied"])
def test_what_cannot_be_told(why):
    input, weight = aligned(8), aligned(2, 4)
    if why == "unaligned":
        input = aligned(9)[1:]
    with noting.noting() as notes:
        result = allocated(notes, 8)
        if why == "did more":
            noting.did_more()
        read = input + 1 if why == "unknown" else input
        if why != "no run":
            noting.note_run("program", (read, weight, result), 0)
        if why == "copied":
            result = result.clone()
    given = (input, input[4:]) if why == "shared" else (input, weight)
    assert launches_of(notes, given, (result,)) is None


def test_notes_are_of_a_thread():
    with noting.noting() as notes:
        other = threading.Thread(target=noting.note_run, args=("program", (), 0))
        other.start()
        other.join()
        noting.note_run("own", (None,), 0)
    noting.note_run("later", (), 0)
    assert [run.program for run in notes.runs] == ["own"]
    assert noting.current.notes is None


# ---- calls ---------------------------------------------------------------------------------------


class Plan(ForwardPlan):
    kernel = "a plan"
    steps = ()
    only_launches = True

    def run(self, *tensors):
        raise NotImplementedError


def noted_call(calls):
    """Of a tensor: allocates, runs."""

    def call(input):
        calls.append(input)
        result = aligned(8)
        if noting.current.notes is not None:
            noting.current.notes.allocated.append(result)
        noting.note_run("program", (input, result), 0)
        return [result]

    return call


def test_a_call_is_noted_the_second_time_and_repeated_from_the_third_on():
    calls, plan = [], Plan()
    call = noted_call(calls)
    for _ in range(5):
        input = aligned(8)
        (result,) = repeating.repeated(plan, ("key",), (input,), lambda: call(input))  # noqa: B023
        assert result.shape == (8,)
    assert len(calls) == 2
    (known,) = {id(each.launches): each.launches for each in plan.repeated.values()}.values()
    assert [addresses[0] for addresses, _ in known._sequence.runs][-1] == input.data_ptr()
    # What lies otherwise, or is asked for otherwise, is called.
    for key, input in [(("key",), aligned(9)), (("other",), aligned(8))]:
        repeating.repeated(plan, key, (input,), lambda: call(input))  # noqa: B023
    assert len(calls) == 4


def test_a_call_that_cannot_be_told_is_tried_three_times():
    calls, plan = [], Plan()
    for _ in range(6):
        repeating.repeated(plan, (), (aligned(8),), lambda: calls.append(1) or [aligned(8)])
    assert len(calls) == 6
    assert list(plan.repeated.values()) == [3]


def test_profilers_see_every_call():
    calls, plan = [], Plan()
    call = noted_call(calls)
    input = aligned(8)
    for _ in range(3):
        repeating.repeated(plan, (), (input,), lambda: call(input))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        repeating.repeated(plan, (), (input,), lambda: call(input))
    assert len(calls) == 3


def test_what_a_call_gets_beside_its_tensors_tells_it_apart(monkeypatch):
    calls, plan = [], Plan()
    call = noted_call(calls)
    input = aligned(8)

    def count(*tensors):
        repeating.repeated(plan, (), tensors, lambda: call(input))
        return len(calls)

    assert [count(input, None) for _ in range(3)] == [1, 2, 2]
    assert count(input, aligned(8)) == 3  # a tensor where there was none
    assert count(input, None) == 3
    monkeypatch.setenv("FUSEDCONV_KERNEL", "torch")
    assert [count(input, None) for _ in range(3)] == [4, 5, 5]
    monkeypatch.delenv("FUSEDCONV_KERNEL")
    assert count(input, None) == 5


class Mode(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def tangents():
    with forward_ad.dual_level():
        yield


@pytest.mark.parametrize(
    "watch",
    [Mode, tangents, lambda: torch.autocast("cpu"), torch.inference_mode],
    ids=["mode", "tangents", "autocast", "inference"],
)
def test_who_watches_sees_every_call(watch):
    calls, plan = [], Plan()
    call = noted_call(calls)
    input = aligned(8)
    for _ in range(3):
        repeating.repeated(plan, (), (input,), lambda: call(input))
    assert len(calls) == 2
    with watch():
        repeating.repeated(plan, (), (input,), lambda: call(input))
    assert len(calls) == 3
    repeating.repeated(plan, (), (input,), lambda: call(input))
    assert len(calls) == 3


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
@pytest.mark.parametrize(
    "transformed",
    [
        lambda run: torch.vmap(run)(torch.ones(2, 3)),
        lambda run: torch.func.grad(run)(torch.ones(3)),
        lambda run: torch.jit.trace(run, torch.ones(3), check_trace=False),
    ],
    ids=["vmap", "grad", "trace"],
)
def test_transforms_and_tracers_see_every_call(transformed):
    calls, plan = [], Plan()
    call = noted_call(calls)
    input, result = aligned(8), aligned(8)
    for _ in range(3):
        repeating.repeated(plan, (), (input,), lambda: call(input))
    assert len(calls) == 2

    def run(x):
        repeating.repeated(plan, (), (input,), lambda: calls.append(x) or [result])
        return x.sum()

    transformed(run)
    assert len(calls) == 3


def test_plans_that_do_more_spoil_a_note():
    class More(Plan):
        only_launches = False

        def run(self, *tensors):
            return None

    with noting.noting() as notes:
        selection.run(More(), torch.ones(1), None, None, None, None)
    assert not notes.complete


def test_a_joined_plan_launches_only_where_all_do():
    class Part(BackwardPlan):
        kernel = "a part"
        steps = ()

        def __init__(self, only_launches):
            self.only_launches = only_launches

        def run(self, tensors):
            raise NotImplementedError

    assert JoinedPlan([Part(True), Part(True)]).only_launches
    assert not JoinedPlan([Part(True), Part(False)]).only_launches


# ---- sequences of the compiled module ------------------------------------------------------------


@pytest.mark.skipif(not fusedconv.build["cuda"], reason="fusedconv was built without CUDA")
def test_a_sequence_says_what_is_wrong_before_it_asks_a_device():
    with pytest.raises(ValueError, match="device: got -1"):
        _C.Sequence(-1)
    sequence, program = _C.Sequence(0), _C.Program(0, 1, 0)
    program.scratch(256)
    for place, text in (
        (_C.Sequence.address(-5), "pointers: got slot -5"),
        (_C.Sequence.address(63), "pointers: got slot 63"),
        (_C.Sequence.workspace(-8), "pointers: got offset -8"),
    ):
        with pytest.raises(ValueError, match=text):
            sequence.add(program, [place])
    with pytest.raises(ValueError, match="pointers: got 33"):
        sequence.add(program, [_C.Operand()] * 33)
    sequence.add(program, [_C.Sequence.address(2, 16)])
    with pytest.raises(ValueError, match="addresses: got 2 for 3 slots"):
        sequence.run([256, 256], 256, 0)
    with pytest.raises(ValueError, match="workspace: got none for 256 bytes"):
        sequence.run([256, 256, 256], 0, 0)
    with pytest.raises(ValueError, match="workspace: got address 8"):
        sequence.run([256, 256, 256], 8, 0)
    with pytest.raises(ValueError, match="workspace: got none for 256 bytes"):
        program.run([], 0, 0)
    with pytest.raises(ValueError, match="pointers: got 33"):
        program.run([0] * 33, 256, 0)
