"""Transposed convolutions of stride two with all phases at once on the GPU, against fp64, relative
to eager's error."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from gpu_checks import FEWEST_NORMALISED_VALUES, fused_against_fp64, limit, poison
from reference import ACTIVATIONS, LAYOUTS, ORDERS, relative_error
from torch.nn import functional as F

from fusedconv.benchmark import DTYPES
from fusedconv.functional import conv_transpose_act_norm
from fusedconv.kernels.cuda.phases_sm90 import PhasesSm90
from fusedconv.registry import registry
from fusedconv.selection import clear_cache

pytestmark = pytest.mark.gpu

KERNELS = [kernel for kernel in registry().kernels() if isinstance(kernel, PhasesSm90)]
names = {"ids": lambda kernel: kernel.name}
PRECISIONS = pytest.mark.parametrize("precision", ["fp16", "bf16"])
EXTENTS = (1, 2, 3, 7, 8, 9, 12, 15, 16, 17, 20)
#: Of each row.
RANDOM_PROBLEMS = 40


@pytest.fixture(autouse=True)
def on_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the rows run on compute capability 9.0")


@pytest.fixture
def twice(monkeypatch):
    """twice(able): ``able`` decides whether a row computes twice; plans are made anew."""

    def use(able: Any) -> None:
        monkeypatch.setattr(PhasesSm90, "computes_twice", able)
        clear_cache()

    yield use
    clear_cache()


def served_problem(axes: int, generator: random.Random) -> dict[str, Any]:
    """A random problem that rows of so many axes serve, for ``fused_against_fp64``."""
    spatial = [generator.choice(EXTENTS) for _ in range(axes)]
    padding = [generator.choice((1, 1, 1, 3)) if extent > 3 else 1 for extent in spatial]
    extra = [generator.randrange(2) for _ in range(axes)]
    extents = [
        2 * extent + 1 - 2 * p + e for extent, p, e in zip(spatial, padding, extra, strict=True)
    ]
    out = generator.choice((1, 3, 8, 16, 24, 31, 32, 40, 48, 64, 72, 100))
    groups = generator.choice([None] + [each for each in (1, 4, 8, out) if out % each == 0])
    values = torch.Size(extents).numel()
    if groups and out // groups * values < FEWEST_NORMALISED_VALUES:
        groups = None
    return {
        "batch": generator.randint(1, 5),
        "channels": generator.choice((1, 3, 8, 16, 40, 48, 63, 64)),
        "out": out,
        "groups": groups,
        "spatial": spatial,
        "kernel": [3] * axes,
        "stride": [2] * axes,
        "padding": padding,
        "output_padding": extra,
        "dilation": [1] * axes,
        "bias": generator.random() < 0.7,
        "activation": generator.choice(list(ACTIVATIONS)),
        "order": generator.choice(ORDERS),
        "draw": generator.choice((torch.randn, torch.rand)),
        "saves": generator.random() < 0.3,
        "layout": generator.choice(("nhwc", "nhwc", "nchw")),
        "weight_layout": generator.choice(("nhwc", "nchw")),
        "offset": generator.choice((0.0, 0.0, 30.0)),
    }


@pytest.mark.parametrize("way", ["twice", "once"])
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_random_problems(kernel, way, force, twice):
    """``way``: whether what is normalised is computed twice where it can be."""
    force(kernel.name)
    twice(PhasesSm90.can_compute_twice if way == "twice" else lambda *_: False)
    generator = random.Random(kernel.name)
    for seed in range(RANDOM_PROBLEMS):
        torch.manual_seed(seed)
        case = served_problem(kernel.row.axes, generator)
        assert fused_against_fp64(case, DTYPES[kernel.precision], kernel.precision), case


def layer(precision: str, batch=3, channels=48, out=48, spatial=(9, 20, 17)):
    """(input, weight, bias), channels last."""
    torch.manual_seed(0)
    dtype = DTYPES[precision]
    x = LAYOUTS["nhwc"](torch.rand(batch, channels, *spatial, device="cuda").to(dtype))
    weight = torch.randn(channels, out, *[3] * len(spatial), device="cuda")
    weight /= (3.4 * channels) ** 0.5
    return x, weight.to(dtype), torch.randn(out, device="cuda").to(dtype)


def run(x, weight, bias, **norm) -> torch.Tensor:
    poison()
    with torch.no_grad():
        return conv_transpose_act_norm(
            x, weight, bias, stride=2, padding=1, output_padding=1, order="norm_act", **norm
        )


def plain_conv(x, weight, bias):
    conv = F.conv_transpose3d if x.dim() == 5 else F.conv_transpose2d
    return conv(x, weight, bias, stride=2, padding=1, output_padding=1)


def against_fp64(actual: torch.Tensor, plain, tensors, precision: str) -> None:
    exact = plain(*(each.double() for each in tensors))
    assert relative_error(actual, exact) <= limit(plain, tensors, exact, precision)


@PRECISIONS
@pytest.mark.parametrize("spatial", [(20, 17), (9, 20, 17)])
@pytest.mark.parametrize(("channels", "out"), [(16, 16), (56, 104), (96, 64), (128, 40)])
def test_channels(channels, out, spatial, precision, force):
    force("phases_sm90")
    if len(spatial) == 3 and channels > 96:
        channels = 64
    tensors = layer(precision, channels=channels, out=out, spatial=spatial)
    against_fp64(run(*tensors), plain_conv, tensors, precision)


@PRECISIONS
@pytest.mark.parametrize("activation", ["identity", "gelu"])
@pytest.mark.parametrize("spatial", [(30, 41), (9, 20, 17)])
def test_normalised_without_a_tensor_between(spatial, activation, precision, force, twice):
    """Statistics of a large mean, and of samples that have others."""
    force("phases_sm90")
    calls: list[bool] = []

    def able(self, problem, device):
        calls.append(self.can_compute_twice(problem, device))
        return calls[-1]

    twice(able)
    x, weight, bias = layer(precision, spatial=spatial)
    x *= torch.tensor([1.0, 5.0, 0.1], device="cuda").view(3, *[1] * (x.dim() - 1))
    bias += torch.linspace(-20, 20, 48, device="cuda")
    scale, shift = torch.randn(48, device="cuda"), torch.randn(48, device="cuda")
    scale, shift = scale.to(x.dtype), shift.to(x.dtype)
    for groups in (48, 6, 1):
        norm = {"num_groups": groups, "norm_weight": scale, "norm_bias": shift}
        actual = run(x, weight, bias, activation=activation, **norm)

        def plain(x, weight, bias, scale, shift, groups=groups):
            output = F.group_norm(plain_conv(x, weight, bias), groups, scale, shift)
            return F.gelu(output) if activation == "gelu" else output

        against_fp64(actual, plain, (x, weight, bias, scale, shift), precision)
        assert torch.equal(actual, run(x, weight, bias, activation=activation, **norm))
    assert calls and all(calls)


@PRECISIONS
def test_edges_are_not_the_next_samples(precision, force):
    """Copies beyond an axis's ends bring zeros, and so do channels that are not there."""
    force("phases_sm90")
    x, weight, bias = layer(precision, channels=40)
    x[..., [0, -1]] = x[:, :, [0, -1]] = 100.0
    against_fp64(run(x, weight, bias), plain_conv, (x, weight, bias), precision)
    x[1] = torch.nan
    actual = run(x, weight, bias)
    assert actual[1].isnan().all() and not actual[[0, 2]].isnan().any()


