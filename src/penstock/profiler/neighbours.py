"""Threads that keep the other cores as busy as this one, to see what that costs."""

from __future__ import annotations

import copy
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from penstock.profiler.chain import Run, runs_of
from penstock.profiler.clock import WallClock
from penstock.profiler.passes import Passes
from penstock.profiler.sample import Sample
from penstock.spine import NamedLayer

_MOST_CORES = 7
_LOOK_SECONDS = 0.1


class _PauseError(Exception):
    """The neighbour is to rest."""


class Neighbours:
    """Threads that train copies of the model while they are told to.

    Threads, as the runtime's ranks are by default: they share caches, memory and the interpreter.
    They wait between layers when they are to rest. What fails in one of them ends it.

    Args:
        copies: of the layers, as functions; a list for each thread.
        inputs: one microbatch.
        num_threads: intra-op threads of each.

    Attributes:
        failure: the first thing that went wrong in one of them.
    """

    def __init__(self, copies: Sequence[Sequence[Run]], inputs: Any, num_threads: int) -> None:
        self.failure: Exception | None = None
        self._inputs = inputs
        self._num_threads = num_threads
        self._closed = False
        self._wake = threading.Event()
        self._begun = [threading.Event() for _ in copies]
        self._resting = [threading.Event() for _ in copies]
        self._threads = [
            threading.Thread(target=self._serve, args=row, name="penstock neighbour", daemon=True)
            for row in zip(copies, self._begun, self._resting, strict=True)
        ]

    def __bool__(self) -> bool:
        return bool(self._threads) and self.failure is None

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed = True
        self._wake.set()
        for thread in self._threads:
            thread.join()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """For a while, all of them work; afterwards all rest again."""
        for event in (*self._begun, *self._resting):
            event.clear()
        self._wake.set()
        try:
            self._await(self._begun)
            yield
        finally:
            self._wake.clear()
            self._await(self._resting)

    def _await(self, events: Sequence[threading.Event]) -> None:
        for thread, event in zip(self._threads, events, strict=True):
            while thread.is_alive() and not event.wait(_LOOK_SECONDS):
                pass

    def _serve(self, runs: Sequence[Run], begun: threading.Event, resting: threading.Event) -> None:
        torch.set_num_threads(self._num_threads)
        guarded = [partial(self._run_if_busy, begun, run) for run in runs]
        passes = Passes(guarded, self._inputs, WallClock(), frozenset())
        while not self._closed:
            if not self._wake.is_set():
                resting.set()
                self._wake.wait()
                continue
            try:
                passes.whole()
            except _PauseError:
                continue
            except Exception as error:
                self.failure = self.failure or error
                return

    def _run_if_busy(self, begun: threading.Event, run: Run, value: Any) -> Any:
        if self._closed or not self._wake.is_set():
            raise _PauseError
        begun.set()
        return run(value)


def neighbours_of(
    layers: Sequence[NamedLayer],
    sample: Sample,
    num_threads: int,
    busy_cores: int | None,
    device: torch.device,
) -> Neighbours:
    """As many as there are cores left for, and memory for copies; none for an accelerator."""
    if busy_cores is None:
        busy_cores = min(_MOST_CORES, max(0, _num_cores() - num_threads))
    count = busy_cores // num_threads if device.type == "cpu" else 0
    state = [
        tensor.nbytes
        for layer in layers
        for tensor in (*layer.module.parameters(), *layer.module.buffers())
    ]
    # Weights, gradients, and about as much again for activations.
    affordable = _free_bytes() // 2 // max(1, 3 * sum(state))
    if count and not affordable:
        return _failed(sample, MemoryError("there is no memory for a copy of the model"))
    count = min(count, affordable)
    try:
        copies = [_copied(layers) for _ in range(count)]
    except Exception as error:
        return _failed(sample, error)
    runs = [runs_of(copy, sample.loss, sample.targets) for copy in copies]
    return Neighbours(runs, sample.inputs, num_threads)


def _failed(sample: Sample, error: Exception) -> Neighbours:
    nobody = Neighbours([], sample.inputs, 1)
    nobody.failure = error
    return nobody


def _copied(layers: Sequence[NamedLayer]) -> list[NamedLayer]:
    modules = copy.deepcopy([layer.module for layer in layers])
    return [layer._replace(module=one) for layer, one in zip(layers, modules, strict=True)]


def _num_cores() -> int:
    # Not every system tells how many of its cores are ours.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _free_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return sys.maxsize
    found = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return found[0] * 1024 if found else sys.maxsize
