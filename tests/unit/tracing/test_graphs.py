"""Keeping torch's dumps back, in one thread and beside others."""

from __future__ import annotations

import logging
import sys
import threading

import pytest
import torch
import torch.export._trace
from torch import nn

from penstock.engine.tracing import capture
from penstock.engine.tracing.graphs import without_dumps

SHARED = torch.export._trace


class Branching(nn.Module):
    """What no export can follow."""

    def forward(self, value):
        return value * 2 if value.sum() > 0 else value


def failing_export():
    with pytest.raises(Exception, match="data-dependent"):
        torch.export.export(Branching(), (torch.randn(4, 3),))


def in_threads(*functions):
    failures = []

    def run(function):
        try:
            function()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


def test_whoever_leaves_last_leaves_nothing_behind(capfd):
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    stream, filters = sys.stderr, list(logger.filters)
    inside, other_inside, first_left = (threading.Event() for _ in range(3))

    def first():
        with without_dumps():
            inside.set()
            assert other_inside.wait(30)
        first_left.set()

    def second():
        assert inside.wait(30)
        with without_dumps():
            other_inside.set()
            assert first_left.wait(30)
            assert sys.stderr is stream
            failing_export()

    in_threads(first, second)
    assert "def forward" not in capfd.readouterr().err
    assert sys.stderr is stream
    assert logger.filters == filters
    assert "print" not in vars(SHARED)


def test_what_others_write_comes_at_once(capsys):
    seen = []

    def talk():
        print("other thread", file=sys.stderr)

    with without_dumps():
        in_threads(talk)
        print("own thread", file=sys.stderr)
        seen.append(capsys.readouterr().err)
    assert seen == ["other thread\nown thread\n"]


def dumps(capfd):
    return "def forward" in capfd.readouterr().err


def test_dumps_are_kept_back_in_the_own_thread_only(capfd):
    failing_export()
    assert dumps(capfd)  # or else the next lines would test nothing
    with without_dumps():
        failing_export()
        assert not dumps(capfd)
        in_threads(failing_export)
        assert dumps(capfd)
        with without_dumps():
            failing_export()
        failing_export()
        assert not dumps(capfd)
    failing_export()
    assert dumps(capfd)


class Chain(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

    def forward(self, value):
        for layer in self.layers:
            value = layer(value).relu()
        return value


def test_models_may_be_captured_in_several_threads(capfd, monkeypatch):
    monkeypatch.setenv("PENSTOCK_QUIET", "1")  # a loaded machine takes seconds, and says so
    stream, found = sys.stderr, []
    counts = (5, 10, 15)

    def captures(count):
        return lambda: found.append(capture(Chain(count), torch.randn(4, 4)))

    in_threads(*map(captures, counts))
    assert sys.stderr is stream
    assert {captured.how for captured in found} == {"torch.export"}
    assert sorted(len(captured.names) for captured in found) == sorted(counts)
    assert not capfd.readouterr().err
