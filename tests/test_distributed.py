"""Two processes on one machine: gradients and a step of the optimiser as in a single process."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, distributed, nn

import fusedconv
from fusedconv import ConvTransposeActNorm2d
from fusedconv.models import SYSTEMS

RANKS = 2
STEPS = 2

pytestmark = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()),
    reason="this torch has no torch.distributed with gloo",
)


class Plain(nn.Module):
    """A chain in a sequence, and one that the code joins."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Sequential(nn.ConvTranspose2d(4, 6, 3), nn.GroupNorm(2, 6), nn.SiLU())
        self.conv_transpose = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.group_norm = nn.GroupNorm(1, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.group_norm(nn.functional.gelu(self.conv_transpose(self.up(x))))


def converted() -> nn.Module:
    model = Plain()
    fusedconv.convert(model)
    return model


def models() -> list[tuple[nn.Module, Tensor]]:
    """Each model with a batch that the ranks divide, the same in every process."""
    torch.manual_seed(0)
    cases = [
        (SYSTEMS["system1"].model(6, 8, 3, 1, 2, 4), torch.rand(4, 6, 7, 5)),
        (SYSTEMS["system2"].model(4, 6, 2, 3, False), torch.rand(4, 4, 3, 5, 4)),
        (
            nn.Sequential(
                ConvTransposeActNorm2d(
                    4, 6, 3, padding=1, num_groups=2, activation="silu", order="norm_act"
                ),
                ConvTransposeActNorm2d(6, 4, 2, stride=2, num_groups=4, activation="gelu"),
            ),
            torch.rand(4, 4, 6, 5),
        ),
        (converted(), torch.rand(4, 4, 6, 5)),
    ]
    for model, _ in cases:
        for parameter in model.parameters():
            # Groups of deviation 1 or so: normalising small ones would enlarge rounding errors.
            nn.init.normal_(parameter)
    return cases


def wrap_ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def wrap_fsdp(model: nn.Module, kinds: tuple[type, ...] = (ConvTransposeActNorm2d,)) -> nn.Module:
    """FSDP2, with every layer of the ``kinds`` gathered by itself, as training scripts do."""
    from torch.distributed.fsdp import fully_shard

    mesh = distributed.init_device_mesh("cpu", (RANKS,))
    for layer in model.modules():
        if layer is not model and isinstance(layer, kinds):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def wrap_fsdp_by_child(model: nn.Module) -> nn.Module:
    """Also the convolutions and normalisations inside our modules are gathered by themselves."""
    return wrap_fsdp(model, (nn.ConvTranspose2d, nn.ConvTranspose3d, nn.GroupNorm))


def whole(tensor: Tensor) -> Tensor:
    """A parameter or gradient as a single process has it."""
    gather = getattr(tensor, "full_tensor", None)
    return (tensor if gather is None else gather()).detach()


def train(rank: int, rendezvous: str, wrap: Callable[[nn.Module], nn.Module]) -> None:
    """One rank; raises where it and a single process differ."""
    warnings.simplefilter("error")
    # torch.compile's own, where hooks interrupt the code that it follows.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS
    )
    try:
        for model, batch in models():
            single = copy.deepcopy(model)
            wrapped = wrap(model)
            own = batch.chunk(RANKS)[rank]
            # No Adam: it divides by the gradient's size, so that rounding errors grow with a step.
            optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01, momentum=0.9)
            single_optimizer = torch.optim.SGD(single.parameters(), lr=0.01, momentum=0.9)
            for _ in range(STEPS):
                output, expected = wrapped(own), single(batch)
                torch.testing.assert_close(
                    output, expected.chunk(RANKS)[rank], rtol=1e-5, atol=1e-5
                )
                output.square().mean().backward()
                expected.square().mean().backward()
                pairs = list(zip(wrapped.parameters(), single.parameters(), strict=True))
                assert pairs
                for parameter, other in pairs:
                    torch.testing.assert_close(
                        whole(parameter.grad), other.grad, rtol=1e-5, atol=1e-6
                    )
                optimizer.step()
                single_optimizer.step()
                for parameter, other in pairs:
                    torch.testing.assert_close(
                        whole(parameter), other.detach(), rtol=1e-5, atol=1e-6
                    )
                optimizer.zero_grad()
                single_optimizer.zero_grad()
    finally:
        distributed.destroy_process_group()
    # gloo's threads outlive their group, and one that drops a tensor while the interpreter is torn
    # down aborts the process (github.com/pytorch/pytorch/issues/190489).
    os._exit(0)


@pytest.mark.parametrize(
    "wrap", [wrap_ddp, wrap_fsdp, wrap_fsdp_by_child], ids=lambda w: w.__name__
)
def test_ranks_train_as_one_process(wrap, tmp_path):
    torch.multiprocessing.spawn(train, (str(tmp_path / "rendezvous"), wrap), nprocs=RANKS)
