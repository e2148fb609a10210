"""The file of winners: what it holds, what is not believed, and many processes that write it."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from problems import backward_problem, problem
from processes import python

from fusedconv import benchmark, selection, tuning, winners
from fusedconv.cli import main
from fusedconv.describing import described
from fusedconv.device import KNOWN, PROCESSOR
from fusedconv.winners import Winner

FORWARD = problem()
BACKWARD = backward_problem()
SERVED = Winner(
    ((("forward",), "torch"),), {(("forward",), "torch"): 0.5, (("forward",), "cpu"): 2.0}
)
DIVIDED = Winner(((("epilogue", "bias"), "a"), (("input", "weight"), "b")))


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """A cache folder that is not there yet, and nothing tuned in memory."""
    monkeypatch.setattr(selection, "_tuned", {})
    path = tmp_path / "below" / "cache"
    monkeypatch.setenv("FUSEDCONV_CACHE_DIR", str(path))
    return path


def kept(target, device=PROCESSOR):
    winners.forget()
    return winners.kept(target, device)


# ---- what is kept --------------------------------------------------------------------------------


def test_winners_come_back_as_they_were():
    assert kept(FORWARD) is None
    winners.store(FORWARD, PROCESSOR, SERVED)
    winners.store(BACKWARD, PROCESSOR, DIVIDED)
    assert kept(FORWARD) == SERVED
    assert kept(BACKWARD) == DIVIDED
    winners.store(FORWARD, PROCESSOR, Winner(((("forward",), "cpu"),)))
    assert kept(FORWARD).pieces == ((("forward",), "cpu"),)
    assert len(winners.entries()) == 2


@pytest.mark.parametrize(
    "changes",
    [{"batch": 4}, {"aligned": False}, {"save": True}, {"layout": "nhwc"}, {"activation": "relu"}],
    ids=str,
)
def test_another_problem_has_another_winner(changes):
    winners.store(FORWARD, PROCESSOR, SERVED)
    assert kept(problem(**changes)) is None


def test_a_winner_is_of_a_device_by_its_name_and_of_versions(monkeypatch):
    device = KNOWN[90]
    winners.store(FORWARD, device, SERVED)
    assert kept(FORWARD, dataclasses.replace(device, index=1)) == SERVED
    assert kept(FORWARD, KNOWN[80]) is None
    assert kept(FORWARD) is None
    for name in ("fusedconv", "torch", "cudnn"):
        versions = {**winners._versions(device), name: "another"}
        monkeypatch.setattr(winners, "_versions", lambda device, versions=versions: versions)
        assert kept(FORWARD, device) is None
        monkeypatch.undo()


def test_a_processors_winner_is_of_its_threads(threads):
    threads(1)
    winners.store(FORWARD, PROCESSOR, SERVED)
    threads(2)
    assert kept(FORWARD) is None
    threads(1)
    assert kept(FORWARD) == SERVED


def test_a_key_is_the_same_in_every_process():
    """Sets of strings have another order in each."""
    script = (
        "from test_winners import BACKWARD; from fusedconv.describing import described;"
        "print(described(BACKWARD))"
    )
    printed = {
        python("-c", script, path=Path(__file__).parent, PYTHONHASHSEED=seed).stdout
        for seed in ("1", "2")
    }
    assert printed == {f"{described(BACKWARD)}\n"}


# ---- what is not believed ------------------------------------------------------------------------


def content():
    winners.store(FORWARD, PROCESSOR, SERVED)
    return json.loads(winners.path().read_text())


def with_entry(**changes):
    held = content()
    held["entries"][0].update(changes)
    return json.dumps(held).encode()


DAMAGED = {
    "cut off": lambda: json.dumps(content())[:-20].encode(),
    "empty": lambda: b"",
    "no text": lambda: b"\xff\xfe\x00",
    "a pickle": lambda: b"\x80\x04cposix\nsystem\n(S'touch hostile'\ntR.",
    "a list": lambda: b"[]",
    "fields that nobody knows": lambda: json.dumps({**content(), "code": "1"}).encode(),
    "deeply nested": lambda: b"[" * 100_000,
    "a long integer": lambda: b'{"entries": ' + b"1" * 10_000 + b"}",
    "entries that are no list": lambda: b'{"entries": 3}',
    "an entry that is no object": lambda: b'{"entries": [3]}',
    "a field missing": lambda: b'{"entries": [{"problem": {}}]}',
    "a problem that is code": lambda: with_entry(problem="__import__('os').system('true')"),
    "a number for a name": lambda: with_entry(pieces=[{"parts": ["forward"], "kernel": 3}]),
    "a text for parts": lambda: with_entry(pieces=[{"parts": "forward", "kernel": "torch"}]),
    "no kernels": lambda: with_entry(pieces=[]),
    "a kernel of no parts": lambda: with_entry(pieces=[{"parts": [], "kernel": "torch"}]),
    "control characters": lambda: with_entry(summary="\x1b]0;title\x07"),
    "a long text": lambda: with_entry(device="x" * 5000),
    "times that are not": lambda: with_entry(
        times=[{"parts": ["forward"], "kernel": "torch", "milliseconds": float("nan")}]
    ),
    "a time below zero": lambda: with_entry(
        times=[{"parts": ["forward"], "kernel": "torch", "milliseconds": -1}]
    ),
    "a time that no float holds": lambda: with_entry(
        times=[{"parts": ["forward"], "kernel": "torch", "milliseconds": 10**400}]
    ),
    "versions that are a list": lambda: with_entry(versions=["1"]),
    "a name given twice": lambda: b'{"entries": [], "entries": []}',
    "a problem of no number": lambda: with_entry(problem={"type": float("nan")}),
    "a number beyond floats": lambda: with_entry(problem={"eps": 1.5}).replace(b"1.5", b"1e999"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_or_hostile_file_is_ignored_with_one_warning(name):
    damaged = DAMAGED[name]()
    path = winners.path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(damaged)
    winners.forget()
    with pytest.warns(RuntimeWarning, match="tuned kernels are ignored") as warned:
        assert winners.kept(FORWARD, PROCESSOR) is None
    assert len(warned) == 1
    assert kept(FORWARD) is None  # and no second warning
    winners.store(FORWARD, PROCESSOR, SERVED)
    assert kept(FORWARD) == SERVED
    assert winners.damaged(path).read_bytes() == damaged
    assert not Path("hostile").exists()


def test_a_file_that_cannot_be_read_is_not_replaced(monkeypatch):
    winners.store(FORWARD, PROCESSOR, SERVED)
    before = winners.path().read_bytes()

    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(winners, "read", refused)
    with pytest.warns(RuntimeWarning, match="tuned kernels are not kept: .*Permission denied"):
        winners.store(BACKWARD, PROCESSOR, DIVIDED)
    assert winners.path().read_bytes() == before


def test_a_file_that_is_too_large_is_not_read(monkeypatch):
    content()
    monkeypatch.setattr(winners, "_MOST_BYTES", 100)
    with pytest.warns(RuntimeWarning, match="at most 100 bytes"):
        assert kept(FORWARD) is None


def test_a_pipe_is_not_waited_for(folder):
    folder.mkdir(parents=True)
    os.mkfifo(winners.path())
    with pytest.warns(RuntimeWarning, match="expected a file"):
        assert kept(FORWARD) is None


def test_a_file_is_readable_as_the_umask_says():
    before = os.umask(0o027)
    try:
        winners.store(FORWARD, PROCESSOR, SERVED)
    finally:
        os.umask(before)
    assert winners.path().stat().st_mode & 0o777 == 0o640


def test_a_write_that_fails_leaves_the_former_file(monkeypatch):
    winners.store(FORWARD, PROCESSOR, SERVED)

    def fail(*arguments, **keywords):
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(winners.json, "dump", fail)
        with pytest.warns(RuntimeWarning, match="not kept: no space left"):
            winners.store(BACKWARD, PROCESSOR, DIVIDED)
    assert kept(FORWARD) == SERVED
    assert {path.name for path in winners.path().parent.iterdir()} <= {
        winners.path().name, f"{winners.path().name}.lock"
    }  # fmt: skip


def test_a_file_that_a_link_leads_to_is_written(folder, tmp_path):
    folder.mkdir(parents=True)
    beside = tmp_path / "beside.json"
    winners.path().symlink_to(beside)
    winners.store(FORWARD, PROCESSOR, SERVED)
    winners.store(BACKWARD, PROCESSOR, DIVIDED)
    assert winners.path().is_symlink()
    assert not beside.is_symlink()
    assert len(winners.read(beside)) == 2


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("folder", "Is a directory"),
        ("pipe", "Not a regular file"),
        ("link to the pipe", "Not a regular file"),
        ("circle", "Too many levels of symbolic links"),
        ("nowhere/exported.json", "No such file or directory"),
    ],
)
def test_what_is_no_file_is_not_replaced(tmp_path, place, message):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link to the pipe").symlink_to(tmp_path / "pipe")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match=message):
        winners.write(tmp_path / place, {})
    assert sorted(tmp_path.iterdir()) == before
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_an_export_to_what_is_no_file_ends_in_one_line(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert invoke("cache", "export", pipe, status=1) == f"Error: {pipe}: Not a regular file\n"
    file = tmp_path / "nowhere" / "exported.json"
    output = invoke("cache", "export", file, status=1)
    assert output == f"Error: {file}: No such file or directory\n"


# ---- many processes ------------------------------------------------------------------------------

TUNE = """
import sys
import torch, fusedconv
from fusedconv import functional
print("ready", flush=True)
sys.stdin.readline()
with fusedconv.autotune():
    for channels in map(int, sys.argv[1:]):
        functional.group_norm(torch.ones(1, channels, 3), 1)
