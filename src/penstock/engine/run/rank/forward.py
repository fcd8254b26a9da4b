"""The forward step, and what it hands on where weights on trust make it fail.

Marks like [4] are the steps of post-validation, which ``updater`` describes.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

from penstock.core.schedule import Op
from penstock.engine.model.replay import autocasting
from penstock.engine.run.rank.interpreter import stage_error
from penstock.engine.run.rank.program import SkipChannel
from penstock.engine.run.rank.updater import Updater
from penstock.engine.run.rank.work import Work
from penstock.engine.run.shared_state import SharedState
from penstock.engine.stage.protocol import Keep, Produced, RunnableStage
from penstock.engine.weights.store import WeightStore, refuse_autocast


class Void(Enum):
    """Stands for a value that could not be computed with weights on trust; it can travel."""

    VOID = "void"


VOID = Void.VOID


@dataclass(frozen=True, slots=True)
class Forward:
    """F: from a stage's input to its output, or to the loss.

    Attributes:
        op: what the schedule calls it.
        unit: what it works on, from the beginning of the window.
        stage: computes.
        keep: what the stage keeps for the backward.
        is_last: whether the stage is the pipeline's last.
        recalled, stashed: where skips come from and go.
        updater: knows whether weights are on trust.
        shared: what the forward must not write, if there is anything.
        store: has the weights, where there are several versions.
    """

    op: Op
    unit: int
    stage: RunnableStage
    keep: Keep
    is_last: bool
    recalled: tuple[SkipChannel, ...]
    stashed: tuple[SkipChannel, ...]
    updater: Updater
    shared: SharedState | None
    store: WeightStore | None

    def perform(self, work: Work) -> None:
        unit, stage, mail = work.unit(self.unit), self.op.stage, work.mail
        on_trust = self.updater.pending  # [4]
        value = mail.values.pop((stage, unit)) if stage else work.input(unit, copied=on_trust)
        skips = mail.skips(self.recalled, unit)
        compute = self._compute_on_trust if on_trust or value is VOID else self._compute
        produced = compute(work, unit, value, skips)
        mail.hand_skips(self.stashed, unit, produced.skips)
        if not self.is_last:
            mail.values[stage + 1, unit] = produced.value

    def _compute(self, work: Work, unit: int, value: Any, skips: dict[str, Any]) -> Produced:
        if self.shared is None and not work.minibatch.autocast:
            produced = self._run(work, unit, value, skips)
        else:
            shared = nullcontext() if self.shared is None else self.shared.unwritten(self.op.stage)
            with autocasting(work.minibatch.autocast), shared:
                if self.store is not None:
                    refuse_autocast(self.store)
                produced = self._run(work, unit, value, skips)
        if self.is_last:
            work.keep(unit, produced.value)
        return produced

    def _run(self, work: Work, unit: int, value: Any, skips: dict[str, Any]) -> Produced:
        return self.stage.forward(
            unit,
            value,
            work.minibatch.step,
            work.criterion(unit) if self.is_last else None,
            self.keep,
            skips,
            work.position.first,
        )

    def _compute_on_trust(
        self, work: Work, unit: int, value: Any, skips: dict[str, Any]
    ) -> Produced:
        """Compute with weights that may not be allowed to stand. If these make it fail, others must
        get on to where the verdict is read, so something is handed on in place of the value."""
        void = Produced(VOID, {channel.route.key: VOID for channel in self.stashed})
        if any(given is VOID for given in (value, *skips.values())):
            return void
        try:
            return self._compute(work, unit, value, skips)
        except Exception as error:  # [4] whatever the user's code raises
            if work.failed_on_trust is None:
                work.failed_on_trust = stage_error(self.op, error)
            return void
