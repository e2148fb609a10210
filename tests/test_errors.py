"""Bad arguments raise, naming argument, value and expectation; odd but valid ones are served."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch

import fusedconv
from fusedconv import ConvTransposeActNorm2d, GroupNorm
from fusedconv.functional import conv_transpose_act_norm, group_norm


def conv(**changes):
    """A valid call, changed."""
    arguments = {
        "input": torch.ones(2, 4, 5, 5),
        "weight": torch.ones(4, 6, 3, 3),
        "bias": torch.ones(6),
        "activation": "gelu",
        "num_groups": 2,
        "norm_weight": torch.ones(6),
        "norm_bias": torch.ones(6),
    }
    return conv_transpose_act_norm(**{**arguments, **changes})


def norm(**changes):
    arguments = {
        "input": torch.ones(2, 4, 5, 5),
        "num_groups": 2,
        "weight": torch.ones(4),
        "bias": torch.ones(4),
    }
    return group_norm(**{**arguments, **changes})


def meta(*shape):
    return torch.empty(shape, device="meta")


NAN, INF = float("nan"), float("inf")

#: What is wrong, the exception, and what its message must hold: the argument first, then what was
#: got, then what is expected.
CONV_CASES = {
    # rank
    "input too flat": (
        {"input": torch.ones(2, 4)}, ValueError, r"^input: got shape \(2, 4\), expected 4 axes",
    ),
    "input too deep": (
        {"input": torch.ones(2, 4, 5, 5, 5)}, ValueError, r"^input: got shape .*expected 4 axes",
    ),
    "input unbatched with a norm": (
        {"input": torch.ones(4, 5, 5)}, ValueError, r"^input: got shape \(4, 5, 5\), expected",
    ),
    "input a scalar": ({"input": torch.tensor(1.0)}, ValueError, r"^input: got shape \(\), "),
    "weight too flat": (
        {"weight": torch.ones(4, 6)}, ValueError, r"^weight: got shape \(4, 6\), expected \[C",
    ),
    "weight too deep": (
        {"weight": torch.ones(4, 6, 1, 1, 1, 1)}, ValueError, r"^weight: got shape .*expected \[C",
    ),
    "bias a matrix": (
        {"bias": torch.ones(6, 1)}, ValueError, r"^bias: got shape \(6, 1\), expected \(6,\)",
    ),
    # types
    "input a list": ({"input": [1.0]}, TypeError, r"^input: got list, expected torch.Tensor"),
    "weight none": ({"weight": None}, TypeError, r"^weight: got NoneType, expected torch.Tensor"),
    "bias a number": ({"bias": 1.0}, TypeError, r"^bias: got float, expected"),
    "norm_weight a list": ({"norm_weight": [1.0] * 6}, TypeError, r"^norm_weight: got list, "),
    "input sparse": (
        {"input": torch.ones(2, 4, 5, 5).to_sparse()}, TypeError,
        r"^input: got layout torch.sparse_coo, expected torch.strided",
    ),
    # dtype
    "input of integers": (
        {"input": torch.ones(2, 4, 5, 5, dtype=torch.int32)}, TypeError,
        r"^input: got dtype torch.int32, expected a floating-point dtype",
    ),
    "input complex": (
        {"input": torch.ones(2, 4, 5, 5, dtype=torch.complex64)}, TypeError,
        r"^input: got dtype torch.complex64, expected a floating-point dtype",
    ),
    "weight of another dtype": (
        {"weight": torch.ones(4, 6, 3, 3).half()}, TypeError,
        r"^weight: got dtype torch.float16, expected torch.float32",
    ),
    "bias of another dtype": (
        {"bias": torch.ones(6).double()}, TypeError,
        r"^bias: got dtype torch.float64, expected torch.float32",
    ),
    "norm_bias of another dtype than norm_weight": (
        {"norm_bias": torch.ones(6).half()}, TypeError,
        r"^norm_bias: got dtype torch.float16, expected torch.float32",
    ),
    "norm parameters of a dtype that nothing serves": (
        {"norm_weight": torch.ones(6).double(), "norm_bias": torch.ones(6).double()}, TypeError,
        r"^norm_weight: got dtype torch.float64, expected",
    ),
    "norm parameters of integers": (
        {"norm_weight": torch.ones(6).int(), "norm_bias": torch.ones(6).int()}, TypeError,
        r"^norm_weight: got dtype torch.int32, expected",
    ),
    # device mix
    "weight elsewhere": (
        {"weight": meta(4, 6, 3, 3)}, ValueError, r"^weight: got device meta, expected cpu",
    ),
    "bias elsewhere": ({"bias": meta(6)}, ValueError, r"^bias: got device meta, expected cpu"),
    "norm_weight elsewhere": (
        {"norm_weight": meta(6)}, ValueError, r"^norm_weight: got device meta, expected cpu",
    ),
    "norm_bias elsewhere": (
        {"norm_bias": meta(6)}, ValueError, r"^norm_bias: got device meta, expected cpu",
    ),
    # channels
    "input of other channels": (
        {"input": torch.ones(2, 5, 5, 5)}, ValueError, r"^input: got 5 channels, expected 4",
    ),
    "bias of other channels": (
        {"bias": torch.ones(4)}, ValueError, r"^bias: got shape \(4,\), expected \(6,\)",
    ),
    "norm_weight of other channels": (
        {"norm_weight": torch.ones(4)}, ValueError,
        r"^norm_weight: got shape \(4,\), expected \(6,\)",
    ),
    "norm_bias of other channels": (
        {"norm_bias": torch.ones(1)}, ValueError, r"^norm_bias: got shape \(1,\), expected \(6,\)",
    ),
    # groups
    "groups do not divide": (
        {"groups": 3}, ValueError, r"^groups: got 3, expected a positive divisor of 4 input",
    ),
    "groups zero": ({"groups": 0}, ValueError, r"^groups: got 0, expected a positive divisor"),
    "groups negative": ({"groups": -2}, ValueError, r"^groups: got -2, expected a positive"),
    "num_groups does not divide": (
        {"num_groups": 4}, ValueError, r"^num_groups: got 4, expected a positive divisor of 6",
    ),
    "num_groups zero": ({"num_groups": 0}, ValueError, r"^num_groups: got 0, expected a positive"),
    "num_groups negative": ({"num_groups": -3}, ValueError, r"^num_groups: got -3, expected a pos"),
    "norm_weight without num_groups": (
        {"num_groups": None}, ValueError, r"^norm_weight, norm_bias: got tensors, expected None",
    ),
    "norm_bias without num_groups": (
        {"num_groups": None, "norm_weight": None}, ValueError,
        r"^norm_weight, norm_bias: got tensors, expected None",
    ),
    # eps
    "eps nan": ({"eps": NAN}, ValueError, r"^eps: got nan, expected a finite number"),
    "eps infinite": ({"eps": INF}, ValueError, r"^eps: got inf, expected a finite number"),
    "eps minus infinite": ({"eps": -INF}, ValueError, r"^eps: got -inf, expected a finite number"),
    # geometry
    "stride zero": ({"stride": 0}, ValueError, r"^stride: got 0, expected 2 integers of at l"),
    "stride too long": (
        {"stride": (1, 1, 1)}, ValueError, r"^stride: got \(1, 1, 1\), expected 2 integers",
    ),
    "stride empty": ({"stride": []}, ValueError, r"^stride: got \[\], expected 2 integers"),
    "stride true": ({"stride": True}, TypeError, r"^stride: got True, expected 2 integers"),
    "stride of a bool": (
        {"stride": (1, True)}, TypeError, r"^stride: got \(1, True\), expected 2 integers",
    ),
    "stride bytes": ({"stride": b"11"}, TypeError, r"^stride: got b'11', expected 2 integers"),
    "stride a tensor": (
        {"stride": torch.ones(2)}, TypeError, r"^stride: got a tensor of shape \(2,\), expected 2",
    ),
    "stride endless": (
        {"stride": list(range(1000))}, ValueError, r"^stride: got \[0, 1, .{70}\.\.\., expected 2",
    ),
    "stride text": ({"stride": "11"}, TypeError, r"^stride: got '11', expected 2 integers"),
    "padding none": ({"padding": None}, TypeError, r"^padding: got None, expected 2 integers"),
    "groups a fraction": ({"groups": 1.0}, TypeError, r"^groups: got 1.0, expected an integer"),
    "groups none": ({"groups": None}, TypeError, r"^groups: got None, expected an integer"),
    "num_groups a fraction": (
        {"num_groups": 2.0}, TypeError, r"^num_groups: got 2.0, expected an integer or None",
    ),
    "num_groups true": (
        {"num_groups": True}, TypeError, r"^num_groups: got True, expected an integer or None",
    ),
    "num_groups a true tensor": (
        {"num_groups": torch.tensor(True)}, TypeError, r"^num_groups: got a tensor of shape \(\),",
    ),
    "num_groups numpy's true": (
        {"num_groups": np.bool_(True)}, TypeError, r"^num_groups: got (np\.)?True_?, expected an",
    ),
    "groups beyond 64 bits": ({"groups": 2**63}, TypeError, r"^groups: got 9223372036854775808, "),
    "padding of 65 bits": ({"padding": [2**64, 1]}, TypeError, r"^padding: got \[1844674407"),
    "eps true": ({"eps": True}, TypeError, r"^eps: got True, expected a finite number"),
    "eps text": ({"eps": "1e-5"}, TypeError, r"^eps: got '1e-5', expected a finite number"),
    "eps none": ({"eps": None}, TypeError, r"^eps: got None, expected a finite number"),
    "activation a function": (
        {"activation": torch.relu}, TypeError, r"^activation: got <.*, expected None or one of",
    ),
    "activation a list": (
        {"activation": ["relu"]}, TypeError, r"^activation: got \['relu'\], expected None or one",
    ),
    "order none": ({"order": None}, TypeError, r"^order: got None, expected one of 'act_norm'"),
    "precision a dtype": (
        {"precision": torch.float32}, TypeError, r"^precision: got torch.float32, expected None",
    ),
    "weight of no taps": (
        {"weight": torch.ones(4, 6, 0, 3)}, ValueError, r"^weight: got shape .*of at least 1",
    ),
    "weight sparse": (
        {"weight": torch.ones(4, 6, 3, 3).to_sparse()}, TypeError, r"^weight: got layout",
    ),
    "input of eight bits": (
        {"input": torch.ones(2, 4, 5, 5).to(torch.float8_e4m3fn)}, TypeError,
        r"^input: got dtype torch.float8_e4m3fn, expected a floating-point dtype",
    ),
    "padding negative": ({"padding": (0, -1)}, ValueError, r"^padding: got \(0, -1\), expected 2"),
    "dilation zero": ({"dilation": 0}, ValueError, r"^dilation: got 0, expected 2 integers"),
    "output_padding negative": (
        {"output_padding": -1}, ValueError, r"^output_padding: got -1, expected 2",
    ),
    "output_padding without a stride": (
        {"output_padding": 1}, ValueError, r"^output_padding: got \(1, 1\), expected each smaller",
    ),
    "stride not a number": ({"stride": 1.5}, (TypeError, ValueError), r"^stride: got 1.5, "),
    "padding of fractions": (
        {"padding": (0.5, 1)}, (TypeError, ValueError), r"^padding: got \(0.5, 1\), expected",
    ),
    "output too small": (
        {"padding": 4}, ValueError, r"^input: got spatial extents \(5, 5\), which give an output",
    ),
    "input without pixels": (
        {"input": torch.ones(2, 4, 0, 5)}, ValueError, r"^input: got spatial extents \(0, 5\)",
    ),
    # choices
    "activation unknown": (
        {"activation": "unknown"},
        ValueError,
        r"^activation: got 'unknown', expected None or one of",
    ),
    "order unknown": (
        {"order": "norm"}, ValueError, r"^order: got 'norm', expected one of 'act_norm', 'n",
    ),
    "precision unknown": (
        {"precision": "half"}, ValueError, r"^precision: got 'half', expected None or one of",
    ),
}  # fmt: skip

NORM_CASES = {
    "input too flat": (
        {"input": torch.ones(4)}, ValueError, r"^input: got shape \(4,\), expected \[N, C",
    ),
    "input a list": ({"input": [1.0]}, TypeError, r"^input: got list, expected torch.Tensor"),
    "input of integers": (
        {"input": torch.ones(2, 4, dtype=torch.int64)}, TypeError, r"^input: got dtype torch.int64",
    ),
    "input sparse": (
        {"input": torch.ones(2, 4, 5, 5).to_sparse()}, TypeError, r"^input: got layout",
    ),
    "num_groups does not divide": (
        {"num_groups": 3}, ValueError, r"^num_groups: got 3, expected a positive divisor of 4",
    ),
    "num_groups zero": ({"num_groups": 0}, ValueError, r"^num_groups: got 0, expected a positive"),
    "eps nan": ({"eps": NAN}, ValueError, r"^eps: got nan, expected a finite number"),
    "eps infinite": ({"eps": INF}, ValueError, r"^eps: got inf, expected a finite number"),
    "weight of other channels": (
        {"weight": torch.ones(5)}, ValueError, r"^weight: got shape \(5,\), expected \(4,\)",
    ),
    "bias of other channels": (
        {"bias": torch.ones(4, 1)}, ValueError, r"^bias: got shape \(4, 1\), expected \(4,\)",
    ),
    "weight elsewhere": (
        {"weight": meta(4)}, ValueError, r"^weight: got device meta, expected cpu",
    ),
    "bias elsewhere": ({"bias": meta(4)}, ValueError, r"^bias: got device meta, expected cpu"),
    "bias of another dtype": (
        {"bias": torch.ones(4).half()}, TypeError, r"^bias: got dtype torch.float16, expected",
    ),
    "affine of a dtype that nothing serves": (
        {"weight": torch.ones(4).double(), "bias": torch.ones(4).double()}, TypeError,
        r"^weight: got dtype torch.float64, expected",
    ),
    "weight a list": ({"weight": [1.0] * 4}, TypeError, r"^weight: got list, expected"),
    "activation unknown": (
        {"activation": "unknown"},
        ValueError,
        r"^activation: got 'unknown', expected None or one of",
    ),
    "order unknown": ({"order": 1}, TypeError, r"^order: got 1, expected one of 'act_norm', 'n"),
    "num_groups a fraction": (
        {"num_groups": 2.0}, TypeError, r"^num_groups: got 2.0, expected an integer",
    ),
    "num_groups a list": (
        {"num_groups": [2]}, TypeError, r"^num_groups: got \[2\], expected an integer",
    ),
    "weight sparse": (
        {"weight": torch.ones(4).to_sparse()}, TypeError, r"^weight: got layout",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CONV_CASES)
def test_bad_arguments_of_the_convolution(case):
    changes, exception, text = CONV_CASES[case]
    conv()  # the call that is changed is valid
    for _ in range(2):  # an error is not remembered as a plan
        with pytest.raises(exception, match=text):
            conv(**changes)


@pytest.mark.parametrize("case", NORM_CASES)
def test_bad_arguments_of_group_norm(case):
    changes, exception, text = NORM_CASES[case]
    norm()
    for _ in range(2):
        with pytest.raises(exception, match=text):
            norm(**changes)


@pytest.mark.parametrize("case", ["input of other channels", "eps nan", "weight elsewhere"])
def test_bad_arguments_where_gradients_are_needed(case):
    """The operator's path raises the same."""
    changes, exception, text = CONV_CASES[case]
    changes = {"norm_weight": torch.ones(6, requires_grad=True), **changes}
    with pytest.raises(exception, match=text):
        conv(**changes)


