"""BatchNorm of inference as the argument ``norm="batch"``, against torch's module. No GPU."""

from __future__ import annotations

import pytest
import torch
from converting import calls
from folding import watch_folding
from problems import explained
from reference import (
    ACTIVATIONS,
    LAYOUTS,
    ORDERS,
    TORCH_SCRIPTS,
    assert_as_accurate_as_torch,
    cotangent,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusedconv
from fusedconv import functional, ops
from fusedconv.kernels import batch_norm
from fusedconv.ops import seen

K = 6
NAMES = ("norm_weight", "norm_bias")
STATISTICS = ("running_mean", "running_var")
GIVEN = {"both": NAMES, "weight": NAMES[:1], "bias": NAMES[1:], "neither": ()}
#: Of the kernels on the processor, so that the plan is not one that autograd follows by itself.
OURS = "cpu_conv_transpose,torch_epilogue_backward"


def leaves(dtype=torch.float32, layout="nchw", given=NAMES, requires_grad=True):
    """Tensors by the names of arguments."""
    generator = torch.Generator().manual_seed(6)
    shapes = {"input": (2, 4, 5, 6), "weight": (4, K, 3, 3), "bias": (K,)}
    made = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in (shapes | dict.fromkeys(given, (K,))).items()
    }
    made["input"] = LAYOUTS[layout](made["input"])
    return {name: each.requires_grad_(requires_grad) for name, each in made.items()}


def statistics(dtype=torch.float32):
    return {
        "running_mean": torch.linspace(-1, 1, K, dtype=torch.float64).to(dtype),
        "running_var": torch.linspace(0.5, 2, K, dtype=torch.float64).to(dtype),
    }


def ours(tensors, activation=None, order="norm_act", eps=1e-3, **keywords):
    return functional.conv_transpose_act_norm(
        **tensors, stride=2, activation=activation, order=order, norm="batch", eps=eps, **keywords
    )


def torchs(tensors, activation=None, order="norm_act", eps=1e-3):
    act = ACTIVATIONS[activation]
    x = F.conv_transpose2d(tensors["input"], tensors["weight"], tensors["bias"], 2)
    x = act(x) if order == "act_norm" else x
    mean, variance, weight, bias = map(tensors.get, (*STATISTICS, *NAMES))
    # torch has no second derivatives of a bias alone.
    weight = torch.ones_like(bias) if weight is None and bias is not None else weight
    x = F.batch_norm(x, mean, variance, weight, bias, eps=eps)
    return act(x) if order == "norm_act" else x


def double(tensors):
    return {name: each.detach().double() for name, each in tensors.items()}


def gradients(function, tensors, of, **keywords):
    output = function(tensors, **keywords)
    return output, *torch.autograd.grad(output, [tensors[name] for name in of], cotangent(output))


