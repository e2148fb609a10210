"""The general modules, against compositions of torch's operators."""

from __future__ import annotations

import copy
import pickle

import pytest
import reference
import torch
from reference import assert_as_accurate_as_torch
from systems import MODULES, SPATIAL, composition, perturbed, seeded
from torch import nn

from fusedconv import (
    ConvTransposeActNorm1d,
    ConvTransposeActNorm2d,
    ConvTransposeActNorm3d,
    GroupNorm,
)


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("order", reference.ORDERS)
@pytest.mark.parametrize("num_groups", [None, 1, 4, 8])
@pytest.mark.parametrize("axes", MODULES)
def test_module_against_composition(axes, num_groups, order, activation):
    module = perturbed(
        MODULES[axes](6, 8, 3, num_groups=num_groups, activation=activation, order=order)
    )
    x = torch.randn(2, 6, *SPATIAL[axes])
    exact = composition(module, x, torch.float64)
    torchs = composition(module, x, torch.float32)
    assert_as_accurate_as_torch(module(x), torchs, exact)
    with torch.no_grad():
        assert_as_accurate_as_torch(module(x), torchs, exact)


#: (in, out, kernel, keywords, spatial): what our kernels refuse, and what they must not confuse.
GEOMETRIES = [
    (4, 6, 2, {"stride": 2}, (5, 6)),
    (4, 6, 3, {"stride": 2, "padding": 1, "output_padding": 1}, (5, 6)),
    (4, 6, (3, 2), {"stride": (1, 3), "padding": (0, 1), "output_padding": (0, 2)}, (5, 6)),
    (4, 6, 3, {"groups": 2}, (5, 6)),
    (6, 6, 3, {"groups": 6, "stride": 2}, (5, 6)),
    (4, 6, 3, {"dilation": 2}, (5, 6)),
    (4, 6, (2, 4), {"dilation": (3, 1), "padding": (3, 2), "output_padding": (2, 0)}, (7, 6)),
    (4, 6, 1, {"bias": False}, (5, 6)),
    (1, 2, 5, {}, (1, 1)),
    (3, 4, 4, {"padding": 3}, (9, 8)),
    (4, 6, 3, {"padding": 4, "stride": 3}, (9, 8)),
    (4, 6, 2, {"stride": 3}, (5, 6)),
]


@pytest.mark.parametrize(
    ("channels", "out_channels", "kernel", "keywords", "spatial"), GEOMETRIES, ids=str
)
def test_geometries(channels, out_channels, kernel, keywords, spatial):
    for activation, num_groups in (("gelu", 2), ("silu", None)):
        module = perturbed(
            ConvTransposeActNorm2d(
                channels,
                out_channels,
                kernel,
                num_groups=num_groups,
                activation=activation,
                **keywords,
            )
        )
        for x in (torch.randn(3, channels, *spatial), torch.randn(1, channels, *spatial)):
            exact = composition(module, x, torch.float64)
            torchs = composition(module, x, torch.float32)
            assert_as_accurate_as_torch(module(x), torchs, exact)


def test_same_seed_same_parameters_as_the_composition():
    module = seeded(ConvTransposeActNorm2d, 4, 6, 3, stride=2, num_groups=3)
    torch.manual_seed(1)
    conv, norm = nn.ConvTranspose2d(4, 6, 3, stride=2), nn.GroupNorm(3, 6)
    assert torch.equal(module.conv_transpose.weight, conv.weight)
    assert torch.equal(module.conv_transpose.bias, conv.bias)
    module.conv_transpose.load_state_dict(conv.state_dict(), strict=True)
    module.group_norm.load_state_dict(norm.state_dict(), strict=True)
    assert list(module.state_dict()) == [
        "conv_transpose.weight",
        "conv_transpose.bias",
        "group_norm.weight",
        "group_norm.bias",
    ]


def test_arguments_of_torchs_modules_in_torchs_order():
    module = ConvTransposeActNorm2d(
        4, 6, (3, 2), (2, 2), (1, 0), (1, 1), 2, False, (1, 1), "zeros", None, torch.float64,
        num_groups=3, eps=1e-3, affine=False,
    )  # fmt: skip
    conv = module.conv_transpose
    assert (conv.kernel_size, conv.stride, conv.padding) == ((3, 2), (2, 2), (1, 0))
    assert (conv.output_padding, conv.groups, conv.bias) == ((1, 1), 2, None)
    assert conv.weight.dtype == torch.float64
    assert (module.group_norm.eps, module.group_norm.weight) == (1e-3, None)
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(module(x), composition(module, x, torch.float64))
    assert ConvTransposeActNorm2d(4, 6, 3, device="meta").conv_transpose.weight.is_meta


def test_without_norm_and_activation_it_is_the_convolution():
    module = ConvTransposeActNorm2d(4, 6, 3)
    assert module.group_norm is None
    x = torch.randn(2, 4, 5, 5)
    assert torch.equal(module(x), module.conv_transpose(x))
    assert list(module.state_dict()) == ["conv_transpose.weight", "conv_transpose.bias"]


