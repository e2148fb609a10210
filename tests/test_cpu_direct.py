"""Convolutions of few channels a group on processors: values over the whole parameter space, the
same bits for any number of threads, the choice."""

from __future__ import annotations

import random
from typing import Any

import pytest
import reference
import torch
from problems import backward_problem, explained, geometry_of, problem
from reference import GRADIENT_FLOOR, LAYOUTS, assert_as_accurate_as_torch
from torch import Tensor

from fusedconv import _C
from fusedconv.device import AVX512, processor
from fusedconv.functional import conv_transpose_act_norm
from fusedconv.kernels.compiled import transposed_problem
from fusedconv.kernels.cpu.conv_transpose import kernels as forward_kernels
from fusedconv.kernels.cpu.direct import kernels as backward_kernels
from fusedconv.precision import COMPILED_DTYPES, precisions_of
from fusedconv.problem import Bias, ForwardProblem
from fusedconv.selection import choose

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WIDE = processor({**dict.fromkeys(AVX512, True), "avx512_bf16": True})
FORCED = "cpu_direct,cpu_direct_backward,cpu_bias_backward"


def random_case(generator: random.Random) -> dict[str, Any]:
    """Sizes of a group's few channels; taps that meet nothing and outputs that no tap meets too."""
    while True:
        axes = generator.choice((1, 2, 2, 3))
        kernel = [generator.randint(1, 6 if axes < 3 else 3) for _ in range(axes)]
        stride = [generator.randint(1, 4) for _ in range(axes)]
        dilation = [generator.choice((1, 1, 2, 3)) for _ in range(axes)]
        case = {
            "batch": generator.randint(1, 3),
            "groups": generator.choice((1, 1, 2, 5)),
            "inputs": generator.choice((1, 1, 2, 3)),
            "outputs": generator.choice((1, 1, 2, 4)),
            "spatial": [generator.randint(1, {1: 90, 2: 23, 3: 7}[axes]) for _ in range(axes)],
            "kernel": kernel,
            "stride": stride,
            "dilation": dilation,
            "padding": [generator.randint(0, 3) for _ in range(axes)],
            "output_padding": [
                generator.randrange(max(pair)) for pair in zip(stride, dilation, strict=True)
            ],
        }
        if min(problem_of(case).output_spatial) > 0:
            return case


