"""The interpreter: perform a rank's ops in order, and record when.

It knows kinds of op, never the name of a schedule.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from penstock.errors import RunError, StageError
from penstock.schedule import Op


class Performer(Protocol):
    """Whatever can perform ops."""

    def perform(self, op: Op) -> None:
        """Do what ``op`` says."""


class Record(NamedTuple):
    """When one op ran, in seconds of this host's monotonic clock."""

    op: Op
    start: float
    end: float


def perform_all(ops: Iterable[Op], performer: Performer) -> list[Record]:
    """Perform ops in order.

    Raises:
        StageError: the user's code raised; stage, microbatch and op are named, and the original is
            the cause.
        RunError: as raised by a transport.
    """
    records = []
    for op in ops:
        start = time.perf_counter()
        try:
            performer.perform(op)
        except RunError:
            raise
        except Exception as error:
            raise StageError(
                f"stage {op.stage}, microbatch {op.microbatch}, op {op}: "
                f"{type(error).__name__}: {error}"
            ) from error
        records.append(Record(op, start, time.perf_counter()))
    return records
