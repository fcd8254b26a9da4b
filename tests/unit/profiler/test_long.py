"""Profiles of models that take long: less is run, what is left is counted, and Ctrl-C keeps it."""

from __future__ import annotations

import _thread
import threading
import time
from typing import ClassVar

import pytest
import torch
from torch import nn

import penstock as pk
from penstock.core.graph import Contention

MODULES = (
    "penstock.training.profiler.alone.rounds",
    "penstock.training.profiler.calibrating",
)
FOOTPRINT, USUAL_ROUND, SHORT_ROUND = 2, 5, 2
JUDGED = 1  # the last layer once more, for what the loss keeps
"""Forwards of each layer."""


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-3)


def long_from(monkeypatch, seconds, round_seconds=1e-6):
    """From so many seconds on, a microbatch takes long."""
    for module in MODULES:
        monkeypatch.setattr(f"{module}.LONG_SECONDS", seconds)
    monkeypatch.setattr(f"{MODULES[0]}._ROUND_SECONDS", round_seconds)


class Slow(nn.Linear):
    """Takes two milliseconds, counts its forwards, and has something done at one of them."""

    forwards: ClassVar[list[bool]] = []
    at: ClassVar[dict[int, object]] = {}

    def forward(self, value):
        Slow.forwards.append(threading.current_thread() is threading.main_thread())
        do = Slow.at.pop(len(Slow.forwards), None)
        if do is not None:
            do()
        time.sleep(0.002)
        return super().forward(value)


@pytest.fixture(autouse=True)
def forwards(monkeypatch):
    # It runs the layers, too, once all is measured.
    monkeypatch.setattr("penstock.training.profiler.profiling.mixed_rows", lambda *_: None)
    Slow.forwards.clear()
    Slow.at.clear()
    return Slow.forwards


def interrupted():
    raise KeyboardInterrupt


def profiled(layers=2, **options):
    model = nn.Sequential(*(Slow(4, 4) for _ in range(layers)))
    options = {"ranks": 0, "repeats": 5, **options}
    return pk.profile(
        model, torch.randn(4, 4), loss=nn.functional.mse_loss, targets=torch.randn(4, 4), **options
    )


def test_of_a_long_microbatch_less_is_run_and_the_profile_says_so(monkeypatch, forwards):
    long_from(monkeypatch, 0.003)
    told = []
    graph = profiled(sizes=[2], progress=lambda *done: told.append(done))
    # Two rounds for each of two sizes.
    assert len(forwards) == 2 * (2 * (FOOTPRINT + 2 * SHORT_ROUND) + JUDGED)
    (warning,) = graph.warnings
    assert "so layers were timed 2 times instead of 5; more repeats" in warning
    assert graph.at(2).warnings == graph.warnings
    for layer in graph.layers:
        assert layer.forward_seconds == layer.recompute_seconds > 0.0015
        assert layer.backward_seconds > 0
    done, totals = zip(*told, strict=True)
    assert list(done) == sorted(done) and {*totals} == {12} and done[-1] == 12


def test_where_there_is_time_rounds_are_as_many_as_asked_for(monkeypatch, forwards):
    long_from(monkeypatch, 0.003, round_seconds=60)
    graph = profiled()
    assert not graph.warnings
    assert len(forwards) == 2 * (FOOTPRINT + 5 * SHORT_ROUND) + JUDGED


def test_what_is_not_long_has_all_kinds_of_passes(monkeypatch, forwards):
    long_from(monkeypatch, 60)
    assert "timed 2 times instead of 5" in profiled().warnings[0]
    assert len(forwards) == 2 * (FOOTPRINT + (1 + 2) * USUAL_ROUND) + JUDGED
    forwards.clear()
    long_from(monkeypatch, 60, round_seconds=60)
    assert not profiled(repeats=1).warnings
    assert len(forwards) == 2 * (FOOTPRINT + (1 + 1) * USUAL_ROUND) + JUDGED


def test_one_slow_pass_is_no_long_microbatch(monkeypatch, forwards):
    """Something else may have had the core."""
    long_from(monkeypatch, 0.05, round_seconds=60)
    Slow.at[2 * FOOTPRINT + JUDGED + 1] = lambda: time.sleep(0.1)
    profiled(repeats=1)
    assert len(forwards) == 2 * (FOOTPRINT + 2 * USUAL_ROUND) + JUDGED


