"""torch.library operators: schemas, fake implementations, what is saved, determinism, purity."""

from __future__ import annotations

import itertools

import pytest
import torch
from operators import (
    CONV,
    CONV_CASES,
    NORM,
    NORM_CASES,
    conv_arguments,
    norm_arguments,
    of_fakes,
)
from reference import ACTIVATIONS, LAYOUTS, ORDERS, channels_last, misaligned, strided
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedconv import ConvTransposeActNorm2d, GroupNorm, functional
from fusedconv.models import SYSTEMS

# Of torch's own check, in later versions.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

# ---- registration --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CONV_CASES)
def test_opcheck_of_the_convolution(case):
    torch.library.opcheck(CONV, conv_arguments(**CONV_CASES[case], save=False))
    torch.library.opcheck(CONV, conv_arguments(**CONV_CASES[case], save=True))


@pytest.mark.parametrize(
    "case",
    [
        "system 1", "after", "no norm", "channels last", "channels last weight", "3D", "stride",
        "bfloat16",
    ],
)  # fmt: skip
def test_opcheck_of_the_convolution_with_gradients(case):
    # Every test of opcheck but the one that compares gradients bit by bit where the order of sums
    # is the compiled graph's to choose; test_gradients compares values.
    torch.library.opcheck(CONV, conv_arguments(**CONV_CASES[case], save=True, requires_grad=True))


@pytest.mark.parametrize("case", NORM_CASES)
def test_opcheck_of_group_norm(case):
    torch.library.opcheck(NORM, norm_arguments(**NORM_CASES[case]))
    torch.library.opcheck(NORM, norm_arguments(**NORM_CASES[case], requires_grad=True))


