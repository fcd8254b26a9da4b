"""``Draft``: a plan as a person or a program writes it, and what is worked out to make it a
``Plan``.

Three things follow from the rest of a plan, and whoever writes one may leave them out: the policy
of weight versions that belongs to a schedule, how many versions each stage has, and the order of
the ops of a family that searches. ``completed`` adds them, once, before there is a plan; a plan
only checks them.
"""

from __future__ import annotations

from itertools import accumulate, chain
from math import inf
from typing import Any

from msgspec import field
from msgspec.structs import asdict, replace

from penstock.base.errors import InputError
from penstock.base.telling import tells
from penstock.base.values import Value, amount, whole
from penstock.core.cluster import Device
from penstock.core.example import Example
from penstock.core.graph import Contention, Estimate
from penstock.core.schedule import families
from penstock.core.schedule.families.options import read_replicas
from penstock.core.schedule.memory import Sizes
from penstock.core.versions import USUAL, Flush, Place, Policy, place_of, weight_copies
from penstock.planning.plans.consistency import (
    MOST_MICROBATCHES,
    MOST_THREADS,
    check_counts,
    check_layers,
    check_options,
)
from penstock.planning.plans.orders import check_order_options, search_order, written
from penstock.planning.plans.spilling import Offload, Spill
from penstock.planning.plans.stage_plan import StagePlan, sizes_of
from penstock.planning.plans.summing import Summing
from penstock.planning.plans.table import Alternative


class Draft(Value, frozen=True, kw_only=True):
    """The fields of a ``Plan``, which says what they mean, each right by itself.

    Raises:
        InputError: a field is none that a plan can have, a stage has no layers or no rank, or a
            layer stands twice.
    """

    model: str
    schedule: str
    num_microbatches: int
    stages: tuple[StagePlan, ...]
    options: dict[str, Any] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    versions: Policy = field(default_factory=Flush)
    num_threads: int = 1
    microbatch_size: int = 0
    devices: tuple[Device, ...] = ()
    hosts: tuple[int, ...] = ()
    cards: tuple[int, ...] = ()
    summing: Summing = Summing()
    cost_model: str = "ring"
    reason: str = ""
    alternatives: tuple[Alternative, ...] = ()
    contention: Contention = Contention()
    estimate: Estimate | None = None
    warnings: tuple[str, ...] = ()
    rate: float | None = None
    spill: Spill | None = None
    offload: Offload | None = None
    example: Example | None = None
    input_shapes: dict[str, str] = field(default_factory=dict)
    file_version: int = field(default=2, name="version")

    def __post_init__(self) -> None:
        self.check_fields("Plan")
        if self.file_version != 2:
            raise InputError(
                f"the plan has version {self.file_version}; this Penstock reads version 2, so plan "
                "again"
            )
        whole("num_microbatches", self.num_microbatches, 1, MOST_MICROBATCHES)
        whole("num_threads", self.num_threads, 1, MOST_THREADS)
        if self.rate is not None and not amount("rate", self.rate):
            raise InputError("rate is 0; give frames per second, or leave it out")
        check_counts(0, microbatch_size=self.microbatch_size)
        check_options(self.options)
        check_layers(self.stages, any_rank=bool(self.given_replicas))
        if self.schedule == "chimera" and max(self.replicas) > 1:
            raise InputError(
                "chimera has every stage twice by itself, so in a plan it has no replicas; leave "
                "replicas out, or take another schedule"
            )
        if self.schedule in families.SEARCHED:
            check_order_options(self.schedule, self.options)
        elif self.order:
            searched = " or ".join(sorted(families.SEARCHED))
            raise InputError(
                f"order: {self.schedule} makes its own; leave order out, or take {searched}"
            )

    @property
    def num_ranks(self) -> int:
        """How many ranks the plan runs on."""
        counts = self.replicas
        if self.given_replicas and self.schedule in families.UNLIKE_REPLICAS:
            return sum(counts)
        # A rank may have several stages; each names the first of its replicas.
        return max(stage.rank for stage in self.stages) + max(counts)

    @property
    def given_replicas(self) -> tuple[int, ...]:
        """The ``replicas`` that the options name; none where they name none."""
        return read_replicas(self.options.get("replicas", ()))

    @property
    def replicas(self) -> tuple[int, ...]:
        """How many ranks hold each stage, each with microbatches of its own."""
        return self.given_replicas or (1,) * len(self.stages)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of all layers, in the order in which stages have them."""
        return tuple(chain.from_iterable(stage.layers for stage in self.stages))

    @property
    def num_tensor_ranks(self) -> int:
        """The most devices that share every layer of a stage."""
        return max(stage.tensor_ranks for stage in self.stages)

    def place(self, stage: int) -> Place:
        """The place of a stage in the pipeline, as weight-version policies ask for it."""
        return place_of(self.versions, self.replicas, stage, self.num_microbatches)

    @property
    def sizes(self) -> Sizes:
        """Bytes of activations that one microbatch keeps at each stage, for
        ``Timeline.peak_bytes``."""
        return sizes_of(self.stages)


def completed(draft: Draft) -> dict[str, Any]:
    """The fields of the plan that a draft becomes: with what follows from the others, and an order
    that is searched if it is left out.

    Raises:
        InputError: the family that searches refuses.
    """
    order = draft.order
    if draft.schedule in families.SEARCHED and not order:
        order = _searched(draft)
    versions = draft.versions
    if not versions.asynchronous:
        versions = USUAL.get(draft.schedule, versions)
    stages = draft.stages
    if len(draft.replicas) == len(stages):  # else the plan is refused, whatever it has of weights
        stages = tuple(
            replace(stage, weight_versions=_num_versions(draft, versions, index))
            for index, stage in enumerate(stages)
        )
    return {**asdict(draft), "order": order, "versions": versions, "stages": stages}


def _num_versions(draft: Draft, versions: Policy, stage: int) -> int:
    place = place_of(versions, draft.replicas, stage, draft.num_microbatches)
    return weight_copies(versions, place)


@tells("searching an order")
def _searched(draft: Draft) -> tuple[str, ...]:
    """The order that the schedule's family finds in the memory of the devices."""
    schedule = search_order(
        draft.schedule, draft.stages, draft.num_microbatches, draft.options, _limits(draft)
    )
    return written(schedule)


def _limits(draft: Draft) -> list[float]:
    """Bytes that each rank may use; no limits where nobody says, or not of every device."""
    width_of = {stage.rank: stage.tensor_ranks for stage in draft.stages}
    widths = [width_of.get(rank, 1) for rank in range(draft.num_ranks)]
    if len(draft.devices) != sum(widths):
        return [inf] * draft.num_ranks
    firsts = accumulate(widths[:-1], initial=0)
    return [draft.devices[first].memory_bytes or inf for first in firsts]
