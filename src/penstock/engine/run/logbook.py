"""Notes of a rank for the supervisor that forked it, in memory that outlives the rank.

Under ``penstock run`` each rank has a page that its supervisor can read, too. A note is a store of
a few bytes into it, so that it costs a step nothing, and of a rank that was killed it is still
known at which step it was. Everywhere else a rank notes the same on a page that nobody reads.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

import msgspec

VARIABLE = "PENSTOCK_LOGBOOK"
"""``<process>:<descriptor>:<page>``: only the process itself is meant, not those that it starts."""

PAGE_BYTES = mmap.ALLOCATIONGRANULARITY
_NUMBERS = struct.Struct("=dqqI")
_BUILT, _STEP, _LENGTH = (struct.Struct(f"={code}") for code in "dqI")
_BUILT_AT, _FIRST_AT, _STEP_AT, _LENGTH_AT = 0, 8, 16, 24
_MOST_LETTERS = 600
"""Of a reason: JSON takes up to six bytes for each, and all must fit on the page."""


class ScriptFailure(msgspec.Struct, frozen=True):
    """An error that reached the top of a rank's script.

    Attributes:
        reason: what happened first, as other ranks are told of it.
        followed: another rank's failure was the cause.
    """

    reason: str
    followed: bool


class Notes(NamedTuple):
    """The notes of a rank so far; ``None`` where it has not come to that.

    Attributes:
        built: when its last pipeline was there, and all ranks had met; as by ``time.monotonic``.
        first_step: the number of the minibatch on which it trained first.
        step: that of the minibatch which it has come to, and may have begun.
        failure: what ended its script.
    """

    built: float | None
    first_step: int | None
    step: int | None
    failure: ScriptFailure | None


class Logbook:
    """The page of one rank.

    Args:
        page: of ``PAGE_BYTES``, all zeros at first.
    """

    def __init__(self, page: mmap.mmap) -> None:
        self._page = page
        self._has_begun = False

    @classmethod
    def of_this_process(cls, environment: Mapping[str, str] = os.environ) -> Logbook:
        """The page that a supervisor has given to this process, or one that nobody reads."""
        with suppress(KeyError, ValueError, OSError):
            process, descriptor, number = map(int, environment[VARIABLE].split(":"))
            if process == os.getpid():
                return cls(mmap.mmap(descriptor, PAGE_BYTES, offset=number * PAGE_BYTES))
        return cls(mmap.mmap(-1, PAGE_BYTES))

    def build(self) -> None:
        """Note that a pipeline is ready."""
        self._put(_BUILT_AT, _BUILT.pack(time.monotonic()))

    def begin(self, step: int) -> None:
        """Note that this rank trains on a minibatch now.

        Args:
            step: the minibatch's number.
        """
        if not self._has_begun:
            self._has_begun = True
            if self.read().first_step is None:  # of an earlier pipeline of the script
                self._put(_FIRST_AT, _STEP.pack(step + 1))
        self.reach(step)

    def reach(self, step: int) -> None:
        """Note where this rank is: every minibatch before this one is behind it."""
        # Noted from 1, since 0 is what stands there at first.
        self._put(_STEP_AT, _STEP.pack(step + 1))

    def fail(self, failure: ScriptFailure) -> None:
        """Note why this rank ends; the last note counts."""
        reason = failure.reason[:_MOST_LETTERS].encode(errors="replace").decode()
        text = msgspec.json.encode(msgspec.structs.replace(failure, reason=reason))
        self._put(_LENGTH_AT, _LENGTH.pack(0))
        self._put(_NUMBERS.size, text)
        self._put(_LENGTH_AT, _LENGTH.pack(len(text)))  # last: half a text is none

    def read(self) -> Notes:
        """Everything that was noted."""
        built, first_step, step, length = _NUMBERS.unpack(self._page[: _NUMBERS.size])
        failure = None
        if length:
            with suppress(msgspec.DecodeError):
                text = self._page[_NUMBERS.size : _NUMBERS.size + length]
                failure = msgspec.json.decode(text, type=ScriptFailure)
        return Notes(
            built or None,
            first_step - 1 if first_step else None,
            step - 1 if step else None,
            failure,
        )

    def _put(self, start: int, content: bytes) -> None:
        self._page[start : start + len(content)] = content