@pytest.mark.parametrize("long", [True, False])
def test_an_interrupt_keeps_the_rounds_that_are_complete(monkeypatch, long):
    long_from(monkeypatch, 0.003 if long else 60, round_seconds=60)
    # In the second round that counts; a layer has run in its footprint and in those before.
    before = FOOTPRINT + (SHORT_ROUND if long else 2 * USUAL_ROUND)
    Slow.at[2 * before + 2] = interrupted
    graph = profiled(ranks=2, sizes=[2, 3])
    assert graph.sizes == (4,)
    assert graph.contention == Contention()
    assert graph.warnings == (
        "interrupted: layers were timed 1 times instead of 5, not measured with 2, 3 rows",
        "contention was not measured: interrupted",
    )
    assert all(layer.forward_seconds > 0.0015 for layer in graph.layers)


def test_an_interrupt_before_a_round_is_complete_is_one():
    for forward in (1, 2 * FOOTPRINT + JUDGED + 1, 2 * FOOTPRINT + JUDGED + 5):
        Slow.forwards.clear()
        Slow.at[forward] = interrupted
        with pytest.raises(KeyboardInterrupt):
            profiled()


def test_an_interrupt_in_another_size_keeps_the_first(monkeypatch):
    long_from(monkeypatch, 0.003, round_seconds=60)
    Slow.at[2 * (FOOTPRINT + 5 * SHORT_ROUND) + JUDGED + 1] = interrupted
    graph = profiled(sizes=[2])
    assert graph.sizes == (4,)
    assert graph.warnings == ("interrupted: not measured with 2 rows",)


class Turns:
    """Which pipelines a profile has run."""

    def __init__(self, monkeypatch):
        self.schedules, real = [], pk.Pipeline.__init__

        def noted(pipeline, model, plan, **options):
            self.schedules.append((plan.schedule, plan.num_microbatches))
            real(pipeline, model, plan, **options)

        monkeypatch.setattr(pk.Pipeline, "__init__", noted)


def test_contention_of_long_microbatches_is_that_of_whole_backwards(monkeypatch):
    long_from(monkeypatch, 0.003)
    turns, told = Turns(monkeypatch), []
    graph = profiled(
        ranks=2, optimizer=sgd, patience_seconds=0.05, progress=lambda *done: told.append(done)
    )
    # It stays open for the second round.
    assert turns.schedules == [("1f1b", 4)]
    found = graph.contention
    assert found.num_rounds + found.num_rejected == 2
    assert found.whole == found.split == found.stream != 1
    assert found.num_ranks == 2
    assert any("was measured of 1f1b alone" in warning for warning in graph.warnings)
    done, totals = zip(*told, strict=True)
    # The bar is at its end when all is done, and not before.
    assert done.count(totals[0]) == 1 and done[-1] == totals[0]
    assert len({*totals}) == 1 and list(done) == sorted(done)


def test_with_patience_all_modes_have_short_turns(monkeypatch):
    long_from(monkeypatch, 0.003)
    turns = Turns(monkeypatch)
    graph = profiled(ranks=2, optimizer=sgd, patience_seconds=2)
    assert {*turns.schedules} == {("1f1b", 4), ("zb-h1", 4), ("pipedream", 4)}
    assert len({graph.contention.whole, graph.contention.split, graph.contention.stream}) == 3
    assert not any("alone" in warning for warning in graph.warnings)


@pytest.mark.parametrize("rounds", [0, 1])
def test_an_interrupt_while_ranks_are_measured_keeps_the_layers(monkeypatch, rounds, forwards):
    """As Ctrl-C comes: to the main thread, while it waits for ranks."""
    turns, real, num_threads = Turns(monkeypatch), pk.Pipeline.step, threading.active_count()

    def step(pipeline, *batch):
        if len(turns.schedules) > 2 * rounds:  # two pipelines are a round
            Slow.at[len(forwards) + 3] = _thread.interrupt_main
        return real(pipeline, *batch)

    long_from(monkeypatch, 0.003)
    monkeypatch.setattr(pk.Pipeline, "step", step)
    graph = profiled(ranks=2, patience_seconds=10)
    assert "interrupted while contention was measured" in graph.warnings
    assert all(layer.forward_seconds > 0 for layer in graph.layers)
    assert graph.contention.num_ranks == (2 if rounds else 0)
    assert threading.active_count() == num_threads
