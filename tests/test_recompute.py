"""Training that keeps no output of the convolution: what is saved, and that gradients are the same.
No GPU."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from operators import CONV, CONV_CASES, conv_arguments
from problems import explained, geometry_of, group_norm_stage, problem
from reference import relative_error
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

import fusedconv
from fusedconv.benchmark import DTYPES
from fusedconv.device import KNOWN
from fusedconv.functional import conv_transpose_act_norm
from fusedconv.kernels.cuda.conditions import FAMILIES
from fusedconv.selection import choose

STAGES = {
    "group": {"activation": "gelu", "num_groups": 2},
    "group, other order": {"activation": "silu", "num_groups": 3, "order": "norm_act"},
    "instance": {"activation": "relu", "norm": "instance"},
    "layer": {"activation": "gelu", "norm": "layer", "order": "norm_act"},
    "affine": {"activation": "relu", "norm": "affine", "order": "norm_act"},
    "activation": {"activation": "gelu_tanh"},
    "unfused behind": {"activation": "mish", "num_groups": 2, "order": "norm_act"},
}


def leaves_of(dtype=torch.float32, stage="group", layout="nchw") -> list[torch.Tensor]:
    torch.manual_seed(0)
    form = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    tensors = [torch.randn(2, 4, 9, 8).contiguous(memory_format=form), torch.randn(4, 6, 3, 3)]
    tensors.append(torch.randn(6))
    if STAGES[stage].keys() & {"num_groups", "norm"}:
        tensors += [torch.randn(6), torch.randn(6)]
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def call(stage: str, leaves: list[torch.Tensor], **keywords) -> torch.Tensor:
    names = dict(zip(("norm_weight", "norm_bias"), leaves[3:], strict=False))
    return conv_transpose_act_norm(*leaves[:3], stride=2, **STAGES[stage], **names, **keywords)


def gradients(stage: str, leaves: list[torch.Tensor], **keywords) -> tuple[torch.Tensor, ...]:
    output = call(stage, leaves, **keywords)
    torch.manual_seed(1)
    return (output, *torch.autograd.grad(output, leaves, torch.randn_like(output)))


def saved_elements(run) -> int:
    """Of all tensors that autograd keeps of a call, whatever their memory."""
    kept = []

    def pack(tensor):
        kept.append(tensor.numel())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(kept)


@pytest.mark.parametrize("kernel", ["torch", None])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_those_of_what_is_kept(stage, dtype, layout, kernel, force):
    if kernel is not None:
        force(kernel)
    leaves = leaves_of(dtype, stage, layout)
    anew, kept = (gradients(stage, leaves, recompute=recompute) for recompute in (True, False))
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    floor = {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    for tensor, given in zip(anew[:2], (kept[0], leaves[0]), strict=True):  # output, input's
        assert tensor.stride() == given.stride()
    for found, other, exact in zip(anew, kept, gradients(stage, wide), strict=True):
        assert relative_error(found, exact) <= 1.1 * relative_error(other, exact) + floor


@pytest.mark.parametrize("kernel", ["torch", None])
@pytest.mark.parametrize("stage", [name for name in STAGES if not name.startswith("unfused")])
def test_the_convolutions_output_is_not_kept(stage, kernel, force):
    if kernel is not None:
        force(kernel)
    leaves = leaves_of(stage=stage)
    for _ in range(2):  # a call that is seen for the first time, and one that is known
        output = call(stage, leaves)
        kept = saved_elements(lambda: call(stage, leaves, recompute=True))
        inputs = sum(leaf.numel() for leaf in leaves)
        statistics = 2 * 2 * 6  # mean and rstd of each sample and group, at most
        assert kept <= inputs + statistics
        every = saved_elements(lambda: call(stage, leaves))
        assert every - kept >= output.numel() - statistics


def test_a_bias_alone_has_nothing_to_compute_anew():
    leaves = leaves_of()[:3]
    found, steps = [], []
    for recompute in (False, True):

        def run(recompute=recompute):
            return conv_transpose_act_norm(*leaves, recompute=recompute)

        found.append(torch.autograd.grad(run(), leaves, torch.ones_like(run())))
        steps.append([each.steps for each in explained(run, gradients=True)])
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert steps[0] == steps[1]


def test_the_backward_pass_shows_the_second_convolution():
    leaves = leaves_of()
    kept = explained(lambda: call("group", leaves), gradients=True)
    anew = explained(lambda: call("group", leaves, recompute=True), gradients=True)
    assert len(anew) == len(kept) + 1
    assert "without the convolution's output" in str(anew[0])
    assert "group_norm" not in str(anew[1].problem)
    assert anew[-1].problem == kept[-1].problem


@pytest.mark.parametrize("kernel", ["torch", None])
def test_autocast_around_the_backward_pass_says_nothing(kernel, force):
    if kernel is not None:
        force(kernel)
    leaves = leaves_of()
    kept = gradients("group", leaves)
    output = call("group", leaves, recompute=True)
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(output, leaves, torch.randn_like(output))
    torch.testing.assert_close((output, *found), kept)


def test_a_forced_kernel_that_serves_no_convolution_alone(force):
    leaves = leaves_of()
    expected = gradients("group", leaves)
    force("cpu_conv_transpose")
    torch.testing.assert_close(gradients("group", leaves, recompute=True), expected)


def test_flops_of_the_second_convolution_are_counted():
    counted = []
    for recompute in (False, True):
        arguments = conv_arguments(save=True, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            CONV(*arguments, recompute)[0].sum().backward()
        counted.append(counter.get_total_flops())
    assert counted == [3 * counted[0] // 3, 4 * counted[0] // 3]


def test_second_derivatives_and_gradcheck():
    leaves = [leaf.detach().double()[:1, :2, :3, :3] for leaf in leaves_of()[:1]]
    weight = torch.randn(2, 4, 2, 2, dtype=torch.float64)
    tensors = [tensor.requires_grad_() for tensor in (*leaves, weight)]

    def run(x, weight):
        return conv_transpose_act_norm(x, weight, activation="silu", num_groups=2, recompute=True)

    assert torch.autograd.gradcheck(run, tensors)
    assert torch.autograd.gradgradcheck(run, tensors)


@pytest.mark.parametrize("num_groups", [0, 2])
def test_the_operator_leaves_it_out(num_groups):
    arguments = conv_arguments(save=True, num_groups=num_groups)
    output, conv_output, mean, rstd = CONV(*arguments, True)
    kept = CONV(*arguments)
    assert conv_output.numel() == 0
    torch.testing.assert_close((output, mean, rstd), (kept[0], *kept[2:]))


@pytest.mark.parametrize("case", ["system 1", "channels last", "layer norm", "bfloat16"])
@pytest.mark.parametrize("recompute", [False, True])
def test_opcheck(case, recompute):
    arguments = conv_arguments(**CONV_CASES[case], save=True, requires_grad=True)
    torch.library.opcheck(CONV, (*arguments, recompute))
    *arguments, save = conv_arguments(**CONV_CASES[case], save=True)
    output, *saved = CONV(*arguments, save, recompute)
    torch.library.opcheck(
        torch.ops.fusedconv.conv_transpose_act_norm_backward,
        (torch.randn_like(output), *saved, 5 * [True], *arguments, recompute),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend):
    leaves = leaves_of()
    compiled = torch.compile(
        lambda *leaves: call("group", list(leaves), recompute=True), backend=backend, fullgraph=True
    )
    output = compiled(*leaves)
    torch.manual_seed(1)
    found = torch.autograd.grad(output, leaves, torch.randn_like(output))
    torch.testing.assert_close((output, *found), gradients("group", leaves))


def test_a_graph_that_joins_calls_of_ours_keeps_it():
    """torch.compile's backend makes one call of a convolution and the GroupNorm behind it."""
    leaves = leaves_of()

    def apart(x, weight, bias, scale, shift):
        y = conv_transpose_act_norm(x, weight, bias, stride=2, recompute=True, activation="gelu")
        return fusedconv.functional.group_norm(y, 2, scale, shift)

    compiled = torch.compile(apart, backend=fusedconv.compile_backend("eager"), fullgraph=True)
    torch.testing.assert_close(compiled(*leaves), call("group", leaves))
    kept = saved_elements(lambda: compiled(*leaves))
    assert kept <= sum(leaf.numel() for leaf in leaves) + 2 * 2 * 6


