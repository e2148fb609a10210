"""Gradients through GroupNorm that are channels last, where convolutions in front read planes:
those lie channels first, in padded lines, on the GPU."""

from __future__ import annotations

import pytest
import torch
from conv_gradients import TF32_ERROR
from gpu_checks import poison
from problems import explained, geometry_of, group_norm_stage, problem
from reference import GRADIENT_FLOOR, channels_last, relative_error
from reference import conv_transpose_act_norm as composition
from test_gpu_gradients import TWO_PASS

from fusedconv import BackwardProblem
from fusedconv.device import device_record
from fusedconv.functional import conv_transpose_act_norm
from fusedconv.kernels.cuda.gradients import GroupNormBackwardTwoPass
from fusedconv.layout import line_strides
from fusedconv.plan import BackwardTensors

pytestmark = pytest.mark.gpu

PRECISION = {torch.float32: "tf32", torch.float16: "fp16", torch.bfloat16: "bf16"}
#: Of the input, and of the output's gradient.
DTYPES = [
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float32),
]
SHAPES = [
    (3, 4, 5, 7),
    (2, 6, 9, 12),
    (2, 7, 31, 33),
    (1, 8, 64, 66),
    (3, 40, 17, 258),
    (2, 64, 130, 258),
    (2, 96, 40, 50),
    (5, 200, 12, 13),
    (2, 257, 6, 9),
    (2, 1088, 5, 6),
    (2, 64, 6, 7, 34),
    (3, 24, 6, 16),
    (2, 64, 20, 64),
    (70, 48, 1, 1),
]


def plans_of(x, dtype, activation, order, names):
    """Of the gradients through an epilogue channels last: dense, and in lines."""
    channels, axes = x.shape[1], x.dim() - 2
    forward = problem(
        activation=activation,
        order=order,
        norm=group_norm_stage(1 if channels % 2 else 2),
        dtype=x.dtype,
        output_dtype=dtype,
        precision=PRECISION[x.dtype],
        layout="nhwc",
        batch=x.shape[0],
        channels=channels,
        spatial=tuple(x.shape[2:]),
        conv=geometry_of(torch.empty(channels, channels, *[1] * axes)),
        save=True,
    )
    asked = BackwardProblem(
        forward, grad_dtype=dtype, grad_layout="nhwc", aligned=True, gradients=frozenset(names)
    )
    device = device_record(x.device)
    kernel = GroupNormBackwardTwoPass()
    assert kernel.supports(asked, device)
    dense, planes = (kernel.compile(asked, device) for _ in range(2))
    assert planes.give_padded_lines()
    return dense, planes


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "grad_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize(
    ("activation", "order"),
    [("gelu", "act_norm"), ("relu", "norm_act"), ("silu", "norm_act"), ("identity", "act_norm")],
)
def test_planes_are_what_dense_gradients_are(activation, order, dtype, grad_dtype, shape):
    torch.manual_seed(sum(shape))
    x = channels_last(torch.randn(shape, device="cuda").to(dtype))
    grad = channels_last(torch.randn(shape, device="cuda").to(grad_dtype))
    groups = 1 if shape[1] % 2 else 2
    mean, rstd = torch.rand(2, shape[0], groups, device="cuda").unbind()
    affine = torch.randn(2, shape[1], device="cuda").unbind()
    for names in (
        ("conv_output", "norm_weight", "norm_bias", "bias"),
        ("conv_output", "bias"),
        ("conv_output",),
    ):
        dense, planes = plans_of(x, grad_dtype, activation, order, names)
        tensors = BackwardTensors(grad, x, None, x, mean, rstd, *affine)
        poison()
        expected, found = dense.run(tensors), planes.run(tensors)
        assert found.conv_output.stride() == line_strides(shape, dtype)
        assert any("(nhwc -> nchw)" in step for step in planes.steps)
        # Two kernels may contract products and sums in other ways, which rounding may show.
        same = 1e-6 if dtype == torch.float32 else GRADIENT_FLOOR[dtype]
        assert relative_error(found.conv_output, expected.conv_output) < same
        for name in names[1:]:
            a, b = getattr(found, name), getattr(expected, name)
            floor = float(expected.conv_output.float().norm()) * 1e-6
            assert float((a.float() - b.float()).norm()) <= (
                floor + 2 * GRADIENT_FLOOR[dtype] * float(b.float().norm())
            ), name
        again = planes.run(tensors)
        for name in names:
            assert torch.equal(getattr(found, name), getattr(again, name)), name