#: Autocast casts these to its own dtype, as in front of eager's convolution.
CAST = {"weight of another dtype", "bias of another dtype", "input of eight bits"}


@pytest.mark.parametrize("case", [case for case in CONV_CASES if case not in CAST])
def test_bad_arguments_under_autocast(case):
    changes, exception, text = CONV_CASES[case]
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(exception, match=text):
        conv(**changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"input": torch.ones(2, 4, 5, 5).long()}, r"^input: got dtype torch\.int64, expected"),
        ({"weight": torch.ones(4, 6, 3, 3).double()}, r"^weight: got dtype torch\.float64, exp"),
    ],
)
def test_autocast_does_not_cast_what_eagers_does_not(changes, text):
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=text):
        conv(**changes)


def test_precision_must_be_the_dtypes():
    half = {
        "input": torch.ones(2, 4, 5, 5).half(),
        "weight": torch.ones(4, 6, 3, 3).half(),
        "bias": None,
    }
    # On meta the fake implementation is what checks.
    for device in ("cpu", "meta"):
        changes = {name: t if t is None else t.to(device) for name, t in half.items()}
        changes |= {"norm_weight": None, "norm_bias": None, "precision": "tf32"}
        with pytest.raises(ValueError, match=r"^precision: got 'tf32' for input of float16, exp"):
            conv(**changes)


