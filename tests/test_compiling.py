"""torch.compile and torch.export of networks with our modules: eager's results and gradients."""

from __future__ import annotations

import pytest
import torch
from reference import LAYOUTS, TORCH_SCRIPTS, channels_last
from systems import pair
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from fusedconv import ConvTransposeActNorm2d, GroupNorm
from fusedconv.models import SYSTEMS


class Everything(nn.Module):
    """Both operators with ordinary torch around them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = ConvTransposeActNorm2d(4, 6, 3, num_groups=2, activation="gelu")
        self.strided = ConvTransposeActNorm2d(6, 8, 2, 2, activation="silu", order="norm_act")
        self.norm = GroupNorm(4, 8, activation="relu", order="norm_act")

    def forward(self, x):
        return self.norm(self.strided(self.conv(x * 2) + 1)).mean(-1)


def assert_compiles(compiled_model, model, x):
    compiled_x, x = x.clone().requires_grad_(), x.clone().requires_grad_()
    compiled_model(compiled_x).square().sum().backward()
    compiled_grads = [compiled_x.grad, *(p.grad.clone() for p in model.parameters())]
    model.zero_grad()
    model(x).square().sum().backward()
    grads = [x.grad, *(p.grad.clone() for p in model.parameters())]
    model.zero_grad()
    for actual, expected in zip(compiled_grads, grads, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(compiled_model(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_compiles_whole(compiled, layout, dynamic):
    model = Everything()
    compiled_model = compiled(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for shape in ((2, 4, 5, 6), (3, 4, 9, 7)):
        x = LAYOUTS[layout](torch.randn(shape))
        assert_compiles(compiled_model, model, x)


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_systems_compile_whole(compiled, name):
    model, _, x = pair(name)
    compiled_model = compiled(model, fullgraph=True, backend="aot_eager")
    assert_compiles(compiled_model, model, x)


def test_dynamic_shapes_compile_once(compiled):
    frames = CompileCounterWithBackend("aot_eager")
    model = Everything()
    compiled_model = compiled(model, fullgraph=True, backend=frames, dynamic=True)
    counts = []
    with torch.no_grad():
        for shape in ((2, 4, 5, 6), (3, 4, 9, 7), (5, 4, 8, 11)):
            x = torch.randn(shape)
            torch.testing.assert_close(compiled_model(x), model(x), rtol=1e-5, atol=1e-5)
            counts.append(frames.frame_count)
    assert counts[0] > 0
    assert len(set(counts)) == 1


def test_compiles_under_autocast(compiled):
    model = Everything()
    compiled_model = compiled(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 4, 5, 6)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        actual, expected = compiled_model(x), model(x)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


def test_trains_under_autocast(compiled):
    model = Everything()
    compiled_model = compiled(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 4, 5, 6)
    found = []
    for each in (compiled_model, model):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = (each(leaf).float() ** 3).sum()
        found.append(torch.autograd.grad(loss, [leaf, *model.parameters()]))
    for actual, expected in zip(*found, strict=True):
        assert actual.dtype == expected.dtype == torch.float32
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2 * expected.abs().max())


@TORCH_SCRIPTS
def test_compiles_with_inductor(compiled, cpp_compiler):
    model = Everything()
    compiled_model = compiled(model, fullgraph=True, backend="inductor")
    x = channels_last(torch.randn(2, 4, 5, 6))
    # Forward only, as each graph costs a call of the C++ compiler; aot_eager shows the backward.
    with torch.no_grad():
        torch.testing.assert_close(compiled_model(x), model(x), rtol=1e-5, atol=1e-5)


def test_exports(random):
    model = Everything().eval()
    x = random(2, 4, 5, 6)
    program = torch.export.export(model, (x,))
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert "fusedconv.conv_transpose_act_norm.default" in targets
    assert "fusedconv.group_norm.default" in targets
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x), model(x), rtol=1e-5, atol=1e-5)
