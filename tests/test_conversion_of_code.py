"""Chains that forward code joins, captured by fusedconv.convert."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from checkout import ROOT
from converting import CALLS, CHAINS, Joined, LayerNorm2d, assert_same, calls, converted, results
from processes import python
from reference import cotangent, relative_error
from test_composing import doubling
from torch import nn
from torch.nn import functional as F

import fusedconv


@pytest.fixture
def x():
    return torch.randn(2, 4, 3, 5, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _a_clean_slate(compiled):
    """Graphs are counted by code."""


def test_code_is_followed(x):
    model, original = converted(Joined().eval())
    assert_same(model, original, x)
    with torch.no_grad():
        torch.testing.assert_close(model(x), original(x), rtol=1e-4, atol=1e-5)
    assert calls(model, x) == CALLS
    assert calls(model, torch.cat([x, x])) == CALLS
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours, theirs = model(x), original(x)
    with torch.no_grad():
        exact = copy.deepcopy(original).double()(x.double())
    assert relative_error(ours, exact) <= 1.1 * relative_error(theirs, exact) + 1e-3


def test_the_report_of_a_call(x):
    model = Joined()
    for dry_run in (True, False):
        report = fusedconv.convert(model, (x,), dry_run=dry_run)
        assert report.followed == ("(model)",)
        assert [str(each) for each in report.joined] == [
            f"{name}: {chain}"
            for name, chain in zip(
                ["conv1", "norm1", "conv3", "act", "conv4"],
                [chain for chain in CHAINS if "batch" not in chain],
                strict=True,
            )
        ]
        assert [str(each) for each in report.kept] == [
            "conv2: conv_transpose2d, not fused with batch_norm: it is in training mode, and fused "
            "in evaluation mode only"
        ]
        assert type(model) is Joined or not dry_run
    with torch.no_grad():
        model.eval()(x)
    assert sorted(each.chain for each in report.joined) == sorted(CHAINS)


def test_training_mode_and_statistics_are_followed(x):
    model, original = converted(Joined())
    for mode in (True, False):
        assert_same(model.train(mode), original.train(mode), x)
        assert ("conv affine relu" in calls(model, x)) != mode
        original.load_state_dict(model.state_dict())


def test_code_is_not_followed_if_so_asked(x):
    model = Joined()
    report = fusedconv.convert(model, (x,), follow=False)
    assert report.followed == () and report.joined == ()
    assert type(model) is Joined
    assert set(calls(model.eval(), x)) == {"conv", "group"}


# ---- what must not be fused ----------------------------------------------------------------------


class Code(nn.Module):
    """A module whose code is a function of it and the input."""

    def __init__(self):
        super().__init__()
        self.conv = nn.ConvTranspose2d(4, 8, 2, 2)
        self.norm = nn.GroupNorm(2, 8)
        self.seen = []
        self.skips = False


class ReadsTwice(Code):
    def forward(self, x):
        y = self.conv(x)
        return self.norm(y) + y


class Writes(Code):
    def forward(self, x):
        x = x.clone()
        y = self.conv(x)
        x.add_(1)
        return self.norm(y) + x.mean()


class WritesTheOutput(Code):
    def forward(self, x):
        y = self.conv(x)
        F.relu(y, inplace=True)
        return self.norm(y)


class Shifts(Code):
    def forward(self, x):
        return self.norm(self.conv(x) + 1)


class NormOfLines(Code):
    def forward(self, x):
        y = self.conv(x)
        return F.layer_norm(y, y.shape[-1:])


class Transposes(Code):
    def forward(self, x):
        y = self.conv(x).permute(0, 3, 2, 1)
        return F.layer_norm(y, y.shape[-1:]).permute(0, 3, 2, 1)


class TurnsAnotherWayBack(Code):
    def forward(self, x):
        y = self.conv(x).permute(0, 2, 3, 1)
        return F.layer_norm(y, y.shape[-1:]).permute(0, 3, 2, 1)


class StatisticsOfTheBatch(Code):
    def forward(self, x):
        mean, var = torch.zeros(8).to(x), torch.ones(8).to(x)
        return F.batch_norm(self.conv(x), mean, var, training=True)


class GivenStatistics(Code):
    def forward(self, x):
        mean, var = torch.zeros(8).to(x), torch.ones(8).to(x)
        return F.instance_norm(self.conv(x), mean, var, use_input_stats=False)


@pytest.mark.parametrize(
    "kind",
    [
        ReadsTwice,
        TurnsAnotherWayBack,
        StatisticsOfTheBatch,
        GivenStatistics,
        Writes,
        WritesTheOutput,
        Shifts,
        NormOfLines,
        Transposes,
    ],
)
def test_what_is_read_or_written_between_stays_apart(x, kind):
    model, original = converted(kind())
    if kind is Writes:  # autograd refuses it
        torch.testing.assert_close(model(x), original(x), rtol=1e-5, atol=1e-5)
    else:
        assert_same(model, original, x)
    assert calls(model, x)[0] == "conv"


def test_why_it_stays_apart(x):
    expected = {
        ReadsTwice: "conv_transpose2d, not fused with group_norm: its input is read 2 times",
        Writes: "conv_transpose2d, not fused with group_norm: other operations stand in between",
    }
    for kind, reason in expected.items():
        report = fusedconv.convert(kind(), (x,))
        assert [str(each) for each in report.kept] == [f"conv: {reason}"]


class Branches(Code):
    """Its attributes say what it computes, and it leaves traces in Python."""

    def forward(self, x, scale=None):
        self.seen.append(tuple(x.shape))
        y = self.conv(x)
        if self.skips:
            return y
        if x.mean() > 100:  # depends on values
            return F.silu(y)
        y = self.norm(y)
        return F.relu(y) if scale is None else y * scale


# Which torch.compile raises in itself where code goes on behind a part that it cannot follow.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_control_flow_and_side_effects_are_the_codes(x):
    model, original = converted(Branches())
    for _ in range(2):
        assert_same(model, original, x)
        assert_same(model, original, x + 200)
        torch.testing.assert_close(model(x, 2), original(x, 2))
        torch.testing.assert_close(model(x, scale=x.mean()), original(x, scale=x.mean()))
        for each in (model, original):
            each.skips = not each.skips
    assert len(model.seen) >= 8 and set(model.seen) == {tuple(x.shape)}


def test_hooks_of_children_run(x):
    model, original = converted(Joined().eval())
    model(x)
    handles = [
        each.get_submodule(name).register_forward_hook(doubling)
        for each in (model, original)
        for name in ("conv1", "norm3")
    ]
    assert_same(model, original, x)
    for handle in handles:
        handle.remove()
    assert calls(model, x) == CALLS


class Nested(nn.Module):
    """A convolution within a sequence, an activation outside it, and modules in lists."""

    def __init__(self):
        super().__init__()
        self.up = nn.Sequential(nn.ConvTranspose2d(4, 8, 2, 2), nn.GroupNorm(2, 8))
        self.blocks = nn.ModuleList(Code() for _ in range(12))
        for block in self.blocks:
            block.__class__ = Block

    def forward(self, x):
        x = F.silu(self.up(x))
        for block in self.blocks:
            x = block(x)
        return x


class Block(Code):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return F.relu(self.norm(x), inplace=False)


class Traced(Code):
    """One of its modules was traced by torch.jit."""

    def __init__(self):
        super().__init__()
        self.inner = torch.jit.trace(nn.Sequential(nn.Conv2d(4, 4, 1)), torch.randn(2, 4, 5, 6))

    def forward(self, x):
        return F.relu(self.norm(self.conv(self.inner(x))))


@pytest.mark.filterwarnings("ignore")  # torch.compile's own, of what precedes a break
def test_code_may_call_what_torch_jit_has_traced(x):
    torch.manual_seed(1)
    model, original = Traced(), Traced()
    original.load_state_dict(model.state_dict())
    fusedconv.convert(model)
    torch.testing.assert_close(model(x), original(x))
    assert calls(model, x) == ["conv group relu"]


def test_a_chain_may_begin_in_a_sequence_and_classes_may_have_many_modules(x):
    model, original = converted(Nested())
    assert_same(model, original, x)
    assert calls(model, x) == ["conv group silu", "group relu"]
    # Called by themselves they are captured one by one, more than torch.compile has graphs by code.
    for width, block in enumerate(model.blocks):
        assert calls(block, torch.randn(2, 8, 3, width + 2)) == ["group relu"]


class Closed(Code):
    def forward(self, x):
        return super().extra_repr() + str(F.relu(self.norm(self.conv(x))).shape)


def test_super_in_code_and_results_that_are_no_tensors(x):
    model, original = converted(Closed())
    assert model(x) == original(x)


def test_modules_that_cannot_be_followed():
    model = nn.Module()
    model.traced = torch.fx.symbolic_trace(Joined())
    model.patched = Joined()
    model.patched.forward = lambda x: x
    report = fusedconv.convert(model)
    assert {each.name: each.reason for each in report.kept} == {
        "traced": "its code is not followed: it is a GraphModule, which fusedconv.compile_pass "
        "takes",
        "patched": "its code is not followed: it has a forward of its own",
    }


class WrittenLayerNorm2d(nn.Module):
    """Of channels, as Segment Anything writes it."""

    def __init__(self, channels, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x):
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class AnotherNorm(WrittenLayerNorm2d):
    """Not quite a LayerNorm."""

    def forward(self, x):
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = x / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


@pytest.mark.parametrize("norm", [WrittenLayerNorm2d, LayerNorm2d, AnotherNorm])
def test_norms_of_other_classes_in_sequences(x, norm):
    sequence = nn.Sequential(
        nn.ConvTranspose2d(4, 8, 2, 2), norm(8, eps=1e-3), nn.GELU(),
        nn.ConvTranspose2d(8, 6, 2, 2), nn.GELU(),
    )  # fmt: skip
    model, original = converted(nn.ModuleDict({"up": sequence})["up"])
    first = ["conv"] if norm is AnotherNorm else ["conv layer gelu"]
    assert calls(model, x) == [*first, "conv gelu"]
    assert_same(model, original, x)


def test_copies_are_followed_and_reverted(x):
    model, original = converted(Joined().eval())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert calls(other, x) == CALLS
        fusedconv.revert(other)
        assert type(other) is Joined
        assert torch.equal(other(x), original(x))
    assert calls(model, x) == CALLS


def test_others_who_follow_the_code_see_it_as_it_is(x):
    model, original = converted(Joined().eval())
    expected = original(x)
    program = torch.export.export(model, (x,)).module()
    for followed in (
        program,
        torch.fx.symbolic_trace(model),
        torch.compile(model, backend="aot_eager", fullgraph=True),
        lambda x: torch.func.functional_call(model, dict(model.named_parameters()), (x,)),
        lambda x: torch.func.vmap(model)(x[None])[0],
    ):
        torch.testing.assert_close(followed(x), expected, rtol=1e-4, atol=1e-5)


def test_gradients_reach_what_is_folded(x):
    """Of a BatchNorm of inference, whose weight and bias are trained."""
    model, original = converted(Joined().eval())
    for each in (model, original):
        output = each(x)
        output.backward(cotangent(output))
    torch.testing.assert_close(model.norm2.weight.grad, original.norm2.weight.grad, rtol=1e-3,
                               atol=1e-4)  # fmt: skip
    assert len(results(model, x)) == 2 + len(list(model.parameters()))


@pytest.mark.parametrize("name", ["decoder", "system1", "system2", "system3"])
def test_the_example_compares_and_times(name):
    script = str(ROOT / "examples" / "compare.py")
    size = ("--batch", "1", "--size", "4", "--layout", "channels_last", "--seconds", "0.01")
    done = python(script, "--device", "cpu", "--model", name, *size)
    assert done.returncode == 0, done.stderr
    if name == "decoder":
        assert "stages.0.0, stages.0.1, stages.0.2: ConvTranspose2d -> group_norm" in done.stdout
        assert "up: conv_transpose2d -> group_norm -> relu" in done.stdout
    errors = re.findall(r"^(\S.*\S) +(\d\S*) +(\d\S*)$", done.stdout, re.MULTILINE)
    assert [tensor for tensor, _, _ in errors[:2]] == ["output", "gradient of input"]
    assert len(errors) >= (4 if name == "system3" else 5)
    assert all(float(error) < 1e-5 for _, *both in errors for error in both)
    assert re.search(r"forward and backward +\| +\d", done.stdout)
