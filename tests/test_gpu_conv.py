"""Every convolution row and the fused chain on the GPU, against fp64, relative to eager's error."""

from __future__ import annotations

import copy
import itertools
import random
from typing import Any

import pytest
import torch
from conv_gradients import TF32_ERROR
from gpu_checks import bound, fused_against_fp64, poison, round_to_tf32
from reference import ACTIVATIONS, TORCH_SCRIPTS, channels_last, relative_error
from torch import nn
from torch.nn import functional as F

import fusedconv
from fusedconv.benchmark import DTYPES, PRECISIONS
from fusedconv.functional import conv_transpose_act_norm
from fusedconv.kernels.cuda import convolution, sm80, sm90, taps, taps_sm90
from fusedconv.kernels.cuda.sm90 import FEWEST_STRICT_CHANNELS
from fusedconv.kernels.torch import TorchForward
from fusedconv.models import SYSTEMS
from fusedconv.registry import registry

pytestmark = pytest.mark.gpu


@pytest.fixture
def ours(monkeypatch) -> None:
    """Small problems, which torch's operators may serve in less time, run on our kernels where
    those serve them."""
    monkeypatch.setattr(TorchForward, "cost", lambda *_: 1e6)


@pytest.fixture
def eager_precision(monkeypatch):
    def switch(precision: str) -> None:
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", precision == "tf32")

    return switch


def conv_rows() -> list[str]:
    rows = (sm80.CutlassSm80, sm90.CutlassSm90, taps.TapsSm80, taps_sm90.TapsSm90)
    return [kernel.name for kernel in registry().kernels() if isinstance(kernel, rows)]


# (C, K, spatial, kernel, padding, dilation, bias): odd sizes, unaligned channels, one pixel wide
# inputs, kernels larger than the input, channels beyond a tile.
CASES_2D = [
    (64, 64, (17, 19), (3, 3), (0, 0), (1, 1), True),
    (3, 17, (9, 31), (3, 2), (1, 0), (1, 1), True),
    (31, 5, (8, 8), (5, 1), (2, 0), (1, 1), False),
    (20, 200, (5, 7), (2, 2), (0, 1), (2, 1), True),
    (129, 65, (1, 33), (1, 4), (0, 3), (1, 2), True),
    (8, 8, (2, 2), (7, 7), (0, 0), (1, 1), True),
]
CASES_3D = [
    (64, 128, (5, 6, 7), (3, 3, 3), (0, 0, 0), (1, 1, 1), False),
    (5, 31, (3, 4, 9), (2, 3, 1), (1, 0, 0), (1, 2, 1), True),
    (40, 12, (1, 8, 8), (1, 3, 3), (0, 1, 1), (1, 1, 1), True),
]


@pytest.mark.parametrize("name", conv_rows())
def test_row_against_fp64(name, monkeypatch, eager_precision):
    kernel = next(k for k in registry().kernels() if k.name == name)
    monkeypatch.setenv("FUSEDCONV_KERNEL", name)
    precision = kernel.precision
    eager_precision(precision)
    dtype = DTYPES[precision]
    # Rows of the sm_90 family serve any number of axes, some of them up to 64 output channels.
    dimensions = getattr(kernel.row, "dimensions", None)
    cases = [case for case in CASES_2D + CASES_3D if dimensions in (None, len(case[2]))]
    if name.endswith("_ping_pong"):
        cases = [case for case in cases if case[1] <= 64]
    if (kernel.provider, precision) == ("cutlass_sm90", "fp32"):
        cases = [case for case in cases if case[0] >= FEWEST_STRICT_CHANNELS]
    for number, case in enumerate(cases):
        channels, out, spatial, kernel_size, padding, dilation, has_bias = case
        conv = F.conv_transpose2d if len(spatial) == 2 else F.conv_transpose3d
        for batch, layout in ((1, "nchw"), (3, "nhwc"), (2, "nchw")):
            torch.manual_seed(number)
            x = torch.randn(batch, channels, *spatial, device="cuda", dtype=dtype)
            if layout == "nhwc":
                x = channels_last(x)
            weight = torch.randn(channels, out, *kernel_size, device="cuda", dtype=dtype) * 0.2
            bias = torch.randn(out, device="cuda", dtype=dtype) if has_bias else None
            arguments = dict(padding=padding, dilation=dilation)
            poison()
            actual = conv_transpose_act_norm(
                x,
                weight,
                bias,
                activation="gelu",
                precision=precision if dtype is torch.float32 else None,
                **arguments,
            )
            reference = F.gelu(
                conv(
                    x.double(),
                    weight.double(),
                    None if bias is None else bias.double(),
                    **arguments,
                )
            )
            eager = F.gelu(conv(x, weight, bias, **arguments))
            assert actual.shape == reference.shape
            error, eager_error = relative_error(actual, reference), relative_error(eager, reference)
            if precision == "tf32":
                # For small or odd problems cuDNN takes kernels without TF32 even where it may use
                # it. What the mode costs is what rounding the operands costs.
                rounded = F.gelu(
                    conv(
                        round_to_tf32(x).double(),
                        round_to_tf32(weight).double(),
                        None if bias is None else bias.double(),
                        **arguments,
                    )
                )
                eager_error = max(eager_error, relative_error(rounded, reference))
            assert error <= bound(eager_error, precision), (case, layout, error, eager_error)