@pytest.mark.parametrize("spatial", [(8, 8), (2, 8, 8)])
def test_gelu_of_every_size(spatial, force):
    """Of each bfloat16 up to 32 its shorter polynomial is off by less than rounding may be, and in
    the tail by less than torch's tests allow."""
    force("phases_sm90")
    values = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = torch.cat([values[values <= 32], -values[values <= 32]]).cuda()
    channels, pixels = 32, torch.Size(spatial).numel()
    samples = -(-len(values) // (channels * pixels))
    x = torch.zeros(samples * channels * pixels, dtype=torch.bfloat16, device="cuda")
    x[: len(values)] = values
    x = LAYOUTS["nhwc"](x.view(samples, channels, *spatial))
    weight = torch.zeros(channels, channels, *[3] * len(spatial), device="cuda")
    weight[(..., *[1] * len(spatial))] = torch.eye(channels, device="cuda")
    poison()
    with torch.no_grad():
        output = conv_transpose_act_norm(
            x, weight.bfloat16(), None, stride=2, padding=1, activation="gelu", order="norm_act"
        )
    # Even outputs are the inputs.
    actual = output[(..., *[slice(None, None, 2)] * len(spatial))].double()
    exact = F.gelu(x.double())
    step = torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=2.0**-126)))) * 2.0**-7
    allowed = torch.where(x.abs() < 0.5, 6e-4 * exact.abs(), 2.5e-4)
    assert ((actual - exact).abs() <= 0.5 * step + allowed).all()
    torch.testing.assert_close(actual, exact, rtol=1.6e-2, atol=1e-5)  # as of bfloat16


@PRECISIONS
def test_a_folded_batch_norm(precision, force):
    """Scale and shift in the epilogue, which change from call to call."""
    force("phases_sm90")
    x, weight, bias = layer(precision)
    mean, variance = torch.empty(48, device="cuda"), torch.empty(48, device="cuda")
    for _ in range(6):
        mean.uniform_(-3.0, 3.0)
        variance.uniform_(0.2, 4.0)
        norm = {"norm": "batch", "running_mean": mean, "running_var": variance}
        actual = run(x, weight, bias, activation="silu", **norm)

        def plain(x, weight, bias):
            wide = x.dtype is torch.double
            own = (mean.double(), variance.double()) if wide else (mean, variance)
            return F.silu(F.batch_norm(plain_conv(x, weight, bias), *own))

        against_fp64(actual, plain, (x, weight, bias), precision)


@PRECISIONS
@pytest.mark.parametrize("way", ["twice", "once"])
def test_the_same_bits_each_time_and_in_any_batch(way, precision, force, twice):
    force("phases_sm90")
    twice(PhasesSm90.can_compute_twice if way == "twice" else lambda *_: False)
    x, weight, bias = layer(precision, batch=7)
    norm = {"num_groups": 8, "activation": "relu"}
    whole = run(x, weight, bias, **norm)
    assert torch.equal(whole, run(x, weight, bias, **norm))
    alone = LAYOUTS["nhwc"](x[2:3].clone())
    assert torch.equal(whole[2:3], run(alone, weight, bias, **norm))
