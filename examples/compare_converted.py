"""Times a model against itself converted, with torch.utils.benchmark, and compares the two.

    python examples/compare_converted.py                  # on a GPU where there is one
    python examples/compare_converted.py --device cpu --size 64 --dtype bfloat16

The model is a decoder as segmentation networks have it: transposed convolutions that double the
image, each with GroupNorm and an activation. Outputs and gradients are compared first.
"""

from __future__ import annotations

import argparse
import copy
import itertools

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Compare, Measurement, Timer

import fusedconv


class Decoder(nn.Module):
    """``channels`` per stage, the first is the input's; the last stage is joined by the code."""

    def __init__(self, channels: tuple[int, ...] = (256, 128, 64, 32)) -> None:
        super().__init__()
        *stages, last = itertools.pairwise(channels)
        self.stages = nn.Sequential(
            *(
                nn.Sequential(nn.ConvTranspose2d(a, b, 2, 2), nn.GroupNorm(8, b), nn.GELU())
                for a, b in stages
            )
        )
        self.up = nn.ConvTranspose2d(*last, 4, 2, 1)
        self.norm = nn.GroupNorm(8, last[1])

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.norm(self.up(self.stages(x))))


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output and every gradient."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    output = model(x)
    output.float().square().mean().backward()
    return [output, *(leaf.grad for leaf in (x, *model.parameters()) if leaf.grad is not None)]


def largest_difference(ours: list[Tensor], torchs: list[Tensor]) -> float:
    """Relative to the norm of each tensor."""
    return max(
        ((a - b).double().norm() / b.double().norm()).item()
        for a, b in zip(ours, torchs, strict=True)
    )


def timed(name: str, model: nn.Module, x: Tensor, seconds: float) -> list[Measurement]:
    """Forward without gradients, and a training step's forward and backward."""

    def forward() -> None:
        with torch.no_grad():
            model(x)

    passes = {"forward": forward, "forward and backward": lambda: results(model, x)}
    return [
        Timer(
            "run()",
            globals={"run": run},
            label="Decoder",
            sub_label=sub_label,
            description=name,
            num_threads=torch.get_num_threads(),
        ).blocked_autorange(min_run_time=seconds)
        for sub_label, run in passes.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--size", type=int, default=32, help="height and width of the input")
    parser.add_argument("--seconds", type=float, default=1.0, help="least time of a measurement")
    arguments = parser.parse_args()

    where = {"device": arguments.device, "dtype": getattr(torch, arguments.dtype)}
    torch.manual_seed(0)
    original = Decoder().to(**where)
    x = torch.randn(arguments.batch, 256, arguments.size, arguments.size, **where)
    converted = copy.deepcopy(original)
    print(fusedconv.convert(converted, (x,)))

    ours, torchs = results(converted, x), results(original, x)
    print(f"\nlargest relative difference, outputs and gradients: "
          f"{largest_difference(ours, torchs):.2g}\n")  # fmt: skip
    measured = timed("original", original, x, arguments.seconds)
    measured += timed("converted", converted, x, arguments.seconds)
    Compare(measured).print()


if __name__ == "__main__":
    main()
