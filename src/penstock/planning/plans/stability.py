"""How fast a stage may learn from gradients as old as a plan makes them."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from penstock.base.errors import InputError
from penstock.base.values import Value, is_number
from penstock.planning.plans.explanation import Explanation


class Stability(Value, frozen=True, kw_only=True):
    """Whether a stage learns slowly enough for its delay.

    Attributes:
        stage: its number.
        delay: by how many updates its gradients are late.
        learning_rate: what its optimizer is given.
        curvature: the largest that the loss has in the stage's weights.
        product: rate × curvature, times what replicas or the policy multiply the rate by.
        bound: the largest product that is stable.
        largest_rate: the largest learning rate that is stable; infinite without curvature.
    """

    stage: int
    delay: float
    learning_rate: float
    curvature: float
    product: float
    bound: float
    largest_rate: float

    @property
    def stable(self) -> bool:
        """Whether the product is within the bound."""
        return self.product <= self.bound

    @property
    def words(self) -> str:
        """The comparison in a sentence, and what to do if it is beyond the bound."""
        factor = self.product / (self.learning_rate * self.curvature) if self.product else 1.0
        replicas = f" × {factor:.3g} replicas" if factor > 1 + 1e-9 else ""
        replicas = f" / {1 / factor:.3g} for their age" if factor < 1 - 1e-9 else replicas
        compared = (
            f"stage {self.stage}: learning rate {self.learning_rate:.3g} × curvature "
            f"{self.curvature:.3g}{replicas} = {self.product:.3g} is "
            f"{'within' if self.stable else 'beyond'} {self.bound:.3g}, the bound for "
            f"{delay_of(self.delay)}"
        )
        if self.stable:
            return compared
        lower = f"lower the learning rate below {self.largest_rate:.2g}"
        if not self.delay:
            return f"{compared}: {lower}"
        return f"{compared}: {lower}, {_less_delay(self.delay)}"


def check_stability(
    explanation: Explanation, learning_rate: float, curvatures: Sequence[float]
) -> tuple[Stability, ...]:
    """Compare learning rate × curvature with the bound of every stage's delay.

    Args:
        explanation: of a plan.
        learning_rate: that each stage's optimizer is given.
        curvatures: the largest of the loss in each stage's weights; one number per stage.

    Raises:
        InputError: a rate that is negative, or not one curvature per stage.
    """
    if not is_number(learning_rate) or not 0 <= learning_rate < inf:
        raise InputError(f"the learning rate is {learning_rate!r}, but must be a number ≥ 0")
    if len(curvatures) != len(explanation.stages):
        raise InputError(
            f"there are {len(curvatures)} curvatures, but the plan has {len(explanation.stages)} "
            "stages; give one for each"
        )
    return tuple(
        Stability(
            stage=index,
            delay=stage.delay,
            learning_rate=learning_rate,
            curvature=curvature,
            product=learning_rate * stage.rate_factor * curvature,
            bound=stage.stability_bound,
            largest_rate=explanation.largest_rate(index, curvature),
        )
        for index, (stage, curvature) in enumerate(zip(explanation.stages, curvatures, strict=True))
    )


def delay_of(delay: float) -> str:
    """A delay in words.

    >>> delay_of(0), delay_of(1), delay_of(2.5)
    ('gradients without delay', 'a delay of 1 update', 'a delay of 2.5 updates')
    """
    if not delay:
        return "gradients without delay"
    return f"a delay of {delay:.3g} update{'' if delay == 1 else 's'}"


def _less_delay(delay: float) -> str:
    policy = "versions.DoubleBuffer(): 1; " if delay > 1 else ""
    return (
        f"or train with less delay ({policy}a schedule that flushes: 0), or begin with smaller "
        "steps (versions.PipeMare(t1=…), optimizers.delay_corrected)"
    )
