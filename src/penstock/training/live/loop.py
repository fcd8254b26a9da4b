"""Lets frames into the pipeline as soon as its first stage is free for them, and gives their
results in order, with the news between them."""

from __future__ import annotations

import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from penstock.base.errors import DeadlineError, InputError, RunError
from penstock.engine.device.queue import taken_up
from penstock.engine.model import tree
from penstock.engine.run.assembly import Assembly
from penstock.engine.run.drive.driver import Deadlines, StageStates
from penstock.engine.run.history import History
from penstock.engine.run.minibatch import Minibatch
from penstock.engine.run.outcome import MinibatchOutcome
from penstock.training.checkpoint.keeper import Keeper
from penstock.training.checkpoint.saving import Checkpoints
from penstock.training.live.intake import Intake, LiveFrame, News, Result, WhenLate
from penstock.training.live.report import StreamLedger


class SaveRequest(NamedTuple):
    """A wish to save behind the frames that the first stage has begun.

    Attributes:
        folder: of the run.
        keep: how many complete checkpoints stay; ``None``: all.
        position: where the caller's data are; ``None``: how many frames were learned from.
    """

    folder: str
    keep: int | None
    position: Any


class Admitted(NamedTuple):
    """A frame that waits for the first stage.

    Attributes:
        frame: as it was given.
        minibatch: the same, copied for the ranks of this process; its number is not known yet.
    """

    frame: LiveFrame
    minibatch: Minibatch


class FrameOutput(NamedTuple):
    """An output that has left the last stage.

    Attributes:
        result: all but when it came, where an accelerator still works on it.
        arrived_seconds: when its frame was given. The frame itself must not wait here for who takes
            the result: its tensors may lie in memory that another process has lent.
        moment: when the accelerator is through.
    """

    result: Result
    arrived_seconds: float
    moment: torch.Event | None

    def settled(self) -> Result:
        """The result, when it is there."""
        if self.moment is None:
            return self.result
        self.moment.synchronize()
        return self.result._replace(latency_seconds=time.perf_counter() - self.arrived_seconds)


class Engine(NamedTuple):
    """The engine that a loop runs, and who is told of it.

    Attributes:
        parts: the pipeline.
        history: what is remembered of it.
        keeper: saves its state.
        entered: told the number and the value of each frame with which the first stage begins.
    """

    parts: Assembly
    history: History
    keeper: Keeper
    entered: Callable[[int, Any], None]


class Loop(ABC):
    """The part of a loop that threads and processes have in common.

    Attributes:
        intake: frames that wait for the first stage.
        arrivals: outputs in the order of their frames, and news between them.
        num_begun: frames that the first stage has begun with, those of the run before included.
        most_within: the most frames that have entered and not left. With as many as there are
            stages, none of them is idle, and no frame waits for more than its ticks between two.
    """

    def __init__(self, engine: Engine) -> None:
        self.intake: Intake[Admitted] = Intake(self._changed)
        self.arrivals: queue.SimpleQueue[FrameOutput | News] = queue.SimpleQueue()
        self.num_begun = 0
        self.most_within = engine.parts.plan.num_ranks
        self._most_untaken: int | None = None
        self._parts, self._history, self._keeper, self._entered = engine
        self._failure: BaseException | None = None
        self._is_told = False

    def put(self, frame: LiveFrame, when_late: WhenLate) -> bool:
        """Let a frame wait for the first stage; see ``Intake.put``.

        Raises:
            InputError: it holds no tensor.
        """
        return self.intake.put(Admitted(frame, self._cut(frame)), when_late)

    def _cut(self, frame: LiveFrame) -> Minibatch:
        return self._parts.cutter.frame(
            frame.value,
            frame.target,
            number=frame.number,
            learns=frame.learns,
            listener=partial(self._heard, frame),
            autocast=frame.autocast,
        )

    def _heard(
        self, frame: LiveFrame, output: Any, loss: Tensor | None, moment: torch.Event | None
    ) -> None:
        latency = time.perf_counter() - frame.arrived_seconds
        result = Result(frame.number, output, loss, latency)
        self.arrivals.put(FrameOutput(result, frame.arrived_seconds, moment))

    def _remember(self, outcome: MinibatchOutcome) -> None:
        # What the model gave for a frame is its caller's; of long streams it would fill the memory.
        self._history.add(outcome._replace(outputs=()) if outcome.outputs else outcome)

    def _drain(self) -> None:
        """Let all that has been begun come to its end."""
        for outcome in self._parts.feed.drain(self.num_begun):
            self._remember(outcome)

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """While this lasts, nothing enters while too many results wait for who takes them: frames
        are then late in front of the first stage, where they wait or are dropped."""
        self._most_untaken = 2 * self.most_within + 2
        try:
            yield
        finally:
            self._most_untaken = None
            self.taken()

    def taken(self) -> None:
        """Somebody has taken a result."""
        if len(self.intake):
            self._changed()

    @property
    def _is_heard(self) -> bool:
        """Whether whoever takes the results keeps up with them, as far as that matters."""
        return self._most_untaken is None or self.arrivals.qsize() <= self._most_untaken

    def _numbered(self, minibatch: Minibatch) -> Minibatch:
        """The next frame for the first stage."""
        value = minibatch.inputs[0]
        for moment in minibatch.inputs_moments:  # what is read now may still be on its way there
            taken_up(tree.tensors(value), moment)
        self._entered(self.num_begun, value)
        self.num_begun += 1
        return replace(minibatch, step=self.num_begun - 1)

    def _mark(self, saving: SaveRequest) -> Minibatch:
        """A mark that makes every stage save itself behind the frames that were begun."""
        wanted = Checkpoints(saving.folder, every=1, keep=saving.keep)
        mark = self._keeper.mark(wanted, self.num_begun, position=saving.position)
        return Minibatch(self.num_begun, (), mark=mark)

    @property
    def name(self) -> str:
        """Who takes results here, for errors."""
        return f"rank {self._parts.workers[0].rank}"

    @property
    def follows(self) -> bool:
        """Whether frames are given to another process, which tells this one."""
        return False

    def pause(self) -> None:  # noqa: B027 - most have nobody to tell
        """All results so far are taken: let other processes know."""

    @abstractmethod
    def _changed(self) -> None:
        """A frame has come to wait."""

    @abstractmethod
    def start(self) -> None:
        """Frames will come; called before the first one, and again without effect."""

    @abstractmethod
    def states(self) -> StageStates:
        """Copies of what this process's stages have, behind the frames that were begun here.

        Raises:
            DeadlineError: a rank is not through with them in time.
        """

    @abstractmethod
    def save(self, saving: SaveRequest) -> None:
        """Let every stage save itself behind the frames that the first stage has begun."""

    def raise_failure(self) -> None:
        """Raise what has gone wrong, if anything has.

        Raises:
            RunError: the first failure of any rank.
        """
        if self._failure is not None:
            self._is_told = True
            raise self._failure

    @abstractmethod
    def end(self) -> None:
        """Let stages finish what they have begun; nothing may be put any more.

        Raises:
            RunError: the first failure of any rank, if nobody has heard of it yet.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Begin nothing any more."""


