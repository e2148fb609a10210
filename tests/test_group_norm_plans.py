"""Which GroupNorm kernels of the GPU serve which problem, which needs no GPU."""

from __future__ import annotations

import dataclasses
import math

import pytest
import test_gpu_gradients
import torch
from problems import backward_problem, explained, geometry_of, group_norm_stage, problem
from reference import channels_last
from test_gpu_group_norm import CASES, FLOOR, KERNELS, LARGE_CASES, serves, with_layouts

import fusedconv
from fusedconv import _C
from fusedconv.device import KNOWN
from fusedconv.kernels.cuda.gradients import compiled_problem
from fusedconv.layout import layout_of, line_pitch
from fusedconv.registry import registry
from fusedconv.selection import choose

pytestmark = pytest.mark.skipif(
    not fusedconv.build["cuda"], reason="fusedconv was built without CUDA"
)

STREAMED = ("groupnorm_streamed", "groupnorm_backward_streamed")
#: That replace a tile of streamed gradients, each with a part of a channel's sum.
REPLACING_WARPS = 4


def kernel_named(name):
    (kernel,) = (kernel for kernel in registry().kernels() if kernel.name == name)
    return kernel


def norm_alone(shape, groups, dtype, layout="nchw", **changes):
    """A normalisation without weight and bias of a dense tensor."""
    x = torch.empty(shape, device="meta", dtype=dtype)
    if layout == "nhwc":
        x = channels_last(x)
    none = group_norm_stage(groups, weight=False, bias=False, affine_dtype=None)
    fields = dict(
        dtype=dtype,
        output_dtype=dtype,
        layout=layout_of(shape, x.stride()),
        batch=shape[0],
        channels=shape[1],
        spatial=shape[2:],
        conv=None,
        norm=none,
        activation="identity",
    )
    return problem(**(fields | changes))


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_serve_what_their_conditions_say(name, architecture):
    kernel, device = kernel_named(name), KNOWN[architecture]
    answers = []
    for shape, groups, layout in with_layouts(CASES + LARGE_CASES):
        for dtype in FLOOR:
            asked = norm_alone(shape, groups, dtype, layout)
            expected = serves(
                name,
                shape,
                groups,
                dtype,
                asked.layout == "nhwc",
                capability=divmod(architecture, 10),
                multiprocessors=device.multiprocessors,
            )
            support = kernel.supports(asked, device)
            assert bool(support) == expected, (shape, groups, dtype, layout, support.reason)
            answers.append(expected)
    if name == "groupnorm_streamed" and architecture < 90:
        assert not any(answers)
    else:
        assert answers.count(True) >= 30


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("name", test_gpu_gradients.KERNELS)
def test_gradients_are_served_as_their_conditions_say(name, architecture):
    kernel, device = kernel_named(name), KNOWN[architecture]
    answers = []
    for shape, groups, layout in with_layouts(CASES + LARGE_CASES):
        for dtype, wide in ((each, wide) for each in FLOOR for wide in (False, True)):
            if wide and dtype == torch.float32:
                continue
            fields = {"output_dtype": torch.float32} if wide else {}
            asked = backward_problem(norm_alone(shape, groups, dtype, layout, save=True, **fields))
            expected = test_gpu_gradients.serves_gradients(
                name,
                shape,
                groups,
                dtype,
                asked.forward.layout == "nhwc",
                capability=divmod(architecture, 10),
                multiprocessors=device.multiprocessors,
                wide=wide,
            )
            support = kernel.supports(asked, device)
            assert bool(support) == expected, (shape, groups, dtype, layout, support.reason)
            answers.append(expected)
    if name in STREAMED and architecture < 90:
        assert not any(answers)
    else:
        assert answers.count(True) >= 10


# ---- devices that are not here -------------------------------------------------------------------

#: A problem that every kernel of ours serves on an H200.
COMMON = norm_alone((16, 64, 32, 32), 8, torch.float32)


def of_pass(name, forward):
    saving = dataclasses.replace(forward, save=True)
    return backward_problem(saving) if "backward" in name else forward


