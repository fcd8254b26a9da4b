"""A worker's pace: it stands still between two visits until a device is free for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.core.schedule import Op
from penstock.core.schedule.op import FETCHES
from penstock.engine.device.queue import DeviceQueue
from penstock.engine.run.rank.interpreter import RankStep
from penstock.engine.weights.residency import Residency
from penstock.planning.turns.visits import beginnings, visited
from penstock.training.fleet.dispatcher import Dispatcher, JobPlace

_LOOK_AGAIN_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class DelayedFetch:
    """A fetch for a later visit that begins when the dispatcher says so.

    Attributes:
        step: the fetch.
        held: where it waits meanwhile, with what it needs.
    """

    step: RankStep[Any]
    held: list[tuple[RankStep[Any], Any]]

    @property
    def op(self) -> Op:
        """That of the fetch."""
        return self.step.op

    def perform(self, work: Any) -> None:
        """Note it."""
        self.held.append((self.step, work))


@dataclass
class VisitPace:
    """Gives a worker the steps of its minibatches, visit by visit.

    Attributes:
        dispatcher: gives devices.
        place: of the worker's job.
        residence: which of its stages are in memory, if they come and go.
        queue: its work on its device; ``None`` where all is done in main memory.
    """

    dispatcher: Dispatcher
    place: JobPlace
    residence: Residency | None = None
    queue: DeviceQueue | None = None
    _held: list[tuple[RankStep[Any], Any]] = field(default_factory=list)

    def __call__(self, steps: Sequence[RankStep[Any]]) -> Iterable[RankStep[Any]]:
        """The steps of one minibatch, each when it may be performed."""
        starts = beginnings([step.op for step in steps])
        if not starts or self.dispatcher.is_free(self.place):
            return steps
        return self._walk(steps, starts)

    def _walk(self, steps: Sequence[RankStep[Any]], starts: list[int]) -> Iterator[RankStep[Any]]:
        self._held.clear()  # of a minibatch that failed
        for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(steps)], strict=True)):
            self.dispatcher.come(self.place, number)
            self._await_device()
            yield from self._visit(steps[start:end])
            self._finish_visit()
        self.dispatcher.finish_minibatch(self.place)
        self._hand_on()

    def _finish_visit(self) -> None:
        """Wait until the device has done what it was asked for: it goes to others then, who would
        get their turns too early, and all turns would seem short."""
        moment = None if self.queue is None else self.queue.moment()
        if moment is not None:
            moment.synchronize()

    def _await_device(self) -> None:
        """Wait for the next visit's device; while others have it, they also get the memory that
        this job does not need."""
        has_device = self._news(0)
        while not has_device:
            is_writing = self._hand_on()
            has_device = self._news(_LOOK_AGAIN_SECONDS if is_writing else None)
            self._catch_up()
        self._catch_up()

    def _news(self, seconds: float | None) -> bool:
        return self.dispatcher.await_news(self.place, or_to_fetch=bool(self._held), seconds=seconds)

    def _hand_on(self) -> bool:
        """Let others use what this job's stages have left; gives whether they will leave more."""
        if self.residence is None:
            return False
        is_writing = self.residence.transfers.take_back()
        self.residence.buffers.lend()
        return is_writing

    def _visit(self, steps: Sequence[RankStep[Any]]) -> Iterator[RankStep[Any]]:
        stage, goes_on = visited([step.op for step in steps]), self.place.goes_on
        for step in steps:
            early = step.op.kind in FETCHES and step.op.stage != stage
            yield DelayedFetch(step, self._held) if early and not goes_on else step

    def _catch_up(self) -> None:
        """Begin the fetches that were held back."""
        held, self._held[:] = [*self._held], []
        for step, work in held:
            step.perform(work)
