"""The predicted course of a fleet: discrete events, one per visit.

A device that is free takes a job (``visits.choose``). When a visit begins, its device guesses what
comes next, by the same policy, and lets its stage be fetched meanwhile: of the same job, or of one
that waits, unless as many jobs as there are devices wait with a stage in memory. A tier reads one
thing at a time and writes one, in the order in which they are asked for; what a visit needs itself
comes before what the next one needs.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.base.errors import InputError
from penstock.base.values import one_of, whole
from penstock.core.timing.fleet_timeline import MOST_FLEET_DEVICES, FleetTimeline, Turn
from penstock.planning.turns.stop import Stop
from penstock.planning.turns.visits import (
    POLICIES,
    Bound,
    PolicyName,
    StageVisit,
    Standing,
    bound,
    choose,
    guess,
)

_MOST_TURNS = 2_000_000


class TimedJob(NamedTuple):
    """A job, as far as its time goes.

    Attributes:
        name: unlike all others.
        visits: of one minibatch.
        steps: how many minibatches it trains on, at most.
        tier: the name of what its stages come from; jobs on the same one wait for each other there.
        only: the device on which alone it can compute, if there is one.
    """

    name: str
    visits: Sequence[StageVisit]
    steps: int
    tier: str = ""
    only: int | None = None

    @property
    def step_seconds(self) -> float:
        """The seconds that a minibatch computes."""
        return sum(visit.seconds for visit in self.visits)


def bound_of(tasks: Sequence[TimedJob], num_devices: int) -> Bound:
    """The bound that no order of the visits of these jobs could undercut."""
    reading: dict[str, float] = defaultdict(float)
    for task in tasks:
        read = sum(visit.fetch_seconds + visit.state_seconds for visit in task.visits)
        reading[task.tier] += task.steps * read
    unit = max((visit.seconds for task in tasks for visit in task.visits), default=0.0)
    seconds = [task.steps * task.step_seconds for task in tasks]
    return bound(seconds, num_devices, unit, reading)


def simulate_fleet(
    tasks: Sequence[TimedJob],
    num_devices: int,
    policy: PolicyName = "longest",
    stop: Stop | None = None,
    *,
    ahead: bool = True,
) -> FleetTimeline:
    """Predict which job has which device when.

    Args:
        stop: of a halving, nobody knows yet which jobs go on: those that take longest are taken, so
            that the fleet takes no longer than predicted.
        ahead: whether the next visit's stage is fetched during the one before.

    Raises:
        InputError: no task, two of one name, one without a visit, or too many visits to simulate.
    """
    _check_jobs(tasks, num_devices, policy)
    return _Simulation(tasks, num_devices, policy, stop or Stop(), ahead).run()


def _check_jobs(tasks: Sequence[TimedJob], num_devices: int, policy: str) -> None:
    """Raise ``InputError`` unless these tasks can be simulated."""
    whole("devices", num_devices, 1, MOST_FLEET_DEVICES)
    one_of("policy", policy, POLICIES)
    names = [task.name for task in tasks]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"two jobs are called {twice!r}; give each a name of its own")
    for task in tasks:
        whole(f"job {task.name}: steps", task.steps, 1)
        if not task.visits:
            raise InputError(f"job {task.name} has no visits; give it at least one")
    count = sum(task.steps * len(task.visits) for task in tasks)
    if not tasks or count > _MOST_TURNS:
        raise InputError(
            f"the fleet has {count:,} visits, but must have from 1 to {_MOST_TURNS:,} to be "
            "simulated; simulate fewer steps, which repeat each other"
        )


@dataclass(eq=False)
class _QueuedJob:
    """A task on its way.

    Attributes:
        targets: numbers of minibatches at which it stands still, the next one first.
        place: the number of the next visit in its minibatch.
        fetched: when the stage of the next visit has come; ``None`` if nobody fetches it.
        fetched_next: the same of the visit behind the one that is under way.
        wrote: when what the last visit changed is on the tier.
        began, done: since the last decision: the step, and seconds of compute.
        computed: seconds of compute since the beginning.
    """

    number: int
    task: TimedJob
    targets: list[int]
    step: int = 0
    place: int = 0
    fetched: float | None = None
    fetched_next: float | None = None
    wrote: float = 0.0
    home: int | None = None
    began: int = 0
    done: float = 0.0
    computed: float = 0.0
    written: dict[int, float] = field(default_factory=dict)

    @property
    def visit(self) -> StageVisit:
        return self.task.visits[self.place]

    def following(self) -> StageVisit | None:
        """The visit behind the next one, in the same minibatch."""
        visits = self.task.visits
        return visits[self.place + 1] if self.place + 1 < len(visits) else None

    def standing(self, after_visit: bool = False) -> Standing:
        work = (self.targets[0] - self.began) * self.task.step_seconds
        done = self.done + (self.visit.seconds if after_visit else 0.0)
        share = done / work if work else 0.0
        return Standing(self.number, work - done, share, self.home, self.task.only)


class _TierQueue:
    """A tier's reading or its writing: one thing after another, for so many ``seconds`` in all."""

    def __init__(self) -> None:
        self._free = self.seconds = 0.0

    def take(self, asked: float, seconds: float) -> float:
        """When something ends that may begin at ``asked``."""
        if not seconds:
            return asked
        self.seconds += seconds
        self._free = max(self._free, asked) + seconds
        return self._free


