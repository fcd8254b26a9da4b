"""The interpreter: perform a rank's steps in order, write down when each began and ended, and let
others look on.

It knows neither kinds of op nor the name of a schedule: a step is bound to what performs it.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, TypeVar

from torch import Tensor, nn

from penstock.base.errors import RunError
from penstock.core.schedule import Kind, Op
from penstock.core.schedule.op import COMPUTE, FORWARDS
from penstock.engine.device.activation_meter import KeptMemory, Saved, saving
from penstock.engine.device.queue import Stamps
from penstock.engine.run.minibatch import Minibatch
from penstock.engine.run.outcome import MemoryCounter, Peak
from penstock.engine.run.rank.failures import FailureContext, stage_error
from penstock.engine.run.rank.work import RankWork
from penstock.engine.run.recipe import Recipe
from penstock.engine.stage.batch_norm import MinibatchStatistics
from penstock.engine.stage.protocol import RunnableStage
from penstock.engine.weights.store import Instead

NUM_SHOWN = 10

_NO_WAITS: Mapping[Op, str] = MappingProxyType({})


class Journal:
    """When a rank's ops began and ended in one minibatch; written by its thread, read by any.

    Args:
        ops: the rank's, in their order.
        waiting: what ops that receive wait for.
        stamps: where the ops happen on an accelerator, what tells when; the rank's thread only sees
            when it asks for them.

    Attributes:
        ops, stamps: as given.
        starts: when each op began that has, in seconds of this host's monotonic clock.
        ends: when each ended that has.
        note_start, note_end: to be told when an op begins and ends.
    """

    def __init__(
        self,
        ops: Sequence[Op] = (),
        waiting: Mapping[Op, str] = _NO_WAITS,
        stamps: Stamps | None = None,
    ) -> None:
        self.ops = ops
        self.stamps = stamps
        self.starts = array("d")
        self.ends = array("d")
        self.note_start: Callable[[float], None] = self.starts.append
        self.note_end: Callable[[float], None] = self.ends.append
        if stamps is not None:
            self.note_start = partial(_note, self.starts, stamps)
            self.note_end = partial(_note, self.ends, stamps)
        self._waiting = waiting

    def waited(self) -> None:
        """The op that has begun had to wait until now: its time begins here, and the rank
        was idle before."""
        self.starts[-1] = time.perf_counter()
        if self.stamps is not None:
            self.stamps.put_off()

    def end(self) -> None:
        """The minibatch has ended, well or not: nothing is waited for any more."""
        self._waiting = _NO_WAITS

    @property
    def current(self) -> Op | None:
        """The op that is being performed, or that has failed."""
        num_done = len(self.ends)
        return self.ops[num_done] if len(self.starts) > num_done else None

    def text(self, rank: int) -> str:
        """One line: the last ops, and what the rank does now."""
        num_done = len(self.ends)
        last = self.ops[max(0, num_done - NUM_SHOWN) : num_done]
        done = " ".join(map(str, last)) or "nothing"
        if len(self.starts) <= num_done:
            return f"rank {rank}: did {done}; idle"
        op, seconds = self.ops[num_done], time.perf_counter() - self.starts[num_done]
        doing = f"at {op} for {seconds:.3g} s"
        if op in self._waiting:
            doing += f" ({self._waiting[op]})"
        return f"rank {rank}: did {done}; {doing}"


def _note(column: array[float], stamps: Stamps, seconds: float) -> None:
    column.append(seconds)
    stamps.add()


W_contra = TypeVar("W_contra", contravariant=True)


NO_CONTEXT = FailureContext()


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
    """The steps so far count for nothing; the caller is to perform all of them again."""


def perform_all(
    steps: Iterable[RankStep[W_contra]],
    work: W_contra,
    journal: Journal,
    base: int = 0,
    context: FailureContext = NO_CONTEXT,
) -> None:
    """Perform steps in order, and write down when each began and ended.

    Args:
        journal: where it is written down; its ops are those of the steps.
        base: how many microbatches come before those of the steps' ops, for errors.
        context: what is known about the rank, likewise.

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
            raise stage_error(op, error, context) from error
        end(clock())


