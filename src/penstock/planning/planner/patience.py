"""``PlanningPatience``: how long a search may go on, and how near to the best it has come.

A search has an answer as soon as it has seen one plan that fits; what it does from then on may be
ended at any time. How much faster the best could be is known from a bound that no plan undercuts.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from time import monotonic

from penstock.base.units import format_seconds


def _tell_nobody(_: str) -> None: ...


class PlanningPatience:
    """The time that a search has.

    Args:
        seconds: of the clock; without end by default.
        tell: gets a line each time that something better is known.
    """

    def __init__(
        self, seconds: float | None = None, tell: Callable[[str], None] = _tell_nobody
    ) -> None:
        self._seconds, self._began, self._tell = seconds or inf, monotonic(), tell
        self._why = ""

    @property
    def is_over(self) -> bool:
        """Whether an answer that is there should do."""
        if not self._why and monotonic() - self._began > self._seconds:
            self._why = f"after {format_seconds(self._seconds)}"
        return bool(self._why)

    def interrupt(self) -> None:
        """End it because somebody wants the answer now."""
        self._why = "when interrupted"

    def note(self, seconds: float, bound: float) -> None:
        """Say how far the search is: the best plan takes ``seconds``, none takes less than
        ``bound``."""
        self._tell(f"{format_seconds(seconds)} a step{_behind(seconds, bound)}")

    def verdict(self, seconds: float, bound: float) -> str:
        """Why the search ended early, and how near to the best; empty where it did not."""
        return f"stopped {self._why}{_behind(seconds, bound)}" if self._why else ""


def _behind(seconds: float, bound: float) -> str:
    """How far a plan may be from the best.

    >>> _behind(1.04, 1.0)
    ', at most 4% from the best'
    """
    return f", at most {seconds / bound - 1:.0%} from the best" if bound else ""