@pytest.mark.parametrize("axes", MODULES)
def test_output_size_picks_among_those_a_stride_allows(axes):
    module = perturbed(MODULES[axes](3, 4, 3, stride=2, padding=1, num_groups=2))
    conv = module.conv_transpose
    x = torch.randn(2, 3, *SPATIAL[axes])
    smallest = module(x).shape[2:]
    for extra in (0, 1):
        size = [extent + extra for extent in smallest]
        result = module(x, output_size=size)
        assert list(result.shape[2:]) == size
        assert result.shape == conv(x, output_size=size).shape
        exact = composition(module, x, torch.float64, (extra,) * axes)
        assert_as_accurate_as_torch(
            result, composition(module, x, torch.float32, (extra,) * axes), exact
        )
        assert torch.equal(module(x, output_size=[2, 4, *size]), result)
    with pytest.raises(ValueError, match=r"^output_size: got \[.*\], expected from \[.*\] to \["):
        module(x, output_size=[extent + 2 for extent in smallest])
    with pytest.raises(ValueError, match=rf"^output_size: got .*, expected {axes} extents or"):
        module(x, output_size=[9] * (axes + 1))
    with pytest.raises(ValueError, match=r"^input: got shape \(3,\), expected"):
        module(torch.randn(3), output_size=smallest)


@pytest.mark.parametrize("size", [12, "ab", [12.0, 14.0], [True, 14], torch.ones(2)])
def test_an_output_size_of_another_type_is_refused(size):
    module = MODULES[2](3, 4, 3, stride=2)
    with pytest.raises(TypeError, match=r"^output_size: got .*, expected a sequence of integers"):
        module(torch.randn(2, 3, 5, 6), output_size=size)
    with pytest.raises(TypeError, match=r"^input: got list, expected torch\.Tensor"):
        module([1.0], output_size=[12, 14])


@pytest.mark.parametrize("axes", MODULES)
def test_unbatched_input_where_torchs_convolution_takes_it(axes):
    module = MODULES[axes](3, 4, 3, activation="gelu")
    x = torch.randn(3, *SPATIAL[axes])
    torch.testing.assert_close(module(x), module(x[None])[0])
    torch.testing.assert_close(module(x), torch.nn.functional.gelu(module.conv_transpose(x)))


def test_empty_batch():
    for module, x in (
        (ConvTransposeActNorm2d(3, 4, 3, num_groups=2, activation="relu"), torch.empty(0, 3, 5, 5)),
        (ConvTransposeActNorm1d(3, 4, 3), torch.empty(0, 3, 5)),
        (GroupNorm(3, 3, activation="gelu"), torch.empty(0, 3, 5, 5)),
        (GroupNorm(3, 3), torch.empty(0, 3)),
    ):
        x.requires_grad_()
        result = module(x)
        assert result.shape[0] == 0
        if isinstance(module, GroupNorm):
            assert result.shape == x.shape
        result.sum().backward()
        assert x.grad.shape == x.shape
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


def test_group_norm_module_is_torchs_with_an_activation():
    module = seeded(GroupNorm, 4, 12, 1e-3, activation="silu", order="norm_act")
    assert isinstance(module, nn.GroupNorm)
    plain = nn.GroupNorm(4, 12, 1e-3)
    module.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(module.state_dict(), strict=True)
    perturbed(module)
    for shape in ((2, 12), (2, 12, 5), (2, 12, 5, 6), (2, 12, 2, 3, 4), (2, 12, 1, 2, 2, 3)):
        x = torch.randn(shape)
        arguments = (4, module.weight, module.bias, 1e-3, "silu", "norm_act")
        exact = reference.group_norm(
            x.double(), 4, module.weight.double(), module.bias.double(), *arguments[3:]
        )
        assert_as_accurate_as_torch(module(x), reference.group_norm(x, *arguments), exact)
    assert GroupNorm(4, 12, affine=False).weight is None
    assert GroupNorm(4, 12, device="meta", dtype=torch.float16).weight.dtype == torch.float16


def test_repr_shows_what_the_modules_do():
    module = ConvTransposeActNorm2d(
        4, 6, 3, num_groups=2, activation="gelu", order="norm_act", precision="fp32"
    )
    text = repr(module)
    for part in ("activation='gelu'", "order='norm_act'", "precision='fp32'", "GroupNorm(2, 6"):
        assert part in text
    assert "2, 4" in repr(GroupNorm(2, 4, activation="relu"))
    assert "activation='relu'" in repr(GroupNorm(2, 4, activation="relu"))


def test_state_of_modules_survives_copy_and_pickle():
    for module, x in (
        (
            ConvTransposeActNorm3d(3, 4, 2, num_groups=2, activation="silu", order="norm_act"),
            torch.randn(1, 3, 3, 4, 5),
        ),
        (GroupNorm(2, 4, activation="gelu_tanh"), torch.randn(2, 4, 6)),
    ):
        perturbed(module)
        expected = module(x)
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert torch.equal(other(x), expected)
            assert repr(other) == repr(module)


def test_a_parametrised_weight_is_followed():
    """Weight normalisation replaces the parameter by a computed tensor at each call."""
    module = ConvTransposeActNorm2d(4, 6, 3, num_groups=2, activation="gelu")
    nn.utils.parametrizations.weight_norm(module.conv_transpose)
    x = torch.randn(2, 4, 5, 5)
    module(x).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
    exact = composition(module, x, torch.float64)
    assert_as_accurate_as_torch(module(x), composition(module, x, torch.float32), exact)
