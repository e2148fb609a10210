"""Epilogues of every kind and order in torch's operators, against torch written by hand."""

from __future__ import annotations

import pytest
import torch
from problems import backward_problem, geometry_of, problem
from reference import ACTIVATIONS, LAYOUTS, cotangent, relative_error
from torch.nn import functional as F

from fusedconv import Activation, Bias, Norm, Residual
from fusedconv.activations import activate_by
from fusedconv.device import KNOWN, PROCESSOR
from fusedconv.kernels import built_in
from fusedconv.kernels.torch import TorchEpilogueBackward, TorchForward
from fusedconv.plan import BackwardTensors
from fusedconv.precision import precisions_of
from fusedconv.selection import choose

RELU, GELU, SILU = (Activation(name) for name in ("relu", "gelu", "silu"))
LEAKY, ELU = Activation("leaky_relu", 0.2), Activation("elu")
BIAS, RESIDUAL = Bias(), Residual()


def norm(kind, weight=True, bias=True):
    dtype = torch.float64 if weight or bias else None
    return Norm(kind, 3 if kind == "group" else 0, 1e-3, weight, bias, dtype)


GROUP, INSTANCE, LAYER, AFFINE = (norm(kind) for kind in ("group", "instance", "layer", "affine"))
#: Stages behind a convolution; without one they are the same less the bias.
EPILOGUES = [
    (),
    (BIAS,),
    (BIAS, RELU),
    (BIAS, GELU, GROUP),
    (BIAS, GROUP, SILU),
    (GELU, GROUP, SILU),
    (BIAS, RELU, INSTANCE),
    (INSTANCE, GELU),
    (BIAS, LAYER),
    (GELU, LAYER, SILU),
    (BIAS, AFFINE, RELU),
    (GELU, AFFINE),
    (BIAS, RESIDUAL),
    (BIAS, RESIDUAL, GELU),
    (BIAS, GELU, RESIDUAL),
    (RESIDUAL, GELU, GROUP),
    (BIAS, GROUP, RESIDUAL, SILU),
    (BIAS, GELU, AFFINE, RESIDUAL),
    (LAYER, RESIDUAL, GELU),
    (BIAS, SILU, INSTANCE, RESIDUAL, GELU),
    (BIAS, GELU, SILU),
    (BIAS, GELU, SILU, GROUP),
    (GROUP, GELU, SILU),
    (BIAS, norm("group", weight=False), GELU),
    (norm("group", bias=False),),
    (GELU, norm("instance", weight=False, bias=False)),
    (norm("layer", bias=False), GELU),
    (norm("layer", weight=False),),
    (norm("affine", weight=False), GELU),
    (norm("affine", bias=False),),
    (BIAS, LEAKY, GROUP),
    (GROUP, LEAKY),
    (BIAS, LAYER, RESIDUAL, ELU),
]
BY_HAND = {**ACTIVATIONS, "leaky_relu": lambda x: F.leaky_relu(x, 0.2), "elu": F.elu}
#: A rounding or a few of the dtype; a nearly dead channel's deviation amplifies them.
GRADIENT_LIMITS = {torch.float64: 2e-14, torch.float32: 1e-5, torch.bfloat16: 1e-2}
NAMES = ("input", "weight", "bias", "norm_weight", "norm_bias", "residual")


def by_hand(stages, x, norm_weight, norm_bias, residual):
    """The stages behind the convolution, each as torch's users write it."""
    for stage in stages:
        if isinstance(stage, Residual):
            x = x + residual
        elif isinstance(stage, Activation):
            x = BY_HAND[stage.name](x)
        elif isinstance(stage, Norm):
            if norm_weight is None and norm_bias is not None:  # torch has no gradient of that
                norm_weight = torch.ones_like(norm_bias)
            if stage.kind == "group":
                x = F.group_norm(x, stage.num_groups, norm_weight, norm_bias, stage.eps)
            elif stage.kind == "instance":
                x = F.instance_norm(x, weight=norm_weight, bias=norm_bias, eps=stage.eps)
            elif stage.kind == "layer":
                last = x.permute(0, 2, 3, 1)
                last = F.layer_norm(last, last.shape[-1:], norm_weight, norm_bias, stage.eps)
                x = last.permute(0, 3, 1, 2)
            else:
                ones = torch.ones(x.shape[1], dtype=x.dtype)
                x = F.batch_norm(x, 0 * ones, ones, norm_weight, norm_bias, eps=0.0)
    return x


