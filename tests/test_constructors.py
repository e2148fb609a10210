"""What the constructors of modules and drop-ins refuse, and what they take as torch's do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from systems import MODULES
from torch import nn

from fusedconv import (
    ConvTransposeActNorm2d,
    GroupNorm,
)
from fusedconv.models import SYSTEMS

CONV = {"in_channels": 4, "out_channels": 6, "kernel_size": 3}
NORM = {"num_groups": 2, "num_channels": 4}
SYSTEM1 = {
    "in_channels": 4, "out_channels": 6, "kernel_size": 3, "stride": 1, "groups": 8, "num_groups": 2
}  # fmt: skip
SYSTEM2 = {"in_channels": 4, "out_channels": 6, "kernel_size": 3, "groups": 2, "bias": True}
SYSTEM3 = {"num_features": 4, "num_groups": 2}

#: (arguments, message's name): values first, then types.
BAD_CONV = [
    ({"in_channels": 0}, ValueError, "in_channels: got 0, expected an integer of at least 1"),
    ({"in_channels": 4.0}, TypeError, "in_channels: got 4.0, expected an integer"),
    ({"out_channels": -6}, ValueError, "out_channels: got -6, expected an integer of at least 1"),
    ({"out_channels": True}, TypeError, "out_channels: got True, expected an integer"),
    ({"kernel_size": 0}, ValueError, "kernel_size: got 0, expected 2 integers of at least 1"),
    ({"kernel_size": (3, 3, 3)}, ValueError, r"kernel_size: got \(3, 3, 3\), expected 2 integers"),
    ({"kernel_size": "3"}, TypeError, "kernel_size: got '3', expected 2 integers"),
    ({"stride": (1, 0)}, ValueError, r"stride: got \(1, 0\), expected 2 integers of at least 1"),
    ({"stride": 1.5}, TypeError, "stride: got 1.5, expected 2 integers"),
    ({"padding": -1}, ValueError, "padding: got -1, expected 2 integers of at least 0"),
    ({"padding": "same"}, TypeError, "padding: got 'same', expected 2 integers"),
    ({"output_padding": 1}, ValueError, r"output_padding: got \(1, 1\), expected each smaller"),
    (
        {"output_padding": (1, 2), "stride": 2},
        ValueError,
        r"output_padding: got \(1, 2\), expected each smaller than stride \(2, 2\) or dilation",
    ),
    ({"groups": 0}, ValueError, "groups: got 0, expected an integer of at least 1"),
    ({"groups": 3}, ValueError, "groups: got 3, expected a positive divisor of 4 input channels"),
    ({"groups": 4}, ValueError, "groups: got 4, expected a positive divisor of 6 output channels"),
    ({"bias": None}, TypeError, "bias: got None, expected a bool"),
    ({"dilation": 0}, ValueError, "dilation: got 0, expected 2 integers of at least 1"),
    ({"padding_mode": "reflect"}, ValueError, "padding_mode: got 'reflect', expected one of"),
    ({"device": "nowhere"}, ValueError, "device: got 'nowhere', expected a device"),
    ({"device": 1.5}, TypeError, "device: got 1.5, expected a device"),
    ({"dtype": torch.int32}, TypeError, "dtype: got torch.int32, expected a floating-point dtype"),
    ({"dtype": "float32"}, TypeError, "dtype: got 'float32', expected a floating-point dtype"),
    ({"num_groups": 0}, ValueError, "num_groups: got 0, expected an integer of at least 1 or None"),
    ({"num_groups": 4}, ValueError, "num_groups: got 4, expected a positive divisor of 6 output"),
    ({"num_groups": 2.0}, TypeError, "num_groups: got 2.0, expected an integer"),
    ({"eps": float("nan")}, ValueError, "eps: got nan, expected a finite number"),
    ({"eps": "1e-5"}, TypeError, "eps: got '1e-5', expected a finite number"),
    ({"affine": "yes"}, TypeError, "affine: got 'yes', expected a bool"),
    ({"activation": "unknown"}, ValueError, "activation: got 'unknown', expected None or one of"),
    ({"activation": torch.relu}, TypeError, "activation: got <built-in method relu"),
    ({"order": "norm"}, ValueError, "order: got 'norm', expected one of 'act_norm', 'norm_act'"),
    ({"order": None}, TypeError, "order: got None, expected one of"),
    ({"precision": "half"}, ValueError, "precision: got 'half', expected None or one of 'tf32'"),
    (
        {"precision": "tf32", "dtype": torch.float16},
        ValueError,
        "precision: got 'tf32' for input of float16, expected 'fp16' or None",
    ),
    (
        {"precision": "fp16", "dtype": torch.float32},
        ValueError,
        "precision: got 'fp16' for input of float32, expected 'tf32', 'fp32' or None",
    ),
]


@pytest.mark.parametrize(("bad", "error", "message"), BAD_CONV, ids=lambda value: str(value)[:40])
def test_the_general_module_refuses(bad, error, message):
    ConvTransposeActNorm2d(**CONV)
    with pytest.raises(error, match=f"^{message}"):
        ConvTransposeActNorm2d(**{**CONV, **bad})


@pytest.mark.parametrize("axes", MODULES)
def test_axes_are_the_modules_own(axes):
    with pytest.raises(ValueError, match=f"^kernel_size: got .*, expected {axes} integer"):
        MODULES[axes](4, 6, (3,) * (axes + 1))
    assert MODULES[axes](4, 6, (3,) * axes).conv_transpose.kernel_size == (3,) * axes


@pytest.mark.parametrize(("bad", "error", "message"), [
    ({"num_groups": 0}, ValueError, "num_groups: got 0, expected an integer of at least 1"),
    ({"num_groups": 3}, ValueError, "num_groups: got 3, expected a positive divisor of 4 channels"),
    ({"num_groups": None}, TypeError, "num_groups: got None, expected an integer"),
    ({"num_channels": -4}, ValueError, "num_channels: got -4, expected an integer of at least 0"),
    ({"num_channels": "4"}, TypeError, "num_channels: got '4', expected an integer"),
    ({"eps": float("inf")}, ValueError, "eps: got inf, expected a finite number"),
    ({"affine": 2}, TypeError, "affine: got 2, expected a bool"),
    ({"device": "nowhere"}, ValueError, "device: got 'nowhere', expected a device"),
    ({"dtype": torch.bool}, TypeError, "dtype: got torch.bool, expected a floating-point"),
    ({"activation": "unknown"}, ValueError, "activation: got 'unknown', expected None or one of"),
    ({"order": "norm"}, ValueError, "order: got 'norm', expected one of"),
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_group_norm_refuses(bad, error, message):
    with pytest.raises(error, match=f"^{message}"):
        GroupNorm(**{**NORM, **bad})


@pytest.mark.parametrize(("name", "good", "bad", "error", "message"), [
    ("system1", SYSTEM1, {"in_channels": 0}, ValueError, "in_channels: got 0"),
    ("system1", SYSTEM1, {"out_channels": 6.0}, TypeError, "out_channels: got 6.0"),
    ("system1", SYSTEM1, {"kernel_size": (3,) * 3}, ValueError, "kernel_size: got .3, 3, 3."),
    ("system1", SYSTEM1, {"stride": 0}, ValueError, "stride: got 0, expected 2 integers"),
    ("system1", SYSTEM1, {"num_groups": 4}, ValueError, "num_groups: got 4, expected a positive"),
    ("system1", SYSTEM1, {"num_groups": 0}, ValueError, "num_groups: got 0"),
    ("system2", SYSTEM2, {"in_channels": "4"}, TypeError, "in_channels: got '4'"),
    ("system2", SYSTEM2, {"out_channels": 0}, ValueError, "out_channels: got 0"),
    ("system2", SYSTEM2, {"kernel_size": -1}, ValueError, "kernel_size: got -1, expected 3"),
    ("system2", SYSTEM2, {"groups": 4}, ValueError, "groups: got 4, expected a positive divisor"),
    ("system2", SYSTEM2, {"groups": 0}, ValueError, "groups: got 0"),
    ("system2", SYSTEM2, {"bias": "no"}, TypeError, "bias: got 'no', expected a bool"),
    ("system3", SYSTEM3, {"num_features": -4}, ValueError, "num_features: got -4"),
    ("system3", SYSTEM3, {"num_features": None}, TypeError, "num_features: got None"),
    ("system3", SYSTEM3, {"num_groups": 3}, ValueError, "num_groups: got 3, expected a positive"),
    ("system3", SYSTEM3, {"num_groups": 1.0}, TypeError, "num_groups: got 1.0"),
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_the_drop_ins_refuse(name, good, bad, error, message):
    SYSTEMS[name].model(**good)
    with pytest.raises(error, match=f"^{message}"):
        SYSTEMS[name].model(**{**good, **bad})


@pytest.mark.parametrize("axes", MODULES)
def test_numpys_integers_and_lists_are_taken(axes):
    module = MODULES[axes](
        np.int64(4), np.int32(6), [np.int64(3)], stride=[2], padding=np.int64(1),
        output_padding=[1] * axes, groups=np.int8(2), dilation=np.int64(1),
        num_groups=np.int64(3), eps=np.float32(0.25), bias=1, affine=0,
    )  # fmt: skip
    conv = module.conv_transpose
    for values, expected in (
        (conv.kernel_size, 3), (conv.stride, 2), (conv.padding, 1), (conv.output_padding, 1)
    ):  # fmt: skip
        assert values == (expected,) * axes
        assert all(type(value) is int for value in values)
    assert (type(conv.groups), module.group_norm.eps) == (int, 0.25)
    assert conv.bias is not None and module.group_norm.weight is None
    x = torch.randn(2, 4, *(5,) * axes)
    torch.testing.assert_close(module(x), module.group_norm(conv(x)), rtol=1e-4, atol=1e-5)


def test_the_drop_ins_take_what_the_originals_take():
    for name, arguments in (
        ("system1", (np.int64(4), 6, (3, 2), [2, 1], None, np.int64(3))),
        ("system2", (4, np.int64(6), [3, 2, 1], 2, 1)),
        ("system3", (np.int64(6), np.int64(3))),
    ):
        system = SYSTEMS[name]
        modules = []
        for make in (system.original, system.model):
            torch.manual_seed(5)
            modules.append((make(*arguments), torch.rand(2)))
        (original, after), (model, after_model) = modules
        assert torch.equal(after, after_model)
        for key, value in original.state_dict().items():
            assert torch.equal(model.state_dict()[key], value), key


def test_no_choice_forbids_a_later_move_to_another_dtype():
    module = ConvTransposeActNorm2d(4, 6, 3, precision="fp16").half()
    assert module(torch.randn(1, 4, 5, 5).half()).dtype == torch.float16
    assert ConvTransposeActNorm2d(4, 6, 3, precision="bf16", dtype=torch.bfloat16) is not None


def test_a_refusal_consumes_no_random_numbers():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    for make in (
        lambda: ConvTransposeActNorm2d(4, 6, 3, num_groups=4),
        lambda: SYSTEMS["system1"].model(4, 6, 3, 1, 1, 4),
    ):
        with pytest.raises(ValueError, match="num_groups"):
            make()
    assert torch.equal(torch.rand(2), expected)


def test_a_group_norm_without_channels_is_torchs():
    x = torch.empty(2, 0, 3)
    try:
        nn.GroupNorm(1, 0)(x)
    except RuntimeError:  # of later versions of torch
        with pytest.raises(ValueError, match=r"^input: got shape \(2, 0, 3\)"):
            GroupNorm(1, 0)(x)
    else:
        assert GroupNorm(1, 0)(x).shape == x.shape
