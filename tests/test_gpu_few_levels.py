"""Planes of one number each, within the borders that padding leaves: roundings of their sums all go
one way, as those of random values never do, and moments that are of anything else than what is
normalised are far off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_checks import fused_against_fp64

from fusedconv.benchmark import DTYPES
from fusedconv.plan import ForwardKernel
from fusedconv.registry import registry

pytestmark = pytest.mark.gpu

KERNELS = [
    kernel
    for kernel in registry().kernels()
    if isinstance(kernel, ForwardKernel)
    and kernel.provider not in ("torch", "cpu", "groupnorm_cuda")
    and "onednn" not in kernel.name
]
#: Some for each family.
LAYERS: dict[str, dict[str, Any]] = {
    "stride 1": dict(channels=64, out=64, kernel=(3, 3), padding=(1, 1)),
    "to one side": dict(channels=64, out=64, kernel=(3, 2), padding=(1, 1)),
    "wide": dict(channels=20, out=72, kernel=(3, 5), padding=(1, 2), spatial=(9, 96)),
    "asymmetric": dict(channels=64, out=64, kernel=(2, 3), padding=(0, 0)),
    "interleaved": dict(channels=64, out=64, kernel=(2, 2), padding=(0, 0), stride=(2, 2)),
    "upsampling": dict(channels=64, out=64, kernel=(4, 4), padding=(1, 1), stride=(2, 2)),
    "many phases": dict(channels=64, out=32, kernel=(8, 8), padding=(0, 0), stride=(8, 8)),
    "depthwise": dict(channels=64, out=64, kernel=(3, 3), padding=(1, 1), conv_groups=64),
    "few channels": dict(channels=3, out=16, kernel=(3, 3), padding=(1, 1), stride=(2, 2)),
    "small": dict(channels=32, out=32, kernel=(3, 3), padding=(1, 1), spatial=(14, 16)),
    "points": dict(channels=64, out=64, kernel=(1, 1), padding=(0, 0)),
}
#: Each lets 64 levels' roundings fall otherwise than eager's; sums that are wrong leave ten times
#: eager's error and more.
ALLOWED = {"tf32": 1e-3, "fp32": 1e-6, "fp16": 1e-3, "bf16": 8e-3}


def few_levels(batch: int, channels: int, *spatial: int, device: str) -> torch.Tensor:
    levels = torch.randint(-4, 9, (batch, channels), device=device) * 0.25
    planes = levels.reshape(batch, channels, *[1] * len(spatial))
    return planes.expand(batch, channels, *spatial).contiguous()


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_constant_planes(kernel, force, monkeypatch):
    force(kernel.name)
    precision = kernel.precision
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", precision == "tf32")
    served = 0
    for number, layer in enumerate(LAYERS.values()):
        for layout in ("nchw", "nhwc"):
            for activation, order in (("gelu", "act_norm"), ("relu", "norm_act")):
                torch.manual_seed(number)
                case = dict(
                    layer,
                    batch=2,
                    spatial=layer.get("spatial", (20, 64)),
                    stride=layer.get("stride", (1, 1)),
                    dilation=(1, 1),
                    layout=layout,
                    groups=8,
                    bias=True,
                    activation=activation,
                    order=order,
                    draw=few_levels,
                )
                allowed = ALLOWED[precision]
                served += fused_against_fp64(case, DTYPES[precision], precision, floor=allowed)
    if not served:
        pytest.skip("serves none of these layers")