@pytest.mark.parametrize("case", NORM_CASES)
@pytest.mark.parametrize("needs", [[True, True, True], [True, False, False], [False, True, True]])
def test_opcheck_of_the_backward_of_group_norm(case, needs):
    arguments = norm_arguments(**NORM_CASES[case])
    output, mean, rstd = NORM(*arguments)
    if arguments[2] is None:  # no weight, no bias
        needs = [needs[0], False, False]
    torch.library.opcheck(
        torch.ops.fusedconv.group_norm_backward,
        (torch.randn_like(output), mean, rstd, needs, *arguments),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize("case", CONV_CASES)
def test_opcheck_of_the_backward_of_the_convolution(case):
    *arguments, save = conv_arguments(**CONV_CASES[case], save=True)
    output, *saved = CONV(*arguments, save)
    bias, affine = arguments[2] is not None, arguments[11] is not None
    everything = [True, True, bias, affine, affine]
    for needs in (everything, [True, *[False] * 4], [False, *everything[1:]]):
        torch.library.opcheck(
            torch.ops.fusedconv.conv_transpose_act_norm_backward,
            (torch.randn_like(output), *saved, needs, *arguments),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_what_is_not_saved_is_empty():
    output, *saved = CONV(*conv_arguments(save=False))
    assert output.shape == (2, 6, 5, 5)
    assert [tensor.numel() for tensor in saved] == [0, 0, 0]
    _, conv_output, mean, rstd = CONV(*conv_arguments(save=True))
    assert conv_output.shape == (2, 6, 5, 5)
    assert mean.shape == rstd.shape == (2, 2)
    assert mean.dtype == rstd.dtype == torch.float32


@pytest.mark.parametrize("kernel", ["torch", "cpu"])
@pytest.mark.parametrize("order", ORDERS)
def test_what_is_saved_is_what_the_names_say(kernel, order, force):
    force(kernel)
    arguments = conv_arguments(save=True, order=order)
    _, conv_output, mean, rstd = CONV(*arguments)
    x, weight, bias = (tensor.double() for tensor in arguments[:3])
    expected = torch.nn.functional.conv_transpose2d(x, weight, bias, padding=1)
    torch.testing.assert_close(conv_output.double(), expected, rtol=1e-5, atol=1e-5)
    normed = ACTIVATIONS["gelu"](expected) if order == "act_norm" else expected
    grouped = normed.reshape(2, 2, -1)
    torch.testing.assert_close(mean.double(), grouped.mean(-1), rtol=1e-5, atol=1e-5)
    rstd64 = torch.rsqrt(grouped.var(-1, correction=0) + 1e-5)
    torch.testing.assert_close(rstd.double(), rstd64, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("save", [False, True])
def test_fake_tensors_have_the_real_ones_metadata(layout, save):
    for case in ({}, {"axes": 1}, {"axes": 3}, {"stride": 2, "groups": 2}, {"num_groups": 0}):
        arguments = conv_arguments(**case, layout=layout, save=save)
        fake, real = of_fakes(CONV, arguments), CONV(*arguments)
        for one, other in zip(fake, real, strict=True):
            assert one.shape == other.shape
            assert one.stride() == other.stride()
            assert one.dtype == other.dtype
            assert one.device == other.device


def test_functional_and_modules_run_on_fake_and_meta_tensors():
    with FakeTensorMode():
        for system in SYSTEMS.values():
            model = system.model(*system.init_arguments)
            original = system.original(*system.init_arguments)
            x = torch.empty(system.input_shape)  # full size: nothing is computed
            assert model(x).shape == original(x).shape
        module = ConvTransposeActNorm2d(4, 6, 3, stride=2, num_groups=2)
        assert module(torch.empty(2, 4, 5, 5)).shape == (2, 6, 11, 11)
    meta = GroupNorm(2, 4, activation="gelu", device="meta")(torch.empty(2, 4, 5, 5, device="meta"))
    assert meta.is_meta
    assert meta.shape == (2, 4, 5, 5)


# ---- determinism and purity ----------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_bits_each_run(layout):
    for requires_grad in (False, True):
        runs = []
        for _ in range(3):
            arguments = conv_arguments(layout=layout, save=True, requires_grad=requires_grad)
            outputs = CONV(*arguments)
            if requires_grad:
                outputs[0].square().sum().backward()
                outputs = (*outputs, *(a.grad for a in arguments if isinstance(a, torch.Tensor)))
            runs.append(outputs)
        for others in zip(*runs, strict=True):
            assert all(torch.equal(others[0], other) for other in others[1:])


@pytest.mark.parametrize("place", [lambda x: x, channels_last, strided, misaligned])
def test_inputs_are_left_alone_and_not_aliased(place):
    x = place(torch.randn(2, 4, 5, 5))
    weight, scale = torch.randn(4, 6, 3, 3), torch.randn(6)
    before = [t.clone() for t in (x, weight, scale)]
    for output in (
        functional.group_norm(x, 2, activation="relu"),
        functional.conv_transpose_act_norm(x, weight, num_groups=2, norm_weight=scale),
        functional.conv_transpose_act_norm(x, weight),
    ):
        output.fill_(7)
    for tensor, value in zip((x, weight, scale), before, strict=True):
        assert torch.equal(tensor, value)


def test_the_paths_agree():
    """Without gradients, with them, and under a mode: one result, one layout."""
    for layout, axes, order in itertools.product(LAYOUTS, (1, 2, 3), ORDERS):
        arguments = conv_arguments(axes=axes, layout=layout, order=order)
        x, weight, bias = arguments[:3]
        norm = dict(zip(("norm_weight", "norm_bias"), arguments[11:13], strict=True))

        def call(x=x, weight=weight, bias=bias, order=order, norm=norm):
            return functional.conv_transpose_act_norm(
                x, weight, bias, padding=1, activation="gelu", order=order, num_groups=2, **norm
            )

        plain = call()
        with_gradients = call(weight=weight.clone().requires_grad_()).detach()
        direct = CONV(*arguments)[0]
        for other in (with_gradients, direct):
            assert torch.equal(plain, other)
            assert plain.stride() == other.stride(), (layout, axes, order)