def test_modules_check_as_the_functions_do():
    module = ConvTransposeActNorm2d(4, 6, 3, num_groups=2)
    with pytest.raises(ValueError, match=r"^input: got 5 channels, expected 4"):
        module(torch.ones(1, 5, 5, 5))
    with pytest.raises(
        TypeError, match=r"^weight: got dtype torch.float32, expected torch.float16"
    ):
        module(torch.ones(1, 4, 5, 5).half())
    with pytest.raises(ValueError, match=r"^num_groups: got 4, expected a positive"):
        ConvTransposeActNorm2d(4, 6, 3, num_groups=4)
    with pytest.raises(ValueError, match="zeros"):
        ConvTransposeActNorm2d(4, 6, 3, padding_mode="reflect")
    with pytest.raises(ValueError, match=r"^weight: got shape \(4,\), expected \(6,\)"):
        GroupNorm(2, 4)(torch.ones(2, 6, 5))
    model = fusedconv.ModelNew(4, 8, 3, 1, 1, 2)
    with pytest.raises(ValueError, match=r"^input: got shape \(4, 5, 5\), expected 4 axes"):
        model(torch.ones(4, 5, 5))


def test_a_state_dict_of_another_size_is_refused():
    other = fusedconv.ModelNew(4, 16, 3, 1, 1, 2).state_dict()
    with pytest.raises(RuntimeError, match=r"conv_transpose\.weight"):
        fusedconv.ModelNew(4, 8, 3, 1, 1, 2).load_state_dict(other)


