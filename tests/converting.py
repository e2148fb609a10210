"""What tests of converted models share: the original beside it, and what one call computes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from problems import explained
from reference import assert_as_accurate_as_torch, cotangent
from systems import perturbed
from torch import Tensor, nn
from torch.nn import functional as F

import fusedconv
from fusedconv.problem import Activation, Bias, ForwardProblem

#: Bounds of float32 gradients in these small models, relative to a tensor's norm.
GRADIENT = 1e-4


def converted(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """A model, with parameters of their own, converted; and the original."""
    perturbed(model)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if "running" in name:
                buffer.uniform_(0.5, 2)
    original = copy.deepcopy(model)
    fusedconv.convert(model)
    return model, original


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and the parameters by name, as far as it has any:
    an exported program of torch 2.6 has them in another order."""
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    output = model(x)
    output.backward(cotangent(output))
    return [
        output.detach(),
        x.grad,
        *(p.grad.clone() for _, p in sorted(model.named_parameters()) if p.grad is not None),
    ]


def assert_same(model: nn.Module, original: nn.Module, x: Tensor) -> None:
    """Output and gradients are those of the original, and as exact."""
    exact = results(copy.deepcopy(original).double(), x.double())
    ours, torchs = results(model, x), results(original, x)
    assert_as_accurate_as_torch(ours[0], torchs[0], exact[0], floor=2e-7)
    scale = max(value.abs().max().item() for value in exact)
    for our, their in zip(ours[1:], torchs[1:], strict=True):
        torch.testing.assert_close(our, their, rtol=GRADIENT, atol=1e-6 * scale)


def calls(model: nn.Module, *args: Any, gradients: bool = False) -> list[str]:
    """What each call of ours computes, in order: its stages behind "conv" and without the bias."""
    found = []
    for each in explained(model, *args, gradients=gradients):
        problem = getattr(each, "problem", None)
        if isinstance(problem, ForwardProblem):
            stages = [stage for stage in problem.epilogue if stage != Bias()]
            names = [
                stage.name if isinstance(stage, Activation) else stage.kind for stage in stages
            ]
            found.append(" ".join([*["conv"] * (problem.conv is not None), *names]))
    return found


class LayerNorm2d(nn.LayerNorm):
    """Of channels, as vision models write it."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Joined(nn.Module):
    """Every chain that graphs are searched for."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.ConvTranspose2d(4, 8, 2, 2)
        self.norm1 = nn.GroupNorm(2, 8)
        self.conv2 = nn.ConvTranspose2d(8, 8, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(8)
        self.conv3 = nn.ConvTranspose2d(8, 8, 3, bias=False, groups=2)
        self.norm3 = nn.InstanceNorm2d(8)
        self.conv4 = nn.ConvTranspose2d(8, 8, 1)
        self.norm4 = LayerNorm2d(8)
        self.act = nn.GELU("tanh")
        self.inplace = nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.inplace(self.norm1(self.conv1(x)))
        x = self.norm2(self.conv2(x)).relu()
        x = F.gelu(self.norm1(torch.tanh(x)))
        x = self.norm3(F.silu(self.conv3(x), inplace=True))
        x = self.norm1(self.act(x * 2))
        return self.act(self.norm4(self.conv4(x)))


CHAINS = [
    "conv_transpose2d -> group_norm -> relu",
    "conv_transpose2d -> batch_norm -> relu",
    "group_norm -> gelu",
    "conv_transpose2d -> silu -> instance_norm",
    "gelu_tanh -> group_norm",
    "conv_transpose2d -> layer_norm -> gelu_tanh",
]
CALLS = [
    "conv group relu",
    "conv affine relu",
    "group gelu",
    "conv silu instance",
    "gelu_tanh group",
    "conv layer gelu_tanh",
]