# ---- what it computes ----------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_outputs(order, activation, dtype, layout):
    own = torch.float64 if dtype is torch.float64 else torch.float32
    tensors = leaves(dtype, layout, requires_grad=False) | statistics(own)
    exact = torchs(double(tensors), activation, order)
    narrow = {name: each.to(dtype) for name, each in tensors.items()}
    actual = ours(tensors, activation, order)
    floor = 1e-2 if dtype is torch.bfloat16 else 1e-6
    assert_as_accurate_as_torch(actual, torchs(narrow, activation, order), exact, floor)
    assert actual.is_contiguous(
        memory_format=torch.channels_last if layout == "nhwc" else torch.contiguous_format
    )


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("order", ORDERS)
def test_gradients_and_second_ones(given, order):
    def derivatives(function):
        own = leaves(torch.float64, given=GIVEN[given])
        output = function(own | statistics(torch.float64), "silu", order)
        first = torch.autograd.grad(output, [*own.values()], cotangent(output), create_graph=True)
        total = output.square().sum() + sum(each.square().sum() for each in first)
        return output, *first, *torch.autograd.grad(total, [*own.values()])

    for one, other in zip(derivatives(ours), derivatives(torchs), strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_of_running_statistics():
    """Which torch's module has none of."""
    own = leaves(torch.float64, requires_grad=False) | {
        name: each.requires_grad_() for name, each in statistics(torch.float64).items()
    }

    def composed(tensors):
        x = F.conv_transpose2d(tensors["input"], tensors["weight"], tensors["bias"], 2)
        mean, variance, weight, bias = (
            tensors[name][:, None, None] for name in (*STATISTICS, *NAMES)
        )
        return (x - mean) / (variance + 1e-3).sqrt() * weight + bias

    found, expected = (gradients(function, own, STATISTICS) for function in (ours, composed))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("here", [False, True])
def test_an_activation_that_no_kernel_has(order, here, monkeypatch):
    if here:
        watch_folding(monkeypatch)
    own = leaves()
    tensors = own | statistics()

    def composed(tensors):
        act = F.mish if order == "act_norm" else nn.Identity()
        x = act(F.conv_transpose2d(tensors["input"], tensors["weight"], tensors["bias"], 2))
        x = F.batch_norm(x, *map(tensors.get, (*STATISTICS, *NAMES)), eps=1e-3)
        return x if order == "act_norm" else F.mish(x)

    found = gradients(ours, tensors, own, activation="mish", order=order)
    for one, other in zip(found, gradients(composed, tensors, own), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


# ---- who sees it ---------------------------------------------------------------------------------


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_a_break(dynamic):
    own = leaves()
    tensors = own | statistics()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    found = gradients(compiled, tensors, own, activation="gelu")
    assert_close(found, gradients(torchs, tensors, own, activation="gelu"))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        for name, each in leaves(requires_grad=False).items():
            if name != "input":
                self.register_parameter(name, nn.Parameter(each))
        for name, each in statistics().items():
            self.register_buffer(name, each)

    def tensors(self, x):
        return {"input": x, **self._parameters, **self._buffers}

    def forward(self, x):
        return ours(self.tensors(x), "relu")


@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.")
@pytest.mark.parametrize("how", ["trace", "export", "fx"])
def test_graphs(how):
    layer, x = Layer(), leaves()["input"].detach()
    if how == "trace":
        graph = torch.jit.trace(layer, (x,))
    elif how == "export":
        graph = torch.export.export(layer, (x,)).module()
    else:
        graph = torch.fx.experimental.proxy_tensor.make_fx(layer)(x)
    other = torch.randn(3 if how == "trace" else 2, 4, 5, 6)
    torch.testing.assert_close(graph(other), torchs(layer.tensors(other), "relu"))


@TORCH_SCRIPTS
def test_transforms():
    tensors = leaves(requires_grad=False) | statistics()

    def of(function):
        def call(x, scale, mean):
            changed = {"input": x, "norm_weight": scale, "running_mean": mean}
            return function(tensors | changed, "gelu")

        given = tuple(tensors[name] for name in ("input", "norm_weight", "running_mean"))
        stacked = [torch.stack([each, each * 0.5]) for each in given]
        shared = (given[0], *stacked[1:])
        return (
            torch.vmap(call)(*stacked),
            torch.vmap(call, (None, 0, 0))(*shared),
            torch.func.grad(lambda *given: call(*given).square().sum(), (0, 1))(*given),
            torch.func.jvp(call, given, tuple(each.cos() for each in given)),
        )

    def composed(tensors, activation):
        folded = functional.fold_batch_norm(*map(tensors.get, (*STATISTICS, *NAMES)), 1e-3)
        x = F.conv_transpose2d(tensors["input"], tensors["weight"], tensors["bias"], 2)
        scale, shift = (each[:, None, None] for each in folded)
        return F.gelu(x * scale + shift)

    for found, expected in zip(of(ours), of(composed), strict=True):
        assert_close(
            torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(expected)
        )


class Tagged(torch.Tensor):
    pass


@pytest.mark.parametrize("name", ["input", "norm_weight", "running_var"])
def test_subclasses_see_it(name):
    tensors = leaves(requires_grad=False) | statistics()
    expected = ours(tensors)
    tensors[name] = tensors[name].as_subclass(Tagged)
    result = ours(tensors)
    assert type(result) is Tagged
    # Torch's operators fold what somebody sees.
    torch.testing.assert_close(result.as_subclass(torch.Tensor), expected)


@pytest.mark.parametrize("fake", [False, True])
def test_without_memory(fake):
    tensors = leaves() | statistics()
    expected = ours(tensors)
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else torch.device("meta"):
        bare = {
            name: torch.empty_like(each, device=None if fake else "meta", requires_grad=True)
            for name, each in tensors.items()
        }
        result = ours(bare)
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    assert result.requires_grad


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_on_the_processor_is_torchs(low):
    own = leaves()
    tensors = own | statistics()
    with torch.autocast("cpu", low):
        expected, result = torchs(tensors, "gelu"), ours(tensors, "gelu")
        result.float().sum().backward()
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)
    assert all(each.grad.dtype == torch.float32 for each in own.values())


def test_explained():
    assert calls(Layer(), leaves()["input"]) == ["conv affine relu"]


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"running_mean": None}, ValueError, "running_mean: got None for norm 'batch', expected a"),
        ({"running_var": None}, ValueError, "running_var: got None for norm 'batch', expected a t"),
        (
            {"norm": "layer"},
            ValueError,
            r"running_mean: got a tensor of shape \(6,\) for norm 'layer', expected None",
        ),
        (
            {"norm": None, "norm_weight": None, "norm_bias": None, "running_mean": None},
            ValueError,
            r"running_var: got a tensor of shape \(6,\) for norm None, expected None",
        ),
        ({"running_mean": 3}, TypeError, "running_mean: got int, expected torch.Tensor or None"),
        (
            {"running_var": torch.ones(5)},
            ValueError,
            r"running_var: got shape \(5,\), expected \(6",
        ),
        ({"running_mean": torch.ones(1)}, ValueError, r"running_mean: got shape \(1,\), expected"),
        (
            {"norm_weight": torch.ones(7)},
            ValueError,
            r"norm_weight: got shape \(7,\), expected \(6",
        ),
        ({"norm_bias": torch.ones(2, 3)}, ValueError, r"norm_bias: got shape \(2, 3\), expected"),
        (
            {"running_var": torch.ones(6).double()},
            TypeError,
            "running_var: got dtype torch.float64",
        ),
        ({"running_var": torch.ones(6, device="meta")}, ValueError, "running_var: got device meta"),
        ({"num_groups": 2}, ValueError, "num_groups: got 2 for norm 'batch', expected None"),
        (
            {"input": torch.ones(4, 5, 6)},
            ValueError,
            r"input: got shape \(4, 5, 6\), expected 4 ax",
        ),
    ],
    ids=str,
)
def test_errors(changed, error, text):
    arguments = leaves(requires_grad=False) | statistics() | {"norm": "batch"} | changed
    with pytest.raises(error, match=f"^{text}"):
        functional.conv_transpose_act_norm(**arguments)


