"""torch.func's transforms and forward-mode tangents: those of the composition of operators."""

from __future__ import annotations

import logging

import pytest
import reference
import torch
from problems import explained
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from fusedconv import ConvTransposeActNorm2d, clear_cache, functional, hypothetical
from fusedconv.ops import common

pytestmark = reference.TORCH_SCRIPTS


def norm_act(group_norm, x, weight, bias):
    return group_norm(x, 2, weight, bias, 1e-3, activation="silu", order="norm_act")


def act_norm(group_norm, x, weight, bias):
    return group_norm(x, 2, weight, bias, activation="gelu")


def conv(conv_transpose_act_norm, x, weight, bias, norm_weight, norm_bias):
    return conv_transpose_act_norm(
        x,
        weight,
        bias,
        padding=1,
        activation="gelu_tanh",
        num_groups=3,
        norm_weight=norm_weight,
        norm_bias=norm_bias,
    )


def conv_without_norm(conv_transpose_act_norm, x, weight, bias):
    return conv_transpose_act_norm(x, weight, bias, stride=2, activation="silu")


X = (2, 4, 3, 2)
#: What is called with our function and with the composition, and the shapes of its tensors.
CALLS = {
    "norm_act": (norm_act, "group_norm", (X, (4,), (4,))),
    "act_norm": (act_norm, "group_norm", (X, (4,), (4,))),
    "conv": (conv, "conv_transpose_act_norm", (X, (4, 6, 2, 3), (6,), (6,), (6,))),
    "conv_without_norm": (conv_without_norm, "conv_transpose_act_norm", (X, (4, 6, 2, 3), (6,))),
}


def cube_sum(function):
    return lambda *tensors: function(*tensors).pow(3).sum()


def vjp(function, tensors, like):
    output, pull = torch.func.vjp(function, *tensors)
    return output, pull(like(output))


def jvp(function, tensors, like):
    return torch.func.jvp(function, tensors, tuple(like(t) for t in tensors))


def dual_numbers(function, tensors, like):
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, like(t)) for t in tensors]
        return tuple(forward_ad.unpack_dual(function(*duals)))


def dual_number_of_one(function, tensors, like):
    """Only the last tensor, a bias or a weight, has a tangent."""
    with forward_ad.dual_level():
        *others, last = tensors
        output = function(*others, forward_ad.make_dual(last, like(last)))
        return tuple(forward_ad.unpack_dual(output))


def dual_numbers_without_gradients(function, tensors, like):
    with torch.no_grad():
        return dual_numbers(function, tensors, like)


def every(tensors):
    return tuple(range(len(tensors)))


def of_samples(function, tensors, like):
    """vmap over three inputs, the other tensors shared."""
    inputs = torch.stack([tensors[0], like(tensors[0]), tensors[0].sin()])
    return torch.vmap(function, in_dims=(0, *[None] * (len(tensors) - 1)))(inputs, *tensors[1:])


TRANSFORMS = {
    "grad": lambda f, tensors, like: torch.func.grad(cube_sum(f), every(tensors))(*tensors),
    "vjp": vjp,
    "jvp": jvp,
    "jacrev": lambda f, tensors, like: torch.func.jacrev(f, every(tensors))(*tensors),
    "jacfwd": lambda f, tensors, like: torch.func.jacfwd(f, every(tensors))(*tensors),
    "hessian": lambda f, tensors, like: torch.func.hessian(cube_sum(f))(*tensors),
    "hessian of a parameter": lambda f, tensors, like: torch.func.hessian(cube_sum(f), 1)(*tensors),
    "vmap": of_samples,
    "vmap of grad": lambda f, tensors, like: of_samples(
        torch.func.grad(cube_sum(f), every(tensors)), tensors, like
    ),
    "vmap of jvp": lambda f, tensors, like: of_samples(
        lambda *each: jvp(f, each, torch.ones_like), tensors, like
    ),
    "grad of vmap": lambda f, tensors, like: torch.func.grad(
        lambda *each: of_samples(f, each, like).pow(3).sum(), every(tensors)
    )(*tensors),
    "dual numbers": dual_numbers,
    "dual number of one": dual_number_of_one,
    "dual numbers without gradients": dual_numbers_without_gradients,
}


