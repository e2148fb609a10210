"""The processor's kernel through the public function: accuracy, special values, determinism."""

from __future__ import annotations

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import explained
from reference import (
    ACTIVATIONS,
    FLOOR,
    ORDERS,
    assert_as_accurate_as_torch,
    channels_last,
    double,
    misaligned,
    strided,
)

import fusedconv
from fusedconv.functional import group_norm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LAYOUTS = {**reference.LAYOUTS, "odd": misaligned}

#: (shape, groups): one, three and four channels a group, one group, one pixel, sizes that no vector
#: divides, no spatial axes, up to four, and enough elements for several threads and chunks.
CASES = [
    ((2, 6, 5, 7), 6),
    ((2, 12, 7, 9), 4),
    ((3, 16, 8, 8), 4),
    ((2, 15, 33), 1),
    ((1, 1, 1, 5), 1),
    ((5, 48), 6),
    ((1, 2, 3), 2),
    ((4, 10, 1, 1), 5),
    ((2, 6, 2, 3, 4), 3),
    ((1, 4, 2, 1, 3, 2), 2),
    ((1, 32, 65, 67), 8),
    ((2, 3, 130, 131), 1),
    ((1, 2050, 9), 1),
    ((3, 70, 40, 11), 7),
]


@pytest.fixture(autouse=True)
def _only_this_kernel(force):
    force("cpu_group_norm")


def values(shape, dtype, seed=0, scale=2.0, shift=0.5):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * scale + shift
    return x.to(dtype)


def affine(channels, dtype, seed=1):
    return values((channels,), dtype, seed), values((channels,), dtype, seed + 1)


def check(
    x, groups, weight=None, bias=None, eps=1e-5, activation=None, order="act_norm", **keywords
):
    actual = group_norm(x, groups, weight, bias, eps, activation=activation, order=order)
    exact = reference.group_norm(
        x.double(), groups, double(weight), double(bias), eps, activation, order
    )
    torchs = reference.group_norm(x, groups, weight, bias, eps, activation, order)
    assert_as_accurate_as_torch(actual, torchs, exact, **keywords)
    return actual


# ---- accuracy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "groups"), CASES, ids=str)
def test_against_fp64(shape, groups, dtype, layout):
    x = LAYOUTS[layout](values(shape, dtype))
    weight, bias = affine(shape[1], dtype)
    check(x, groups, weight, bias)
    check(x, groups, activation="gelu")
    check(x, groups, weight, None, 1e-3, "silu", "norm_act")
    if x.numel() // x.shape[0] > groups:
        check(x, groups, None, bias, activation="relu", order="norm_act")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_and_order(activation, order, dtype, layout):
    for shape, groups in (((2, 12, 9, 11), 4), ((2, 12, 9, 11), 12), ((1, 32, 40, 41), 2)):
        x = LAYOUTS[layout](values(shape, dtype))
        check(x, groups, *affine(shape[1], dtype), activation=activation, order=order)


@settings(max_examples=150)
@given(data=st.data())
def test_any_problem(data):
    """Shapes, groups, layout, dtype, activation and order at random."""
    per_group = data.draw(st.integers(1, 9), "channels per group")
    groups = data.draw(st.integers(1, 9), "groups")
    spatial = data.draw(st.lists(st.integers(1, 9), max_size=4), "spatial")
    batch = data.draw(st.integers(1, 4), "batch")
    dtype = data.draw(st.sampled_from(DTYPES), "dtype")
    layout = data.draw(st.sampled_from(sorted(LAYOUTS)), "layout")
    activation = data.draw(st.sampled_from(list(ACTIVATIONS)), "activation")
    order = data.draw(st.sampled_from(ORDERS), "order")
    shape = (batch, per_group * groups, *spatial)
    if torch.Size(shape).numel() == groups:
        return  # torch refuses one value per group and sample; see test_one_value_per_group
    x = LAYOUTS[layout](values(shape, dtype, seed=sum(shape)))
    actual = group_norm(
        x, groups, *affine(shape[1], dtype), 1e-2, activation=activation, order=order
    )
    arguments = [t.double() for t in affine(shape[1], dtype)]
    exact = reference.group_norm(x.double(), groups, *arguments, 1e-2, activation, order)
    # A rounding of the result, and of the moments in float32 where eps bounds what they amplify.
    rounding = torch.finfo(dtype).eps
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), exact, rtol=2 * rounding, atol=max(rounding, 2e-5))
    assert actual.stride() == (x.stride() if layout != "strided" else x.contiguous().stride())


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_affine_of_another_dtype(dtype, layout):
    x = LAYOUTS[layout](values((2, 12, 9, 11), dtype))
    for affine_dtype in DTYPES:
        weight, bias = affine(12, affine_dtype)
        actual = group_norm(x, 4, weight, bias, activation="gelu")
        exact = reference.group_norm(
            x.double(), 4, weight.double(), bias.double(), activation="gelu"
        )
        assert actual.dtype == dtype
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(actual.double(), exact, rtol=2 * eps, atol=8 * eps)


