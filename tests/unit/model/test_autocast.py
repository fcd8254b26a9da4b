"""Autocast in several threads: what one remembers of its weights, no other may make it forget."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.engine.model.replay import autocast_here, autocasting

BFLOAT16 = {"cpu": torch.bfloat16}


def gradient_of_two_uses(between=lambda: None):
    """Of a weight that a forward under autocast uses twice: one use gives 1, the other 2⁻⁹, which
    their sum in bfloat16 loses, and one in float32 does not."""
    weight = nn.Parameter(torch.ones(1, 1))
    with autocasting(BFLOAT16):
        first = F.linear(torch.ones(1, 1), weight)
        between()
        second = F.linear(torch.full((1, 1), 2.0**-9), weight)
    (first + second).sum().backward()
    return weight.grad.item()


def test_another_thread_that_leaves_autocast_changes_no_gradient():
    def other():
        with autocasting(BFLOAT16):
            pass

    def let_the_other_try():
        thread.start()
        thread.join(1.0)

    thread = threading.Thread(target=other)
    assert gradient_of_two_uses(let_the_other_try) == gradient_of_two_uses() == 1.0
    thread.join()


def test_within_a_callers_region_weights_that_have_changed_are_cast_anew():
    weight = nn.Parameter(torch.ones(1, 1))
    outputs = []
    with torch.autocast("cpu", torch.bfloat16):
        F.linear(torch.ones(1, 1), weight)  # the caller's own use is remembered, too
        for value in (2.0, 3.0):
            with torch.no_grad():
                weight.fill_(value)
            with autocasting(BFLOAT16):
                outputs.append(F.linear(torch.ones(1, 1), weight).item())
    assert outputs == [2.0, 3.0]


def test_a_thread_may_take_several_turns_at_once():
    with autocasting(BFLOAT16), autocasting({"cpu": torch.float16}):
        assert autocast_here() == {"cpu": torch.float16}


@pytest.mark.parametrize("dtypes", [{}, BFLOAT16])
def test_it_is_as_it_was_behind_it(dtypes):
    with torch.autocast("cpu", torch.float16):
        with autocasting(dtypes):
            assert autocast_here() == dtypes
        assert autocast_here() == {"cpu": torch.float16}
    assert autocast_here() == {}


@pytest.mark.parametrize("around", [{}, BFLOAT16])
def test_where_it_is_off_nobody_waits(around):
    def switched_off():
        with torch.autocast("cpu", enabled=bool(around)), autocasting({}):
            pass

    with autocasting(BFLOAT16):
        thread = threading.Thread(target=switched_off)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
