"""Fixtures and settings for all tests."""

from __future__ import annotations

import gc
import importlib
import os
import signal
from functools import cache, partial

import pytest
import torch
from hypothesis import settings

from penstock.training.profiler.alone import measuring
from penstock.training.profiler.alone.conditions import WallClock
from tests.kit.accelerator.own_process import (  # noqa: F401 - pytest finds its hooks by name
    accelerator,
    pytest_collection_modifyitems,
    pytest_runtest_logreport,
    pytest_runtest_protocol,
    pytest_sessionstart,
)
from tests.kit.examples import examples

pytest_plugins = ["tests.kit.stuck"]

# They have no doctests, and load what only their own processes need.
collect_ignore_glob = ["*/jobs/*"]

settings.register_profile("penstock", examples(50), print_blob=True)
settings.load_profile("penstock")

# Whoever mends Penstock wants to see its frames.
os.environ.setdefault("PENSTOCK_TRACEBACK", "full")

# A shell without job control lets what it starts in the background ignore Ctrl-C; tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session):
    """What is loaded now stays: no collection need look through it, of which tests ask for many."""
    if len(session.items) > 1000:  # some of them make torch load what its first optimizer needs
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    gc.collect()
    gc.freeze()
    # Traced models are millions of objects, hardly any of which are cycles.
    gc.set_threshold(20_000, 10, 10)


@pytest.fixture(autouse=True)
def one_intra_op_thread():
    """Kernels sum in another order with more threads; bit-equality needs the same number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def little_patience():
    """Unless a test says otherwise, contention is measured in two rounds, steady or not."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("penstock.training.profiler.profiling._PATIENCE_SECONDS", (0.1, 0.1))
        yield


@pytest.fixture(autouse=True, scope="session")
def machine_measured_once():
    """What profiles measure of the CPU, whatever the model, the first one of a process measures.

    But for what is taken off the times of layers: one disturbed measurement would spoil them all.
    """
    with pytest.MonkeyPatch.context() as patched:
        for name in ("measure_hand_over", "measure_moving", "measure_new_pages"):
            patched.setattr(measuring, name, cache(getattr(measuring, name)))
        for name in ("measure_op", "measure_sum"):
            patched.setattr(measuring, name, once_on_cpu(getattr(measuring, name)))
        yield


def once_on_cpu(measure):
    """``measure``, but again for emulated devices, each of which is as slow as its test wants."""
    of_cpu = cache(lambda: measure(WallClock(), torch.device("cpu")))
    return lambda clock, device: of_cpu() if device.type == "cpu" else measure(clock, device)


@pytest.fixture
def small_demo(monkeypatch):
    """The demo's GPT half as deep and a tenth as wide; ``make soak`` trains it whole."""
    # By its name one gets the function in it.
    module = importlib.import_module("penstock.demo.corpus")
    monkeypatch.setattr(module, "GPT", partial(module.GPT, width=30, layers=4))
    monkeypatch.setattr(module, "SMALL", {"width": 16, "heads": 2, "layers": 2})
