"""torch.library operators: registration, gradients, compilation, transforms, determinism."""

from __future__ import annotations

import io
import itertools

import pytest
import reference
import torch
from reference import (
    ACTIVATIONS,
    GRADIENT_FLOOR,
    ORDERS,
    TORCH_SCRIPTS,
    assert_as_accurate_as_torch,
    channels_last,
    misaligned,
    strided,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedconv import ConvTransposeActNorm2d, GroupNorm, explain, functional
from fusedconv.models import SYSTEMS
from fusedconv.ops import planning

LAYOUTS = {"nchw": lambda x: x, "nhwc": channels_last, "strided": strided}
CONV = torch.ops.fusedconv.conv_transpose_act_norm
NORM = torch.ops.fusedconv.group_norm


def conv_arguments(
    *,
    axes=2,
    dtype=torch.float32,
    layout="nchw",
    requires_grad=False,
    save=False,
    activation="gelu",
    order="act_norm",
    num_groups=2,
    bias=True,
    affine=True,
    stride=1,
    output_padding=0,
    dilation=1,
    groups=1,
    channels=4,
    out_channels=6,
    precision=None,
):
    """The operator's arguments, from a fixed seed."""
    generator = torch.Generator().manual_seed(4)

    def make(*shape):
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(dtype).requires_grad_(requires_grad)

    x = LAYOUTS[layout](make(2, channels, *(5, 6, 4)[:axes]).detach())
    return (
        x.requires_grad_(requires_grad),
        make(channels, out_channels // groups, *(3, 2, 3)[:axes]),
        make(out_channels) if bias else None,
        (stride,) * axes,
        (1,) * axes,
        (output_padding,) * axes,
        (dilation,) * axes,
        groups,
        activation,
        order,
        num_groups,
        make(out_channels) if num_groups and affine else None,
        make(out_channels) if num_groups and affine else None,
        1e-5,
        precision,
        None,
        save,
    )


CONV_CASES = {
    "system 1": {},
    "after": {"order": "norm_act", "activation": "silu"},
    "no norm": {"num_groups": 0},
    "no norm, other order": {"num_groups": 0, "order": "norm_act"},
    "no activation": {"activation": "identity"},
    "neither": {"activation": "identity", "num_groups": 0, "bias": False},
    "no affine": {"affine": False, "bias": False, "activation": "relu"},
    "channels last": {"layout": "nhwc"},
    "strided": {"layout": "strided", "order": "norm_act"},
    "1D": {"axes": 1},
    "1D channels last": {"axes": 1, "layout": "nhwc"},
    "3D": {"axes": 3, "activation": "relu"},
    "3D channels last": {"axes": 3, "layout": "nhwc", "order": "norm_act"},
    "stride": {"stride": 2, "output_padding": 1},
    "groups and dilation": {"groups": 2, "dilation": 2},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16, "layout": "nhwc"},
    "float64": {"dtype": torch.float64, "order": "norm_act"},
    "precision": {"precision": "fp32", "activation": "gelu_tanh"},
}


def norm_arguments(
    shape=(2, 6, 5, 4),
    num_groups=3,
    *,
    dtype=torch.float32,
    layout="nchw",
    requires_grad=False,
    activation="gelu",
    order="act_norm",
    affine=True,
):
    generator = torch.Generator().manual_seed(5)

    def make(*shape):
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(dtype).requires_grad_(requires_grad)

    x = LAYOUTS[layout](make(*shape).detach()).requires_grad_(requires_grad)
    weight, bias = (make(shape[1]), make(shape[1])) if affine else (None, None)
    return x, num_groups, weight, bias, 1e-5, activation, order, None


NORM_CASES = {
    "plain": {"activation": "identity"},
    "before": {},
    "after": {"order": "norm_act", "activation": "silu"},
    "no affine": {"affine": False, "activation": "relu"},
    "channels last": {"layout": "nhwc"},
    "strided": {"layout": "strided", "order": "norm_act"},
    "2 axes": {"shape": (4, 6), "num_groups": 2},
    "3 axes": {"shape": (4, 6, 5), "num_groups": 2, "layout": "nhwc"},
    "5 axes": {"shape": (2, 6, 2, 3, 4), "num_groups": 6, "layout": "nhwc"},
    "bfloat16": {"dtype": torch.bfloat16, "layout": "nhwc"},
    "float16": {"dtype": torch.float16, "order": "norm_act"},
    "float64": {"dtype": torch.float64, "activation": "gelu_tanh"},
}


# ---- registration --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CONV_CASES)
def test_opcheck_of_the_convolution(case):
    torch.library.opcheck(CONV, conv_arguments(**CONV_CASES[case], save=False))
    torch.library.opcheck(CONV, conv_arguments(**CONV_CASES[case], save=True))


@pytest.mark.parametrize(
    "case", ["system 1", "after", "no norm", "channels last", "3D", "stride", "bfloat16"]
)
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
    x, num_groups, weight, bias, eps, activation, order, _ = norm_arguments(**NORM_CASES[case])
    output, mean, rstd = NORM(x, num_groups, weight, bias, eps, activation, order, None)
    if weight is None:
        needs = [needs[0], False, False]
    torch.library.opcheck(
        torch.ops.fusedconv.group_norm_backward,
        (
            torch.randn_like(output),
            x,
            mean,
            rstd,
            weight,
            bias,
            num_groups,
            activation,
            order,
            needs,
        ),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize("case", CONV_CASES)
def test_opcheck_of_the_backward_of_the_convolution(case):
    arguments = conv_arguments(**CONV_CASES[case], save=True)
    x, weight, bias, *conv = arguments[:8]
    activation, order, num_groups, norm_weight, norm_bias, _, precision, _, _ = arguments[8:]
    output, conv_output, mean, rstd = CONV(*arguments)
    affine = norm_weight is not None
    everything = [True, True, bias is not None, affine, affine]
    for needs in (everything, [True, *[False] * 4], [False, *everything[1:]]):
        torch.library.opcheck(
            torch.ops.fusedconv.conv_transpose_act_norm_backward,
            (
                torch.randn_like(output),
                x,
                weight,
                conv_output,
                mean,
                rstd,
                norm_weight,
                norm_bias,
                *conv,
                activation,
                order,
                num_groups,
                precision or "fp32",
                needs,
            ),
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
        real = CONV(*arguments)
        with FakeTensorMode() as mode:
            fake = CONV(
                *(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments)
            )
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


# ---- gradients -----------------------------------------------------------------------------------


def gradients(function, tensors, dtype):
    """Output and gradients of a function of tensors, for the same incoming gradient."""
    leaves = [
        None if t is None else t.detach().to(dtype, copy=True).requires_grad_() for t in tensors
    ]
    output = function(*leaves)
    incoming = torch.linspace(-1, 2, output.numel(), dtype=torch.float64).reshape(output.shape)
    output.backward(incoming.to(output.dtype))
    return [output, *(leaf.grad for leaf in leaves if leaf is not None)]


def assert_gradients(ours, composed, tensors, dtype):
    results = [
        gradients(ours, tensors, dtype),
        gradients(composed, tensors, dtype),
        gradients(composed, tensors, torch.float64),
    ]
    for number, (actual, torchs, exact) in enumerate(zip(*results, strict=True)):
        assert_as_accurate_as_torch(
            actual, torchs, exact, None if number == 0 else GRADIENT_FLOOR[dtype]
        )


@pytest.mark.parametrize("case", CONV_CASES)
def test_gradients_of_the_convolution(case):
    arguments = conv_arguments(**CONV_CASES[case])
    _, _, _, stride, padding, output_padding, dilation, groups = arguments[:8]
    activation, order, num_groups, _, _, eps, precision, _, _ = arguments[8:]
    tensors = (*arguments[:3], *arguments[11:13])

    def call(function, extra):
        def run(x, weight, bias, norm_weight, norm_bias):
            return function(
                x, weight, bias, stride, padding, output_padding, groups, dilation,
                activation=None if activation == "identity" else activation, order=order,
                num_groups=num_groups or None, norm_weight=norm_weight, norm_bias=norm_bias,
                eps=eps, **extra,
            )  # fmt: skip

        return run

    ours = call(functional.conv_transpose_act_norm, {"precision": precision})
    composed = call(reference.conv_transpose_act_norm, {})
    assert_gradients(ours, composed, tensors, tensors[0].dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("affine", [True, False])
def test_gradients_of_group_norm(activation, order, layout, affine):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x, num_groups, weight, bias, eps, *_ = norm_arguments(
            (3, 6, 7, 5), dtype=dtype, layout=layout, affine=affine
        )

        def ours(x, weight, bias, num_groups=num_groups, eps=eps):
            return functional.group_norm(
                x, num_groups, weight, bias, eps, activation=activation, order=order
            )

        def composed(x, weight, bias, num_groups=num_groups, eps=eps):
            return reference.group_norm(x, num_groups, weight, bias, eps, activation, order)

        assert_gradients(ours, composed, (x, weight, bias), dtype)


HALF = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_gradients_with_float32_affine_on_half_input(dtype, order):
    """What torch's GroupNorm takes under autocast: low-precision input, float32 parameters."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(2, 6, 5, 7, generator=generator).to(dtype).requires_grad_()
    weight, bias = (torch.randn(6, generator=generator).requires_grad_() for _ in range(2))
    incoming = torch.randn(2, 6, 5, 7, generator=generator)
    results = []
    for function in (functional.group_norm, reference.group_norm):
        output = function(x, 3, weight, bias, activation="gelu", order=order)
        results.append(
            [output, *torch.autograd.grad(output, (x, weight, bias), incoming.to(output.dtype))]
        )
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    output = reference.group_norm(exact[0], 3, *exact[1:], activation="gelu", order=order)
    results.append([output, *torch.autograd.grad(output, exact, incoming.double())])
    for actual, torchs, true in zip(*results, strict=True):
        assert_as_accurate_as_torch(actual, torchs, true, GRADIENT_FLOOR[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("affine_dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_gradients_where_forward_serves(dtype, affine_dtype, order):
    """Mixtures that torch refuses: where the forward pass serves them, so does the backward."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(2, 6, 5, 7, generator=generator).to(dtype).requires_grad_()
    affine = [torch.randn(6, generator=generator).to(affine_dtype) for _ in range(2)]
    leaves = [x, *(tensor.requires_grad_() for tensor in affine)]
    output = functional.group_norm(x, 3, *affine, activation="gelu", order=order)
    grads = torch.autograd.grad(output.pow(2).sum(), leaves)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    true = reference.group_norm(exact[0], 3, *exact[1:], activation="gelu", order=order)
    expected = torch.autograd.grad(true.pow(2).sum(), exact)
    rounding = max(torch.finfo(dtype).eps, torch.finfo(affine_dtype).eps)
    for leaf, grad, other in zip(leaves, grads, expected, strict=True):
        assert grad.dtype == leaf.dtype
        assert reference.relative_error(grad, other) < 4 * rounding


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_gradients_with_affine_and_incoming_gradient_of_any_strides(dtype, order):
    x, weight, bias = torch.randn(2, 6, 5, 7).to(dtype), *torch.randn(2, 6).to(dtype)
    incoming = torch.randn(2, 6, 5, 7).to(dtype)
    _, mean, rstd = NORM(x, 3, weight, bias, 1e-5, "gelu", order, None)
    backward = torch.ops.fusedconv.group_norm_backward
    arguments = (3, "gelu", order, [True] * 3)
    affine = (strided(weight), strided(bias))
    for place in (lambda t: t, strided, channels_last, lambda t: t[..., :1].expand(2, 6, 5, 7)):
        grad = place(incoming)
        actual = backward(grad, x, mean, rstd, *affine, *arguments)
        expected = backward(grad.contiguous(), x, mean, rstd, weight, bias, *arguments)
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("order", ORDERS)
def test_gradients_of_an_empty_batch(order):
    arguments = list(conv_arguments(save=True, requires_grad=True, order=order))
    arguments[0] = torch.empty(0, 4, 5, 6, requires_grad=True)
    CONV(*arguments)[0].sum().backward()
    for tensor in (a for a in arguments if isinstance(a, torch.Tensor)):
        assert tensor.grad.shape == tensor.shape
        assert not tensor.grad.any()


def float64_leaf(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "silu"])
def test_gradcheck(order, activation, threads):
    """The operators' own formulas in float64 against finite differences."""
    threads(1)  # thousands of calls on a few elements each
    name = activation or "identity"

    def norm(x, weight, bias):
        return NORM(x, 2, weight, bias, 1e-5, name, order, None)[0]

    torch.autograd.gradcheck(norm, (float64_leaf(2, 4, 3), float64_leaf(4), float64_leaf(4)))

    def conv(x, weight, bias, norm_weight, norm_bias):
        return CONV(
            x, weight, bias, (1, 2), (1, 0), (0, 1), (2, 1), 1, name, order, 2, norm_weight,
            norm_bias, 1e-5, None, None, True,
        )[0]  # fmt: skip

    leaves = (float64_leaf(2, 3, 4, 2), float64_leaf(3, 4, 2, 3), *(float64_leaf(4) for _ in "bwb"))
    torch.autograd.gradcheck(conv, leaves)


@pytest.mark.parametrize("needed", list(itertools.product((False, True), repeat=3)), ids=str)
def test_gradients_are_computed_for_what_needs_them(needed):
    tensors = [torch.randn(2, 4, 5, 5), torch.randn(4, 6, 3, 3), torch.randn(6)]
    expected = [t.clone().requires_grad_() for t in tensors]
    for tensor, need in zip(tensors, needed, strict=True):
        tensor.requires_grad_(need)
    result = functional.conv_transpose_act_norm(*tensors, activation="gelu", num_groups=2)
    assert result.requires_grad == any(needed)
    if any(needed):
        result.square().sum().backward()
    reference.conv_transpose_act_norm(
        *expected, activation="gelu", num_groups=2
    ).square().sum().backward()
    for tensor, other, need in zip(tensors, expected, needed, strict=True):
        assert (tensor.grad is not None) == need
        if need:
            torch.testing.assert_close(tensor.grad, other.grad, rtol=1e-4, atol=1e-4)


def test_gradients_accumulate_over_uses_and_hooks_run():
    module = ConvTransposeActNorm2d(4, 4, 3, padding=1, num_groups=2, activation="relu")
    seen = []
    module.conv_transpose.weight.register_hook(lambda grad: seen.append(grad.clone()))
    x = torch.randn(1, 4, 5, 5)
    module(module(x)).square().sum().backward()
    assert len(seen) == 1
    assert torch.equal(seen[0], module.conv_transpose.weight.grad)


def test_an_input_changed_before_backward_raises():
    x = torch.randn(2, 4, 5, 5)
    weight = torch.randn(4, 6, 3, 3, requires_grad=True)
    result = functional.conv_transpose_act_norm(x, weight, activation="gelu", num_groups=2)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_without_saving_backward_says_so():
    arguments = conv_arguments(save=False, requires_grad=True)
    output, *_ = CONV(*arguments)
    with pytest.raises(RuntimeError, match=r"conv_transpose_act_norm: called with save=False"):
        output.sum().backward()


@pytest.mark.parametrize("target", ["conv", "conv without norm", "norm"])
def test_second_derivatives_are_the_compositions(target):
    """A gradient penalty: create_graph, then the gradient of the gradients."""
    generator = torch.Generator().manual_seed(8)

    def make(*shape):
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.requires_grad_()

    x, weight, bias = make(2, 4, 5, 5), make(4, 6, 3, 3), make(6)
    scale, shift = (make(4), make(4)) if target == "norm" else (make(6), make(6))
    num_groups = 2 if target == "conv" else None
    affine = () if target == "conv without norm" else (scale, shift)
    leaves = (x, *affine) if target == "norm" else (x, weight, bias, *affine)
    norm = dict(zip(("norm_weight", "norm_bias"), affine, strict=False))

    def ours():
        if target == "norm":
            return NORM(x, 2, scale, shift, 1e-3, "gelu", "norm_act", None)[0]
        return CONV(
            x, weight, bias, (1, 2), (1, 0), (0, 1), (2, 1), 1, "gelu", "norm_act", num_groups or 0,
            norm.get("norm_weight"), norm.get("norm_bias"), 1e-3, None, None, True,
        )[0]  # fmt: skip

    def composition():
        if target == "norm":
            return reference.group_norm(x, 2, scale, shift, 1e-3, "gelu", "norm_act")
        return reference.conv_transpose_act_norm(
            x, weight, bias, (1, 2), (1, 0), (0, 1), 1, (2, 1), activation="gelu",
            order="norm_act", num_groups=num_groups, eps=1e-3, **norm,
        )  # fmt: skip

    def penalty(function):
        grads = torch.autograd.grad(function().square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves)

    for actual, expected in zip(penalty(ours), penalty(composition), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["group_norm", "conv_transpose_act_norm"])
def test_a_derivative_of_the_backward_operator_is_refused(name):
    """Nobody differentiates it by way of the operators; called by hand it must not give zeros."""
    x = torch.randn(2, 4, 5, requires_grad=True)
    mean, rstd = torch.zeros(2, 2), torch.ones(2, 2)
    saved = (torch.randn(2, 4, 5), x)
    stages = ("gelu", "act_norm")
    if name == "group_norm":
        arguments = (*saved, mean, rstd, None, None, 2, *stages, [True, False, False])
    else:
        saved = (*saved, torch.randn(4, 4, 1), x.detach(), mean, rstd, None, None)
        arguments = (*saved, [1], [0], [0], [1], 1, *stages, 2, "fp32", [True, *[False] * 4])
    grad, *_ = getattr(torch.ops.fusedconv, f"{name}_backward")(*arguments)
    with pytest.raises(RuntimeError, match=rf"fusedconv::{name}_backward: got a second deriv"):
        grad.sum().backward()


class Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@pytest.mark.parametrize("operator", ["conv", "norm"])
def test_no_gradient_comes_of_none(operator):
    """As of torch's operators: not zeros."""
    if operator == "conv":
        arguments = conv_arguments(save=True, requires_grad=True)
        output = CONV(*arguments)[0]
    else:
        arguments = norm_arguments(requires_grad=True)
        output = NORM(*arguments)[0]
    Stop.apply(output).sum().backward()
    assert all(a.grad is None for a in arguments if isinstance(a, torch.Tensor))


def test_only_the_output_is_differentiable():
    arguments = conv_arguments(save=True, requires_grad=True)
    output, *saved = CONV(*arguments)
    assert output.requires_grad
    assert [tensor.requires_grad for tensor in saved] == [False, False, False]
    output, *saved = NORM(*norm_arguments(requires_grad=True))
    assert output.requires_grad
    assert [tensor.requires_grad for tensor in saved] == [False, False]


@pytest.mark.parametrize("affine", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gradients_have_their_tensors_dtypes_before_autograd_casts_them(affine):
    x = torch.randn(2, 4, 5, 6).bfloat16()
    weight, bias = torch.randn(4).to(affine), torch.randn(4).to(affine)
    output, mean, rstd = NORM(x, 2, weight, bias, 1e-5, "gelu", "norm_act", None)
    grads = torch.ops.fusedconv.group_norm_backward(
        torch.randn_like(output), x, mean, rstd, weight, bias, 2, "gelu", "norm_act", [True] * 3
    )
    assert [grad.dtype for grad in grads] == [torch.bfloat16, affine, affine]


@pytest.fixture
def scopes(monkeypatch):
    """The precisions for which torch_reference.precision_scope is entered."""
    from fusedconv.kernels import torch_reference

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
    from fusedconv.kernels.torch_reference import precision_scope
    from fusedconv.problem import conv_fp32_precision

    if not newer:  # torch 2.6 has the older switch alone
        for name in ("_set_fp32_precision_setter", "_get_fp32_precision_getter"):
            monkeypatch.delattr(torch._C, name, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", outer)
    before = conv_fp32_precision()
    assert before == ("tf32" if outer else "fp32")
    with precision_scope(precision):
        assert conv_fp32_precision() == precision
        with precision_scope("fp16"):
            assert conv_fp32_precision() == precision
    assert conv_fp32_precision() == before
    with pytest.raises(ZeroDivisionError), precision_scope(precision):
        raise ZeroDivisionError
    assert conv_fp32_precision() == before


def test_other_weight_strides_are_another_problem():
    seen = []
    x, weight = torch.randn(2, 4, 5, 5), torch.randn(4, 6, 3, 3)
    for other in (weight, weight.to(memory_format=torch.channels_last), weight):
        functional.conv_transpose_act_norm(x, other, num_groups=2)
        (explanation,) = explain(
            functional.conv_transpose_act_norm, x, other, num_groups=2, file=io.StringIO()
        )
        seen.append(explanation.problem.conv.weight_strides)
    assert seen == [(54, 9, 3, 1), (54, 1, 18, 6), (54, 9, 3, 1)]


@pytest.mark.parametrize("tensor", ["input", "weight", "bias", "norm_weight", "norm_bias"])
def test_a_cached_plan_is_of_the_same_strides(tensor, monkeypatch):
    """Each tensor's strides are in the key of the cache."""
    tensors = {
        "input": torch.randn(2, 4, 5, 6),
        "weight": torch.randn(4, 6, 3, 2),
        "bias": torch.randn(6),
        "norm_weight": torch.randn(6),
        "norm_bias": torch.randn(6),
    }
    selected = []
    plan_for = planning.plan_for

    def counted(problem, key=None):
        selected.append(problem)
        return plan_for(problem, key)

    monkeypatch.setattr(planning, "plan_for", counted)
    expected = functional.conv_transpose_act_norm(**tensors, num_groups=2)
    functional.conv_transpose_act_norm(**tensors, num_groups=2)
    assert len(selected) == 1
    tensors[tensor] = strided(tensors[tensor])
    actual = functional.conv_transpose_act_norm(**tensors, num_groups=2)
    torch.testing.assert_close(actual, expected)
    assert len(selected) == 2


def test_a_cached_plan_is_of_the_same_alignment(monkeypatch):
    selected = []
    plan_for = planning.plan_for

    def counted(problem, key=None):
        selected.append(problem)
        return plan_for(problem, key)

    monkeypatch.setattr(planning, "plan_for", counted)
    x = torch.randn(2, 4, 5, 6)
    weight = torch.randn(4, 6, 3, 2)
    for call in (
        lambda x: functional.group_norm(x, 2),
        lambda x: functional.conv_transpose_act_norm(x, weight, num_groups=2),
    ):
        selected.clear()
        for place in (lambda x: x, misaligned, lambda x: x, misaligned):
            call(place(x))
        assert [problem.aligned for problem in selected] == [True, False]


# ---- compilation ---------------------------------------------------------------------------------


class Everything(torch.nn.Module):
    """Both operators with ordinary torch around them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = ConvTransposeActNorm2d(4, 6, 3, num_groups=2, activation="gelu")
        self.strided = ConvTransposeActNorm2d(6, 8, 2, 2, activation="silu", order="norm_act")
        self.norm = GroupNorm(4, 8, activation="relu", order="norm_act")

    def forward(self, x):
        return self.norm(self.strided(self.conv(x * 2) + 1)).mean(-1)


def assert_compiles(compiled_model, model, x):
    compiled_x, x = x.clone().requires_grad_(), x.clone().requires_grad_()
    compiled_model(compiled_x).square().sum().backward()
    compiled_grads = [compiled_x.grad, *(p.grad.clone() for p in model.parameters())]
    model.zero_grad()
    model(x).square().sum().backward()
    grads = [x.grad, *(p.grad.clone() for p in model.parameters())]
    model.zero_grad()
    for actual, expected in zip(compiled_grads, grads, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(compiled_model(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_compiles_whole(compiled, layout, dynamic):
    model = Everything()
    compiled_model = compiled(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for shape in ((2, 4, 5, 6), (3, 4, 9, 7)):
        x = LAYOUTS[layout](torch.randn(shape))
        assert_compiles(compiled_model, model, x)


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_systems_compile_whole(compiled, name):
    from test_modules import SMALL

    model = SYSTEMS[name].model(*SMALL[name][0])
    compiled_model = compiled(model, fullgraph=True, backend="aot_eager")
    assert_compiles(compiled_model, model, torch.rand(SMALL[name][1]))


def test_dynamic_shapes_compile_once(compiled):
    frames = CompileCounterWithBackend("aot_eager")
    model = Everything()
    compiled_model = compiled(model, fullgraph=True, backend=frames, dynamic=True)
    counts = []
    with torch.no_grad():
        for shape in ((2, 4, 5, 6), (3, 4, 9, 7), (5, 4, 8, 11)):
            x = torch.randn(shape)
            torch.testing.assert_close(compiled_model(x), model(x), rtol=1e-5, atol=1e-5)
            counts.append(frames.frame_count)
    assert counts[0] > 0
    assert len(set(counts)) == 1


def test_compiles_under_autocast(compiled):
    model = Everything()
    compiled_model = compiled(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 4, 5, 6)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        actual, expected = compiled_model(x), model(x)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


@TORCH_SCRIPTS
def test_compiles_with_inductor(compiled):
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:
        pytest.skip(f"inductor has no C++ compiler here: {error}")
    model = Everything()
    compiled_model = compiled(model, fullgraph=True, backend="inductor")
    x = channels_last(torch.randn(2, 4, 5, 6))
    # Forward only, as each graph costs a call of the C++ compiler; aot_eager shows the backward.
    with torch.no_grad():
        torch.testing.assert_close(compiled_model(x), model(x), rtol=1e-5, atol=1e-5)


def test_exports(random):
    model = Everything().eval()
    x = random(2, 4, 5, 6)
    program = torch.export.export(model, (x,))
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert "fusedconv.conv_transpose_act_norm.default" in targets
    assert "fusedconv.group_norm.default" in targets
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x), model(x), rtol=1e-5, atol=1e-5)


# ---- subclasses, modes ---------------------------------------------------------------------------


def test_subclasses_and_modes_see_the_operator():
    seen = []

    class Functions(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Functions():
        functional.group_norm(torch.randn(2, 4, 5, 5), 2)
        functional.conv_transpose_act_norm(torch.randn(2, 4, 5, 5), torch.randn(4, 6, 3, 3))
    assert functional.group_norm in seen
    assert functional.conv_transpose_act_norm in seen
    seen.clear()

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x = torch.randn(2, 4, 5, 5)
    with Mode():
        functional.group_norm(x, 2)
        functional.conv_transpose_act_norm(x, torch.randn(4, 6, 3, 3), num_groups=2)
    assert "fusedconv.group_norm.default" in seen
    assert "fusedconv.conv_transpose_act_norm.default" in seen

    class Tagged(torch.Tensor):
        pass

    tagged = functional.group_norm(x.as_subclass(Tagged), 2)
    torch.testing.assert_close(tagged.as_subclass(torch.Tensor), functional.group_norm(x, 2))


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
