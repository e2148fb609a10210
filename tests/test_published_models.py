"""Models of packages that people use, converted: random weights, forward and gradients.

``pip install fusedconv[models]`` brings the packages; a test whose package is not there is skipped.
"""

from __future__ import annotations

import copy
import json
from typing import Any, NamedTuple

import pytest
import torch
from scripts import script
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fusedconv

published = script("published_models")

# What the packages and torch.compile warn of in their own code is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")


class Chains(NamedTuple):
    """What the conversion is to find, as the report shows it: in modules, and in forward code that
    is called without gradients."""

    modules: list[str]
    joined: list[str]


EXPECTED = {
    "unet": Chains(2 * ["ConvTranspose3d -> instance_norm -> relu"], []),
    "unetr": Chains(10 * ["ConvTranspose2d"], []),
    "swin_unetr": Chains(5 * ["ConvTranspose2d"], []),
    "segresnet": Chains(
        ["group_norm -> relu", *6 * ["GroupNorm"], "ConvTranspose3d"], 6 * ["group_norm -> relu"]
    ),
    "mask_rcnn_head": Chains(["ConvTranspose2d -> relu"], []),
    "keypoint_rcnn_head": Chains(["ConvTranspose2d"], []),
    "sam_mask_decoder": Chains(
        2 * ["ConvTranspose2d"],
        ["conv_transpose2d -> layer_norm -> gelu", "conv_transpose2d -> gelu"],
    ),
    "vitpose_decoder": Chains(
        2 * ["ConvTranspose2d"], 2 * ["conv_transpose2d -> batch_norm -> relu"]
    ),
    "dpt_neck": Chains(2 * ["ConvTranspose2d"], []),
}


def built(name: str) -> Any:
    """A small model and its arguments; without its package the test is skipped."""
    torch.manual_seed(0)
    try:
        return published.MODELS[name](False)
    except published.MissingPackageError as missing:
        pytest.skip(str(missing))


def results(model: nn.Module, args: Any, dtype: torch.dtype) -> list[Tensor | None]:
    """Outputs, those of a call without gradients, and the gradients of inputs and parameters."""
    args = pytree.tree_map_only(
        Tensor, lambda x: x.detach().to(dtype, copy=True).requires_grad_(), args
    )
    torch.manual_seed(0)
    with torch.no_grad():
        plain = published.tensors(model(*args))
    torch.manual_seed(0)
    outputs = published.tensors(model(*args))
    sum(output.sin().sum() for output in outputs).backward()
    leaves = [*published.tensors(args), *model.parameters()]
    return [*plain, *(output.detach() for output in outputs), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("name", published.MODELS)
@pytest.mark.usefixtures("compiled")
def test_a_published_model_is_its_original(name):
    model, args = built(name)
    if name == "vitpose_decoder":  # a BatchNorm is joined in evaluation only
        model.eval()
    modules, joined = EXPECTED[name]
    original, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    report = fusedconv.convert(model)
    with torch.no_grad():  # nor where gradients are wanted
        model(*args)
    assert sorted(each.chain for each in report.modules) == sorted(modules), str(report)
    assert sorted(each.chain for each in report.joined) == sorted(joined), str(report)
    ours, torchs = (results(each, args, torch.float32) for each in (model, original))
    exacts = results(exact, args, torch.float64)
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


def test_models_are_timed_before_and_after(tmp_path, capsys):
    built("mask_rcnn_head")
    path = tmp_path / "models.json"
    published.main([
        "--device=cpu", "--small", "--models=mask_rcnn_head", "--precisions=fp32", "--layouts=nhwc",
        "--seconds=0.01", f"--output={path}",
    ])  # fmt: skip
    records = json.loads(path.read_text())["records"]
    cells = [(each["contender"], each["pass"]) for each in records]
    both = ("original", "converted")
    assert cells == [(each, name) for name in ("forward", "forward_backward") for each in both]
    assert records[1]["replaced"] == ["ConvTranspose2d -> relu"]
    assert all(0 <= each["error_fp64"] < 1e-5 and each["median_ms"] > 0 for each in records)
    table = capsys.readouterr().out
    assert "| mask_rcnn_head forward_backward fp32 nhwc | " in table
    assert "1 ConvTranspose2d -> relu |" in table


@pytest.mark.parametrize("arguments", ["--models=unett", "--precisions=fp64", "--layouts=NCHW"])
def test_what_is_not_known_is_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        published.main([arguments])
    assert f"got {arguments.partition('=')[2]!r}, expected some of" in capsys.readouterr().err
