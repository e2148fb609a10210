"""What the forward code that fusedconv.convert follows may do besides joining chains."""

from __future__ import annotations

import copy

import pytest
import torch
from converting import assert_same, calls, converted, results
from test_composing import HOOKS, replica_of
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusedconv
from fusedconv.conversion import capturing, graphs

pytestmark = pytest.mark.usefixtures("compiled")

JOINED = ["conv group gelu"]


@pytest.fixture
def x():
    return torch.randn(2, 4, 3, 5, generator=torch.Generator().manual_seed(1))


class Up(nn.Module):
    """A chain and something behind it."""

    def __init__(self):
        super().__init__()
        self.conv = nn.ConvTranspose2d(4, 8, 2, 2)
        self.norm = nn.GroupNorm(2, 8)
        self.behind = nn.Sequential(nn.Dropout(0.5), nn.Conv2d(8, 8, 1))

    def joined(self, x):
        return F.gelu(self.norm(self.conv(x)))

    def forward(self, x):
        return self.behind(self.joined(x))


class Checkpointed(Up):
    def __init__(self, reentrant, breaks):
        super().__init__()
        self.reentrant, self.breaks = reentrant, breaks
        self.count = 0

    def forward(self, x):
        self.count += 1
        y = self.joined(x)
        if self.breaks:
            torch._dynamo.graph_break()
        if not self.training:
            return y
        return checkpoint(self.behind, y, use_reentrant=self.reentrant)


# Which torch.compile raises in itself where code goes on behind a part that it cannot follow.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("breaks", [False, True], ids=["one graph", "two graphs"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_checkpoints_draw_the_same_random_numbers_again(x, reentrant, breaks):
    model, original = converted(Checkpointed(reentrant, breaks))
    report = fusedconv.convert(model)
    for each in range(1, 4):
        torch.manual_seed(2)
        expected = results(original, x)
        torch.manual_seed(2)
        for ours, torchs in zip(results(model, x), expected, strict=True):
            torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-5)
        assert model.count == each
    assert report.joined == ()
    assert [str(each) for each in report.kept] == [
        "(model): its code is not followed: it calls "
        "torch.ops.higher_order.tag_activation_checkpoint"
    ]
    model.double().float()
    assert len(report.kept) == 1
    assert_same(model.eval(), original.eval(), x)
    assert calls(model, x) == JOINED


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("child", ["conv", "norm", "behind", "behind.1"])
def test_hooks_may_come_behind_the_first_call(x, child, kind):
    model, original = converted(Up().eval())
    plain = results(model, x)
    handles = [HOOKS[kind](each.get_submodule(child)) for each in (model, original)]
    for ours, torchs in zip(results(model, x), results(original, x), strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-4)
    for handle in handles:
        handle.remove()
    for ours, before in zip(results(model, x), plain, strict=True):
        torch.testing.assert_close(ours, before)
    assert calls(model, x) == JOINED


def test_hooks_on_all_modules_see_the_model_only(x):
    model, original = converted(Up().eval())
    model(x)
    for fresh in (model, copy.deepcopy(model)):
        seen = []

        def note(module, inputs, output, seen=seen):
            seen.append(module)

        handle = nn.modules.module.register_module_forward_hook(note)
        fresh(x)
        handle.remove()
        assert seen == [fresh.conv, fresh.norm, *fresh.behind, fresh.behind, fresh]
    assert torch.allclose(model(x), original(x), rtol=1e-4, atol=1e-5)


def test_replicas_are_not_captured_in_each_call(x, monkeypatch):
    model, original = converted(Up().eval())
    assert calls(model, x) == JOINED
    monkeypatch.setattr(capturing, "_Capture", None)
    torch.testing.assert_close(replica_of(model)(x), original(x), rtol=1e-4, atol=1e-5)


class Applied(Up):
    """A module whose _apply is of the form that it had in earlier versions of torch."""

    def _apply(self, fn):
        return super()._apply(fn)


def test_modules_move_by_an_apply_of_their_own(x):
    model, original = converted(Applied().eval())
    model(x)
    assert_same(model.double(), original.double(), x.double())


class Folded(Up):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(8)


@pytest.mark.parametrize("sequence", [False, True], ids=["code", "sequence"])
def test_batch_norms_are_folded_whether_gradients_are_wanted_or_not(x, sequence):
    up = Folded()
    model, original = converted(
        (nn.Sequential(up.conv, up.norm, nn.GELU()) if sequence else up).eval()
    )
    for _ in range(2):
        for gradients in (True, False):
            assert calls(model, x, gradients=gradients) == ["conv affine gelu"]
        assert_same(model, original, x)
    with torch.no_grad():
        torch.testing.assert_close(model(x), original(x), rtol=1e-4, atol=1e-5)
    model = copy.deepcopy(model).requires_grad_(False)
    for each in (x, x.detach().requires_grad_()):
        assert calls(model, each, gradients=True) == ["conv affine gelu"]


class Keywords(Up):
    def forward(self, x):
        y = F.gelu(input=F.group_norm(num_groups=2, input=self.conv(input=x)))
        return y + F.group_norm(num_groups=2, input=F.silu(input=y))


def test_inputs_may_be_keywords(x):
    model, original = converted(Keywords())
    assert_same(model, original, x)
    assert calls(model, x) == ["conv group gelu", "silu group"]


class WrittenInKeywords(nn.Module):
    """A LayerNorm of channels, written out."""

    def __init__(self):
        super().__init__()
        self.conv = nn.ConvTranspose2d(4, 8, 2, 2)
        self.norm = nn.GroupNorm(2, 8)
        self.weight = nn.Parameter(torch.ones(8))
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        x = self.conv(x)
        u = torch.mean(input=x, dim=1, keepdim=True)
        s = torch.mean(input=(x - u).pow(2), dim=1, keepdim=True)
        x = (x - u) / torch.sqrt(s + 1e-5)
        return F.relu(self.weight[:, None, None] * x + self.bias[:, None, None])


def test_a_mean_whose_input_is_a_keyword(x):
    model, original = converted(WrittenInKeywords())
    assert_same(model, original, x)
    assert calls(model, x) == ["conv layer relu"]


def test_a_graph_that_cannot_be_rewritten_runs_as_it_is(x, monkeypatch, caplog):
    model, original = converted(Up().eval())
    report = fusedconv.convert(model)

    def replace(chain, graph):
        graph.erase_node(next(node for node in graph.nodes if node.op == "output"))
        raise IndexError("tuple index out of range")

    monkeypatch.setattr(graphs._Chain, "replace", replace)
    for _ in range(2):
        torch.testing.assert_close(model(x), original(x), rtol=1e-4, atol=1e-5)
    assert report.joined == ()
    assert [str(each) for each in report.kept] == [
        "(model): a graph of its code is left as it is: IndexError: tuple index out of range"
    ]
    (record,) = (each for each in caplog.records if each.name == "fusedconv")
    assert record.levelname == "WARNING" and record.exc_info is not None
