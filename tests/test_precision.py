"""The argument ``precision``: what it reaches, for how long it holds, and what it leaves alone."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from problems import backward_problem, conv_geometry, explained, problem

from fusedconv import _C, ConvTransposeActNorm2d, functional, reference
from fusedconv.kernels import torch as torch_provider
from fusedconv.kernels.cuda.gradients import compiled_problem
from fusedconv.precision import (
    COMPILED_DTYPES,
    DTYPES,
    conv_fp32_precision,
    dtype_name,
    precisions_of,
    resolve_precision,
)


@pytest.fixture
def scopes(monkeypatch):
    """The precisions for which torch's switch is set."""
    entered = []
    scope = reference.precision_scope

    def recorded(precision, input):
        entered.append(precision)
        return scope(precision, input)

    for module in (reference, torch_provider):
        monkeypatch.setattr(module, "precision_scope", recorded)
    return entered


@pytest.mark.parametrize("precision", ["tf32", "fp32"])
def test_an_explicit_precision_holds_in_both_passes(scopes, precision, force):
    force("torch")
    x, weight = torch.randn(1, 4, 5, 5), torch.randn(4, 6, 3, 3, requires_grad=True)
    result = functional.conv_transpose_act_norm(x, weight, num_groups=2, precision=precision)
    assert scopes == [precision]
    result.sum().backward()
    assert scopes == [precision, precision]


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("precision", ["tf32", "fp32"])
def test_a_precision_scope_switches_and_restores(precision, outer, newer, monkeypatch):
    if not newer:  # torch 2.6 has the older switch alone
        for name in ("_set_fp32_precision_setter", "_get_fp32_precision_getter"):
            monkeypatch.delattr(torch._C, name, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", outer)
    before = conv_fp32_precision()
    assert before == ("tf32" if outer else "fp32")
    there, here = SimpleNamespace(is_cuda=True), torch.empty(0)
    with reference.precision_scope(precision, there):
        assert conv_fp32_precision() == precision
        with reference.precision_scope("fp16", there):
            assert conv_fp32_precision() == precision
    assert conv_fp32_precision() == before
    with pytest.raises(ZeroDivisionError), reference.precision_scope(precision, there):
        raise ZeroDivisionError
    assert conv_fp32_precision() == before
    with reference.precision_scope(precision, here):
        assert conv_fp32_precision() == before


def test_precision_is_passed_on():
    x = torch.randn(1, 4, 5, 5)
    for precision in (None, "fp32", "tf32"):
        module = ConvTransposeActNorm2d(4, 6, 3, num_groups=2, precision=precision)
        (explanation,) = explained(module, x)
        assert explanation.problem.precision == (precision or "fp32")
        module = ConvTransposeActNorm2d(4, 6, 3, precision=precision)
        for each in (x, x[0]):  # torch's convolution takes a sample without a batch
            (explanation,) = explained(module, each)
            assert explanation.problem.precision == (precision or "fp32")
    with pytest.raises(ValueError, match="precision: got 'half'"):
        ConvTransposeActNorm2d(4, 6, 3, precision="half")(x)


def test_precision_leaves_torchs_switches_as_they_are():
    before = torch.backends.cudnn.allow_tf32
    x = torch.randn(1, 4, 5, 5, requires_grad=True)
    weight = torch.randn(4, 6, 3, 3, requires_grad=True)
    for precision in ("fp32", "tf32"):
        for keywords in ({}, {"stride": 2, "groups": 2}, {"num_groups": 2}):
            wide = {"weight": torch.randn(4, 3, 3, 3)} if "groups" in keywords else {}
            result = functional.conv_transpose_act_norm(
                x, wide.get("weight", weight), precision=precision, **keywords
            )
            result.sum().backward()
            assert torch.backends.cudnn.allow_tf32 == before


# ---- what the switches and dtypes ask for --------------------------------------------------------


@pytest.fixture
def switches():
    """torch's precision switches, put back afterwards."""
    older = torch.backends.cudnn.allow_tf32
    yield torch.backends.cudnn
    if hasattr(torch.backends.cudnn, "conv"):
        torch.backends.cudnn.conv.fp32_precision = "none"
    torch.backends.cudnn.allow_tf32 = older


def test_precision_follows_the_older_switch(switches):
    switches.allow_tf32 = True
    assert conv_fp32_precision() == "tf32"
    assert resolve_precision(torch.float32, "cuda", None) == "tf32"
    switches.allow_tf32 = False
    assert conv_fp32_precision() == "fp32"
    assert resolve_precision(torch.float32, "cuda", None) == "fp32"


@pytest.mark.skipif(
    not hasattr(torch.backends.cudnn, "conv"), reason="this torch has the older switch only"
)
def test_precision_follows_the_newer_switch(switches):
    for older, newer in itertools.product((True, False), ("tf32", "ieee")):
        switches.allow_tf32 = older
        switches.conv.fp32_precision = newer
        assert conv_fp32_precision() == ("tf32" if newer == "tf32" else "fp32"), (older, newer)


def test_precision_argument_overrides_the_switches(switches):
    for allowed in (True, False):
        switches.allow_tf32 = allowed
        assert resolve_precision(torch.float32, "cuda", "fp32") == "fp32"
        assert resolve_precision(torch.float32, "cuda", "tf32") == "tf32"


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(torch.float16, "fp16"), (torch.bfloat16, "bf16"), (torch.float64, "fp64")],
)
def test_precision_of_other_dtypes_is_their_own(dtype, precision):
    assert resolve_precision(dtype, "cuda", None) == precision
    assert resolve_precision(dtype, "cpu", precision) == precision
    with pytest.raises(ValueError, match=rf"precision: got 'tf32'.*{dtype_name(dtype)}.*expected"):
        resolve_precision(dtype, "cuda", "tf32")


def test_processors_compute_float32_in_float32(switches):
    switches.allow_tf32 = True
    assert resolve_precision(torch.float32, "cpu", None) == "fp32"


# ---- one table -----------------------------------------------------------------------------------


def test_compiled_dtypes_are_torchs_by_name():
    assert {dtype_name(dtype): d.name for dtype, d in COMPILED_DTYPES.items()} == {
        d.name: d.name for d in _C.DType
    }
    assert all(isinstance(dtype, torch.dtype) for dtype in COMPILED_DTYPES)


@pytest.mark.parametrize("math", list(_C.Math), ids=lambda math: math.name)
def test_what_a_math_computes_is_a_precision_of_its_dtype(math):
    traits = _C.math_traits(math)
    assert traits.name == math.name
    dtype = DTYPES[traits.precision]
    assert COMPILED_DTYPES[dtype] == traits.dtype
    assert traits.precision in precisions_of(dtype)


@pytest.mark.parametrize("conv", [conv_geometry(), None], ids=["convolution", "norm alone"])
@pytest.mark.parametrize("precision", [p for p in DTYPES if DTYPES[p] in COMPILED_DTYPES])
def test_activations_are_quick_where_operands_are_rounded(precision, conv):
    """Float32 that goes through no product in TF32 keeps the exact forms."""
    dtype = DTYPES[precision]
    forward = problem(conv=conv, dtype=dtype, output_dtype=dtype, precision=precision, save=True)
    exact = precision == "fp32" or (precision == "tf32" and conv is None)
    assert compiled_problem(backward_problem(forward)).quick is not exact


def test_every_dtype_has_precisions():
    assert precisions_of(torch.float32) == ("tf32", "fp32")
    assert precisions_of(torch.int32) == ()
    for dtype in COMPILED_DTYPES:
        assert precisions_of(dtype)