def test_a_decomposed_program_computes_it_too():
    *arguments, save = conv_arguments(save=True)
    output, conv_output, mean, rstd = CONV(*arguments, save, True)
    grad, needs = torch.randn_like(output), [True] * 5
    operator = torch.ops.fusedconv.conv_transpose_act_norm_backward
    expected = operator(grad, conv_output, mean, rstd, needs, *arguments, True)
    table = fusedconv.decompositions()
    found = table[operator.default](grad, conv_output, mean, rstd, needs, *arguments, True)
    torch.testing.assert_close(found, expected)


class TestModules:
    def build(self, **keywords) -> fusedconv.ConvTransposeActNorm2d:
        torch.manual_seed(0)
        return fusedconv.ConvTransposeActNorm2d(
            4, 6, 3, num_groups=2, activation="gelu", **keywords
        )

    def test_constructor_and_attribute(self):
        module, kept = self.build(recompute=True), self.build()
        assert "recompute=True" in repr(module)
        assert "recompute" not in repr(kept)
        x = torch.randn(2, 4, 9, 8)
        fewer = saved_elements(lambda: module(x.requires_grad_()))
        assert fewer < saved_elements(lambda: kept(x.requires_grad_()))
        kept.recompute = True
        assert saved_elements(lambda: kept(x.requires_grad_())) == fewer
        torch.testing.assert_close(module(x), kept(x))
        again = copy.deepcopy(module)
        assert again.recompute
        with pytest.raises(TypeError, match=r"^recompute: got 2, expected a bool"):
            self.build(recompute=2)
        with pytest.raises(TypeError, match=r"^recompute: got 'yes', expected a bool"):
            conv_transpose_act_norm(x, kept.conv_transpose.weight, recompute="yes")

    def test_drop_ins_have_the_attribute(self):
        model = fusedconv.ModelNew(4, 6, 3, 1, 2, 2)
        x = torch.randn(2, 4, 9, 8, requires_grad=True)
        every = saved_elements(lambda: model(x))
        model.recompute = True
        assert saved_elements(lambda: model(x)) < every

    @pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
    def test_scripted(self):
        scripted = torch.jit.script(self.build(recompute=True))
        kept = torch.jit.script(self.build())
        x = torch.randn(2, 4, 9, 8, requires_grad=True)
        torch.testing.assert_close(scripted(x), kept(x))
        assert saved_elements(lambda: scripted(x)) < saved_elements(lambda: kept(x))


