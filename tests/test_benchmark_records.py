"""Files of the benchmark's records: what they say they were made by, and what is added to them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest
import torch

import fusedconv
from fusedconv import benchmark, selection, winners
from fusedconv.benchmark import records as files

# ---- commits -------------------------------------------------------------------------------------


def git(folder, *arguments) -> str:
    names = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost")
    command = ["git", "-C", str(folder), *names, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def repository(monkeypatch, tmp_path):
    """A repository with a commit, in which the test runs, and a function that puts an empty module
    into it that stands for fusedconv's."""
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    monkeypatch.chdir(tmp_path)
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "somebody's")

    def imported_from(path: str, tracked: bool):
        module = tmp_path / path
        module.parent.mkdir(parents=True)
        module.touch()
        if tracked:
            git(tmp_path, "add", path)
            git(tmp_path, "commit", "-q", "-m", "a package")
        monkeypatch.setattr(fusedconv, "__file__", str(module))

    return imported_from


def test_the_commit_is_that_of_the_checkout_of_the_package(repository, monkeypatch, tmp_path):
    repository("python/fusedconv/__init__.py", tracked=True)
    head = git(tmp_path, "rev-parse", "--short", "HEAD")
    assert files.source_commit() == head
    monkeypatch.chdir("/")
    assert files.source_commit() == head


@pytest.mark.parametrize("tracked", [False, True], ids=["ignored", "tracked"])
def test_an_installed_package_has_no_commit_of_the_repository_around_it(repository, tracked):
    repository(".venv/lib/site-packages/fusedconv/__init__.py", tracked)
    assert files.source_commit() == fusedconv.__version__


def test_without_git_the_version_stands_for_the_commit(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert files.source_commit() == fusedconv.__version__


# ---- files ---------------------------------------------------------------------------------------


def test_a_file_that_a_link_leads_to_is_written(tmp_path):
    path, beside = tmp_path / "figures.json", tmp_path / "beside.json"
    path.symlink_to(beside)
    files.check_writable(path)
    files.write(path, {}, [])
    assert path.is_symlink()
    assert files.read(beside) == []


def test_a_pipe_is_no_output(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="Not a regular file"):  # and is not read
        files.check_writable(tmp_path / "pipe")


# ---- builds --------------------------------------------------------------------------------------


def measured(path, **options):
    return benchmark.run(
        path,
        workloads=["system3"],
        precisions=["fp32"],
        layouts=["nchw"],
        passes=["forward"],
        device=torch.device("cpu"),
        seconds=0.0,
        least=1,
        small=True,
        commit="abc",
        **{"contenders": ["eager"], **options},
    )


def test_what_was_chosen_otherwise_is_measured_anew(tmp_path, monkeypatch):
    path = tmp_path / "figures.json"
    monkeypatch.setenv("FUSEDCONV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(selection, "_tuned", {})
    ours = {"contenders": ["fusedconv"], "resume": True}
    for autotune, forced, expected in (("0", "", "cost"), ("1", "", "tuned"), ("1", "cpu", "cpu")):
        monkeypatch.setenv("FUSEDCONV_AUTOTUNE", autotune)
        monkeypatch.setenv("FUSEDCONV_KERNEL", forced)
        (record,) = measured(path, **ours)
        assert record["chosen_by"] == expected
        assert measured(path, **ours) == []
    # What was tuned is used without being asked for.
    monkeypatch.setenv("FUSEDCONV_KERNEL", "")
    (record,) = measured(path, **ours)
    assert record["chosen_by"] == "tuned"
    monkeypatch.setenv("FUSEDCONV_AUTOTUNE", "0")
    assert measured(path, **ours) == []


def test_what_another_build_measured_is_measured_anew(tmp_path, monkeypatch):
    path = tmp_path / "figures.json"
    (record,) = measured(path)
    assert record["fusedconv"] == json.loads(path.read_text())["header"]["fusedconv"]
    assert record["fusedconv"] == winners.build()
    assert measured(path, resume=True) == []
    monkeypatch.setattr(winners, "build", lambda: "0.1.0, build another")
    (again,) = measured(path, resume=True)
    assert again["fusedconv"] == "0.1.0, build another"
    assert measured(path, resume=True) == []
