"""LayerNorm over the channels of each pixel on the GPU, alone and behind convolutions, against
fp64, relative to eager's error."""

from __future__ import annotations

import pytest
import torch
from gpu_checks import bound, poison
from reference import ACTIVATIONS, CONVOLUTIONS, LAYOUTS, relative_error
from torch.nn import functional as F

from fusedconv import _C, Activation, ForwardProblem, Norm, explain
from fusedconv.device import device_record
from fusedconv.functional import conv_transpose_act_norm, fold_batch_norm
from fusedconv.kernels import batch_norm
from fusedconv.kernels.compiled import group_norm_problem
from fusedconv.kernels.cuda.convolution import UNGROUPED
from fusedconv.kernels.cuda.program import run_program
from fusedconv.layout import empty, layout_of
from fusedconv.norms import folded_batch_norm
from fusedconv.problem import act_norm_act

pytestmark = pytest.mark.gpu

EPS = 1e-6
PRECISION = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
DTYPES = pytest.mark.parametrize("dtype", PRECISION, ids=str)


def over_channels(x, weight, bias):
    last = F.layer_norm(x.movedim(1, -1), x.shape[1:2], weight, bias, EPS)
    return last.movedim(-1, 1)


def alone(x, weight, bias, before=None, after=None, output_dtype=None, in_place=False):
    """The step of its own, from ``x`` of a dense layout into poisoned memory or over ``x``."""
    affine_dtype = None if weight is None else weight.dtype
    norm = Norm("layer", 0, EPS, weight is not None, bias is not None, affine_dtype)
    stages = (
        *(() if before is None else (Activation(before),)),
        norm,
        *(() if after is None else (Activation(after),)),
    )
    problem = ForwardProblem(
        dtype=x.dtype,
        output_dtype=output_dtype or x.dtype,
        precision=PRECISION[x.dtype],
        layout=layout_of(x.shape, x.stride()),
        aligned=x.data_ptr() % 16 == 0,
        batch=x.shape[0],
        channels=x.shape[1],
        spatial=tuple(x.shape[2:]),
        epilogue=stages,
    )
    layout = problem.output_layout
    output = x if in_place else empty(x, list(x.shape), layout, problem.output_dtype)
    if not in_place:
        output.fill_(torch.nan)
    device = device_record(x.device)
    program = _C.Program(device.index, problem.batch, 0)
    program.per_chunk(
        _C.layer_norm.Normalize(
            problem=group_norm_problem(
                problem,
                act_norm_act(stages, UNGROUPED),
                input_layout=layout,
                output_layout=layout,
            ),
            input=program.tensor(0, x[0].numel() * x.element_size()),
            weight=program.tensor(1, 0),
            bias=program.tensor(2, 0),
            output=program.tensor(3, x[0].numel() * output.element_size()),
        )
    )
    run_program(program, x.device, (x, weight, bias, output))
    return output


def parameters(channels, dtype):
    return [torch.randn(channels, device="cuda").to(dtype) for _ in range(2)]


def assert_as_accurate(actual, x, weight, bias, before=None, after=None):
    def run(*tensors):
        first, *affine = tensors
        return ACTIVATIONS[after](over_channels(ACTIVATIONS[before](first), *affine))

    wide = [None if each is None else each.double() for each in (x, weight, bias)]
    reference = run(*wide)
    eager = relative_error(run(x, weight, bias).to(actual.dtype), reference)
    assert relative_error(actual, reference) <= bound(eager, PRECISION[x.dtype])


@DTYPES
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("spatial", [(16, 16), (5, 7), (3,), (2, 3, 6)], ids=str)
@pytest.mark.parametrize("channels", [1, 3, 64, 72, 384, 1000, 4096, 5001])
def test_against_fp64(channels, spatial, layout, dtype):
    x = LAYOUTS[layout](torch.randn(3, channels, *spatial, device="cuda").to(dtype))
    weight, bias = parameters(channels, dtype)
    assert_as_accurate(alone(x, weight, bias), x, weight, bias)
    assert_as_accurate(alone(x, weight, bias, None, "gelu"), x, weight, bias, None, "gelu")


