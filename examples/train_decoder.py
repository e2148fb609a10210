"""Trains a small decoder by fusedconv's modules and, from the same weights on the same data, by
torch's own, and holds the losses against each other.

usage: python examples/train_decoder.py [options]
       torchrun --nproc-per-node 2 examples/train_decoder.py --wrap ddp [options]

Each process takes an equal share of every batch: on GPUs over NCCL, on processors over gloo.
``--wrap fsdp`` shards the parameters (FSDP2). Before the training the gradients of the first batch
are held against those of one process with the whole batch. ``--plot`` needs matplotlib.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, distributed, nn
from torch.nn import functional as F

import fusedconv

CHANNELS = (128, 64, 32, 16)


class PlainBlock(nn.Module):
    """A stage of the decoder in torch's modules, with the names of ours."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv_transpose = nn.ConvTranspose2d(inputs, outputs, 4, 2, 1)
        self.group_norm = nn.GroupNorm(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.group_norm(F.gelu(self.conv_transpose(x)))


def fused_block(inputs: int, outputs: int) -> nn.Module:
    return fusedconv.ConvTransposeActNorm2d(
        inputs, outputs, 4, 2, 1, num_groups=8, activation="gelu"
    )


def decoder(fused: bool) -> nn.Module:
    """[N, 128, 8, 8] to images [N, 3, 64, 64]."""
    block = fused_block if fused else PlainBlock
    stages = [block(a, b) for a, b in itertools.pairwise(CHANNELS)]
    return nn.Sequential(*stages, nn.Conv2d(CHANNELS[-1], 3, 3, padding=1))


class Blobs:
    """Images of a few round blobs, and a fixed encoder that sees them as [N, 128, 8, 8]."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(1)
        self.encoder = torch.randn(CHANNELS[0], 3, 8, 8, generator=self.generator) / 14
        self.encoder = self.encoder.to(device)
        axis = torch.linspace(-1, 1, 64)
        self.grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij")).to(device)

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """Latents and images; the same in every process, whatever computed before."""
        centres = torch.rand(size, 5, 2, 1, 1, generator=self.generator) * 2 - 1
        colours = torch.rand(size, 5, 3, 1, 1, generator=self.generator)
        distance = (self.grid - centres.to(self.device)).square().sum(2, keepdim=True)
        images = (colours.to(self.device) * torch.exp(-12 * distance)).sum(1)
        return F.conv2d(images, self.encoder, stride=8), images


def share(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    return tensor.chunk(ranks)[rank]


def wrapped(model: nn.Module, how: str, device: torch.device) -> nn.Module:
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(
            model, device_ids=[device.index] if device.type == "cuda" else None
        )
    if how == "fsdp":
        from torch.distributed.fsdp import fully_shard

        mesh = distributed.init_device_mesh(device.type, (distributed.get_world_size(),))
        for stage in model:  # type: ignore[attr-defined]
            fully_shard(stage, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """By name, whole where they are sharded."""
    result = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        full: Any = getattr(parameter.grad, "full_tensor", None)
        result[name.removeprefix("module.")] = parameter.grad if full is None else full()
    return result


def largest_difference(model: nn.Module, whole: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    """Of the gradients of a step over all processes from those of one with the whole batch,
    relative to each one's norm."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    latents, images = batch
    F.mse_loss(model(share(latents, rank, ranks)), share(images, rank, ranks)).backward()
    F.mse_loss(whole(latents), images).backward()
    alone = gradients(whole)
    worst = max(
        float((grad - alone[name]).norm() / alone[name].norm())
        for name, grad in gradients(model).items()
    )
    model.zero_grad()
    return worst


def train(
    model: nn.Module, arguments: argparse.Namespace, device: torch.device, label: str
) -> list[float]:
    """The mean loss over all processes of each step."""
    several = distributed.is_initialized()
    rank, ranks = (distributed.get_rank(), distributed.get_world_size()) if several else (0, 1)
    data = Blobs(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in track(range(arguments.steps), label, disable=rank > 0):
        latents, images = (share(each, rank, ranks) for each in data.batch(arguments.batch))
        mode: AbstractContextManager[Any] = nullcontext()
        if arguments.precision == "bf16":
            mode = torch.autocast(device.type, torch.bfloat16)
        with mode:
            output = model(latents)
        loss = F.mse_loss(output.float(), images)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = loss.detach().clone()
        if several:
            distributed.all_reduce(shown)
        losses.append(float(shown) / ranks)
    return losses


def plot(losses: dict[str, list[float]], title: str, file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (name, values), style in zip(losses.items(), ("-", "--"), strict=False):
        axes.semilogy(values, style, label=name)
    axes.set(xlabel="step", ylabel="mean squared error", title=title)
    axes.legend()
    figure.savefig(file, dpi=120)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected at least 1")
    return value


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--steps", type=positive, default=200)
    parser.add_argument("--batch", type=positive, default=64, help="of all processes together")
    parser.add_argument("--precision", choices=("fp32", "tf32", "bf16"), default="fp32")
    parser.add_argument("--wrap", choices=("none", "ddp", "fsdp"), default="none")
    parser.add_argument("--output", type=Path, help="losses as JSON")
    parser.add_argument("--plot", type=Path, help="losses as an image")
    arguments = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    launched = "RANK" in os.environ
    if launched != (arguments.wrap != "none"):
        parser.error(
            f"--wrap: got {arguments.wrap} {'under' if launched else 'without'} torchrun, expected "
            + ("ddp or fsdp" if launched else "none")
        )
    if arguments.wrap != "none" and arguments.batch % ranks:
        parser.error(
            f"--batch: got {arguments.batch}, expected a multiple of {ranks} processes, whose "
            "gradients are averaged"
        )
    return arguments


def main() -> None:
    arguments = parse()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    torch.backends.cudnn.allow_tf32 = arguments.precision == "tf32"
    if arguments.wrap != "none":
        if device.type == "cuda":
            torch.cuda.set_device(device)
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    first = not distributed.is_initialized() or distributed.get_rank() == 0
    torch.manual_seed(0)
    fused, plain = decoder(fused=True).to(device), decoder(fused=False).to(device)
    plain.load_state_dict(fused.state_dict())
    found: dict[str, Any] = {"device": str(device), **vars(arguments)}
    if arguments.wrap != "none":
        whole = decoder(fused=True).to(device)
        whole.load_state_dict(fused.state_dict())
        model = wrapped(fused, arguments.wrap, device)
        worst = largest_difference(model, whole, Blobs(device).batch(arguments.batch))
        found["largest difference of a gradient from one process's"] = worst
        if first:
            ranks = distributed.get_world_size()
            print(f"{ranks} processes, gradients differ from one process's by {worst:.2g} at most")
    else:
        model = fused
    losses = {
        "fusedconv": train(model, arguments, device, "fusedconv"),
        "eager": train(wrapped(plain, arguments.wrap, device), arguments, device, "eager"),
    }
    if first:
        pairs = zip(losses["fusedconv"], losses["eager"], strict=True)
        apart = max(abs(a / b - 1) for a, b in pairs)
        print(f"last losses: {losses['fusedconv'][-1]:.5f}, eager {losses['eager'][-1]:.5f}")
        print(f"losses differ by {apart:.2%} at most")
        found["losses"] = losses
        if arguments.output:
            arguments.output.write_text(json.dumps(found, indent=1, default=str) + "\n")
        if arguments.plot:
            plot(
                losses,
                f"a decoder of {len(CHANNELS) - 1} stages, {arguments.precision}",
                arguments.plot,
            )
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # gloo's threads outlive their group, and one that drops a tensor while the interpreter is
        # torn down aborts the process (github.com/pytorch/pytorch/issues/190489).
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
