"""Devices as records: what kernels say of devices that are not here, and that they touch none."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from problems import backward_problem, explained, geometry_of, group_norm_stage, problem

import fusedconv
from fusedconv import _C
from fusedconv.device import KNOWN, PROCESSOR, Device, cuda_device, device_record
from fusedconv.kernels import built_in
from fusedconv.kernels.cuda import conditions
from fusedconv.precision import COMPILED_DTYPES, precisions_of
from fusedconv.problem import Bias, Residual
from fusedconv.selection import choose

T4, H200 = KNOWN[75], KNOWN[90]


def passes() -> list:
    """Passes of many kinds: convolutions and normalisations, forward and backward."""
    weight = torch.empty(64, 64, 3, 3)
    convolutions = [
        {"conv": geometry_of(weight)},
        {"conv": geometry_of(weight, stride=(2, 2))},
        {"conv": None},
        {"conv": None, "norm": None},
        {"conv": geometry_of(weight), "epilogue": (Bias(), Residual())},
    ]
    found: list = []
    for dtype, layout, changes in itertools.product(
        (*COMPILED_DTYPES, torch.float64), ("nchw", "nhwc", "strided"), convolutions
    ):
        for precision in precisions_of(dtype):
            fields = {
                "dtype": dtype,
                "output_dtype": dtype,
                "precision": precision,
                "layout": layout,
                "channels": 64,
                "spatial": (32, 32),
                "norm": group_norm_stage(8, affine_dtype=dtype),
                **changes,
            }
            found.append(problem(**fields))
            saving = problem(**fields, save=True)
            found += [saving, backward_problem(saving)]
    return found


PASSES = passes()
RECORDS = [PROCESSOR, *KNOWN.values()]


@pytest.fixture
def no_device(monkeypatch):
    """Whatever asks CUDA for something raises."""

    def refuse(*arguments, **keywords):
        raise AssertionError("a device was touched")

    names = (
        "current_device", "current_stream", "device_count", "get_device_capability",
        "get_device_name", "get_device_properties", "init", "is_available", "mem_get_info",
        "set_device", "synchronize", "_lazy_init",
    )  # fmt: skip
    for name in names:
        monkeypatch.setattr(torch.cuda, name, refuse)
    if hasattr(_C, "query_device"):
        monkeypatch.setattr(_C, "query_device", refuse)
    monkeypatch.setattr(fusedconv.device, "device_record", refuse)


@pytest.mark.parametrize("record", RECORDS, ids=str)
def test_supports_and_cost_touch_no_device(record, no_device):
    for one in PASSES:
        for part in one.parts:
            piece = one if part == "forward" else one.part((part,))
            for kernel in built_in():
                if part not in kernel.computes:
                    continue
                support = kernel.supports(piece, record)
                assert bool(support) != bool(support.reason), (kernel.name, support)
                if support:
                    assert 0 <= kernel.cost(piece, record) < float("inf"), kernel.name
                else:
                    assert len(support.reason) > 10, kernel.name


@pytest.mark.parametrize("record", RECORDS, ids=str)
def test_every_pass_has_kernels_on_every_device(record, no_device):
    for one in PASSES:
        choice = choose(one, record)
        assert {part for piece, _ in choice.chosen for part in piece.parts} == set(one.parts)
        assert choice.cost > 0 or not str(one).partition(" on ")[0]


def test_an_old_device_gets_torchs_operators_with_the_reason(monkeypatch):
    """The condition comes behind the build's own, which this test sets aside."""
    monkeypatch.setattr(conditions, "HAS_CUDA", True)
    reason = "needs compute capability 8.0, the device has 7.5"
    for one in PASSES:
        for explanation in explained(one, device=T4):
            assert set(explanation.provider.split(" + ")) == {"torch"}
            for _, candidates in explanation.candidates:
                assert candidates[0].kernel.provider == "torch"
                for candidate in candidates[1:]:
                    if candidate.kernel.provider == "groupnorm_cuda" and one.parts == ("epilogue",):
                        assert candidate.support.reason == reason
    normalisation = problem(conv=None, channels=64, norm=group_norm_stage(8))
    (explanation,) = explained(normalisation, device=T4)
    assert f"groupnorm_resident and 2 more of groupnorm_cuda: {reason}" in str(explanation)
    assert "T4 (sm_75)" in str(explanation)


