"""fusedconv.revert: of models, their copies, and classes that others made of converted ones."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from converting import assert_same, calls, converted
from test_conversion import image, image_1, network
from torch import nn
from torch.nn.utils import parametrize

import fusedconv


def test_reverting():
    model, original = converted(network())
    assert type(model) is not nn.Sequential and isinstance(model, nn.Sequential)
    assert type(model[0]) is not nn.ConvTranspose2d and isinstance(model[0], nn.ConvTranspose2d)
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        fusedconv.revert(other)
        assert [type(m) for m in other.modules()] == [type(m) for m in original.modules()]
        assert calls(other, image()) == []
        assert torch.equal(other(image_1), original(image_1))
    report = fusedconv.convert(model)
    report.revert()
    assert type(model) is nn.Sequential
    before = [dict(vars(m)) for m in model.modules()]
    report = fusedconv.convert(model, (image_1,), dry_run=True)
    assert report.dry_run and len(report.replaced) == 2
    assert "would be replaced in modules: 2" in str(report)
    assert before == [dict(vars(m)) for m in model.modules()]
    assert type(model) is nn.Sequential


class Halved(nn.Module):
    """A parametrisation."""

    def forward(self, weight):
        return weight / 2


def test_parametrised_behind_their_conversion():
    model, original = converted(network())
    for each in (model, original):
        parametrize.register_parametrization(each[0], "weight", Halved())
        parametrize.register_parametrization(each[1], "bias", Halved())
    assert calls(model, image()) == ["conv group gelu", "conv group"]
    assert_same(model, original, image_1)
    fusedconv.revert(model)
    assert calls(model, image()) == []
    assert [m.__class__.__mro__[1:] for m in model] == [m.__class__.__mro__[1:] for m in original]
    assert_same(model, original, image_1)
    for name in ("weight", "bias"):
        parametrize.remove_parametrizations(model[0 if name == "weight" else 1], name)
    assert [type(m) for m in model] == [type(m) for m in network()]


class Wrapper:
    """A mixin that a library puts in front of a module's class, as FSDP2 does."""


def test_reverting_what_others_have_made_of_a_converted_class():
    model, original = converted(network())
    for module in (model[0], model[3]):
        made = type(f"Wrapped{type(module).__name__}", (Wrapper, type(module)), {"kept": True})
        module.__class__ = made
    fusedconv.revert(model)
    assert calls(model, image()) == []
    assert torch.equal(model(image_1), original(image_1))
    for module in (model[0], model[3]):
        assert type(module).__mro__[1:3] == (Wrapper, nn.ConvTranspose2d)
        assert type(module).kept and type(module).__name__ == "WrappedConvTranspose2d"


def test_a_class_made_in_code_from_a_converted_one_is_not_reverted():
    model, _ = converted(network())
    before = [type(each) for each in model]

    class Extended(type(model[3])):
        def forward(self, x):
            return super().forward(x)

    model[3].__class__ = Extended
    assert type(copy.deepcopy(model[3])) is Extended
    with pytest.raises(TypeError, match=r"3: got .*Extended, .*expected a converted class"):
        fusedconv.revert(model)
    assert [type(each) for each in model] == [*before[:3], Extended, *before[4:]]
