"""Partime on two threads, written by hand for this one network: layers, queues and optimizers, and
nothing that names an error, keeps a deadline or tells what happened."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from statistics import median
from types import TracebackType
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from benchmarks.streaming.convolutions import Network, Pace, built, frames, frames_at, paced, sgd

_MOST_WITHIN = 2
_AGE = 2
"""How many frames older the gradients of the first stage are than the frame they go through."""


class _Passing(NamedTuple):
    value: Tensor
    target: Tensor
    given_seconds: float


class TwoThreads:
    """Learns from frames as a stream of two stages does.

    Args:
        num_first: how many layers the first stage has.
    """

    def __init__(self, network: Network, num_first: int, pixels: int) -> None:
        layers = list(built(network))
        self._pixels = pixels
        self._given: queue.SimpleQueue[_Passing | None] = queue.SimpleQueue()
        self._passed: queue.SimpleQueue[_Passing | None] = queue.SimpleQueue()
        self._gradients: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self._latencies: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=run, args=(own,))
            for run, own in ((self._first, layers[:num_first]), (self._last, layers[num_first:]))
        ]

    def _first(self, layers: Sequence[nn.Module]) -> None:
        torch.set_num_threads(1)
        optimizer = sgd([own for layer in layers for own in layer.parameters()])
        num_before = 0
        while (given := self._given.get()) is not None:
            value = _through(layers, given.value)
            self._passed.put(given._replace(value=value.detach()))
            if num_before >= _AGE:
                value.backward(self._gradients.get())
                _step(optimizer)
            num_before += 1
        self._passed.put(None)

    def _last(self, layers: Sequence[nn.Module]) -> None:
        torch.set_num_threads(1)
        optimizer = sgd([own for layer in layers for own in layer.parameters()])
        while (passed := self._passed.get()) is not None:
            value = passed.value.requires_grad_()
            output = _through(layers, value)
            loss = mse_loss(output, passed.target)
            output.detach().clone()  # for whoever takes results
            self._latencies.put(time.perf_counter() - passed.given_seconds)
            loss.backward()
            assert value.grad is not None
            self._gradients.put(value.grad)
            _step(optimizer)

    def run(self, count: int) -> Pace:
        """So many frames, as fast as it takes them."""

        def work() -> int:
            for number, (frame, target) in enumerate(frames(count, self._pixels)):
                if number >= _MOST_WITHIN:
                    self._latencies.get()
                self._given.put(_Passing(frame, target, time.perf_counter()))
            for _ in range(min(count, _MOST_WITHIN)):
                self._latencies.get()
            return count

        return paced(work)

    def latency_seconds(self, count: int, rate: float) -> float:
        """From frame to output, the median of frames that come at a rate."""
        taken = []
        for frame, target in frames_at(rate, count, self._pixels):
            self._given.put(_Passing(frame, target, time.perf_counter()))
            taken.append(self._latencies.get())
        return median(taken)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._given.put(None)
        for thread in self._threads:
            thread.join()


def _through(layers: Sequence[nn.Module], value: Tensor) -> Tensor:
    for layer in layers:
        value = layer(value)
    return value


def _step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
