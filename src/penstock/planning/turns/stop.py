"""How long the jobs of a fleet train: ``pk.stop.steps``, ``.epochs`` and ``.halving``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.base.errors import InputError
from penstock.base.values import expect, flag, whole


@dataclass(frozen=True)
class Stop:
    """How long jobs train. Make one with ``steps``, ``epochs`` or ``halving``.

    Attributes:
        steps: minibatches of each job, at most; ``None`` where nobody says.
        epochs: passes through each job's data, at most; ``None`` where nobody says.
        every: after how many minibatches each the worse half of the jobs stops; 0 for never.
        metric: by which that is decided: ``"loss"``, or one of the jobs' metrics.
        largest: whether large values are the good ones.
    """

    steps: int | None = None
    epochs: int | None = None
    every: int = 0
    metric: str = "loss"
    largest: bool = False

    def targets(self, num_jobs: int, limit: int | None = None) -> list[int]:
        """The numbers of minibatches at which jobs stand still until it is decided which go on; the
        last one is the end.

        Args:
            num_jobs: how many begin.
            limit: minibatches after which a job ends in any case.

        >>> halving("loss", every=100).targets(5)
        [100, 200, 300]
        >>> halving("loss", every=100, steps=250).targets(5)
        [100, 200, 250]
        """
        most = min((count for count in (self.steps, limit) if count is not None), default=None)
        rungs = [self.every * (rung + 1) for rung in range(self.num_decisions(num_jobs))]
        if most is not None:
            return [rung for rung in rungs if rung < most] + [most]
        return rungs or ([self.every] if self.every else [])

    def num_decisions(self, num_jobs: int) -> int:
        """How often half of the jobs stop, until one is left."""
        return math.ceil(math.log2(num_jobs)) if self.every and num_jobs > 1 else 0

    def survivors(self, values: Mapping[str, float], num_begun: int) -> list[str]:
        """The jobs that go on behind a decision, best first: half of those that began the stretch,
        rounded up. Where two are equal, the one that comes first in ``values`` is better; one whose
        value is no number is worse than any other.

        Args:
            values: by job, the mean of its metric over the stretch, in the fleet's order; without
                those that have ended.
            num_begun: how many jobs began the stretch.

        >>> halving("loss", every=9).survivors({"a": 2.0, "b": 1.0, "c": 3.0}, 3)
        ['b', 'a']
        """
        sign = -1.0 if self.largest else 1.0

        def rank(name: str) -> float:
            value = values[name]
            return math.inf if math.isnan(value) else sign * value

        return sorted(values, key=rank)[: math.ceil(num_begun / 2)]


def steps(count: int) -> Stop:
    """Every job trains on so many minibatches.

    Raises:
        InputError: ``count`` is no whole number ≥ 1.
    """
    return Stop(steps=whole("steps", count, 1))


def epochs(count: int) -> Stop:
    """Every job goes so often through its data.

    Raises:
        InputError: ``count`` is no whole number ≥ 1.
    """
    return Stop(epochs=whole("epochs", count, 1))


def halving(
    metric: str = "loss", *, every: int, steps: int | None = None, largest: bool = False
) -> Stop:
    """Successive halving (Jamieson and Talwalkar, arXiv 1502.07943): after every so many
    minibatches of each job the worse half of those that are left stops, until one is left.

    Args:
        metric: what is compared: the mean over the last ``every`` minibatches of ``"loss"``, or of
            one of the metrics that the jobs are given.
        every: minibatches between two decisions.
        steps: until how many minibatches the last one goes on; by default it ends with the last
            decision.
        largest: whether large values are the good ones, as of an accuracy.

    Raises:
        InputError: a number below 1, or ``steps`` before the first decision.
    """
    expect(metric, str, "the metric", 'give "loss" or the name of a metric')
    whole("every", every, 1)
    flag("largest", largest)
    if steps is not None and whole("steps", steps, 1) < every:
        raise InputError(f"halving ends at step {steps}, before its first decision at {every}")
    return Stop(steps=steps, every=every, metric=metric, largest=largest)


def settled(
    stop: Stop | None, steps: int | None, epochs: int | None, has_own: Sequence[bool] = ()
) -> Stop:
    """The rule to stop that the arguments of ``Fleet.run`` mean.

    Args:
        has_own: by job, whether it says itself how long it trains.

    Raises:
        InputError: none is given where a job needs it, or several are.
    """
    given = [length for length in (stop, steps, epochs) if length is not None]
    if len(given) > 1:
        raise InputError("stop, steps and epochs each say how long jobs train; give one of them")
    if stop is not None:
        expect(stop, Stop, "stop", "give for example pk.stop.steps(100)")
        return stop
    if steps is not None:
        return Stop(steps=whole("steps", steps, 1))
    if epochs is not None:
        return Stop(epochs=whole("epochs", epochs, 1))
    if not has_own or not all(has_own):
        raise InputError(
            "nobody says how long jobs train; give stop=pk.stop.halving(…), steps=… or epochs=…, "
            "or each job its own steps"
        )
    return Stop()