def tensors_of(stages, *, conv, dtype, layout="nchw"):
    """What the stages need by name, in ``dtype``, None for the rest."""
    generator = torch.Generator().manual_seed(3)

    def make(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    channels, size = (6, (6, 7)) if conv else (6, (5, 6))
    place = LAYOUTS[layout]
    found = dict.fromkeys(NAMES)
    found["input"] = place(make(2, 4 if conv else channels, 5, 6))
    if conv:
        found["weight"] = make(4, channels, 2, 2)
        found["bias"] = make(channels) if BIAS in stages else None
    normalisation = next((stage for stage in stages if isinstance(stage, Norm)), None)
    if normalisation is not None:
        found["norm_weight"] = make(channels) if normalisation.weight else None
        found["norm_bias"] = make(channels) if normalisation.bias else None
    if RESIDUAL in stages:
        found["residual"] = place(make(2, channels, *size))
    return found


def problem_of(stages, tensors, *, layout="nchw", save=False):
    dtype = tensors["input"].dtype
    weight = tensors["weight"]
    return problem(
        dtype=dtype,
        output_dtype=dtype,
        precision=precisions_of(dtype)[-1],
        layout=layout,
        batch=2,
        channels=tensors["input"].shape[1],
        spatial=(5, 6),
        conv=None if weight is None else geometry_of(weight),
        epilogue=stages,
        save=save,
    )


def convolved(tensors):
    if tensors["weight"] is None:
        return tensors["input"]
    return F.conv_transpose2d(tensors["input"], tensors["weight"], tensors["bias"])


def affine_and_residual(tensors):
    return [tensors[name] for name in ("norm_weight", "norm_bias", "residual")]


def widened(tensors):
    return {name: None if t is None else t.double() for name, t in tensors.items()}


CASES = [(stages, True) for stages in EPILOGUES] + [
    (tuple(stage for stage in stages if stage != BIAS), False) for stages in EPILOGUES
]


def name_of(value):
    if isinstance(value, bool):
        return "conv" if value else "alone"
    return " ".join(map(str, value)) or "nothing"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("stages", "conv"), CASES, ids=name_of)
def test_forward(stages, conv, dtype):
    for layout in LAYOUTS:
        tensors = tensors_of(stages, conv=conv, dtype=dtype, layout=layout)
        exact = widened(tensors)
        expected = by_hand(stages, convolved(exact), *affine_and_residual(exact))
        for save in (False, True):
            one = problem_of(stages, tensors, layout=layout, save=save)
            plan = TorchForward().compile(one, PROCESSOR)
            output, conv_output, mean, rstd = plan.run(*tensors.values())
            assert output.dtype == dtype
            assert relative_error(output, expected) < 4 * torch.finfo(dtype).eps
            saves_statistics = save and one.norm is not None and one.norm.groups(6) > 0
            assert (mean is not None) == (rstd is not None) == saves_statistics
            assert (conv_output is not None) == (save and conv)
            if saves_statistics:
                assert mean.shape == rstd.shape == (2, one.norm.groups(6))
            if save and conv:
                assert relative_error(conv_output, convolved(exact)) < 4 * torch.finfo(dtype).eps


