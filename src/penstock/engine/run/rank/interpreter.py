"""The interpreter: perform a rank's steps in order, and record when.

It knows neither kinds of op nor the name of a schedule: a step is bound to what performs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, TypeVar

from penstock.base.errors import RunError, StageError
from penstock.core.schedule import Op
from penstock.engine.run.rank.journal import Journal
from penstock.engine.stage.microbatch_graph import NotFinite

W_contra = TypeVar("W_contra", contravariant=True)


NO_FRAMES: Mapping[int, int] = MappingProxyType({})


class RankStep(Protocol[W_contra]):
    """One op, bound to all that it needs but the work at hand."""

    @property
    def op(self) -> Op:
        """The op, with its microbatch counted from the beginning of the window."""

    def perform(self, work: W_contra) -> None:
        """Perform the op."""


Pace: TypeAlias = Callable[[Sequence[RankStep[Any]]], Iterable[RankStep[Any]]]
"""Gives a minibatch's steps one by one, in their order, and may let the rank wait between them."""


class Restart(Exception):
    """What the steps so far have computed is void; the caller is to perform all of them again."""


def perform_all(
    steps: Iterable[RankStep[W_contra]],
    work: W_contra,
    journal: Journal,
    base: int = 0,
    frames: Mapping[int, int] = NO_FRAMES,
) -> None:
    """Perform steps in order, and write down when each began and ended.

    Args:
        journal: where it is written down; its ops are those of the steps.
        base: how many microbatches come before those of the steps' ops, for errors.
        frames: of a live stream, the number that the caller knows each microbatch by; likewise.

    Raises:
        StageError: the user's code raised; stage, microbatch and op are named, and the original is
            the cause.
        RunError: as raised by a transport.
        Restart: as raised by a step.
    """
    clock, begin, end = time.perf_counter, journal.note_start, journal.note_end
    for step in steps:
        begin(clock())
        try:
            step.perform(work)
        except (RunError, Restart):
            raise
        except Exception as error:
            op = step.op
            op = op._replace(microbatch=op.microbatch + base)
            raise stage_error(op, error, frames) from error
        end(clock())


def stage_error(op: Op, error: Exception, frames: Mapping[int, int] = NO_FRAMES) -> StageError:
    """What the user's code raised, with where."""
    # A backward may go through another microbatch than the one that its gradient comes from.
    microbatch = error.microbatch if isinstance(error, NotFinite) else op.microbatch
    frame = f"frame {frames[microbatch]}, " if microbatch in frames else ""
    where = f"stage {op.stage}, {frame}microbatch {microbatch}, op {op}"
    named = StageError(f"{where}: {type(error).__name__}: {error}")
    named.__cause__ = error
    return named
