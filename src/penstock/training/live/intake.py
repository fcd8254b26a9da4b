"""Frames of a live stream: read from a source while the pipeline works on those before, and waiting
until the first stage is free for them; and the results that come of them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, Literal, NamedTuple, Self, TypeVar, get_args

import torch
from torch import Tensor

from penstock.base.errors import RunError
from penstock.base.values import one_of

WhenLate = Literal["wait", "drop-oldest", "raise"]
WAYS_TO_BE_LATE = get_args(WhenLate)


@dataclass(frozen=True, eq=False)
class LiveFrame:
    """A frame as somebody has given it to a stream.

    Attributes:
        number: how many were given before it, dropped ones included.
        value: what the first stage takes.
        target: what the model should give for it; ``None`` if nobody says.
        learns: whether anything may be learned from it.
        arrived_seconds: when it was given, on this process's clock.
        autocast: under which autocast it was given.
    """

    number: int
    value: Any
    target: Any
    learns: bool
    arrived_seconds: float
    autocast: Mapping[str, torch.dtype] = field(default_factory=dict)


class News(Enum):
    """News between results, for who waits for one."""

    CHANGED = "something has gone wrong, or no more frames come"
    PAUSED = "all results so far are taken on rank 0"
    ENDED = "rank 0 has left the stream"


class Result(NamedTuple):
    """The model's output for one frame, with its loss.

    Attributes:
        frame: how many frames were given before this one, dropped ones included.
        output: the model's output, detached.
        loss: that of the output, before anything was learned from the frame; ``None`` if nobody
            has said what the frame should give.
        latency_seconds: from when the frame was given until its output was there; under
            ``torchrun``, until this process knew of it.
    """

    frame: int
    output: Any
    loss: Tensor | None
    latency_seconds: float


T = TypeVar("T")


class Intake(Generic[T]):
    """A queue in front of the first stage; any thread may use it.

    Frames are dropped here and nowhere else: a stage that has begun with a frame carries state of
    it, and so must all others.

    Args:
        changed: called, without a lock, after somebody has put something in.

    Attributes:
        num_dropped: frames that had to make room for newer ones.
        num_late: frames that found another one still waiting: the first stage was not free for
            that one before the next came.
        longest: the most that have waited at once.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self.num_dropped = self.num_late = self.longest = 0
        self._changed = changed
        self._waiting: deque[T] = deque()
        self._room = threading.Condition()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, item: T, when_late: WhenLate = "wait") -> bool:
        """Let something wait for the first stage. Never blocks.

        Args:
            when_late: if something waits already: ``"wait"`` behind it, ``"drop-oldest"`` to take
                its place, or ``"raise"``.

        Returns:
            Whether nothing had to make room for it.

        Raises:
            RunError: something waits, and that was to be an error.
        """
        one_of("when_late", when_late, WAYS_TO_BE_LATE)
        with self._room:
            is_late = bool(self._waiting)
            self.num_late += is_late
            if is_late and when_late == "raise":
                raise RunError(
                    "a frame came before the first stage was free for the one before it; lower the "
                    "rate, plan for more devices, or give when_late='drop-oldest'"
                )
            if is_late and when_late == "drop-oldest":
                self.num_dropped += 1
                self._waiting.popleft()
            self._waiting.append(item)
            self.longest = max(self.longest, len(self._waiting))
        self._changed()
        return not (is_late and when_late == "drop-oldest")

    def take(self) -> T | None:
        """The item that has waited longest; ``None`` if none waits."""
        with self._room:
            if not self._waiting:
                return None
            self._room.notify_all()
            return self._waiting.popleft()

    def await_room(self, seconds: float) -> bool:
        """Wait until nothing waits here.

        Returns:
            Whether that came in time.
        """
        with self._room:
            return self._room.wait_for(lambda: not self._waiting, seconds)


_LOOK_AGAIN_SECONDS = 0.2
_PARTING_SECONDS = 5.0


class SourceReader:
    """Gives the frames of a source to a stream, in a thread of its own: a camera lets its reader
    wait for the next frame, and results are wanted meanwhile.

    Who leaves it early gets what was being read: a frame that has left its source is given to the
    stream in any case.

    Args:
        source: gives frames, or pairs (frame, target).
        rate: how many frames per second it gives at most; ``None``: as many as it can.
        waits: whether a frame waits until the pipeline has room for it.
        give: takes a frame and its target.
        has_room: waits for so many seconds until the pipeline has room; whether it has.
        ended: called when no more frames come.
        before: one that was left while it waited for the same source, which can give to one only.

    Attributes:
        source: as given.
    """

    def __init__(
        self,
        source: Iterable[Any],
        *,
        rate: float | None,
        waits: bool,
        give: Callable[[Any, Any], object],
        has_room: Callable[[float], bool],
        ended: Callable[[], None],
        before: SourceReader | None = None,
    ) -> None:
        self.source = source
        self._period = None if rate is None else 1 / rate
        self._waits = waits
        self._give = give
        self._has_room = has_room
        self._ended = ended
        self._before = before
        self._leaves = threading.Event()
        self._is_done = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._read, name="penstock reader", daemon=True)

    @property
    def is_done(self) -> bool:
        """Whether no more frames come."""
        return self._is_done

    @property
    def is_left(self) -> bool:
        """Whether nobody waits for frames any more."""
        return self._leaves.is_set()

    @property
    def is_settled(self) -> bool:
        """Whether nothing of it is left to come or to be told."""
        return self._is_done and self._failure is None

    def raise_failure(self) -> None:
        """Raise what the source has raised, or what the pipeline has said to a frame, if nobody has
        heard of it."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _read(self) -> None:
        try:
            if self._before is not None:
                self._before._thread.join()
                self._before.raise_failure()
                self._before = None
            self._read_all()
        except BaseException as error:
            self._failure = error
        finally:
            self._is_done = True
            self._ended()

    def _read_all(self) -> None:
        begin, number, items = time.perf_counter(), 0, iter(self.source)
        while not self._leaves.is_set():
            try:
                item = next(items)
            except StopIteration:
                return
            self._await_turn(begin, number)
            self._give(*_pair(item))
            number += 1

    def _await_turn(self, begin: float, number: int) -> None:
        if self._period is not None:
            self._leaves.wait(max(0.0, begin + number * self._period - time.perf_counter()))
        while self._waits and not self._leaves.is_set():
            if self._has_room(_LOOK_AGAIN_SECONDS):
                return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaves.set()
        if threading.current_thread() is not self._thread:
            # Who goes on may read the source, too. A dead one nobody can interrupt.
            self._thread.join(_PARTING_SECONDS)


def _pair(item: Any) -> tuple[Any, Any]:
    if isinstance(item, tuple | list) and len(item) == 2:  # a DataLoader makes lists
        frame, target = item
        return frame, target
    return item, None