@pytest.mark.parametrize("name", STREAMED)
@pytest.mark.parametrize("architecture", KNOWN)
def test_streaming_needs_compute_capability_9_0(name, architecture):
    support = kernel_named(name).supports(of_pass(name, COMMON), KNOWN[architecture])
    assert bool(support) == (architecture == 90)
    if not support:
        assert "compute capability" in support.reason


@pytest.mark.parametrize("name", [*KERNELS, "groupnorm_backward_two_pass"])
def test_no_kernel_serves_below_8_0(name):
    kernel, asked = kernel_named(name), of_pass(name, COMMON)
    for architecture, device in KNOWN.items():
        support = kernel.supports(asked, device)
        if architecture < 80:
            assert "needs compute capability 8.0" in support.reason
        elif name not in STREAMED:
            assert support


SYSTEM3 = ((112, 64, 512, 512), 8)
MERGED, AFFINE = "merge sums of gradients", "gradients of norm weight and bias"


@pytest.mark.parametrize("dtype", FLOOR, ids=str)
def test_schedules_of_system_3(dtype):
    """Of the forward and the backward pass in either layout: a change here is one of speed."""
    found = {}
    for layout in ("nchw", "nhwc"):
        affine = group_norm_stage(SYSTEM3[1], affine_dtype=dtype)
        forward = norm_alone(*SYSTEM3, dtype, layout, norm=affine)
        for name in ("forward", "backward"):
            (explanation,) = explained(of_pass(name, forward), device=KNOWN[90])
            found[name, layout] = explanation.steps
    place = "in one pass (groups in the shared memory of 132 multiprocessors)"
    # Half as many tiles a group as in float32, of which a block has four or more.
    teams = place.replace("132", "132" if dtype == torch.float32 else "2 times 66")
    assert found == {
        ("forward", "nchw"): (f"moments + normalize {teams}",),
        ("forward", "nhwc"): ("moments (nhwc)", "normalize (nhwc -> nhwc)"),
        ("backward", "nchw"): (f"gradient through norm {place}", MERGED, AFFINE),
        ("backward", "nhwc"): (
            "sums of gradients (nhwc)",
            MERGED,
            "gradient through norm (nhwc)",
            AFFINE,
        ),
    }


# ---- the backward pass ---------------------------------------------------------------------------


def chosen(asked, architecture=90):
    return [candidate.kernel.name for _, candidate in choose(asked, KNOWN[architecture]).chosen]


def test_gradients_are_streamed_where_the_tensor_is_large():
    small, large = (of_pass("backward", norm_alone(s, 8, torch.float32)) for s in (
        (2, 64, 16, 16), (112, 64, 512, 512),
    ))  # fmt: skip
    assert chosen(small) == ["groupnorm_backward_two_pass"]
    assert chosen(large) == ["groupnorm_backward_streamed"]
    assert chosen(large, 80) == ["groupnorm_backward_two_pass"]


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_activations_that_are_compiled_in_cost_no_calls(layout):
    kernel = kernel_named("groupnorm_backward_two_pass")

    def cost(activation, dtype=torch.bfloat16):
        asked = norm_alone((16, 64, 128, 128), 8, dtype, layout, activation=activation, save=True)
        return kernel.cost(of_pass("backward", asked), KNOWN[90])

    for known in ("relu", "gelu", "silu"):
        assert cost(known) == cost("identity") < cost("gelu_tanh")
    assert cost("gelu", torch.float32) == cost("gelu_tanh", torch.float32)  # no quick form


def test_activations_are_called_where_accesses_are_narrow():
    """Channels last, of pixels that are not whole 16 bytes."""
    kernel = kernel_named("groupnorm_backward_two_pass")

    def cost(activation, channels):
        asked = norm_alone(
            (16, channels, 128, 128), 4, torch.bfloat16, "nhwc", activation=activation, save=True
        )
        return kernel.cost(of_pass("backward", asked), KNOWN[90])

    assert cost("gelu", 64) < cost("gelu_tanh", 64)
    assert cost("gelu", 60) == cost("gelu_tanh", 60) > cost("identity", 60)


