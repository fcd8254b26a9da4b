"""What a pipeline remembers of its training steps, for those who ask after them."""

from __future__ import annotations

from collections import deque

from torch import Tensor

from penstock.base.errors import InputError
from penstock.core.schedule.memory import Sizes
from penstock.core.schedule.op import Activations
from penstock.core.timing.timeline import Timeline
from penstock.engine.run.counting import Peak
from penstock.engine.run.outcome import MinibatchOutcome, timeline
from penstock.engine.run.work import WorkLog
from penstock.engine.weights.store import HeldVersions

_MOST_REMEMBERED = 256


class History:
    """The last training step and, for the timeline, those of its stream before it.

    Args:
        schedule: the name that timelines bear.
        activations: which ones backwards go through.

    Attributes:
        work: of what minibatches are made.
    """

    def __init__(self, schedule: str, activations: Activations = "own") -> None:
        self._schedule = schedule
        self._activations = activations
        self._last: MinibatchOutcome | None = None
        self._recent: deque[MinibatchOutcome] = deque(maxlen=_MOST_REMEMBERED)
        self._timeline: Timeline | None = None
        self.work = WorkLog()

    def add(self, outcome: MinibatchOutcome) -> None:
        """Remember a step."""
        self._last = outcome
        if outcome.begins:
            self._recent.clear()
        self._recent.append(outcome)
        self._timeline = None

    @property
    def timeline(self) -> Timeline:
        """What was measured since nothing was in flight; made when it is first asked for."""
        steps = [outcome.records for outcome in self._recent if outcome.records is not None]
        if not steps:
            raise InputError("no timeline yet: run a step (and leave record=True)")
        if self._timeline is None:
            self._timeline = timeline(steps, self._schedule, self._activations)
        return self._timeline

    @property
    def held_versions(self) -> tuple[HeldVersions, ...]:
        """The versions of its weights that every rank held."""
        if self._last is None or not self._last.held:
            raise InputError("no versions to tell of: run a plan that never flushes, and record it")
        return self._last.held

    @property
    def metrics(self) -> dict[str, Tensor]:
        """The metrics of the last step; empty before the first."""
        return {} if self._last is None else dict(self._last.metrics)

    @property
    def peaks(self) -> tuple[Peak, ...]:
        """The most that every rank held in the last step."""
        if self._last is None or not self._last.peaks:
            raise InputError("no peaks yet: give count_memory=True, and run a step")
        return self._last.peaks

    def activation_bytes(self, sizes: Sizes) -> tuple[float, ...]:
        """The most bytes of activations that every rank held: as counted, or else by the order of
        the ops in the timeline.

        Args:
            sizes: what a microbatch keeps at each stage.

        Raises:
            InputError: neither has been recorded yet.
        """
        if self._last is not None and self._last.peaks:
            return tuple(peak.activation_bytes for peak in self._last.peaks)
        return self.timeline.peak_bytes(sizes)

    @property
    def grad_norm(self) -> Tensor:
        """The norm of all gradients, before clipping."""
        if self._last is None or self._last.norm is None:
            raise InputError("no norm yet: give clip_norm or a grad_scaler, and run a step")
        return self._last.norm
