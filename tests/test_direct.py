"""Training around torch's dispatcher: what autograd is asked for there is what it gives through it.

The functional forms on plain tensors go direct; the same calls inside a dispatch mode do not.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import reference
import torch
from folding import watch_folding
from problems import NARROW_VECTORS, NEEDS_WIDE_VECTORS
from reference import channels_last
from torch.utils.checkpoint import checkpoint

from fusedconv import functional, ops


def norm(x, weight, bias):
    return functional.group_norm(x, 2, weight, bias, 1e-3, activation="gelu", order="norm_act")


def conv(x, weight, bias, norm_weight, norm_bias):
    return functional.conv_transpose_act_norm(
        x, weight, bias, 2, 1, 1, activation="gelu", num_groups=3, norm_weight=norm_weight,
        norm_bias=norm_bias, eps=1e-3,
    )  # fmt: skip


MEAN, VARIANCE = torch.linspace(-1, 1, 6), torch.linspace(0.5, 2, 6)


def batch_norm(x, weight, bias, norm_weight, norm_bias):
    return functional.conv_transpose_act_norm(
        x, weight, bias, 2, 1, 1, activation="gelu", norm="batch", norm_weight=norm_weight,
        norm_bias=norm_bias, running_mean=MEAN, running_var=VARIANCE, eps=1e-3, order="norm_act",
    )  # fmt: skip


def composed_norm(x, weight, bias):
    return reference.group_norm(x, 2, weight, bias, 1e-3, "gelu", "norm_act")


def composed_conv(x, weight, bias, norm_weight, norm_bias):
    return reference.conv_transpose_act_norm(
        x, weight, bias, 2, 1, 1, activation="gelu", num_groups=3, norm_weight=norm_weight,
        norm_bias=norm_bias, eps=1e-3,
    )  # fmt: skip


def composed_batch_norm(x, weight, bias, norm_weight, norm_bias):
    x = torch.nn.functional.conv_transpose2d(x, weight, bias, 2, 1, 1)
    x = torch.nn.functional.batch_norm(x, MEAN, VARIANCE, norm_weight, norm_bias, eps=1e-3)
    return torch.nn.functional.gelu(x)


#: A call, the composition that it stands for, and the shapes of its tensors.
CALLS = {
    "norm": (norm, composed_norm, ((3, 4, 5, 6), (4,), (4,))),
    "conv": (conv, composed_conv, ((3, 4, 5, 6), (4, 6, 3, 3), (6,), (6,), (6,))),
    "batch_norm": (
        batch_norm, composed_batch_norm, ((3, 4, 5, 6), (4, 6, 3, 3), (6,), (6,), (6,))
    ),
}  # fmt: skip


@pytest.fixture(params=CALLS)
def case(request, monkeypatch, force):
    if request.param == "batch_norm":
        watch_folding(monkeypatch)
        force("cpu_conv_transpose,torch_epilogue_backward")
    return CALLS[request.param]


@pytest.fixture(autouse=True)
def _fused(force):
    """Not torch's own operators, whose graph has nothing of ours in it."""
    force("cpu_conv_transpose,cpu_group_norm,cpu_group_norm_backward")


@pytest.fixture
def through_the_dispatcher(monkeypatch):
    """Makes every later call go through it."""

    def switch():
        for module in (ops, ops.common, ops.batch_norm):
            monkeypatch.setattr(module, "goes_direct", lambda *arguments: False)
        monkeypatch.setattr(ops, "recall", lambda *arguments: None)

    return switch