_WATCHED = COMPUTE | {Kind.RECOMPUTE}


class Observers:
    """Those who look on while one rank computes.

    Args:
        recipe: says which observers there are.

    Raises:
        InputError: a module has statistics that cannot be gathered over a minibatch.
    """

    def __init__(self, stages: Mapping[int, RunnableStage], recipe: Recipe) -> None:
        self._modules = [module for stage in stages.values() for module in stage.layer_modules]
        self._gathers = recipe.batch_norm == "minibatch"
        if self._gathers:
            MinibatchStatistics(self._modules).close()  # refuses now what it would refuse later
        self._statistics: MinibatchStatistics | None = None
        self._counter = MemoryCounter(stages) if recipe.count_memory else None

    @property
    def modules(self) -> Iterable[nn.Module]:
        """All that the rank's layers consist of."""
        return (module for layer in self._modules for module in layer.modules())

    @property
    def counts_memory(self) -> bool:
        """Whether there will be a peak."""
        return self._counter is not None

    def attend(self, minibatch: Minibatch) -> None:
        """A minibatch begins. Hooks of statistics must not get into copies of the model that are
        made between steps, so they come and go."""
        gathers = self._gathers and minibatch.trains
        self._statistics = MinibatchStatistics(self._modules) if gathers else None

    def leave(self) -> None:
        """The minibatch has ended, well or not: take the hooks away."""
        if self._statistics is not None:
            self._statistics.close()
            self._statistics = None

    def begin(self) -> None:
        """Nothing is in flight."""
        if self._counter is not None:
            self._counter.begin()

    def look_on(self, kind: Kind) -> bool:
        """Whether anybody may be interested in ops of a kind."""
        return kind in _WATCHED and (self._gathers or self._counter is not None)

    def watch(
        self,
        step: RankStep[RankWork],
        work: RankWork,
        unit: int,
        instead: Instead | None = None,
        around: Callable[[Saved], Any] | None = None,
    ) -> None:
        """Perform a compute step under all eyes that are interested.

        Args:
            unit: its number in the stream.
            instead: what autograd is to save in the place of weights, if anything.
            around: what autograd is to save in the place of all else, if anything.
        """
        saves = instead is not None or around is not None
        if self._statistics is None and self._counter is None and not saves:
            step.perform(work)
            return
        op = step.op
        with ExitStack() as stack:
            if self._statistics is not None and op.kind is not Kind.FORWARD:
                # What runs forward again counts no second time.
                stack.enter_context(self._statistics.paused())
            if self._counter is not None and op.kind in FORWARDS:
                stack.enter_context(self._counter.watching(op.stage, unit, instead, around))
            elif saves:
                stack.enter_context(saving(instead, around))
            step.perform(work)
        if self._counter is not None:
            self._counter.after(op.stage, unit)

    def count(self, stage: int, unit: int) -> None:
        """Count anew what a stage holds of a unit outside of autograd."""
        if self._counter is not None:
            self._counter.after(stage, unit)

    def keep(self, key: tuple[int, int], tensors: Iterable[Tensor]) -> KeptMemory | None:
        """Count memory that belongs to a stage and a unit, as long as what this gives is held."""
        return None if self._counter is None else self._counter.keep(key, tensors)

    def commit(self) -> None:
        """The minibatch is complete: its statistics count."""
        if self._statistics is not None:
            self._statistics.commit()

    def peak(self, num_slices: int) -> Peak | None:
        """The most that was held since nothing was in flight."""
        return None if self._counter is None else self._counter.peak(num_slices)

    def forget(self) -> None:
        """Nothing is in flight any more."""
        if self._statistics is not None:
            self._statistics.forget()
        if self._counter is not None:
            self._counter.forget()