@DTYPES
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("spatial", [(1,), (2, 1), (2, 2)], ids=str)
def test_many_channels_of_few_pixels(spatial, layout, dtype):
    x = LAYOUTS[layout](torch.randn(2, 9000, *spatial, device="cuda").to(dtype))
    weight, bias = parameters(9000, dtype)
    assert_as_accurate(alone(x, weight, bias, None, "gelu"), x, weight, bias, None, "gelu")


@DTYPES
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("channels", [48, 520])
def test_activations_in_front_and_in_place(channels, layout, dtype):
    x = LAYOUTS[layout](torch.randn(2, channels, 9, 8, device="cuda").to(dtype))
    weight, bias = parameters(channels, torch.float32)
    if dtype is not torch.float32:
        weight, bias = weight.to(dtype), bias.to(dtype)
    expected = alone(x, weight, bias, "gelu", "silu")
    assert_as_accurate(expected, x, weight, bias, "gelu", "silu")
    assert torch.equal(alone(x.clone(), weight, bias, "gelu", "silu", in_place=True), expected)


@DTYPES
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("mean", [1e2, 1e4])
def test_a_large_mean_costs_no_precision(mean, layout, dtype):
    x = LAYOUTS[layout]((mean + torch.randn(2, 96, 8, 8, device="cuda")).to(dtype))
    assert_as_accurate(alone(x, None, None), x, None, None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("spatial", [(8, 8), (3, 5)], ids=str)
def test_an_output_in_float32_is_not_rounded(spatial, layout, dtype):
    x = LAYOUTS[layout](torch.randn(2, 40, *spatial, device="cuda").to(dtype))
    actual = alone(x, None, None, output_dtype=torch.float32)
    assert actual.dtype == torch.float32
    assert relative_error(actual, over_channels(x.double(), None, None)) < 5e-7


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_values_that_are_no_numbers_stay_at_their_pixels(layout):
    x = LAYOUTS[layout](torch.randn(1, 12, 4, 8, device="cuda"))
    x[0, 5, 1, 2], x[0, 0, 3, 3] = torch.nan, torch.inf
    x[0, :, 2, 2] = 0.1
    actual = alone(x, None, None)
    broken = actual.isnan().any(1)[0].nonzero().tolist()
    assert broken == [[1, 2], [3, 3]]
    assert actual[0, :, 2, 2].abs().max() < 1e-3


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("channels", [64, 112, 1000, 4096, 5001])
def test_equal_channels_have_no_deviation(channels, layout):
    """Of 8 bits their sum is exact, and so is their mean, whatever a reciprocal rounds."""
    values = torch.linspace(1, 1e4, 256, device="cuda").bfloat16()
    x = LAYOUTS[layout](values.reshape(1, 1, 16, 16).repeat(2, channels, 1, 1))
    bias = torch.randn(channels, device="cuda").bfloat16()
    actual = alone(x, torch.ones_like(bias), bias)
    assert torch.equal(actual, bias[:, None, None].expand_as(x))


@pytest.mark.parametrize("kernel", ["taps_sm80", "taps_sm90", "cutlass_sm90"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("saves", [False, True])
@DTYPES
def test_behind_a_convolution(kernel, layout, saves, dtype, force, monkeypatch):
    if kernel.endswith("sm90") and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the rows run on compute capability 9.0")
    if kernel == "cutlass_sm90" and layout == "nhwc":
        pytest.skip("its rows that end in place read NCHW")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    stride = 1 if kernel == "cutlass_sm90" else 2
    x = LAYOUTS[layout](torch.randn(2, 32, 16, 16, device="cuda").to(dtype))
    weight = (torch.randn(32, 40, 3, 3, device="cuda") / 17 * stride).to(dtype)
    bias = torch.randn(40, device="cuda").to(dtype)
    norm_weight, norm_bias = parameters(40, dtype)
    tensors = [x, weight, bias, norm_weight, norm_bias]
    for tensor in tensors:
        tensor.requires_grad_(saves)
    keywords = dict(stride=stride, padding=1, activation="gelu", order="norm_act", eps=EPS)

    def ours(x, weight, bias, norm_weight, norm_bias):
        return conv_transpose_act_norm(
            x, weight, bias, norm="layer", norm_weight=norm_weight, norm_bias=norm_bias, **keywords
        )

    def plain(x, weight, bias, norm_weight, norm_bias):
        convolved = CONVOLUTIONS[2](x, weight, bias, stride, 1)
        return F.gelu(over_channels(convolved, norm_weight, norm_bias))

    force(kernel)
    poison()
    actual = ours(*tensors)
    wide = [tensor.detach().double().requires_grad_(saves) for tensor in tensors]
    exact, eager = plain(*wide), plain(*tensors)
    limit = bound(relative_error(eager, exact), PRECISION[dtype])
    assert relative_error(actual, exact) <= limit
    if saves:
        grad = torch.randn_like(eager)
        found = torch.autograd.grad(actual, tensors, grad)
        true = torch.autograd.grad(exact, wide, grad.double())
        eagers = torch.autograd.grad(eager, tensors, grad)
        for got, right, other in zip(found, true, eagers, strict=True):
            limit = 1.2 * relative_error(other, right) + 2e-6
            assert relative_error(got, right) <= limit


@pytest.mark.parametrize("kernel", ["taps_sm80", "taps_sm90"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("given", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
@DTYPES
def test_an_affine_map_in_the_epilogue(kernel, groups, given, layout, dtype, force, monkeypatch):
    if kernel.endswith("sm90") and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the rows run on compute capability 9.0")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    x = LAYOUTS[layout](torch.randn(2, 32, 9, 8, device="cuda").to(dtype))
    weight = (torch.randn(32, 40 // groups, 4, 4, device="cuda") / 11).to(dtype)
    bias = torch.randn(40, device="cuda").to(dtype)
    affine = [torch.randn(40, device="cuda") if each else None for each in given]
    keywords = dict(stride=2, padding=1, groups=groups)

    def plain(x, weight, bias, scale, shift):
        x = CONVOLUTIONS[2](x, weight, bias, **keywords)
        x = x if scale is None else x * scale[:, None, None]
        return F.relu(x if shift is None else x + shift[:, None, None])

    tensors = [x, weight, bias, *affine]
    exact = plain(*(None if each is None else each.double() for each in tensors))
    force(kernel)
    poison()
    actual = conv_transpose_act_norm(
        x, weight, bias, norm="affine", norm_weight=affine[0], norm_bias=affine[1],
        activation="relu", order="norm_act", **keywords,
    )  # fmt: skip
    assert actual.dtype == dtype
    eager = relative_error(plain(*tensors).to(dtype), exact)
    assert relative_error(actual, exact) <= bound(eager, PRECISION[dtype])


@pytest.mark.parametrize("given", [(True, True), (True, False), (False, False)], ids=str)
@pytest.mark.parametrize("affine_dtype", PRECISION, ids=str)
@DTYPES
def test_running_statistics_are_folded(dtype, affine_dtype, given):
    mean = torch.randn(301, device="cuda").to(dtype)
    variance = torch.rand(301, device="cuda").to(dtype) + 0.1
    affine = [torch.randn(301, device="cuda").to(affine_dtype) if each else None for each in given]
    tensors = (mean, variance, *affine)
    assert batch_norm.folds(*tensors)
    poison()
    exact = folded_batch_norm(*(each if each is None else each.double() for each in tensors), EPS)
    for actual, expected in zip(fold_batch_norm(*tensors, EPS), exact, strict=True):
        assert actual.dtype == torch.float32
        assert relative_error(actual, expected) < 3e-7


def test_the_plan_says_so(force, capsys):
    force("taps_sm80")
    x = torch.randn(1, 32, 8, 8, device="cuda")
    weight = torch.randn(32, 16, 2, 2, device="cuda")
    explain(lambda x: conv_transpose_act_norm(x, weight, stride=2, norm="layer"), x)
    assert "layer norm over channels in one pass (nchw)" in capsys.readouterr().out
