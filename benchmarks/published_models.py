"""Models of packages that people use, before and after ``fusedconv.convert``.

usage: python benchmarks/published_models.py [--models unet,...] [--precisions tf32,bf16]
       [--layouts nchw,nhwc] [--passes forward,forward_backward] [--output FILE]

Random weights at the packages' default sizes, in evaluation mode. The original and its converted
copy take turns, a call each in every round, with cudnn.benchmark on for both; outputs and gradients
are held against float64 first. ``--compile`` adds both under torch.compile, the converted one by
``fusedconv.compile_backend``. ``pip install "fusedconv[models]"`` brings the packages.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from table import print_models
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fusedconv
from fusedconv.benchmark import (
    DTYPES,
    LAYOUTS,
    PASSES,
    Clock,
    check_writable,
    default_device,
    device_facts,
    header,
    memory_format,
    precision_mode,
)
from fusedconv.benchmark.records import write
from fusedconv.conversion import Conversion

METHOD = """\
Models of published packages with random weights, in evaluation mode, at the packages' default sizes
(benchmarks/published_models.py names them), before and after fusedconv.convert.

Each record is one contender on one model, pass, precision and layout: original, converted (a copy
by fusedconv.convert with a call's arguments), and, where asked for, compile and compile_backend
(torch.compile of the original by inductor, and through fusedconv.compile_backend). All of a
model's contenders run in one process, cudnn.benchmark on before the first call, and take turns,
one call each in every round. Times are CUDA events (on a processor the wall clock) around one
call, after a warm-up, medians with the 10th and 90th percentile. Forward passes run without
gradients; forward and backward give those of inputs and parameters.

error_fp64 is of all outputs, in forward_backward of all gradients: the norm of the difference from
the same model in float64 over the norm of that. replaced are the chains that the conversion found
in modules and in forward code, left the modules it looked at and left alone.
"""


# ---- the models ----------------------------------------------------------------------------------


class Built(NamedTuple):
    """A model with random weights and the arguments of a call."""

    model: nn.Module
    args: tuple[Any, ...]


class MissingPackageError(ImportError):
    """The package that a model comes from is not installed."""


def imported(name: str) -> Any:
    """A module of a package; MissingPackageError where that is not installed."""
    package = name.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        raise MissingPackageError(f'{package} is not installed: pip install "fusedconv[models]"')
    _declare_operators_of_torchvision()  # transformers imports it too
    return importlib.import_module(name)


def _declare_operators_of_torchvision() -> None:
    """Where torchvision was built for another torch, its compiled operators do not load, and it
    cannot be imported before two of them are declared. Its heads need none."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    try:
        torch.ops.load_library(spec.origin.replace("__init__.py", "_C.so"))
    except OSError:
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                torch.library.define(
                    f"torchvision::{name}", "(Tensor a, Tensor b, float c) -> Tensor"
                )


def _monai(name: str, **keywords: Any) -> nn.Module:
    model: nn.Module = getattr(imported("monai.networks.nets"), name)(**keywords)
    return model


def unet(full: bool) -> Built:
    if full:  # the network of MONAI's tutorial on spleen segmentation
        size, keywords = 96, {"channels": (16, 32, 64, 128, 256), "strides": 4 * (2,)}
        keywords["num_res_units"] = 2
    else:
        size, keywords = 16, {"channels": (4, 8, 16), "strides": (2, 2), "act": "RELU"}
        keywords["num_res_units"] = 1
    model = _monai("UNet", spatial_dims=3, in_channels=1, out_channels=2, **keywords)
    return Built(model, (torch.randn(4 if full else 1, 1, *3 * (size,)),))


def unetr(full: bool) -> Built:
    keywords: dict[str, Any] = {"img_size": 3 * (96,), "feature_size": 16}
    if not full:
        keywords = {"img_size": (32, 32), "feature_size": 4, "hidden_size": 12, "mlp_dim": 16}
        keywords.update(num_heads=2, spatial_dims=2)
    model = _monai("UNETR", in_channels=1, out_channels=2, **keywords)
    return Built(model, (torch.randn(1, 1, *keywords["img_size"]),))


def swin_unetr(full: bool) -> Built:
    size, axes, keywords = 96, 3, {"feature_size": 48}
    if not full:
        size, axes, keywords = 64, 2, {"feature_size": 12}
        keywords.update(depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 2))
    model = _monai("SwinUNETR", in_channels=1, out_channels=2, spatial_dims=axes, **keywords)
    return Built(model, (torch.randn(1, 1, *axes * (size,)),))


def segresnet(full: bool) -> Built:
    size, keywords = 96, {"init_filters": 16}
    if not full:
        size, keywords = 8, {"init_filters": 8, "blocks_down": (1, 1), "blocks_up": (1,)}
    model = _monai(
        "SegResNet", spatial_dims=3, in_channels=1, out_channels=2, upsample_mode="deconv",
        **keywords,
    )  # fmt: skip
    return Built(model, (torch.randn(1, 1, *3 * (size,)),))


