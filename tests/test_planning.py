"""The keys of the plan cache: a call never runs the plan of a call that differs from it."""

from __future__ import annotations

import pytest
import torch
from problems import explained
from reference import channels_last, misaligned, strided

from fusedconv import ConvTransposeActNorm2d, clear_cache, functional, hypothetical, ops
from fusedconv.ops import planning


def float16(*shape):
    return torch.ones(shape, dtype=torch.float16)


def conv_plan(save=False, **arguments):
    return ops.conv_plan(ops.ConvCall(**arguments), save)


def group_norm_plan(save=False, **arguments):
    return ops.group_norm_plan(ops.NormCall(**arguments), save)


#: A valid call of each planning function.
CONV = {
    "input": torch.ones(2, 4, 5, 6),
    "weight": torch.ones(4, 6, 3, 2),
    "bias": torch.ones(6),
    "stride": (2, 2),
    "padding": (1, 1),
    "output_padding": (0, 0),
    "dilation": (1, 1),
    "groups": 1,
    "activation": "gelu",
    "order": "act_norm",
    "num_groups": 2,
    "norm_weight": torch.ones(6),
    "norm_bias": torch.ones(6),
    "eps": 1e-5,
    "precision": None,
    "output_dtype": None,
}
NORM = {
    "input": torch.ones(2, 4, 5, 6),
    "num_groups": 2,
    "weight": torch.ones(4),
    "bias": torch.ones(4),
    "eps": 1e-5,
    "activation": "gelu",
    "order": "act_norm",
    "output_dtype": None,
}

#: One change of each thing that a plan depends on. The strides of an input of another batch are
#: the same, and so are those of a weight with more channels.
CONV_CHANGES = {
    "batch": {"input": torch.ones(3, 4, 5, 6)},
    "input's strides": {"input": strided(torch.ones(2, 4, 5, 6))},
    "input's alignment": {"input": misaligned(torch.ones(2, 4, 5, 6))},
    "weight's strides": {"weight": strided(torch.ones(4, 6, 3, 2))},
    "no bias": {"bias": None},
    "stride": {"stride": (2, 1)},
    "padding": {"padding": (1, 0)},
    "output_padding": {"output_padding": (1, 0)},
    "dilation": {"dilation": (2, 1)},
    "activation": {"activation": "relu"},
    "order": {"order": "norm_act"},
    "num_groups": {"num_groups": 3},
    "no norm_weight": {"norm_weight": None},
    "no norm_bias": {"norm_bias": None},
    "norm's dtype": {"norm_weight": float16(6), "norm_bias": float16(6)},
    "eps": {"eps": 1e-3},
    "precision": {"precision": "tf32"},
    "output_dtype": {"output_dtype": torch.float64},
    "save": {"save": True},
}
NORM_CHANGES = {
    "batch": {"input": torch.ones(3, 4, 5, 6)},
    "input's strides": {"input": strided(torch.ones(2, 4, 5, 6))},
    "input's dtype": {"input": float16(2, 4, 5, 6)},
    "input's alignment": {"input": misaligned(torch.ones(2, 4, 5, 6))},
    "num_groups": {"num_groups": 4},
    "no weight": {"weight": None},
    "no bias": {"bias": None},
    "affine dtype": {"weight": float16(4), "bias": float16(4)},
    "eps": {"eps": 1e-3},
    "activation": {"activation": "relu"},
    "order": {"order": "norm_act"},
    "output_dtype": {"output_dtype": torch.float64},
    "save": {"save": True},
}


def assert_told_apart(function, call, change):
    """One after the other, both calls get what each gets from an empty cache."""
    alone = []
    for arguments in (call, {**call, **change}):
        clear_cache()
        alone.append(function(**arguments).problem)
    assert alone[0] != alone[1]
    for arguments, problem in ((call, alone[0]), ({**call, **change}, alone[1])):
        assert function(**arguments).problem == problem


@pytest.mark.parametrize("name", CONV_CHANGES)
def test_plans_of_the_convolution_are_told_apart(name):
    assert_told_apart(conv_plan, CONV, CONV_CHANGES[name])


@pytest.mark.parametrize("name", NORM_CHANGES)
def test_plans_of_group_norm_are_told_apart(name):
    assert_told_apart(group_norm_plan, NORM, NORM_CHANGES[name])


def test_groups_are_told_apart():
    """With as many output channels a weight has another shape; with the same weight, more."""
    call = {**CONV, "bias": None, "norm_weight": None, "norm_bias": None}
    assert_told_apart(conv_plan, call, {"groups": 2})


