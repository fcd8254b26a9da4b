"""What a plan says of itself to those whom it asks for words and numbers of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from penstock.core.schedule import Schedule
    from penstock.core.versions import Policy
    from penstock.planning.plans.offloading import Offload
    from penstock.planning.plans.spilling import Spill
    from penstock.planning.plans.stage_plan import StagePlan
    from penstock.planning.plans.summing import Summing


class Shape(Protocol):
    """A ``Plan``, whose attributes these are."""

    @property
    def schedule(self) -> str: ...
    @property
    def stages(self) -> tuple[StagePlan, ...]: ...
    @property
    def placement(self) -> Schedule: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def num_seats(self) -> int: ...
    @property
    def group_sizes(self) -> tuple[int, ...]: ...
    @property
    def num_microbatches(self) -> int: ...
    @property
    def microbatch_size(self) -> int: ...
    @property
    def versions(self) -> Policy: ...
    @property
    def summing(self) -> Summing: ...
    @property
    def spill(self) -> Spill | None: ...
    @property
    def offload(self) -> Offload | None: ...
