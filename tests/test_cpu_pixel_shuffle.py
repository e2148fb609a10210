"""Compiled matrix products on processors that end in the output's places: values against float64,
bits, choice, refusals."""

from __future__ import annotations

import random

import pytest
import reference
import torch
from problems import explained, geometry_of, problem
from reference import FLOOR, channels_last, relative_error

from fusedconv import _C
from fusedconv.activations import COMPILED
from fusedconv.device import AVX512, PROCESSOR, processor
from fusedconv.functional import conv_transpose_act_norm
from fusedconv.kernels.compiled import transposed_problem
from fusedconv.kernels.cpu.pixel_shuffle import PixelShuffle
from fusedconv.precision import COMPILED_DTYPES

KERNEL = "cpu_pixel_shuffle"
ACTIVATIONS = {
    None: lambda x: x,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
}


def random_case(rng):
    """Input, weight, bias or None, and the stride; extents that no block of a product divides."""
    axes = rng.choice([1, 2, 3])
    kernel = [rng.choice([1, 2, 2, 3, 4, 7]) for _ in range(axes)]
    channels, outputs = (rng.choice([1, 3, 16, 63, 64, 65, 130, 300]) for _ in range(2))
    spatial = [rng.choice([[1, 5, 64, 131], [1, 5, 8, 33], [1, 2, 3, 7]][axes - 1])
               for _ in range(axes)]  # fmt: skip
    make = rng.choice([torch.randn, torch.rand])  # whose sums are of one sign
    x = make(rng.choice([1, 2, 3]), channels, *spatial)
    weight = make(channels, outputs, *kernel) / channels
    bias = rng.choice([None, 10 * make(outputs)])
    if rng.random() < 0.5:
        x = channels_last(x) if axes > 1 else x
        weight = channels_last(weight) if axes > 1 and rng.random() < 0.5 else weight
    return x, weight, bias, kernel


@pytest.mark.parametrize("seed", range(60))
def test_against_float64(seed, force):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    force(KERNEL)
    dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    x, weight, bias, stride = random_case(rng)
    activation = rng.choice(list(ACTIVATIONS))
    given = [None if each is None else each.to(dtype) for each in (x, weight, bias)]

    def torchs(cast):
        convolve = reference.CONVOLUTIONS[x.dim() - 2]
        cast_given = [None if each is None else cast(each) for each in given]
        return ACTIVATIONS[activation](convolve(*cast_given, stride=stride))

    found = conv_transpose_act_norm(*given, stride=stride, activation=activation)
    plain, exact = torchs(lambda each: each), torchs(torch.Tensor.double)
    assert found.shape == exact.shape and found.dtype == dtype
    assert found.is_contiguous() or found.movedim(1, -1).is_contiguous()
    # Over a few values chance parts errors that are alike.
    floor = FLOOR[dtype] * (1 if exact.numel() > 500 else 10)
    assert relative_error(found, exact) <= 1.1 * relative_error(plain, exact) + floor


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_the_number_of_threads_changes_no_bit(layout, threads, force):
    force(KERNEL)
    x, weight = torch.randn(3, 70, 9, 21), torch.randn(70, 33, 2, 3)
    x = channels_last(x) if layout == "nhwc" else x
    found = []
    for count in (1, 2, 5):
        threads(count)
        found.append(conv_transpose_act_norm(x, weight, stride=(2, 3)))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_every_element_is_written_and_none_behind(layout):
    x, weight, bias = torch.randn(2, 5, 3, 7), torch.randn(5, 11, 2, 3), torch.randn(11)
    exact = torch.conv_transpose2d(x, weight, bias, stride=(2, 3))
    conv = geometry_of(weight, stride=(2, 3))
    compiled = transposed_problem(conv, (3, 7), layout, True)
    if layout == "nhwc":
        x, exact = channels_last(x), channels_last(exact)
    memory = torch.full((exact.numel() + 64,), torch.nan)
    strides = [66, 6, 0, 3, 1]
    _C.cpu.pixel_shuffle(
        compiled, COMPILED_DTYPES[torch.float32], 2, COMPILED["identity"], x.data_ptr(),
        weight.data_ptr(), strides, bias.data_ptr(), memory.data_ptr(), 2,
    )  # fmt: skip
    written = memory[: exact.numel()].as_strided(exact.shape, exact.stride())
    torch.testing.assert_close(written, exact, rtol=1e-5, atol=1e-5)
    assert memory[exact.numel() :].isnan().all()


