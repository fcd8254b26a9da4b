"""``PlanningPatience``: how long a search may go on, and how near to the best it has come.

A search has an answer as soon as it has seen one plan that fits; what it does from then on may be
ended at any time: between candidates, where it looks at the clock, and inside of one, since what
is built or simulated may take long, from outside, as Ctrl-C does it. How much faster the best could
be is known from a bound that no plan undercuts. A search that has seen only plans that do not fit
ends as well, a little earlier, so that there is time left to say what is missing.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from math import inf
from time import monotonic
from typing import Self

from penstock.base.units import format_seconds, format_share

_LOOKS_SECONDS = 0.1
"""After so long somebody looks whether a search that has an answer has time left."""
_LISTENS = 10
"""Turns of a loop, before each of which Python looks whether something is to be raised."""
_LEAST_SECONDS, _MOMENT_SECONDS = 10.0, 0.3
"""For the explanation of an answer that was soon there, and where there is no time left."""
_IN_VAIN = 0.75
"""The share of the time after which a search ends that has found nothing but what does not do."""


def _tell_nobody(_: str) -> None: ...


def _never() -> bool:
    return False


class OutOfPatience(BaseException):
    """Raised in the thread of a search whose time is over, wherever that is. As with Ctrl-C, nobody
    but who began the search catches it."""


class PlanningPatience:
    """The time that a search has.

    Args:
        seconds: of the clock; without end by default.
        tell: gets a line each time that something better is known.
        wakes: whether what takes long is ended in the middle; otherwise it is asked for between
            candidates.

    Attributes:
        about: the words with which each line begins, when it is told.
    """

    def __init__(
        self,
        seconds: float | None = None,
        tell: Callable[[str], None] = _tell_nobody,
        *,
        wakes: bool = True,
    ) -> None:
        self._seconds = inf if seconds is None else seconds
        self._wakes = wakes and self._seconds < inf
        self._began, self._tell = monotonic(), tell
        self._why = ""
        self._interrupted = threading.Event()
        self._parts: list[PlanningPatience] = []
        self.about: Callable[[], str] = str

    @property
    def is_over(self) -> bool:
        """Whether an answer that is there should do."""
        if not self._why and self.is_interrupted:
            self._why = "when interrupted"
        if not self._why and self.seconds_spent > self._seconds:
            self._why = f"after {format_seconds(self._seconds)}"
        return bool(self._why)

    @property
    def is_interrupted(self) -> bool:
        """Whether somebody has pressed Ctrl-C, in whatever shares this time."""
        return self._interrupted.is_set()

    @property
    def seconds_spent(self) -> float:
        """How much of the time is over."""
        return monotonic() - self._began

    @property
    def is_late(self) -> bool:
        """Whether a search should end that has found nothing but what does not do."""
        return self.seconds_spent > _IN_VAIN * self._seconds or self.is_over

    @property
    def end(self) -> str:
        """When it was over, or one of its parts, in words; empty as long as none is."""
        return self._why or next((part.end for part in self._parts if part.end), "")

    def spend(
        self,
        search: Callable[[], object],
        has_answer: Callable[[], bool],
        is_in_vain: Callable[[], bool] = _never,
    ) -> bool:
        """Search until all is done or, once there is an answer, until the time is over or somebody
        presses Ctrl-C.

        Args:
            is_in_vain: whether something was looked at that will not do: then a search without an
                answer ends as well, with some time left.

        Returns:
            Whether the search came to its end.

        Raises:
            KeyboardInterrupt: somebody presses Ctrl-C before there is an answer.
        """

        def is_due() -> bool:
            if has_answer():
                return self.is_over
            return self.is_late and is_in_vain()

        try:
            with _Waker(is_due, is_set=self._wakes):
                search()
        except OutOfPatience:
            return False
        except KeyboardInterrupt:
            if not has_answer():
                raise
            self._interrupted.set()
            self._why = self._why or "when interrupted"
            return False
        return True

    def divided(self, count: int) -> Iterator[PlanningPatience]:
        """The time for each of several searches, one after another: an equal share of what is
        left, and none that somebody has interrupted."""
        if count == 1:
            yield self
            return
        for number in range(count, 0, -1):
            left = max(self._seconds - self.seconds_spent, 0.0)
            self._parts.append(self._with(left / number))
            yield self._parts[-1]

    @property
    def as_long_again(self) -> PlanningPatience:
        """The time for what explains an answer: as long as it took, a few seconds at least, but
        hardly any that this one has not."""
        left = 0.0 if self.is_over else self._seconds - self.seconds_spent
        seconds = min(max(self.seconds_spent, _LEAST_SECONDS), left + _MOMENT_SECONDS)
        # Where nobody is in a hurry, nothing is torn out of the middle.
        return self._with(seconds, wakes=self._seconds < inf or self.is_over)

    @property
    def for_comparison(self) -> PlanningPatience:
        """The time for what is compared with the answer: as much as this one has, or as it had when
        somebody interrupted it."""
        seconds = min(self._seconds, self.seconds_spent) if self.is_over else self._seconds
        return PlanningPatience(seconds, self._tell)

    def _with(self, seconds: float, *, wakes: bool = True) -> PlanningPatience:
        """Another time: whoever interrupts one of the two interrupts both."""
        other = PlanningPatience(seconds, self._tell, wakes=wakes)
        other._interrupted, other.about = self._interrupted, self.about
        return other

    def note(self, seconds: float, bound: float) -> None:
        """Say how far the search is: the best plan takes ``seconds``, none takes less than
        ``bound``."""
        self._tell(f"{self.about()}{format_seconds(seconds)} a step{_behind(seconds, bound)}")


class _Waker:
    """A context that its thread leaves by ``OutOfPatience`` some time after it is due.

    Args:
        is_due: asked again and again, by another thread.
        is_set: whether anybody asks.
    """

    def __init__(self, is_due: Callable[[], bool], *, is_set: bool) -> None:
        self._is_due, self._is_set = is_due, is_set
        self._sleeper = ctypes.c_ulong(threading.get_ident())
        self._lock, self._left = threading.Lock(), threading.Event()
        self._has_rung = False

    def __enter__(self) -> Self:
        if self._is_set:
            threading.Thread(target=self._watch, name="penstock's patience", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._left.set()
        if self._has_rung:
            # It may not have been heard yet, so it is heard now. Taken back, it would leave CPython
            # before 3.13 looking for it at every call from then on, for good where one is profiled.
            try:
                for _turn in range(_LISTENS):
                    pass
            except OutOfPatience:
                pass

    def _watch(self) -> None:
        while not self._left.wait(_LOOKS_SECONDS):
            if self._is_due():
                self._ring()
                return

    def _ring(self) -> None:
        with self._lock:
            if not self._left.is_set():
                self._has_rung = True
                raised = ctypes.py_object(OutOfPatience)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(self._sleeper, raised)


def verdict(end: str, seconds: float, bound: float) -> str:
    """How near to the best a search came that ended early; empty where it did not.

    Args:
        end: when, in words (``PlanningPatience.end``).
    """
    return f"stopped {end}{_behind(seconds, bound)}" if end else ""


def _behind(seconds: float, bound: float) -> str:
    """How far a plan may be from the best.

    >>> _behind(1.04, 1.0)
    ', at most 4% from the best'
    """
    return f", at most {format_share(seconds / bound - 1, 0)} from the best" if bound else ""
