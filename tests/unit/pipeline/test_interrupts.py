"""Ctrl-C may come at any line, also at those that give ranks their work and wait for them."""

from __future__ import annotations

import contextlib
import copy
import sys
import threading

import pytest
import torch
import torch.nn.functional as F

from penstock.engine.run.drive import threads, ticket
from penstock.trial.reference.single_device import SingleDevice
from tests.kit.helpers import make_batch, make_mlp
from tests.kit.training import pipeline_of, sgd

FILES = {module.__file__ for module in (threads, ticket, contextlib, threading)}


class Interrupt:
    """Ctrl-C at the n-th line that the driver comes to while a rank is held up.

    Attributes:
        function: where it was.
    """

    def __init__(self, number: int) -> None:
        self.number, self.function = number, ""
        self.happened = threading.Event()

    def trace(self, frame, event, _):
        """For ``sys.settrace``."""
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            self.number -= 1
            if self.number == 0:
                self.function = frame.f_code.co_name
                self.happened.set()
                raise KeyboardInterrupt
        return self.trace


def test_wherever_an_interrupt_comes_the_next_step_is_right(monkeypatch):
    monkeypatch.setattr(ticket, "_DEAF_SECONDS", 0.01)
    monkeypatch.setattr(threads, "_GRACE_SECONDS", 20.0)
    ours = make_mlp()
    reference = SingleDevice(copy.deepcopy(ours), 4, F.cross_entropy, sgd, seed=3)
    interrupts: list[Interrupt] = []
    # Held up: else the step might be through before the interrupt comes.
    ours[3].register_forward_pre_hook(lambda *_: interrupts[-1].happened.wait(30) and None)
    with pipeline_of(ours, num_ranks=3, optimizer=sgd) as pipeline:
        driver, before = pipeline._parts.driver, sys.gettrace()
        submit, collect = driver.submit, driver.collect

        def traced(function, *given):
            sys.settrace(interrupts[-1].trace)
            try:
                return function(*given)
            finally:
                sys.settrace(before)

        while not interrupts or interrupts[-1].function != "_next_news":
            with monkeypatch.context() as patch:
                patch.setattr(driver, "submit", lambda *given: traced(submit, *given))
                patch.setattr(driver, "collect", lambda *given: traced(collect, *given))
                interrupts.append(Interrupt(len(interrupts) + 1))
                try:
                    pipeline.step(*make_batch(8))
                except KeyboardInterrupt:
                    pass
                else:
                    raise AssertionError("there was no interrupt")
            loss = pipeline.step(*make_batch(8))
            assert torch.equal(loss, reference.step(*make_batch(8))), interrupts[-1].function
    assert {one.function for one in interrupts} > {"submit", "_await", "all_went_well"}


def test_an_interrupted_loop_waits_for_nothing_that_was_cancelled(monkeypatch):
    """It said beside the interrupt that what was under way could not be ended."""
    ours, happened = make_mlp(), threading.Event()
    ours[0].register_forward_pre_hook(lambda *_: happened.wait(30) and None)
    with pipeline_of(ours, optimizer=sgd) as pipeline:
        driver = pipeline._parts.driver
        collect = driver.collect

        def interrupted(begun):
            monkeypatch.setattr(driver, "collect", collect)
            happened.set()
            raise KeyboardInterrupt

        monkeypatch.setattr(driver, "collect", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            list(pipeline.steps([make_batch(8)] * 4))
    assert not [note for note in getattr(caught.value, "__notes__", ()) if "cancelled" in note]
