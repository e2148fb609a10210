"""What is measured: fusedconv, and what a user could pick instead."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusedconv.benchmark.cells import Cell
from fusedconv.benchmark.layers import LAYERS
from fusedconv.benchmark.workloads import Workload
from fusedconv.models import SYSTEMS


class Rewrite(nn.Module):
    """A system with its transposed convolution written as an ordinary one, in plain torch."""

    def __init__(self, original: nn.Module, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv_transpose = original.conv_transpose
        self.group_norm = original.group_norm
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        conv: Any = self.conv_transpose
        axes = len(conv.kernel_size)
        weight = conv.weight.flip(tuple(range(2, 2 + axes))).transpose(0, 1)
        padding = tuple(k - 1 - p for k, p in zip(conv.kernel_size, conv.padding, strict=True))
        function = F.conv2d if axes == 2 else F.conv3d
        x = function(x, weight, conv.bias, padding=padding)
        norm: Any = self.group_norm
        result: Tensor = norm(self.activation(x))
        return result


@dataclass(frozen=True)
class Contender:
    """``cudnn_benchmark`` is torch's switch, set before anything runs; ``overhead`` the seconds
    that a cell takes beside the timing, roughly."""

    name: str
    ours: bool = False
    rewritten: bool = False
    compile_mode: str | None = None
    cudnn_benchmark: bool = True
    overhead: float = 2.0

    @property
    def switched(self) -> bool:
        """Whether cudnn.benchmark is all that tells it from another contender."""
        return self.cudnn_benchmark and self.compile_mode is None and not self.rewritten

    def takes_part(self, cell: Cell, device: str = "cuda") -> bool:
        """Whether the cell differs for it from what another contender does there, on a ``device``
        of that type."""
        if device != "cuda" and self.switched:
            return False
        if self.rewritten:
            return cell.convolves and cell.workload in SYSTEMS
        if self.ours and self.cudnn_benchmark:
            # Of ours, the gradients alone call cuDNN; of layers, what torch's operators serve too.
            return cell.convolves and (cell.pass_ == "forward_backward" or cell.workload in LAYERS)
        return cell.convolves or not self.switched

    def build(self, workload: Workload, original: nn.Module) -> nn.Module:
        """Its model with the original's parameters, their device, dtype and layout."""
        if self.ours:
            model = workload.model(*workload.init_arguments)
            state = {name: value.clone() for name, value in original.state_dict().items()}
            model.load_state_dict(state, assign=True)
            return model
        model = copy.deepcopy(original)
        if self.rewritten:
            model = Rewrite(model, F.gelu if workload.name == "system1" else F.relu)
        if self.compile_mode is None:
            return model
        return torch.compile(model, mode=self.compile_mode)  # type: ignore[return-value]


#: By name, in the order of tables.
CONTENDERS: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        Contender("fusedconv", ours=True, cudnn_benchmark=False),
        Contender("fusedconv_cudnn_benchmark", ours=True),
        Contender("eager", cudnn_benchmark=False),
        Contender("eager_cudnn_benchmark"),
        Contender("compile", compile_mode="default", overhead=8.0),
        Contender("compile_max_autotune", compile_mode="max-autotune-no-cudagraphs", overhead=20.0),
        Contender("rewrite", rewritten=True),
        Contender("rewrite_compile", rewritten=True, compile_mode="default", overhead=8.0),
    )
}
