"""Launches that are repeated, by sequences of programs and CUDA graphs of them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

import fusedconv
from fusedconv import selection
from fusedconv.functional import conv_transpose_act_norm
from fusedconv.kernels.cuda import program
from fusedconv.plan import ForwardPlan

pytestmark = [pytest.mark.gpu, pytest.mark.replays]

#: The norm behind, and its arguments.
NORMS = {
    None: {},
    "group": {"num_groups": 4},
    "layer": {"norm": "layer"},
    "batch": {"norm": "batch"},
    "instance": {"norm": "instance"},
}


class Layer:
    """A transposed convolution 32 to 16 channels with what is behind it."""

    def __init__(self, norm, layout, dtype=torch.bfloat16, out_channels=16):
        self.form = torch.channels_last if layout == "nhwc" else torch.contiguous_format
        made = {"device": "cuda", "dtype": dtype}
        self.weight = torch.rand(32, out_channels, 3, 3, **made)
        self.bias = torch.rand(out_channels, **made)
        self.norm_weight = torch.rand(out_channels, **made)
        self.norm_bias = torch.rand(out_channels, **made)
        self.leaves = [self.weight, self.bias]
        self.norm = dict(NORMS[norm])
        if norm is not None:
            self.norm |= {"norm_weight": self.norm_weight, "norm_bias": self.norm_bias}
            self.leaves += [self.norm_weight, self.norm_bias]
        if norm == "batch":
            self.norm["running_mean"] = torch.rand(out_channels, device="cuda")
            self.norm["running_var"] = torch.rand(out_channels, device="cuda") + 0.5
        for leaf in self.leaves:
            leaf.requires_grad_()

    def input(self):
        x = torch.rand(2, 32, 12, 20, device="cuda", dtype=self.weight.dtype)
        return x.contiguous(memory_format=self.form)

    def __call__(self, x):
        return conv_transpose_act_norm(
            x, self.weight, self.bias, 2, 1, 1, activation="gelu", order="norm_act", **self.norm
        )

    def step(self, x, grad=None):
        """Output and gradients."""
        for leaf in self.leaves:
            leaf.grad = None
        x = x.detach().requires_grad_()
        output = self(x)
        if grad is None:
            torch.manual_seed(1)
            grad = torch.randn_like(output)
        torch.full_like(output, torch.nan)  # what comes next gets this memory
        output.backward(grad)
        return [output.detach(), x.grad, *(leaf.grad for leaf in self.leaves)]


def known_launches():
    plans = [each for each in selection._plans._entries.values() if isinstance(each, ForwardPlan)]
    known = [each for plan in plans for each in (plan.repeated or {}).values()]
    found = [each.launches for each in known if not isinstance(each, int)]
    return list({id(each): each for each in found}.values())


def graphs():
    return sum(each._sequence.graphs for each in known_launches())


def assert_replayed():
    """With what might have kept graphs from being made: another test's profile, or no memory."""
    free, total = torch.cuda.mem_get_info()
    stopped = program._stop_replays.cache_info().currsize
    assert graphs() > 0, (
        f"{len(known_launches())} calls are known, {free} of {total} bytes are free, replays were "
        f"stopped {stopped} times"
    )


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=False)


@pytest.fixture(autouse=True)
def forgotten():
    fusedconv.clear_cache()
    yield
    fusedconv.clear_cache()


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_steps_are_the_same_bits_again(norm, dtype, layout):
    layer = Layer(norm, layout, dtype)
    x = layer.input()
    expected = [each.clone() for each in layer.step(x)]
    for _ in range(8):
        assert_same(layer.step(x), expected)
    assert_replayed()


def test_other_values_in_the_same_memory_are_read():
    layer = Layer("batch", "nhwc")
    x = layer.input()
    for _ in range(12):
        before = layer.step(x)
    assert_replayed()
    before = [each.clone() for each in before]
    for tensor in (x, *layer.leaves, layer.norm["running_mean"]):
        tensor.data.mul_(0.5)
    after = layer.step(x)
    assert not torch.equal(after[0], before[0]) and not torch.equal(after[2], before[2])
    fusedconv.clear_cache()
    assert_same(after, layer.step(x))


