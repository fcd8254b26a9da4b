"""``Terms``: which schedule on which devices, whether it is built or not."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from penstock.core.schedule import Schedule, families
from penstock.core.schedule.repetition import MANY, abridged
from penstock.core.timing.simulator.step import microbatches_of_two
from penstock.core.versions import Flush, Policy
from penstock.planning.planner.request import RecomputeRule
from penstock.planning.plans.orders import stand_in


@dataclass(frozen=True)
class Terms:
    """Which schedule on which devices, whether it is built or not.

    Attributes:
        family: the schedule's.
        devices: the device of each rank, by its index in the cluster.
        versions: which weights passes read.
        replicas: how many each stage has; empty for one of each.
        options: (name, value) pairs that the family is given.
        recompute: what may run twice.
    """

    family: str
    devices: tuple[int, ...]
    versions: Policy = field(default_factory=Flush)
    replicas: tuple[int, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    recompute: RecomputeRule = "where-needed"

    @property
    def num_ranks(self) -> int:
        """How many ranks the schedule uses."""
        return len(self.devices)

    @property
    def given_options(self) -> dict[str, Any]:
        """All that the family is given besides ranks and microbatches."""
        return dict(self.options) | ({"replicas": list(self.replicas)} if self.replicas else {})

    @property
    def copies(self) -> tuple[int, ...]:
        """How many ranks, which follow one another, do the same: replicas of a stage, or of all
        stages of a rank where pipelines stand side by side; empty where no rank has a copy."""
        if not self.replicas or self.family in families.UNLIKE_REPLICAS:
            return self.replicas
        width = self.replicas[0]
        return (width,) * (self.num_ranks // width)

    @cached_property
    def num_pipelines(self) -> int:
        """How many pipelines stand side by side and do the same, but that the first ones may have a
        microbatch more; 1 where that is not so, or where the order of all is searched at once."""
        alike = len({*self.replicas}) == 1 and not self.versions.asynchronous
        return self.replicas[0] if alike and self.family not in families.SEARCHED else 1

    def folded(self, num_microbatches: int) -> tuple[Terms, int]:
        """(the terms of the first and the last of many pipelines side by side, and the microbatches
        of these two); themselves, and all microbatches, where there are no more than two.

        The first and the last come as far as all of them: what 16,384 devices do is told by 16.
        """
        width = self.num_pipelines
        if width <= 2:
            return self, num_microbatches
        few = self.devices[: 2 * self.num_ranks // width]
        replicas = (2,) * len(self.replicas)
        terms = Terms(self.family, few, self.versions, replicas, self.options, self.recompute)
        return terms, microbatches_of_two(num_microbatches, width)

    @property
    def terms(self) -> Terms:
        """These alone, which are quickly compared: schedules of equal terms are equal, searched
        ones for equal costs."""
        return Terms(*(getattr(self, own.name) for own in fields(Terms)))

    def build(self, num_microbatches: int) -> Schedule:
        """The schedule for some microbatches. A family that searches has to know the stages' costs,
        so its place is held by another order until it has them.

        Raises:
            InputError: the family refuses.
        """
        options = self.given_options
        if self.family in families.SEARCHED:
            return stand_in(self.family, self.num_ranks, num_microbatches, options)
        return families.build(
            self.family, num_ranks=self.num_ranks, num_microbatches=num_microbatches, **options
        )

    def shown(self, num_microbatches: int) -> Schedule:
        """As ``build``; of very many microbatches, so few as show what ranks do and hold, where
        they do the same again and again for the others."""
        short, varies = None, families.HOLD_ALL | families.SEARCHED
        if num_microbatches >= MANY and self.family not in varies:
            short = abridged(self.build, num_microbatches, 2 * self.num_ranks)
        return self.build(num_microbatches) if short is None else short
