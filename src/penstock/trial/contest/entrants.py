"""``Entrant``: one method that takes part: it trains in turns, and keeps what came of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Protocol

from penstock.base.errors import PenstockError
from penstock.core.timing.timeline import Timeline
from penstock.drawing.contest import LossPoint
from penstock.planning.plans import Plan
from penstock.training.pipeline import Pipeline
from penstock.trial.contest.methods import ContestSetting, Method
from penstock.trial.workload import (
    Batch,
    intra_op_threads,
)


class Trainer(Protocol):
    """Something that trains, wherever its ranks are.

    Attributes:
        losses, seconds: an entry per step.
        timelines: as recorded, by steps or by turns; none of one device.
        others: an entry per step: the share of the cores' time that other programs had meanwhile.
    """

    losses: list[float]
    seconds: list[float]
    others: list[float]
    timelines: list[Timeline]

    def take_turn(self, batches: Sequence[Batch]) -> None:
        """Train on these minibatches."""

    def held_out_loss(self) -> float | None:
        """The loss on the workload's held-out data; ``None`` without any."""

    def close(self) -> None:
        """End its workers."""


@dataclass
class Entrant:
    """One method that takes part.

    Attributes:
        method: the method.
        plan: how it spreads the workload; ``None`` if it cannot.
        trainer: trains; ``None`` before it was built and after it failed.
        where: where it runs, in words.
        reason: why it does not run, or ran no further.
        points: its losses, as far as it got.
        activation_bytes: counted, by rank.
        paced_seconds: a step on emulated devices.
        paced: the timeline of those.
        difference: of its losses from one device's, relative to the largest.
    """

    method: Method
    plan: Plan | None = None
    trainer: Trainer | None = None
    where: str = ""
    reason: str = ""
    points: list[LossPoint] = field(default_factory=list)
    activation_bytes: tuple[int, ...] = ()
    paced_seconds: float | None = None
    paced: Timeline | None = None
    difference: float | None = None

    @property
    def takes_part(self) -> bool:
        """Whether it has not failed so far."""
        return not self.reason

    def attempt(self, do: Callable[[], None]) -> None:
        """Do something for this method only: if it raises, the method ends, alone, and says why."""
        try:
            do()
        except PenstockError as error:
            self.stop(str(error))
        except Exception as error:
            self.stop(f"{type(error).__name__}: {error}")

    def stop(self, reason: str) -> None:
        """End this method; the others go on."""
        self.reason = " ".join(reason.split())
        trainer, self.trainer = self.trainer, None
        if trainer is not None:
            self._close_quietly(trainer)

    @staticmethod
    def _close_quietly(trainer: Trainer) -> None:
        try:
            trainer.close()
        except Exception:
            return  # its reason is told already; this only follows from it

    def note_loss(self) -> None:
        """Add the loss after the steps so far to ``points``."""
        assert self.trainer is not None
        value = self.trainer.held_out_loss()
        if value is None:
            recent = self.trainer.losses[-_RECENT:]
            value = statistics.fmean(recent)
        step = len(self.trainer.losses)
        self.points.append(LossPoint(step=step, loss=value if isfinite(value) else None))

    def close(self) -> None:
        """End its workers, if it has any."""
        if self.trainer is not None:
            self.attempt(self.trainer.close)


_RECENT = 5
"""Without held-out data, a loss is the mean of so many training losses."""


def counted_bytes(setting: ContestSetting, plan: Plan, batches: Sequence[Batch]) -> tuple[int, ...]:
    """The bytes of activations that each rank held at most, counted in a run of its own: counting
    takes time, which must not be the contest's."""
    workload = setting.workload
    with (
        intra_op_threads(plan.num_threads),
        Pipeline(
            workload.build_model(),
            plan,
            loss=workload.loss,
            optimizer=workload.optimizer,
            transport="threads",
            seed=0,
            count_memory=True,
        ) as pipeline,
    ):
        for _ in pipeline.steps(batches):
            pass
        return tuple(peak.activation_bytes for peak in pipeline.peaks)