@pytest.mark.parametrize("how", ["strided gradient", "expanded gradient", "strided norm weight"])
def test_tensors_that_lie_otherwise(how):
    layer = Layer("group", "nchw")
    x = layer.input()
    for _ in range(4):
        output, *_ = layer.step(x)
    grad = torch.randn_like(output)
    if how == "strided gradient":
        grad = grad.transpose(2, 3).contiguous().transpose(2, 3)
    elif how == "expanded gradient":
        grad = torch.ones((), device="cuda", dtype=output.dtype).expand_as(output)
    else:
        wide = torch.rand(32, device="cuda", dtype=x.dtype)
        layer.leaves[2] = layer.norm["norm_weight"] = wide[::2].detach().requires_grad_()
    found = [each.clone() for each in layer.step(x, grad)]
    for _ in range(3):
        assert_same(layer.step(x, grad), found)
    fusedconv.clear_cache()
    assert_same(layer.step(x, grad), found)


def test_a_tensor_given_twice():
    layer = Layer("group", "nchw")
    x = layer.input()
    for _ in range(4):
        layer.step(x)
    layer.norm["norm_bias"] = layer.norm["norm_weight"]
    layer.leaves.pop()
    found = [each.clone() for each in layer.step(x)]
    for _ in range(3):
        assert_same(layer.step(x), found)
    fusedconv.clear_cache()
    assert_same(layer.step(x), found)


def test_a_captured_step_launches_by_itself():
    layer = Layer("layer", "nhwc")
    x = layer.input()
    grad = torch.randn_like(layer(x))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(5):
            expected = [each.clone() for each in layer.step(x, grad)]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layer.step(x, grad)
    for each in found:
        each.zero_()
    graph.replay()
    assert_same(found, expected)


