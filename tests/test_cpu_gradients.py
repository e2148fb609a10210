"""The processor's gradients through the public function: accuracy, special values, determinism."""

from __future__ import annotations

import itertools

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import backward_problem, explained, problem
from reference import (
    ACTIVATIONS,
    GRADIENT_FLOOR,
    ORDERS,
    assert_as_accurate_as_torch,
    channels_last,
    misaligned,
    strided,
)
from torch import nn

from fusedconv.device import PROCESSOR
from fusedconv.functional import group_norm
from fusedconv.kernels.cpu.epilogue_gradients import CpuGroupNormBackward
from fusedconv.modules import ConvTransposeActNorm1d, ConvTransposeActNorm2d

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LAYOUTS = {**reference.LAYOUTS, "odd": misaligned}
#: In which gradients of the two come together; the others are copies of their values.
BOTH_LAYOUTS = {"nchw": lambda x: x, "nhwc": channels_last}

#: (shape, groups): one, three and four channels a group, one group, sizes that no vector divides,
#: no spatial axes, up to four, rows of more lanes than a strip of vectors, and enough elements for
#: several threads and parts.
CASES = [
    ((2, 6, 5, 7), 6),
    ((2, 12, 7, 9), 4),
    ((2, 15, 33), 1),
    ((1, 1, 1, 5), 1),
    ((5, 48), 6),
    ((1, 2, 3), 2),
    ((4, 10, 1, 1), 5),
    ((1, 4, 2, 1, 3, 2), 2),
    ((1, 32, 65, 67), 8),
    ((2, 3, 130, 131), 1),
    ((1, 2050, 9), 1),
    ((3, 70, 40, 11), 7),
]


@pytest.fixture(autouse=True)
def _only_these_kernels(force):
    force("cpu_group_norm,cpu_group_norm_backward")


def values(shape, dtype, seed=0, scale=2.0, shift=0.5):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * scale + shift
    return x.to(dtype)


def affine(channels, dtype, seed=1):
    return values((channels,), dtype, seed), values((channels,), dtype, seed + 1)


def incoming(shape, dtype):
    """A gradient with a mean, which a group's sums must take off again."""
    return values(shape, dtype, seed=11, scale=1.0)


def found_by(function, tensors, grad, dtype=None):
    """The gradients of a function of tensors, None where a tensor is."""
    leaves = [None if t is None else t.detach().to(dtype or t.dtype) for t in tensors]
    for leaf in leaves:
        if leaf is not None:
            leaf.requires_grad_()
    output = function(*leaves)
    given = [leaf for leaf in leaves if leaf is not None]
    return torch.autograd.grad(output, given, grad.to(output.dtype))


def ours(groups, eps, activation, order):
    return lambda x, weight, bias: group_norm(
        x, groups, weight, bias, eps, activation=activation, order=order
    )


def torchs(groups, eps, activation, order):
    def call(x, weight, bias):
        if weight is None and bias is not None:
            weight = torch.ones_like(bias)  # torch's backward pass fails where a bias stands alone
        return reference.group_norm(x, groups, weight, bias, eps, activation, order)

    return call


def check(
    x, groups, weight=None, bias=None, eps=1e-5, activation=None, order="act_norm", grad=None
):
    """Each gradient's error against fp64 is at most 1.1 times torch's, channels first."""
    dtype = x.dtype
    grad = incoming(x.shape, dtype) if grad is None else grad
    tensors, call = (x, weight, bias), (groups, eps, activation, order)
    actual = found_by(ours(*call), tensors, grad)
    expected = found_by(torchs(*call), [t if t is None else t.contiguous() for t in tensors], grad)
    exact = found_by(torchs(*call), tensors, grad, torch.float64)
    for one, other, true in zip(actual, expected, exact, strict=True):
        assert_as_accurate_as_torch(one, other, true, GRADIENT_FLOOR[dtype])
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


