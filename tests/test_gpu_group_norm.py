"""GroupNorm kernels on the GPU, against fp64, relative to eager's error."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from gpu_checks import poison
from reference import channels_last, relative_error
from reference import group_norm as eager
from torch.nn import functional as F

import fusedconv
from fusedconv.functional import conv_transpose_act_norm, group_norm

pytestmark = pytest.mark.gpu

FLOOR = {torch.float32: 3e-8, torch.float16: 1e-6, torch.bfloat16: 1e-5}
# (shape, groups): one channel a group, three and four, one group, many groups with one sample, no
# spatial axes, sizes that no vector divides, large planes, more channels than a block has threads.
CASES = [
    ((2, 64, 56, 56), 8),
    ((3, 12, 7, 9), 12),
    ((3, 12, 7, 9), 4),
    ((2, 16, 5, 5, 5), 4),
    ((1, 32, 129, 131), 1),
    ((1, 128, 16, 16), 32),
    ((5, 48), 6),
    ((4, 2048, 3), 32),
    ((2, 30, 64, 65), 5),
    ((2, 8, 300, 301), 2),
    ((1, 4100, 4, 4), 4),
    ((1, 1, 1, 5), 1),
    ((2, 32, 256, 256), 4),
    ((1, 16, 512, 512), 1),
    ((3, 64, 200, 104), 2),
    ((40, 16, 128, 128), 4),
    ((3, 24, 148, 300), 8),
    ((2, 2048, 6, 5), 32),
    ((2, 1024, 3, 3), 32),
]
# Large enough for the streamed gradients, with planes that chunks do not divide.
LARGE_CASES = [((10, 32, 256, 264), 4), ((40, 6, 300, 304), 2), ((6, 1, 2048, 2052), 1)]
KERNELS = ("groupnorm_resident", "groupnorm_streamed", "groupnorm_two_pass")


def with_layouts(
    cases: list[tuple[tuple[int, ...], int]],
) -> list[tuple[tuple[int, ...], int, str]]:
    """The cases in each layout; torch has channels_last for four and five axes only."""
    return [
        (shape, groups, layout)
        for shape, groups in cases
        for layout in ("nchw", "nhwc")
        if layout == "nchw" or len(shape) in (4, 5)
    ]


def serves(
    kernel: str,
    shape: tuple[int, ...],
    groups: int,
    dtype: torch.dtype,
    channels_last: bool,
    *,
    capability: tuple[int, int],
    multiprocessors: int,
    in_front: str | None = None,
) -> bool:
    """Whether a kernel must serve an aligned, dense input, with an activation ``in_front``: the
    conditions in its header."""
    channels, pixels = shape[1], math.prod(shape[2:])
    vector = 16 // dtype.itemsize  # elements
    group_channels = channels // groups
    group = group_channels * pixels
    if kernel == "groupnorm_two_pass":
        return True
    if kernel == "groupnorm_resident":
        # Registers of at most 512 threads hold 8 accesses each. Channels last, an access lies in
        # one group, and 40 KiB hold the weights and biases of the groups of a block.
        if not channels_last:
            return group // (vector if pixels % vector == 0 else 1) <= 512 * 8
        return group_channels % vector == 0 and any(
            group // vector <= threads * 8 and max(256 // threads, 1) * group_channels <= 5 << 10
            for threads in (32, 128, 512)
        )
    # Slots of 16 KiB beside the channels' weights and biases, one of which stays free.
    if channels_last or group % vector or pixels < vector or capability != (9, 0):
        return False
    halves = dtype is torch.bfloat16 and in_front == "gelu"
    widens = dtype.itemsize == 2 and in_front not in (None, "relu") and not halves
    chunks = math.ceil(group / vector / (512 if widens else 1024))
    blocks = min(multiprocessors, 160, shape[0] * groups * chunks)
    table = math.ceil(channels * 8 / 128) * 128
    slots = min(13, ((227 << 10) - table - (10 << 10)) // (16 << 10))
    return math.ceil(chunks / blocks) < slots


#: Over a few values chance parts errors that are alike: they are drawn until there are as many.
VALUES = 1000


@pytest.mark.parametrize("dtype", FLOOR, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("shape", "groups", "layout"), with_layouts(CASES), ids=str)
def test_against_fp64(shape, groups, layout, kernel, dtype, monkeypatch):
    torch.manual_seed(sum(shape))
    monkeypatch.setenv("FUSEDCONV_KERNEL", kernel)
    stages = (
        (dtype, None, "act_norm"),
        (None, "gelu", "act_norm"),
        (dtype, "relu", "act_norm"),
        (dtype, "silu", "act_norm"),
        (dtype, "gelu_tanh", "act_norm"),
        (dtype, "gelu", "norm_act"),
        (dtype, "silu", "norm_act"),
    )
    errors: dict = {stage: [] for stage in stages}
    draws = -(-VALUES // math.prod(shape))
    for _, stage in itertools.product(range(draws), stages):
        affine, activation, order = stage
        if stage == stages[0]:
            x = (torch.randn(shape, device="cuda") * 2 + 0.5).to(dtype)
            if layout == "nhwc":
                x = channels_last(x)
        weight = bias = None
        if affine is not None:
            weight = torch.randn(shape[1], device="cuda").to(affine)
            bias = torch.randn(shape[1], device="cuda").to(affine)
        if not serves(
            kernel,
            shape,
            groups,
            dtype,
            not x.is_contiguous(),
            capability=torch.cuda.get_device_capability(),
            multiprocessors=torch.cuda.get_device_properties(0).multi_processor_count,
            in_front=activation if order == "act_norm" else None,
        ):
            with pytest.raises(fusedconv.NoKernelError, match=kernel):
                group_norm(x, groups, weight, bias, activation=activation, order=order)
            continue
        poison()
        actual = group_norm(x, groups, weight, bias, activation=activation, order=order)
        double = [None if t is None else t.double() for t in (weight, bias)]
        reference = eager(x.double(), groups, *double, activation=activation, order=order)
        torchs = eager(x, groups, weight, bias, activation=activation, order=order)
        assert actual.stride() == x.stride()
        errors[stage].append((relative_error(actual, reference), relative_error(torchs, reference)))
    for stage, pairs in errors.items():
        if not pairs:
            continue
        error, limit = (math.hypot(*each) / draws**0.5 for each in zip(*pairs, strict=True))
        assert error <= 1.1 * limit + FLOOR[dtype], (stage, error, limit)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_float32_affine_on_half_input(layout):
    x = torch.randn(2, 32, 33, 31, device="cuda").bfloat16()
    if layout == "nhwc":
        x = x.contiguous(memory_format=torch.channels_last)
    weight, bias = torch.randn(2, 32, device="cuda")
    actual = group_norm(x, 8, weight, bias)
    reference = F.group_norm(x.double(), 8, weight.double(), bias.double())
    assert actual.dtype == torch.bfloat16
    assert relative_error(actual, reference) < 3e-3


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_large_mean_in_16_bits(layout, dtype):
    """Mean 64 and standard deviation 1: a difference of squares would lose everything."""
    x = (torch.randn(2, 64, 96, 96, device="cuda") + 64.0).to(dtype)
    if layout == "nhwc":
        x = x.contiguous(memory_format=torch.channels_last)
    reference = F.group_norm(x.double(), 8)
    error = relative_error(group_norm(x, 8), reference)
    assert error <= 1.1 * relative_error(F.group_norm(x, 8), reference) + FLOOR[dtype]


# (shape, groups): groups from 16 elements to millions, planes that no vector divides.
LARGE_MEAN_CASES = [
    ((64, 32, 4, 4), 32),
    ((4, 64, 24, 24), 8),
    ((3, 6, 31, 33), 2),
    ((2, 64, 96, 96), 8),
    ((1, 16, 700, 900), 2),
]


@pytest.mark.parametrize("mean", [1e2, 1e3, 1e4])
@pytest.mark.parametrize(
    ("shape", "groups", "layout", "kernel"),
    [
        (*case, kernel)
        for case in with_layouts(LARGE_MEAN_CASES)
        for kernel in KERNELS
        if serves(
            kernel,
            *case[:2],
            torch.float32,
            case[2] == "nhwc",
            capability=(9, 0),
            multiprocessors=132,
        )
    ],
    ids=str,
)
def test_large_mean(shape, groups, layout, kernel, mean, monkeypatch):
    """Deviation 1: a mean in one float would be off by up to half a thousandth of it at 1e4."""
    if kernel == "groupnorm_streamed" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel needs compute capability 9.0")
    monkeypatch.setenv("FUSEDCONV_KERNEL", kernel)
    x = torch.randn(shape, device="cuda") + mean
    if layout == "nhwc":
        x = x.contiguous(memory_format=torch.channels_last)
    weight, bias = torch.randn(2, shape[1], device="cuda")
    for affine in ((None, None), (weight, bias)):
        reference = F.group_norm(
            x.double(), groups, *(None if t is None else t.double() for t in affine)
        )
        error = relative_error(group_norm(x, groups, *affine), reference)
        eager_error = relative_error(F.group_norm(x, groups, *affine), reference)
        assert error <= 1.1 * eager_error + FLOOR[torch.float32], (error, eager_error)


def off_in_the_first_channel(channels: int, groups: int) -> torch.Tensor:
    """By channel: 3 for the first one of each group, else 0."""
    first = torch.arange(channels, device="cuda") % (channels // groups) == 0
    return 3.0 * first


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_first_channel_far_off_the_others(kernel, layout, monkeypatch):
    """Parts of a group are merged about the mean of one of them, which must not round the rest."""
    shape, groups = (64, 64, 8, 8), 2
    traits = dict(capability=torch.cuda.get_device_capability(), multiprocessors=132)
    if not serves(kernel, shape, groups, torch.float32, layout == "nhwc", **traits):
        pytest.skip(f"{kernel} does not serve it here")
    monkeypatch.setenv("FUSEDCONV_KERNEL", kernel)
    x = 0.5 * torch.randn(shape, device="cuda")
    x += off_in_the_first_channel(64, groups)[:, None, None]
    if layout == "nhwc":
        x = channels_last(x)
    reference = F.group_norm(x.double(), groups)
    eager_error = relative_error(F.group_norm(x, groups), reference)
    error = relative_error(group_norm(x, groups), reference)
    assert error <= 1.1 * eager_error + FLOOR[torch.float32], (error, eager_error)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_first_channel_far_off_the_others_behind_a_convolution(layout, monkeypatch):
    """The mean of each group to a rounding of the deviation: outputs add to the parts' errors those
    of the convolution."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    groups, x = 2, torch.randn(64, 16, 6, 8, device="cuda")
    if layout == "nhwc":
        x = channels_last(x)
    weight = 0.5 * torch.randn(16, 64, 3, 3, device="cuda") / 12
    bias = off_in_the_first_channel(64, groups)
    pixels = conv_transpose_act_norm(x, weight, bias, precision="fp32")
    actual = conv_transpose_act_norm(x, weight, bias, num_groups=groups, precision="fp32")
    exact = F.group_norm(pixels.double(), groups)
    means = (actual - exact).unflatten(1, (groups, -1)).mean((2, 3, 4))
    assert means.square().mean().sqrt() <= FLOOR[torch.float32], means


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("provider", ["cutlass_sm80", "cutlass_sm90"])
@pytest.mark.parametrize(("channels", "groups"), [(64, 8), (20, 20)])
def test_large_mean_behind_a_convolution(channels, groups, provider, layout, monkeypatch):
    if provider == "cutlass_sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the rows run on compute capability 9.0")
    monkeypatch.setenv("FUSEDCONV_KERNEL", provider)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    x = torch.randn(2, 32, 61, 64, device="cuda")
    if layout == "nhwc":
        x = x.contiguous(memory_format=torch.channels_last)
    weight = torch.randn(32, channels, 3, 3, device="cuda") / (9 * 32) ** 0.5
    bias = torch.full((channels,), 1e4, device="cuda")
    actual = conv_transpose_act_norm(x, weight, bias, num_groups=groups, precision="fp32")
    reference = F.group_norm(F.conv_transpose2d(x.double(), weight.double(), bias.double()), groups)
    eager_error = relative_error(
        F.group_norm(F.conv_transpose2d(x, weight, bias), groups), reference
    )
    error = relative_error(actual, reference)
    assert error <= 1.1 * eager_error + FLOOR[torch.float32], (error, eager_error)