def test_strided_affine():
    x = values((2, 6, 5, 5), torch.float32)
    weight, bias = affine(6, torch.float32)
    expected = group_norm(x, 3, weight, bias)
    wide = torch.stack([weight, bias], dim=1)
    assert torch.equal(group_norm(x, 3, wide[:, 0], wide[:, 1]), expected)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("shift", [1e2, 1e4, -1e4, 1e6])
def test_large_means(shift, layout):
    """A bare E[x^2] - mean^2 in float32 loses every digit of the variance here."""
    for shape, groups in (((2, 8, 31, 33), 2), ((1, 4, 200, 201), 4), ((2, 64, 16, 16), 64)):
        x = LAYOUTS[layout](values(shape, torch.float32, scale=1.0, shift=shift))
        check(x, groups, *affine(shape[1], torch.float32))


def test_a_large_mean_of_one_channel_spares_the_others():
    x = values((2, 8, 31, 33), torch.float32)
    x[:, 3] += 1e4
    actual = check(x, 8)
    for other in (0, 7):
        single = group_norm(x[:, other : other + 1].contiguous(), 1)
        torch.testing.assert_close(actual[:, other : other + 1], single, rtol=1e-6, atol=1e-6)


def test_a_drifting_mean_over_many_chunks():
    """Partial moments differ widely between the parts that are merged."""
    x = torch.linspace(-1000, 1000, 2 * 4 * 60_000, dtype=torch.float64).float()
    for layout in ("nchw", "nhwc"):
        check(LAYOUTS[layout](x.reshape(2, 4, 60_000)), 2)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e4, 0.1, 1e-30])
def test_constant_groups(value, layout):
    """The variance is zero: the result is the bias, to what eps and the mean's rounding allow."""
    x = LAYOUTS[layout](torch.full((2, 6, 33, 35), value))
    weight, bias = affine(6, torch.float32)
    actual = group_norm(x, 2, weight, bias)
    expected = bias.reshape(1, 6, 1, 1).expand_as(actual)
    # One unit in the last place of the mean, times rstd = 1 / sqrt(eps).
    atol = abs(value) * 2**-23 / 1e-5**0.5 * float(weight.abs().max())
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=atol)


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-5, 1.0, 1e3])
def test_eps_stands_inside_the_root(eps):
    x = values((2, 6, 9, 9), torch.float32, scale=1e-2, shift=0.0)
    check(x, 3, eps=eps)


def test_one_value_per_group():
    """mean = x and variance = 0: the result is the bias, after the activation of the order."""
    x = values((1, 4), torch.float32)
    weight, bias = affine(4, torch.float32)
    assert torch.equal(group_norm(x, 4, weight, bias), bias[None])
    assert torch.equal(
        group_norm(x, 4, weight, bias, activation="relu", order="norm_act"), bias.relu()[None]
    )
    x = values((3, 4, 1, 1), torch.float32)
    assert torch.equal(group_norm(x, 4, weight, bias), bias.reshape(1, 4, 1, 1).expand(3, 4, 1, 1))


def test_statistics_that_autograd_saves():
    x = values((2, 6, 9, 11), torch.bfloat16)
    arguments = (x, 3, None, None, 1e-5, "gelu", "act_norm", None)
    _, mean, rstd = torch.ops.fusedconv.group_norm(*arguments)
    grouped = torch.nn.functional.gelu(x.double()).reshape(2, 3, -1)
    torch.testing.assert_close(mean.double(), grouped.mean(-1), rtol=1e-6, atol=1e-6)
    expected = torch.rsqrt(grouped.var(-1, correction=0) + 1e-5)
    torch.testing.assert_close(rstd.double(), expected, rtol=1e-6, atol=1e-6)


# ---- special values ------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_spread_as_in_torch(bad, activation, order, dtype, layout):
    x = values((2, 6, 9, 7), dtype)
    x[1, 3, 4, 5] = bad
    x = LAYOUTS[layout](x)
    weight, bias = affine(6, dtype)
    actual = group_norm(x, 3, weight, bias, activation=activation, order=order)
    expected = reference.group_norm(
        x.double(), 3, weight.double(), bias.double(), activation=activation, order=order
    )
    assert torch.equal(actual.isnan(), expected.isnan())
    # Other groups and samples are untouched.
    clean = torch.ones(2, 3, dtype=torch.bool)
    clean[1, 1] = False
    rest = actual.reshape(2, 3, -1)[clean].double()
    assert rest.isfinite().all()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(rest, expected.reshape(2, 3, -1)[clean], rtol=8 * eps, atol=8 * eps)


