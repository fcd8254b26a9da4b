"""How a rank ended, and whether that would happen again at the same step.

What a program does wrong it does wrong again: an exception with the same words, an exit code, or a
signal that a fault of its own raises. A kill comes from outside, from the system that is out of
memory or from somebody who wants the machine, and a host may be unlucky twice at one step; kills
count against the number of restarts only.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.engine.run.logbook import Notes

_OWN_FAULTS = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGSYS}
)
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


class Ended(NamedTuple):
    """A process of an attempt that has ended by itself, or by somebody else's hand.

    Attributes:
        name: for people, such as ``"rank 2"``.
        code: its exit code, or minus the number of a signal.
        notes: what it has noted; ``None`` of one that is no rank.
        rank: its number, if it is a rank.
    """

    name: str
    code: int
    notes: Notes | None
    rank: int | None = None


@dataclass(frozen=True)
class Cause:
    """Why an attempt ended.

    Attributes:
        reason: who, and by what.
        step: the number of the minibatch that the rank had come to; ``None`` if to none.
        code: the exit code of a job that ends with it.
        own_fault: whether it may be expected to happen again.
        followed: whether it is only what another rank's failure has led to.
        killed: the rank that was killed from outside, if that is what happened.
    """

    reason: str
    step: int | None
    code: int
    own_fault: bool
    followed: bool = False
    killed: int | None = None

    @property
    def known_as(self) -> tuple[str, int | None]:
        """Equal for causes that are the same error at the same step."""
        return _ADDRESS.sub("0x…", self.reason), self.step

    def __str__(self) -> str:
        where = "" if self.step is None else f", at step {self.step}"
        hint = "; the machine may be out of memory" if self.code == 128 + signal.SIGKILL else ""
        return f"{self.reason}{where}{hint}"


def cause_of(ended: Ended) -> Cause:
    """Why one process ended, which is not with 0."""
    step = None if ended.notes is None else ended.notes.step
    failure = None if ended.notes is None else ended.notes.failure
    if ended.code < 0:
        number = -ended.code
        name = _name_of(number)
        reason = f"{ended.name} was ended by {name}"
        own_fault = number in _OWN_FAULTS
        killed = None if own_fault else ended.rank
        return Cause(reason, step, 128 + number, own_fault=own_fault, killed=killed)
    if failure is None:
        reason = f"{ended.name} ended with exit code {ended.code}"
        return Cause(reason, step, ended.code or 1, own_fault=True)
    return Cause(failure.reason, step, ended.code, own_fault=True, followed=failure.followed)


def first_cause(ended: Sequence[Ended]) -> Cause:
    """Why an attempt ended, of all processes that did not end with 0: a kill, which raises errors
    everywhere else; then what is no consequence; then what came first."""
    causes = [cause_of(process) for process in ended]
    return min(causes, key=lambda cause: (cause.followed, cause.own_fault))


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
