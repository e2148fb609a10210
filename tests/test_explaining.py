"""``fusedconv.explain``: the calls of one thread, each problem once, without gradients."""

from __future__ import annotations

import threading

import torch
from problems import explained

from fusedconv import functional


def test_equal_calls_are_explained_once_in_their_order():
    x, y = torch.randn(2, 4, 5), torch.randn(2, 4, 6)

    def calls():
        for each in (x, y, x):
            functional.group_norm(each, 2)

    assert [one.problem.spatial for one in explained(calls)] == [(5,), (6,)]


def test_the_call_saves_nothing_for_gradients():
    x = torch.randn(2, 4, 5, requires_grad=True)
    (explanation,) = explained(lambda: functional.group_norm(x, 2))
    assert not explanation.problem.save
    assert torch.is_grad_enabled()


def test_calls_of_other_threads_are_their_own():
    def call(channels):
        functional.group_norm(torch.randn(1, channels, 3), 1)

    def calls():
        other = threading.Thread(target=call, args=(5,))
        other.start()
        other.join()
        call(4)

    assert [one.problem.channels for one in explained(calls)] == [4]