def test_threads_with_streams_of_their_own():
    layers = [Layer("group", "nhwc") for _ in range(4)]
    inputs = [layer.input() for layer in layers]
    expected = [
        [each.clone() for each in layer.step(x)] for layer, x in zip(layers, inputs, strict=True)
    ]
    torch.cuda.synchronize()
    failures = []

    def work(layer, x, expected):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
                for _ in range(40):
                    output = layer(x)
                    torch.cuda.current_stream().synchronize()
                    assert torch.equal(output, expected[0])
        except Exception as error:  # for the thread that waits
            failures.append(error)

    threads = [
        threading.Thread(target=work, args=each)
        for each in zip(layers, inputs, expected, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize(
    ("provider", "taps", "dtype"),
    [
        ("boxes_sm90", 4, torch.bfloat16),
        ("boxes_sm90", 4, torch.float32),
        ("phases_sm90", 3, torch.bfloat16),
    ],
    ids=str,
)
def test_launches_that_begin_early_wait_for_what_is_in_front(
    provider, taps, dtype, layout, force, monkeypatch
):
    """Products begin beside the kernel that folds running statistics, and launches beside the one
    that packs a weight: both change from call to call, and no call is waited for."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("launches begin early on compute capability 9.0")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    force(provider)
    form = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    made = {"device": "cuda", "dtype": dtype}
    x = torch.randn(4, 128, 32, 32, **made).contiguous(memory_format=form)
    weight = torch.empty(128, 64, taps, taps, **made).contiguous(memory_format=form)
    bias = torch.zeros(64, **made)
    mean, variance = torch.empty(64, device="cuda"), torch.empty(64, device="cuda")
    found, expected = [], []
    with torch.no_grad():
        for _ in range(60):
            weight.normal_()
            mean.uniform_(-9.0, 9.0)
            variance.uniform_(0.1, 9.0)
            found.append(
                conv_transpose_act_norm(
                    x, weight, bias, 2, 1, norm="batch", running_mean=mean, running_var=variance
                )
            )
            plain = torch.nn.functional.conv_transpose2d(x, weight, bias, 2, 1).float()
            expected.append((plain - mean[:, None, None]) / (variance[:, None, None] + 1e-5).sqrt())
    for one, other in zip(found, expected, strict=True):
        assert (one.float() - other).abs().max() < 2e-2 * other.abs().max()


def test_a_step_leaves_no_memory_behind():
    """Neither workspaces nor what a node keeps of a call that is known again."""
    layer = Layer("group", "nchw")
    x = layer.input()
    grad = torch.randn_like(layer(x))
    allocated = set()
    for _ in range(8):
        layer.step(x, grad)
        for leaf in layer.leaves:
            leaf.grad = None
        torch.cuda.synchronize()
        allocated.add(torch.cuda.memory_allocated())
    assert len(allocated) == 1


def test_addresses_that_seldom_come_again_make_few_graphs():
    layer = Layer("batch", "nhwc")
    held = []
    for _ in range(300):
        held.append(layer.step(layer.input()))
    assert graphs() == 0
    assert all(torch.isfinite(each).all() for each in held[-1])


def test_the_environment_switches_graphs_off():
    source = (
        "import test_gpu_launches as t\n"
        "layer = t.Layer('batch', 'nhwc')\n"
        "x = layer.input()\n"
        "for _ in range(12): layer.step(x)\n"
        "print(t.graphs(), len(t.known_launches()))\n"
    )
    for value, expected in (("0", False), ("", True)):
        done = subprocess.run(
            [sys.executable, "-c", source],
            env={**os.environ, "FUSEDCONV_REPLAY": value},
            cwd=os.path.dirname(__file__),
            capture_output=True,
            text=True,
            check=True,
        )
        made, known = map(int, done.stdout.split())
        assert (made > 0) == expected and known > 0


def test_nothing_is_replayed_once_the_profiler_has_recorded():
    """A graph that was launched under a profile, after others had ended, ended the process. What
    warms a scheduled one up sets up what it traces with, and no flag."""
    source = (
        "import test_gpu_launches as t, torch\n"
        "from torch.profiler import ProfilerActivity, profile, schedule\n"
        "layers, made = [], None\n"
        "for norm in t.NORMS:\n"
        "    for layout in ('nchw', 'nhwc'):\n"
        "        layer = t.Layer(norm, layout)\n"
        "        x = layer.input()\n"
        "        layers.append((layer, x))\n"
        "        for _ in range(12): layer.step(x)\n"
        "        if made is None: assert t.graphs() > 0\n"
        "        else: assert t.graphs() == made, (t.graphs(), made)\n"
        "        torch.cuda.synchronize()\n"
        "        how = schedule(wait=1, warmup=2, active=1, repeat=2)\n"
        "        with profile(activities=[ProfilerActivity.CUDA], schedule=how) as cycles:\n"
        "            for _ in range(8):\n"
        "                for known, y in layers:\n"
        "                    for _ in range(3): known.step(y)\n"
        "                torch.cuda.synchronize()\n"
        "                cycles.step()\n"
        "        if made is None: made = t.graphs()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", source],
        cwd=os.path.dirname(__file__),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("norm", [None, "group", "batch"])
def test_batched_gradients_of_a_call_that_is_repeated(norm):
    """Which lie nowhere: whenever they come, they are taken one by one."""
    layer = Layer(norm, "nhwc")
    x = layer.input().requires_grad_()
    leaves = [x, *layer.leaves]
    for _ in range(4):
        output = layer(x)
        grads = torch.stack([torch.ones_like(output), -2 * torch.ones_like(output)])
        batched = torch.autograd.grad(output, leaves, grads, True, is_grads_batched=True)
        for number, grad in enumerate(grads):
            one = torch.autograd.grad(output, leaves, grad, True)
            for found, expected in zip(batched, one, strict=True):
                torch.testing.assert_close(found[number], expected, rtol=2e-2, atol=2e-2)
