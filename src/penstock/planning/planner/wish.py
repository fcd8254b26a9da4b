"""``Wish``: what a plan must be like, whatever the model and the cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from penstock.core.versions import Policy

RecomputeRule = Literal["where-needed", "never", "stage", "layers"]
"""Whether stages may run forward twice: where they would not fit otherwise, never, or always."""

SpillRule = Literal["where-needed", "never", "always"]
"""Whether stages may come from a tier and leave again: where nothing fits otherwise, never, or
always."""


@dataclass(frozen=True)
class Wish:
    """What a plan must be like.

    Attributes:
        schedule: the family; the best by default.
        stages: how many there are; the best number by default.
        versions: the weight-version policy; by default what belongs to the schedule.
        replicas: how many each stage has; none, and ``any_replicas`` decides.
        any_replicas: whether stages may be given replicas.
        asynchronous: whether the schedule may be one that never flushes, or must be.
        least_stages: the fewest stages.
        cuts: where stages begin, as ``Candidate.cuts``; none, and the best are found.
        recompute: what may run forward twice.
        spill: whether stages may come from a tier and leave again.
        options: (name, value) pairs that the schedule's family is given.
    """

    schedule: str | None = None
    stages: int | None = None
    versions: Policy | None = None
    replicas: tuple[int, ...] = ()
    any_replicas: bool = True
    asynchronous: Literal["no", "also", "only"] = "no"
    least_stages: int = 1
    cuts: tuple[int, ...] = ()
    recompute: RecomputeRule = "where-needed"
    spill: SpillRule = "where-needed"
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def may_spill(self) -> bool:
        """Whether nothing is asked for that decides about stages already."""
        pinned = (self.stages, *self.cuts, *self.replicas)
        flushes = self.versions is None or not self.versions.asynchronous
        return self.schedule in (None, "spilled") and pinned == (None,) and flushes

    def allows(self, num_stages: int) -> bool:
        """Whether a plan may have ``num_stages``."""
        return num_stages >= self.least_stages and self.stages in (None, num_stages)