def test_gradients_of_weight_and_bias_alone_are_not_streamed():
    affine = group_norm_stage(8)
    large = norm_alone((112, 64, 512, 512), 8, torch.float32, norm=affine, save=True)
    wanted = backward_problem(large, "norm_weight", "norm_bias")
    assert chosen(wanted) == ["groupnorm_backward_two_pass"]
    support = kernel_named("groupnorm_backward_streamed").supports(wanted, KNOWN[90])
    assert "the input's gradient, which is not asked for" in support.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spatial", [(34, 34, 34), (258, 258), (130, 18), (30001,), (64, 64)])
def test_tiles_of_gradients_fit_padded_lines(spatial, dtype):
    """As they lie there a tile has 504 vectors at most: else its lines are stored one by one."""
    affine = group_norm_stage(8)
    asked = backward_problem(norm_alone((16, 128, *spatial), 8, dtype, norm=affine, save=True))
    columns, pitch = spatial[-1], line_pitch(spatial[-1], dtype)

    def tiles(**lines):
        made = _C.group_norm.streamed_gradient_config(
            compiled_problem(asked), aligned=True, **lines, device=KNOWN[90].compiled
        )
        assert made.support
        return made.channel_sums // REPLACING_WARPS

    padded = math.prod(spatial[:-1]) * pitch * dtype.itemsize // 16
    dense = tiles(columns=columns, pitch=columns)
    assert dense == tiles()
    if pitch == columns:
        return
    assert tiles(columns=columns, pitch=pitch) == max(dense, math.ceil(padded / 504))


@pytest.mark.parametrize(
    ("name", "served", "refused"),
    [("groupnorm_streamed", 15488, 15520), ("groupnorm_backward_streamed", 15936, 16384)],
)
def test_streaming_needs_six_stages_beside_the_weights(name, served, refused):
    """Whoever loads a tile waits for one six before, whose stage is its own until then."""
    affine = group_norm_stage(32)

    def supports(channels):
        asked = norm_alone((2, channels, 32, 32), 32, torch.float32, norm=affine, save=True)
        if "backward" in name:
            asked = of_pass("backward", asked)
        return kernel_named(name).supports(asked, KNOWN[90])

    assert supports(served)
    assert "has 5 stages" in supports(refused).reason


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_gradients_in_float32_of_16_bits(layout, dtype):
    """As behind autocast, whose output is wider than the input."""
    fields = dict(output_dtype=torch.float32, layout=layout, save=True)
    wanted = backward_problem(norm_alone((16, 64, 64, 64), 8, dtype, **fields))
    (name,) = chosen(wanted)
    assert name.startswith("groupnorm_backward_")
    kernels = [kernel_named("groupnorm_backward_two_pass")]
    if layout == "nchw":
        kernels.append(kernel_named("groupnorm_backward_streamed"))
    narrow = backward_problem(norm_alone((16, 64, 64, 64), 8, dtype, layout=layout, save=True))
    for kernel in kernels:
        support = kernel.supports(wanted, KNOWN[90])
        assert support, support.reason
        steps = kernel.compile(wanted, KNOWN[90]).steps
        assert any("of float32" in step for step in steps)
        assert kernel.cost(wanted, KNOWN[90]) > kernel.cost(narrow, KNOWN[90])


def test_gradients_in_other_dtypes_are_torchs():
    asked = backward_problem(norm_alone((16, 64, 64, 64), 8, torch.float16, save=True))
    other = dataclasses.replace(asked, grad_dtype=torch.bfloat16)
    assert chosen(other) == ["torch_epilogue_backward"]
    support = kernel_named("groupnorm_backward_two_pass").supports(other, KNOWN[90])
    assert support.reason.startswith("the output's gradient is torch.bfloat16")


def test_a_convolutions_backward_pass_mixes_providers():
    conv = geometry_of(torch.empty(64, 32, 3, 3, device="meta"), out_channels=64, groups=2)
    asked = backward_problem(
        norm_alone((16, 64, 64, 64), 8, torch.float32, conv=conv, save=True, bias=True)
    )
    epilogue, convolution = chosen(asked)
    assert epilogue.startswith("groupnorm_backward_")
    assert convolution == "torch_convolution_backward"