def late(rank: int, deadlines: Deadlines) -> DeadlineError:
    """The error of a rank that is not through with its frames."""
    return DeadlineError(
        f"rank {rank} was not through with the frames that it has begun after "
        f"{deadlines.step.seconds:g} s, so that its weights cannot be read; raise deadline_seconds "
        "if its layers take so long"
    )


class Results:
    """The outputs that have left the last stage, for whoever takes them.

    Args:
        loop: puts arrivals and news in their order.
        ledger: is told of each result that is taken.

    Attributes:
        num_taken: how many results somebody has taken.
        closed: whether the stream is over in this process.
    """

    def __init__(self, loop: Loop, ledger: StreamLedger) -> None:
        self.num_taken = 0
        self.closed = False
        self._loop = loop
        self._ledger = ledger
        self._set_aside: News | None = None

    def close(self) -> None:
        """The stream is over: whoever waits for a result waits no more."""
        self.closed = True
        self._loop.arrivals.put(News.CHANGED)

    def check_open(self) -> None:
        """Raise ``InputError`` if the stream is over in this process."""
        if self.closed:
            raise InputError("this stream is closed; make a new one")

    def at_once(self) -> Result | None:
        """The next result; ``None`` if there is none yet."""
        self.check_open()
        paused: News | None = None
        while (news := self._news(wait=False)) is not None:
            if isinstance(news, FrameOutput):
                return self._taken(news)
            if news is not News.CHANGED:
                paused = news
            if news is News.ENDED:
                break
        self._set_aside = paused  # for who takes all that is under way
        self._loop.raise_failure()
        return None

    def next(self) -> Result:
        """Wait for the next result.

        Raises:
            RunError: no more will come; or the first failure of any rank.
        """
        while True:
            news = self._news()
            if isinstance(news, FrameOutput):
                return self._taken(news)
            if news is News.ENDED:
                self._set_aside = news
                raise RunError(
                    f"{self._loop.name} waits for the result of another frame, but rank 0 has left "
                    "the stream; all processes must call it equally often"
                )
            self.check_open()
            self._loop.raise_failure()

    def until(self, is_over: Callable[[], bool]) -> Iterator[Result]:
        """Results, until a condition holds that news tell of, or the stream is closed."""
        while not is_over():
            news = self._news()
            if isinstance(news, FrameOutput):
                yield self._taken(news)
            elif self.closed:
                return
            else:
                self._loop.raise_failure()

    def followed(self) -> Iterator[Result]:
        """Results, until rank 0 has taken all that were under way there, or has left."""
        while True:
            news = self._news()
            if isinstance(news, FrameOutput):
                yield self._taken(news)
            elif news is News.CHANGED and not self.closed:
                self._loop.raise_failure()
            else:
                self._set_aside = news if news is News.ENDED else None
                return

    def _news(self, *, wait: bool = True) -> FrameOutput | News | None:
        """The next output or news; ``None`` if there is none, and nobody waits."""
        if self._set_aside is not None:
            news, self._set_aside = self._set_aside, None
            return news
        if wait and not self.closed and self._loop.arrivals.empty():
            self._loop.raise_failure()  # who was told of it before may ask again
        try:
            return self._loop.arrivals.get(block=wait)
        except queue.Empty:
            return None

    def _taken(self, arrival: FrameOutput) -> Result:
        result = arrival.settled()
        self.num_taken += 1
        self._loop.taken()
        self._ledger.told(result, None if result.loss is None else float(result.loss))
        return result
