"""The example that trains runs as its users run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import distributed

SCRIPT = Path(__file__).parents[1] / "examples" / "train_decoder.py"


def test_options_are_refused_before_anything_is_trained():
    for option in ("--steps", "--batch"):
        done = subprocess.run(
            [sys.executable, SCRIPT, option, "0"], capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 2
        assert done.stderr.endswith(f"error: argument {option}: got 0, expected at least 1\n")


def test_a_batch_that_processes_do_not_divide_is_refused():
    """Their gradients are averaged, whatever their shares."""
    done = subprocess.run(
        [sys.executable, SCRIPT, "--wrap", "ddp", "--batch", "7"],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "2"},
    )
    assert done.returncode == 2
    assert "--batch: got 7, expected a multiple of 2 processes" in done.stderr


@pytest.mark.parametrize(
    ("wrap", "launched", "message"),
    [
        ("ddp", {}, "--wrap: got ddp without torchrun, expected none"),
        ("none", {"RANK": "0"}, "--wrap: got none under torchrun, expected ddp or fsdp"),
    ],
    ids=["alone", "launched"],
)
def test_processes_are_launched_where_the_model_is_wrapped(wrap, launched, message):
    environment = {key: value for key, value in os.environ.items() if key != "RANK"}
    done = subprocess.run(
        [sys.executable, SCRIPT, "--wrap", wrap],
        capture_output=True,
        text=True,
        timeout=100,
        env={**environment, **launched},
    )
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize("wrap", ["none", "ddp", "fsdp"])
def test_a_decoder_trains_as_eagers_does(wrap, tmp_path):
    if not (distributed.is_available() and distributed.is_gloo_available()):
        pytest.skip("this torch has no torch.distributed with gloo")
    output = tmp_path / "losses.json"
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if wrap != "none" else []
    options = ["--steps", "3", "--batch", "4", "--output", output]
    subprocess.run(
        [sys.executable, *launcher, SCRIPT, "--wrap", wrap, *options],
        check=True,
        timeout=300,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )
    found = json.loads(output.read_text())
    assert len(found["losses"]["fusedconv"]) == 3
    assert found["losses"]["fusedconv"] == pytest.approx(found["losses"]["eager"], rel=1e-4)
    if wrap != "none":
        assert found["largest difference of a gradient from one process's"] < 1e-4
