"""Whether autograd follows torch's operators through a training step, or differentiates ours."""

from __future__ import annotations

import io
import logging

import pytest
import torch
from problems import backward_problem
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusedconv
from fusedconv import ForwardProblem, functional, hypothetical, selection, training
from fusedconv.device import KNOWN, PROCESSOR
from fusedconv.recording import record
from fusedconv.training import reason_to_follow
from fusedconv.winners import Winner

#: Which conftest.py takes from the others.
LEAST_GAIN = training.LEAST_GAIN
OURS, FOLLOWED = "DirectBackward", "ConvolutionBackward0"


@pytest.fixture(autouse=True)
def _least_gain(_kernels_train, monkeypatch):
    monkeypatch.setattr(training, "LEAST_GAIN", LEAST_GAIN)


@pytest.fixture
def tensors(random):
    """An input that a library convolves as it lies, weight and bias."""

    def make(size=4, dtype=torch.float32):
        found = random(2, 16, size, size, dtype=dtype), random(16, 8, 4, 4, dtype=dtype)
        return [each.requires_grad_() for each in (*found, random(8, dtype=dtype))]

    return make


def convolved(tensors, **keywords):
    return functional.conv_transpose_act_norm(*tensors, stride=2, padding=1, **keywords)


def node(output):
    return type(output.grad_fn).__name__


# ---- calls ---------------------------------------------------------------------------------------


def test_a_small_convolution_is_followed(tensors):
    given = tensors()
    output = convolved(given)
    assert node(output) == node(convolved(given)) == FOLLOWED  # known again, too
    expected = F.conv_transpose2d(*given, stride=2, padding=1)
    assert torch.equal(output, expected)
    grad = torch.randn_like(output)
    found = torch.autograd.grad(output, given, grad)
    assert all(map(torch.equal, found, torch.autograd.grad(expected, given, grad)))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_what_is_followed_keeps_its_layout_and_dtype(tensors, layout):
    x, weight, bias = tensors(dtype=torch.bfloat16)
    output = convolved((x.detach().contiguous(memory_format=layout), weight, bias))
    assert node(output) == FOLLOWED
    assert output.dtype == torch.bfloat16 and output.is_contiguous(memory_format=layout)


def test_a_large_step_is_ours():
    x = torch.randn(8, 32, 48, 48, requires_grad=True)
    weight = torch.randn(32, 1, 4, 4, requires_grad=True)
    output = convolved((x, weight), groups=32)
    assert node(output) == OURS


@pytest.mark.parametrize(
    "keywords",
    [{"precision": "fp32"}, {"activation": "gelu", "recompute": True}],
    ids=["precision", "recompute"],
)
def test_what_torch_does_not_promise_is_ours(tensors, keywords):
    assert node(convolved(tensors(), **keywords)) not in (FOLLOWED, "GeluBackward0")


def test_kernels_that_are_named_are_not_passed_over(tensors, force):
    force("cpu_channels_last,cpu_bias_backward,torch_convolution_backward")
    assert node(convolved(tensors())) == OURS


def test_inference_is_not_weighed(tensors):
    x, weight, bias = (each.detach() for each in tensors())
    with record.recording() as calls:
        convolved((x, weight, bias))
    ((_, _, followed),) = calls
    assert not followed


def test_a_group_norm_is_followed(random):
    x = random(2, 6, 5, 5).requires_grad_()
    output = functional.group_norm(x, 3)
    assert node(output) == "NativeGroupNormBackward0"
    assert torch.equal(output, F.group_norm(x, 3))


def test_on_processors_a_group_norm_of_channels_last_is_ours(random):
    """In front of torch's a copy to channels first would come."""
    x = random(2, 6, 5, 5).contiguous(memory_format=torch.channels_last).requires_grad_()
    assert node(functional.group_norm(x, 3)) == OURS


# ---- BatchNorm -----------------------------------------------------------------------------------


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_norm_is_torchs_own(tensors, random, affine, dtype):
    given = tensors(dtype=dtype)
    mean, variance = random(8, dtype=dtype), random(8, dtype=dtype).abs() + 0.5
    own = [random(8, dtype=dtype).requires_grad_() if affine else None for _ in range(2)]

    def run():
        return convolved(
            given, activation="relu", order="norm_act", norm="batch", norm_weight=own[0],
            norm_bias=own[1], running_mean=mean, running_var=variance, eps=0.1,
        )  # fmt: skip

    expected = F.conv_transpose2d(*given, stride=2, padding=1)
    expected = F.relu(F.batch_norm(expected, mean, variance, *own, eps=0.1))
    leaves = [each for each in (*given, *own) if each is not None]
    grad = torch.randn_like(expected)
    for output in (run(), run()):
        assert node(output) == "ReluBackward0"
        assert torch.equal(output, expected)
        found = torch.autograd.grad(output, leaves, grad)
        wanted = torch.autograd.grad(expected, leaves, grad, retain_graph=True)
        assert all(map(torch.equal, found, wanted))


