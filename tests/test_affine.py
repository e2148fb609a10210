"""Weights and biases that torch's GroupNorm refuses on processors: served with every derivative."""

from __future__ import annotations

import pytest
import reference
import torch
from reference import ORDERS

from fusedconv import functional

pytestmark = reference.TORCH_SCRIPTS

LOOSE = {"rtol": 2e-2, "atol": 2e-2}


def tensors(dtype, affine_dtype):
    generator = torch.Generator().manual_seed(3)
    shapes = (((2, 4, 3, 5), dtype), ((4,), affine_dtype), ((4,), affine_dtype))
    return [torch.randn(shape, generator=generator).to(kind) for shape, kind in shapes]


def exact(order):
    def function(x, weight, bias):
        weight = torch.ones(4, dtype=x.dtype) if weight is None else weight
        return reference.group_norm(x, 2, weight, bias, activation="silu", order=order)

    return function


def ours(order):
    def function(x, weight, bias):
        return functional.group_norm(x, 2, weight, bias, activation="silu", order=order)

    return function


def first_and_second(function, given):
    leaves = [each for each in given if each is not None]
    output = function(*given)
    first = torch.autograd.grad(output.pow(3).sum(), leaves, create_graph=True)
    total = sum(gradient.double().pow(2).sum() for gradient in first)
    return [*first, *torch.autograd.grad(total, leaves)]


def first_only(function, given):
    leaves = [each for each in given if each is not None]
    return torch.autograd.grad(function(*given).pow(3).sum(), leaves)


def assert_same(derivatives, order, given):
    mine = [None if each is None else each.requires_grad_() for each in given]
    theirs = [None if each is None else each.detach().double().requires_grad_() for each in given]
    found, expected = derivatives(ours(order), mine), derivatives(exact(order), theirs)
    leaves = [each for each in given if each is not None]
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.dtype == leaves[number % len(leaves)].dtype
        scale = other.detach().abs().max()
        torch.testing.assert_close(one.detach().double() / scale, other.detach() / scale, **LOOSE)


@pytest.mark.parametrize("derivatives", [first_only, first_and_second])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kernel", [None, "torch"])
def test_a_bias_without_a_weight(force, kernel, dtype, order, derivatives):
    if kernel:
        force(kernel)
    x, _, bias = tensors(dtype, dtype)
    assert_same(derivatives, order, [x, None, bias])


@pytest.mark.parametrize("derivatives", [first_only, first_and_second])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kernel", [None, "torch"])
def test_an_affine_dtype_narrower_than_the_inputs(force, kernel, order, derivatives):
    if kernel:
        force(kernel)
    assert_same(derivatives, order, tensors(torch.float32, torch.bfloat16))


@pytest.mark.parametrize("order", ORDERS)
def test_tangents_of_an_affine_dtype_narrower_than_the_inputs(order):
    x, weight, bias = tensors(torch.float32, torch.bfloat16)
    function, expected = ours(order), exact(order)
    _, tangent = torch.func.jvp(lambda x: function(x, weight, bias), (x,), (x.cos(),))
    _, right = torch.func.jvp(
        lambda x: expected(x, weight.double(), bias.double()), (x.double(),), (x.double().cos(),)
    )
    torch.testing.assert_close(tangent.double(), right, **LOOSE)
