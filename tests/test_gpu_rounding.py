"""How the operands of TF32 convolutions are rounded, to the bit: to nearest, ties to even, as
torch's own convolutions round. Each row, layout and way of reading memory has its own path."""

from __future__ import annotations

import itertools

import pytest
import torch
from gpu_checks import poison, round_to_tf32
from test_gpu_conv import conv_rows
from torch import Tensor

from fusedconv.functional import conv_transpose_act_norm
from fusedconv.registry import registry

ROWS = set(conv_rows())
KERNELS = [k for k in registry().kernels() if k.name in ROWS and k.precision == "tf32"]

#: (channels, innermost extent, elements from a 16-byte boundary to the tensor): lines and pixels of
#: whole 16 bytes or not, channels that fill a step of the tensor core or not.
CASES = [(16, 16, 0), (16, 13, 0), (20, 14, 0), (5, 16, 0), (7, 9, 0), (16, 16, 1), (64, 44, 0)]


def from_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def operands(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Normal numbers of either sign that tell ways to round apart: ties with an even and an odd
    last place, their neighbours, large and small exponents, and what torch.rand draws."""
    size = torch.Size(shape)

    def integers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, size, generator=generator, dtype=torch.int32)

    tails = torch.tensor([0x0FFF, 0x1000, 0x1000, 0x1001, 0x0000, 0x1FFF], dtype=torch.int32)
    exponents = torch.where(integers(0, 4) == 0, integers(8, 248), integers(120, 132))
    bits = exponents << 23 | integers(0, 1 << 10) << 13 | tails[integers(0, len(tails)).long()]
    drawn = torch.rand(size, generator=generator)
    values = torch.where(integers(0, 2) == 0, from_bits(bits), drawn)
    return torch.where(integers(0, 2) == 0, values, -values)


def on_gpu(x: Tensor, layout: str, offset: int = 0) -> Tensor:
    """The same values in a layout, ``offset`` elements behind a 16-byte boundary."""
    last = layout == "nhwc"
    dense = x.movedim(1, -1).contiguous() if last else x.contiguous()
    memory = torch.full((x.numel() + 4,), torch.nan, device="cuda")
    assert memory.data_ptr() % 16 == 0
    view = memory[offset : offset + x.numel()].view(dense.shape)
    view.copy_(dense)
    return view.movedim(-1, 1) if last else view


def axes_of(kernel) -> tuple[int, ...]:
    """Numbers of spatial axes that a row iterates; those of the sm_90 family take any."""
    dimensions = getattr(kernel.row, "dimensions", None)
    return (2, 3) if dimensions is None else (dimensions,)


@pytest.fixture
def run(monkeypatch):
    def convolve(kernel, x: Tensor, weight: Tensor) -> Tensor:
        if kernel.provider.endswith("sm90") and torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("the row runs on compute capability 9.0")
        monkeypatch.setenv("FUSEDCONV_KERNEL", kernel.name)
        poison()
        return conv_transpose_act_norm(x, weight.cuda(), None, precision="tf32").cpu()

    return convolve


def one_tap(channels: int, extents: tuple[int, ...], tap: tuple[int, ...]) -> Tensor:
    """A weight whose only tap copies each channel."""
    weight = torch.zeros(channels, channels, *extents)
    weight[(slice(None), slice(None), *tap)] = torch.eye(channels)
    return weight


def region(start: tuple[int, ...], extents: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(s, s + n) for s, n in zip(start, extents, strict=True))


def test_the_expected_rounding_is_to_nearest_even(generator):
    """The integer arithmetic on bits against fp64 arithmetic on values."""
    x = operands((1 << 16,), generator)
    _, exponent = torch.frexp(x.double())
    unit = torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponent - 11)
    expected = torch.round(x.double() / unit) * unit  # torch.round takes ties to even
    assert torch.equal(round_to_tf32(x).double(), expected)
    ties = from_bits(torch.tensor([0x3F801000, 0x3F803000, 0xBF801000 - (1 << 32)]))
    assert round_to_tf32(ties).tolist() == [1.0, 1.0 + 2**-9, -1.0]


@pytest.mark.gpu
@pytest.mark.parametrize("taps", [1, 3])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_input_is_rounded_to_nearest_even(kernel, layout, taps, run, generator):
    for axes, (channels, width, offset) in itertools.product(axes_of(kernel), CASES):
        if kernel.name.endswith("_ping_pong") and taps**axes * channels > 1024:
            continue  # it keeps the whole filter in shared memory
        spatial = (3, 11, width)[-axes:]
        x = operands((2, channels, *spatial), generator)
        tap = (taps - 1, 0, taps // 2)[-axes:]
        actual = run(kernel, on_gpu(x, layout, offset), one_tap(channels, (taps,) * axes, tap))
        expected = torch.zeros_like(actual)
        expected[(slice(None), slice(None), *region(tap, spatial))] = round_to_tf32(x)
        assert torch.equal(actual, expected), (axes, channels, width, offset)


@pytest.mark.gpu
@pytest.mark.parametrize("taps", [1, 3])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_weight_is_rounded_to_nearest_even(kernel, layout, taps, run, generator):
    for axes, (channels, out) in itertools.product(axes_of(kernel), ((16, 16), (5, 31), (20, 64))):
        extents = (taps,) * axes
        weight = operands((channels, out, *extents), generator)
        spatial = (3, 4, 9)[-axes:]
        place = (1, 2, 5)[-axes:]
        # Sample c holds a one in channel c, so its output is channel c's part of the weight.
        x = torch.zeros(channels, channels, *spatial)
        x[(slice(None), slice(None), *place)] = torch.eye(channels)
        actual = run(kernel, on_gpu(x, layout), weight)
        expected = torch.zeros_like(actual)
        expected[(slice(None), slice(None), *region(place, extents))] = round_to_tf32(weight)
        assert torch.equal(actual, expected), (axes, channels, out)


SPECIAL = {
    "inf": (0x7F800000, torch.inf),
    "-inf": (0xFF800000, -torch.inf),
    "largest": (0x7F7FFFFF, torch.inf),  # rounds up
    "largest TF32": (0x7F7FE000, 0x7FE000 / 2**23 * 2.0**127 + 2.0**127),
    "below the tie to infinity": (0x7F7FEFFF, 0x7FE000 / 2**23 * 2.0**127 + 2.0**127),
    "quiet NaN": (0x7FC00000, torch.nan),
    "canonical NaN": (0x7FFFFFFF, torch.nan),
    "negative NaN": (0xFFFFFFFF, torch.nan),
    "NaN whose payload rounding would lose": (0x7F800001, torch.nan),
}


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_values_that_do_not_round(kernel, special, layout, run, generator):
    """Infinity stays, NaN stays, and neither leaves its pixel (or, in a weight, its channels)."""
    bits, result = SPECIAL[special]
    value = from_bits(torch.tensor(bits if bits < 1 << 31 else bits - (1 << 32)))
    expected = torch.tensor(result)
    for width in (16, 13):
        axes = axes_of(kernel)[0]
        spatial = (2, 3, width)[-axes:]
        x = operands((1, 16, *spatial), generator)
        pixel = (0, 3, *(1,) * axes)
        x[pixel] = value
        actual = run(kernel, on_gpu(x, layout), one_tap(16, (1,) * axes, (0,) * axes))
        torch.testing.assert_close(actual[pixel], expected, rtol=0, atol=0, equal_nan=True)
        others = torch.ones(spatial, dtype=torch.bool)
        others[pixel[2:]] = False
        assert torch.equal(actual[:, :, others], round_to_tf32(x)[:, :, others])

        weight = one_tap(16, (1,) * axes, (0,) * axes)
        weight[pixel[1], 5] = value
        x = torch.ones(1, 16, *spatial)
        actual = run(kernel, on_gpu(x, layout), weight)
        place = (0, 5, *(0,) * axes)
        if not torch.isfinite(expected):
            torch.testing.assert_close(actual[place], expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(actual[:, :5], x[:, :5])
        assert torch.equal(actual[:, 6:], x[:, 6:])
