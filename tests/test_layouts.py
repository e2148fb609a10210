"""Layouts in memory: what comes out of the modules, and which plan serves which layout."""

from __future__ import annotations

import copy

import pytest
import torch
from problems import explained
from reference import channels_last, is_channels_last, memory_at, strided
from systems import MODULES, SPATIAL, perturbed

from fusedconv import ConvTransposeActNorm2d, GroupNorm
from fusedconv.kernels.cpu import CpuPlan


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


def test_one_plan_does_not_serve_another_layout_or_alignment(monkeypatch):
    """Same shape and dtype, other memory: each call runs a plan of its layout and alignment."""
    module = perturbed(ConvTransposeActNorm2d(5, 8, 3, num_groups=2, activation="relu"))
    norm = perturbed(GroupNorm(5, 5))
    x = torch.randn(3, 5, 7, 9)
    aligned = memory_at(x, 0)
    assert aligned.data_ptr() % 16 == 0
    ran = []
    run = CpuPlan.run

    def spy(plan, *tensors):
        ran.append(plan.problem)
        return run(plan, *tensors)

    monkeypatch.setattr(CpuPlan, "run", spy)
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