@settings(max_examples=100)
@given(data=st.data())
def test_any_problem(data):
    """Shapes, groups, layouts, dtype, activation, order and what is asked for at random."""
    per_group = data.draw(st.integers(1, 9), "channels per group")
    groups = data.draw(st.integers(1, 9), "groups")
    spatial = data.draw(st.lists(st.integers(1, 9), max_size=4), "spatial")
    batch = data.draw(st.integers(1, 4), "batch")
    dtype = data.draw(st.sampled_from(DTYPES), "dtype")
    places = st.sampled_from(sorted(LAYOUTS))
    place, grad_place = data.draw(places, "layout"), data.draw(places, "gradient's layout")
    activation = data.draw(st.sampled_from(list(ACTIVATIONS)), "activation")
    order = data.draw(st.sampled_from(ORDERS), "order")
    needed = data.draw(st.sampled_from(NEEDED), "needed")
    shape = (batch, per_group * groups, *spatial)
    if torch.Size(shape).numel() == groups:
        return  # torch refuses one value per group and sample
    tensors = [values(shape, dtype, seed=sum(shape)), *affine(shape[1], dtype)]
    grad = incoming(shape, dtype)
    exact = found_by(torchs(groups, 1e-2, activation, order), tensors, grad, torch.float64)
    tensors[0] = LAYOUTS[place](tensors[0])
    leaves = [t.detach().requires_grad_(need) for t, need in zip(tensors, needed, strict=True)]
    output = ours(groups, 1e-2, activation, order)(*leaves)
    output.backward(LAYOUTS[grad_place](grad))
    # A rounding of each, relative to the whole: terms of a sum cancel.
    rounding = max(2 * torch.finfo(dtype).eps, 1e-5)
    for leaf, need, true in zip(leaves, needed, exact, strict=True):
        assert (leaf.grad is not None) == need
        if need:
            assert leaf.grad.dtype == dtype
            scale = float(true.abs().max())
            torch.testing.assert_close(
                leaf.grad.double(), true, rtol=rounding, atol=rounding * scale
            )


@pytest.mark.parametrize("layout", BOTH_LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_affine_of_another_dtype(order, dtype, layout):
    x, grad = BOTH_LAYOUTS[layout](values((2, 12, 9, 11), dtype)), incoming((2, 12, 9, 11), dtype)
    for affine_dtype in DTYPES:
        tensors, call = (x, *affine(12, affine_dtype)), (4, 1e-5, "gelu", order)
        actual = found_by(ours(*call), tensors, grad)
        exact = found_by(torchs(*call), tensors, grad, torch.float64)
        for tensor, one, true in zip(tensors, actual, exact, strict=True):
            assert one.dtype == tensor.dtype
            assert reference.relative_error(one, true) < torch.finfo(tensor.dtype).eps + 1e-6


@pytest.mark.parametrize("layout", BOTH_LAYOUTS)
@pytest.mark.parametrize("shift", [1e2, -1e4, 1e6])
def test_large_means(shift, layout):
    """Sums of gradient times input instead of gradient times deviation cancel here."""
    for shape, groups in (((2, 8, 31, 33), 2), ((1, 4, 200, 201), 4), ((2, 64, 16, 16), 64)):
        x = BOTH_LAYOUTS[layout](values(shape, torch.float32, scale=1.0, shift=shift))
        check(x, groups, *affine(shape[1], torch.float32))
        check(x, groups, *affine(shape[1], torch.float32), activation="silu", order="norm_act")


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1.0, 1e3])
def test_eps(eps):
    check(values((2, 6, 9, 9), torch.float32, scale=1e-2, shift=0.0), 3, eps=eps)


@pytest.mark.parametrize("layout", BOTH_LAYOUTS)
def test_constant_groups(layout):
    """The deviations are zero; the gradient's own remain, times the root of 1 / eps."""
    x = BOTH_LAYOUTS[layout](torch.full((2, 6, 33, 35), 3.0))
    weight, bias = affine(6, torch.float32)
    grad_x, grad_weight, _ = check(x, 2, weight, bias)
    assert not grad_weight.any()
    assert grad_x.any()


