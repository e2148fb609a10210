"""The argument ``precision``: what it reaches, for how long it holds, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch
from problems import explained

from fusedconv import ConvTransposeActNorm2d, functional
from fusedconv.kernels import torch_reference
from fusedconv.problem import conv_fp32_precision


@pytest.fixture
def scopes(monkeypatch):
    """The precisions for which torch_reference.precision_scope is entered."""
    entered = []
    scope = torch_reference.precision_scope

    def recorded(precision):
        entered.append(precision)
        return scope(precision)

    monkeypatch.setattr(torch_reference, "precision_scope", recorded)
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
    with torch_reference.precision_scope(precision):
        assert conv_fp32_precision() == precision
        with torch_reference.precision_scope("fp16"):
            assert conv_fp32_precision() == precision
    assert conv_fp32_precision() == before
    with pytest.raises(ZeroDivisionError), torch_reference.precision_scope(precision):
        raise ZeroDivisionError
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