#: Activations without the cancellation that torch's own operators have for negative x.
UNCANCELLED = {
    "gelu": lambda x: x * torch.special.erfc(-x * 0.5**0.5) / 2,
    "gelu_tanh": lambda x: x * torch.sigmoid((8 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)),
    "silu": lambda x: x * torch.sigmoid(x),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_at_their_extremes(activation):
    """The activation as the normalisation sees it: huge, tiny, denormal and signed zero."""
    x = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-30, 1e-8, -1e-8, 0.5, -0.5, 3.0, -3.0])
    x = torch.cat([x, torch.linspace(-20, 20, 4096), torch.tensor([60.0, -60.0, 100.0, -100.0])])
    check(x.reshape(1, 4, -1), 4, activation=activation)
    # As the last step, where it is seen as it is: a scale of 1 and the values as the bias.
    constant = torch.zeros(1, x.numel(), 2)
    actual = group_norm(constant, x.numel(), None, x, activation=activation, order="norm_act")
    exact = ACTIVATIONS[activation](x.double())[None, :, None].expand_as(actual)
    torchs = ACTIVATIONS[activation](x)[None, :, None].expand_as(actual)
    assert_as_accurate_as_torch(actual, torchs, exact)
    # Each value by itself: approximations fail far out in the tails, where a norm does not see it.
    # There the exponent, x^2 / 2 or about x^3 / 14, magnifies a rounding of x by its own slope.
    # GELU's tail is exact to a rounding of x, which is what torch's cancels to.
    exact = UNCANCELLED.get(activation, ACTIVATIONS[activation])(x.double())
    far = x.double().abs()
    error = (actual[0, :, 0].double() - exact).abs()
    close = error <= 4e-7 * (1 + far**2 + far**3 / 4) * exact.abs() + 1e-36
    assert (close | (error <= (3e-8 * far if activation == "gelu" else 0.0))).all()
    assert actual.isfinite().all()


def test_denormals():
    x = values((2, 4, 9, 9), torch.float32, scale=1e-40, shift=0.0)
    assert (x != 0).any()
    actual = group_norm(x, 2)
    torch.testing.assert_close(actual, reference.group_norm(x, 2), rtol=1e-4, atol=1e-36)
    half = torch.full((2, 4, 9, 9), 6e-8, dtype=torch.float16)
    half[:, :, ::2] = -1.2e-7
    check(half, 2, eps=1e-14)
    out = group_norm(torch.zeros(1, 2, 3, dtype=torch.float16), 2, None,
                     torch.tensor([6e-8, -1.2e-7], dtype=torch.float16))  # fmt: skip
    assert torch.equal(out, torch.tensor([6e-8, -1.2e-7]).half()[None, :, None].expand(1, 2, 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_half_precision_value_is_read_and_rounded_right(dtype):
    """All 65,536 bit patterns through bias and ReLU or identity: exact or correctly rounded."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    zeros = torch.zeros(1, every.numel(), 1, dtype=dtype)
    actual = group_norm(zeros, every.numel(), None, every)[0, :, 0]
    assert torch.equal(actual.isnan(), every.isnan())
    number = ~every.isnan()
    assert torch.equal(actual[number], every[number])
    # float32 values between them, rounded to nearest, ties to even, as torch rounds.
    finite = every[every.isfinite()].float().sort().values
    between = torch.cat([(finite[1:] + finite[:-1]) / 2, finite[1:] * 0.3 + finite[:-1] * 0.7])
    zeros = torch.zeros(1, between.numel(), 1, dtype=dtype)
    actual = group_norm(zeros, between.numel(), None, between)[0, :, 0]
    assert torch.equal(actual, between.to(dtype))


def test_values_near_the_largest_of_float16():
    x = values((2, 4, 9, 9), torch.float16, scale=1e4, shift=3e4).clamp(max=65504)
    check(x, 2)


# ---- bits, memory, threads -----------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_number_of_threads_changes_no_bit(dtype, layout, threads):
    for shape, groups in (((3, 12, 65, 67), 4), ((1, 8, 200, 201), 1), ((16, 32, 9, 9), 32)):
        x = LAYOUTS[layout](values(shape, dtype))
        weight, bias = affine(shape[1], dtype)
        results = []
        for count in (1, 2, 3, 5, 16):
            threads(count)
            results.append(group_norm(x, groups, weight, bias, activation="gelu"))
        for result in results[1:]:
            assert torch.equal(result, results[0])


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("shape", [(2, 3, 330, 331), (1, 2, 1460, 1450)], ids=str)
def test_activations_kept_for_all_threads_or_computed_twice(shape, layout, threads):
    """Activations are kept in a core's own cache, in that which cores share, or nowhere."""
    x = LAYOUTS[layout](values(shape, torch.float32))
    weight, bias = affine(shape[1], torch.float32)
    results = []
    for count in (1, 2, 3):
        threads(count)
        results.append(group_norm(x, 1, weight, bias, activation="gelu"))
    assert torch.equal(results[1], results[0])
    assert torch.equal(results[2], results[0])
    check(x, 1, weight, bias, activation="gelu")


def test_batches_do_not_influence_each_other():
    x = values((5, 12, 17, 19), torch.float32)
    for layout in ("nchw", "nhwc"):
        whole = group_norm(LAYOUTS[layout](x), 4, activation="silu")
        for sample in range(5):
            single = group_norm(LAYOUTS[layout](x[sample : sample + 1]), 4, activation="silu")
            assert torch.equal(whole[sample : sample + 1], single)


def test_layouts_agree():
    x = values((2, 12, 33, 35), torch.float32)
    weight, bias = affine(12, torch.float32)
    expected = group_norm(x, 4, weight, bias, activation="gelu")
    for place in LAYOUTS.values():
        actual = group_norm(place(x), 4, weight, bias, activation="gelu")
        torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-6)
    assert torch.equal(group_norm(misaligned(x), 4, weight, bias, activation="gelu"), expected)
    assert torch.equal(group_norm(strided(x), 4, weight, bias, activation="gelu"), expected)


def test_expanded_and_permuted_input():
    x = values((1, 6, 1, 7), torch.float32).expand(3, 6, 5, 7)
    assert torch.equal(group_norm(x, 3), group_norm(x.contiguous(), 3))
    x = values((5, 7, 6, 3), torch.float32).permute(3, 2, 0, 1)
    assert torch.equal(group_norm(x, 3), group_norm(x.contiguous(), 3))
    x = values((4, 12, 5, 7), torch.float32)[::2, 3:9]
    assert torch.equal(group_norm(x, 3), group_norm(x.contiguous(), 3))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_of_poisoned_output_memory_is_written(dtype, layout, monkeypatch):
    """Fresh memory is filled with NaN before the kernel gets it, and so are mean and rstd."""
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(torch.nan))
    for shape, groups in CASES:
        x = LAYOUTS[layout](values(shape, dtype))
        arguments = (x, groups, None, None, 1e-5, "relu", "act_norm", None)
        output, mean, rstd = torch.ops.fusedconv.group_norm(*arguments)
        for tensor in (output, mean, rstd):
            assert tensor.isfinite().all(), shape