@pytest.mark.skipif("sm90" not in FAMILIES, reason="built without kernels of 9.0")
@pytest.mark.parametrize(
    ("norm", "precision"), [("group", "fp16"), ("layer", "fp16"), ("layer", "bf16"), (None, "bf16")]
)
def test_kernels_run_as_in_inference_but_for_statistics(norm, precision):
    """What a plan's steps are on a device that is not here. In bfloat16 GELU in front of GroupNorm
    may be in half precision, but not where gradients compute it once more."""
    stage = None if norm is None else group_norm_stage(4)
    if stage is not None and norm != "group":
        stage = dataclasses.replace(stage, kind=norm, num_groups=0)
    inference = problem(
        dtype=DTYPES[precision],
        output_dtype=DTYPES[precision],
        precision=precision,
        batch=8,
        channels=64,
        spatial=(64, 64),
        conv=geometry_of(torch.empty(64, 64, 3, 3)),
        norm=stage,
    )
    saving = dataclasses.replace(inference, save=True)
    anew = dataclasses.replace(saving, recompute=True)
    plans = [choose(each, KNOWN[90]) for each in (inference, saving, anew)]
    steps = [
        choice.chosen[0][1].kernel.compile(choice.chosen[0][0], KNOWN[90]).steps for choice in plans
    ]
    assert steps[0] == steps[2]
    assert steps[0] != steps[1]
