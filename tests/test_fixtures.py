"""The suite's own fixtures: what a test switches for the process is put back, not in silence."""

from __future__ import annotations

import os
import warnings

import conftest
import pytest
import torch

CHANGES = {
    "default dtype": torch.float64,
    "threads": torch.get_num_threads() + 1,
    "gradients": False,
    "anomaly detection": True,
    "deterministic algorithms": 1,
    "matmul precision": "medium",
    "cudnn.enabled": False,
    "cudnn.benchmark": True,
    "cudnn.deterministic": True,
    "autocast cache": False,
    "environment": {"FUSEDCONV_KERNEL": "torch"},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_switch_left_changed_fails_the_test_and_is_put_back(name):
    get, set_to = conftest.SWITCHES[name]
    before = get()
    assert before != CHANGES[name]
    with pytest.raises(AssertionError, match=name), conftest.switches_kept():
        set_to(CHANGES[name])
    assert get() == before


@pytest.mark.parametrize("allowed", [True, False])
def test_the_convolution_precision_is_put_back(allowed, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
    before = conftest._conv_precision()
    with pytest.raises(AssertionError, match="convolution"), conftest.switches_kept():
        torch.backends.cudnn.allow_tf32 = not allowed
    assert conftest._conv_precision() == before
    if hasattr(torch.backends.cudnn, "conv"):
        with pytest.raises(AssertionError, match="convolution"), conftest.switches_kept():
            torch.backends.cudnn.conv.fp32_precision = "ieee" if allowed else "tf32"
        assert conftest._conv_precision() == before


def test_the_synchronisation_mode_ends_with_its_block(monkeypatch, no_synchronisation):
    """torch sets the mode first and warns then; a warning that is an error must not leave it on."""
    mode = 0

    def set_mode(value):
        nonlocal mode
        mode = {"default": 0, "warn": 1, "error": 2}.get(value, value)
        warnings.warn(
            "Synchronization debug mode is a prototype feature and does not yet detect all "
            "synchronizing operations",
            stacklevel=2,
        )

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)

    def fail_with_the_mode_on():
        assert mode == 2
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), no_synchronisation():
        fail_with_the_mode_on()
    assert mode == 0
    with pytest.raises(AssertionError, match="synchronisation"), conftest.switches_kept():
        conftest._set_synchronisation_mode("error")
    assert mode == 0
    # Fakes of CUDA must not outlast the test's body: the switches are looked at behind it.
    monkeypatch.undo()


def test_the_environment_of_others_is_left_alone(monkeypatch):
    monkeypatch.setenv("OTHER_VARIABLE", "1")
    with pytest.raises(AssertionError, match="environment"), conftest.switches_kept():
        os.environ.update(FUSEDCONV_KERNEL="torch", OTHER_VARIABLE="2")
    assert os.environ["OTHER_VARIABLE"] == "2"
