"""Layouts in memory: how they are read, what modules make of them, and whose plans they get."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from operators import CONV, of_fakes
from problems import explained, geometry_of
from reference import LAYOUTS, channels_last, cotangent, is_channels_last, memory_at, strided
from systems import MODULES, SPATIAL, perturbed

from fusedconv import ConvTransposeActNorm2d, GroupNorm
from fusedconv.functional import conv_transpose_act_norm
from fusedconv.kernels.cpu.conv_transpose import ConvTransposePlan
from fusedconv.kernels.cpu.group_norm import GroupNormPlan
from fusedconv.layout import dense, dense_strides, empty, layout_of, result_layout_of

CONV_BACKWARD = torch.ops.fusedconv.conv_transpose_act_norm_backward

# ---- reading and making them ---------------------------------------------------------------------

SHAPES = [(2, 3), (2, 3, 4), (2, 3, 4, 5), (2, 3, 4, 5, 6)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layout_of_dense_and_strided_tensors(shape):
    x = torch.empty(shape)
    assert layout_of(tuple(x.shape), x.stride()) == "nchw"
    last = channels_last(x)
    assert layout_of(tuple(last.shape), last.stride()) == ("nhwc" if len(shape) > 2 else "nchw")
    wide = strided(x)
    assert layout_of(tuple(wide.shape), wide.stride()) == "strided"
    expanded = x[:1].expand(shape)
    assert layout_of(tuple(expanded.shape), expanded.stride()) == "strided"


def test_layout_of_torchs_memory_formats():
    for shape, memory_format in (
        ((2, 3, 4, 5), torch.channels_last),
        ((2, 3, 4, 5, 6), torch.channels_last_3d),
    ):
        x = torch.empty(shape).contiguous(memory_format=memory_format)
        assert layout_of(tuple(x.shape), x.stride()) == "nhwc"


@given(
    shape=st.lists(st.integers(1, 4), min_size=2, max_size=5).map(tuple),
    order=st.randoms(use_true_random=False),
)
def test_layout_of_any_permutation(shape, order):
    """Dense in an order of axes is nchw or nhwc exactly where torch calls such a view contiguous:
    axes of extent 1 do not matter."""
    axes = list(range(len(shape)))
    order.shuffle(axes)
    memory = torch.empty([shape[axis] for axis in axes])
    x = memory.permute([axes.index(axis) for axis in range(len(shape))])
    assert tuple(x.shape) == shape
    expected = "strided"
    if x.movedim(1, -1).is_contiguous():
        expected = "nhwc"
    if x.is_contiguous():
        expected = "nchw"
    assert layout_of(shape, x.stride()) == expected


def test_layout_ignores_strides_of_single_extents():
    assert layout_of((1, 3, 1, 5), (7, 5, 99, 1)) == "nchw"
    assert layout_of((1, 3, 1, 5), (7, 1, 99, 3)) == "nhwc"


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("shape", [*SHAPES, (2, 1, 4, 1)], ids=str)
def test_dense_tensors_have_dense_strides(shape, layout):
    x = torch.randn(shape)
    expected = LAYOUTS[layout](x)
    for place in LAYOUTS.values():
        made = dense(place(x), layout)
        assert torch.equal(made, x)
        assert layout_of(shape, made.stride()) == layout_of(shape, expected.stride())
    made = empty(x.double(), shape, layout, torch.float16)
    assert (made.shape, made.dtype) == (x.shape, torch.float16)
    if 1 not in shape:
        assert dense_strides(shape, layout) == made.stride() == expected.stride()


def test_a_dense_tensor_is_not_copied():
    x = torch.randn(2, 3, 4, 5)
    assert dense(x, "nchw").data_ptr() == x.data_ptr()
    last = channels_last(x)
    assert dense(last, "nhwc").data_ptr() == last.data_ptr()
    assert dense(x, "nhwc").data_ptr() != x.data_ptr()


def test_results_are_channels_last_only_where_the_input_is():
    x = torch.randn(2, 3, 4, 5)
    for place, layout in ((LAYOUTS["nchw"], "nchw"), (channels_last, "nhwc"), (strided, "nchw")):
        assert result_layout_of(place(x)) == layout


# ---- modules and plans ---------------------------------------------------------------------------


@pytest.mark.parametrize("axes", MODULES)
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_layout_in_is_layout_out(axes, gradients, dtype):
    conv = MODULES[axes](6, 8, 3, num_groups=2, activation="gelu", dtype=dtype)
    alone = MODULES[axes](6, 8, 3, 2, activation="gelu", dtype=dtype)
    norm = GroupNorm(2, 6, activation="gelu", order="norm_act", dtype=dtype)
    x = torch.randn(2, 6, *SPATIAL[axes], dtype=dtype, requires_grad=gradients)
    for module in (conv, alone, norm):
        with torch.set_grad_enabled(gradients):
            expected = module(x)
            last = module(channels_last(x))
            other = module(strided(x.detach()))
        assert expected.is_contiguous(), module
        assert is_channels_last(last), module
        assert not is_channels_last(other), module
        torch.testing.assert_close(last, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(other, expected, rtol=1e-5, atol=1e-5)


def test_channels_last_weights_are_served():
    module = perturbed(ConvTransposeActNorm2d(6, 8, 3, num_groups=2, activation="gelu"))
    x = torch.randn(2, 6, 5, 6)
    expected = module(x)
    other = copy.deepcopy(module).to(memory_format=torch.channels_last)
    assert not other.conv_transpose.weight.is_contiguous()
    torch.testing.assert_close(other(x), expected, rtol=1e-5, atol=1e-5)
    both = other(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(both, expected, rtol=1e-5, atol=1e-5)
    assert both.is_contiguous(memory_format=torch.channels_last)


#: Weights' extents, and those of an input; beside ordinary ones, where both dense layouts are alike
#: or nearly so: filters of one tap, an output channel a group, one input channel.
WEIGHTS = {
    (6, 8, 3, 2): (5, 7),
    (6, 8, 1, 1): (5, 7),
    (6, 1, 3, 3): (5, 7),
    (1, 8, 3, 3): (5, 7),
    (6, 8, 3, 1): (5, 7),
    (6, 8, 3): (9,),
    (6, 8, 2, 3, 2): (4, 3, 5),
}


@pytest.mark.parametrize("kernel", [None, "torch"])
@pytest.mark.parametrize("place", LAYOUTS)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("shape", WEIGHTS, ids=str)
def test_a_weights_gradient_lies_as_the_weight(shape, stride, place, kernel, force, compiled):
    """For either layout of the input: by autograd, by the operator of the gradients and its fake
    implementation, and compiled."""
    if kernel is not None:
        force(kernel)
    weight = LAYOUTS[place](torch.randn(shape)).requires_grad_()
    axes, groups = weight.dim() - 2, 6 if shape[1] == 1 else 1
    layout = result_layout_of(weight)
    geometry = geometry_of(weight, out_channels=shape[1] * groups, groups=groups)
    assert geometry.weight_shape == shape
    assert geometry.weight_layout == layout

    def call(x, weight):
        return conv_transpose_act_norm(
            x, weight, stride=stride, groups=groups, activation="gelu", num_groups=1
        )

    traced = compiled(call, fullgraph=True, backend="aot_eager")
    for form in ("nchw", "nhwc"):
        x = LAYOUTS[form](torch.randn(2, shape[0], *WEIGHTS[shape]))
        # Where torch's operators serve all parts autograd follows them by itself.
        outputs = [function(x, weight) for function in (traced, call)[: 2 if kernel is None else 1]]
        grads = [torch.autograd.grad(each, weight, cotangent(each))[0] for each in outputs]
        lists = (stride,) * axes, (0,) * axes, (0,) * axes, (1,) * axes
        norm = (1, None, None, 1e-5, None, None, None)
        arguments = (x, weight.detach(), None, *lists, groups, "gelu", "act_norm", *norm)
        output, *saved = CONV(*arguments, True)
        needs = [False, True, False, False, False]
        asked = (cotangent(output), *saved, needs, *arguments)
        grads.append(CONV_BACKWARD(*asked)[1])
        for grad in (*grads, of_fakes(CONV_BACKWARD, asked)[1]):
            assert grad.shape == shape
            assert layout_of(shape, grad.stride()) == layout
        for grad in grads[1:]:
            torch.testing.assert_close(grad, grads[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_channels_last_module_accumulates_its_weights_gradient_as_it_is(axes, backend, compiled):
    """Autograd keeps a gradient that lies as its parameter, and copies any other."""
    form = {2: torch.channels_last, 3: torch.channels_last_3d}[axes]
    module = perturbed(MODULES[axes](6, 8, 3, num_groups=2, activation="gelu"))
    x = torch.randn(2, 6, *SPATIAL[axes])
    module(x).square().mean().backward()
    expected = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    module = module.to(memory_format=form)
    called = module if backend is None else compiled(module, fullgraph=True, backend=backend)
    given = []
    weight = module.conv_transpose.weight
    weight.register_hook(lambda grad: given.append(grad.data_ptr()))
    called(x.contiguous(memory_format=form)).square().mean().backward()
    for parameter, grad in zip(module.parameters(), expected, strict=True):
        assert parameter.grad.stride() == parameter.stride()
        assert parameter.grad.dtype == parameter.dtype
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-5)
    assert is_channels_last(weight.grad)
    assert given == [weight.grad.data_ptr()]


def test_one_plan_does_not_serve_another_layout_or_alignment(monkeypatch):
    """Same shape and dtype, other memory: each call runs a plan of its layout and alignment."""
    module = perturbed(ConvTransposeActNorm2d(5, 8, 3, num_groups=2, activation="relu"))
    norm = perturbed(GroupNorm(5, 5))
    x = torch.randn(3, 5, 7, 9)
    aligned = memory_at(x, 0)
    assert aligned.data_ptr() % 16 == 0
    ran = []

    def spied(run):
        def spy(plan, *tensors):
            ran.append(plan.problem)
            return run(plan, *tensors)

        return spy

    for plan in (ConvTransposePlan, GroupNormPlan):
        monkeypatch.setattr(plan, "run", spied(plan.run))
    inputs = [
        (aligned, "nchw", True),
        (memory_at(x, 4), "nchw", False),
        (channels_last(x), "nhwc", None),
        (strided(x), "strided", None),
        (memory_at(x, 8), "nchw", False),
        (aligned, "nchw", True),
    ]
    with torch.no_grad():
        for each in (module, norm):
            expected = each(x)
            for _ in range(2):  # the second time from the cache
                for other, layout, is_aligned in inputs:
                    ran.clear()
                    torch.testing.assert_close(each(other), expected, rtol=1e-5, atol=1e-5)
                    (problem,) = ran
                    assert problem.layout == layout
                    assert problem.aligned == (other.data_ptr() % 16 == 0)
                    if is_aligned is not None:
                        assert problem.aligned == is_aligned
                    (explanation,) = explained(each, other)
                    assert explanation.problem == problem
