"""Callbacks look on while a pipeline is fitted, and may end it."""

from __future__ import annotations

import math
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from penstock.base.errors import InputError
from penstock.base.values import number, whole

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.training.pipeline import Pipeline


_TICK = 1e-6


class Callback:
    """Looks on in ``penstock.fit``; override what is of interest.

    Under ``torchrun`` every process has its own, which are called with the same losses; what should
    happen once asks ``pipeline.is_first``. Whoever returns ``True`` ends the training: from
    ``on_evaluate`` if any process's does; from ``on_step`` all processes' must.
    """

    def on_step(self, step: int, loss: Tensor | None, pipeline: Pipeline) -> bool | None:
        """A minibatch has been trained on. The next one may be under way: learning rates may be
        read, but weights may not, and nothing may be set or evaluated.

        Args:
            step: how many minibatches there have been, those before a loaded checkpoint included.
            loss: as ``Pipeline.step`` returns it.
            pipeline: the one that is fitted; ``metrics`` and ``grad_norm`` are those of the step.
        """

    def on_evaluate(self, step: int, loss: Tensor | None, pipeline: Pipeline) -> bool | None:
        """Held-out data have been evaluated; nothing is under way, so that anything may be done to
        the pipeline, if all processes do it.

        Args:
            step: how many minibatches have been trained on.
            loss: of the held-out data; ``None`` if the pipeline tells no results.
            pipeline: the one that is fitted.
        """

    def on_end(self, pipeline: Pipeline) -> None:
        """The training has ended, well or not. All callbacks are told, also if one of them raises
        here; the first error stands."""


def numbers_of(loss: Tensor | None, pipeline: Pipeline) -> dict[str, float]:
    """The numbers that a pipeline tells of its last step, by name: ``loss``, ``lr`` of the
    process's first group, ``grad_norm`` where it clips, and its metrics.

    Args:
        loss: as ``on_step`` gets it.
    """
    numbers = {} if loss is None else {"loss": float(loss)}
    rates = pipeline.optimizers.learning_rates
    if rates:
        numbers["lr"] = rates[0]
    with suppress(InputError):  # which says that the pipeline computes none
        numbers["grad_norm"] = float(pipeline.grad_norm)
    return {**numbers, **{name: float(value) for name, value in pipeline.metrics.items()}}


class EarlyStopping(Callback):
    """Ends the training when the held-out loss has not become better for a while.

    Args:
        patience: at how many evaluations in a row it may be no better.
        min_delta: by how much it must be lower than the best one so far to be better.

    Attributes:
        best: the lowest held-out loss; infinite before the first.
        best_step: after how many minibatches that was.
        num_worse: evaluations since then.

    Raises:
        InputError: impossible arguments; in training, a pipeline that tells no results.
    """

    def __init__(self, patience: int = 3, min_delta: float = 0.0) -> None:
        self._patience = whole("patience", patience, 1)
        self._min_delta = number("min_delta", min_delta)
        self.best = math.inf
        self.best_step = 0
        self.num_worse = 0

    def on_evaluate(self, step: int, loss: Tensor | None, pipeline: Pipeline) -> bool:
        if loss is None:
            raise InputError(
                "EarlyStopping needs the held-out loss, and a pipeline with results='none' tells "
                "none; leave results out"
            )
        if float(loss) < self.best - self._min_delta:
            self.best, self.best_step, self.num_worse = float(loss), step, 0
        else:
            self.num_worse += 1
        return self.num_worse >= self._patience


class ProgressLines(Callback):
    """Prints how far training is: a line of the first process every few seconds, and one for each
    evaluation.

    Args:
        every_seconds: at most how often.
        file: where to; by default standard error.
    """

    def __init__(self, every_seconds: float = 5.0, file: TextIO | None = None) -> None:
        self._every_seconds = number("every_seconds", every_seconds)
        self._file = file
        self._said: tuple[float, int] | None = None

    def on_step(self, step: int, loss: Tensor | None, pipeline: Pipeline) -> None:
        now = time.monotonic()
        if self._said is None:
            self._said = now, step
            return
        before, steps_before = self._said
        if now - before < max(self._every_seconds, _TICK) or not pipeline.is_first:
            return
        rate = f"{(step - steps_before) / (now - before):.3g} steps/s"
        self._said = now, step
        self._say(f"step {step}: {_shown('loss', loss)}{rate}")

    def on_evaluate(self, step: int, loss: Tensor | None, pipeline: Pipeline) -> None:
        if pipeline.is_first:
            self._say(f"step {step}: {_shown('held-out loss', loss)}".rstrip(", :"))

    def _say(self, text: str) -> None:
        print(text, file=self._file or sys.stderr, flush=True)


def _shown(name: str, loss: Tensor | None) -> str:
    return "" if loss is None else f"{name} {float(loss):.4g}, "
