"""The problems that the cost models are fitted to and checked on. Needs no GPU.

160 shapes are drawn from a fixed seed: TF32, strict fp32 and 16 bits by turns, both layouts, two
and three axes, 16 to 256 channels, half of them and more of one sample and few pixels; none is a
benchmark's. Every fourth is NCHW with lines of whole 16 bytes, which some kernels ask for, and one
of the common filters.
"""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

from fusedconv import hypothetical
from fusedconv.benchmark import DTYPES, LAYOUTS
from fusedconv.problem import Activation, BackwardProblem, Bias, ForwardProblem, Norm, Problem

COUNT = 160
#: Every so many shapes one has lines of whole 16 bytes.
ALIGNED_EVERY = 4
CHANNELS = (16, 20, 24, 32, 36, 48, 64, 80, 96, 100, 128, 160, 192, 256)


@dataclasses.dataclass(frozen=True)
class Shape:
    """One problem; stride and dilation are 1, padding and kernel the same along every axis."""

    precision: str
    layout: str
    batch: int
    channels: int
    out_channels: int
    spatial: tuple[int, ...]
    kernel_size: int
    padding: int
    bias: bool
    num_groups: int
    activation: str

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Shape:
        return cls(**{**fields, "spatial": tuple(fields["spatial"])})

    @property
    def flops(self) -> int:
        taps = self.kernel_size ** len(self.spatial)
        return 2 * self.batch * self.channels * self.out_channels * taps * math.prod(self.spatial)

    def problem(self) -> ForwardProblem:
        """The forward pass on a GPU."""
        fields = dataclasses.asdict(self) | {"dtype": DTYPES[self.precision]}
        return hypothetical.problem(device="cuda", **fields)

    def passes(self) -> dict[str, Problem]:
        """The forward pass as "forward", and each part of the backward pass that asks for every
        gradient."""
        forward = self.problem()
        gradients = ("input", "weight", "norm_weight", "norm_bias", *["bias"] * self.bias)
        backward = _gradients(forward, *gradients)
        return {"forward": forward, **{name: backward.part([name]) for name in backward.parts}}

    def operators(self) -> dict[str, Problem]:
        """Problems that are one operator of torch's each, of what the shape consists of."""
        forward = self.problem()
        (activation,) = forward.activations
        norm = _behind(forward, forward.norm)
        return {
            "convolution": dataclasses.replace(forward, epilogue=(Bias(),) * self.bias),
            "activation": _behind(forward, activation),
            "norm": norm,
            "norm_backward": _gradients(norm, "input", "norm_weight", "norm_bias"),
        }


def _behind(forward: ForwardProblem, stage: Activation | Norm | None) -> ForwardProblem:
    """A stage alone, on a tensor like the convolution's output."""
    assert stage is not None
    return dataclasses.replace(
        forward,
        channels=forward.output_channels,
        spatial=forward.output_spatial,
        conv=None,
        epilogue=(stage,),
    )


def _gradients(forward: ForwardProblem, *names: str) -> BackwardProblem:
    return BackwardProblem.of(
        dataclasses.replace(forward, save=True),
        grad_dtype=forward.output_dtype,
        grad_layout=forward.output_layout,
        aligned=True,
        gradients=names,
    )


def _draw(generator: random.Random, precision: str, layout: str, axes: int, aligned: bool) -> Shape:
    small = generator.random() < 0.5
    if small:
        low, high = ((14, 64), (6, 20))[axes - 2]
    else:
        low, high = ((32, 192), (12, 40))[axes - 2]
    kernel = generator.choice((2, 3, 3, 3, 4, 5) if axes == 2 else (2, 3, 3))
    padding = generator.randint(0, kernel - 1)
    spatial = [generator.randint(low, high) for _ in range(axes)]
    if aligned:
        kernel = generator.choice((1, 3, 3, 3))
        padding = generator.choice((0, kernel // 2))
        spatial[-1] = -(-spatial[-1] // 8) * 8
    out_channels = generator.choice(CHANNELS)
    return Shape(
        precision=precision,
        layout=layout,
        batch=1 if small else generator.randint(2, 32),
        channels=generator.choice(CHANNELS),
        out_channels=out_channels,
        spatial=tuple(spatial),
        kernel_size=kernel,
        padding=padding,
        bias=generator.random() < 0.5,
        num_groups=generator.choice([g for g in (1, 2, 4, 8, 16) if out_channels % g == 0]),
        activation=generator.choice(("relu", "gelu", "silu")),
    )


def shapes() -> list[Shape]:
    """The same ones each time; large ones at most about a millisecond long."""
    generator = random.Random(20261121)
    result: list[Shape] = []
    while len(result) < COUNT:
        index = len(result)
        aligned = index % ALIGNED_EVERY == ALIGNED_EVERY - 1
        precision = ("tf32", "fp32", generator.choice(("fp16", "bf16")))[index % 3]
        layout = "nchw" if aligned else LAYOUTS[index // 3 % 2]
        shape = _draw(generator, precision, layout, 2 + index // 6 % 2, aligned)
        if shape.flops <= (3e10 if precision == "fp32" else 1e11) and shape not in result:
            result.append(shape)
    return result
