"""Errors, as a tree.

::

    PenstockError
    ├── InputError          a value the caller gave cannot be used (also a ValueError)
    │   ├── ScheduleError   a schedule is incomplete, contradictory or deadlocks
    │   ├── FileError       a file has an unknown key, a wrong type or is not there
    │   ├── ModelError      a model has no spine, or is not the one a plan was made for
    │   ├── PlanError       no plan satisfies what was asked
    │   ├── ArgumentError   a function has no such argument, or lacks one (also a TypeError)
    │   └── NameMissing     an object has no such name; another does it (also an AttributeError)
    └── RunError            a step failed while running
        ├── StageError      the user's layers or loss raised; names stage, microbatch and op
        ├── PeerError       another rank died or failed; names the rank and the awaited op
        └── DeadlineError   nothing arrived in time; names the op that waited and for what

Every message says what is wrong, where, and what to do about it.
"""

from __future__ import annotations

import re

PUBLIC_NAME = "penstock.errors"
"""Where people import errors from, so what a traceback calls them."""

# Beside characters that move the cursor or begin an escape sequence, those that turn the direction
# of what follows them.
_COMMANDS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Text as a terminal may see it: whatever would be a command to it is written out. Everything
    that people read passes here, for names and reasons may come from files of others.

    >>> print(printable("ä\\x1b]0;title\\x07"))
    ä\\u001b]0;title\\u0007
    """
    return _COMMANDS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class PenstockError(Exception):
    """Root of everything Penstock raises on purpose."""

    __module__ = PUBLIC_NAME

    def __init_subclass__(cls) -> None:
        if cls.__module__ == __name__:
            cls.__module__ = PUBLIC_NAME

    def __str__(self) -> str:
        return printable(super().__str__())


class InputError(PenstockError, ValueError):
    """A value the caller gave cannot be used."""


class ScheduleError(InputError):
    """A schedule is incomplete, contradictory or deadlocks."""


class FileError(InputError):
    """A file could not be read as what it should hold."""


class ModelError(InputError):
    """A model cannot be cut, or is not the one the plan was made for."""


class PlanError(InputError):
    """No plan satisfies what was asked."""


class ArgumentError(InputError, TypeError):
    """A function has no such argument, or was given too few or too many."""


class NameMissing(InputError, AttributeError):
    """A module or an object does not have what was asked for; something else does it."""


class RunError(PenstockError, RuntimeError):
    """A step failed while running."""


class StageError(RunError):
    """The user's layers, loss or optimizer raised inside a stage.

    The original exception is the ``__cause__``.
    """


class PeerError(RunError):
    """Another rank died or failed while this one needed it.

    Attributes:
        reason: what happened first, without the ranks through which the news came.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message


class DeadlineError(RunError):
    """Something that an op waits for did not come before the deadline."""