def test_calls_from_many_threads():
    from concurrent.futures import ThreadPoolExecutor

    inputs = [values((2, 12, 33, 35), torch.float32, seed=seed) for seed in range(8)]
    expected = [group_norm(x, 4, activation="gelu") for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        actual = list(pool.map(lambda x: group_norm(x, 4, activation="gelu"), inputs * 4))
    for one, other in zip(actual, expected * 4, strict=True):
        assert torch.equal(one, other)


# ---- what it serves and what it says -------------------------------------------------------------


def test_behind_torchs_convolution(force):
    force("cpu_conv_transpose")
    x, weight = values((2, 6, 9, 7), torch.float32), values((6, 8, 3, 3), torch.float32, 3)
    for place in (lambda t: t, channels_last):
        actual = fusedconv.functional.conv_transpose_act_norm(
            place(x), weight, activation="gelu", num_groups=4
        )
        arguments = {"activation": "gelu", "num_groups": 4}
        exact = reference.conv_transpose_act_norm(x.double(), weight.double(), **arguments)
        torchs = reference.conv_transpose_act_norm(x, weight, **arguments)
        assert_as_accurate_as_torch(actual, torchs, exact)


def test_a_copy_is_a_visible_step():
    x = values((2, 6, 5, 7), torch.float32)
    for place, copies in ((lambda t: t, False), (channels_last, False), (strided, True)):
        (one,) = explained(group_norm, place(x), 3, activation="relu")
        assert any("copy" in step for step in one.steps) == copies
        assert "fused relu + group_norm" in one.steps[-1]


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: group_norm(torch.ones(2, 4, 3, dtype=torch.float64), 2), "dtype is float64"),
        (lambda: group_norm(torch.ones(0, 4, 3), 2), "the input is empty"),
        (
            lambda: fusedconv.functional.conv_transpose_act_norm(
                torch.ones(1, 2, 3), torch.ones(2, 2, 3)
            ),
            "there is a convolution",
        ),
    ],
    ids=["float64", "empty", "convolution"],
)
def test_what_it_does_not_serve_has_a_reason(call, reason):
    with pytest.raises(fusedconv.NoKernelError, match=f"cpu_group_norm: .*{reason}"):
        call()


def test_floors_are_below_a_rounding_of_each_dtype():
    """The slack of this file's bounds is no loophole."""
    for dtype in DTYPES:
        assert torch.finfo(dtype).eps > FLOOR[dtype]