# ---- one node ----------------------------------------------------------------------------------


@pytest.fixture
def called(monkeypatch, force):
    force(OURS)
    return watch_folding(monkeypatch)


@pytest.fixture
def recalls(monkeypatch):
    """Whether each call was known again, in order."""
    found = []
    recall = ops.recall

    def noting(*arguments):
        known = recall(*arguments)
        found.append(known is not None)
        return known

    monkeypatch.setattr(ops, "recall", noting)
    return found


NODE = "DirectBatchNormBackward"
KNOWN = pytest.mark.skipif(seen._Guards is None, reason="torch has no guards of tensors")


@KNOWN
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_training_step_is_one_node(given, order, layout, dtype, called, recalls):
    own = leaves(dtype, layout, GIVEN[given])
    tensors = own | statistics()
    found = [gradients(ours, tensors, own, activation="gelu", order=order) for _ in range(2)]
    assert recalls == [False, True]
    assert called == 2 * (["fold"] + ["fold_gradients"] * bool(GIVEN[given]))
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)
    assert found[1][0].grad_fn.name() == NODE
    nodes = {node.name() for node, _ in found[1][0].grad_fn.next_functions if node is not None}
    assert nodes == {"torch::autograd::AccumulateGrad"}
    wide = {name: each.detach().double().requires_grad_() for name, each in own.items()}
    exact = gradients(torchs, wide | statistics(torch.float64), own, activation="gelu", order=order)
    eager = gradients(torchs, own | statistics(dtype), own, activation="gelu", order=order)
    for one, other, right in zip(found[1], eager, exact, strict=True):
        floor = 1e-2 if dtype is torch.bfloat16 else 1e-6
        assert_as_accurate_as_torch(one, other, right, floor)


@KNOWN
def test_inference(called, recalls):
    tensors = leaves(requires_grad=False) | statistics()
    found = [ours(tensors), ours(tensors)]
    with torch.no_grad():
        trained = leaves() | statistics()
        found += [ours(trained), ours(trained)]
    assert recalls == [False, True, False, True]
    assert called == 4 * ["fold"]
    for each in found:
        assert not each.requires_grad
        torch.testing.assert_close(each, torchs(tensors))


