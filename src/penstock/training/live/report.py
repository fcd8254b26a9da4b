"""The account of a live stream: rates, drops, latency, losses, how fast frames change; as a value,
and live in the terminal."""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from penstock.base.units import format_seconds
from penstock.base.values import Value
from penstock.engine.model import tree
from penstock.planning.plans import Plan
from penstock.training.live.intake import Intake, Result

if TYPE_CHECKING:
    from rich.live import Live
    from rich.panel import Panel


class StreamReport(Value, frozen=True, kw_only=True):
    """The account of the frames of a stream so far; printed, it is a table.

    Attributes:
        num_given: frames that somebody has given to the stream.
        num_dropped: of these, how many were dropped in front of the first stage.
        num_late: how many came while another one still waited for the first stage, which was not
            free in time; with a rate above the pipeline's, nearly all.
        num_results: how many results somebody has taken.
        num_labelled: of these, how many had a target.
        num_waiting: frames that wait for the first stage now.
        longest_queue: the most that have waited at once.
        frames_per_second: results per second, from the first to the last; ``None`` before two.
        latency_p50_seconds: what half of the latest 10,000 results stayed below, from when the
            frame was given until its output was there. Rate and latency say different things: more
            stages raise the one and not the other.
        latency_p95_seconds, latency_p99_seconds: likewise 95 and 99 of 100.
        mean_loss: the mean over all labelled frames of the loss before anything was learned from
            the frame (prequential loss).
        gradient_age: how many frames old gradients are when the first stage learns from them.
        mean_change: how much frames change meanwhile, ‖x(t) − x(t−age)‖/‖x(t)‖, looked at every
            now and then; ``None`` if gradients are not old or frames have no numbers to compare.
    """

    num_given: int
    num_dropped: int
    num_late: int
    num_results: int
    num_labelled: int
    num_waiting: int
    longest_queue: int
    frames_per_second: float | None
    latency_p50_seconds: float | None
    latency_p95_seconds: float | None
    latency_p99_seconds: float | None
    mean_loss: float | None
    gradient_age: int
    mean_change: float | None

    def rows(self) -> list[tuple[str, str]]:
        """All figures, as pairs (name, text)."""
        quantiles = (
            self.latency_p50_seconds,
            self.latency_p95_seconds,
            self.latency_p99_seconds,
        )
        rate = self.frames_per_second
        latency = " · ".join("–" if q is None else format_seconds(q) for q in quantiles)
        dropped = f"{self.num_dropped:,} dropped, {self.num_late:,} late"
        rows = [
            ("frames", f"{self.num_given:,} given, {dropped}"),
            ("results", f"{self.num_results:,}, of which {self.num_labelled:,} with a target"),
            ("rate", "–" if rate is None else f"{rate:.1f} frames/s"),
            ("latency p50 · p95 · p99", latency),
            ("waiting", f"{self.num_waiting:,} now, {self.longest_queue:,} at most"),
            ("prequential loss", "–" if self.mean_loss is None else f"{self.mean_loss:.4g}"),
        ]
        if self.gradient_age:
            change = "not compared" if self.mean_change is None else f"{self.mean_change:.0%}"
            age = f"{self.gradient_age} frames at stage 0"
            rows += [("age of gradients", age), ("frames change meanwhile by", change)]
        return rows

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


_MOST_LATENCIES = 10_000
_LOOK_EVERY = 16
_LEAST_LOOKS = 8
FAST_CHANGE = 0.6
"""From so much change on, beside a frame's own size, gradients say little about the frames that
they go through: docs/streams.md has cosines of 0.8 at 0.5, and of 0.5 at 0.85."""


class StreamLedger:
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

    def report(self, num_given: int, intake: Intake[Any]) -> StreamReport:
        """All of it, as of now.

        Args:
            num_given: frames that somebody has given to the stream.
            intake: where they wait.
        """
        with self._lock:
            latencies = sorted(self._latencies)
            results, labelled, changes = self._num_results, self._num_labelled, self._num_changes
            seconds = self._last_result - self._first_result
            return StreamReport(
                num_given=num_given,
                num_dropped=intake.num_dropped,
                num_late=intake.num_late,
                num_results=results,
                num_labelled=labelled,
                num_waiting=len(intake),
                longest_queue=intake.longest,
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


class Dashboard:
    """Draws a report anew every now and then, while its ``with`` block lasts.

    Args:
        report: gives the report as of now.
        plan: of the stream, for the title.
        every_seconds: how often it is drawn.
    """

    def __init__(
        self, report: Callable[[], StreamReport], plan: Plan, every_seconds: float
    ) -> None:
        self._report = report
        self._plan = plan
        self._every_seconds = every_seconds
        self._ends = threading.Event()
        self._live: Live | None = None
        self._thread: threading.Thread | None = None

    def _panel(self) -> Panel:
        from rich.panel import Panel
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        for name, value in self._report().rows():
            table.add_row(name, value)
        stages = f"{self._plan.schedule}, {len(self._plan.stages)} stages"
        return Panel(table, title=f"live stream: {stages}", expand=False)

    def _draw(self) -> None:
        while not self._ends.wait(self._every_seconds):
            if self._live is not None:
                self._live.update(self._panel(), refresh=True)

    def __enter__(self) -> Self:
        from rich.live import Live

        self._live = Live(self._panel(), auto_refresh=False)
        self._live.__enter__()
        self._ends.clear()
        self._thread = threading.Thread(target=self._draw, name="penstock dashboard", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        if self._thread is not None:
            self._thread.join()
        if self._live is not None:
            self._live.update(self._panel(), refresh=True)
            self._live.__exit__(None, None, None)
