"""Modules under torch.autocast on the processor: dtypes and values as of torch's operators."""

from __future__ import annotations

import copy
import functools

import pytest
import reference
import torch
from operators import CONV, conv_arguments, of_fakes
from reference import assert_as_accurate_as_torch
from systems import composition, perturbed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from fusedconv import ConvTransposeActNorm2d, GroupNorm
from fusedconv.functional import conv_transpose_act_norm


@pytest.mark.parametrize("num_groups", [None, 2])
@pytest.mark.parametrize("order", reference.ORDERS)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_on_the_processor_is_torchs(num_groups, order, low):
    module = perturbed(
        ConvTransposeActNorm2d(4, 6, 3, num_groups=num_groups, activation="gelu", order=order)
    )
    norm = perturbed(GroupNorm(2, 4, activation="gelu", order=order))
    x = torch.randn(2, 4, 5, 6)
    with torch.autocast("cpu", low):
        expected, result = composition(module, x, torch.float32), module(x)
        expected_norm = reference.group_norm(
            x, 2, norm.weight, norm.bias, activation="gelu", order=order
        )
        result_norm = norm(x)
        result.float().sum().backward()
    assert result.dtype == expected.dtype
    assert_as_accurate_as_torch(result, expected, composition(module, x, torch.float64))
    assert result_norm.dtype == expected_norm.dtype
    torch.testing.assert_close(result_norm, expected_norm, rtol=1e-5, atol=1e-5)
    assert module.conv_transpose.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_what_comes_in_the_low_precision(low):
    """The second layer of a network gets the first one's low-precision output."""
    module = perturbed(ConvTransposeActNorm2d(4, 6, 3, num_groups=2, activation="gelu"))
    x = torch.randn(2, 4, 5, 6).to(low)
    with torch.autocast("cpu", low):
        torch.testing.assert_close(module(x), composition(module, x.float(), torch.float32))
        alone = ConvTransposeActNorm2d(4, 6, 3)
        assert torch.equal(alone(x), alone.conv_transpose(x))


def test_autocast_leaves_float64_alone():
    module = ConvTransposeActNorm2d(4, 6, 3, num_groups=2, dtype=torch.float64)
    x = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    expected = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        result = module(x)
    assert result.dtype == torch.float64
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def in_torch(module, x):
    conv, norm = module.conv_transpose, module.group_norm
    y = F.gelu(F.conv_transpose2d(x, conv.weight, conv.bias))
    return F.group_norm(y, norm.num_groups, norm.weight, norm.bias)


def test_training_with_scaled_gradients_is_torchs():
    module = perturbed(ConvTransposeActNorm2d(4, 6, 3, num_groups=2, activation="gelu"))
    twin = copy.deepcopy(module)
    scales = []
    for model, call in (
        (module, module),
        (twin, functools.partial(in_torch, twin)),
    ):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(0)
        for step in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                output = call(torch.randn(2, 4, 5, 6, generator=generator))
            target = torch.randn(output.shape, generator=generator)
            loss = (output.float() * target).mean()
            # Once they overflow, which the scaler answers by no step and half of its scale.
            scaler.scale(loss * (torch.inf if step == 2 else 1.0)).backward()
            before = copy.deepcopy(model.state_dict())
            scaler.step(optimizer)
            scaler.update()
            same = all(torch.equal(before[name], value) for name, value in model.named_parameters())
            assert same == (step == 2)
        scales.append(scaler.get_scale())
    assert scales == [512.0, 512.0]
    for (name, value), expected in zip(module.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-4, msg=name)


#: What torch returns under autocast on GPUs, by the kind of normalisation.
OF_TORCH = {
    None: lambda x, ones: x,
    "group": lambda x, ones: F.group_norm(x, 2, ones, ones),
    "layer": lambda x, ones: F.layer_norm(x.movedim(1, -1), (6,), ones, ones).movedim(-1, 1),
    "instance": lambda x, ones: F.instance_norm(x, None, None, ones, ones),
    "affine": lambda x, ones: F.batch_norm(x, ones, ones, ones, ones),
}


@pytest.mark.parametrize("kind", OF_TORCH)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_dtypes_under_autocast_on_gpus_are_torchs(kind, low):
    previous = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    try:
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", low)
        with FakeTensorMode():
            x, weight, ones = (
                torch.ones(shape, device="cuda") for shape in ((2, 4, 5, 6), (4, 6, 3, 3), (6,))
            )
            expected = OF_TORCH[kind](F.conv_transpose2d(x, weight), ones)
            norm = {} if kind is None else {"norm": kind, "norm_weight": ones, "norm_bias": ones}
            groups = 2 if kind == "group" else None
            result = conv_transpose_act_norm(x, weight, num_groups=groups, **norm)
    finally:
        torch.set_autocast_enabled("cuda", previous[0])
        torch.set_autocast_dtype("cuda", previous[1])
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)


@pytest.mark.parametrize("kernel", ["torch", "cpu"])
@pytest.mark.parametrize("save", [False, True])
def test_outputs_of_the_operator_have_the_dtypes_that_are_promised(kernel, save, force):
    """What TorchScript calls, which knows nothing of autocast around it."""
    force(kernel)
    arguments = conv_arguments(save=save)
    expected = CONV(*arguments)
    with torch.autocast("cpu", torch.bfloat16):
        actual = CONV(*arguments)
    for real, fake, wide in zip(actual, of_fakes(CONV, arguments), expected, strict=True):
        assert (real.shape, real.dtype) == (fake.shape, fake.dtype)
        assert reference.relative_error(real, wide) < 2e-2
