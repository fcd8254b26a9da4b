"""What a live stream has done so far: rates, drops, latency, losses, and how fast frames change."""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections import deque
from typing import Any

import torch
from torch import Tensor

from penstock.engine.model import tree
from penstock.training.live.frames import Result
from penstock.training.live.report import StreamReport

_MOST_LATENCIES = 10_000
_LOOK_EVERY = 16
_LEAST_LOOKS = 8
FAST_CHANGE = 0.6
"""From so much change on, beside a frame's own size, gradients say little about the frames that
they go through: docs/streams.md has cosines of 0.8 at 0.5, and of 0.5 at 0.85."""


class Ledger:
    """Keeps account of a stream; any thread may use it.

    Args:
        age: how many frames older than the frame that they go through the oldest gradients are; 0
            where each goes through its own.
    """

    def __init__(self, age: int) -> None:
        self._age = age
        self._lock = threading.Lock()
        self._num_results = self._num_labelled = 0
        self._loss_sum = 0.0
        self._first_result = self._last_result = 0.0
        self._latencies: deque[float] = deque(maxlen=_MOST_LATENCIES)
        self._remembered: tuple[int, list[Tensor]] | None = None
        self._num_changes = 0
        self._change_sum = 0.0
        self._has_warned = False

    def entered(self, number: int, value: Any) -> None:
        """The first stage begins with a frame, of which it may overwrite the value afterwards.

        Compares it with the one that the oldest gradient belongs to; not each, since that reads
        both.

        Args:
            number: how many frames have entered before it.
        """
        if self._age:
            with self._lock:
                self._look(number, value)

    def _look(self, number: int, value: Any) -> None:
        if self._remembered is None:
            if number % _LOOK_EVERY == 0:
                copies = [tensor.detach().clone() for tensor in _numbers(value)]
                self._remembered = number, copies
            return
        first, before = self._remembered
        if number >= first + self._age:
            self._remembered = None
            change = _change(before, _numbers(value))
            if change is not None:
                self._num_changes += 1
                self._change_sum += change
                self._warn()

    def _warn(self) -> None:
        mean = self._change_sum / self._num_changes
        if self._has_warned or self._num_changes < _LEAST_LOOKS or mean <= FAST_CHANGE:
            return
        self._has_warned = True
        warnings.warn(
            f"frames change by {mean:.0%} of their size while a gradient is on its way "
            f"({self._age} frames), so that the first stages learn from gradients of other "
            "pictures; raise the frame rate, use fewer stages, or plan with "
            "versions=penstock.versions.Stash(), which keeps the weights of every frame in flight",
            stacklevel=2,
        )

    def told(self, result: Result, loss: float | None) -> None:
        """Somebody has got a result."""
        now = time.perf_counter()
        with self._lock:
            self._num_results += 1
            if self._num_results == 1:
                self._first_result = now
            self._last_result = now
            self._latencies.append(result.latency_seconds)
            if loss is not None:
                self._num_labelled += 1
                self._loss_sum += loss

    def report(
        self,
        *,
        num_given: int,
        num_dropped: int,
        num_late: int,
        num_waiting: int,
        longest_queue: int,
    ) -> StreamReport:
        """All of it, as of now."""
        with self._lock:
            latencies = sorted(self._latencies)
            results, labelled, changes = self._num_results, self._num_labelled, self._num_changes
            seconds = self._last_result - self._first_result
            return StreamReport(
                num_given=num_given,
                num_dropped=num_dropped,
                num_late=num_late,
                num_results=results,
                num_labelled=labelled,
                num_waiting=num_waiting,
                longest_queue=longest_queue,
                frames_per_second=(results - 1) / seconds if results > 1 and seconds else None,
                latency_p50_seconds=_quantile(latencies, 0.5),
                latency_p95_seconds=_quantile(latencies, 0.95),
                latency_p99_seconds=_quantile(latencies, 0.99),
                mean_loss=self._loss_sum / labelled if labelled else None,
                gradient_age=self._age,
                mean_change=self._change_sum / changes if changes else None,
            )


def _numbers(value: Any) -> list[Tensor]:
    return [tensor for tensor in tree.tensors(value) if tensor.is_floating_point()]


def _change(before: list[Tensor], after: list[Tensor]) -> float | None:
    """‖after − before‖/‖after‖; ``None`` where that means nothing."""
    pairs = list(zip(before, after, strict=False))
    if not pairs or any(a.shape != b.shape or a.device != b.device for a, b in pairs):
        return None
    with torch.no_grad():
        difference = sum(float((a - b).double().square().sum()) for b, a in pairs)
        size = sum(float(a.double().square().sum()) for _, a in pairs)
    change = (difference / size) ** 0.5 if size else math.inf
    return change if math.isfinite(change) else None


def _quantile(ascending: list[float], share: float) -> float | None:
    if not ascending:
        return None
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))]