def mask_rcnn_head(full: bool) -> Built:
    heads = imported("torchvision.models.detection.mask_rcnn")
    batch, channels, classes = (100, 256, 91) if full else (2, 8, 3)
    model = heads.MaskRCNNPredictor(channels, channels, classes)
    return Built(model, (torch.randn(batch, channels, 14, 14),))


def keypoint_rcnn_head(full: bool) -> Built:
    heads = imported("torchvision.models.detection.keypoint_rcnn")
    batch, channels, points = (100, 512, 17) if full else (2, 8, 5)
    model = heads.KeypointRCNNPredictor(channels, points)
    return Built(model, (torch.randn(batch, channels, 14, 14),))


def sam_mask_decoder(full: bool) -> Built:
    sam = imported("transformers.models.sam.modeling_sam")
    prompts, size, config = 64, 64, sam.SamMaskDecoderConfig()
    if not full:
        prompts, size = 1, 8
        config = sam.SamMaskDecoderConfig(
            hidden_size=32, mlp_dim=32, num_hidden_layers=1, num_attention_heads=2,
            iou_head_hidden_dim=16, attention_downsample_rate=2, attn_implementation="eager",
        )  # fmt: skip
    hidden = config.hidden_size
    image, position, dense = (torch.randn(1, hidden, size, size) for _ in range(3))
    args = (image, position, torch.randn(1, prompts, 2, hidden), dense, True)
    return Built(sam.SamMaskDecoder(config), args)


def vitpose_decoder(full: bool) -> Built:
    vitpose = imported("transformers.models.vitpose.modeling_vitpose")
    batch, hidden, size, points = (64, 768, (16, 12), 17) if full else (2, 16, (8, 6), 3)
    backbone = imported("transformers").VitPoseBackboneConfig(hidden_size=hidden)
    config = vitpose.VitPoseConfig(backbone_config=backbone, num_labels=points)
    model = vitpose.VitPoseClassicDecoder(config)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.get_buffer("running_mean"))
            nn.init.uniform_(module.get_buffer("running_var"), 0.5, 2)
    return Built(model, (torch.randn(batch, hidden, *size),))


def dpt_neck(full: bool) -> Built:
    dpt = imported("transformers.models.dpt.modeling_dpt")
    if full:  # DPT-Large
        batch, patches, config = 4, 24, dpt.DPTConfig(
            hidden_size=1024, neck_hidden_sizes=[256, 512, 1024, 1024], num_hidden_layers=24,
            num_attention_heads=16, backbone_out_indices=[5, 11, 17, 23],
        )  # fmt: skip
    else:
        batch, patches, config = 1, 4, dpt.DPTConfig(
            hidden_size=16, neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=8, image_size=32,
            patch_size=8, backbone_out_indices=[0, 1, 2, 3], num_hidden_layers=4,
            num_attention_heads=2,
        )  # fmt: skip
    states = [torch.randn(batch, 1 + patches**2, config.hidden_size) for _ in range(4)]
    return Built(dpt.DPTNeck(config), (states, patches, patches))


#: Each builds a model and the arguments of a call: as the package has it by default, or small.
MODELS: dict[str, Callable[[bool], Built]] = {
    each.__name__: each
    for each in (
        unet, unetr, swin_unetr, segresnet, mask_rcnn_head, keypoint_rcnn_head, sam_mask_decoder,
        vitpose_decoder, dpt_neck,
    )
}  # fmt: skip


# ---- outputs and gradients -----------------------------------------------------------------------


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def on(args: Any, device: torch.device, dtype: torch.dtype, layout: str) -> Any:
    """The arguments of a call as leaves of a device, dtype and layout."""

    def moved(x: Tensor) -> Tensor:
        form = memory_format(x.dim(), layout) if x.dim() > 3 else torch.contiguous_format
        return x.detach().to(device, dtype, copy=True).contiguous(memory_format=form)

    return pytree.tree_map_only(Tensor, moved, args)


def output_gradients(model: nn.Module, args: Any) -> list[Tensor]:
    """Of a call's outputs: the same values in every dtype."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(output.shape, generator=generator).to(output.device, output.dtype)
        for output in outputs(model, args)
    ]


def gradients(model: nn.Module, args: Any, grads: Sequence[Tensor]) -> list[Tensor]:
    """The outputs' gradients by inputs and parameters, for those of the outputs; those that do not
    depend on a tensor are left out."""
    args = pytree.tree_map_only(Tensor, lambda x: x.detach().requires_grad_(), args)
    leaves = [*tensors(args), *model.parameters()]
    found = torch.autograd.grad(tensors(model(*args)), leaves, grads, allow_unused=True)
    return [each for each in found if each is not None]


def outputs(model: nn.Module, args: Any) -> list[Tensor]:
    with torch.no_grad():
        return tensors(model(*args))


def prepared(pass_: str, model: nn.Module, args: Any) -> Callable[[nn.Module], list[Tensor]]:
    """What runs a pass of a model or of its like, whatever it is computed from made before."""
    if pass_ == "forward":
        return lambda model: outputs(model, args)
    grads = output_gradients(model, args)
    return lambda model: gradients(model, args, grads)


def error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The norm of all differences over the norm of all that is exact."""
    pairs = list(zip(found, exact, strict=True))
    off = sum(float((a.double() - b).square().sum()) for a, b in pairs)
    return (off / sum(float(b.square().sum()) for b in exact)) ** 0.5


