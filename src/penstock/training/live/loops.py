"""The two loops: for ranks that are threads of this process, and for ranks that are processes.

Between processes rank 0 has the frames, and tells the others of each. All ranks begin frames, and
collect their results, in the order that rank 0 says. So nobody but rank 0 needs a camera, and all
agree on which frames were dropped.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from penstock.engine.run.assembly import copied, copied_states
from penstock.engine.run.drive.driver import StageStates
from penstock.engine.run.drive.processes import ProcessDriver
from penstock.engine.run.drive.threads import ThreadDriver
from penstock.engine.run.minibatch import Minibatch
from penstock.engine.run.outcome import MinibatchOutcome
from penstock.training.live.intake import LiveFrame, News
from penstock.training.live.loop import Admitted, Engine, Loop, SaveRequest, late


class ThreadLoop(Loop):
    """Whoever brings news begins the next frame: the caller, with a frame, or the thread of the
    first rank, when it is through with the last one."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        assert isinstance(engine.parts.driver, ThreadDriver)
        self._driver = engine.parts.driver
        self._driver.listen(self._first_is_through, self._fail)
        # Nobody who holds it waits for a rank: the first rank's thread waits for it.
        self._turn = threading.RLock()
        self._asking = threading.Lock()  # who reads a source asks, too
        self._is_free = True
        self._num_within = 0
        self._ended = False
        self._has_failed = False

    def start(self) -> None:
        """The ranks' threads wait for frames already."""

    def _changed(self) -> None:
        with self._turn:
            try:
                while self._goes_on and self._has_room and len(self.intake):
                    self._begin_next()
                # A frame that waits need not wait for this, too.
                while self._goes_on and self._parts.feed.has_news:
                    self._remember(self._parts.feed.retire())
            except BaseException as error:  # in the thread of a rank nobody would hear of it
                self._fail(error)

    @property
    def _goes_on(self) -> bool:
        return not (self._ended or self._has_failed)

    @property
    def _has_room(self) -> bool:
        return self._is_free and self._num_within < self.most_within and self._is_heard

    def _begin_next(self) -> None:
        admitted = self.intake.take()
        if admitted is not None:
            self._is_free = False
            self._num_within += 1
            self._parts.feed.go_on(self._numbered(admitted.minibatch))

    def _first_is_through(self, minibatch: Minibatch) -> None:
        if minibatch.inputs:  # else it was a mark, or the end
            with self._turn:
                self._is_free = True
            self._changed()

    def _heard(
        self, frame: LiveFrame, output: Any, loss: Tensor | None, moment: torch.Event | None
    ) -> None:
        super()._heard(frame, output, loss, moment)
        with self._turn:
            self._num_within -= 1
            waits = bool(len(self.intake))
        if waits:
            self._changed()

    def _fail(self, error: BaseException | None = None) -> None:
        with self._turn:
            self._has_failed = True
            self._failure = self._failure or error
        self.arrivals.put(News.CHANGED)

    def states(self) -> StageStates:
        stages, states = self._parts.stages, {}
        with self._turn:  # all have come equally far: nobody begins a frame meanwhile
            under_way = self._driver.behind(
                lambda worker: copied({k: stages[k].state_dict() for k in worker.stages})
            )
        for rank, future in enumerate(under_way):
            try:
                states.update(future.result(self._parts.deadlines.step.seconds))
            except TimeoutError:
                raise late(rank, self._parts.deadlines) from None
        return states

    def save(self, saving: SaveRequest) -> None:
        self.raise_failure()
        with self._turn:
            self._parts.feed.go_on(self._mark(saving))

    def raise_failure(self) -> None:
        if not self._has_failed:
            return
        with self._asking:
            if self._failure is None:
                try:
                    while self._parts.feed.under_way:
                        self._parts.feed.collect()
                except BaseException as error:
                    self._failure = error
        super().raise_failure()

    def end(self) -> None:
        self.abandon()
        if self._is_told:
            return
        self.raise_failure()
        self._drain()

    def abandon(self) -> None:
        with self._turn:
            self._ended = True


_JOIN_SECONDS = 1.0
_LOOK_AGAIN_SECONDS = 0.0005


class _StreamOrder(IntEnum):
    """Orders of rank 0 to the others."""

    BEGIN = 0
    COLLECT = 1
    SAVE = 2
    PAUSE = 3
    WAIT = 4
    END = 5


