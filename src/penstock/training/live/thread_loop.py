"""Frames for ranks that are threads of this process."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from penstock.engine.run.assembly import copied
from penstock.engine.run.drive.driver import StageStates
from penstock.engine.run.drive.threads import ThreadDriver
from penstock.engine.run.minibatch import Minibatch
from penstock.training.live.frames import Frame, News
from penstock.training.live.loop import Engine, Loop, Saving, late


class ThreadLoop(Loop):
    """Whoever brings news begins the next frame: the caller, with a frame, or the thread of the
    first rank, when it is through with the last one."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        assert isinstance(engine.parts.driver, ThreadDriver)
        self._driver = engine.parts.driver
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
                while self._goes_on and self._parts.feed.has_news:
                    self._remember(self._parts.feed.retire())
                while self._goes_on and self._has_room and len(self.intake):
                    self._begin_next()
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
            self._begin(self._numbered(admitted.minibatch))

    def _begin(self, minibatch: Minibatch) -> None:
        self._parts.feed.go_on(minibatch)
        through = self._first_is_through if minibatch.inputs else _nothing
        self._driver.watch(self._parts.feed.under_way[-1], through, self._fail)

    def _first_is_through(self) -> None:
        with self._turn:
            self._is_free = True
        self._changed()

    def _heard(
        self, frame: Frame, output: Any, loss: Tensor | None, moment: torch.Event | None
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

    def save(self, saving: Saving) -> None:
        self.raise_failure()
        with self._turn:
            self._begin(self._mark(saving))

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


def _nothing() -> None:
    """Nobody waits for the first rank."""
