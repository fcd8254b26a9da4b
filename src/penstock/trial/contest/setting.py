"""``Setting``: the workload of a contest, its profile, and the devices that methods may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from penstock.core.cluster import Cluster, Tier
from penstock.core.graph import LayerGraph
from penstock.planning import planner
from penstock.trial.workload import Workload

Stage = Literal["cores", "emulated"]
"""Where methods show their pace: on this machine's cores, or on devices that only wait."""

_LEAST_TURN = 5


@dataclass(frozen=True)
class Setting:
    """What all methods of a contest share.

    Attributes:
        workload: what is trained.
        graph: its profile, with microbatches and with whole minibatches.
        cluster: the devices that methods may take.
        num_microbatches: per minibatch.
        num_rows: of a minibatch.
        folder: for what comes and goes.
        stage: whether devices are this machine's cores, or emulated.
        load: makes the workload again, in other processes.
    """

    workload: Workload
    load: Callable[[], Workload]
    graph: LayerGraph
    cluster: Cluster
    num_microbatches: int
    num_rows: int
    folder: str
    stage: Stage = "cores"

    @property
    def num_devices(self) -> int:
        """How many devices a method may take."""
        return len(self.cluster.devices)

    @property
    def turn(self) -> int:
        """Minibatches that a method trains on before the next one's turn: enough for a stream to
        be more than its beginning and its end, since it drains there."""
        return max(_LEAST_TURN, 3 * self.num_devices)

    @property
    def whole(self) -> LayerGraph:
        """The profile with whole minibatches as microbatches."""
        return self.graph.at(self.num_rows)

    @cached_property
    def cuts(self) -> tuple[str, ...]:
        """The layers with which stages begin, one stage for each device: the same for all methods,
        so that what is compared is the methods."""
        plan = planner.plan(
            self.graph,
            self.cluster,
            microbatches=self.num_microbatches,
            schedule="1f1b",
            stages=self.num_devices,
            recompute="never",
        )
        return tuple(stage.layers[0] for stage in plan.stages[1:])

    @cached_property
    def tier(self) -> Tier:
        """Where stages are while they are not in memory; its speed is measured once."""
        return Cluster.local(1, tiers=[Tier(folder=self.folder)]).tiers[0]
