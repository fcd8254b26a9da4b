"""The interpreter: perform a rank's ops in order, and record when.

It knows kinds of op, never the name of a schedule.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

from penstock.errors import RunError, StageError
from penstock.run.rank.journal import Journal, Record
from penstock.schedule import Op


class Performer(Protocol):
    """Whatever can perform ops."""

    def perform(self, op: Op) -> None:
        """Do what ``op`` says."""


class Restart(Exception):
    """What the ops so far have computed is void; the caller is to perform all of them again."""


def perform_all(ops: Iterable[Op], performer: Performer, journal: Journal, base: int = 0) -> None:
    """Perform ops in order, and write down when each began and ended.

    ``base`` is how many microbatches come before those of the ops, for errors.

    Raises:
        StageError: the user's code raised; stage, microbatch and op are named, and the original is
            the cause.
        RunError: as raised by a transport.
        Restart: as raised by an op.
    """
    write = journal.records.append
    for op in ops:
        journal.current = op
        journal.since = start = time.perf_counter()
        try:
            performer.perform(op)
        except (RunError, Restart):
            raise
        except Exception as error:
            raise stage_error(op._replace(microbatch=op.microbatch + base), error) from error
        write(Record(op, start, time.perf_counter()))
    journal.current = None


def stage_error(op: Op, error: Exception) -> StageError:
    """What the user's code raised, with where."""
    where = f"stage {op.stage}, microbatch {op.microbatch}, op {op}"
    found = StageError(f"{where}: {type(error).__name__}: {error}")
    found.__cause__ = error
    return found