@pytest.mark.parametrize("layout", BOTH_LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_constant_gradient(dtype, layout):
    """The gradient of a sum, one value expanded."""
    shape = (2, 12, 33, 35)
    x = BOTH_LAYOUTS[layout](values(shape, dtype)).requires_grad_()
    weight, bias = (t.requires_grad_() for t in affine(12, dtype))
    group_norm(x, 4, weight, bias, activation="gelu").sum().backward()
    call, tensors = (4, 1e-5, "gelu", "act_norm"), (x, weight, bias)
    exact = found_by(torchs(*call), tensors, torch.ones(shape), torch.float64)
    assert torch.equal(bias.grad, torch.full_like(bias, 2 * 33 * 35))
    eps = max(2 * torch.finfo(dtype).eps, 1e-6)
    for leaf, true in ((x, exact[0]), (weight, exact[1])):
        scale = float(true.abs().max())
        torch.testing.assert_close(leaf.grad.double(), true, rtol=eps, atol=eps * scale)


# ---- what is asked for ---------------------------------------------------------------------------

NEEDED = [needed for needed in itertools.product((False, True), repeat=3) if any(needed)]


@pytest.mark.parametrize("layout", BOTH_LAYOUTS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("needed", NEEDED, ids=str)
def test_what_else_is_asked_for_changes_no_bit(needed, order, layout):
    for shape, groups in (((2, 12, 7, 9), 4), ((1, 3, 130, 131), 1)):
        tensors = [
            BOTH_LAYOUTS[layout](values(shape, torch.float32)),
            *affine(shape[1], torch.float32),
        ]
        grad, call = incoming(shape, torch.float32), ours(groups, 1e-5, "gelu", order)
        whole = found_by(call, tensors, grad)
        leaves = [t.detach().requires_grad_(need) for t, need in zip(tensors, needed, strict=True)]
        call(*leaves).backward(grad)
        for leaf, need, expected in zip(leaves, needed, whole, strict=True):
            assert (leaf.grad is not None) == need
            if need:
                assert torch.equal(leaf.grad, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_the_gradient_comes_in_any_memory(dtype, order):
    """In the other layout, strided, at odd addresses: the values count, and the input's layout is
    its gradient's."""
    for shape in ((2, 12, 9, 11), (1, 3, 130, 131)):
        grad, call = incoming(shape, dtype), ours(shape[1] // 3, 1e-5, "silu", order)
        for place in BOTH_LAYOUTS.values():
            tensors = (place(values(shape, dtype)), *affine(shape[1], dtype))
            expected = found_by(call, tensors, place(grad))
            for put in LAYOUTS.values():
                actual = found_by(call, tensors, put(grad))
                for one, other in zip(actual, expected, strict=True):
                    assert torch.equal(one, other)
                assert actual[0].stride() == tensors[0].stride()


def test_a_gradient_of_another_dtype():
    """torch casts none of its own; the operator's backward pass takes float32 for 16 bits."""
    for dtype in DTYPES[1:]:
        x, grad = values((2, 12, 9, 11), dtype), incoming((2, 12, 9, 11), torch.float32)
        weight, bias = affine(12, dtype)
        call = (x, 4, weight, bias, 1e-5, "gelu", "norm_act", torch.float32)
        output, mean, rstd = torch.ops.fusedconv.group_norm(*call)
        assert output.dtype == torch.float32
        actual = torch.ops.fusedconv.group_norm_backward(grad, mean, rstd, [True] * 3, *call)
        exact = found_by(
            torchs(4, 1e-5, "gelu", "norm_act"), (x, weight, bias), grad, torch.float64
        )
        for one, true in zip(actual, exact, strict=True):
            assert one.dtype == dtype
            assert reference.relative_error(one, true) < torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_samples(dtype, force):
    """No kernel of ours serves them; the gradients are torch's zeros."""
    force("")
    x = torch.empty(0, 6, 5, 7, dtype=dtype, requires_grad=True)
    weight, bias = (t.requires_grad_() for t in affine(6, dtype))
    group_norm(x, 3, weight, bias, activation="gelu").sum().backward()
    assert x.grad.shape == x.shape
    for parameter in (weight, bias):
        assert parameter.grad.dtype == dtype
        assert not parameter.grad.any()


# ---- special values ------------------------------------------------------------------------------


BAD = [torch.nan, torch.inf, -torch.inf]


def check_what_is_not_finite(where, bad, activation, order, dtype, layout):
    shape, groups = (2, 6, 9, 7), 3
    x, grad = values(shape, dtype), incoming(shape, dtype)
    (x if where == "input" else grad)[1, 3, 4, 5] = bad
    x, grad = BOTH_LAYOUTS[layout](x), BOTH_LAYOUTS[layout](grad)
    tensors, call = (x, *affine(6, dtype)), (groups, 1e-5, activation, order)
    actual = found_by(ours(*call), tensors, grad)
    exact = found_by(torchs(*call), tensors, grad, torch.float64)
    rounding = 8 * torch.finfo(dtype).eps
    for one, true in zip(actual, exact, strict=True):
        finite = true.isfinite()
        assert torch.equal(one.isfinite(), finite)
        scale = float(true[finite].abs().max())
        torch.testing.assert_close(
            one[finite].double(), true[finite], rtol=rounding, atol=rounding * scale
        )


@pytest.mark.parametrize("layout", BOTH_LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "relu"])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("where", ["input", "gradient"])
def test_nan_and_infinity_stay_in_their_group(where, bad, activation, order, dtype, layout):
    """What is not finite in torch's backward pass is not finite here, and other groups and samples
    are untouched."""
    check_what_is_not_finite(where, bad, activation, order, dtype, layout)


@pytest.mark.parametrize("layout", BOTH_LAYOUTS)
@pytest.mark.parametrize("where", ["input", "gradient"])
def test_what_relu_stops_is_zero_whatever_comes(where, layout):
    """As in torch, which selects instead of multiplying by a slope of zero."""
    for bad, order, dtype in itertools.product(BAD, ORDERS, DTYPES):
        check_what_is_not_finite(where, bad, "relu", order, dtype, layout)


@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name is not None])
def test_slopes_at_their_extremes(activation):
    """Each value's slope by itself: a scale of 1, a gradient of 1 and the values as the bias."""
    x = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-30, 1e-8, -1e-8, 0.5, -0.5, 3.0, -3.0])
    x = torch.cat([x, torch.linspace(-20, 20, 4096), torch.tensor([60.0, -60.0, 1e4, -1e4])])
    count = x.numel()
    bias = x.clone().requires_grad_()
    zeros = torch.zeros(1, count, 2)
    group_norm(zeros, count, None, bias, activation=activation, order="norm_act").sum().backward()
    exact = x.double().requires_grad_()
    (2 * ACTIVATIONS[activation](exact)).sum().backward()
    torch.testing.assert_close(bias.grad.double(), exact.grad, rtol=2e-6, atol=2e-6)