def leaves(shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def loss(output):
    return (output * reference.cotangent(output)).sum()


def gradients(call, tensors, **keywords):
    return torch.autograd.grad(loss(call(*tensors)), tensors, **keywords)


def assert_equal(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


def assert_close(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_the_call_goes_direct(case):
    """The node of the graph is the one that no operator made."""
    call, _, shapes = case
    assert call(*leaves(shapes)).grad_fn.name() in ("DirectBackward", "DirectBatchNormBackward")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_both_ways_give_the_same_bits(case, dtype, through_the_dispatcher):
    """But for a BatchNorm's folding, which is torch's behind the dispatcher."""
    call, _, shapes = case
    tensors = leaves(shapes, dtype)
    direct = (call(*tensors), *gradients(call, tensors))
    through_the_dispatcher()
    output = call(*tensors)
    assert "Direct" not in output.grad_fn.name()
    same = assert_close if call is batch_norm and dtype == torch.float32 else assert_equal
    same(direct, (output, *gradients(call, tensors)))


# ---- derivatives ---------------------------------------------------------------------------------


def test_second_derivatives(case):
    call, composed, shapes = case

    def penalty(function):
        tensors = leaves(shapes)
        output = function(*tensors)
        grads = torch.autograd.grad(loss(output), tensors, create_graph=True)
        total = output.square().sum() + sum(grad.square().sum() for grad in grads)
        return torch.autograd.grad(total, tensors)

    assert_close(penalty(call), penalty(composed))


def test_gradients_to_differentiate_are_those_of_the_first_kind(case):
    call, _, shapes = case
    tensors = leaves(shapes)
    assert_close(gradients(call, tensors, create_graph=True), gradients(call, tensors))


def test_a_hessian_and_a_jacobian(case):
    """torch.autograd.functional differentiates plain tensors, without a transform."""
    call, composed, shapes = case
    tensors = tuple(t.detach() for t in leaves([(1, *shapes[0][1:3], 3), *shapes[1:]]))

    def of(function):
        one = torch.autograd.functional.jacobian(lambda x: function(x, *tensors[1:]), tensors[0])
        two = torch.autograd.functional.hvp(
            lambda x: loss(function(x, *tensors[1:])), tensors[0], tensors[0]
        )[1]
        return one, two

    assert_close(of(call), of(composed))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_batched_gradients(case):
    """What torch.autograd.functional.jacobian(vectorize=True) makes of the backward pass."""
    call, composed, shapes = case
    results = []
    for function in (call, composed):
        tensors = leaves(shapes)
        output = function(*tensors)
        grads = torch.stack([reference.cotangent(output) * scale for scale in (1.0, -2.0, 0.5)])
        results.append(torch.autograd.grad(output, tensors, grads, is_grads_batched=True))
    assert_close(*results)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_a_transform_of_the_backward_pass_of_a_direct_call(case):
    call, composed, shapes = case

    def mapped(function):
        tensors = leaves(shapes)
        output = function(*tensors)

        def pull(grad):
            return torch.autograd.grad(output, tensors, grad, retain_graph=True)

        grads = torch.stack([reference.cotangent(output), -reference.cotangent(output)])
        return torch.vmap(pull)(grads)

    assert_close(mapped(call), mapped(composed))


# ---- graphs --------------------------------------------------------------------------------------


def test_a_graph_that_is_kept_serves_twice(case):
    call, _, shapes = case
    tensors = leaves(shapes)
    total = loss(call(*tensors))
    first = torch.autograd.grad(total, tensors, retain_graph=True)
    assert_equal(first, torch.autograd.grad(total, tensors))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(total, tensors)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(case, reentrant):
    call, _, shapes = case
    tensors = leaves(shapes)
    expected = gradients(call, tensors)
    output = checkpoint(call, *tensors, use_reentrant=reentrant)
    loss(output).backward()
    assert_equal([t.grad for t in tensors], expected)


def test_saved_tensors_are_packed(case):
    """What autograd would save, its hooks get, and what they give back is what is used."""
    call, _, shapes = case
    tensors = leaves(shapes)
    expected = gradients(call, tensors)
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tensor)
        return tensor.detach().clone()

    def unpack(tensor):
        unpacked.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        output = call(*tensors)
    assert {t.data_ptr() for t in tensors} <= {t.data_ptr() for t in packed}
    assert_equal(torch.autograd.grad(loss(output), tensors), expected)
    assert len(unpacked) == len(packed)
    with torch.autograd.graph.save_on_cpu():
        output = call(*tensors)
    assert_equal(torch.autograd.grad(loss(output), tensors), expected)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize(
    ("extra", "saved"),
    [({}, 0), ({"activation": "relu"}, 1), ({"num_groups": 2}, 3)],
    ids=["bias", "activation", "norm"],
)
def test_nothing_is_saved_that_no_gradient_reads(
    extra, saved, layout, direct, force, through_the_dispatcher
):
    """Beside input, weight and bias: the convolution's output, a norm's mean and deviation."""
    force("cpu,torch_convolution_backward,torch_epilogue_backward")
    x, weight, bias = leaves([(2, 6, 7, 9), (6, 4, 2, 2), (4,)])
    x = channels_last(x.detach()).requires_grad_() if layout == "nhwc" else x
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor

    if not direct:
        through_the_dispatcher()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = functional.conv_transpose_act_norm(x, weight, bias, 2, **extra)
    own = {t.data_ptr() for t in (x, weight, bias)}
    assert len([t for t in packed if t.numel() and t.data_ptr() not in own]) == saved
    assert not output._is_view()


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("spatial", [(7,), (7, 9), (3, 7, 9)], ids=len)
def test_outputs_that_lie_right_are_not_copied(
    spatial, requires_grad, monkeypatch, through_the_dispatcher
):
    """Channels last through the operator, where what kernels return may be a view."""
    through_the_dispatcher()
    kernel = (2,) * len(spatial)
    x = channels_last(torch.randn(2, 6, *spatial)).requires_grad_(requires_grad)
    weight, clones = torch.randn(6, 4, *kernel), []
    clone = torch.Tensor.clone
    monkeypatch.setattr(
        torch.Tensor, "clone", lambda t, **kw: (clones.append(t), clone(t, **kw))[1]
    )
    functional.conv_transpose_act_norm(x, weight, None, 2, num_groups=2, activation="relu")
    assert not clones


def test_saving_may_be_forbidden(case):
    call, _, shapes = case
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("not here"),
        pytest.raises(RuntimeError, match="not here"),
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    ):
        call(*leaves(shapes))


@pytest.mark.parametrize("index", [0, 1])
def test_a_saved_tensor_that_is_changed_raises(case, index):
    call, _, shapes = case
    tensors = leaves(shapes)
    output = call(*tensors)
    with torch.no_grad():
        tensors[index].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss(output).backward()


def test_the_output_may_be_changed(case):
    """It is not saved."""
    call, composed, shapes = case
    results = []
    for function in (call, composed):
        tensors = leaves(shapes)
        output = function(*tensors).mul_(3).add_(1)
        loss(output.square()).backward()
        results.append([output, *(t.grad for t in tensors)])
    assert_close(*results)


def test_a_graph_holds_its_tensors_no_longer_than_it_lives(case):
    call, _, shapes = case
    tensors = leaves(shapes)
    x = tensors[0] * 1
    alive = weakref.ref(x)
    output = call(x, *tensors[1:])
    del x
    assert alive() is not None
    gc.disable()  # what a cycle held would stay
    try:
        del output
        assert alive() is None
    finally:
        gc.enable()


def test_other_outputs_have_no_gradient(case):
    """Statistics are saved, never differentiated; without gradients nothing is recorded."""
    call, _, shapes = case
    tensors = leaves(shapes)
    with torch.no_grad():
        assert call(*tensors).grad_fn is None
    with torch.inference_mode():
        assert call(*tensors).is_inference()
    plain = [t.detach() for t in tensors]
    assert call(*plain).grad_fn is None
    assert not call(*plain).requires_grad


def test_tensors_of_inference_cannot_be_saved(case):
    call, composed, shapes = case
    tensors = leaves(shapes)
    with torch.inference_mode():
        tensors[0] = tensors[0] * 1
    for function in (composed, call):
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
            function(*tensors)


# ---- hooks ---------------------------------------------------------------------------------------


def test_hooks_of_tensors_and_nodes(case):
    call, _, shapes = case
    tensors = leaves(shapes)
    expected = gradients(call, tensors)
    seen = []
    tensors[0].register_hook(lambda grad: seen.append("tensor") or grad * 2)
    tensors[1].register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.clone()))
    output = call(*tensors)
    output.grad_fn.register_prehook(lambda grads: seen.append(len(grads)))
    output.grad_fn.register_hook(lambda grads, _: seen.append(sum(g is not None for g in grads)))
    output.retain_grad()
    loss(output).backward()
    assert torch.equal(output.grad, reference.cotangent(output))
    assert_equal([t.grad for t in tensors], [2 * expected[0], *expected[1:]])
    assert "tensor" in seen
    assert len(shapes) in seen
    assert any(isinstance(each, torch.Tensor) and torch.equal(each, expected[1]) for each in seen)


