"""Gradients through LayerNorm over channels, affine maps of channels and activations, by one kernel
of a backward pass, against fp64, relative to eager's error."""

from __future__ import annotations

import torch
from reference import ACTIVATIONS, GRADIENT_FLOOR, normalised, relative_error

from fusedconv import Activation, BackwardProblem, Bias, ForwardProblem, Norm
from fusedconv.device import device_record
from fusedconv.layout import layout_of
from fusedconv.plan import BackwardTensors
from fusedconv.problem import ConvTransposeGeometry

EPS = 1e-6
PRECISION = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
#: Activations in front and behind.
STAGES = ((None, None), (None, "gelu"), (None, "relu"), ("gelu_tanh", "silu"), ("relu", None))
NAMES = ("conv_output", "norm_weight", "norm_bias", "bias")
#: What activations in their quick forms may take from sums of gradients in float32: less than
#: rounding those to 16 bits would.
OF_WIDE_SUMS = {torch.float16: 1e-4, torch.bfloat16: 2e-4}


def max_dtype(*dtypes):
    return max(dtypes, key=lambda dtype: dtype.itemsize)


def problem_of(kind, x, weight, bias, before, after, names=NAMES, grad_dtype=None, aligned=True):
    """Gradients through what follows a convolution of one tap that leaves its input as it is;
    ``kind`` None is no normalisation."""
    dtypes = {each.dtype for each in (weight, bias) if each is not None}
    norm = None
    if kind is not None:
        given = weight is not None, bias is not None
        norm = Norm(kind, 0, EPS, *given, dtypes.pop() if dtypes else None)
    axes, channels = x.dim() - 2, x.shape[1]
    one, none = (1,) * axes, (0,) * axes
    layout = layout_of(x.shape, x.stride())
    stages = (Activation(before) if before else None, norm, Activation(after) if after else None)
    forward = ForwardProblem(
        dtype=x.dtype,
        output_dtype=grad_dtype or x.dtype,
        precision=PRECISION[x.dtype],
        layout=layout,
        aligned=x.data_ptr() % 16 == 0,
        batch=x.shape[0],
        channels=channels,
        spatial=tuple(x.shape[2:]),
        conv=ConvTransposeGeometry(
            channels, channels, one, one, none, none, one, 1, (channels, *(1,) * (axes + 1))
        ),
        epilogue=(Bias(), *(stage for stage in stages if stage is not None)),
        save=True,
    )
    absent = {name for name, t in (("norm_weight", weight), ("norm_bias", bias)) if t is None}
    return BackwardProblem(
        forward,
        grad_dtype=grad_dtype or x.dtype,
        grad_layout=layout,
        aligned=forward.aligned and aligned,
        gradients=frozenset(names) - absent,
    )


def assert_as_accurate(
    kernel,
    kind,
    x,
    weight,
    bias,
    before,
    after,
    names=NAMES,
    prepare=None,
    grad_dtype=None,
    shift=0,
):
    """``prepare`` is called before the kernel's plan runs. ``grad_dtype`` float32 of 16 bits is as
    autocast has it; ``shift`` is what a gradient's address has beside whole lines, in elements."""
    dtype = grad_dtype or x.dtype
    memory = torch.full((x.numel() + shift,), torch.nan, device=x.device, dtype=dtype)
    grad = memory.as_strided(x.shape, x.stride(), shift)
    grad.copy_(torch.randn_like(x, dtype=dtype))
    problem = problem_of(kind, x, weight, bias, before, after, names, grad_dtype, shift == 0)
    device = device_record(x.device)
    support = kernel.supports(problem, device)
    assert support, support.reason
    plan = kernel.compile(problem, device)
    tensors = BackwardTensors(grad, x, None, x, None, None, weight, bias)
    if prepare is not None:
        prepare()
    found = plan.run(tensors)
    again = plan.run(tensors)

    def eager(*given):
        # torch's LayerNorm takes one dtype only, under autocast float32.
        of_affine = given[0].dtype if grad_dtype is None else max_dtype(given[0].dtype, grad_dtype)
        leaves = [
            None if each is None else each.detach().to(dtype).requires_grad_()
            for each, dtype in zip(given, (given[0].dtype, of_affine, of_affine), strict=True)
        ]
        first, *affine = leaves
        channels = first.shape[1]
        filler = (
            first.new_ones(channels, dtype=of_affine),
            first.new_zeros(channels, dtype=of_affine),
        )
        affine = [b if a is None else a for a, b in zip(affine, filler, strict=True)]
        output = ACTIVATIONS[before](first)
        if kind is not None:
            output = normalised(kind, output.to(of_affine), *affine, EPS)
        output = ACTIVATIONS[after](output.to(of_affine))
        wanted = [leaf for leaf in leaves if leaf is not None]
        got = iter(torch.autograd.grad(output, wanted, grad.to(output.dtype)))
        first, *others = (None if leaf is None else next(got) for leaf in leaves)
        return dict(zip(NAMES, (first, *others, first.sum((0, *range(2, x.dim())))), strict=True))

    torchs = eager(x, weight, bias)
    exact = eager(*(None if each is None else each.double() for each in (x, weight, bias)))
    scale = float(grad.double().norm())
    for name in problem.gradients:
        actual = getattr(found, name)
        assert torch.equal(actual, getattr(again, name)), name
        if float(exact[name].norm()) < 1e-6 * scale:
            continue  # cancels to nothing
        error = relative_error(actual, exact[name])
        floor = 4 * GRADIENT_FLOOR[x.dtype]
        if grad_dtype is not None and name in ("norm_weight", "norm_bias"):
            floor = OF_WIDE_SUMS[x.dtype]
            if after == "relu" and x.numel() > 1 << 20:
                # One rounding in float32 decides of one or two values of so many.
                floor += 8 / float(exact[name].norm())
        limit = 2 * relative_error(torchs[name], exact[name]) + floor
        assert error <= limit, (name, error, limit)