# ---- odd, and served -----------------------------------------------------------------------------


def assert_served(x, weight, **keywords):
    actual = conv_transpose_act_norm(x, weight, num_groups=2, activation="gelu", **keywords)
    expected = reference.conv_transpose_act_norm(
        x, weight, num_groups=2, activation="gelu", **keywords
    )
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_no_argument_needs_to_be_contiguous():
    x, weight = torch.randn(5, 6, 2, 4), torch.randn(3, 3, 6, 4)
    x, weight = x.permute(2, 3, 0, 1), weight.permute(3, 2, 0, 1)
    scale = torch.randn(6, 2)[:, 0]
    assert_served(x, weight)
    assert_served(x, weight, norm_weight=scale, norm_bias=torch.randn(12)[::2])
    assert_served(x, weight, bias=torch.randn(12)[::2])
    assert_served(torch.randn(1, 4, 1, 1).expand(3, 4, 5, 6), weight)
    assert_served(torch.randn(4, 8, 9, 11)[::2, 2:6, 1::2, ::3], weight)
    assert_served(torch.randn(2, 4, 5, 6), torch.randn(1, 6, 1, 1).expand(4, 6, 3, 3))


def test_extents_of_one_and_sizes_that_nothing_divides():
    assert_served(torch.randn(1, 4, 1, 1), torch.randn(4, 6, 3, 3))
    assert_served(torch.randn(3, 1, 7, 1), torch.randn(1, 2, 1, 5))
    assert_served(torch.randn(1, 13, 1, 31), torch.randn(13, 14, 2, 1))


