"""Gradients where hooks on saved tensors give back others than were saved."""

from __future__ import annotations

import copy

import pytest
import torch
from reference import channels_last
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import fusedconv
from fusedconv.functional import conv_transpose_act_norm, group_norm


def strided(tensor):
    return torch.stack([tensor, tensor], -1)[..., 0]


def otherwise(tensor):
    """Channels last where it was not, and channels first where it was."""
    if tensor.dim() != 4:
        return tensor.clone()
    if tensor.is_contiguous():
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor.contiguous()


FORMS = {"contiguous": torch.Tensor.contiguous, "otherwise": otherwise, "strided": strided}
VECTOR = torch.linspace(0.5, 2, 8)
MEAN, VARIANCE = torch.linspace(-1, 1, 8), torch.linspace(0.5, 1.5, 8)


def layer(**keywords):
    def call(x, weight, vector):
        return conv_transpose_act_norm(x, weight, vector, 2, 1, **keywords)

    return call


CALLS = {
    "group": lambda x, w, v: layer(activation="gelu", num_groups=2, norm_weight=v)(x, w, v),
    "relu": layer(activation="relu"),
    "gelu": layer(activation="gelu"),
    "bare": layer(),
    "layer": lambda x, w, v: layer(norm="layer", norm_weight=v, activation="silu")(x, w, v),
    "batch": lambda x, w, v: layer(
        norm="batch", norm_weight=v, running_mean=MEAN, running_var=VARIANCE, activation="relu"
    )(x, w, v),
    "group norm": lambda x, w, v: group_norm(x @ w.flatten(1)[:7, :8], 2, v[:4], activation="silu"),
    "recomputed": layer(activation="gelu", norm="instance", recompute=True),
}


def leaves(layout):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 4, 9, 7, generator=generator)
    weight = torch.randn(4, 8, 3, 3, generator=generator)
    given = [channels_last(x) if layout == "nhwc" else x, weight, VECTOR]
    return [each.clone().requires_grad_() for each in given]


def gradients(name, layout, form, again=False):
    given = leaves(layout)
    if name == "group norm":
        given[1] = torch.randn(7, 2, 2, 2, generator=torch.Generator().manual_seed(1))
        given[1].requires_grad_()
    if form is None:
        y = CALLS[name](*given)
    else:
        with saved_tensors_hooks(lambda tensor: tensor, FORMS[form]):
            y = CALLS[name](*given)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(5))
    found = torch.autograd.grad(y, given, grad, create_graph=again)
    if again:
        return torch.autograd.grad(sum(each.sin().sum() for each in found), given[:2])
    return found


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CALLS)
def test_what_hooks_give_back_is_brought_back(name, form, layout):
    """By our nodes: torch's own take some of it for what was saved."""
    expected = gradients(name, layout, None)
    fusedconv.clear_cache()
    # What a call under hooks has planned must serve those without, and the other way round.
    for each in (form, None, form, None):
        torch.testing.assert_close(gradients(name, layout, each), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CALLS)
def test_second_derivatives_go_through_what_hooks_give_back(name):
    expected = gradients(name, "nhwc", None, again=True)
    torch.testing.assert_close(gradients(name, "nhwc", "otherwise", again=True), expected)


@pytest.mark.parametrize("name", ["group", "group norm", "bare"])
def test_another_dtype_is_refused(name, monkeypatch):
    monkeypatch.setitem(FORMS, "double", torch.Tensor.double)
    with pytest.raises(RuntimeError, match=r"torch\.float64 back from a hook"):
        gradients(name, "nchw", "double")


def test_an_expanded_input_is_brought_back():
    x = torch.randn(1, 4, 1, 7).requires_grad_()
    weight = torch.randn(4, 8, 3, 3).requires_grad_()
    found = []
    for hooked in (False, True):
        wide = x.expand(2, 4, 9, 7)
        with saved_tensors_hooks(lambda tensor: tensor, torch.clone if hooked else lambda t: t):
            y = conv_transpose_act_norm(wide, weight, norm="instance", activation="gelu")
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(5))
        found.append(torch.autograd.grad(y, (x, weight), grad))
    torch.testing.assert_close(found[1], found[0])


def test_a_module_whose_saved_tensors_go_to_the_processor():
    """torch's save_on_cpu with pinned memory forgets channels last."""
    ours = fusedconv.ConvTransposeActNorm2d(4, 8, 3, 2, 1, num_groups=2, activation="gelu")
    eager = nn.Sequential(
        copy.deepcopy(ours.conv_transpose), nn.GELU(), copy.deepcopy(ours.group_norm)
    )
    x = channels_last(torch.randn(2, 4, 9, 7))
    for hooked in (True, False, False):
        outputs = []
        for model in (ours, eager):
            model.zero_grad()
            form = FORMS["contiguous"] if hooked else torch.Tensor.detach
            with saved_tensors_hooks(lambda tensor: tensor, form):
                y = model(x)
            y.square().sum().backward()
            outputs.append([parameter.grad.clone() for parameter in model.parameters()])
        torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-3)
