"""Depthwise transposed convolutions that are computed twice: blocks, refusals, plans and their
place in the selection. No GPU."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from problems import group_norm_stage
from test_direct_kernels import depthwise as depthwise_problem

from fusedconv import _C, ForwardProblem
from fusedconv.device import KNOWN
from fusedconv.kernels.cuda.depthwise import Depthwise
from fusedconv.norms import Norm
from fusedconv.registry import registry
from fusedconv.selection import choose

KERNELS = [kernel for kernel in registry().kernels() if isinstance(kernel, Depthwise)]
pytestmark = pytest.mark.skipif(not KERNELS, reason="fusedconv was built without these kernels")

H200 = KNOWN[90]
#: What a block takes of shared memory beside its own, and what there is of a multiprocessor.
SYSTEM_BYTES, MULTIPROCESSOR_BYTES = 1 << 10, 228 << 10
INSTANCE = Norm("instance", 0, 1e-5, False, False, None)
names = {"ids": lambda kernel: kernel.name}


def depthwise(
    kernel: Depthwise,
    groups: int = 128,
    out: int = 1,
    spatial: tuple[int, ...] = (32, 32, 32),
    **changes: object,
) -> ForwardProblem:
    """Two samples each channel of which is normalised; ``out`` is that of a group."""
    fields = dict(size=3, batch=2, norm=group_norm_stage(groups * out), activation="identity")
    return depthwise_problem(
        kernel, groups=groups, out=out, spatial=spatial, **{**fields, **changes}
    )


# ---- schedules -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_tiles_cover_a_plane_and_two_blocks_fit(kernel, seed):
    generator = random.Random(f"{kernel.name} {seed}")
    depth, height = generator.randint(1, 40), generator.randint(1, 300)
    width = generator.choice((1, 3, 8, generator.randint(1, 1024), 1024))
    made = depthwise(
        kernel,
        spatial=(depth, height, width),
        output_padding=tuple(generator.randint(0, 1) for _ in range(3)),
        aligned=generator.random() < 0.7,
    )
    assert kernel.supports(made, H200)
    config = kernel.config(made, H200)
    run, threads = _C.depthwise.run, _C.depthwise.threads
    assert (config.runs - 1) * run < width <= config.runs * run
    assert config.runs * config.lines <= threads
    assert (config.tiles - 1) * config.lines < height <= config.tiles * config.lines
    assert config.parts == min(_C.depthwise.most_parts, depth) or (config.parts, depth) == (2, 3)
    assert config.bulk == (made.aligned and width * made.dtype.itemsize % 16 == 0)
    resident = _C.depthwise.resident * (config.shared_bytes + SYSTEM_BYTES)
    assert resident <= MULTIPROCESSOR_BYTES


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_clusters_leave_no_multiprocessor_idle(kernel):
    def blocks(batch: int, channels: int, depth: int = 32) -> int:
        made = depthwise(kernel, groups=channels, spatial=(depth, 8, 8))
        return kernel.config(made, H200).cluster(batch)

    assert H200.multiprocessors == 132
    assert [blocks(batch, 32) for batch in (1, 2, 3, 4, 5)] == [4, 4, 2, 2, 1]
    assert blocks(2, 128) == blocks(1, 132) == 1
    assert blocks(1, 131) == 2
    assert [blocks(1, 8, depth) for depth in (1, 2, 3, 4, 100)] == [1, 2, 2, 4, 4]


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(layout="nhwc"), "the layout is channels last"),
        (dict(channels=2), "a group has 2 input and 1 output channels; one of each is served"),
        (dict(out=3), "a group has 1 input and 3 output channels; one of each is served"),
        (dict(size=4), "filters of 3 taps with stride 2"),
        (dict(stride=1), "filters of 3 taps with stride 2"),
        (dict(stride=3), "filters of 3 taps with stride 2"),
        (dict(padding=0), "padding 1"),
        (dict(padding=2), "padding 1"),
        (dict(dilation=2), "dilation 1"),
        (dict(spatial=(32, 32)), "served are volumes"),
        (dict(spatial=(2, 2, 1025)), "a line has 1025 inputs, up to 1024 are served"),
        (dict(output_dtype=torch.float64), "output dtype is torch.float64"),
        (dict(norm=None), "0 groups of 128 channels are normalised; groups of one channel"),
        (dict(norm=group_norm_stage(64)), "64 groups of 128 channels are normalised"),
        (dict(norm=Norm("layer", 0, 1e-5, True, True, torch.float32)), "layer_norm"),
        (dict(save=True), "a backward pass reads what is saved, it saves nothing"),
        (dict(save=True, recompute=True), "a backward pass reads what is saved"),
    ],
)
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_what_is_refused(kernel, changes, reason):
    support = kernel.supports(depthwise(kernel, **changes), H200)
    assert not support and reason in support.reason


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_other_devices_and_precisions_are_refused(kernel):
    made = depthwise(kernel)
    for architecture in (80, 100):
        support = kernel.supports(made, KNOWN[architecture])
        assert "runs on compute capability 9.0" in support.reason
    if made.dtype.itemsize == 2:
        # Of 16 bits in float32 there is no other output.
        support = kernel.supports(replace(made, output_dtype=torch.float32), H200)
        assert "output dtype is float32" in support.reason


def test_float32_serves_tf32_as_well():
    kernel = next(k for k in KERNELS if k.precision == "fp32")
    assert kernel.supports(depthwise(kernel, precision="tf32"), H200)
    other = next(k for k in KERNELS if k.precision == "bf16")
    support = other.supports(depthwise(other, precision="fp16"), H200)
    assert "computes in bf16, fp16 is asked for" in support.reason


@pytest.mark.parametrize(
    "changes",
    [
        dict(output_padding=(1, 0, 1)),
        dict(spatial=(1, 1, 1)),
        dict(spatial=(2, 300, 2)),
        dict(aligned=False),
        dict(layout="strided"),
        dict(bias=False),
        dict(norm=INSTANCE),
        dict(norm=group_norm_stage(128, affine_dtype=torch.float16)),
        dict(activation="relu"),
        dict(activation="gelu", order="norm_act"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_what_is_served(kernel, changes):
    support = kernel.supports(depthwise(kernel, **changes), H200)
    assert support, support.reason


# ---- plans ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "rest"),
    [
        (dict(), "bias + normalize"),
        (dict(bias=False, norm=INSTANCE), "normalize"),
        (dict(activation="silu"), "bias + silu + normalize"),
        (dict(activation="relu", order="norm_act"), "bias + normalize + relu"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_all_is_one_step(kernel, changes, rest):
    made = depthwise(kernel, **changes)
    assert kernel.compile(made, H200).steps == (f"{kernel.name} (nchw) + {rest}",)


def test_a_step_is_of_the_problem_that_its_config_is_of():
    kernel = KERNELS[0]
    made = depthwise(kernel)
    config = kernel.config(made, H200)
    operands = {
        name: _C.Operand()
        for name in ("input", "weight", "bias", "norm_weight", "norm_bias", "output")
    }
    fields = dict(
        channels=128,
        pixels=63**3,
        groups=128,
        input_layout=_C.Layout.nchw,
        output_layout=_C.Layout.nchw,
        dtype=_C.DType.float32,
        output_dtype=_C.DType.float32,
        affine_dtype=_C.DType.float32,
        activation_before=_C.Activation.identity,
        activation_after=_C.Activation.identity,
    )
    with pytest.raises(ValueError, match="input, weight or output: got none"):
        _C.depthwise.Forward(config, norm=_C.GroupNormProblem(**fields), **operands)
    for change, text in (
        (dict(groups=64), "groups: got 64, expected 128"),
        (dict(channels=64, groups=64), "channels: got 64, expected 128"),
        (dict(pixels=63), "pixels: got 63, expected 250047"),
        (dict(dtype=_C.DType.float16), "dtype: got float16, expected float32"),
        (dict(output_dtype=_C.DType.float16), "dtype of the output: got float16"),
        (dict(input_layout=_C.Layout.nhwc), "input layout: got nhwc, expected nchw"),
        (dict(output_layout=_C.Layout.nhwc), "output layout: got nhwc, expected nchw"),
    ):
        norm = _C.GroupNormProblem(**{**fields, **change})
        with pytest.raises(ValueError, match=text):
            _C.depthwise.Forward(config, norm=norm, **operands)
    refused = kernel.config(depthwise(kernel, size=5), H200)
    with pytest.raises(ValueError, match="filters of 3 taps"):
        _C.depthwise.Forward(refused, norm=_C.GroupNormProblem(**fields), **operands)


# ---- selection -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [dict(), dict(batch=1, groups=32, spatial=(64, 64, 64))], ids=["mednext", "large"]
)
@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_it_is_chosen_for_what_it_is_made_for(kernel, changes):
    made = depthwise(kernel, **changes)
    ((_, chosen),) = choose(made, H200).chosen
    assert chosen.kernel is kernel
    saved = replace(made, save=True)
    assert all(candidate.kernel is not kernel for _, candidate in choose(saved, H200).chosen)


#: Microseconds of a layer of MedNeXt, and of a larger volume of fewer channels.
TIMES = {"bf16": (83.0, 153.0), "fp32": (115.0, 175.0)}


@pytest.mark.parametrize("precision", TIMES)
def test_estimates_are_what_was_measured(precision):
    kernel = next(k for k in KERNELS if k.precision == precision)
    layer = depthwise(kernel)
    large = depthwise(kernel, batch=1, groups=32, spatial=(64, 64, 64))
    for made, microseconds in zip((layer, large), TIMES[precision], strict=True):
        assert kernel.cost(made, H200) * 1e3 == pytest.approx(microseconds, rel=0.03)


@pytest.mark.parametrize("kernel", KERNELS, **names)
def test_an_estimate_grows_with_what_is_computed(kernel):
    costs = [kernel.cost(depthwise(kernel, batch=batch), H200) for batch in (64, 128)]
    assert 1.9 < costs[1] / costs[0] < 2.1
    plain, behind, in_front = (
        kernel.cost(depthwise(kernel, batch=64, **changes), H200)
        for changes in ({}, dict(activation="relu", order="norm_act"), dict(activation="relu"))
    )
    assert plain < behind < in_front