"""


def test_processes_that_tune_at_once_keep_the_winners_of_all():
    shares = [("2", "3", "4"), ("5", "6", "7")]
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", TUNE, *share],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for share in shares
    ]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    for process in started:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in started:
        assert process.communicate(timeout=120)[1] == ""
        assert process.returncode == 0
    winners.forget()
    channels = {entry.problem["channels"] for entry in winners.entries().values()}
    assert channels == {2, 3, 4, 5, 6, 7}


# ---- commands ------------------------------------------------------------------------------------


def invoke(*arguments, status=0):
    result = CliRunner().invoke(main, list(map(str, arguments)))
    assert result.exit_code == status, result.output
    return result.output


def test_the_cache_is_shown_exported_imported_and_cleared(tmp_path):
    assert invoke("cache", "path").strip() == str(winners.path())
    winners.store(FORWARD, PROCESSOR, SERVED)
    shown = invoke("cache", "show")
    assert "torch" in shown
    assert "0.5" in shown
    file = tmp_path / "exported.json"
    assert invoke("cache", "export", file) == "1 problems\n"
    assert invoke("cache", "clear") == "1 problems forgotten\n"
    assert kept(FORWARD) is None
    winners.store(BACKWARD, PROCESSOR, DIVIDED)
    assert invoke("cache", "import", file) == "1 problems\n"
    assert kept(FORWARD) == SERVED
    assert kept(BACKWARD) == DIVIDED


def test_a_damaged_file_is_not_shown_or_exported_as_if_nothing_were_kept(tmp_path):
    assert invoke("cache", "export", tmp_path / "of nothing") == "0 problems\n"
    file = tmp_path / "exported.json"
    file.write_text("before")
    winners.path().parent.mkdir(parents=True, exist_ok=True)
    winners.path().write_text("{}")
    for command in (("show",), ("export", file)):
        output = invoke("cache", *command, status=1)
        assert output == f"Error: {winners.path()}: expected fields entries\n"
    assert file.read_text() == "before"


@pytest.mark.parametrize(
    ("name", "message"),
    [("a list", "expected fields entries"), ("no kernels", "expected a kernel at least")],
)
def test_a_damaged_file_is_not_imported(tmp_path, name, message):
    winners.store(FORWARD, PROCESSOR, SERVED)
    file = tmp_path / "damaged.json"
    file.write_bytes(DAMAGED[name]())
    assert invoke("cache", "import", file, status=1) == f"Error: {file}: {message}\n"
    assert kept(FORWARD) == SERVED


def test_a_damaged_file_is_warned_of_in_a_line(folder):
    folder.mkdir(parents=True)
    winners.path().write_text("{}")
    shown = python("-m", "fusedconv", "explain", "--device", "cpu")  # of which pytest hears nothing
    assert shown.returncode == 0
    assert shown.stderr == (
        f"Warning: {winners.path()}: tuned kernels are ignored: expected fields entries\n"
    )


def test_a_file_of_shapes_is_tuned(tmp_path):
    file = tmp_path / "shapes"
    file.write_text(
        '{"out-channels": 0, "batch": 1, "in-channels": 4, "spatial": [3, 5], "num-groups": 2}\n\n'
        '{"batch": 1, "in-channels": 4, "out-channels": 4, "spatial": 5, "num-groups": 2, '
        '"bias": false, "gradients": true}\n'
        '{"batch": 2, "in-channels": 4, "out-channels": 4, "spatial": 5, "num-groups": 2, '
        '"bias": true, "gradients": false}\n'
    )
    lines = invoke("tune", file, "--device", "cpu").splitlines()
    assert len(lines) == 4
    assert all(line.endswith("(tuned)") for line in lines)
    winners.forget()
    assert {entry.summary for entry in winners.entries().values()} == {
        line.rpartition(": ")[0] for line in lines
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: "),
        ("[1]", "line 1: got [1], expected an object"),
        ('{"in-channels": "x"}', "line 1: Invalid value for '--in-channels'"),
        ('{"no-such": 1}', "line 1: No such option"),
        ('{"help": true}', "line 1: got help, expected what a problem consists of"),
        ('{"device": "cuda"}', "line 1: got device, expected what a problem consists of"),
        ('{"arch": 80}', "line 1: got arch, expected what a problem consists of"),
        ("", "shapes: got no line, expected one a problem"),
        ("\n \n", "shapes: got no line, expected one a problem"),
    ],
)
def test_a_line_that_is_no_shape_is_named(tmp_path, line, message):
    file = tmp_path / "shapes"
    file.write_text(line)
    output = " ".join(invoke("tune", file, "--device", "cpu", status=2).split())
    assert message in output


def test_a_suite_is_tuned(monkeypatch):
    suite = dataclasses.replace(
        benchmark.SUITES["systems"]["cpu"], workloads=("system3",), precisions=("fp32",)
    )
    monkeypatch.setitem(benchmark.SUITES["systems"], "cpu", suite)
    lines = invoke("tune", "--device", "cpu", "--size", "small").splitlines()
    # Forward alone, and forward and backward, in each layout.
    assert len(lines) >= 4
    assert {line.rpartition(" ")[2] for line in lines} == {"(tuned)"}


SHAPE = '{"out-channels": 0, "batch": 1, "in-channels": 4, "spatial": 3, "num-groups": 2}\n'


def test_a_size_is_of_workloads_alone(tmp_path):
    file = tmp_path / "shapes"
    file.write_text(SHAPE)
    output = invoke("tune", file, "--device", "cpu", "--size", "small", status=2)
    assert "'--size': expected none with FILE" in " ".join(output.split())


@pytest.mark.filterwarnings("ignore:.*tuned kernels are:RuntimeWarning")
def test_tuning_that_nothing_keeps_fails(monkeypatch, tmp_path):
    file = tmp_path / "shapes"
    file.write_text(SHAPE)
    monkeypatch.setenv("FUSEDCONV_CACHE_DIR", str(file))
    output = invoke("tune", file, "--device", "cpu", status=1)
    assert "(tuned), not kept\nError: 1 of 1 problems could not be timed or kept" in output


def test_tuning_that_finds_no_memory_fails(monkeypatch, tmp_path):
    def fails(*arguments):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(tuning, "measure", fails)
    file = tmp_path / "shapes"
    file.write_text(SHAPE)
    output = invoke("tune", file, "--device", "cpu", status=1)
    assert "(cost), not tuned: out of memory\nError: 1 of 1 problems could not be" in output


def test_a_problem_that_cannot_be_timed_is_given_with_the_reason(tmp_path):
    file = tmp_path / "shapes"
    file.write_text(SHAPE.replace('"batch": 1', '"batch": 0') + SHAPE)
    first, second, last = invoke("tune", file, "--device", "cpu", status=1).splitlines()
    assert first.endswith(", not tuned: its tensors are empty")
    assert second.endswith("(tuned)")
    assert last.startswith("Error: 1 of 2 problems could not be timed or kept in ")


def test_a_problem_of_two_lines_is_one(tmp_path, monkeypatch):
    file = tmp_path / "shapes"
    file.write_text(SHAPE * 2)
    assert len(invoke("tune", file, "--device", "cpu").splitlines()) == 1
    monkeypatch.setattr(tuning, "measure", lambda problem, device: None)
    invoke("cache", "clear")
    selection._tuned.clear()
    output = invoke("tune", file, "--device", "cpu", status=1)
    assert "not tuned: no kernel that serves it could be run\nError: 1 of 1 problems" in output


def test_a_file_of_shapes_is_read_before_anything_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "measure", lambda *arguments: pytest.fail("timed"))
    file = tmp_path / "shapes"
    file.write_text(f"{SHAPE}nonsense\n")
    assert "line 2: " in invoke("tune", file, "--device", "cpu", status=2)


def test_nothing_is_tuned_where_a_kernel_is_forced(force):
    force("torch")
    assert "FUSEDCONV_KERNEL is set" in invoke("tune", "--device", "cpu", status=1)