def backward_by_hand(stages, source, tensors, grad):
    """Gradients by name of what the stages were computed from, by autograd in float64."""
    leaves = {"source": source.detach().to(torch.float64, copy=True).requires_grad_()}
    for name, tensor in zip(
        ("norm_weight", "norm_bias", "residual"), affine_and_residual(tensors), strict=True
    ):
        leaves[name] = (
            None
            if tensor is None
            else tensor.detach().to(torch.float64, copy=True).requires_grad_()
        )
    output = by_hand(stages, *leaves.values())
    given = [leaf for leaf in leaves.values() if leaf is not None]
    found = iter(torch.autograd.grad(output, given, grad.double()))
    return {name: None if leaf is None else next(found) for name, leaf in leaves.items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("stages", "conv"), [case for case in CASES if set(case[0]) - {BIAS}], ids=name_of
)
def test_backward(stages, conv, dtype):
    for layout in LAYOUTS:
        tensors = tensors_of(stages, conv=conv, dtype=dtype, layout=layout)
        forward = problem_of(stages, tensors, layout=layout, save=True)
        plan = TorchForward().compile(forward, PROCESSOR)
        output, conv_output, mean, rstd = plan.run(*tensors.values())
        grad = cotangent(output)
        expected = backward_by_hand(
            stages, tensors["input"] if conv_output is None else conv_output, tensors, grad
        )
        source = "conv_output" if conv else "input"
        expected[source] = expected.pop("source")
        present = {name for name, value in expected.items() if value is not None}
        for asked in (present, {source}, present - {source}):
            if not asked:
                continue
            asks = backward_problem(forward, *asked).part(("epilogue",))
            found = (
                TorchEpilogueBackward()
                .compile(asks, PROCESSOR)
                .run(
                    BackwardTensors(
                        grad_output=grad,
                        mean=mean,
                        rstd=rstd,
                        conv_output=conv_output,
                        **{name: tensors[name] for name in NAMES if name != "bias"},
                    )
                )
            )
            for name, value in found._asdict().items():
                assert (value is not None) == (name in asked), name
                if value is not None:
                    assert relative_error(value, expected[name]) < GRADIENT_LIMITS[dtype]


def test_what_has_a_parameter_is_said_and_composed():
    for name, parameter in (("relu", 0.25), ("leaky_relu", float("nan"))):
        with pytest.raises(ValueError, match="parameter: got"):
            Activation(name, parameter)
    forward = problem(epilogue=(BIAS, LEAKY), save=True)
    for asked in (forward, backward_problem(forward)):
        chosen = choose(asked, KNOWN[90]).chosen
        # The bias is behind the activation's slope: a sum that any kernel may take.
        providers = {c.kernel.provider for piece, c in chosen if {*piece.parts} != {"bias"}}
        assert providers == {"torch"}, chosen
    x = torch.randn(5)
    assert torch.equal(activate_by(x, "elu", None), F.elu(x))
    assert torch.equal(activate_by(x, "leaky_relu", 0.5), F.leaky_relu(x, 0.5))


def test_steps_name_every_stage():
    stages = (BIAS, GELU, LAYER, RESIDUAL, SILU)
    tensors = tensors_of(stages, conv=True, dtype=torch.float32)
    forward = problem_of(stages, tensors, save=True)
    assert TorchForward().compile(forward, PROCESSOR).steps == (
        "torch.conv_transpose2d (vendor library)",
        "torch gelu",
        "torch.layer_norm over channels",
        "torch add residual",
        "torch silu",
    )
    asks = backward_problem(forward).part(("epilogue",))
    assert TorchEpilogueBackward().compile(asks, PROCESSOR).steps == (
        "gradient of torch silu",
        "gradient of torch add residual",
        "gradient of torch.layer_norm over channels",
        "gradient of torch gelu",
    )


@pytest.mark.parametrize("record", [PROCESSOR, KNOWN[90]], ids=str)
@pytest.mark.parametrize(("stages", "conv"), CASES, ids=name_of)
def test_torch_serves_every_epilogue_and_others_say_what_they_do_not(stages, conv, record):
    forward = problem_of(stages, tensors_of(stages, conv=conv, dtype=torch.float32), save=True)
    backward = backward_problem(forward)
    for kernel in built_in():
        for asked in (forward, *(backward.part((part,)) for part in backward.parts)):
            if set(asked.parts) <= kernel.computes:
                support = kernel.supports(asked, record)
                assert support if kernel.provider == "torch" else support or support.reason


def test_a_residual_that_is_not_given_is_named():
    x = torch.randn(2, 3, 4, 4)
    plan = TorchForward().compile(problem(conv=None, channels=3, epilogue=(RESIDUAL,)), PROCESSOR)
    with pytest.raises(
        ValueError, match=r"residual: got None, expected a tensor of \(2, 3, 4, 4\)"
    ):
        plan.run(x, None, None, None, None)
