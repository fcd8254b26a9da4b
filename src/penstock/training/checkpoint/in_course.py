"""Checkpoints that are saved in the course of a loop: behind a stretch, or while it goes on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from penstock.base.errors import InputError
from penstock.engine.run.minibatch import Minibatch, StreamPosition
from penstock.planning.plans import Plan
from penstock.training.checkpoint.keeper import Keeper
from penstock.training.checkpoint.wanted import Checkpoints

T = TypeVar("T")


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
