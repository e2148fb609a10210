"""Times a model against its original with torch.utils.benchmark, and compares the two.

    python examples/compare.py                            # on a GPU where there is one
    python examples/compare.py --model system1 --batch 2 --size 256 --device cpu
    python examples/compare.py --dtype bfloat16 --layout channels_last

``decoder`` is one as segmentation networks have it, converted in one call: transposed convolutions
that double the image, each with GroupNorm and an activation. ``system1`` to ``system3`` are the
plain models that the drop-ins replace, with weights by ``load_state_dict``. Outputs and gradients
are compared first, with what float64 gives: the two differ from it by rounding.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Compare, Measurement, Timer

import fusedconv
from fusedconv.models import SYSTEMS


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


def input_shape(model: str, batch: int | None, size: int | None) -> tuple[int, ...]:
    """The decoder's, or a system's at a size that a processor takes some 0.1 s for."""
    shape = (4, 256, 32, 32) if model == "decoder" else SYSTEMS[model].processor_input_shape
    extents = shape[2:] if size is None else (size,) * len(shape[2:])
    return (shape[0] if batch is None else batch, shape[1], *extents)


def original(model: str) -> nn.Module:
    if model == "decoder":
        return Decoder()
    return SYSTEMS[model].original(*SYSTEMS[model].init_arguments)


def ours(model: str, like: nn.Module, x: Tensor) -> nn.Module:
    """A converted copy of the decoder, or a system's drop-in with the original's weights."""
    if model == "decoder":
        converted = copy.deepcopy(like)
        print(fusedconv.convert(converted, (x,)))
        return converted
    system = SYSTEMS[model]
    drop_in = system.model(*system.init_arguments).to(x.device, x.dtype)
    drop_in.load_state_dict(like.state_dict())
    return drop_in


def results(model: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """The output, and the gradient of the input and of each parameter."""
    x = x.detach().requires_grad_()
    output = model(x)
    names = dict(model.named_parameters())
    grads = torch.autograd.grad(output, [x, *names.values()], grad)
    return dict(zip(["output", "gradient of input", *names], [output, *grads], strict=True))


def differences(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Relative to the norm of each tensor."""
    return {
        name: float((found[name].double() - each).norm() / each.norm().clamp(min=1e-300))
        for name, each in exact.items()
    }


def timed(
    title: str, name: str, model: nn.Module, x: Tensor, grad: Tensor, seconds: float
) -> list[Measurement]:
    """Forward without gradients, and a training step's forward and backward."""

    def forward() -> None:
        with torch.no_grad():
            model(x)

    passes: dict[str, Callable[[], object]] = {
        "forward": forward,
        "forward and backward": lambda: results(model, x, grad),
    }
    return [
        Timer(
            "run()",
            globals={"run": run},
            label=title,
            sub_label=sub_label,
            description=name,
            num_threads=torch.get_num_threads(),
        ).blocked_autorange(min_run_time=seconds)
        for sub_label, run in passes.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="decoder", choices=["decoder", *SYSTEMS])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--layout", default="contiguous", choices=["contiguous", "channels_last"])
    parser.add_argument("--batch", type=int)
    parser.add_argument("--size", type=int, help="every extent of the input")
    parser.add_argument("--seconds", type=float, default=1.0, help="least time of a measurement")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    where = {"device": arguments.device, "dtype": getattr(torch, arguments.dtype)}
    name, plain = arguments.model, original(arguments.model).to(**where)
    x = torch.rand(input_shape(name, arguments.batch, arguments.size), **where)
    models = {"original": plain, "fusedconv": ours(name, plain, x)}
    if arguments.layout == "channels_last":
        layout = torch.channels_last_3d if x.dim() == 5 else torch.channels_last
        x = x.to(memory_format=layout)
        for model in models.values():
            model.to(memory_format=layout)

    grad = torch.randn_like(plain(x))
    exact = results(copy.deepcopy(plain).double(), x.double(), grad.double())
    errors = {key: differences(results(each, x, grad), exact) for key, each in models.items()}
    print(f"\n{'error against float64':36}" + "".join(f"{key:>12}" for key in models))
    for tensor in exact:
        print(f"{tensor:36}" + "".join(f"{errors[key][tensor]:12.2g}" for key in models))

    title = f"{name}, {'x'.join(map(str, x.shape))}, {arguments.dtype}, {arguments.layout}"
    measured = [
        each
        for key, model in models.items()
        for each in timed(title, key, model, x, grad, arguments.seconds)
    ]
    print()
    Compare(measured).print()


if __name__ == "__main__":
    main()