def test_zero_size_batch():
    x, weight = torch.empty(0, 4, 5, 5), torch.randn(4, 6, 3, 3)
    assert conv(input=x, weight=weight).shape == (0, 6, 7, 7)
    assert norm(input=x).shape == x.shape
    double = {
        name: torch.ones(6, dtype=torch.float64) for name in ("bias", "norm_weight", "norm_bias")
    }
    assert conv(input=x.double(), weight=weight.double(), **double).shape == (0, 6, 7, 7)


def test_group_norm_without_pixels():
    """Served or refused as this version of torch does."""
    x = torch.empty(2, 4, 0, 5)
    try:
        torch.group_norm(x, 2)
    except RuntimeError:
        with pytest.raises(ValueError, match=r"^input: got shape \(2, 4, 0, 5\)"):
            norm(input=x)
    else:
        assert norm(input=x).shape == x.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_one_value_per_group_is_served_by_every_kernel(dtype):
    """mean = x, variance = 0: what GroupNorm's formula gives, the bias, whatever the dtype."""
    x = torch.randn(1, 4).to(dtype)
    bias = torch.randn(4).to(dtype)
    torch.testing.assert_close(group_norm(x, 4, None, bias), bias[None])


def test_sequences_stand_for_tuples():
    x, weight = torch.randn(2, 4, 5, 5), torch.randn(4, 6, 3, 3)
    expected = conv_transpose_act_norm(x, weight, None, (2, 1), (1, 0), (1, 0), 1, (1, 2))
    for kind in (list, torch.Size):
        actual = conv_transpose_act_norm(
            x, weight, None, kind((2, 1)), kind((1, 0)), kind((1, 0)), 1, kind((1, 2))
        )
        assert torch.equal(actual, expected)


def test_parameters_and_integer_eps():
    x = torch.randn(2, 4, 5, 5)
    weight = torch.nn.Parameter(torch.randn(4), requires_grad=False)
    expected = reference.group_norm(x, 2, weight, None, 1.0)
    torch.testing.assert_close(group_norm(x, 2, weight, None, 1), expected)