def layer(layout="nchw", dtype=torch.float32, **changes):
    """The problem of a decoder's upsampling."""
    weight = torch.empty(64, 32, 2, 2, 2, device="meta")
    fields = {
        "dtype": dtype,
        "output_dtype": dtype,
        "precision": {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype],
        "layout": layout,
        "batch": 1,
        "channels": 64,
        "spatial": (64, 64, 64),
        "conv": geometry_of(weight, stride=(2, 2, 2)),
        "norm": None,
        "activation": "identity",
        **changes,
    }
    return problem(**fields)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_decoders_are_served_by_it(layout):
    (explanation,) = explained(layer(layout), device=PROCESSOR)
    assert explanation.kernel == KERNEL and len(explanation.steps) == 1


def test_blocks_that_are_not_whole_cost_what_whole_ones_do():
    form, wide = PixelShuffle(), processor(dict.fromkeys(AVX512, True))

    def cost(spatial, outputs, layout):
        weight = torch.empty(256, outputs, 2, 2, 2, device="meta")
        what = layer(layout, channels=256, spatial=spatial,
                     conv=geometry_of(weight, stride=(2, 2, 2)))  # fmt: skip
        return form.cost(what, wide)

    assert cost((1, 1, 65), 96, "nchw") > 0.9 * cost((1, 1, 128), 96, "nchw")
    assert cost((64, 8, 8), 1, "nhwc") > 0.9 * cost((64, 8, 8), 32, "nhwc")
    assert cost((1, 1, 65), 96, "nhwc") < 0.8 * cost((1, 1, 128), 96, "nhwc")


def test_an_activation_alone_is_part_of_it():
    (explanation,) = explained(layer(activation="gelu"), device=PROCESSOR)
    assert explanation.kernel == KERNEL
    assert explanation.steps == ("matrix product to its places, gelu (fusedconv._C), float32",)
    kept = layer(activation="gelu", save=True)  # the backward pass reads what is in front of it
    (explanation,) = explained(kept, device=PROCESSOR)
    assert len(explanation.steps) == 2 or explanation.kernel != KERNEL
    plan = PixelShuffle().compile(kept, PROCESSOR)
    assert not plan.activates and "gelu" not in plan.steps[-1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stride": (1, 1, 1)}, "is not the kernel's extent"),
        ({"groups": 2}, "groups are 2"),
        ({"padding": (1, 0, 0)}, "there is padding"),
        ({"kernel_size": (2, 2, 65), "stride": (2, 2, 65)}, "a line of the filter has 65 taps"),
    ],
)
def test_what_it_refuses(changes, reason):
    weight = torch.empty(64, 32, 2, 2, 2, device="meta")
    what = layer(conv=geometry_of(weight, **{"stride": (2, 2, 2), **changes}))
    support = PixelShuffle().supports(what, PROCESSOR)
    assert not support and reason in support.reason


def test_the_binding_checks_what_it_gets():
    conv = geometry_of(torch.empty(4, 6, 2, 2), stride=(2, 2))
    compiled = transposed_problem(conv, (3, 3), "nchw", True)
    overlapping = transposed_problem(
        geometry_of(torch.empty(4, 6, 3, 3), stride=(2, 2)), (3, 3), "nchw", True
    )
    dtype, identity, strides = (
        COMPILED_DTYPES[torch.float32],
        COMPILED["identity"],
        [24, 4, 0, 2, 1],
    )
    for arguments, text in (
        ((compiled, dtype, 1, identity, 0, 8, strides, 0, 8, 1), "input: got null"),
        ((compiled, dtype, 1, identity, 8, 0, strides, 0, 8, 1), "weight: got null"),
        ((compiled, dtype, 1, identity, 8, 8, strides, 0, 0, 1), "output: got null"),
        ((compiled, dtype, 0, identity, 8, 8, strides, 0, 8, 1), "batch: got 0"),
        ((compiled, dtype, 1, identity, 8, 8, strides, 0, 8, 0), "threads: got 0"),
        ((compiled, dtype, 1, identity, 8, 8, strides[1:], 0, 8, 1), "weight_strides: got 4"),
        ((overlapping, dtype, 1, identity, 8, 8, strides, 0, 8, 1), "kernel: got 3, expected the"),
    ):
        with pytest.raises(ValueError, match=f"^pixel_shuffle: {text}"):
            _C.cpu.pixel_shuffle(*arguments)
