"""One job at work, from decision to decision in a thread of its own; and the referee, who decides
which jobs go on where all of them stand still.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from penstock.base.errors import FileError, RunError
from penstock.core.schedule import Op
from penstock.core.schedule.op import FETCHES
from penstock.engine.device.queue import DeviceQueue
from penstock.engine.run.rank.interpreter import RankStep
from penstock.engine.run.rank.work import is_not_finite
from penstock.engine.weights.residency import Residency
from penstock.planning.turns.stop import Stop
from penstock.planning.turns.visits import beginnings, visited
from penstock.training.fleet.dispatcher import Dispatcher, JobPlace
from penstock.training.fleet.job import Job
from penstock.training.fleet.results import JobResult, Status
from penstock.training.pipeline import Pipeline

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


_KEPT_CHECKPOINTS = 2


class _NoNumber(RunError):
    """A loss of a device, at which nobody looked before it was learned from."""


class Trainee:
    """A job, its pipeline, and how far it has come.

    Args:
        name: of the job.
        dispatcher: gives it devices.
        only: the device on which alone it can compute, if there is one.

    Attributes:
        name, job: as given.
        pipeline: what trains it.
        place: where it stands among the others.
        status, error: how it stands.
        losses: of each minibatch since the beginning.
        metrics: likewise, by name.
        value: what was compared last.
        residence: which of its stages are in memory, if they come and go.
    """

    def __init__(
        self,
        name: str,
        job: Job,
        pipeline: Pipeline,
        dispatcher: Dispatcher,
        only: int | None = None,
    ) -> None:
        self.name, self.job, self.pipeline = name, job, pipeline
        self.place = dispatcher.place(name, job.visits, only)
        self.status: Status = "training"
        self.error: BaseException | None = None
        self.losses: list[float] = []
        self.metrics: dict[str, list[float]] = {}
        self.value: float | None = None
        self._dispatcher = dispatcher
        (worker,) = pipeline._parts.workers
        worker.pace = VisitPace(dispatcher, self.place, worker.residence, worker.queue)
        self.residence = worker.residence
        self._is_on_accelerator = worker.queue is not None
        self._lock = threading.Lock()
        self._ended = threading.Event()

    @property
    def step(self) -> int:
        """Minibatches that it was trained on."""
        return len(self.losses)

    def train(
        self, stop: Stop, referee: Referee, num_jobs: int, saving: FleetSaving | None
    ) -> None:
        """Go from decision to decision until the end; raises nothing."""
        try:
            targets: list[int | None] = [*stop.targets(num_jobs, self.job.most_steps(stop))]
            batches = self.job.batches(self.step, stop.epochs)
            for target in targets or [None]:
                self._train_to(target, batches, saving)
                if target is not None and self.step < target:
                    break  # the data has ended
                if target is not None and not referee.goes_on(
                    self.name, target, partial(self._mean, stop, target)
                ):
                    self.settle("stopped", None)
                    return
            self.settle("done", None)
        except BaseException as error:
            no_number = is_not_finite(error) or isinstance(error, _NoNumber)
            self.settle("not a number" if no_number else "failed", error)
        finally:
            # First the device, then who waits for it.
            self._dispatcher.leave(self.place)
            referee.gone(self.name)
            self._ended.set()

    def settle(self, status: Status, error: BaseException | None) -> bool:
        """The job has ended so, unless it has ended before; gives whether it had not."""
        with self._lock:
            if self.status != "training":
                return False
            self.status, self.error = status, error
            return True

    def wait(self, seconds: float) -> bool:
        """Wait for the thread's end; gives whether it came."""
        return self._ended.wait(seconds)

    def begin(self) -> bool:
        """A run begins; gives whether the job takes part: what failed knows no longer how far its
        weights are, and goes on from a checkpoint only, in another fleet."""
        if self.error is None:
            self.status = "training"
            self.place.seconds = 0.0
            self._ended.clear()
        return self.error is None

    def result(self) -> JobResult:
        """The result up to now."""
        metrics = {name: tuple(values) for name, values in self.metrics.items()}
        return JobResult(
            self.name, self.status, tuple(self.losses), metrics, self.value, self.place.seconds,
            self.error,
        )  # fmt: skip

    def _train_to(
        self, target: int | None, batches: Iterator[tuple[Any, Any]], saving: FleetSaving | None
    ) -> None:
        self._dispatcher.begin_stretch(self.place, self.step, target)
        while target is None or self.step < target:
            before, end = self.step, target
            if saving is not None:
                due = saving.next_after(before)
                end = due if end is None else min(due, end)
            stretch = self._loaded(batches, None if end is None else end - before)
            for loss in self.pipeline.steps(stretch):
                self._note(float(loss.detach()) if loss is not None else math.nan)
            if saving is not None and self.step > before:
                self.save(saving.folder)
            if end is None or self.step < end:
                return  # the data has ended

    def _loaded(
        self, batches: Iterator[tuple[Any, Any]], count: int | None
    ) -> Iterator[tuple[Any, Any]]:
        remaining = islice(batches, count)
        while True:
            with self._dispatcher.loading(self.place):
                try:
                    batch = next(remaining)
                except StopIteration:
                    return
            self._dispatcher.loaded(self.place)
            yield batch

    def _note(self, loss: float) -> None:
        self.losses.append(loss)
        for name, value in self.pipeline.metrics.items():
            self.metrics.setdefault(name, []).append(float(value.detach()))
        if not math.isfinite(loss) and self._looks_late:
            raise _NoNumber(
                f"the loss of step {self.step - 1} is {loss}, and has been learned from: on an "
                "accelerator nobody looks before. Go on from a checkpoint; lower the learning "
                "rate, clip gradients, or look at this minibatch"
            )

    @property
    def _looks_late(self) -> bool:
        """Whether losses that are no numbers end the job, and the engine does not see them."""
        stops = self.job.options.get("stop_at_nan")
        wanted = self.job.options.get("grad_scaler") is None if stops is None else stops
        return bool(wanted) and self._is_on_accelerator

    def _mean(self, stop: Stop, step: int) -> float:
        """The figure that halving compares: the mean over the minibatches before a step."""
        values = self.losses if stop.metric == "loss" else self.metrics[stop.metric]
        recent = values[step - stop.every : step]
        self.value = math.fsum(recent) / len(recent)
        return self.value

    def load(self, folder: Path) -> None:
        """Go on from the latest checkpoint, if there is one.

        Raises:
            FileError: it is of another job, or no fleet has written it.
        """
        position = self.pipeline.load(folder / self.name)
        if position is None:
            return
        if not isinstance(position, dict) or "losses" not in position:
            raise FileError(
                f"{folder / self.name} holds a checkpoint that no fleet has written; load it with "
                "Pipeline.load, or take another folder"
            )
        self.losses = [float(loss) for loss in position["losses"]]
        self.metrics = {
            name: [float(value) for value in values] for name, values in position["metrics"].items()
        }

    def save(self, folder: Path) -> None:
        """Write a checkpoint, with the losses up to now."""
        position = {
            "losses": [_text(loss) for loss in self.losses],
            "metrics": {
                name: [_text(value) for value in values] for name, values in self.metrics.items()
            },
        }
        self.pipeline.save(
            folder / self.name, keep=_KEPT_CHECKPOINTS, position=position, background=False
        )


