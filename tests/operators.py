"""The operators of torch.library, and arguments for them in every form that is served."""

from __future__ import annotations

import torch
from reference import LAYOUTS
from torch._subclasses.fake_tensor import FakeTensorMode

CONV = torch.ops.fusedconv.conv_transpose_act_norm
NORM = torch.ops.fusedconv.group_norm


def maker(seed, dtype, requires_grad):
    """make(*shape): normal values of one sequence, as leaves of autograd."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape):
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(dtype).requires_grad_(requires_grad)

    return make


def conv_arguments(
    *,
    axes=2,
    dtype=torch.float32,
    layout="nchw",
    weight_layout="nchw",
    requires_grad=False,
    save=False,
    activation="gelu",
    order="act_norm",
    num_groups=2,
    bias=True,
    affine=True,
    stride=1,
    output_padding=0,
    dilation=1,
    groups=1,
    channels=4,
    out_channels=6,
    precision=None,
    norm=None,
):
    """The operator's arguments, from a fixed seed."""
    make = maker(4, dtype, requires_grad)
    x = LAYOUTS[layout](make(2, channels, *(5, 6, 4)[:axes]).detach())
    weight = LAYOUTS[weight_layout](
        make(channels, out_channels // groups, *(3, 2, 3)[:axes]).detach()
    )
    return (
        x.requires_grad_(requires_grad),
        weight.requires_grad_(requires_grad),
        make(out_channels) if bias else None,
        (stride,) * axes,
        (1,) * axes,
        (output_padding,) * axes,
        (dilation,) * axes,
        groups,
        activation,
        order,
        num_groups,
        make(out_channels) if (num_groups or norm) and affine else None,
        make(out_channels) if (num_groups or norm) and affine else None,
        1e-5,
        precision,
        None,
        norm,
        save,
    )


CONV_CASES = {
    "system 1": {},
    "after": {"order": "norm_act", "activation": "silu"},
    "no norm": {"num_groups": 0},
    "no norm, other order": {"num_groups": 0, "order": "norm_act"},
    "no activation": {"activation": "identity"},
    "neither": {"activation": "identity", "num_groups": 0, "bias": False},
    "no affine": {"affine": False, "bias": False, "activation": "relu"},
    "channels last": {"layout": "nhwc"},
    "strided": {"layout": "strided", "order": "norm_act"},
    "channels last weight": {"weight_layout": "nhwc"},
    "channels last and weight": {"layout": "nhwc", "weight_layout": "nhwc", "stride": 2},
    "strided weight": {"weight_layout": "strided"},
    "1D": {"axes": 1},
    "1D channels last": {"axes": 1, "layout": "nhwc"},
    "3D": {"axes": 3, "activation": "relu"},
    "3D channels last": {"axes": 3, "layout": "nhwc", "order": "norm_act"},
    "3D channels last weight": {"axes": 3, "weight_layout": "nhwc"},
    "stride": {"stride": 2, "output_padding": 1},
    "groups and dilation": {"groups": 2, "dilation": 2},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16, "layout": "nhwc"},
    "float64": {"dtype": torch.float64, "order": "norm_act"},
    "instance norm": {"norm": "instance", "num_groups": 0},
    "layer norm": {"norm": "layer", "num_groups": 0, "order": "norm_act"},
    "affine map": {"norm": "affine", "num_groups": 0, "layout": "nhwc"},
    "precision": {"precision": "fp32", "activation": "gelu_tanh"},
}


def norm_arguments(
    shape=(2, 6, 5, 4),
    num_groups=3,
    *,
    dtype=torch.float32,
    layout="nchw",
    requires_grad=False,
    activation="gelu",
    order="act_norm",
    affine=True,
):
    """The same of the normalisation."""
    make = maker(5, dtype, requires_grad)
    x = LAYOUTS[layout](make(*shape).detach()).requires_grad_(requires_grad)
    weight, bias = (make(shape[1]), make(shape[1])) if affine else (None, None)
    return x, num_groups, weight, bias, 1e-5, activation, order, None


NORM_CASES = {
    "plain": {"activation": "identity"},
    "before": {},
    "after": {"order": "norm_act", "activation": "silu"},
    "no affine": {"affine": False, "activation": "relu"},
    "channels last": {"layout": "nhwc"},
    "strided": {"layout": "strided", "order": "norm_act"},
    "2 axes": {"shape": (4, 6), "num_groups": 2},
    "3 axes": {"shape": (4, 6, 5), "num_groups": 2, "layout": "nhwc"},
    "5 axes": {"shape": (2, 6, 2, 3, 4), "num_groups": 6, "layout": "nhwc"},
    "bfloat16": {"dtype": torch.bfloat16, "layout": "nhwc"},
    "float16": {"dtype": torch.float16, "order": "norm_act"},
    "float64": {"dtype": torch.float64, "activation": "gelu_tanh"},
}


def of_fakes(operator, arguments):
    """What the operator's fake implementation returns for tensors like these."""
    with FakeTensorMode() as mode:
        return operator(
            *(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments)
        )
