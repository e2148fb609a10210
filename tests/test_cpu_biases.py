"""Biases that oneDNN would add slowly, element by element: where, and what is done instead."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import torch
from problems import explained, geometry_of, problem
from reference import LAYOUTS, assert_as_accurate_as_torch
from torch import Tensor

from fusedconv.device import AVX512, PROCESSOR, processor
from fusedconv.functional import conv_transpose_act_norm
from fusedconv.kernels import onednn
from fusedconv.kernels.cpu.biases import quick_bias
from fusedconv.precision import precisions_of
from fusedconv.problem import Bias, ForwardProblem
from fusedconv.selection import choose

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WIDE = processor({**dict.fromkeys(AVX512, True), "avx512_bf16": True})
CUT = "torch copy of the output without its last lines"
APART = "bias, in place (fusedconv._C)"


def layer(dtype: torch.dtype, layout: str, **changes: Any) -> ForwardProblem:
    """64 to 64 channels on planes of 64 squared, a filter of 4 and a stride of 2."""
    geometry = {"stride": 2, "padding": 1, "output_padding": 0, "dilation": 1, "groups": 1}
    geometry |= {name: changes.pop(name) for name in geometry.keys() & changes.keys()}
    kernel, groups = changes.pop("kernel", 4), geometry.pop("groups")
    weight = torch.empty(64, 64 // groups, kernel, kernel, device="meta")
    pairs = {name: (value, value) for name, value in geometry.items()}
    what: ForwardProblem = problem(
        dtype=dtype,
        output_dtype=dtype,
        precision=precisions_of(dtype)[-1],
        layout=layout,
        batch=2,
        channels=64,
        spatial=(64, 64),
        conv=geometry_of(weight, out_channels=64, groups=groups, **pairs),
        **({"epilogue": (Bias(),)} | changes),
    )
    return what


#: By changes, layout and dtype: None where it is quick, or the steps that make it so, "" for none.
EXPECTED = [
    ({}, "nchw", torch.float32, None),
    ({}, "nhwc", torch.bfloat16, None),
    # 127 columns, of which a stride of 2 divides 128.
    ({"kernel": 3}, "nhwc", torch.float32, APART),
    ({"kernel": 3}, "nhwc", torch.bfloat16, CUT),
    ({"kernel": 3}, "nchw", torch.bfloat16, CUT),
    ({"kernel": 3, "output_padding": 1}, "nhwc", torch.bfloat16, None),
    ({"dilation": 2, "padding": 2}, "nhwc", torch.float32, APART),
    ({"dilation": 2, "padding": 2}, "nhwc", torch.bfloat16, ""),
    ({"groups": 4}, "nhwc", torch.float32, None),
    ({"groups": 4}, "nhwc", torch.bfloat16, ""),
    ({"stride": 1}, "nchw", torch.float32, APART),
    ({"stride": 1}, "nchw", torch.bfloat16, ""),
    ({"stride": 1}, "nhwc", torch.float32, None),
    ({"kernel": 3, "epilogue": ()}, "nhwc", torch.bfloat16, None),
]


@pytest.mark.parametrize(("changes", "layout", "dtype", "expected"), EXPECTED, ids=str)
def test_where_a_bias_is_slow_and_what_is_done(changes, layout, dtype, expected):
    what = layer(dtype, layout, **changes)
    assert onednn.adds_bias_slowly(what, WIDE, dtype, layout) == (expected is not None)
    quick = quick_bias(what, WIDE, dtype, layout)
    assert (quick is not None) == bool(expected)
    slow, again = (
        onednn.forward_milliseconds(what, WIDE, dtype, layout, one_more_pass=one_more_pass)
        for one_more_pass in (False, True)
    )
    assert (again < slow) == (expected is not None)
    if expected:
        (piece, candidate), *_ = choose(what, WIDE).chosen
        assert candidate.kernel.provider == "cpu"
        if candidate.kernel.name == "cpu_conv_transpose":
            assert expected in candidate.kernel.compile(piece, WIDE).steps


def test_an_output_that_cannot_grow_is_left():
    """An output padding of the stride's size is none that torch takes."""
    what = layer(torch.bfloat16, "nhwc", kernel=2, stride=3, padding=0, output_padding=2)
    assert what.output_spatial[0] % 3 == 1
    assert quick_bias(what, WIDE, torch.bfloat16, "nhwc") is None
    smaller = layer(torch.bfloat16, "nhwc", kernel=2, stride=3, padding=0, output_padding=0)
    quick = quick_bias(smaller, WIDE, torch.bfloat16, "nhwc")
    assert quick is not None
    assert quick.output_padding == (1, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("norm", [None, "group"])
def test_values_are_as_accurate_as_torchs(norm, axes, layout, dtype):
    """As chosen on this processor: with what follows it, and alone."""
    torch.manual_seed(0)
    x = LAYOUTS[layout](torch.randn(2, 64, *[16] * axes).to(dtype))
    weight = (torch.randn(64, 24, *[3] * axes) / 24).to(dtype)
    bias = torch.randn(24).to(dtype)
    extra: dict[str, Any] = {"num_groups": 3, "activation": "gelu"} if norm else {}

    def run(function: Any, cast: Any) -> Tensor:
        leaves = [cast(tensor) for tensor in (x, weight, bias)]
        result: Tensor = function(*leaves, stride=2, padding=1, **extra)
        return result

    ours = run(conv_transpose_act_norm, torch.clone)
    plain = run(reference.conv_transpose_act_norm, torch.clone)
    exact = run(reference.conv_transpose_act_norm, torch.Tensor.double)
    assert_as_accurate_as_torch(ours, plain, exact)
    if dtype == torch.bfloat16 and PROCESSOR.bf16_flops < PROCESSOR.fp32_flops:
        return  # in float32, by which form the estimates say
    (explanation,) = explained(
        lambda: conv_transpose_act_norm(x, weight, bias, stride=2, padding=1, **extra)
    )
    assert explanation.provider == "cpu"


@pytest.mark.parametrize(
    ("shape", "weight", "keywords"),
    [
        ((1, 64, 9, 1), (64, 64, 3, 1), {"stride": (2, 1), "padding": (1, 0)}),
        ((1, 64, 9), (64, 24, 3), {"stride": 2, "padding": 1}),
    ],
    ids=str,
)
def test_a_cut_output_has_memory_of_its_own(shape, weight, keywords):
    x, weight = torch.randn(shape).bfloat16(), torch.randn(weight).bfloat16()
    y = conv_transpose_act_norm(x, weight, torch.randn(weight.shape[1]).bfloat16(), **keywords)
    assert y.untyped_storage().nbytes() == y.numel() * y.element_size()
    assert y.is_contiguous()
