"""``fusedconv explain``: which kernels would serve a problem."""

from __future__ import annotations

from typing import Any

import click
import torch

from fusedconv import benchmark, hypothetical
from fusedconv.activations import ACTIVATIONS
from fusedconv.cli.options import LARGEST, axes, is_given, naming_options
from fusedconv.device import KNOWN, PROCESSOR
from fusedconv.explaining import explain_problem
from fusedconv.models import SYSTEMS
from fusedconv.problem import GRADIENTS, ORDERS, BackwardProblem, ForwardProblem, Problem


def _architecture(context: click.Context, parameter: click.Parameter, value: int) -> int:
    known = KNOWN
    if value not in known:
        raise click.BadParameter(f"got {value}, expected one of {', '.join(map(str, known))}")
    return value


def _system_sizes(name: str) -> dict[str, Any]:
    """A system's problem, as options of ``explain``."""
    system = SYSTEMS[name]
    with torch.device("meta"):
        model: Any = system.original(*system.init_arguments)
    batch, channels, *spatial = system.input_shape
    sizes = {"batch": batch, "in_channels": channels, "spatial": tuple(spatial)}
    if name == "system3":
        return sizes | dict(out_channels=0, num_groups=model.gn.num_groups, activation="identity")
    conv = model.conv_transpose
    return sizes | dict(
        out_channels=conv.out_channels,
        kernel_size=conv.kernel_size,
        stride=conv.stride,
        bias=conv.bias is not None,
        num_groups=model.group_norm.num_groups,
        activation={"system1": "gelu", "system2": "relu"}[name],
    )


_NORMS = ("group", "instance", "layer", "batch")
_COUNT = click.IntRange(0, LARGEST)
_SOME = click.IntRange(1, LARGEST)


@click.command()
@click.option("--system", type=click.Choice(list(SYSTEMS)), help="Sizes not given are its own.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option(
    "--arch",
    default=90,
    show_default=True,
    callback=_architecture,
    help="Compute capability times ten.",
)
@click.option(
    "--precision",
    type=click.Choice(benchmark.PRECISIONS),
    help="[default: tf32, on a processor fp32]",
)
@click.option("--layout", type=click.Choice(benchmark.LAYOUTS), default="nchw", show_default=True)
@click.option("--batch", type=_COUNT, default=16, show_default=True)
@click.option("--in-channels", type=_SOME, default=64, show_default=True)
@click.option(
    "--out-channels", type=_COUNT, default=64, help="0 for GroupNorm alone.", show_default=True
)
@axes("--spatial", 1, "64,64")
@axes("--kernel-size", 1, "3")
@axes("--stride", 1, "1")
@axes("--padding", 0, "0")
@axes("--output-padding", 0, "0")
@axes("--dilation", 1, "1")
@click.option(
    "--weight-layout",
    type=click.Choice(benchmark.LAYOUTS),
    default="nchw",
    show_default=True,
    help="nhwc where a model was brought to channels last.",
)
@click.option("--groups", type=_SOME, default=1, show_default=True, help="Of the convolution.")
@click.option("--bias/--no-bias", default=True, show_default=True, help="Of the convolution.")
@click.option(
    "--norm",
    type=click.Choice(_NORMS),
    default="group",
    show_default=True,
    help="What is behind the convolution; batch is that of inference.",
)
@click.option("--num-groups", type=_COUNT, default=8, show_default=True, help="0 for no GroupNorm.")
@click.option(
    "--activation",
    type=click.Choice(ACTIVATIONS),
    default="gelu",
    show_default=True,
    help="Of those that kernels compute; identity is none.",
)
@click.option("--order", type=click.Choice(ORDERS), default="act_norm", show_default=True)
@click.option("--gradients", is_flag=True, help="Of training: the backward pass too.")
@click.pass_context
def explain(context: click.Context, /, **options: Any) -> None:
    """Which kernel would serve a problem, and why no other. Needs no GPU.

    Options with a value for each axis take one for all axes too.
    """
    if options["device"] == "cpu" and is_given(context, "arch"):
        raise click.BadParameter(
            f"got {options['arch']}, expected none for a processor", param_hint="'--arch'"
        )
    device = KNOWN[options["arch"]] if options["device"] == "cuda" else PROCESSOR
    for problem in problems(context, **options):
        click.echo(str(explain_problem(problem, device)))


def problems(
    context: click.Context, /, system: str | None, arch: int, gradients: bool, **options: Any
) -> list[Problem]:
    """The problem that ``explain``'s options describe, and with ``gradients`` that of its backward
    pass. ``context`` is the one in which they were given."""
    if system is not None:
        for name, value in _system_sizes(system).items():
            if not is_given(context, name):
                options[name] = value
    convolves = options["out_channels"] > 0
    if options["norm"] != "group":
        if not convolves:
            raise click.BadParameter(
                f"got {options['norm']}, expected group where --out-channels is 0",
                param_hint="'--norm'",
            )
        if is_given(context, "num_groups"):
            raise click.BadParameter(
                f"got {options['num_groups']}, expected none with --norm {options['norm']}",
                param_hint="'--num-groups'",
            )
        options["num_groups"] = 0
    if not convolves and not options["num_groups"]:
        raise click.BadParameter(
            "got 0, expected at least 1 where --out-channels is 0", param_hint="'--num-groups'"
        )
    if convolves and len(options["spatial"]) not in (1, 2, 3):
        raise click.BadParameter(
            f"got {len(options['spatial'])} axes, expected one, two or three for a convolution",
            param_hint="'--spatial'",
        )
    if options["device"] == "cpu" and options["precision"] == "tf32":
        raise click.BadParameter(
            "got tf32, expected fp32, fp16 or bf16 on a processor", param_hint="'--precision'"
        )
    precision = options.pop("precision") or ("tf32" if options["device"] == "cuda" else "fp32")
    with naming_options():
        problem = hypothetical.problem(
            dtype=benchmark.DTYPES[precision],
            precision=precision,
            channels=options.pop("in_channels"),
            out_channels=options.pop("out_channels") or None,
            num_groups=options.pop("num_groups") or None,
            save=gradients,
            **options,
        )
    return [problem, _backward(problem)] if gradients else [problem]


def _backward(forward: ForwardProblem) -> BackwardProblem:
    """Every gradient of a problem, of an output gradient that lies as the output does."""
    absent = {"conv_output", "residual"}
    if forward.conv is None:
        absent |= {"weight", "bias"}
    if not forward.bias:
        absent |= {"bias"}
    if forward.norm is None:
        absent |= {"norm_weight", "norm_bias"}
    return BackwardProblem.of(
        forward,
        grad_dtype=forward.output_dtype,
        grad_layout=forward.output_layout,
        aligned=True,
        gradients=set(GRADIENTS) - absent,
    )