# ---- measuring -----------------------------------------------------------------------------------


def contenders(
    built: Built, original: nn.Module, compiled: bool
) -> tuple[dict[str, nn.Module], Conversion]:
    """The models that are timed, by name, and what the conversion says."""
    converted = copy.deepcopy(original)
    report = fusedconv.convert(converted, built.args)
    models: dict[str, Any] = {"original": original, "converted": converted}
    if compiled:
        models["compile"] = torch.compile(copy.deepcopy(original))
        ours = fusedconv.compile_backend()
        models["compile_backend"] = torch.compile(copy.deepcopy(original), backend=ours)
    return models, report


def measured(
    build: Callable[[bool], Built],
    full: bool,
    device: torch.device,
    precision: str,
    layout: str,
    passes: Sequence[str],
    clock: Clock,
    compiled: bool,
) -> list[dict[str, Any]]:
    """The records of a model in a precision and layout."""
    dtype = DTYPES[precision]
    torch.manual_seed(0)
    model, args = build(full)
    model.eval()
    args = on(args, device, torch.float64, layout)
    model = model.to(device, torch.float64)
    exact = {name: prepared(name, model, args)(model) for name in passes}
    model = model.to(dtype)
    if layout == "nhwc":
        for parameter in model.parameters():
            if parameter.dim() > 3:
                parameter.data = parameter.data.contiguous(
                    memory_format=memory_format(parameter.dim(), layout)
                )
    built = Built(model, on(args, device, dtype, layout))
    models, report = contenders(built, model, compiled)
    chains = [str(each.chain) for each in (*report.modules, *report.joined)]
    records = []
    for name in passes:
        run = prepared(name, model, built.args)
        errors = {key: error(run(each), exact[name]) for key, each in models.items()}
        calls = [[functools.partial(run, each)] for each in models.values()]
        for (key, _), timing in zip(models.items(), clock.interleave(calls), strict=True):
            records.append(
                {
                    "workload": build.__name__,
                    "size": "full" if full else "small",
                    "pass": name,
                    "dtype": str(dtype).removeprefix("torch."),
                    "precision": precision,
                    "layout": layout,
                    "contender": key,
                    "error_fp64": errors[key],
                    **timing.fields(),
                    **({"replaced": chains} if key == "converted" else {}),
                }
            )
    torch.compiler.reset()
    return records


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        found = text.split(",")
        for each in found:
            if each not in known:
                raise argparse.ArgumentTypeError(
                    f"got {each!r}, expected some of {', '.join(known)}"
                )
        return found

    return parse


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", type=torch.device, default=default_device())
    parser.add_argument("--models", type=names(list(MODELS)), default=list(MODELS))
    parser.add_argument("--precisions", type=names(list(DTYPES)))
    parser.add_argument("--layouts", type=names(list(LAYOUTS)), default=["nchw"])
    parser.add_argument("--passes", type=names(list(PASSES)), default=list(PASSES))
    parser.add_argument("--small", action="store_true", help="the sizes of the tests")
    parser.add_argument("--compile", action="store_true", help="torch.compile beside, both ways")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each contender and pass")
    parser.add_argument("--output", type=Path, help="records, in a file of results")
    parser.add_argument("--commit", help="what the records are said to be of")
    arguments = parser.parse_args(argv)
    device: torch.device = arguments.device
    precisions = arguments.precisions or (
        ["tf32", "bf16"] if device.type == "cuda" else ["fp32", "bf16"]
    )
    if arguments.output is not None:
        check_writable(arguments.output)
    clock = Clock(device, arguments.seconds, 3)
    head = header(device_facts(device, device.index), arguments.commit, {}, METHOD)
    stamp = f"{head['date']} {head['commit']}"
    records: list[dict[str, Any]] = []
    for name in arguments.models:
        for precision in precisions:
            for layout in arguments.layouts:
                with precision_mode(precision, cudnn_benchmark=True), warnings.catch_warnings():
                    # What the packages warn of in their own code.
                    warnings.simplefilter("ignore")
                    try:
                        found = measured(
                            MODELS[name], not arguments.small, device, precision, layout,
                            arguments.passes, clock, arguments.compile,
                        )  # fmt: skip
                    except MissingPackageError as missing:
                        raise SystemExit(f"{name}: {missing}") from None
                found = [{**record, "run": stamp} for record in found]
                records += found
                if arguments.output is not None:
                    write(arguments.output, head, found)
                print(f"{name} {precision} {layout}: measured", flush=True)
    print_models(records)


if __name__ == "__main__":
    main()