class FleetSaving(NamedTuple):
    """When and where trainees save in the course of a run.

    Attributes:
        folder: of the fleet; each job has one in it.
        every: minibatches between two checkpoints of a job.
    """

    folder: Path
    every: int

    def next_after(self, step: int) -> int:
        """The next step at which a checkpoint is due."""
        return (step // self.every + 1) * self.every


def _text(value: float) -> float | str:
    """JSON has no word for what is not finite."""
    return value if math.isfinite(value) else str(value)


class Referee:
    """Waits until all jobs that are left have come to a decision, and takes it.

    Args:
        stop: how it is taken.
        names: of all jobs, in the fleet's order.
    """

    def __init__(self, stop: Stop, names: list[str]) -> None:
        self._stop, self._names = stop, names
        self._left = set(names)
        self._num_begun = len(names)
        self._here: dict[str, tuple[int, float]] = {}
        self._turned = threading.Condition()
        self._why_closed: str | None = None
        self._survivors: dict[int, frozenset[str]] = {}

    def is_decision(self, step: int) -> bool:
        """Whether jobs stop at this step."""
        if not self._stop.every:
            return False
        rung, rest = divmod(step, self._stop.every)
        return not rest and 1 <= rung <= self._stop.num_decisions(len(self._names))

    def goes_on(self, name: str, step: int, value: Callable[[], float]) -> bool:
        """Wait for the decision about a job that has come to a step, if there is one there.

        Args:
            value: what is compared, of this job.

        Raises:
            RunError: the fleet was ended meanwhile.
        """
        if not self.is_decision(step):
            return True
        with self._turned:
            self._here[name] = step, value()
            self._decide()
            while step not in self._survivors:
                if self._why_closed is not None:
                    raise RunError(f"job {name}: {self._why_closed}")
                self._turned.wait()
            return name in self._survivors[step]

    def gone(self, name: str) -> None:
        """A job has ended, however that was: nobody waits for it."""
        with self._turned:
            self._left.discard(name)
            self._here.pop(name, None)
            self._decide()

    def close(self, why: str) -> None:
        """Nobody is to wait any more."""
        with self._turned:
            self._why_closed = why
            self._turned.notify_all()

    def _decide(self) -> None:
        if not self._here or set(self._here) != self._left:
            return
        step = max(step for step, _ in self._here.values())
        values = {name: self._here[name][1] for name in self._names if name in self._here}
        survivors = self._survivors[step] = frozenset(self._stop.survivors(values, self._num_begun))
        self._left &= survivors
        self._num_begun = len(survivors)
        self._here.clear()
        self._turned.notify_all()
