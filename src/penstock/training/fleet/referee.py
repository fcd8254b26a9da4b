"""Decides which jobs go on, where all of them stand still."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from penstock.base.errors import RunError
from penstock.planning.turns.stop import Stop


class Decision(NamedTuple):
    """What was decided at some step.

    Attributes:
        step: at which all jobs stood.
        values: by job, what was compared.
        survivors: those that go on, best first.
    """

    step: int
    values: Mapping[str, float]
    survivors: tuple[str, ...]


class Referee:
    """Waits until all jobs that are left have come to a decision, and takes it.

    Args:
        stop: how it is taken.
        names: of all jobs, in the fleet's order.

    Attributes:
        decisions: those that were taken.
    """

    def __init__(self, stop: Stop, names: list[str]) -> None:
        self._stop, self._names = stop, names
        self._left = set(names)
        self._num_begun = len(names)
        self._here: dict[str, tuple[int, float]] = {}
        self._turned = threading.Condition()
        self._why_closed: str | None = None
        self.decisions: list[Decision] = []

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
            while not any(step == one.step for one in self.decisions):
                if self._why_closed is not None:
                    raise RunError(f"job {name}: {self._why_closed}")
                self._turned.wait()
            (decision,) = (one for one in self.decisions if one.step == step)
            return name in decision.survivors

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
        survivors = tuple(self._stop.survivors(values, self._num_begun))
        self.decisions.append(Decision(step, values, survivors))
        self._left &= set(survivors)
        self._num_begun = len(survivors)
        self._here.clear()
        self._turned.notify_all()