def problem_of(case: dict[str, Any], dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    channels, outputs = (case[name] * case["groups"] for name in ("inputs", "outputs"))
    weight = torch.empty(channels, case["outputs"], *case["kernel"], device="meta")
    names = ("stride", "padding", "output_padding", "dilation")
    return problem(
        dtype=dtype,
        output_dtype=dtype,
        precision=precisions_of(dtype)[-1],
        batch=case["batch"],
        channels=channels,
        spatial=tuple(case["spatial"]),
        conv=geometry_of(
            weight,
            out_channels=outputs,
            groups=case["groups"],
            **{name: tuple(case[name]) for name in names},
        ),
        **({"norm": None, "activation": "identity"} | changes),
    )


def tensors_of(case: dict[str, Any], dtype: torch.dtype, layout: str = "nchw") -> list[Tensor]:
    torch.manual_seed(0)
    channels, outputs = (case[name] * case["groups"] for name in ("inputs", "outputs"))
    x = LAYOUTS[layout](torch.randn(case["batch"], channels, *case["spatial"]).to(dtype))
    weight = torch.randn(channels, case["outputs"], *case["kernel"]).to(dtype)
    return [x, weight, torch.randn(outputs).to(dtype)]


def keywords(case: dict[str, Any]) -> dict[str, Any]:
    names = ("stride", "padding", "output_padding", "dilation", "groups")
    return {name: case[name] for name in names}


def computed(function: Any, given: list[Tensor], case: dict[str, Any]) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in given]
    y = function(*leaves, **keywords(case))
    grad = reference.cotangent(y)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def torchs(x: Tensor, weight: Tensor, bias: Tensor, **geometry: Any) -> Tensor:
    result: Tensor = reference.CONVOLUTIONS[x.dim() - 2](x, weight, bias, **geometry)
    return result


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_random_problems_are_as_accurate_as_torchs(seed, dtype, layout, force):
    generator = random.Random(seed)
    force(FORCED)
    for _ in range(5):
        case = random_case(generator)
        given = tensors_of(case, dtype, layout)
        (explanation,) = explained(conv_transpose_act_norm, *given, **keywords(case))
        assert explanation.kernel == "cpu_direct"
        actual = computed(conv_transpose_act_norm, given, case)
        plain = computed(torchs, given, case)
        exact = computed(torchs, [tensor.double() for tensor in given], case)
        for a, p, e in zip(actual, plain, exact, strict=True):
            # A gradient of a few values, of which terms cancel.
            floor = GRADIENT_FLOOR[dtype] * (10 if e.numel() < 50 else 1)
            assert_as_accurate_as_torch(a, p, e, floor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_number_of_threads_changes_no_bit(dtype, threads, force):
    force(FORCED)
    case = {
        "batch": 2, "groups": 6, "inputs": 2, "outputs": 1, "spatial": [40, 50], "kernel": [4, 3],
        "stride": [2, 3], "padding": [1, 0], "output_padding": [0, 1], "dilation": [1, 1],
    }  # fmt: skip
    given = tensors_of(case, dtype)
    found = []
    for count in (1, 2, 5):
        threads(count)
        found.append(computed(conv_transpose_act_norm, given, case))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_every_element_is_written(force):
    """Whatever the memory held: of an output, and of what gradients are added up in."""
    case = {
        "batch": 2, "groups": 3, "inputs": 1, "outputs": 2, "spatial": [5, 19], "kernel": [2, 2],
        "stride": [3, 3], "padding": [0, 0], "output_padding": [2, 1], "dilation": [1, 1],
    }  # fmt: skip
    x, weight, bias = tensors_of(case, torch.float32)
    what = problem_of(case)
    compiled = transposed_problem(what.conv, what.spatial, "nchw", True)
    dtype = COMPILED_DTYPES[torch.float32]
    output = torch.full(what.output_shape, torch.nan)
    _C.cpu.direct_convolution(
        compiled, dtype, 2, x.data_ptr(), weight.data_ptr(), bias.data_ptr(), output.data_ptr(), 2
    )
    torch.testing.assert_close(output, torchs(x, weight, bias, **keywords(case)))
    grad = torch.randn_like(output)
    grad_input, grad_weight = torch.full_like(x, torch.nan), torch.full_like(weight, torch.nan)
    _C.cpu.direct_input_gradient(
        compiled, dtype, 2, grad.data_ptr(), weight.data_ptr(), grad_input.data_ptr(), 2
    )
    _C.cpu.direct_weight_gradient(
        compiled, dtype, 2, x.data_ptr(), grad.data_ptr(), grad_weight.data_ptr(), 2
    )
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    expected = torch.autograd.grad(torchs(*leaves, bias, **keywords(case)), leaves, grad)
    torch.testing.assert_close((grad_input, grad_weight), expected, rtol=1e-5, atol=1e-5)


def test_the_binding_checks_what_it_gets():
    case = random_case(random.Random(0))
    what = problem_of(case)
    compiled = transposed_problem(what.conv, what.spatial, "nchw", True)
    last = transposed_problem(what.conv, what.spatial, "nhwc", True)
    dtype = COMPILED_DTYPES[torch.float32]
    for arguments, text in (
        ((compiled, dtype, 1, 0, 8, 0, 8, 1), "input: got null"),
        ((compiled, dtype, 1, 8, 0, 0, 8, 1), "weight: got null"),
        ((compiled, dtype, 1, 8, 8, 0, 0, 1), "output: got null"),
        ((compiled, dtype, 0, 8, 8, 0, 8, 1), "batch: got 0"),
        ((compiled, dtype, 1, 8, 8, 0, 8, 0), "threads: got 0"),
        ((last, dtype, 1, 8, 8, 0, 8, 1), "layout: got channels last"),
    ):
        with pytest.raises(ValueError, match=f"^direct_convolution: {text}"):
            _C.cpu.direct_convolution(*arguments)


@pytest.mark.parametrize(
    ("shape", "weight", "keywords", "reason"),
    [
        ((1, 16, 1, 1), (16, 1, 1, 1), {"stride": (1, 2**31 - 1), "groups": 16}, "counted to"),
        ((1, 2, 3, 3), (2, 1, 1, 1), {"dilation": (2**31, 2**31), "groups": 2}, "counted to"),
        ((1, 16, 20), (16, 1, 512), {"stride": 256, "groups": 16}, "a stride of 256 along"),
        ((1, 4, 2, 300), (4, 1, 900, 3), {"stride": (1, 16), "groups": 4}, "MB of them are held"),
    ],
    ids=str,
)
def test_extents_beyond_the_loops_are_torchs(shape, weight, keywords, reason):
    x, weight = torch.randn(shape), torch.randn(weight)
    (explanation,) = explained(conv_transpose_act_norm, x, weight, **keywords)
    assert explanation.kernel != "cpu_direct"
    ((_, candidates),) = explanation.candidates
    (support,) = [each.support for each in candidates if each.kernel.name == "cpu_direct"]
    assert reason in support.reason
    expected = reference.CONVOLUTIONS[x.dim() - 2](x, weight, None, **keywords)
    torch.testing.assert_close(conv_transpose_act_norm(x, weight, **keywords), expected)


def layer(
    groups: int, inputs: int, outputs: int, dtype: torch.dtype = torch.float32, **changes: Any
) -> ForwardProblem:
    case = {
        "batch": 2, "groups": groups, "inputs": inputs, "outputs": outputs, "spatial": [64, 64],
        "kernel": [4, 4], "stride": [2, 2], "padding": [1, 1], "output_padding": [0, 0],
        "dilation": [1, 1],
    }  # fmt: skip
    names = case.keys() & changes.keys()
    case |= {name: changes.pop(name) for name in names}
    what: ForwardProblem = problem_of(case, dtype, **changes)
    return what


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [(torch.float32, "nchw"), (torch.bfloat16, "nchw"), (torch.bfloat16, "nhwc")],
    ids=str,
)
def test_depthwise_convolutions_are_summed_directly(dtype, layout):
    what = layer(128, 1, 1, dtype, layout=layout, save=True, epilogue=(Bias(),))
    assert choose(what, WIDE).chosen[0][1].kernel.name == "cpu_direct"
    gradients = backward_problem(what, "weight", grad_layout=layout)
    assert choose(gradients, WIDE).chosen[0][1].kernel.name == "cpu_direct_backward"


def test_many_channels_are_not():
    (kernel,) = [each for each in forward_kernels() if each.name == "cpu_direct"]
    support = kernel.supports(layer(1, 64, 64), WIDE)
    assert support.reason == (
        "a group has 64 input and 64 output channels, up to 16 input channels or 64 pairs are "
        "served"
    )
    assert kernel.supports(layer(1, 16, 256), WIDE)
    assert kernel.supports(layer(8, 32, 2), WIDE)
    assert "float64" in kernel.supports(layer(8, 1, 1, torch.float64), WIDE).reason
    (backward,) = backward_kernels()
    assert backward.supports(backward_problem(layer(8, 32, 2, save=True), "weight"), WIDE)
    support = backward.supports(backward_problem(layer(1, 16, 256, save=True), "weight"), WIDE)
    assert support.reason == (
        "a group has 16 input and 256 output channels, up to 64 pairs are served"
    )