@pytest.mark.parametrize("groups", [1, 12, 96])
def test_many_partial_moments_behind_a_convolution(groups, monkeypatch):
    """From hundreds of a group to tens of thousands."""
    monkeypatch.setenv("FUSEDCONV_KERNEL", "taps_sm80")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    x = torch.randn(2, 16, 40000, device="cuda")
    weight = torch.randn(16, 96, 8, device="cuda") / 32**0.5
    bias = torch.full((96,), 1e4, device="cuda")
    sizes = dict(stride=4, padding=2)

    def run(x):
        poison()
        return conv_transpose_act_norm(
            x, weight, bias, **sizes, num_groups=groups, precision="fp32"
        )

    actual = run(x)
    exact = F.conv_transpose1d(x.double(), weight.double(), bias.double(), **sizes)
    reference = F.group_norm(exact, groups)
    eagers = F.group_norm(F.conv_transpose1d(x, weight, bias, **sizes), groups)
    eager_error = relative_error(eagers, reference)
    error = relative_error(actual, reference)
    assert error <= 1.1 * eager_error + FLOOR[torch.float32], (error, eager_error)
    assert torch.equal(run(x), actual)
    assert torch.equal(run(x[1:]), actual[1:])


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_special_values_stay_in_their_group(layout):
    x = torch.randn(2, 8, 20, 20, device="cuda")
    x[0, 0, 3, 3] = torch.inf
    x[0, 5, 3, 3] = torch.nan
    x[1, 2:4] = 7.0
    x[1, 4:6] = 1e-42
    if layout == "nhwc":
        x = x.contiguous(memory_format=torch.channels_last)
    actual, expected = group_norm(x, 4), F.group_norm(x, 4)
    assert torch.equal(actual.isnan(), expected.isnan())
    finite = ~expected.isnan()
    torch.testing.assert_close(actual[finite], expected[finite], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("large", [7e4, 1e15, -7e4, -1e15, torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("all_of_a_group", [False, True])
def test_gelu_of_bfloat16_beyond_half_precision(large, all_of_a_group, monkeypatch):
    """Where nothing is saved a streamed pass computes it in half precision, up to 65504."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel needs compute capability 9.0")
    monkeypatch.setenv("FUSEDCONV_KERNEL", "groupnorm_streamed")
    x = torch.randn(8, 16, 128, 136, device="cuda")
    if all_of_a_group:
        x[3, 4:8] = (x[3, 4:8] + 4) * (large / 4)  # of some width about it
    for place in ((0, 0, 3, 5), (1, 5, -1, -1), (7, 15, 0, 0)):
        x[place] = large
    x = x.bfloat16()
    weight, bias = torch.randn(2, 16, device="cuda").bfloat16()
    reference = F.group_norm(F.gelu(x.double()), 4, weight.double(), bias.double())
    eagers = F.group_norm(F.gelu(x), 4, weight, bias)
    actual = group_norm(x, 4, weight, bias, activation="gelu")
    groups = (t.reshape(8 * 4, -1) for t in (x, actual, eagers, reference))
    for values, ours, theirs, exact in zip(*groups, strict=True):
        if not exact.isfinite().all():
            assert torch.equal(ours.isfinite(), theirs.isfinite())
            continue
        usual = values.abs() < 1e3
        for these in (usual, ~usual):  # what is large would hide the others' errors
            if these.any():
                bound = 1.1 * relative_error(theirs[these], exact[these]) + FLOOR[x.dtype]
                assert relative_error(ours[these], exact[these]) <= bound


@pytest.mark.parametrize(
    ("mean", "deviation"),
    [(0, 1), (0, 0.1), (0, 1e-3), (0, 1e-6), (3, 0.1), (-1, 0.1), (-3, 0.2), (-4, 0.2), (-5, 0.3)],
)
def test_gelu_of_narrow_groups_of_bfloat16(mean, deviation, monkeypatch):
    """In half precision, but of values so small that it is no finer than bfloat16."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel needs compute capability 9.0")
    monkeypatch.setenv("FUSEDCONV_KERNEL", "groupnorm_streamed")
    x = (mean + deviation * torch.randn(4, 16, 128, 136, device="cuda")).bfloat16()
    reference = F.group_norm(F.gelu(x.double()), 4, eps=1e-12)
    bound = 1.1 * relative_error(F.group_norm(F.gelu(x), 4, eps=1e-12), reference)
    error = relative_error(group_norm(x, 4, eps=1e-12, activation="gelu"), reference)
    assert error <= bound + FLOOR[x.dtype], (error, bound)


@pytest.mark.parametrize("offset", [1, 2, 3])
@pytest.mark.parametrize("dtype", FLOOR, ids=str)
def test_misaligned_addresses(offset, dtype):
    flat = torch.randn(2 * 16 * 24 * 24 + 4, device="cuda").to(dtype)
    x = flat[offset : offset + 2 * 16 * 24 * 24].view(2, 16, 24, 24)
    reference = F.group_norm(x.double(), 4)
    bound = 1.1 * relative_error(F.group_norm(x, 4), reference) + FLOOR[dtype]
    assert relative_error(group_norm(x, 4), reference) <= bound
    last = flat[offset : offset + 2 * 16 * 24 * 24].view(2, 24, 24, 16).permute(0, 3, 1, 2)
    reference = F.group_norm(last.double(), 4)
    assert relative_error(group_norm(last, 4), reference) <= bound * 1.05


def test_more_than_two_to_the_31_elements():
    shape = (2, 8, 4096, 33000)
    x = torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_()
    assert x.numel() > 2**31
    actual = group_norm(x, 2)
    for sample, group in ((0, 0), (1, 1)):
        part = x[sample : sample + 1, 4 * group : 4 * group + 4].float()
        expected = F.group_norm(part, 1)
        got = actual[sample : sample + 1, 4 * group : 4 * group + 4].float()
        assert relative_error(got[..., -1000:], expected[..., -1000:]) < 5e-3


@pytest.mark.parametrize("kernel", KERNELS)
def test_thousand_repetitions_are_bit_identical(kernel, monkeypatch):
    monkeypatch.setenv("FUSEDCONV_KERNEL", kernel)
    shape, groups = (
        ((8, 64, 24, 24), 8) if kernel == "groupnorm_resident" else ((6, 64, 128, 128), 8)
    )
    x = torch.randn(shape, device="cuda")
    first = group_norm(x, groups)
    assert all(torch.equal(group_norm(x, groups), first) for _ in range(1000))


def test_streams_that_hold_part_of_the_gpu(monkeypatch):
    """Kernels whose blocks wait for each other finish, whatever runs beside them."""
    monkeypatch.setenv("FUSEDCONV_KERNEL", "groupnorm_streamed")
    x = torch.randn(16, 64, 128, 128, device="cuda")
    expected = group_norm(x, 8)
    a = torch.randn(3072, 3072, device="cuda", dtype=torch.bfloat16)
    others = [torch.cuda.Stream() for _ in range(3)]
    ours = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    outputs = []
    for _ in range(100):
        for stream in others:
            with torch.cuda.stream(stream):
                torch.mm(a, a)
        for stream in ours:
            with torch.cuda.stream(stream):
                outputs.append(group_norm(x, 8))
    torch.cuda.synchronize()
    assert all(torch.equal(output, expected) for output in outputs)


def test_streamed_inside_a_cuda_graph(monkeypatch):
    monkeypatch.setenv("FUSEDCONV_KERNEL", "groupnorm_streamed")
    x = torch.randn(4, 32, 128, 128, device="cuda")
    group_norm(x, 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = group_norm(x, 4)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(output, group_norm(x, 4))