@pytest.mark.parametrize("shift", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "grad_dtype"), DTYPES, ids=str)
def test_addresses_between_vectors(dtype, grad_dtype, shift):
    torch.manual_seed(shift)
    shape = (3, 40, 17, 258)
    x = channels_last(torch.randn(shape, device="cuda").to(dtype))
    memory = torch.full((x.numel() + 8,), torch.nan, device="cuda", dtype=grad_dtype)
    grad = memory[shift : shift + x.numel()].as_strided(shape, x.stride())
    grad.copy_(torch.randn(shape, device="cuda"))
    mean, rstd = torch.rand(2, shape[0], 2, device="cuda").unbind()
    affine = torch.randn(2, shape[1], device="cuda").unbind()
    dense, planes = plans_of(x, grad_dtype, "gelu", "act_norm", ("conv_output", "bias"))
    tensors = BackwardTensors(grad, x, None, x, mean, rstd, *affine)
    poison()
    expected, found = dense.run(tensors), planes.run(tensors)
    for name in ("conv_output", "bias"):
        same = 1e-5 if dtype == torch.float32 else GRADIENT_FLOOR[dtype]
        assert relative_error(getattr(found, name), getattr(expected, name)) < same


def gradients(function, tensors, grad, **keywords):
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    output = function(*leaves[:3], norm_weight=leaves[3], norm_bias=leaves[4], **keywords)
    return list(torch.autograd.grad(output, leaves, grad.to(output.dtype)))


@pytest.mark.parametrize("conv_precision", ["tf32", "tf32x3", "bf16"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(
    ("channels", "spatial"), [((32, 64), (61, 70)), ((64, 24), (33, 46)), ((64, 36), (5, 9, 31))]
)
def test_convolutions_read_them(channels, spatial, stride, conv_precision, force, monkeypatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the gradients of the convolution run on compute capability 9.0")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", conv_precision == "tf32")
    force(f"{TWO_PASS},sm90_gradients_{conv_precision}")
    torch.manual_seed(0)
    dtype = torch.bfloat16 if conv_precision == "bf16" else torch.float32
    inputs, outputs = channels
    size = 3 if stride == 1 else 4
    x = channels_last(torch.randn(3, inputs, *spatial, device="cuda").to(dtype))
    weight = torch.randn(inputs, outputs, *[size] * len(spatial), device="cuda").to(dtype) / 10
    affine = torch.randn(3, outputs, device="cuda").to(dtype).unbind()
    keywords = {"stride": stride, "padding": 1, "num_groups": 4, "activation": "gelu"}
    tensors = (x, weight, *affine)

    def call(*leaves):
        return conv_transpose_act_norm(
            *leaves[:3], norm_weight=leaves[3], norm_bias=leaves[4], **keywords
        )

    _, explanation = explained(
        lambda: call(*(each.detach().requires_grad_() for each in tensors)), gradients=True
    )
    written = [step for step in explanation.steps if step.startswith("gradient through")]
    assert len(written) == 1 and "(nhwc -> nchw)" in written[0], explanation.steps
    before = ("transpose the output's gradient", "pad the output's gradient", "torch copy")
    assert not any(step.startswith(before) for step in explanation.steps), explanation.steps
    grad = channels_last(torch.randn_like(call(*tensors).float()))
    poison()
    actual = gradients(conv_transpose_act_norm, tensors, grad, **keywords)
    torchs = gradients(composition, tensors, grad, **keywords)
    exact = gradients(composition, [each.double() for each in tensors], grad.double(), **keywords)
    for a, t, r in zip(actual, torchs, exact, strict=True):
        limit = 1.1 * relative_error(t, r)
        if conv_precision == "tf32":
            limit = max(limit, TF32_ERROR)  # eager's small convolutions are not in TF32
        assert relative_error(a, r) <= limit + 2 * GRADIENT_FLOOR[dtype]
    assert actual[0].stride() == x.stride()
    again = gradients(conv_transpose_act_norm, tensors, grad, **keywords)
    assert all(torch.equal(a, b) for a, b in zip(actual, again, strict=True))