@KNOWN
@pytest.mark.parametrize("grad", [False, True])
def test_changes_between_calls_are_seen(grad, called, recalls):
    own = leaves(requires_grad=grad)
    tensors = own | statistics()
    ours(tensors)
    for name in ("weight", *NAMES, "running_mean", "running_var"):
        with torch.no_grad():
            tensors[name].mul_(1.5)
        result = ours(tensors)
        torch.testing.assert_close(result, torchs(tensors), rtol=1e-4, atol=1e-4)
        if grad:
            found = gradients(ours, tensors, own)
            assert_close(found, gradients(torchs, tensors, own))
    assert all(recalls[1:])


@KNOWN
@pytest.mark.parametrize("missing", [*NAMES, "bias"])
def test_calls_that_lack_a_tensor_are_others(missing, called, recalls):
    own = leaves()
    fewer = {name: each for name, each in own.items() if name != missing}
    for _ in range(2):
        for each in (own, fewer):
            expected = torchs({"bias": None} | each | statistics())
            assert_close([ours(each | statistics())], [expected])
    assert recalls == [False, False, True, True]


@pytest.mark.parametrize("needed", ["input", "weight", "bias", *NAMES])
def test_what_is_not_needed_is_not_computed(needed, called):
    for _ in range(2):
        own = {
            name: each.requires_grad_(name == needed)
            for name, each in leaves(requires_grad=False).items()
        }
        tensors = own | statistics()
        assert_close(gradients(ours, tensors, [needed]), gradients(torchs, tensors, [needed]))
    assert called == 2 * (["fold"] + ["fold_gradients"] * (needed in NAMES))


def test_recompute_is_the_same(called):
    own = leaves()
    tensors = own | statistics()
    for _ in range(2):
        plain, anew = (
            gradients(ours, tensors, own, activation="gelu", recompute=each)
            for each in (False, True)
        )
        assert anew[0].grad_fn.name() == NODE
        assert_close(anew, plain)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_first_call(reentrant, called):
    """Which saves as many tensors as the second, that knows the call."""
    own = leaves()
    tensors = own | statistics()
    output = checkpoint(
        lambda x: ours(tensors | {"input": x}), own["input"], use_reentrant=reentrant
    )
    output.backward(cotangent(output))
    expected = gradients(torchs, tensors, own)[1:]
    assert_close([each.grad for each in own.values()], expected)


def test_autograd_that_follows_torchs_operators_follows_the_fold(called, recalls, force):
    """No call that is known leaves weight or bias without a gradient."""
    force("torch")
    own = leaves()
    tensors = own | statistics()
    for _ in range(2):
        assert_close(gradients(ours, tensors, own), gradients(torchs, tensors, own))
    if seen._Guards is not None:
        assert recalls == [False, True]
    frozen = {name: each.detach() if name in NAMES else each for name, each in own.items()}
    for _ in range(2):
        found, expected = (
            gradients(function, frozen | statistics(), list(own)[:3]) for function in (ours, torchs)
        )
        assert_close(found, expected)
    if seen._Guards is not None:
        assert recalls == [False, True, False, True]


def test_running_statistics_that_need_gradients_are_not_folded_by_a_kernel(called):
    tensors = leaves(requires_grad=False) | statistics()
    tensors["running_mean"].requires_grad_()
    (found,) = torch.autograd.grad(ours(tensors).sum(), tensors["running_mean"])
    assert not called
    assert found.abs().min() > 0


def test_a_backward_pass_is_recorded(called):
    layer = Layer()
    x = leaves()["input"]
    ours(layer.tensors(x))
    kernels = [each.kernel for each in explained(layer, x, gradients=True)]
    assert len(kernels) == 2 and "torch_epilogue_backward" in kernels[1]


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_batched_gradients_of_a_known_call(called):
    own = leaves()
    tensors = own | statistics()

    def batched(function):
        output = function(tensors)
        grads = torch.stack([cotangent(output), -cotangent(output)])
        return torch.autograd.grad(output, [*own.values()], grads, is_grads_batched=True)

    ours(tensors)
    assert_close(batched(ours), batched(torchs))
    assert "fold_gradients" not in called


def test_converted_models_are_served_by_it(called):
    model = nn.Sequential(nn.ConvTranspose2d(4, K, 3, 2), nn.BatchNorm2d(K), nn.ReLU()).eval()
    x = leaves()["input"]
    expected = model(x)
    fusedconv.convert(model)
    for _ in range(2):
        result = model(x)
        assert result.grad_fn.name() == NODE
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_folding_takes_vectors_alone():
    assert batch_norm.folds(torch.ones(6), torch.ones(6), None, None)
    assert not batch_norm.folds(torch.ones(2, 3), torch.ones(2, 3), None, None)
