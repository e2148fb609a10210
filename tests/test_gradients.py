"""Gradients of the operators: values, dtypes, for what they are computed, and what is refused."""

from __future__ import annotations

import itertools

import pytest
import reference
import torch
from operators import CONV, CONV_CASES, NORM, conv_arguments, norm_arguments
from reference import (
    ACTIVATIONS,
    GRADIENT_FLOOR,
    LAYOUTS,
    ORDERS,
    assert_as_accurate_as_torch,
    channels_last,
    cotangent,
    strided,
)

import fusedconv
from fusedconv import ConvTransposeActNorm2d, functional
from fusedconv.reference import epilogue_gradients


def gradients(function, tensors, dtype):
    """Output and gradients of a function of tensors, for the same incoming gradient."""
    leaves = [
        None if t is None else t.detach().to(dtype, copy=True).requires_grad_() for t in tensors
    ]
    output = function(*leaves)
    output.backward(cotangent(output))
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


#: test_norm_argument has those of other kinds of norm.
GROUPED = [case for case, changes in CONV_CASES.items() if "norm" not in changes]


@pytest.mark.parametrize("case", GROUPED)
def test_gradients_of_the_convolution(case):
    arguments = conv_arguments(**CONV_CASES[case])
    _, _, _, stride, padding, output_padding, dilation, groups = arguments[:8]
    activation, order, num_groups, _, _, eps, precision, *_ = arguments[8:]
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
    saved, rest = (mean, rstd, [True] * 3, x, 3), (1e-5, "gelu", order, None)
    for place in (lambda t: t, strided, channels_last, lambda t: t[..., :1].expand(2, 6, 5, 7)):
        grad = place(incoming)
        actual = backward(grad, *saved, strided(weight), strided(bias), *rest)
        expected = backward(grad.contiguous(), *saved, weight, bias, *rest)
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
# Finite differences are no slope at a kink.
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "relu"])
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
            norm_bias, 1e-5, None, None, None, True,
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
            norm.get("norm_weight"), norm.get("norm_bias"), 1e-3, None, None, None, True,
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
    stages = ("gelu", "act_norm")
    if name == "group_norm":
        saved = (mean, rstd)
        needs = [True, False, False]
        arguments = (x, 2, None, None, 1e-5, *stages, None)
    else:
        saved = (x.detach(), mean, rstd)
        needs = [True, *[False] * 4]
        conv = (torch.randn(4, 4, 1), None, [1], [0], [0], [1], 1)
        arguments = (x, *conv, *stages, 2, None, None, 1e-5, "fp32", None, None)
    backward = getattr(torch.ops.fusedconv, f"{name}_backward")
    grad, *_ = backward(torch.randn(2, 4, 5), *saved, needs, *arguments)
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
    arguments = (x, 2, weight, bias, 1e-5, "gelu", "norm_act", None)
    grads = torch.ops.fusedconv.group_norm_backward(
        torch.randn_like(output), mean, rstd, [True] * 3, *arguments
    )
    assert [grad.dtype for grad in grads] == [torch.bfloat16, affine, affine]


@pytest.mark.parametrize(
    ("wrong", "got", "exact"),
    [
        (None, "none", False),
        (None, "none", True),
        (lambda t: t.flatten(), r"shape \(\d+,\)", False),
    ],
)
def test_a_kernel_that_breaks_its_promise_is_named(wrong, got, exact, monkeypatch, force):
    """Autograd would name neither the kernel nor the gradient."""
    force("torch_epilogue_backward")
    monkeypatch.setattr("fusedconv.plan.BackwardPlan.is_exact", exact)

    def broken(problem, tensors):
        found = epilogue_gradients(problem, tensors)
        return found._replace(norm_weight=wrong and wrong(found.norm_weight[None].expand(2, -1)))

    monkeypatch.setattr("fusedconv.kernels.torch.epilogue_gradients", broken)
    x = torch.randn(2, 4, 5, 5, requires_grad=True)
    scale = torch.randn(4, requires_grad=True)
    output = functional.group_norm(x, 2, scale)
    with pytest.raises(
        fusedconv.KernelError,
        match=rf"torch_epilogue_backward: got {got} for the gradient of weight, expected shape",
    ):
        output.sum().backward()


# ---- a ReLU alone --------------------------------------------------------------------------------


def relu_layer(dispatched, input, weight, bias):
    """A convolution and a ReLU, by the operator where somebody looks on, else without it."""
    if not dispatched:
        return functional.conv_transpose_act_norm(input, weight, bias, 2, activation="relu")
    geometry = [2, 2], [0, 0], [0, 0], [1, 1], 1
    stages = "relu", "act_norm", 0, None, None, 1e-5, None, None, None
    return CONV(input, weight, bias, *geometry, *stages, True)[0]


def relu_tensors(dtype=torch.float32):
    torch.manual_seed(3)
    shapes = (2, 3, 5, 6), (3, 4, 3, 3), (4,)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def composed_relu(input, weight, bias):
    return torch.relu(torch.nn.functional.conv_transpose2d(input, weight, bias, 2))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kernels", ["torch", "cpu,torch"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_through_a_relu_alone(dtype, layout, kernels, recompute, force):
    force(kernels)

    def ours(input, weight, bias):
        return functional.conv_transpose_act_norm(
            LAYOUTS[layout](input), weight, bias, 2, activation="relu", recompute=recompute
        )

    tensors = [each.detach() for each in relu_tensors(dtype)]
    assert_gradients(ours, composed_relu, tensors, dtype)


@pytest.mark.parametrize("dispatched", [False, True])
def test_a_relu_alone_keeps_its_result_and_no_other_output(dispatched, force):
    force("cpu,torch")
    tensors = relu_tensors()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        output = relu_layer(dispatched, *tensors)
    shapes = [tuple(each.shape) for each in kept if each is not None and each.numel()]
    assert shapes.count(tuple(output.shape)) == 1
    at = [each.data_ptr() for each in kept if each.shape == output.shape]
    assert at == [output.data_ptr()]


@pytest.mark.parametrize("dispatched", [False, True])
def test_a_result_of_relu_that_is_written_to_is_noticed_as_eagers_is(dispatched, force):
    force("cpu,torch")
    for layer in (composed_relu, lambda *tensors: relu_layer(dispatched, *tensors)):
        output = layer(*relu_tensors())
        output.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_a_relus_infinite_and_undefined_values_have_eagers_gradients():
    input, weight, bias = (each.detach() for each in relu_tensors())
    bias[0], bias[1] = float("inf"), float("nan")
    weight.requires_grad_()
    found, expected = (
        torch.autograd.grad(layer(input, weight, bias).sum(), weight)[0]
        for layer in (lambda *tensors: relu_layer(False, *tensors), composed_relu)
    )
    torch.testing.assert_close(found, expected, equal_nan=True)