def test_a_batch_norm_that_torch_refuses_is_folded(tensors, random):
    given = tensors(dtype=torch.bfloat16)
    mean, variance = random(8), random(8).abs() + 0.5
    scale = random(8, dtype=torch.bfloat16).requires_grad_()
    output = convolved(
        given, norm="batch", norm_weight=scale, running_mean=mean, running_var=variance
    )
    assert node(output) != "DirectBatchNormBackward"
    with pytest.raises(RuntimeError):
        F.batch_norm(output, mean, variance, scale)
    wide = [each.double() for each in given]
    expected = F.conv_transpose2d(*wide, stride=2, padding=1)
    expected = F.batch_norm(expected, mean.double(), variance.double(), scale.double())
    torch.testing.assert_close(output.double(), expected, rtol=2e-2, atol=5e-2)
    (found,) = torch.autograd.grad(output, scale, torch.ones_like(output))
    (wanted,) = torch.autograd.grad(expected, scale, torch.ones_like(expected))
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=0.5)


# ---- modules, transforms, what is said -----------------------------------------------------------


def test_modules_train_as_torchs(random):
    torch.manual_seed(0)
    ours = fusedconv.ConvTransposeActNorm2d(8, 8, 2, 2, num_groups=2, activation="gelu")
    theirs = nn.Sequential(ours.conv_transpose, nn.GELU(), ours.group_norm)
    x = random(2, 8, 4, 4)
    for model in (ours, theirs):
        for parameter in model.parameters():
            parameter.grad = None
        model(x).square().sum().backward()
        found = [parameter.grad for parameter in model.parameters()]
        if model is ours:
            first = found
    torch.testing.assert_close(first, found)
    torch.autograd.gradcheck(ours.double(), x.double().requires_grad_())


def test_explanations_say_so(tensors):
    out = io.StringIO()
    forward, backward = fusedconv.explain(
        convolved, tensors(), activation="gelu", file=out, gradients=True
    )
    assert (forward.chosen_by, backward.chosen_by) == ("autograd", "autograd")
    assert forward.kernel == "torch"
    assert backward.kernel == "torch_epilogue_backward + torch_convolution_backward"
    assert isinstance(forward.problem, ForwardProblem)
    assert (
        "autograd follows torch's operators: by estimates and what the host takes" in out.getvalue()
    )
    assert "followed by autograd)" in out.getvalue()
    assert forward.followed == backward.followed != ""


def test_the_log_says_so_once(tensors, caplog):
    with caplog.at_level(logging.INFO, logger="fusedconv"):
        for _ in range(3):
            convolved(tensors(), activation="gelu")
    (line,) = (each for each in caplog.messages if "autograd follows" in each)
    assert "in a node of autograd of their own" in line


def test_times_are_compared_where_both_passes_are_tuned(tensors, monkeypatch):
    monkeypatch.setattr(selection, "_tuned", {})
    given = tensors(24)
    with record.recording() as calls:
        convolved(given)
    forward = calls[0].problem
    backward = backward_problem(forward)
    parts, ours, theirs = backward.parts, "cpu_channels_last", "torch_convolution_backward"

    def tune(of_ours, of_theirs):
        for problem, names in ((forward, (("forward",), ours, "torch")), (backward, None)):
            where, kernel, reference = names or (parts, theirs, theirs)
            times = {(where, kernel): of_ours, (where, reference): of_theirs}
            selection.keep_winner(problem, PROCESSOR, Winner(((where, kernel),), times))
        return reason_to_follow(forward, backward, PROCESSOR)

    assert tune(5.0, 20.0) is None
    reason = tune(5.0, 5.1)
    assert reason is not None and "by times" in reason


@pytest.mark.parametrize("reentrant", [False, True])
def test_tuning_changes_nothing_between_a_checkpoints_calls(
    random, reentrant, monkeypatch, tmp_path
):
    """The later layer's backward pass comes first, and is tuned with the former's."""
    monkeypatch.setattr(selection, "_tuned", {})
    monkeypatch.setenv("FUSEDCONV_CACHE_DIR", str(tmp_path))

    def layer(x, weight, scale):
        return functional.conv_transpose_act_norm(
            x, weight, padding=1, activation="silu", num_groups=4, norm_weight=scale
        )

    leaves = [(random(16, 16, 3, 3).requires_grad_(), random(16).requires_grad_()) for _ in "12"]
    x = y = random(2, 16, 8, 8).requires_grad_()
    with fusedconv.autotune():
        for each in leaves:
            y = checkpoint(layer, y, *each, use_reentrant=reentrant)
        y.square().sum().backward()
    found = [x.grad, *(leaf.grad for each in leaves for leaf in each)]
    z = x
    for weight, scale in leaves:
        z = F.conv_transpose2d(z, weight, padding=1)
        z = F.group_norm(F.silu(z), 4, scale)
    wanted = [x, *(leaf for each in leaves for leaf in each)]
    expected = torch.autograd.grad(z.square().sum(), wanted)
    torch.testing.assert_close(found, list(expected), rtol=1e-3, atol=1e-3)


# ---- a GPU that is not here ----------------------------------------------------------------------


@pytest.mark.skipif(
    "90a" not in fusedconv.build.get("architectures", ""), reason="built without sm_90a"
)
def test_on_a_gpu_a_node_is_not_weighed():
    forward = hypothetical.problem(
        device="cuda", dtype=torch.bfloat16, precision=None, layout="nhwc", batch=1, channels=768,
        spatial=(3, 3, 3), out_channels=384, kernel_size=2, stride=2,
    )  # fmt: skip
    assert reason_to_follow(forward, backward_problem(forward), KNOWN[90]) is None
