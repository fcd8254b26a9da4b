"""``PlanningPatience``: how long a search may go on, and how near to the best it has come.

A search has an answer as soon as it has seen one plan that fits; what it does from then on may be
ended at any time: between candidates, where it looks at the clock, and inside of one, since what
is built or simulated may take long, from outside, as Ctrl-C does it. How much faster the best could
be is known from a bound that no plan undercuts.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from math import inf
from time import monotonic
from typing import Self

from penstock.base.units import format_seconds

_LOOKS_SECONDS = 0.1
"""After so long somebody looks whether a search that has an answer has time left."""
_LEAST_SECONDS, _MOMENT_SECONDS = 10.0, 0.3
"""For the explanation of an answer that was soon there, and where there is no time left."""


def _tell_nobody(_: str) -> None: ...


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

    @property
    def is_over(self) -> bool:
        """Whether an answer that is there should do."""
        if not self._why and monotonic() - self._began > self._seconds:
            self._why = f"after {format_seconds(self._seconds)}"
        return bool(self._why)

    def spend(self, search: Callable[[], object], has_answer: Callable[[], bool]) -> None:
        """Search until all is done or, once there is an answer, until the time is over or somebody
        presses Ctrl-C.

        Raises:
            KeyboardInterrupt: somebody presses Ctrl-C before there is an answer.
        """
        try:
            with _Waker(lambda: self.is_over and has_answer(), is_set=self._wakes):
                search()
        except OutOfPatience:
            pass
        except KeyboardInterrupt:
            if not has_answer():
                raise
            self._why = "when interrupted"

    @property
    def as_long_again(self) -> PlanningPatience:
        """The time for what explains an answer: as long as it took, a few seconds at least, but
        hardly any that this one has not."""
        spent = monotonic() - self._began
        left = 0.0 if self.is_over else self._seconds - spent
        seconds = min(max(spent, _LEAST_SECONDS), left + _MOMENT_SECONDS)
        # Where nobody is in a hurry, nothing is torn out of the middle.
        return PlanningPatience(seconds, wakes=self._seconds < inf or self.is_over)

    def note(self, seconds: float, bound: float) -> None:
        """Say how far the search is: the best plan takes ``seconds``, none takes less than
        ``bound``."""
        self._tell(f"{format_seconds(seconds)} a step{_behind(seconds, bound)}")

    def verdict(self, seconds: float, bound: float) -> str:
        """Why the search ended early, and how near to the best; empty where it did not."""
        return f"stopped {self._why}{_behind(seconds, bound)}" if self._why else ""


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
        if self._has_rung:  # it may not have been heard yet
            ctypes.pythonapi.PyThreadState_SetAsyncExc(self._sleeper, None)

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


def _behind(seconds: float, bound: float) -> str:
    """How far a plan may be from the best.

    >>> _behind(1.04, 1.0)
    ', at most 4% from the best'
    """
    return f", at most {seconds / bound - 1:.0%} from the best" if bound else ""