# ---- bits, memory, threads -----------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_number_of_threads_changes_no_bit(dtype, layout, threads):
    everywhere = torch.get_num_threads()
    for shape, groups in (((3, 12, 65, 67), 4), ((1, 8, 200, 201), 1), ((16, 32, 9, 9), 32)):
        tensors = (LAYOUTS[layout](values(shape, dtype)), *affine(shape[1], dtype))
        grad, results = incoming(shape, dtype), []
        for count in (1, 2, 3, 16, everywhere):
            threads(count)
            results.append(found_by(ours(groups, 1e-5, "gelu", "act_norm"), tensors, grad))
        for result in results[1:]:
            for one, other in zip(result, results[0], strict=True):
                assert torch.equal(one, other)


def test_samples_do_not_influence_each_other():
    x, grad = values((5, 12, 17, 19), torch.float32), incoming((5, 12, 17, 19), torch.float32)
    call = ours(4, 1e-5, "silu", "act_norm")
    for place in BOTH_LAYOUTS.values():
        (whole,) = found_by(call, (place(x), None, None), place(grad))
        for sample in range(5):
            part = slice(sample, sample + 1)
            (single,) = found_by(call, (place(x[part]), None, None), place(grad[part]))
            assert torch.equal(whole[part], single)


@pytest.mark.parametrize("layout", BOTH_LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_of_poisoned_memory_is_written(dtype, layout, monkeypatch):
    """Fresh memory is filled with NaN before the kernel gets it."""
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(torch.nan))
    monkeypatch.setattr(torch, "empty_strided", filled(torch.empty_strided))
    monkeypatch.setattr(torch.Tensor, "new_empty", filled(torch.Tensor.new_empty))
    monkeypatch.setattr(torch.Tensor, "new_empty_strided", filled(torch.Tensor.new_empty_strided))
    for shape, groups in CASES:
        tensors = (BOTH_LAYOUTS[layout](values(shape, dtype)), *affine(shape[1], dtype))
        call = ours(groups, 1e-5, "gelu", "act_norm")
        for tensor in found_by(call, tensors, incoming(shape, dtype)):
            assert tensor.isfinite().all(), shape


def filled(make):
    return lambda *arguments, **keywords: make(*arguments, **keywords).fill_(torch.nan)


