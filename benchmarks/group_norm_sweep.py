"""GroupNorm over the shapes of real models, next to eager and torch.compile.

usage: python benchmarks/group_norm_sweep.py [--kernels] [--output FILE]

Forward passes, fp16 for inference shapes and fp32 for training shapes, timed as ``fusedconv bench``
times: CUDA events around one call each, host time included, inputs in rotation. ``--kernels`` also
times every kernel of fusedconv that serves the shape, which is what the selection's cost model is
checked against.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import fusedconv
from fusedconv.benchmark import Clock, device_facts, header, measured_rates, memory_format
from fusedconv.selection import clear_cache

HALF, FLOAT = torch.float16, torch.float32
# (where the shape occurs, [N, C, H, W], groups, dtype, layout)
SHAPES: list[tuple[str, tuple[int, ...], int, torch.dtype, str]] = [
    ("Stable Diffusion 1.5 U-Net", (2, 320, 64, 64), 32, HALF, "nchw"),
    ("Stable Diffusion 1.5 U-Net", (2, 640, 32, 32), 32, HALF, "nchw"),
    ("Stable Diffusion 1.5 U-Net", (2, 1280, 16, 16), 32, HALF, "nchw"),
    ("Stable Diffusion 1.5 U-Net", (2, 1280, 8, 8), 32, HALF, "nchw"),
    ("Stable Diffusion 1.5 U-Net, skip", (2, 960, 64, 64), 32, HALF, "nchw"),
    ("Stable Diffusion 1.5 U-Net, skip", (2, 1920, 32, 32), 32, HALF, "nchw"),
    ("Stable Diffusion 1.5 U-Net", (2, 320, 64, 64), 32, HALF, "nhwc"),
    ("Stable Diffusion 1.5 U-Net", (2, 1280, 16, 16), 32, HALF, "nhwc"),
    ("Stable Diffusion 1.5 U-Net, batch 16", (16, 320, 64, 64), 32, HALF, "nchw"),
    ("Stable Diffusion XL U-Net", (2, 320, 128, 128), 32, HALF, "nchw"),
    ("Stable Diffusion XL U-Net", (2, 640, 64, 64), 32, HALF, "nchw"),
    ("Stable Diffusion XL U-Net", (2, 1280, 32, 32), 32, HALF, "nhwc"),
    ("latent diffusion decoder", (1, 512, 64, 64), 32, HALF, "nchw"),
    ("latent diffusion decoder", (1, 512, 128, 128), 32, HALF, "nchw"),
    ("latent diffusion decoder", (1, 512, 256, 256), 32, HALF, "nchw"),
    ("latent diffusion decoder", (1, 256, 512, 512), 32, HALF, "nchw"),
    ("latent diffusion decoder", (1, 128, 512, 512), 32, FLOAT, "nchw"),
    ("latent diffusion decoder", (4, 128, 512, 512), 32, HALF, "nhwc"),
    ("latent diffusion decoder", (4, 256, 256, 256), 32, HALF, "nhwc"),
    ("denoising diffusion, training", (64, 128, 32, 32), 32, FLOAT, "nchw"),
    ("denoising diffusion, training", (64, 256, 16, 16), 32, FLOAT, "nchw"),
    ("denoising diffusion, training", (16, 256, 64, 64), 32, FLOAT, "nchw"),
    ("detection head", (16, 256, 128, 128), 32, FLOAT, "nchw"),
    ("detection head", (8, 256, 64, 64), 32, FLOAT, "nchw"),
    ("detection head", (8, 256, 32, 32), 32, FLOAT, "nhwc"),
    ("mask head", (64, 256, 14, 14), 32, FLOAT, "nchw"),
    ("ResNet-50 with GroupNorm", (64, 64, 56, 56), 32, FLOAT, "nchw"),
    ("ResNet-50 with GroupNorm", (64, 256, 56, 56), 32, HALF, "nchw"),
    ("ResNet-50 with GroupNorm", (64, 512, 28, 28), 32, HALF, "nhwc"),
    ("ResNet-50 with GroupNorm", (64, 2048, 8, 8), 32, HALF, "nchw"),
    ("instance norm", (4, 64, 256, 256), 64, FLOAT, "nchw"),
    ("instance norm", (8, 128, 128, 128), 128, HALF, "nchw"),
    ("instance norm", (1, 32, 512, 512), 32, FLOAT, "nhwc"),
    ("instance norm", (16, 512, 32, 32), 512, HALF, "nchw"),
    ("one group", (64, 96, 56, 56), 1, HALF, "nchw"),
    ("one group", (32, 384, 16, 16), 1, HALF, "nchw"),
    ("one group", (1, 32, 512, 512), 1, FLOAT, "nchw"),
    ("eight groups", (16, 64, 256, 256), 8, FLOAT, "nchw"),
    ("eight groups", (8, 64, 512, 512), 8, HALF, "nchw"),
    ("eight groups", (32, 64, 128, 128), 8, HALF, "nhwc"),
]
CONTENDERS = ("fusedconv", "eager", "compile")
KERNELS = ("groupnorm_resident", "groupnorm_streamed", "groupnorm_two_pass")


def times_of(model: nn.Module, inputs: list[torch.Tensor], clock: Clock) -> dict[str, Any]:
    with torch.no_grad():
        return clock.measure([lambda x=x: model(x) for x in inputs]).fields()


def kernel_times(model: nn.Module, inputs: list[torch.Tensor], clock: Clock) -> dict[str, float]:
    result = {}
    for kernel in KERNELS:
        os.environ["FUSEDCONV_KERNEL"] = kernel
        clear_cache()
        try:
            result[kernel] = times_of(model, inputs, clock)["median_ms"]
        except fusedconv.NoKernelError:
            continue
        finally:
            del os.environ["FUSEDCONV_KERNEL"]
            clear_cache()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Path(__file__).parent / "results" / "h200-group-norm-sweep.json"
    parser.add_argument("--output", type=Path, default=default)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    device = torch.device("cuda")
    rates = measured_rates(device)
    clock = Clock(device, 0.1, 30)
    records: list[dict[str, Any]] = []
    for where, shape, groups, dtype, layout in SHAPES:
        torch.manual_seed(0)
        x = torch.randn(shape, device=device).to(dtype, memory_format=memory_format(4, layout))
        copies = min(8, max(2, -(-(128 << 20) // x.nbytes)))
        inputs = [x, *(torch.randn_like(x) for _ in range(copies - 1))]
        original = nn.GroupNorm(groups, shape[1]).to(device, dtype)
        nn.init.uniform_(original.weight)
        nn.init.uniform_(original.bias)
        ours = fusedconv.GroupNorm(groups, shape[1]).to(device, dtype)
        ours.load_state_dict(original.state_dict())
        reference = F.group_norm(
            x.double(), groups, original.weight.double(), original.bias.double(), original.eps
        )
        models = {"fusedconv": ours, "eager": original, "compile": torch.compile(original)}
        for contender in CONTENDERS:
            model = models[contender]
            with torch.no_grad():
                output = model(x)
            error = float((output.double() - reference).norm() / reference.norm())
            record = {
                "where": where,
                "shape": list(shape),
                "groups": groups,
                "dtype": str(dtype).removeprefix("torch."),
                "layout": layout,
                "contender": contender,
                "floor_ms": 2 * x.nbytes / rates["copy"] * 1e3,
                "error_fp64": error,
                **times_of(model, inputs, clock),
            }
            if contender == "fusedconv":
                with open(os.devnull, "w") as sink:
                    record["kernel"] = fusedconv.explain(ours, x, file=sink)[0].kernel
                if arguments.kernels:
                    record["kernels_ms"] = kernel_times(ours, inputs, clock)
            records.append(record)
        torch.compiler.reset()
        mine, eager, compiled = (r["median_ms"] for r in records[-3:])
        print(
            f"{shape!s:22} {groups:4} {str(dtype)[6:]:8} {layout} {records[-3]['kernel']:19}"
            f" {mine * 1e3:8.1f} us, eager {eager / mine:5.2f}x, compile {compiled / mine:5.2f}x,"
            f" error {records[-3]['error_fp64'] / records[-2]['error_fp64']:.2f} of eager's",
            {k[10:]: round(v * 1e3, 1) for k, v in records[-3].get("kernels_ms", {}).items()},
            flush=True,
        )
        del inputs, x, reference
    for peer in CONTENDERS[1:]:
        ratios = [
            theirs["median_ms"] / mine["median_ms"]
            for mine, theirs in zip(
                records[:: len(CONTENDERS)],
                records[CONTENDERS.index(peer) :: len(CONTENDERS)],
                strict=True,
            )
        ]
        mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
        print(f"over {peer}: geometric mean {mean:.2f}x, least {min(ratios):.2f}x")
    head = header(device_facts(device, 0), arguments.commit, rates, __doc__)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps({"header": head, "records": records}, indent=1))


if __name__ == "__main__":
    main()
