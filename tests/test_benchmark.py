"""The benchmark measures what it says."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fusedconv import benchmark
from fusedconv.models import SYSTEMS
from fusedconv.testing import relative_error, sample_error

FIELDS = {
    "workload",
    "pass",
    "dtype",
    "precision",
    "layout",
    "contender",
    "kernel",
    "median_ms",
    "p10_ms",
    "p90_ms",
    "floor_ms",
    "peak_extra_bytes",
    "error_fp64",
}


@pytest.mark.parametrize("name", ["system1", "system2"])
def test_rewrite_is_the_same_function(name):
    system = SYSTEMS[name]
    original = system.original(*system.init_arguments).double()
    rewrite = benchmark.Rewrite(original, F.gelu if name == "system1" else F.relu)
    x = torch.rand((1, 64, *(5, 6, 7)[: len(system.input_shape) - 2]), dtype=torch.float64)
    assert relative_error(rewrite(x), original(x)) < 1e-13


def test_records_have_every_field_and_weights_may_change():
    records = benchmark.run(
        None,
        workloads=["system1"],
        precisions=["fp32"],
        layouts=["nchw"],
        contenders=["fusedconv", "eager", "rewrite"],
        device=torch.device("cpu"),
        seconds=0.01,
        least=2,
        small=True,
    )
    assert len(records) == 6
    for record in records:
        assert record.keys() >= FIELDS
        assert record["p10_ms"] <= record["median_ms"] <= record["p90_ms"]
        assert record["error_fp64"] < 1e-6
        assert record["error_fp64_after"] < 1e-6


def test_a_failing_peer_is_recorded_and_ours_is_raised(monkeypatch):
    def fail(contender, system, original):
        raise RuntimeError(f"{contender} broke")

    monkeypatch.setattr(benchmark, "_build", fail)
    arguments = dict(
        workloads=["system3"],
        precisions=["fp32"],
        layouts=["nchw"],
        passes=["forward"],
        device=torch.device("cpu"),
        small=True,
    )
    (record,) = benchmark.run(None, contenders=["eager"], **arguments)
    assert record["error"] == "RuntimeError: eager broke"
    assert record["median_ms"] is None
    with pytest.raises(RuntimeError, match="fusedconv broke"):
        benchmark.run(None, contenders=["fusedconv"], **arguments)


def test_floors():
    rates = {"copy": 4e12, "tf32": 3e14, "fp32": 5e13, "fp16": 6e14, "bf16": 6e14}
    gigabyte = 10**9
    assert benchmark.floor_ms(0, gigabyte, gigabyte, "fp32", "forward", rates) == pytest.approx(0.5)
    both = benchmark.floor_ms(0, gigabyte, gigabyte, "fp32", "forward_backward", rates)
    assert both == pytest.approx(1.25)
    flops = 3 * 10**11
    assert benchmark.floor_ms(flops, 8, 8, "tf32", "forward", rates) == pytest.approx(1.0)
    assert benchmark.floor_ms(flops, 8, 8, "fp32", "forward", rates) == pytest.approx(3.0)
    assert benchmark.floor_ms(flops, 8, 8, "bf16", "forward_backward", rates) == pytest.approx(1.5)


def test_error_of_a_sample_shows():
    system = SYSTEMS["system3"]
    original = system.original(*system.init_arguments)
    x = torch.rand(5, 64, 6, 6)
    actual = original(x).detach()
    assert sample_error(original, x, actual) < 1e-6
    actual[-1, 3] += 0.5
    assert sample_error(original, x, actual) > 1e-2
    assert sample_error(original, x, actual, samples=[0, 1]) < 1e-6
