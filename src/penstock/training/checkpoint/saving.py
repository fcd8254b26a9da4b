"""Saving beside training: when a loop over ``Pipeline.steps`` saves, and how state is copied so
that a thread can write the copy.

Copies stay for the next checkpoint, since memory that is mapped anew costs as much again as the
copying itself. So a process that saves holds its part of the state twice.

In a stream that goes on, stages come to the end of a minibatch at different times. What a stage
holds then is what it would hold if the stream ended there: its updates depend on no later
microbatch, and neither do its buffers before it has run a later forward. So pieces that are copied
at different times make one checkpoint, as in PipeDream (SOSP 2019, section 4).
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, TypeVar

import torch
from msgspec.structs import replace
from torch import Tensor

from penstock.base.errors import InputError
from penstock.base.values import flag, whole
from penstock.engine.run.minibatch import Minibatch, StreamPosition
from penstock.planning.plans import Plan
from penstock.training.checkpoint.folder import as_path
from penstock.training.checkpoint.taking import StageState, TrainedStage

if TYPE_CHECKING:
    from penstock.training.checkpoint.keeper import Keeper


T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoints:
    """Checkpoints in the course of ``Pipeline.steps``.

    Behind every so many minibatches the pipeline drains, so that all stages are at the same step,
    and saves as ``Pipeline.save`` does. Without ``drain`` an asynchronous pipeline goes on, and
    each stage is copied when it comes to that step itself; what is loaded is the same as if the
    pipeline had drained there, and so are the losses of who goes on from it: those of the run that
    did not drain are others. The ``position`` is the number of minibatches trained on.

    Attributes:
        folder: of the run.
        every: how many minibatches are between two checkpoints; counted from the run's beginning,
            so that a resumed run saves where the first would have.
        keep: how many complete checkpoints stay; ``None``: all.
        background: write while training goes on; it always does without ``drain``.
        drain: whether an asynchronous pipeline lets its stages come to the same step first. A
            synchronous one always has.

    Raises:
        InputError: a number below 1, or no folder.
    """

    folder: str | os.PathLike[str]
    every: int
    keep: int | None = None
    background: bool = True
    drain: bool = True

    def __post_init__(self) -> None:
        as_path(self.folder)
        whole("every", self.every, 1)
        if self.keep is not None:
            whole("keep", self.keep, 1)
        flag("background", self.background)
        flag("drain", self.drain)

    def stretches(self, values: Iterator[T], step: int) -> Iterator[Iterator[T]]:
        """Cut what comes into pieces that end where a checkpoint is due.

        Args:
            values: one for each minibatch to come. Of each piece all must be taken before the next.
            step: how many minibatches were trained on before.

        >>> wanted = Checkpoints("runs/a", every=4)
        >>> [list(stretch) for stretch in wanted.stretches(iter("abcdefgh"), 1)]
        [['a', 'b', 'c'], ['d', 'e', 'f', 'g'], ['h']]
        """
        count = self.every - step % self.every
        for first in values:
            yield chain([first], islice(values, count - 1))
            count = self.every


class InCourse:
    """The checkpoints of one loop over ``Pipeline.steps``; none where none are wanted.

    Raises:
        InputError: the plan's stages cannot be saved while the stream goes on.
    """

    def __init__(self, wanted: Checkpoints | None, plan: Plan, keeper: Keeper) -> None:
        goes_on = wanted is not None and plan.versions.asynchronous and not wanted.drain
        if goes_on and plan.versions.updates == "microbatch" and max(plan.replicas) > 1:
            raise InputError(
                "a stage with replicas whose updates are microbatches' ends a minibatch in the "
                "middle of an update; leave drain=False out"
            )
        self._behind_stretches = None if goes_on else wanted
        self._while_it_goes_on = wanted if goes_on else None
        self._keeper = keeper

    def stretches(self, batches: Iterator[T], step: int) -> Iterator[Iterator[T]]:
        """Minibatches up to the next checkpoint, behind which the pipeline drains."""
        if self._behind_stretches is None:
            return iter([batches])
        return self._behind_stretches.stretches(batches, step)

    def save_if_due(self, step: int) -> None:
        """Save behind the last minibatch of a stretch, of which nothing is under way any more."""
        wanted = self._behind_stretches
        if wanted is None or step % wanted.every:
            return
        self._keeper.save(
            wanted.folder, step, keep=wanted.keep, position=None, background=wanted.background
        )

    def marked(
        self, minibatches: Iterator[tuple[Minibatch, StreamPosition]]
    ) -> Iterator[tuple[Minibatch, StreamPosition]]:
        """Minibatches, with a mark behind which the stream saves and goes on."""
        wanted = self._while_it_goes_on
        if wanted is None:
            return minibatches
        return (
            (replace(minibatch, mark=self._keeper.mark(wanted, minibatch.step + 1)), position)
            if (minibatch.step + 1) % wanted.every == 0
            else (minibatch, position)
            for minibatch, position in minibatches
        )


class StreamMark:
    """Copies the stages of this process, and writes them once all have been.

    Args:
        stages: those that this process writes, by number; of others nothing is wanted.
        state_of: gives a stage's state as it is.
        write: takes the states of all of them, by number.
    """

    def __init__(
        self,
        stages: Mapping[int, TrainedStage],
        state_of: Callable[[TrainedStage], StageState],
        write: Callable[[Mapping[int, StageState]], None],
    ) -> None:
        self._stages = stages
        self._state_of = state_of
        self._write = write
        self._lock = threading.Lock()
        self._ready: dict[int, StageState] = {}
        self._buffers: dict[int, dict[str, Tensor]] = {}
        self._rest: dict[int, StageState] = {}

    def forwards_done(self, stage: int) -> None:
        """Copy the buffers of a stage."""
        if stage in self._stages:
            state = self._stages[stage].stage.state_dict()
            self._buffers[stage] = _copied({name: state[name] for name in self._names(stage)})
            self._complete(stage)

    def updated(self, stage: int) -> None:
        """Copy the weights of a stage, and what its optimizer keeps."""
        if stage in self._stages:
            buffers, state = self._names(stage), self._state_of(self._stages[stage])
            rest = {name: value for name, value in state.tensors.items() if name not in buffers}
            self._rest[stage] = state._replace(tensors=_copied(rest))
            self._complete(stage)

    def _names(self, stage: int) -> set[str]:
        """The keys of a stage's buffers that are saved."""
        own = self._stages[stage].stage
        buffers = {
            layer.key(name) for layer in own.layers for name, _ in layer.module.named_buffers()
        }
        return buffers & own.state_dict().keys()

    def _complete(self, stage: int) -> None:
        if stage not in self._buffers or stage not in self._rest:
            return
        rest = self._rest.pop(stage)
        whole = rest._replace(tensors={**rest.tensors, **self._buffers.pop(stage)})
        with self._lock:  # ranks are threads
            self._ready[stage] = whole
            is_last = len(self._ready) == len(self._stages)
        if is_last:
            self._write(self._ready)


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In main memory. Not in memory that lasts, as for checkpoints one at a time: those before may
    still be written."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