class _Simulation:
    def __init__(
        self,
        tasks: Sequence[TimedJob],
        num_devices: int,
        policy: PolicyName,
        stop: Stop,
        ahead: bool,
    ) -> None:
        self._policy, self._stop, self._ahead = policy, stop, ahead
        self._num_devices = num_devices
        self._jobs = [
            _QueuedJob(number, task, stop.targets(len(tasks), task.steps))
            for number, task in enumerate(tasks)
        ]
        self._waiting: dict[int, _QueuedJob] = {job.number: job for job in self._jobs}
        self._standing_still: list[_QueuedJob] = []
        self._free = list(range(num_devices))
        self._under_way: list[tuple[float, int, int]] = []  # (end, device, job)
        self._readers: Mapping[str, _TierQueue] = defaultdict(_TierQueue)
        self._writers: Mapping[str, _TierQueue] = defaultdict(_TierQueue)
        self._begun_stretch = len(tasks)
        self._alive = set(self._waiting)
        self._turns: list[Turn] = []
        self._ended: dict[str, str] = {}

    def run(self) -> FleetTimeline:
        now = 0.0
        self._take(now)
        while self._under_way:
            now, device, number = heapq.heappop(self._under_way)
            self._end(self._jobs[number], device)
            while self._under_way and self._under_way[0][0] <= now:  # all before anybody chooses
                _, device, number = heapq.heappop(self._under_way)
                self._end(self._jobs[number], device)
            self._take(now)
        self._turns.sort(key=lambda turn: (turn.start, turn.device))
        return FleetTimeline(
            jobs=tuple(job.task.name for job in self._jobs),
            num_devices=self._num_devices,
            turns=tuple(self._turns),
            policy=self._policy,
            bound_seconds=self._bound().seconds,
            ended=self._ended,
        )

    def _bound(self) -> Bound:
        """Of the visits that there were."""
        reading = {tier: lane.seconds for tier, lane in self._readers.items()}
        return bound([job.computed for job in self._jobs], self._num_devices, 0.0, reading)

    def _take(self, now: float) -> None:
        for device in [*self._free]:
            chosen = choose(
                self._policy,
                device,
                [job.standing() for job in self._waiting.values()],
                self._owned(),
            )
            if chosen is not None:
                self._free.remove(device)
                self._begin(self._jobs[chosen.number], device, now)

    def _owned(self) -> set[int]:
        homes = (job.home for job in self._jobs if job.number in self._alive)
        return {home for home in homes if home is not None}

    def _begin(self, job: _QueuedJob, device: int, now: float) -> None:
        del self._waiting[job.number]
        visit, tier = job.visit, job.task.tier
        if self._policy == "whole":
            job.home = device
        here = self._fetch(job, visit, now) if job.fetched is None else job.fetched
        start = max(now, here)
        end = start + visit.seconds
        if visit.state_seconds:  # before what comes for the next visit
            end = max(end, self._readers[tier].take(start, visit.state_seconds))
        if self._ahead:
            self._guess(job, device, now)
        end = max(end, job.wrote)  # a stage leaves when what left before is written
        job.wrote = self._writers[tier].take(end, visit.leave_seconds)
        job.written[visit.stage] = job.wrote
        self._turns.append(
            Turn(device, job.task.name, job.step, *visit[:2], now, end, max(0.0, here - now))
        )
        heapq.heappush(self._under_way, (end, device, job.number))

    def _fetch(self, job: _QueuedJob, visit: StageVisit, now: float) -> float:
        if not visit.fetch_seconds:  # it has stayed, whoever still writes it
            return now
        asked = max(now, job.written.get(visit.stage, 0.0))
        return self._readers[job.task.tier].take(asked, visit.fetch_seconds)

    def _guess(self, job: _QueuedJob, device: int, now: float) -> None:
        """Let the stage come in that this device most likely visits next."""
        fetched = {
            waiting.number for waiting in self._waiting.values() if waiting.fetched is not None
        }
        candidates = [other.standing() for other in self._waiting.values()]
        following = job.following()
        if following is not None:
            candidates.append(job.standing(after_visit=True))
        chosen = guess(self._policy, device, candidates, fetched, self._num_devices, self._owned())
        if chosen is None:
            return
        other = self._jobs[chosen.number]
        if following is not None and other is job:
            job.fetched_next = self._fetch(job, following, now)
        else:
            other.fetched = self._fetch(other, other.visit, now)

    def _end(self, job: _QueuedJob, device: int) -> None:
        self._free.append(device)
        self._free.sort()
        job.done += job.visit.seconds
        job.computed += job.visit.seconds
        job.fetched, job.fetched_next = job.fetched_next, None
        job.place += 1
        if job.place == len(job.task.visits):
            job.place, job.step = 0, job.step + 1
        if job.place or job.step < job.targets[0]:
            self._waiting[job.number] = job
            return
        job.home = None
        if len(job.targets) == 1:
            self._alive.discard(job.number)
        else:
            self._standing_still.append(job)
        if self._standing_still and len(self._standing_still) == len(self._alive):
            self._decide()

    def _decide(self) -> None:
        """Half of those that stand still go on: those that take longest."""
        here, self._standing_still = self._standing_still, []
        costs = {job.task.name: -job.task.step_seconds for job in sorted(here, key=_number)}
        chosen = set(self._stop.survivors(costs, self._begun_stretch))
        for job in here:
            if job.task.name not in chosen:
                self._alive.discard(job.number)
                self._ended[job.task.name] = f"stopped at step {job.step}"
                continue
            job.targets.pop(0)
            job.began, job.done = job.step, 0.0
            self._waiting[job.number] = job
        self._begun_stretch = len(chosen)


def _number(job: _QueuedJob) -> int:
    return job.number