def pair(call, dtype=torch.float64):
    """Our function, the composition, their tensors, and what makes tangents for both."""
    apply, name, shapes = CALLS[call]
    generator = torch.Generator().manual_seed(6)
    tensors = tuple(
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    )

    def ours(*tensors):
        return apply(getattr(functional, name), *tensors)

    def composition(*tensors):
        return apply(getattr(reference, name), *tensors)

    return ours, composition, tensors, torch.cos


def assert_same(actual, expected, **tolerances):
    actual, spec = pytree.tree_flatten(actual)
    expected, expected_spec = pytree.tree_flatten(expected)
    assert spec == expected_spec
    assert any(value.any() for value in expected)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, **tolerances)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("call", CALLS)
def test_transforms_are_the_compositions(call, transform):
    ours, composition, tensors, like = pair(call)
    expected = TRANSFORMS[transform](composition, tensors, like)
    assert_same(TRANSFORMS[transform](ours, tensors, like), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("transform", ["grad", "jvp", "jacrev", "vmap of grad", "dual numbers"])
@pytest.mark.parametrize("call", CALLS)
def test_transforms_in_float32(call, transform):
    """The dtype that kernels of ours serve, which no transform may be sent to by mistake."""
    ours, _, tensors, like = pair(call, torch.float32)
    _, composition, exact, _ = pair(call)
    expected = TRANSFORMS[transform](composition, exact, like)
    actual = pytree.tree_map(torch.Tensor.double, TRANSFORMS[transform](ours, tensors, like))
    assert_same(actual, expected, rtol=1e-3, atol=1e-3)


def test_gradients_per_sample_of_a_module():
    """functional_call under vmap of grad, as libraries of differential privacy do it."""
    module = ConvTransposeActNorm2d(4, 6, 3, num_groups=2, activation="gelu", dtype=torch.float64)
    parameters = dict(module.named_parameters())
    x = torch.randn(3, 4, 5, 5, dtype=torch.float64)

    def loss(parameters, sample):
        output = torch.func.functional_call(module, parameters, (sample.unsqueeze(0),))
        return output.pow(3).sum()

    gradients = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    assert gradients.keys() == parameters.keys()
    for index, sample in enumerate(x):
        module.zero_grad()
        composed = reference.conv_transpose_act_norm(
            sample.unsqueeze(0),
            *(module.conv_transpose.weight, module.conv_transpose.bias),
            activation="gelu",
            num_groups=2,
            norm_weight=module.group_norm.weight,
            norm_bias=module.group_norm.bias,
        )
        composed.pow(3).sum().backward()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(gradients[name][index], parameter.grad, msg=name)


RELATED = {
    "weight is bias": lambda x, weight: (x, weight, weight),
    "weight from input": lambda x, weight: (x, x.mean((0, 2, 3)) * weight, weight),
    "bias from weight": lambda x, weight: (x, weight, weight.sin()),
}


@pytest.mark.parametrize("related", RELATED)
def test_gradients_to_differentiate_of_tensors_made_of_each_other(related):
    """Each argument's gradient is its own share: autograd adds what comes by another's way."""

    def gradients(function, dtype):
        x, weight = (t.to(dtype).requires_grad_() for t in pair("norm_act")[2][:2])
        output = norm_act(function, *RELATED[related](x, weight))
        first = torch.autograd.grad(output.pow(3).sum(), (x, weight), create_graph=True)
        total = sum(gradient.pow(2).sum() for gradient in first)
        return [t.detach().double() for t in (*first, *torch.autograd.grad(total, (x, weight)))]

    expected = gradients(reference.group_norm, torch.float64)
    assert_same(gradients(functional.group_norm, torch.float32), expected, rtol=1e-3, atol=1e-3)


def test_a_tangent_of_the_outputs_gradient_is_kept():
    """Forward over reverse of a graph that was made before."""

    def tangents(function, dtype):
        x, weight = (t.to(dtype).requires_grad_() for t in pair("conv_without_norm")[2][:2])
        output = function(x, weight, activation="relu")
        with forward_ad.dual_level():
            grad = forward_ad.make_dual(output.detach().sin(), output.detach().cos())
            gradients = torch.autograd.grad(output, (x, weight), grad)
            assert not any(gradient.requires_grad for gradient in gradients)
            return [forward_ad.unpack_dual(gradient).tangent.double() for gradient in gradients]

    def ours(x, weight, activation):
        # An explicit precision goes through the operator, whose gradients are its own.
        return functional.conv_transpose_act_norm(
            x, weight, activation=activation, precision="fp32"
        )

    expected = tangents(reference.conv_transpose_act_norm, torch.float64)
    assert_same(tangents(ours, torch.float32), expected, rtol=1e-4, atol=1e-4)


# ---- what a transform sees of the operators ------------------------------------------------------


@pytest.mark.parametrize("dim", [-1, 1, 2])
@pytest.mark.parametrize("call", CALLS)
def test_any_axis_may_be_mapped(call, dim):
    ours, composition, tensors, _ = pair(call)
    for batched in ({0}, {1}, {0, 1}, set(range(len(tensors)))):
        mapped, dims = [], []
        for number, tensor in enumerate(tensors):
            samples = torch.stack([tensor, tensor.sin(), tensor.cos()])
            axis = min(dim, tensor.dim())
            mapped.append(samples.movedim(0, axis) if number in batched else tensor)
            dims.append(axis if number in batched else None)
        expected = torch.vmap(composition, tuple(dims))(*mapped)
        actual = torch.vmap(ours, tuple(dims))(*mapped)
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("call", ["act_norm", "conv"])
def test_one_call_serves_mapped_inputs(call):
    ours, _, tensors, _ = pair(call)
    function = torch.vmap(ours, (0, *[None] * (len(tensors) - 1)))
    inputs = torch.stack([tensors[0]] * 3)
    (explanation,) = explained(function, inputs, *tensors[1:])
    assert explanation.problem.batch == 3 * X[0]


@pytest.mark.parametrize("switch", ["tf32", "fp32"])
@pytest.mark.parametrize("precision", ["tf32", "fp32", None])
def test_a_precision_that_transforms_cannot_keep_is_refused(precision, switch, monkeypatch):
    """On CUDA torch's operators follow torch's switch; on a processor there is one precision."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", switch == "tf32")
    x, weight = torch.randn(1, 2, 4, 4), torch.randn(2, 4, 3, 3)

    def loss(x):
        return functional.conv_transpose_act_norm(x, weight, precision=precision).sum()

    torch.func.grad(loss)(x)
    problem = hypothetical.problem(
        device="cuda", dtype=x.dtype, precision=precision or switch,
        layout="nchw", batch=1, channels=2, spatial=(4, 4), out_channels=4, bias=False,
    )  # fmt: skip

    def composed():
        return common.composed("name", problem, "cuda", precision, (x, weight, None, None, None))

    if precision in (None, switch):
        assert composed().output.shape == (1, 4, 6, 6)
    else:
        with pytest.raises(NotImplementedError, match=f"^precision: got '{precision}' under a"):
            composed()


def test_only_the_output_has_a_tangent():
    x = torch.randn(2, 4, 3)
    weight = torch.randn(4, 6, 2)
    conv = (weight, None, [1], [0], [0], [1], 1, "gelu", "act_norm", 2, None, None, 1e-5, None)
    for operator, arguments in (
        (torch.ops.fusedconv.group_norm, (2, None, None, 1e-5, "gelu", "act_norm", None)),
        (torch.ops.fusedconv.conv_transpose_act_norm, (*conv, None, None, True)),
    ):
        with forward_ad.dual_level():
            outputs = operator(forward_ad.make_dual(x, x.cos()), *arguments)
            tangents = [forward_ad.unpack_dual(output).tangent for output in outputs]
        assert tangents[0] is not None
        assert all(tangent is None for tangent in tangents[1:])


def test_composing_is_logged_once(caplog):
    x = torch.randn(2, 4, 3)

    def said():
        for _ in range(2):
            torch.func.grad(lambda x: functional.group_norm(x, 2).pow(3).sum())(x)
        messages = [record.getMessage() for record in caplog.records]
        return [text for text in messages if "torch.func transforms" in text]

    with caplog.at_level(logging.INFO, logger="fusedconv"):
        (text,) = said()
        assert text.startswith("group_norm: torch's operators serve")
        clear_cache()
        assert said() == [text, text]


def test_a_level_of_dual_numbers_alone_composes_nothing():
    x = torch.randn(2, 4, 3)
    with forward_ad.dual_level():
        (explanation,) = explained(functional.group_norm, x, 2)
        dual = forward_ad.make_dual(x, x.cos())
        assert explained(functional.group_norm, dual, 2) == []
    assert explanation.kernel == "cpu_group_norm"