class Saver:
    """Runs one writing after the other in a thread of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._writing: deque[Future[None]] = deque()
        self._copies: dict[str, Tensor] = {}

    def wait(self) -> None:
        """Wait until what was begun is on the disk.

        Raises:
            FileError: it could not be written; told once.
        """
        while self._writing:
            self._writing.popleft().result()

    def check(self) -> None:
        """Raise what ``wait`` would raise, if that is known already."""
        while self._writing and self._writing[0].done():
            self._writing.popleft().result()

    def begin(self, write: Callable[[], None]) -> None:
        """Write in the background, behind what was begun before."""
        with self._lock:  # ranks in threads begin each their own
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "penstock-saving")
            self._writing.append(self._thread.submit(write))

    def copied(self, whose: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of tensors in main memory, which stay what they are until the next call with this
        name.

        Args:
            whose: the name under which memory is kept for the next time.
            tensors: by name, of any device.
        """
        return {
            name: self._room(f"{whose}/{name}", tensor).copy_(tensor.detach())
            for name, tensor in tensors.items()
        }

    def _room(self, key: str, tensor: Tensor) -> Tensor:
        room = self._copies.get(key)
        if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
            room = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._copies[key] = room
        return room

    def close(self) -> None:
        """Wait for what was begun, and let go of the copies.

        Raises:
            FileError: as ``wait``.
        """
        try:
            self.wait()
        finally:
            self._copies.clear()
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None