BFLOAT16 = {
    name: value.bfloat16() if isinstance(value, torch.Tensor) else value
    for name, value in CONV.items()
}
#: What is refused, though all but one thing is as in a call that was served before.
REFUSED = {
    # In float32 the precision tells them apart too.
    "input's dtype": (conv_plan, BFLOAT16, {"input": float16(2, 4, 5, 6)}, "weight"),
    "weight's dtype": (conv_plan, CONV, {"weight": float16(4, 6, 3, 2)}, "weight"),
    "weight's shape": (conv_plan, CONV, {"weight": torch.ones(5, 6, 3, 2)}, "input"),
    "bias's dtype": (conv_plan, CONV, {"bias": float16(6)}, "bias"),
    "bias's shape": (conv_plan, CONV, {"bias": torch.ones(5)}, "bias"),
    "norm_weight's shape": (
        conv_plan, CONV, {"norm_weight": torch.ones(7)}, "norm_weight",
    ),
    "norm_bias's dtype": (conv_plan, CONV, {"norm_bias": float16(6)}, "norm_bias"),
    "activation": (conv_plan, CONV, {"activation": "unknown"}, "activation"),
    "order": (conv_plan, CONV, {"order": "norm"}, "order"),
    "stride": (conv_plan, CONV, {"stride": (2, 0)}, "stride"),
    "padding": (conv_plan, CONV, {"padding": (1, -1)}, "padding"),
    "output_padding": (conv_plan, CONV, {"output_padding": (0, -1)}, "output_padding"),
    "dilation": (conv_plan, CONV, {"dilation": (1, 0)}, "dilation"),
    "groups": (conv_plan, CONV, {"groups": -1}, "groups"),
    "weight's axes": (conv_plan, CONV, {"weight": torch.ones(4, 6)}, "weight"),
    "eps": (conv_plan, CONV, {"eps": float("nan")}, "eps"),
    "num_groups, GroupNorm": (group_norm_plan, NORM, {"num_groups": -1}, "num_groups"),
    "no groups, GroupNorm": (group_norm_plan, NORM, {"num_groups": 0}, "num_groups"),
    "weight's shape, GroupNorm": (
        group_norm_plan, NORM, {"weight": torch.ones(5)}, "weight",
    ),
    "bias's dtype, GroupNorm": (group_norm_plan, NORM, {"bias": float16(4)}, "bias"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_served_call_opens_no_way_for_a_wrong_one(case):
    function, call, change, argument = REFUSED[case]
    function(**call)
    with pytest.raises((TypeError, ValueError), match=f"^{argument}: got"):
        function(**{**call, **change})


@pytest.mark.parametrize(
    ("function", "call", "tensors"),
    [
        (conv_plan, CONV, ["weight", "bias", "norm_weight", "norm_bias"]),
        (group_norm_plan, NORM, ["weight", "bias"]),
    ],
)
def test_devices_are_told_apart(function, call, tensors):
    function(**call)
    with pytest.raises(ValueError, match="got device cpu, expected meta"):
        function(**{**call, "input": call["input"].to("meta")})
    for name in tensors:
        with pytest.raises(ValueError, match=f"^{name}: got device meta, expected cpu"):
            function(**{**call, name: call[name].to("meta")})


@pytest.mark.parametrize(("function", "call"), [(conv_plan, CONV), (group_norm_plan, NORM)])
def test_forced_kernels_are_told_apart(function, call, force):
    ours = function(**call).kernel
    assert ours.startswith("cpu_")
    force("torch")
    assert function(**call).kernel == "torch"
    force("cpu")
    assert function(**call).kernel == ours


@pytest.mark.parametrize("requested", ["tf32", "fp32"])
def test_precision_is_resolved_before_the_key(requested, monkeypatch):
    """torch's switches may change between two calls that leave the precision to them."""
    resolved = []

    def switches(dtype, device, precision):
        resolved.append(precision)
        return precision or requested

    conv_plan(**CONV)
    monkeypatch.setattr(planning, "resolve_precision", switches)
    assert conv_plan(**CONV).problem.precision == requested
    assert resolved[:1] == [None]


# ---- backward passes -----------------------------------------------------------------------------

CONV_NAMES = ("input", "weight", "bias", "norm_weight", "norm_bias")
NORM_NAMES = ("input", "norm_weight", "norm_bias")
OUTPUT = (2, 6, 9, 10)  # of CONV


def conv_backward_plan(grad, conv_output, needs, **arguments):
    call = ops.ConvCall(**{**CONV, **arguments})
    return planning.backward_plan(call, grad, conv_output, CONV_NAMES, needs)


def norm_backward_plan(grad, needs, **arguments):
    call = ops.NormCall(**{**NORM, **arguments})
    return planning.backward_plan(call, grad, None, NORM_NAMES, needs)


CONV_BACKWARD = {
    "grad": torch.ones(OUTPUT), "conv_output": torch.ones(OUTPUT), "needs": [True] * 5
}  # fmt: skip
NORM_BACKWARD = {"grad": torch.ones(2, 4, 5, 6), "needs": [True] * 3}
#: The calls' own arguments enter as in the forward pass; a few stand for all.
CONV_BACKWARD_CHANGES = {
    "needs": {"needs": [True, True, True, True, False]},
    "grad's strides": {"grad": strided(torch.ones(OUTPUT))},
    "grad's layout": {"grad": channels_last(torch.ones(OUTPUT))},
    "grad's dtype": {"grad": float16(*OUTPUT)},
    "grad's alignment": {"grad": misaligned(torch.ones(OUTPUT))},
    "saved tensor's alignment": {"conv_output": misaligned(torch.ones(OUTPUT))},
    "input's strides": {"input": strided(torch.ones(2, 4, 5, 6))},
    "weight's strides": {"weight": strided(torch.ones(4, 6, 3, 2))},
    "precision": {"precision": "tf32"},
    "eps": {"eps": 1e-3},
    "order": {"order": "norm_act"},
}
NORM_BACKWARD_CHANGES = {
    "needs": {"needs": [True, False, False]},
    "grad's strides": {"grad": strided(torch.ones(2, 4, 5, 6))},
    "grad's dtype": {"grad": float16(2, 4, 5, 6)},
    "grad's alignment": {"grad": misaligned(torch.ones(2, 4, 5, 6))},
    "input's alignment": {"input": misaligned(torch.ones(2, 4, 5, 6))},
    "input's strides": {"input": channels_last(torch.ones(2, 4, 5, 6))},
    "activation": {"activation": "relu"},
    "num_groups": {"num_groups": 4},
}


@pytest.fixture
def served(monkeypatch):
    """problem_of(function, call): the problem of the plan that a call gets, cached or not."""
    plan_for = planning.plan_for
    problems = {}

    def recorded(problem, device, key=None):
        plan = plan_for(problem, device, key)
        problems[id(plan)] = (problem, plan)
        return plan

    monkeypatch.setattr(planning, "plan_for", recorded)
    return lambda function, call: problems[id(function(**call))][0]


@pytest.mark.parametrize(
    ("function", "call", "change"),
    [
        *((conv_backward_plan, CONV_BACKWARD, c) for c in CONV_BACKWARD_CHANGES.values()),
        *((norm_backward_plan, NORM_BACKWARD, c) for c in NORM_BACKWARD_CHANGES.values()),
    ],
    ids=[*(f"conv, {n}" for n in CONV_BACKWARD_CHANGES), *NORM_BACKWARD_CHANGES],
)
def test_plans_of_gradients_are_told_apart(function, call, change, served):
    both = (call, {**call, **change})
    alone = []
    for arguments in both:
        clear_cache()
        alone.append(served(function, arguments))
    assert alone[0] != alone[1]
    clear_cache()
    assert [served(function, arguments) for arguments in both * 2] == alone * 2


@pytest.mark.parametrize("requested", ["tf32", "fp32"])
def test_precision_of_gradients_is_resolved_before_the_key(requested, monkeypatch, served):
    """As in the forward pass, where the operator is called by hand."""
    before = served(conv_backward_plan, CONV_BACKWARD)
    assert before.forward.precision == "fp32"
    monkeypatch.setattr(
        planning, "resolve_precision", lambda dtype, device, asked: asked or requested
    )
    after = served(conv_backward_plan, CONV_BACKWARD)
    assert after.forward.precision == requested


def test_devices_of_gradients_are_told_apart(served):
    served(norm_backward_plan, NORM_BACKWARD)
    with pytest.raises(ValueError, match="got device cpu, expected meta"):
        norm_backward_plan(**{**NORM_BACKWARD, "input": NORM["input"].to("meta")})


def test_forced_kernels_of_gradients_are_told_apart(force):
    plan = conv_backward_plan(**CONV_BACKWARD)
    force("torch")
    forced = conv_backward_plan(**CONV_BACKWARD)
    assert forced is not plan
    assert conv_backward_plan(**CONV_BACKWARD) is forced


def test_gradients_of_nothing_have_a_plan_of_nothing():
    plan = conv_backward_plan(**{**CONV_BACKWARD, "needs": [False] * 5})
    assert plan.steps == ()
    absent = {**NORM_BACKWARD, "needs": [False, True, False], "weight": None}
    assert norm_backward_plan(**absent).steps == ()


# ---- calls ---------------------------------------------------------------------------------------


def test_other_weight_strides_are_another_problem():
    seen = []
    x, weight = torch.randn(2, 4, 5, 5), torch.randn(4, 6, 3, 3)
    for other in (weight, weight.to(memory_format=torch.channels_last), weight):
        functional.conv_transpose_act_norm(x, other, num_groups=2)
        (explanation,) = explained(functional.conv_transpose_act_norm, x, other, num_groups=2)
        seen.append(explanation.problem.conv.weight_strides)
    assert seen == [(54, 9, 3, 1), (54, 1, 18, 6), (54, 9, 3, 1)]


@pytest.fixture
def planned(monkeypatch):
    """The problems that a plan was looked for outside the cache."""
    problems = []
    plan_for = planning.plan_for

    def recorded(problem, device, key=None):
        problems.append(problem)
        return plan_for(problem, device, key)

    monkeypatch.setattr(planning, "plan_for", recorded)
    return problems


@pytest.mark.parametrize("tensor", ["input", "weight", "bias", "norm_weight", "norm_bias"])
def test_a_cached_plan_is_of_the_same_strides(tensor, planned):
    """Each tensor's strides are in the key of the cache."""
    tensors = {
        "input": torch.randn(2, 4, 5, 6),
        "weight": torch.randn(4, 6, 3, 2),
        "bias": torch.randn(6),
        "norm_weight": torch.randn(6),
        "norm_bias": torch.randn(6),
    }
    expected = functional.conv_transpose_act_norm(**tensors, num_groups=2)
    functional.conv_transpose_act_norm(**tensors, num_groups=2)
    assert len(planned) == 1
    tensors[tensor] = strided(tensors[tensor])
    actual = functional.conv_transpose_act_norm(**tensors, num_groups=2)
    torch.testing.assert_close(actual, expected)
    assert len(planned) == 2


def test_a_cached_plan_is_of_the_same_alignment(planned):
    x = torch.randn(2, 4, 5, 6)
    weight = torch.randn(4, 6, 3, 2)
    for call in (
        lambda x: functional.group_norm(x, 2),
        lambda x: functional.conv_transpose_act_norm(x, weight, num_groups=2),
    ):
        planned.clear()
        for place in (lambda x: x, misaligned, lambda x: x, misaligned):
            call(place(x))
        assert [problem.aligned for problem in planned] == [True, False]


def test_a_gradients_name_leaves_the_forward_pass_free(force):
    force("torch_convolution_backward")
    module = ConvTransposeActNorm2d(4, 6, 3, num_groups=2)
    forward, backward = explained(module, torch.randn(2, 4, 5, 5), gradients=True)
    assert forward.kernel == "cpu_conv_transpose"
    assert "torch_convolution_backward" in backward.kernel
    assert backward.chosen_by == "torch_convolution_backward"


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"activation": "gelu"},
        {"num_groups": 2},
        {"norm": "instance"},
        {"norm": "layer"},
        {"norm": "batch"},
    ],
    ids=str,
)
def test_problems_that_are_described_are_those_of_calls(extra, save):
    """What is tuned or explained ahead of a call is what the call asks for."""
    x, weight, bias = torch.randn(2, 4, 5, 6), torch.randn(4, 6, 3, 3), torch.randn(6)
    affine = None if extra.get("norm", extra.get("num_groups")) is None else torch.ones(6)
    kind = {"batch": "affine"}.get(extra.get("norm"), extra.get("norm"))
    call = ops.ConvCall(
        x, weight, bias, (2, 2), (0, 0), (0, 0), (1, 1), 1, extra.get("activation", "identity"),
        "act_norm", extra.get("num_groups", 0), affine, affine, 1e-5, None, None, kind,
    )  # fmt: skip
    described = hypothetical.problem(
        device="cpu", dtype=x.dtype, precision=None, layout="nchw", batch=2, channels=4,
        spatial=(5, 6), out_channels=6, stride=2, save=save, **extra,
    )  # fmt: skip
    assert described == call.problem(save)
    assert described.save == (save and bool(extra))