@pytest.mark.skipif(conditions.HAS_CUDA, reason="this build has CUDA's kernels")
def test_a_build_without_cuda_says_so_of_every_device():
    (explanation,) = explained(problem(conv=None), device=H200)
    assert explanation.provider == "torch"
    reason = "fusedconv was built without CUDA"
    assert f"groupnorm_resident and 2 more of groupnorm_cuda: {reason}" in str(explanation)


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_a_family_that_the_build_lacks_says_so(family):
    if family in conditions.FAMILIES:
        pytest.skip("this build has the family")
    (explanation,) = explained(problem(), device=H200)
    refused = {c.kernel.provider: c.support for _, cs in explanation.candidates for c in cs}
    support = refused[f"cutlass_{family}"]
    assert not support
    expected = "this build lacks the family" if conditions.HAS_CUDA else "was built without CUDA"
    assert expected in support.reason


@pytest.mark.skipif(
    not {"sm80", "sm90"} <= set(conditions.FAMILIES), reason="this build lacks families of kernels"
)
def test_an_h200_is_explained_on_any_machine(no_device):
    weight = torch.empty(64, 64, 3, 3)
    one = problem(
        conv=geometry_of(weight), channels=64, spatial=(128, 128), batch=16, precision="tf32",
        norm=group_norm_stage(8),
    )  # fmt: skip
    (explanation,) = explained(one, device=H200)
    assert explanation.provider in ("cutlass_sm80", "cutlass_sm90")
    assert "H200 (sm_90)" in str(explanation)


# ---- records -------------------------------------------------------------------------------------


def test_records_are_frozen_hashable_and_equal_by_value():
    assert dataclasses.replace(H200) == H200
    assert hash(H200) == hash(dataclasses.replace(H200))
    assert len({*KNOWN.values(), dataclasses.replace(H200, index=1), PROCESSOR}) == len(KNOWN) + 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        H200.index = 1


@pytest.mark.parametrize("architecture", KNOWN)
def test_known_devices_are_listed_by_their_architecture(architecture):
    record = KNOWN[architecture]
    assert record.architecture == architecture
    assert record.type == "cuda"
    assert str(record) == f"{record.name} (sm_{architecture})"
    for field in dataclasses.fields(Device):
        if field.name not in ("type", "name", "index", "product_flops", "vector_bytes"):
            assert getattr(record, field.name) > 0, field.name
    assert record.product_flops == record.vector_bytes == 0, "of processors"
    assert record.copy_bytes < record.dram_bytes
    assert record.fp32_flops <= record.tf32_flops < record.fp16_flops


def test_an_h200s_rates_are_its_data_sheets():
    """Dense: 989 TFLOP/s in 16 bits, 494 in TF32, 67 on the vector units; 4.8 TB/s."""
    assert H200.fp16_flops == pytest.approx(989e12, rel=0.01)
    assert H200.tf32_flops == pytest.approx(494e12, rel=0.01)
    assert H200.fp32_flops == pytest.approx(67e12, rel=0.1)
    assert H200.dram_bytes == 4.8e12
    assert H200.tensor_flops("fp16") == H200.tensor_flops("bf16") == H200.fp16_flops
    assert H200.tensor_flops("tf32") == H200.tf32_flops == 3 * H200.tensor_flops("fp32")


def test_rates_follow_from_what_a_data_sheet_says():
    data = {"clock_megahertz": 1000, "dram_gigabytes": 1000, "l2_megabytes": 8}
    one = cuda_device("one", 90, 100, **data, shared_kibibytes=100)
    two = cuda_device("two", 90, 200, **data, shared_kibibytes=100)
    assert two.fp16_flops == 2 * one.fp16_flops
    assert two.fp32_flops == 2 * one.fp32_flops
    assert one.dram_bytes == 1e12
    assert one.l2_bytes == 8 << 20
    assert one.shared_bytes == 100 << 10
    assert one.copy_milliseconds(one.copy_bytes) == 1000
    assert cuda_device("new", 130, 100, **data, shared_kibibytes=100).fp16_flops == one.fp16_flops


@pytest.mark.parametrize(("architecture", "cores"), [(75, 64), (80, 64), (86, 128), (87, 128)])
def test_vector_units_of_an_architecture(architecture, cores):
    record = cuda_device(
        "any", architecture, 1, clock_megahertz=1000, dram_gigabytes=1, l2_megabytes=1,
        shared_kibibytes=48,
    )  # fmt: skip
    assert record.fp32_flops == 2 * cores * 1e9


def test_records_of_torchs_devices():
    assert device_record(torch.device("cpu")) is PROCESSOR
    assert str(PROCESSOR) == "processor"
    meta = device_record(torch.device("meta"))
    assert (meta.type, meta.architecture) == ("meta", 0)
    assert choose(problem(conv=None), meta).chosen[0][1].kernel.name == "torch"
