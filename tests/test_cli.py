"""The command line on a machine without a GPU."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

import fusedconv
from fusedconv.cli import main


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(main, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_info_says_what_was_compiled():
    output = invoke("info")
    assert fusedconv.__version__ in output
    assert torch.__version__ in output
    expected = "compiled for" if fusedconv.build["cuda"] else "not compiled"
    assert expected in output


def test_list_names_every_provider():
    output = invoke("list")
    for provider in ("torch", "cpu", "cutlass_sm80", "groupnorm_cuda"):
        assert provider in output


@pytest.mark.parametrize("system", ["system1", "system2", "system3"])
def test_explain_needs_no_gpu(system):
    output = invoke("explain", "--system", system, "--arch", "90")
    assert "sm_90" in output
    if fusedconv.build["cuda"]:
        provider = "groupnorm_cuda" if system == "system3" else "cutlass_sm80"
        assert f"provider {provider}" in output
    else:
        assert "provider torch" in output
        assert "built without CUDA" in output


def test_explain_gives_the_reason_of_a_refusal():
    output = invoke("explain", "--stride", "2")
    assert "provider torch" in output
    assert "stride is (2, 2)" in output or "built without CUDA" in output


def test_explain_on_the_processor_chooses_its_kernel():
    output = invoke("explain", "--device", "cpu", "--precision", "bf16", "--system", "system1")
    assert "cpu_group_norm" in output.splitlines()[1]


def test_bad_values_are_refused():
    result = CliRunner().invoke(main, ["explain", "--spatial", "a,b"])
    assert result.exit_code == 2
    assert "expected integers between commas" in result.output


def test_demo_compares_with_eager():
    output = invoke("demo", "--quick")
    for title in ("ConvTranspose2d", "ConvTranspose3d", "GroupNorm"):
        assert title in output


def test_bench_writes_records(tmp_path):
    path = tmp_path / "figures.json"
    arguments = ["bench", "--small", "--workload", "system3", "--precision", "fp32"]
    arguments += ["--seconds", "0.01", "--least", "2", "--output", str(path)]
    arguments += ["--contender", "fusedconv", "--contender", "eager"]
    output = invoke(*arguments, "--layout", "nchw", "--commit", "abc")
    assert output.count("system3 forward") == 4
    written = json.loads(path.read_text())
    assert written["header"]["commit"] == "abc"
    assert len(written["records"]) == 4
    # Another layout is added, the same cell replaced.
    invoke(*arguments, "--layout", "nhwc", "--pass", "forward")
    invoke(*arguments, "--layout", "nhwc", "--pass", "forward")
    assert len(json.loads(path.read_text())["records"]) == 6