def test_calls_from_many_threads():
    from concurrent.futures import ThreadPoolExecutor

    shape = (2, 12, 33, 35)
    grad, call = incoming(shape, torch.float32), ours(4, 1e-5, "gelu", "act_norm")
    tensors = [(values(shape, torch.float32, seed), None, None) for seed in range(8)]
    expected = [found_by(call, each, grad) for each in tensors]
    with ThreadPoolExecutor(4) as pool:
        actual = list(pool.map(lambda each: found_by(call, each, grad), tensors * 4))
    for (one,), (other,) in zip(actual, expected * 4, strict=True):
        assert torch.equal(one, other)


# ---- behind a convolution ------------------------------------------------------------------------


def copied(module, dtype):
    """The module's convolution and GroupNorm as torch's own modules compute them."""
    conv, norm = module.conv_transpose, module.group_norm
    kinds = {3: nn.ConvTranspose1d, 4: nn.ConvTranspose2d}
    plain = kinds[conv.weight.dim()](
        conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, conv.padding
    )
    plain.load_state_dict(conv.state_dict())
    other = nn.GroupNorm(norm.num_groups, norm.num_channels, norm.eps)
    other.load_state_dict(norm.state_dict())
    return plain.to(dtype), other.to(dtype)


@pytest.mark.parametrize("layout", BOTH_LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("geometry", [(3, 1, 1), (2, 2, 0), (4, 2, 1)], ids=str)
@pytest.mark.parametrize("kind", [ConvTransposeActNorm1d, ConvTransposeActNorm2d])
def test_gradients_of_a_module(kind, geometry, order, dtype, layout, force):
    """Of input, weight, bias and GroupNorm's parameters, by whichever kernels are chosen."""
    force("cpu,torch")
    kernel, stride, padding = geometry
    axes = 1 if kind is ConvTransposeActNorm1d else 2
    module = kind(12, 20, kernel, stride, padding, num_groups=5, activation="gelu", order=order).to(
        dtype
    )
    x = BOTH_LAYOUTS[layout](values((2, 12, *(9, 7)[:axes]), dtype))
    results = []
    for other in (None, dtype, torch.float64):
        leaf = x.detach().to(other or dtype).requires_grad_()
        if other is None:
            output, parameters = module(leaf), list(module.parameters())
        else:
            conv, norm = copied(module, other)
            between = conv(leaf)
            act = nn.functional.gelu
            output = norm(act(between)) if order == "act_norm" else act(norm(between))
            parameters = [*conv.parameters(), *norm.parameters()]
        grad = incoming(output.shape, dtype).to(other or dtype)
        results.append(torch.autograd.grad(output, [leaf, *parameters], grad))
    for actual, expected, exact in zip(*results, strict=True):
        assert_as_accurate_as_torch(actual, expected, exact, 4 * GRADIENT_FLOOR[dtype])


# ---- what it serves and what it says -------------------------------------------------------------


def test_a_copy_is_a_visible_step():
    for place, copies in ((lambda t: t, False), (channels_last, False), (strided, True)):
        x = place(values((2, 6, 5, 7), torch.float32)).requires_grad_()
        _, backward = explained(group_norm, x, 3, activation="relu", gradients=True)
        assert backward.kernel == "cpu_group_norm_backward"
        assert any("copy" in step for step in backward.steps) == copies
        assert "fused gradients of group_norm + relu" in backward.steps[-1]


@pytest.mark.parametrize(
    ("forward", "changes", "reason"),
    [
        ({"dtype": torch.float64, "output_dtype": torch.float64}, {}, "dtype is float64"),
        ({"batch": 0}, {}, "the input is empty"),
        ({"norm": None}, {}, "there is no GroupNorm"),
        ({"dtype": torch.float16, "output_dtype": torch.float16},
         {"grad_dtype": torch.bfloat16}, "dtype of the output's gradient is bfloat16"),
    ],
    ids=["float64", "empty", "no norm", "gradient of the other 16 bits"],
)  # fmt: skip
def test_what_it_does_not_serve_has_a_reason(forward, changes, reason):
    one = backward_problem(problem(save=True, **forward), **changes)
    support = CpuGroupNormBackward().supports(one, PROCESSOR)
    assert not support
    assert reason in support.reason