def test_gradients_of_a_tensor_given_twice():
    """One leaf in the place of weight and bias gets both shares."""
    x, weight, _ = leaves(((3, 4, 5, 6), (4,), (4,)))
    shares = gradients(norm, [x, weight, weight.detach().clone().requires_grad_()])
    loss(norm(x, weight, weight)).backward()
    torch.testing.assert_close(weight.grad, shares[1] + shares[2])


def test_what_is_not_needed_is_not_computed(case):
    call, composed, shapes = case
    for needed in range(len(shapes)):
        results = []
        for function in (call, composed):
            tensors = [t.detach().requires_grad_(i == needed) for i, t in enumerate(leaves(shapes))]
            loss(function(*tensors)).backward()
            assert [t.grad is not None for t in tensors] == [t.requires_grad for t in tensors]
            results.append([tensors[needed].grad])
        assert_close(*results)


def test_a_part_of_the_graph(case):
    """autograd.grad for one leaf of those that need one, and backward(inputs=)."""
    call, _, shapes = case
    tensors = leaves(shapes)
    expected = gradients(call, tensors)
    assert_equal(torch.autograd.grad(loss(call(*tensors)), tensors[1:2]), expected[1:2])
    loss(call(*tensors)).backward(inputs=tensors[:1])
    assert [t.grad is not None for t in tensors] == [True, *[False] * (len(tensors) - 1)]
    assert torch.equal(tensors[0].grad, expected[0])


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_anomalies_are_detected(case):
    call, _, shapes = case
    tensors = leaves(shapes)
    expected = gradients(call, tensors)
    with torch.autograd.detect_anomaly():
        assert_equal(gradients(call, tensors), expected)
        output = call(*tensors)
        bad = torch.full_like(output, torch.nan)
        with (
            pytest.warns(UserWarning, match="Error detected in Direct"),
            pytest.raises(RuntimeError, match="returned nan values in its 0th output"),
        ):
            output.backward(bad)


