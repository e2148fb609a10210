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
        provider = "groupnorm_cuda" if system == "system3" else "cutlass_sm90"
        assert f"provider {provider}" in output
        if system != "system3":
            assert "provider cutlass_sm80" in invoke("explain", "--system", system, "--arch", "80")
    else:
        assert "provider torch" in output
        assert "built without CUDA" in output


LARGE = "--batch 112 --in-channels 64 --spatial 512,512"
SMALL = "--batch 2 --in-channels 1280 --spatial 16,16 --num-groups 32 --precision fp16"


@pytest.mark.skipif(not fusedconv.build["cuda"], reason="fusedconv was built without CUDA")
@pytest.mark.parametrize(
    ("arguments", "kernel"),
    [
        (LARGE, "groupnorm_streamed"),
        (f"{LARGE} --precision bf16", "groupnorm_streamed"),
        (f"{LARGE} --arch 80", "groupnorm_two_pass"),
        (f"{LARGE} --layout nhwc", "groupnorm_two_pass"),
        (f"{LARGE} --num-groups 1", "groupnorm_two_pass"),
        (SMALL, "groupnorm_resident"),
        (f"{SMALL} --layout nhwc", "groupnorm_resident"),
        ("--batch 4 --in-channels 64 --spatial 255,255", "groupnorm_two_pass"),
    ],
)
def test_explain_chooses_the_group_norm_by_size_and_layout(arguments, kernel):
    """On a machine without a GPU, an H200 is assumed."""
    output = invoke("explain", "--out-channels", "0", *arguments.split())
    assert kernel in output.splitlines()[1], output


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
