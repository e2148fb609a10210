"""Problems of both passes: frozen and hashable, what they derive, which epilogues are served."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import backward_problem, conv_geometry, group_norm_stage, problem
from reference import CONVOLUTIONS

from fusedconv import (
    Activation,
    BackwardProblem,
    Bias,
    ForwardProblem,
    Norm,
    Residual,
)
from fusedconv.problem import GRADIENTS, ActNormAct, act_norm_act, epilogue

RELU, SILU = Activation("relu"), Activation("silu")
GROUP = group_norm_stage()
INSTANCE = Norm("instance", 0, 1e-5, False, False, None)


def test_frozen_hashable_and_equal_by_value():
    for make in (problem, backward_problem):
        one, other = make(), make()
        assert one == other
        assert hash(one) == hash(other)
        assert len({one, other, make(aligned=False)}) == 2
    one = problem()
    for value, field in ((one, "batch"), (one.conv, "stride"), (one.norm, "eps"), (RELU, "name")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        backward_problem().aligned = False


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ForwardProblem)])
def test_every_field_tells_problems_apart(field):
    other = {
        "dtype": torch.float16,
        "output_dtype": torch.float16,
        "precision": "tf32",
        "layout": "strided",
        "aligned": False,
        "spatial": (5, 8),
        "conv": None,
        "epilogue": (Bias(), RELU),
        "save": True,
    }.get(field, 99)
    assert problem(**{field: other}) != problem()


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(BackwardProblem)])
def test_every_field_tells_backward_problems_apart(field):
    one = backward_problem()
    other = {
        "forward": problem(save=True, batch=2),
        "grad_dtype": torch.float16,
        "grad_layout": "nhwc",
        "aligned": False,
        "gradients": frozenset({"norm_weight"}),
    }[field]
    assert dataclasses.replace(one, **{field: other}) != one


def test_stages_are_told_apart():
    assert Residual() == Residual()
    assert len({Residual(), Bias(), RELU, SILU, Activation("elu", 0.1), GROUP, INSTANCE}) == 7


# ---- epilogues -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "stages"),
    [
        ((True, "relu", "act_norm", GROUP), (Bias(), RELU, GROUP)),
        ((True, "relu", "norm_act", GROUP), (Bias(), GROUP, RELU)),
        ((False, "relu", "act_norm", None), (RELU,)),
        ((False, "relu", "norm_act", None), (RELU,)),
        ((True, "identity", "act_norm", GROUP), (Bias(), GROUP)),
        ((False, "identity", "norm_act", None), ()),
    ],
    ids=str,
)
def test_stages_of_a_functions_arguments(arguments, stages):
    assert epilogue(*arguments) == stages


@pytest.mark.parametrize(
    ("stages", "form"),
    [
        ((), ActNormAct(False, "identity", None, "identity")),
        ((Bias(),), ActNormAct(True, "identity", None, "identity")),
        ((RELU,), ActNormAct(False, "relu", None, "identity")),
        ((Bias(), GROUP), ActNormAct(True, "identity", GROUP, "identity")),
        ((RELU, GROUP), ActNormAct(False, "relu", GROUP, "identity")),
        ((Bias(), GROUP, SILU), ActNormAct(True, "identity", GROUP, "silu")),
        ((Bias(), RELU, INSTANCE, SILU), ActNormAct(True, "relu", INSTANCE, "silu")),
    ],
    ids=str,
)
def test_epilogues_that_fused_kernels_have(stages, form):
    assert act_norm_act(stages) == form


@pytest.mark.parametrize(
    ("stages", "reason"),
    [
        ((Bias(), Residual(), GROUP), "no fused kernel has the stage residual"),
        ((GROUP, Residual()), "no fused kernel has the stage residual"),
        ((Norm("layer", 0, 1e-5, True, True, None),), "has the normalisation layer_norm"),
        ((RELU, Norm("affine", 0, 0.0, True, True, None)), "has the normalisation affine_norm"),
        ((Activation("leaky_relu", 0.1), GROUP), "has the activation leaky_relu(0.1)"),
        ((GROUP, Activation("elu")), "has the activation elu"),
        ((RELU, SILU), "stages are relu -> silu; fused kernels have an activation, a normalis"),
        ((RELU, SILU, GROUP), "stages are relu -> silu -> group_norm 2; fused kernels have"),
        ((GROUP, RELU, SILU), "stages are group_norm 2 -> relu -> silu; fused kernels have"),
    ],
    ids=str,
)
def test_epilogues_that_they_do_not_have_are_refused_with_a_reason(stages, reason):
    found = act_norm_act(stages)
    assert not found
    assert reason in found.reason


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        ((Bias(), Bias()), "epilogue: got 2 of Bias, expected at most one"),
        ((Residual(), RELU, Residual()), "epilogue: got 2 of Residual, expected at most one"),
        ((GROUP, INSTANCE), "epilogue: got 2 of Norm, expected at most one"),
        ((RELU, Bias()), "epilogue: got a bias elsewhere than behind a convolution"),
    ],
    ids=str,
)
def test_stages_that_cannot_be_are_refused(stages, text):
    with pytest.raises(ValueError, match=f"^{text}$"):
        problem(epilogue=stages)


@pytest.mark.parametrize("name", ["identity", "softplus", None, ""])
def test_activations_have_names(name):
    with pytest.raises(ValueError, match=rf"^name: got {name!r}, expected one of relu, gelu, "):
        Activation(name)


@pytest.mark.parametrize("kind", ["batch", None, ""])
def test_normalisations_have_kinds(kind):
    with pytest.raises(ValueError, match=rf"^kind: got {kind!r}, expected one of group, instance"):
        group_norm_stage(kind=kind)


def test_a_bias_without_a_convolution_is_refused():
    with pytest.raises(ValueError, match="got a bias elsewhere than behind a convolution"):
        problem(conv=None, epilogue=(Bias(), RELU))


def test_a_problem_finds_its_stages():
    one = problem(epilogue=(Bias(), RELU, GROUP, Residual(), SILU))
    assert one.bias
    assert one.norm == GROUP
    assert one.activations == (RELU, SILU)
    bare = problem(epilogue=())
    assert not bare.bias
    assert bare.norm is None
    assert bare.activations == ()


@pytest.mark.parametrize(
    ("norm", "groups", "text"),
    [
        (GROUP, 2, "group_norm 2"),
        (INSTANCE, 6, "instance_norm"),
        (Norm("layer", 0, 1e-5, True, True, None), 0, "layer_norm"),
        (Norm("affine", 0, 0.0, True, True, None), 0, "affine_norm"),
    ],
    ids=str,
)
def test_kinds_of_normalisation(norm, groups, text):
    assert norm.groups(6) == groups
    assert str(norm) == text
    assert f"-> {text} on" in str(problem(epilogue=(Bias(), norm)))


# ---- what a forward problem derives --------------------------------------------------------------


def test_output_layout_is_channels_last_only_where_the_input_is():
    assert problem(layout="nhwc").output_layout == "nhwc"
    assert problem(layout="nchw").output_layout == "nchw"
    assert problem(layout="strided").output_layout == "nchw"


def test_sizes_and_work():
    one = problem()
    output = torch.empty(one.batch, one.output_channels, *one.output_spatial)
    assert one.output_channels == 6
    assert one.input_elements == 3 * 4 * 5 * 7
    assert one.output_elements == output.numel()
    # Each of the 4 input channels feeds 6 / 2 output channels through 3 x 2 taps.
    assert one.conv_flops == 2 * (3 * 5 * 7) * 4 * (6 // 2) * (3 * 2)
    assert one.minimal_bytes == 4 * (one.input_elements + one.output_elements)
    half = problem(dtype=torch.float16, precision="fp16")
    assert half.minimal_bytes == 2 * one.input_elements + 4 * one.output_elements

    alone = problem(conv=None)
    assert alone.output_channels == 4
    assert alone.output_spatial == (5, 7)
    assert alone.conv_flops == 0


@given(
    st.lists(
        st.tuples(
            st.integers(1, 6),  # extent
            st.integers(1, 4),  # kernel
            st.integers(1, 3),  # stride
            st.integers(0, 3),  # padding
            st.integers(0, 2),  # output padding
            st.integers(1, 3),  # dilation
        ),
        min_size=1,
        max_size=3,
    )
)
def test_output_extents_are_torchs(axes):
    axes = [
        (size, kernel, stride, padding, min(extra, max(stride, dilation) - 1), dilation)
        for size, kernel, stride, padding, extra, dilation in axes
    ]
    sizes, kernel, stride, padding, extra, dilation = map(tuple, zip(*axes, strict=True))
    geometry = conv_geometry(
        kernel_size=kernel, stride=stride, padding=padding, output_padding=extra, dilation=dilation
    )
    extents = geometry.output_spatial(sizes)
    if min(extents) < 1:
        return
    expected = CONVOLUTIONS[len(axes)](
        torch.empty(1, 1, *sizes, device="meta"),
        torch.empty(1, 1, *kernel, device="meta"),
        None,
        stride,
        padding,
        extra,
        1,
        dilation,
    )
    assert extents == tuple(expected.shape[2:])


def test_text_names_what_matters():
    text = str(problem(save=True))
    for part in (
        "conv_transpose2d 4->6 k3x2 s2x1 p1x0 d1x2 groups 2 +bias -> gelu -> group_norm 2",
        "3x4x5x7",
        "float32 (fp32)",
        "nchw",
        "saving for backward",
    ):
        assert part in text
    assert "group_norm 2 -> gelu" in str(problem(order="norm_act"))
    plain = problem(conv=conv_geometry(dilation=(1, 1), groups=1), bias=False, norm=None)
    assert "groups" not in str(plain)
    assert "bias" not in str(plain)
    assert "d1x1" not in str(plain)
    assert "saving" not in str(plain)
    assert str(problem(conv=None, norm=None, activation="identity")).startswith("identity on ")
    assert "+bias -> relu -> residual -> silu" in str(
        problem(epilogue=(Bias(), RELU, Residual(), SILU))
    )


# ---- backward passes -----------------------------------------------------------------------------

CONV = {"norm": None, "activation": "identity", "save": True}
#: Forward passes, what is asked for, what a problem makes of that, and its parts.
BACKWARD = {
    "everything": (
        {"save": True},
        ("input", "weight", "bias", "norm_weight", "norm_bias"),
        {"conv_output", "input", "weight", "bias", "norm_weight", "norm_bias"},
        ("epilogue", "input", "weight", "bias"),
    ),
    "input alone": (
        {"save": True}, ("input",), {"conv_output", "input"}, ("epilogue", "input")
    ),
    "affine alone": ({"save": True}, ("norm_bias",), {"norm_bias"}, ("epilogue",)),
    "no stages behind": (CONV, ("weight", "input"), {"input", "weight"}, ("input", "weight")),
    "activation alone": (
        {**CONV, "activation": "relu"},
        ("weight", "bias"),
        {"conv_output", "weight", "bias"},
        ("epilogue", "weight", "bias"),
    ),
    "residual": (
        {"epilogue": (Bias(), Residual()), "save": True},
        ("residual", "input"),
        {"conv_output", "residual", "input"},
        ("epilogue", "input"),
    ),
    "no convolution": (
        {"conv": None, "save": True},
        ("input", "norm_weight"),
        {"input", "norm_weight"},
        ("epilogue",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BACKWARD)
def test_parts_of_a_backward_pass(case):
    changes, asked, gradients, parts = BACKWARD[case]
    one = backward_problem(problem(**changes), *asked)
    assert one.gradients == gradients
    assert one.parts == parts


def test_a_gradient_of_another_dtype_is_the_epilogues_to_convert():
    forward = problem(**CONV)
    assert backward_problem(forward, "input").parts == ("input",)
    wide = backward_problem(forward, "input", grad_dtype=torch.float64)
    assert wide.gradients == {"conv_output", "input"}
    assert wide.parts == ("epilogue", "input")


def test_parts_are_problems_of_their_own():
    one = backward_problem()
    assert one.part(one.parts) == one
    epilogue = one.part(("epilogue",))
    assert epilogue.gradients == {"conv_output", "norm_weight", "norm_bias"}
    assert epilogue.forward is one.forward
    both = one.part(("input", "bias"))
    assert both.gradients == {"input", "bias"}
    for parts in (("epilogue",), ("input", "bias"), ("epilogue", "weight")):
        assert one.part(parts).parts == parts
    alone = backward_problem(problem(conv=None, save=True))
    assert alone.part(("epilogue",)) == alone


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"conv": None}, "conv_output"),
        ({"conv": None}, "weight"),
        ({"bias": False}, "bias"),
        ({"norm": None}, "norm_weight"),
        ({"norm": group_norm_stage(weight=False)}, "norm_weight"),
        ({"norm": group_norm_stage(bias=False)}, "norm_bias"),
        ({}, "residual"),
    ],
    ids=str,
)
def test_gradients_of_what_the_forward_pass_lacks_are_refused(changes, name):
    forward = problem(save=True, **changes)
    with pytest.raises(
        ValueError, match=rf"^gradients: got \['{name}'\], expected some of"
    ) as raised:
        BackwardProblem(forward, torch.float32, "nchw", True, frozenset({name}))
    expected = str(raised.value).partition("expected some of ")[2].split(", ")
    assert "input" in expected
    assert name not in expected


@pytest.mark.parametrize("gradients", [(), ("stride",), ("input", "grad")], ids=str)
def test_gradients_are_named(gradients):
    with pytest.raises(
        ValueError, match=r"^gradients: got \[.*\], expected some of conv_output, input"
    ):
        dataclasses.replace(backward_problem(), gradients=frozenset(gradients))


def test_products_are_of_the_gradients_that_are_asked_for():
    forward = problem(save=True)
    for names, times in (
        (("input",), 1),
        (("weight", "bias"), 1),
        (("weight", "input"), 2),
        (("norm_weight",), 0),
    ):
        assert backward_problem(forward, *names).conv_flops == times * forward.conv_flops


def test_text_of_a_backward_pass():
    forward = problem(save=True)
    text = str(backward_problem(forward, "weight", "input"))
    assert text == (
        f"gradients of conv_output, input, weight through {forward}, output gradient float32 nchw"
    )
    changed = backward_problem(forward, "input", grad_dtype=torch.float16, grad_layout="strided")
    assert str(changed).endswith("output gradient float16 strided")
    assert GRADIENTS[0] == "conv_output"