def test_backward_under_autocast(case):
    """Autocast holds where it stands: gradients have their tensors' dtypes, and the same bits."""
    call, _, shapes = case
    tensors = leaves(shapes)
    expected = gradients(call, tensors)
    total = loss(call(*tensors))
    with torch.autocast("cpu", torch.bfloat16):
        actual = torch.autograd.grad(total, tensors)
    assert_equal(actual, expected)


def test_a_profiler_of_the_backward_pass_alone_sees_the_operator(case):
    call, _, shapes = case
    total = loss(call(*leaves(shapes)))
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as recorded:
        total.backward()
    names = {event.key for event in recorded.key_averages()}
    assert any(name.startswith("fusedconv::") and name.endswith("_backward") for name in names)


# ---- what is saved -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel_size", "stride"),
    [
        (1, 1),
        (2, 2),
        (3, 2),
        pytest.param(3, 1, marks=pytest.mark.skipif(NARROW_VECTORS, reason=NEEDS_WIDE_VECTORS)),
    ],
)
def test_the_output_may_be_written_in_place(kernel_size, stride, force):
    """As eager's: nn.ReLU(inplace=True) behind a convolution is common."""
    force("cpu,torch_convolution_backward")
    x, weight = leaves([(2, 6, 7, 9), (6, 4, kernel_size, kernel_size)])
    ours = functional.conv_transpose_act_norm(x, weight, None, stride).relu_()
    torchs = torch.nn.functional.conv_transpose2d(x, weight, None, stride).relu_()
    for grad, expected in zip(
        torch.autograd.grad(ours.sum(), [x, weight]),
        torch.autograd.grad(torchs.sum(), [x, weight]),
        strict=True,
    ):
        torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("forward", ["torch", "cpu_conv_transpose"])
def test_a_weight_in_channels_last_changes_no_gradient(forward, force):
    """torch's convolution then gives channels last, whatever the input is."""
    force(f"{forward},cpu_group_norm_backward")
    gradients = []
    for place in (lambda t: t, lambda t: t.contiguous(memory_format=torch.channels_last)):
        x, weight = leaves([(2, 6, 7, 9), (6, 8, 3, 3)])
        weight = place(weight.detach()).requires_grad_()
        output = functional.conv_transpose_act_norm(x, weight, activation="gelu", num_groups=2)
        gradients.append(torch.autograd.grad((output * output).sum(), [x, weight]))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
