"""The compiled module called directly: enums by name, arguments checked, memory left alone."""

from __future__ import annotations

import pytest
import reference
import torch

from fusedconv import _C, device
from fusedconv.activations import ACTIVATIONS, COMPILED
from fusedconv.functional import group_norm
from fusedconv.precision import COMPILED_DTYPES

#: The arguments of ``_C.GroupNormProblem``.
COMPILED_PROBLEM = {
    "batch": 3,
    "channels": 6,
    "pixels": 35,
    "groups": 3,
    "eps": 1e-5,
    "input_layout": _C.Layout.nchw,
    "output_layout": _C.Layout.nchw,
    "dtype": _C.DType.float32,
    "output_dtype": _C.DType.float32,
    "affine_dtype": _C.DType.float32,
    "activation_before": _C.Activation.identity,
    "activation_after": _C.Activation.identity,
}


@pytest.mark.parametrize("dtype", COMPILED_DTYPES, ids=str)
def test_nothing_outside_the_output_is_written(dtype):
    """The binding itself, on views into larger memory with guards on both sides."""
    guard, shape, groups = 64, (3, 6, 5, 7), 3
    x = torch.randn(shape).to(dtype)
    compiled = COMPILED_DTYPES[dtype]
    memory = torch.full((x.numel() + 2 * guard,), 77.0, dtype=dtype)
    statistics = torch.full((2, 9 + 2 * guard), 77.0)
    _C.cpu.group_norm(
        _C.GroupNormProblem(
            **{**COMPILED_PROBLEM, "dtype": compiled, "output_dtype": compiled, "groups": groups}
        ),
        input=x.data_ptr(),
        output=memory[guard:].data_ptr(),
        weight=0,
        bias=0,
        mean=statistics[0, guard:].data_ptr(),
        rstd=statistics[1, guard:].data_ptr(),
        threads=2,
    )
    for row in (memory, *statistics):
        assert (row[:guard] == 77).all()
        assert (row[-guard:] == 77).all()
    assert torch.equal(memory[guard:-guard].reshape(shape), group_norm(x, groups))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"groups": 4}, "channels: got 6, which groups = 4 does not divide"),
        ({"groups": 0}, "groups: got 0, expected"),
        ({"batch": -1}, "batch: got -1, expected"),
        ({"pixels": -1}, "pixels: got -1, expected"),
        ({"eps": float("nan")}, "eps: got nan, expected"),
    ],
    ids=str,
)
def test_the_binding_checks_its_arguments(change, text):
    x, output = torch.zeros(3, 6, 35), torch.empty(3, 6, 35)
    absent = dict.fromkeys(("weight", "bias", "mean", "rstd"), 0)
    arguments = {"input": x.data_ptr(), "output": output.data_ptr(), **absent, "threads": 1}
    problem = _C.GroupNormProblem(**COMPILED_PROBLEM)
    _C.cpu.group_norm(problem, **arguments)
    with pytest.raises(ValueError, match=text):
        _C.cpu.group_norm(_C.GroupNormProblem(**{**COMPILED_PROBLEM, **change}), **arguments)
    for name, value, text in (
        ("input", 0, "input: got null, expected"),
        ("output", 0, "output: got null, expected"),
        ("threads", 0, "threads: got 0, expected"),
    ):
        with pytest.raises(ValueError, match=text):
            _C.cpu.group_norm(problem, **{**arguments, name: value})


@pytest.mark.parametrize(
    "name", ["input_layout", "dtype", "affine_dtype", "activation_before", "activation_after"]
)
@pytest.mark.parametrize("value", [0, 99, None, "nchw"])
def test_what_has_names_is_given_by_its_enum(name, value):
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        _C.GroupNormProblem(**{**COMPILED_PROBLEM, name: value})


# ---- what has a name is bound once ---------------------------------------------------------------


def test_activations_have_the_names_that_calls_use():
    assert [member.name for member in _C.Activation] == list(COMPILED)
    assert set(COMPILED) <= set(ACTIVATIONS)
    assert ACTIVATIONS[0] == "identity"
    assert {name or "identity" for name in reference.ACTIVATIONS} == set(ACTIVATIONS)


def test_layouts_and_dtypes_have_the_names_that_problems_use():
    assert [member.name for member in _C.Layout] == ["nchw", "nhwc"]
    for member in _C.DType:
        assert COMPILED_DTYPES[getattr(torch, member.name)] == member


@pytest.mark.parametrize("record", device.KNOWN.values(), ids=lambda record: record.name)
def test_a_device_is_handed_on_field_by_field(record):
    compiled = record.compiled
    assert compiled.architecture == record.architecture
    assert compiled.multiprocessors == record.multiprocessors
    assert compiled.shared_bytes == record.shared_bytes
    assert compiled.l2_bytes == record.l2_bytes
    assert compiled.dram_bytes_per_second == record.dram_bytes
