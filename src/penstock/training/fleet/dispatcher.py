"""The dispatcher of a fleet: it gives a device for one visit at a time, by the policies of
``turns``."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Literal

from penstock.base.errors import DeadlineError, RunError
from penstock.core.timing.fleet_timeline import Turn
from penstock.planning.turns.visits import PolicyName, StageVisit, Standing, choose, guess

State = Literal["away", "waiting", "visiting", "kept"]

_KEPT_SECONDS = 0.05
"""How long a job may keep its device between two minibatches; longer, and others go first."""


class JobPlace:
    """Where one job stands among the others. Everything is read and written under the lock of its
    dispatcher.

    Args:
        name: of the job.
        number: of the job; decides where all else is equal.
        visits: of one of its minibatches, as predicted.
        lock: of the dispatcher.
        only: the device on which alone it can compute, if there is one.

    Attributes:
        state: ``away`` from devices (it loads data, or is at its end), ``waiting`` for one,
            ``visiting`` a stage on one, or between two minibatches with a device ``kept``.
        device: the one that it has.
        fetches: whether it is to fetch its next stage while it waits.
        goes_on: whether its device would most likely stay with it behind this visit, so that it
            has fetched the next stage.
        step, target: minibatches done, and those until the next decision; ``None`` if unknown.
        visit: the number of the visit in its minibatch that is under way or waited for.
        seconds: how long it has had devices.
        why_gone: why it gets none any more; ``None`` where it does.
    """

    def __init__(
        self,
        name: str,
        number: int,
        visits: Sequence[StageVisit],
        lock: threading.RLock,
        only: int | None = None,
    ) -> None:
        self.name, self.number, self._only = name, number, only
        self.turned = threading.Condition(lock)
        self.state: State = "away"
        self.device: int | None = None
        self.home: int | None = None
        self.fetches = self.goes_on = False
        self.step = self.visit = self.began_stretch = 0
        self.target: int | None = None
        self.since = self.seconds = 0.0
        self.why_gone: str | None = None
        self.is_loading = False
        self.num_ready = 0
        """Minibatches that are loaded and not begun."""
        self._shape = [visit.seconds for visit in visits]
        if not sum(self._shape):
            self._shape = [1.0] * len(self._shape)  # a plan that nobody has profiled
        self._stages = visits
        self._predicted = self._measured = 0.0
        self._pace = 1.0

    def label(self) -> tuple[int, bool]:
        """(stage, whether backwards run) of the visit."""
        visit = self._stages[min(self.visit, len(self._stages) - 1)]
        return visit.stage, visit.backward

    @property
    def num_visits(self) -> int:
        """Visits of a minibatch."""
        return len(self._shape)

    def learn(self, seconds: float) -> None:
        """The visit that is under way took so long."""
        self._predicted += self._visit_seconds()
        self._measured += seconds
        self.seconds += seconds

    def reckon(self) -> None:
        """A minibatch is done: what is left takes as much longer than predicted as visits did up
        to now. Not after each visit, or guesses would go by other numbers than decisions."""
        self._pace = self._measured / self._predicted if self._predicted else 1.0

    def _visit_seconds(self) -> float:
        return self._shape[min(self.visit, len(self._shape) - 1)]

    def standing(self, *, after_visit: bool = False) -> Standing:
        """As policies want it: what was predicted, as much longer as visits were up to now."""
        if self.target is None:
            return Standing(self.number, inf, 0.0, self.home, self._only)
        whole = sum(self._shape)
        done = (self.step - self.began_stretch) * whole + sum(self._shape[: self.visit])
        if after_visit:
            done += self._visit_seconds()
        work = (self.target - self.began_stretch) * whole
        left = max(0.0, work - done) * self._pace
        share = done / work if work else 1.0
        return Standing(self.number, left, share, self.home, self._only)


class Dispatcher:
    """Gives devices to jobs.

    Args:
        num_devices: how many jobs may compute at once.
        policy: which job a free device takes.

    Attributes:
        turns: what devices have done since ``open``.
    """

    def __init__(self, num_devices: int, policy: PolicyName) -> None:
        self._lock = threading.RLock()
        self._num_devices, self._policy = num_devices, policy
        self._places: list[JobPlace] = []
        self._free: list[int] = []
        self._start = 0.0
        self._why_closed: str | None = None
        self._is_resting = True
        self.turns: list[Turn] = []

    def place(self, name: str, visits: Sequence[StageVisit], only: int | None = None) -> JobPlace:
        """A place for one more job, which may compute on one device only."""
        place = JobPlace(name, len(self._places), visits, self._lock, only)
        self._places.append(place)
        return place

    def is_free(self, place: JobPlace) -> bool:
        """Whether a job may do what it likes, since no fleet runs: its caller trains or evaluates
        it by itself. One that was given up never may."""
        return self._is_resting and place.why_gone is None

    def open(self) -> None:
        """Devices are free from now on."""
        with self._lock:
            self._free = list(range(self._num_devices))
            self.turns = []
            self._start = time.perf_counter()
            self._why_closed, self._is_resting = None, False
            for place in self._places:
                place.state, place.device, place.home = "away", None, None
                place.num_ready, place.is_loading = 0, False

    def rest(self) -> None:
        """All jobs have ended, so that nobody is to wait for a device."""
        with self._lock:
            self._is_resting = True

    def close(self, why: str) -> None:
        """Nobody gets a device any more; those that wait for one get an error."""
        with self._lock:
            self._why_closed = why
            for place in self._places:
                place.turned.notify_all()

    def come(self, place: JobPlace, visit: int) -> None:
        """A job is through with a visit, if it had one, and waits to begin the next one.

        Args:
            visit: its number in the minibatch.
        """
        with self._lock:
            if visit == 0:
                place.num_ready -= 1
            self._end_visit(place)
            self._give_back(place)
            place.state, place.visit = "waiting", visit
            place.goes_on = place.goes_on and visit > 0
            self._dispatch()

    def await_news(
        self, place: JobPlace, *, or_to_fetch: bool, seconds: float | None = None
    ) -> bool:
        """Wait until a job has a device, or is to fetch its next stage; gives whether it has one.

        Args:
            seconds: to wait at most.

        Raises:
            RunError: it will get none.
        """

        def is_there() -> bool:
            if place.why_gone is not None or self._why_closed is not None:
                raise RunError(f"job {place.name}: {place.why_gone or self._why_closed}")
            return place.device is not None or (or_to_fetch and place.fetches)

        with place.turned:
            place.turned.wait_for(is_there, seconds)
            return place.device is not None

    def finish_minibatch(self, place: JobPlace) -> None:
        """A job is through with its last visit; it keeps its device if the next minibatch is about
        to begin, so that it is not overtaken by all others each time."""
        with self._lock:
            self._end_visit(place)
            place.step, place.visit = place.step + 1, 0
            place.reckon()
            if place.num_ready > 0 and not place.is_loading and place.device is not None:
                place.state, place.since = "kept", time.perf_counter()
                return
            place.state = "away"
            self._give_back(place)
            self._dispatch()

    @contextmanager
    def loading(self, place: JobPlace) -> Iterator[None]:
        """While a job loads its next minibatch, it keeps no device idle."""
        with self._lock:
            place.is_loading = True
            self._release_kept(place)
        try:
            yield
        finally:
            with self._lock:
                place.is_loading = False

    def loaded(self, place: JobPlace) -> None:
        """A job has one more minibatch to begin."""
        with self._lock:
            place.num_ready += 1

    def begin_stretch(self, place: JobPlace, step: int, target: int | None) -> None:
        """A job trains from a step up to the next decision about it."""
        with self._lock:
            place.step = place.began_stretch = step
            place.target, place.num_ready = target, 0

    def give_up(self, place: JobPlace, why: str) -> None:
        """A job gets no device any more, and is told so if it asks for one again."""
        with self._lock:
            place.why_gone = why
            self.leave(place)

    def leave(self, place: JobPlace) -> None:
        """A job takes no device for now, wherever it is; others may."""
        with self._lock:
            if place.state == "visiting":
                self._end_visit(place)
            place.state, place.home = "away", None
            self._give_back(place)
            place.turned.notify_all()
            self._dispatch()

    def look_around(self, deadline_seconds: float) -> JobPlace | None:
        """Free devices that are kept for too long, and find a job whose visit takes too long."""
        with self._lock:
            now = time.perf_counter()
            for place in self._places:
                if place.state == "kept" and now - place.since > _KEPT_SECONDS:
                    self._release_kept(place)
            return next(
                (
                    place
                    for place in self._places
                    if place.state == "visiting" and now - place.since > deadline_seconds
                ),
                None,
            )

    def states(self) -> dict[str, tuple[State, int | None]]:
        """By job, what it does and on which device."""
        with self._lock:
            return {place.name: (place.state, place.device) for place in self._places}

    def _release_kept(self, place: JobPlace) -> None:
        if place.state == "kept":
            place.state = "away"
            self._give_back(place)
            self._dispatch()

    def _end_visit(self, place: JobPlace) -> None:
        if place.state != "visiting" or place.device is None:
            return
        now = time.perf_counter()
        place.learn(now - place.since)
        begin, end = place.since - self._start, now - self._start
        self.turns.append(Turn(place.device, place.name, place.step, *place.label(), begin, end))
        place.state = "away"

    def _give_back(self, place: JobPlace) -> None:
        if place.device is not None:
            self._free.append(place.device)
            self._free.sort()
            place.device = None

    def _dispatch(self) -> None:
        if self._why_closed is not None:
            return
        for device in [*self._free]:
            chosen = choose(self._policy, device, self._waiting(), self._owned())
            if chosen is not None:
                self._free.remove(device)
                self._give(self._places[chosen.number], device)

    def _waiting(self) -> list[Standing]:
        return [place.standing() for place in self._places if place.state == "waiting"]

    def _owned(self) -> set[int]:
        return {place.home for place in self._places if place.home is not None}

    def _give(self, place: JobPlace, device: int) -> None:
        place.state, place.device, place.since = "visiting", device, time.perf_counter()
        place.fetches = place.goes_on = False
        if self._policy == "whole":
            place.home = device
        self._guess(place, device)
        place.turned.notify_all()

    def _guess(self, place: JobPlace, device: int) -> None:
        """Have the stage fetched that this device most likely visits next."""
        waiting = [other for other in self._places if other.state == "waiting"]
        fetched = {other.number for other in waiting if other.fetches or other.goes_on}
        candidates = [other.standing() for other in waiting]
        if place.visit + 1 < place.num_visits:
            candidates.append(place.standing(after_visit=True))
        chosen = guess(self._policy, device, candidates, fetched, self._num_devices, self._owned())
        if chosen is None:
            return
        if chosen.number == place.number:
            place.goes_on = True
        else:
            other = self._places[chosen.number]
            other.fetches = True
            other.turned.notify_all()


def overdue(place: JobPlace, seconds: float) -> DeadlineError:
    """The error of a job whose visit does not end."""
    stage, backward = place.label()
    way = "backwards" if backward else "forwards"
    return DeadlineError(
        f"job {place.name}, step {place.step}: the {way} of stage {stage} did not end within "
        f"{seconds:g} s, so its device goes to others; raise deadline_seconds if they take so long"
    )