#: Problems that each Hopper row must serve among so many; some filters or stages do not fit.
RANDOM_PROBLEMS = 24
MOST_RANDOM_PROBLEMS = 60


def random_problem(generator: random.Random) -> dict[str, Any]:
    """A convolution of two or three axes with odd sizes, and what follows it."""
    axes = generator.choice((2, 2, 3))
    largest = 70 if axes == 2 else 14
    kernel = [generator.choice((1, 2, 3, 3, 4, 5)) for _ in range(axes)]
    dilation = [generator.choice((1, 1, 2)) for _ in range(axes)]
    reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    padding = [generator.randint(0, r) for r in reach]
    # Now and then lines of whole 16 bytes, which other paths read than lines of any length.
    multiple = generator.choice((1, 8))
    spatial = [multiple * generator.randint(1, max(1, largest // multiple)) for _ in range(axes)]
    spatial = [max(n, 2 * p - r + 1) for n, p, r in zip(spatial, padding, reach, strict=True)]
    groups = generator.choice((1, 2, 4))
    return {
        "batch": generator.randint(1, 3),
        "channels": generator.choice((1, 3, 8, 20, 64, 100)),
        "out": groups * generator.choice((1, 5, 8, 16, 33)),
        "groups": groups,
        "spatial": spatial,
        "kernel": kernel,
        "padding": padding,
        "dilation": dilation,
        "layout": generator.choice(("nchw", "nhwc")),
        "bias": generator.random() < 0.7,
        "activation": generator.choice(list(ACTIVATIONS)),
    }


# The filter of strict fp32 is twice as large: no row keeps it in shared memory.
@pytest.mark.parametrize(
    ("sharing", "precision"),
    [
        (sharing, precision)
        for sharing in ("ping_pong", "cooperative_m", "cooperative_n")
        for precision in PRECISIONS
        if (sharing, precision) != ("ping_pong", "fp32")
    ],
)
def test_random_shapes_on_sm90(sharing, precision, monkeypatch, eager_precision):
    kernels = [
        k
        for k in registry().kernels()
        if k.provider == "cutlass_sm90" and k.name.endswith(sharing) and k.precision == precision
    ]
    assert kernels
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the rows run on compute capability 9.0")
    monkeypatch.setenv("FUSEDCONV_KERNEL", kernels[0].name)
    eager_precision(precision)
    dtype = DTYPES[precision]
    generator = random.Random(f"{sharing} {precision}")
    served = 0
    for _ in range(MOST_RANDOM_PROBLEMS):
        if served == RANDOM_PROBLEMS:
            break
        case = random_problem(generator)
        # Where it does not serve one, the filter or a stage does not fit; other problems follow.
        served += fused_against_fp64(case, dtype, precision)
    assert served == RANDOM_PROBLEMS


def _inputs(shape, dtype, layout):
    x = torch.rand(shape, device="cuda", dtype=torch.float32).to(dtype)
    return channels_last(x) if layout == "nhwc" else x


def _pair(system, dtype, layout):
    torch.manual_seed(0)
    original = system.original(*system.init_arguments)
    for parameter in original.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, -1.5, 1.5)
    model = system.model(*system.init_arguments)
    model.load_state_dict(original.state_dict())
    original, model = original.to("cuda", dtype), model.to("cuda", dtype)
    return original, model


SMALLER = {"system1": (3, 64, 61, 67), "system2": (2, 64, 9, 11, 13), "system3": (3, 64, 63, 65)}


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize(
    ("name", "precision", "layout"), list(itertools.product(SYSTEMS, PRECISIONS, ("nchw", "nhwc")))
)
def test_system_forward_and_gradients(name, precision, layout, eager_precision):
    eager_precision(precision)
    system = SYSTEMS[name]
    dtype = DTYPES[precision]
    original, model = _pair(system, dtype, layout)
    x = _inputs(SMALLER[name], dtype, layout)
    grad = torch.randn_like(original(x))

    def run(module, x, grad):
        x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        module.zero_grad()
        output = module(x)
        output.backward(grad)
        return [output.detach(), x.grad, *(p.grad for p in module.parameters())]

    reference = run(copy.deepcopy(original).double(), x.double(), grad.double())
    eager = run(original, x, grad)
    poison()
    actual = run(model, x, grad)
    poison()
    with torch.no_grad():
        inference = model(x)
    assert inference.shape == eager[0].shape
    assert (layout == "nhwc") == (not inference.is_contiguous())
    names = ["output", "input", *(n for n, _ in model.named_parameters())]
    for what, a, e, r in zip(
        ["inference", *names],
        [inference, *actual],
        [eager[0], *eager],
        [reference[0], *reference],
        strict=True,
    ):
        assert torch.isfinite(a).all(), what
        error, eager_error = relative_error(a, r), relative_error(e, r)
        # Gradients of parameters are long sums, whose rounding is a matter of order: twice eager's.
        limit = eager_error
        if what not in ("inference", "output"):
            limit *= 2 / 1.1
            if precision == "tf32":
                limit = max(limit, TF32_ERROR)  # eager's small convolutions are not in TF32
        assert error <= bound(limit, precision), (what, error, eager_error)
    if precision == "fp32":
        torch.testing.assert_close(inference, eager[0], atol=1e-5, rtol=1e-5)
    if precision == "tf32":
        assert relative_error(inference, eager[0]) <= 1e-4
    plan_names = [e.kernel for e in fusedconv.explain(model, x)]
    assert all(n != "torch" for n in plan_names), plan_names


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("order", ["act_norm", "norm_act"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("num_groups", [None, 1, 4, 20])
def test_orders_and_activations(order, activation, num_groups, eager_precision):
    eager_precision("fp32")
    if num_groups is None and activation is None:
        pytest.skip("nothing follows the convolution; the rows' own test covers it")
    torch.manual_seed(1)
    module = fusedconv.ConvTransposeActNorm2d(
        12, 20, 3, padding=1, num_groups=num_groups, activation=activation, order=order
    ).cuda()
    x = torch.randn(2, 12, 14, 15, device="cuda", requires_grad=True)
    reference_module = copy.deepcopy(module).double().cpu()
    reference_x = x.detach().double().cpu().requires_grad_()
    output, reference = module(x), reference_module(reference_x)
    grad = torch.randn_like(output)
    output.backward(grad)
    reference.backward(grad.double().cpu())
    assert relative_error(output, reference.cuda()) < 2e-6
    assert relative_error(x.grad, reference_x.grad.cuda()) < 5e-6
    with torch.no_grad():
        assert relative_error(module(x), reference.cuda()) < 2e-6


@pytest.mark.usefixtures("ours")
def test_one_dimension(eager_precision):
    eager_precision("fp32")
    module = fusedconv.ConvTransposeActNorm1d(
        24, 40, 5, padding=2, dilation=2, num_groups=8, activation="silu"
    ).cuda()
    x = torch.randn(3, 24, 131, device="cuda")
    with torch.no_grad():
        actual = module(x)
        reference = copy.deepcopy(module).double().cpu()(x.double().cpu())
    assert relative_error(actual, reference.cuda()) < 2e-6
    provider = fusedconv.explain(module, x)[0].provider
    assert provider in ("clusters_sm90", "cutlass_sm80", "cutlass_sm90", "taps_sm80", "taps_sm90")


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("view", ["slice", "transpose", "offset", "channel_slice", "expanded"])
def test_non_contiguous_inputs(view, eager_precision):
    eager_precision("fp32")
    base = torch.randn(4, 16, 20, 24, device="cuda")
    flat = torch.randn(4 * 16 * 20 * 24 + 1, device="cuda")
    x = {
        "slice": base[:, :, 2:18, 1:20],
        "transpose": base.transpose(2, 3),
        "offset": flat[1:].view(4, 16, 20, 24),
        "channel_slice": base.contiguous(memory_format=torch.channels_last)[:, 3:15],
        "expanded": base[:1].expand(4, -1, -1, -1),
    }[view]
    module = fusedconv.ConvTransposeActNorm2d(
        x.shape[1], 24, 3, num_groups=3, activation="relu"
    ).cuda()
    with torch.no_grad():
        actual = module(x)
        reference = copy.deepcopy(module).double()(x.double())
    assert relative_error(actual, reference) < 2e-6


@pytest.mark.usefixtures("ours")
def test_weights_change_between_calls():
    """A filter packed once and kept would show here, also behind ``.data``."""
    model = fusedconv.ModelNew(16, 16, 3, 1, 4, 4).cuda()
    x = torch.randn(2, 16, 12, 12, device="cuda")
    with torch.no_grad():
        for change in (lambda w: w.mul_(1.5), lambda w: w.data.add_(0.1), lambda w: w.neg_()):
            change(model.conv_transpose.weight)
            reference = copy.deepcopy(model).double()(x.double())
            assert relative_error(model(x), reference) < 2e-3


def test_repetitions_are_bit_identical_and_chunks_do_not_matter(monkeypatch):
    model = fusedconv.ModelNew(64, 64, 3, 1, 8, 8).cuda()
    x = torch.rand(7, 64, 40, 44, device="cuda")
    with torch.no_grad():
        # Another way through the batch may make another row the cheapest.
        monkeypatch.setenv("FUSEDCONV_KERNEL", fusedconv.explain(model, x)[0].kernel)
        first = model(x)
        for _ in range(20):
            assert torch.equal(model(x), first)
        for provider in (sm80, sm90, convolution):
            # Rows that end in place, the last's, have partial moments alone for scratch.
            few = provider is convolution
            monkeypatch.setattr(provider, "CHUNK_BYTES", 2 << (4 if few else 20))
        fusedconv.clear_cache()
        assert torch.equal(model(x), first)


@pytest.mark.usefixtures("ours")
def test_graph_capture_streams_and_no_synchronisation(no_synchronisation):
    model = fusedconv.ModelNew(64, 64, 3, 1, 8, 8).cuda().eval()
    x = torch.rand(2, 64, 33, 35, device="cuda")
    with torch.no_grad():
        expected = model(x)
        torch.cuda.synchronize()
        with no_synchronisation():
            model(x)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            on_side = model(x)
        torch.cuda.current_stream().wait_stream(side)
        assert torch.equal(on_side, expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(x)
        x.copy_(torch.rand_like(x))
        model.conv_transpose.weight.mul_(0.7)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, model(x))


@pytest.mark.usefixtures("ours")
def test_autocast_matches_eager_dtypes():
    system = SYSTEMS["system1"]
    original, model = _pair(system, torch.float32, "nchw")
    x = torch.rand(2, 64, 30, 30, device="cuda")
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cuda", dtype):
            eager, actual = original(x), model(x)
        assert actual.dtype == eager.dtype == torch.float32
        reference = copy.deepcopy(original).double()(x.double())
        assert relative_error(actual, reference) <= 1.1 * relative_error(eager, reference)
        actual.sum().backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_reference_serves_the_rest_and_says_so(caplog):
    module = fusedconv.ConvTransposeActNorm2d(
        16, 16, 4, stride=2, padding=1, num_groups=4, activation="gelu", dtype=torch.float64
    ).cuda()
    x = torch.randn(2, 16, 10, 10, device="cuda", dtype=torch.float64)
    fusedconv.clear_cache()
    with caplog.at_level("INFO", logger="fusedconv"), torch.no_grad():
        actual = module(x)
        module(x)
    lines = [r.getMessage() for r in caplog.records if "dtype is float64" in r.getMessage()]
    assert len(lines) == 1
    expected = F.group_norm(
        F.gelu(module.conv_transpose(x)), 4, module.group_norm.weight, module.group_norm.bias
    )
    torch.testing.assert_close(actual, expected)


@pytest.mark.usefixtures("ours")
@TORCH_SCRIPTS
def test_compiled_model_agrees(compiled):
    model = fusedconv.ModelNew(16, 32, 3, 1, 8, 8).cuda()
    x = torch.rand(2, 16, 20, 20, device="cuda", requires_grad=True)
    actual, expected = compiled(model, fullgraph=True)(x), model(x)
    torch.testing.assert_close(actual, expected)
    actual.sum().backward()
    assert torch.isfinite(x.grad).all()


def test_mixed_devices_are_refused():
    model = fusedconv.ModelNew(4, 4, 3, 1, 2, 2)
    with pytest.raises(ValueError, match="weight: got device cpu"):
        model(torch.rand(1, 4, 8, 8, device="cuda"))


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("precision", ["tf32", "fp32"])
def test_autocast_lowers_whatever_precision_float32_would_have(precision):
    module = fusedconv.ConvTransposeActNorm2d(16, 24, 3, num_groups=4, precision=precision).cuda()
    x = torch.randn(2, 16, 9, 10, device="cuda")
    with torch.autocast("cuda", torch.float16):
        lowered = module(x)
    module.precision = None
    with torch.autocast("cuda", torch.float16):
        assert torch.equal(lowered, module(x))
