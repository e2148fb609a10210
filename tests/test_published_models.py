"""Models of packages that people use, converted: random weights, forward and gradients.

``pip install fusedconv[models]`` brings the packages; a test whose package is not there is skipped.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fusedconv

# What the packages and torch.compile warn of in their own code is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")


class Case(NamedTuple):
    """A model, the arguments of a call, and what the conversion is to find: chains as the report
    shows them, in modules and in forward code."""

    model: nn.Module
    args: tuple[Any, ...]
    modules: list[str]
    joined: list[str]


def imported(name: str) -> Any:
    """A module of a package; without the package the test is skipped."""
    package = name.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if package == "torchvision":
        declare_operators_of_torchvision()
    return importlib.import_module(name)


def declare_operators_of_torchvision() -> None:
    """Where torchvision was built for another torch, its compiled operators do not load, and it
    cannot be imported before two of them are declared. Its heads need none."""
    extension = importlib.util.find_spec("torchvision").origin.replace("__init__.py", "_C.so")
    try:
        torch.ops.load_library(extension)
    except OSError:
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                torch.library.define(
                    f"torchvision::{name}", "(Tensor a, Tensor b, float c) -> Tensor"
                )


def monai(name: str, **keywords: Any) -> nn.Module:
    return getattr(imported("monai.networks.nets"), name)(**keywords)


def unet() -> Case:
    model = monai(
        "UNet", spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2),
        act="RELU", num_res_units=1,
    )  # fmt: skip
    up = ["ConvTranspose3d -> instance_norm -> relu"]
    return Case(model, (torch.randn(1, 1, 16, 16, 16),), 2 * up, [])


def unetr() -> Case:
    model = monai(
        "UNETR", in_channels=1, out_channels=2, img_size=(32, 32), feature_size=4, hidden_size=12,
        mlp_dim=16, num_heads=2, spatial_dims=2,
    )  # fmt: skip
    return Case(model, (torch.randn(1, 1, 32, 32),), 10 * ["ConvTranspose2d"], [])


def swin_unetr() -> Case:
    model = monai(
        "SwinUNETR", in_channels=1, out_channels=2, feature_size=12, depths=(1, 1, 1, 1),
        num_heads=(1, 2, 2, 2), spatial_dims=2,
    )  # fmt: skip
    return Case(model, (torch.randn(1, 1, 64, 64),), 5 * ["ConvTranspose2d"], [])


def segresnet() -> Case:
    model = monai(
        "SegResNet", spatial_dims=3, init_filters=8, in_channels=1, out_channels=2,
        blocks_down=(1, 1), blocks_up=(1,), upsample_mode="deconv",
    )  # fmt: skip
    modules = ["group_norm -> relu", *6 * ["GroupNorm"], "ConvTranspose3d"]
    joined = 6 * ["group_norm -> relu"]
    return Case(model, (torch.randn(1, 1, 8, 8, 8),), modules, joined)


def mask_rcnn_head() -> Case:
    heads = imported("torchvision.models.detection.mask_rcnn")
    model = heads.MaskRCNNPredictor(8, 8, 3)
    return Case(model, (torch.randn(2, 8, 14, 14),), ["ConvTranspose2d -> relu"], [])


def keypoint_rcnn_head() -> Case:
    heads = imported("torchvision.models.detection.keypoint_rcnn")
    model = heads.KeypointRCNNPredictor(8, 5)
    return Case(model, (torch.randn(2, 8, 14, 14),), ["ConvTranspose2d"], [])


def sam_mask_decoder() -> Case:
    sam = imported("transformers.models.sam.modeling_sam")
    config = sam.SamMaskDecoderConfig(
        hidden_size=32, mlp_dim=32, num_hidden_layers=1, num_attention_heads=2,
        iou_head_hidden_dim=16, attention_downsample_rate=2, attn_implementation="eager",
    )  # fmt: skip
    image, position, dense = (torch.randn(1, 32, 8, 8) for _ in range(3))
    args = (image, position, torch.randn(1, 1, 2, 32), dense, True)
    joined = ["conv_transpose2d -> layer_norm -> gelu", "conv_transpose2d -> gelu"]
    return Case(sam.SamMaskDecoder(config), args, 2 * ["ConvTranspose2d"], joined)


def vitpose_decoder() -> Case:
    vitpose = imported("transformers.models.vitpose.modeling_vitpose")
    backbone = imported("transformers").VitPoseBackboneConfig(hidden_size=16)
    config = vitpose.VitPoseConfig(backbone_config=backbone, num_labels=3)
    model = vitpose.VitPoseClassicDecoder(config).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    joined = 2 * ["conv_transpose2d -> batch_norm -> relu"]
    return Case(model, (torch.randn(2, 16, 8, 6),), 2 * ["ConvTranspose2d"], joined)


def dpt_neck() -> Case:
    dpt = imported("transformers.models.dpt.modeling_dpt")
    config = dpt.DPTConfig(
        hidden_size=16, neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=8, image_size=32,
        patch_size=8, backbone_out_indices=[0, 1, 2, 3], num_hidden_layers=4, num_attention_heads=2,
    )  # fmt: skip
    states = [torch.randn(1, 17, 16) for _ in range(4)]
    return Case(dpt.DPTNeck(config), (states, 4, 4), 2 * ["ConvTranspose2d"], [])


CASES: list[Callable[[], Case]] = [
    unet, unetr, swin_unetr, segresnet, mask_rcnn_head, keypoint_rcnn_head, sam_mask_decoder,
    vitpose_decoder, dpt_neck,
]  # fmt: skip


def results(model: nn.Module, args: Any, dtype: torch.dtype) -> list[Tensor | None]:
    """Outputs, and the gradients of inputs and parameters."""
    args = pytree.tree_map_only(
        Tensor, lambda x: x.detach().to(dtype, copy=True).requires_grad_(), args
    )
    inputs = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
    torch.manual_seed(0)
    outputs = [leaf for leaf in pytree.tree_leaves(model(*args)) if isinstance(leaf, Tensor)]
    sum(output.sin().sum() for output in outputs).backward()
    leaves = [*inputs, *model.parameters()]
    return [*(output.detach() for output in outputs), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.usefixtures("compiled", "every_norm")
def test_a_published_model_is_its_original(case):
    torch.manual_seed(0)
    model, args, modules, joined = case()
    original, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    report = fusedconv.convert(model)
    ours, torchs = (results(each, args, torch.float32) for each in (model, original))
    exacts = results(exact, args, torch.float64)
    assert sorted(each.chain for each in report.modules) == sorted(modules), str(report)
    assert sorted(each.chain for each in report.joined) == sorted(joined), str(report)
    largest = max(each.abs().max() for each in exacts if each is not None)
    for our, their, right in zip(ours, torchs, exacts, strict=True):
        if right is None:
            assert our is None
            continue
        error, limit = ((each - right).abs().max() for each in (our, their))
        # The gradient of what a normalisation takes away is zero but for roundings of the others.
        assert error <= 2 * limit + 1e-6 * (largest + right.abs().max()), (error, limit)
    assert list(model.state_dict()) == list(original.state_dict())
    original.load_state_dict(model.state_dict())
    model.load_state_dict(original.state_dict())