class ProcessLoop(Loop):
    """A thread of each process that does all that has to do with other ranks."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        parts = engine.parts
        assert isinstance(parts.driver, ProcessDriver)
        self._driver = parts.driver
        self._rank = parts.workers[0].rank
        self._last_rank = parts.plan.placement.ranks_of(len(parts.plan.stages) - 1)[0]
        self._wishes: deque[SaveRequest | News | None] = deque()  # ``None``: to end
        self._news = threading.Condition()
        self._begun: deque[LiveFrame | None] = deque()  # ``None``: no frame, but a mark
        self._num_orders = 0
        self._looks_until = 0.0
        self._abandoned = False
        self._performing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="penstock stream", daemon=True)

    @property
    def follows(self) -> bool:
        return self._rank > 0

    def start(self) -> None:
        if not self._thread.is_alive():
            self._thread.start()

    def put(self, frame: LiveFrame, when_late: Any) -> bool:
        return True if self.follows else super().put(frame, when_late)

    def _changed(self) -> None:
        with self._news:
            self._news.notify_all()

    def _wish(self, wish: SaveRequest | News | None) -> None:
        with self._news:
            self._wishes.append(wish)
            self._news.notify_all()

    def save(self, saving: SaveRequest) -> None:
        self.raise_failure()
        if not self.follows:
            self._wish(saving)

    def states(self) -> StageStates:
        # The thread of this process's rank performs what has been begun before it tells of it.
        if not self._performing.acquire(timeout=self._parts.deadlines.step.seconds):
            raise late(self._rank, self._parts.deadlines)
        try:
            return copied_states(self._parts)
        finally:
            self._performing.release()

    def _drain(self) -> None:
        with self._performing:
            super()._drain()

    def pause(self) -> None:
        if not self.follows:
            self._wish(News.PAUSED)

    def end(self) -> None:
        if not self.follows:
            self._wish(None)
        self._thread.join()
        if not self._is_told:
            self.raise_failure()

    def abandon(self) -> None:
        self._abandoned = True
        self._changed()
        if self._thread.is_alive():
            self._thread.join(0.0 if self.follows else _JOIN_SECONDS)

    def _run(self) -> None:
        try:
            (self._follow if self.follows else self._lead)()
        except BaseException as error:
            if not self._abandoned:
                self._failure = error
                self.arrivals.put(News.CHANGED)

    # Rank 0

    def _lead(self) -> None:
        # Others wait for an order no longer than for any message, whether a frame comes or not.
        idle_seconds = self._parts.deadlines.step.seconds / 4
        looks = self._driver.can_look
        while not self._abandoned:
            if looks and self._parts.feed.has_news:
                self._lead_collecting()
            elif self._wishes:
                wish = self._wishes.popleft()
                self._grant(wish)
                if wish is None:
                    return
            elif self._is_heard and (admitted := self.intake.take()) is not None:
                self._lead_with(admitted)
            elif looks and self._parts.feed.under_way and time.monotonic() < self._looks_until:
                # A frame that comes now must not wait until this one is through.
                with self._news:
                    self._news.wait_for(self._has_news, _LOOK_AGAIN_SECONDS)
            elif self._parts.feed.under_way:
                self._lead_collecting()
            else:
                with self._news:
                    has_news = self._news.wait_for(self._has_news, idle_seconds)
                if not has_news:
                    self._tell(_StreamOrder.WAIT)

    def _lead_collecting(self) -> None:
        self._tell(_StreamOrder.COLLECT)
        self._collect()

    def _has_news(self) -> bool:
        waits = len(self.intake) and self._is_heard
        return bool(self._wishes or waits or self._abandoned)

    def _grant(self, wish: SaveRequest | News | None) -> None:
        if isinstance(wish, SaveRequest):
            self._tell(_StreamOrder.SAVE, tuple(wish))
            self._begin(self._mark(wish), None)
        elif wish is News.PAUSED:
            self._tell(_StreamOrder.PAUSE)
        else:
            self._tell(_StreamOrder.END)
            self._drain()

    def _lead_with(self, admitted: Admitted) -> None:
        frame = admitted.frame
        autocast = {
            kind: str(dtype).removeprefix("torch.") for kind, dtype in frame.autocast.items()
        }
        about = frame.number, frame.learns, autocast
        self._tell(_StreamOrder.BEGIN, about, to_last=frame.target)
        self._begin(self._numbered(admitted.minibatch), frame)

    def _tell(self, order: _StreamOrder, about: Any = None, to_last: Any = None) -> None:
        """Give an order to all other ranks; only the last one needs a target."""
        orders = {
            rank: (int(order), about, to_last if rank == self._last_rank else None)
            for rank in range(1, self._parts.plan.num_ranks)
        }
        self._driver.announce(self._num_orders, orders, self._parts.feed.expected())
        self._num_orders += 1

    # The others

    def _follow(self) -> None:
        while True:
            heard, about, target = self._driver.announced(
                self._num_orders, self._parts.feed.expected()
            )
            self._num_orders += 1
            order = _StreamOrder(heard)
            if order is _StreamOrder.BEGIN:
                self._follow_with(about, target)
            elif order is _StreamOrder.COLLECT:
                self._collect()
            elif order is _StreamOrder.SAVE:
                self._begin(self._mark(SaveRequest(*about)), None)
            elif order is _StreamOrder.PAUSE:
                self.arrivals.put(News.PAUSED)
            elif order is _StreamOrder.END:
                self.arrivals.put(News.PAUSED)  # no more will come for who waits here
                self._drain()
                self.arrivals.put(News.ENDED)
                return

    def _follow_with(self, about: Any, target: Any) -> None:
        number, learns, autocast = about
        dtypes = {kind: getattr(torch, dtype) for kind, dtype in autocast.items()}
        frame = LiveFrame(number, None, target, learns, time.perf_counter(), dtypes)
        self._begin(self._numbered(self._cut(frame)), frame)

    # All

    def _begin(self, minibatch: Minibatch, frame: LiveFrame | None) -> None:
        self._begun.append(frame)
        self._looks_until = time.monotonic() + self._parts.deadlines.step.seconds
        with self._performing:
            self._parts.feed.go_on(minibatch)
        while len(self._parts.feed.under_way) > self.most_within:
            self._collect()

    def _collect(self) -> None:
        self._remember(self._parts.feed.collect())

    def _remember(self, outcome: MinibatchOutcome) -> None:
        frame = self._begun.popleft() if self._begun else None
        # The rank of the last stage has heard of it already.
        if frame is not None and self._rank != self._last_rank:
            (output,) = outcome.outputs
            self._heard(frame, output, outcome.loss, None)
        super()._remember(outcome)
