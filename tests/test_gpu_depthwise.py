"""Depthwise transposed convolutions that are computed twice on the GPU, against fp64, relative to
eager's error."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_checks import (
    FEWEST_NORMALISED_VALUES,
    bound,
    fused_against_fp64,
    output_extent,
    poison,
)
from problems import explained
from reference import ACTIVATIONS, ORDERS, relative_error
from reference import conv_transpose_act_norm as composition
from test_steps import KERNELS as STEPS
from test_steps import assert_matches, expected, kernels_of

import fusedconv
from fusedconv.benchmark import DTYPES
from fusedconv.functional import conv_transpose_act_norm
from fusedconv.kernels.cuda import depthwise
from fusedconv.kernels.cuda.depthwise import Depthwise
from fusedconv.registry import registry

pytestmark = pytest.mark.gpu

KERNELS = [kernel for kernel in registry().kernels() if isinstance(kernel, Depthwise)]
#: Rows, and the precisions that they serve.
SERVED = [
    (kernel, precision)
    for kernel in KERNELS
    for precision in (("fp32", "tf32") if kernel.precision == "fp32" else (kernel.precision,))
]
names = {"ids": lambda kernel: kernel.name}
rows = pytest.mark.parametrize(
    ("kernel", "precision"), SERVED, ids=[f"{kernel.name}-{each}" for kernel, each in SERVED]
)
#: Of each row and precision.
RANDOM_PROBLEMS = 80


def of(**changes: Any) -> dict[str, Any]:
    """A small layer, each channel of which is normalised, changed; ``channels`` are all three."""
    channels = changes.pop("channels", 5)
    return {
        "batch": 2,
        "channels": channels,
        "out": channels,
        "conv_groups": channels,
        "groups": channels,
        "spatial": [5, 9, 21],
        "kernel": [3, 3, 3],
        "stride": [2, 2, 2],
        "padding": [1, 1, 1],
        "dilation": [1, 1, 1],
        "bias": True,
        "activation": None,
        "draw": torch.randn,
        **changes,
    }


def served(case: dict[str, Any], precision: str) -> bool:
    return fused_against_fp64(case, DTYPES[precision], precision)


def drawn(precision: str, generator: random.Random) -> dict[str, Any]:
    while True:
        spatial = [generator.randint(1, largest) for largest in (13, 20, 70)]
        extra = [generator.randint(0, 1) for _ in range(3)]
        outputs = [
            output_extent(n, 3, 2, 1, more, 1) for n, more in zip(spatial, extra, strict=True)
        ]
        if math.prod(outputs) >= FEWEST_NORMALISED_VALUES:
            break
    return of(
        batch=generator.randint(1, 3),
        channels=generator.choice((1, 2, 7, 50, 150)),
        spatial=spatial,
        output_padding=extra,
        layout=generator.choice(("nchw", "nchw", "strided")),
        bias=generator.random() < 0.7,
        activation=generator.choice(list(ACTIVATIONS)),
        order=generator.choice(ORDERS),
        draw=generator.choice((torch.randn, torch.rand)),
        offset=generator.choice((0.0, 0.0, 300.0)) if precision in ("fp32", "tf32") else 0.0,
    )


@rows
def test_random_problems(kernel, precision, only):
    only(kernel, precision)
    generator = random.Random(f"{kernel.name} {precision}")
    for number in range(RANDOM_PROBLEMS):
        torch.manual_seed(number)
        case = drawn(precision, generator)
        assert served(case, precision), case


@pytest.mark.parametrize("extra", [0, 1])
@rows
def test_lines_of_any_width(kernel, precision, extra, only):
    """Of a run or less to some, whole 16 bytes and others; outputs begin anywhere."""
    only(kernel, precision)
    for width in range(1, 71):
        case = of(spatial=[4, 3, width], channels=3, output_padding=[extra] * 3)
        assert served(case, precision)


@pytest.mark.parametrize(
    "changes",
    [
        dict(spatial=[32, 32, 32], channels=128),
        dict(spatial=[32, 32, 32], channels=128, batch=1),  # a cluster of two blocks
        dict(spatial=[32, 32, 32], channels=3),  # of four
        dict(spatial=[64, 64, 64], channels=8, batch=1),  # several tiles of a plane
        dict(spatial=[1, 40, 64]),
        dict(spatial=[2, 7, 9]),
        dict(spatial=[3, 1, 40]),
        dict(spatial=[300, 3, 5]),  # sums that begin anew within a part
        dict(spatial=[300, 3, 8], channels=140),  # of a block that has all parts
        dict(spatial=[2, 300, 2]),
        dict(spatial=[2, 301, 8]),
        dict(spatial=[3, 3, 1024]),
        dict(spatial=[3, 5, 1021]),
        dict(spatial=[9, 17, 16], channels=140, output_padding=[0, 1, 0]),
    ],
    ids=str,
)
@rows
def test_sizes(kernel, precision, changes, only):
    only(kernel, precision)
    for draw in (torch.randn, torch.rand):
        assert served(of(**{**changes, "draw": draw}), precision)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@rows
def test_activations(kernel, precision, activation, order, only):
    only(kernel, precision)
    for spatial in ([6, 9, 24], [6, 9, 23]):
        assert served(of(spatial=spatial, activation=activation, order=order), precision)


@pytest.mark.parametrize("offset", [300.0, -1000.0])
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_a_large_mean_costs_no_precision(precision, offset, only):
    kernel = next(k for k in KERNELS if k.precision == "fp32")
    only(kernel, precision)
    for activation, order in ((None, "norm_act"), ("relu", "act_norm"), ("relu", "norm_act")):
        sizes = dict(spatial=[16, 32, 32], activation=activation, order=order, offset=offset)
        # A ReLU of what is far below zero leaves nothing but zeros.
        if offset > 0 or order == "norm_act":
            assert served(of(**sizes), precision)


# ---- the arguments of a normalisation ------------------------------------------------------------


def layer(dtype: torch.dtype, batch: int = 3, **changes: Any) -> dict[str, Any]:
    channels = 6
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    return {
        "input": draw(batch, channels, 7, 10, 24).to(dtype),
        "weight": (draw(channels, 1, 3, 3, 3) * 0.4).to(dtype),
        "bias": draw(channels).to(dtype),
        "stride": 2,
        "padding": 1,
        "groups": channels,
        "norm": "instance",
        **changes,
    }


def against_fp64(precision: str, arguments: dict[str, Any]) -> None:
    def each(convert: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
        return [
            convert(value) if isinstance(value, torch.Tensor) else value
            for value in arguments.values()
        ]

    def run(values: list[Any]) -> torch.Tensor:
        called = dict(zip(arguments, values, strict=True))
        x = called.pop("input")
        if "norm_bias" in called and "norm_weight" not in called:
            called["norm_weight"] = torch.ones_like(called["norm_bias"])
        # torch wants them in the input's dtype.
        for name in ("norm_weight", "norm_bias"):
            if name in called:
                called[name] = called[name].to(x.dtype)
        return composition(x, called.pop("weight"), called.pop("bias"), **called)

    exact = run(each(torch.Tensor.double))
    eager = relative_error(run(each(lambda tensor: tensor)), exact)
    poison()
    explicit = precision if arguments["input"].dtype is torch.float32 else None
    actual = conv_transpose_act_norm(**arguments, precision=explicit)
    assert relative_error(actual, exact) <= bound(eager, precision)


@pytest.mark.parametrize("affine", [(), ("weight",), ("bias",), ("weight", "bias")])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@rows
def test_affine_of_any_dtype(kernel, precision, kind, affine, only):
    only(kernel, precision)
    # Quarters, which all dtypes have.
    quarters = torch.tensor([-3.0, 0.25, 1.0, -0.5, 2.0, 1.75], device="cuda").to(kind)
    given = {f"norm_{name}": quarters.roll(len(name)) for name in affine}
    dtype = DTYPES[precision]
    against_fp64(precision, layer(dtype, **given))


@pytest.mark.parametrize("eps", [1e-5, 1e-2, 3.0])
@rows
def test_eps(kernel, precision, eps, only):
    only(kernel, precision)
    against_fp64(precision, layer(DTYPES[precision], eps=eps))


@pytest.mark.parametrize("lies", ["channels_last", "reversed", "unaligned"])
@rows
def test_weights_as_they_lie(kernel, precision, lies, only):
    only(kernel, precision)
    arguments = layer(DTYPES[precision])
    weight = arguments["weight"]
    if lies == "channels_last":
        weight = weight.contiguous(memory_format=torch.channels_last_3d)
    elif lies == "reversed":
        weight = weight.permute(4, 3, 2, 1, 0).contiguous().permute(4, 3, 2, 1, 0)
    else:
        weight = torch.cat([weight.flatten()[:1], weight.flatten()])[1:].view(weight.shape)
    against_fp64(precision, {**arguments, "weight": weight})


@rows
def test_an_input_that_is_not_aligned(kernel, precision, only):
    only(kernel, precision)
    arguments = layer(DTYPES[precision])
    x = arguments["input"]
    x = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)
    assert x.data_ptr() % 16
    against_fp64(precision, {**arguments, "input": x})


# ---- constants and what is not finite ------------------------------------------------------------


@pytest.mark.parametrize("width", [24, 23])
@rows
def test_values_without_deviations_give_the_norms_bias(kernel, precision, width, only):
    """Of weights that interpolate: without output padding a constant input has constant outputs.
    Constants are of few bits, so that no sum is rounded."""
    only(kernel, precision)
    dtype = DTYPES[precision]
    hat = torch.tensor([0.5, 1.0, 0.5], device="cuda")
    hat = (hat[:, None, None] * hat[:, None] * hat).to(dtype).expand(6, 1, 3, 3, 3)
    shift = torch.randn(6, device="cuda").to(dtype)
    for weight, constant in ((hat, 1000.0), (hat, 0.3125), (torch.zeros_like(hat), 1000.0)):
        arguments = layer(dtype, norm_weight=torch.ones_like(shift), norm_bias=shift)
        x = torch.full((3, 6, 7, 10, width), constant, device="cuda").to(dtype)
        poison()
        actual = conv_transpose_act_norm(
            **{**arguments, "input": x, "weight": weight.contiguous()},
            precision=precision if dtype is torch.float32 else None,
        )
        assert torch.equal(actual, shift[None, :, None, None, None].expand_as(actual))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=str)
@rows
def test_what_is_not_finite_stays_in_its_channel(kernel, precision, value, only):
    only(kernel, precision)
    arguments = layer(DTYPES[precision])
    explicit = precision if DTYPES[precision] is torch.float32 else None
    finite = conv_transpose_act_norm(**arguments, precision=explicit)
    arguments["input"][1, 2, 3, 4, 5] = value
    actual = conv_transpose_act_norm(**arguments, precision=explicit)
    assert actual[1, 2].isnan().all()
    actual[1, 2] = finite[1, 2]
    assert torch.equal(actual, finite)


# ---- calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [None, "gelu"])
@rows
def test_same_bits_alone_in_a_batch_and_each_time(kernel, precision, activation, only):
    """With a block for each channel of a sample, and with clusters of two and of four."""
    only(kernel, precision)
    dtype = DTYPES[precision]
    explicit = precision if dtype is torch.float32 else None
    for spatial in ((19, 20, 24), (150, 20, 21), (3, 40, 64)):
        arguments = layer(dtype, activation=activation)
        arguments["input"] = torch.rand(24, 6, *spatial, device="cuda").to(dtype)

        def run(x: torch.Tensor, arguments: Any = arguments) -> torch.Tensor:
            poison()
            return conv_transpose_act_norm(**{**arguments, "input": x}, precision=explicit)

        x = arguments["input"]
        together = run(x)
        for _ in range(10):
            assert torch.equal(run(x), together)
        assert torch.equal(run(x[3:4]), together[3:4])
        assert torch.equal(run(x[4:15]), together[4:15])


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_a_batch_in_chunks_has_the_same_bits(kernel, only, monkeypatch):
    only(kernel, kernel.precision)
    dtype = DTYPES[kernel.precision]
    arguments = layer(dtype, batch=9, precision="fp32" if dtype is torch.float32 else None)
    whole = conv_transpose_act_norm(**arguments)
    monkeypatch.setattr(depthwise, "MOST_BLOCKS", 6 * 4 * 2)
    fusedconv.clear_cache()
    explanation = explained(lambda: conv_transpose_act_norm(**arguments))[0]
    assert "for each 2 samples" in explanation.steps[0]
    assert torch.equal(conv_transpose_act_norm(**arguments), whole)


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_an_empty_batch(kernel):
    arguments = layer(DTYPES[kernel.precision], batch=0)
    assert conv_transpose_act_norm(**arguments).shape == (0, 6, 13, 19, 47)


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_it_is_chosen_for_a_layer_of_mednext(kernel, monkeypatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the rows run on compute capability 9.0")
    dtype = DTYPES[kernel.precision]
    x = torch.rand(2, 128, 32, 32, 32, device="cuda").to(dtype)
    weight = torch.rand(128, 1, 3, 3, 3, device="cuda").to(dtype)

    def run(gradients: bool = False) -> torch.Tensor:
        return conv_transpose_act_norm(
            x.requires_grad_(gradients), weight, None, 2, 1, groups=128, num_groups=128,
            precision="fp32" if dtype is torch.float32 else None,
        )  # fmt: skip

    assert explained(run)[0].kernel == kernel.name
    assert explained(lambda: run(True), gradients=True)[0].kernel != kernel.name


@pytest.mark.parametrize(
    "changes",
    [dict(saves=True), dict(stride=[1, 2, 2]), dict(kernel=[3, 3, 4]), dict(groups=1)],
    ids=str,
)
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_what_is_refused(kernel, changes, only):
    only(kernel, kernel.precision)
    assert served(of(), kernel.precision)
    assert not served(of(**changes), kernel.precision)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_steps_are_what_runs(kernel, activation, only):
    only(kernel, kernel.precision)
    dtype = DTYPES[kernel.precision]
    arguments = layer(
        dtype, activation=activation, precision="fp32" if dtype is torch.float32 else None
    )

    def call() -> torch.Tensor:
        return conv_transpose_act_norm(**arguments)

    explanation = explained(call)[0]
    assert explanation.kernel == kernel.name
    with torch.no_grad():
        started = kernels_of(call)
    assert_matches(started, expected(explanation.steps, STEPS))
