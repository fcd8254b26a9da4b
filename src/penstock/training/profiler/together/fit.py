"""By which factor ranks of one machine are slower than their layers alone, from one measurement.

The planner's own ``Candidate`` says how long a step takes if passes take so many times longer, and
the factor with which it says what was measured is the answer.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import NamedTuple

from msgspec.structs import replace

from penstock.core.cluster import Cluster
from penstock.core.graph import Contention, LayerGraph, Mode
from penstock.planning.planner import plan
from penstock.planning.planner.candidate import Candidate
from penstock.planning.planner.cuts import with_cuts
from penstock.planning.planner.offers import Offer
from penstock.planning.planner.task import Task
from penstock.planning.plans import Plan
from penstock.training.profiler.alone import Alone
from penstock.training.profiler.together.runs import FAMILIES, Ran

_FACTORS = [0.1 * 1.002**power for power in range(3500)]  # up to about 100
# Where a host does not tell its memory, its devices would not count as sharing it.
_PLENTY_BYTES = 1 << 62


class Factors(NamedTuple):
    """How many times longer passes and updates took in a pipeline than alone.

    Attributes:
        passes: forwards and backwards.
        updates: optimizer steps.
        by_cpu: forwards and backwards, by processor time. That leaves out that ranks wait for each
            other, for the interpreter and for other programs.
    """

    passes: float
    updates: float
    by_cpu: float


class Lap(NamedTuple):
    """What a pipeline took, and what the layers alone took right before and after that."""

    alone: Alone
    ran: Ran


def crowd(num_ranks: int) -> Cluster:
    """A cluster of so many ranks of this machine."""
    return replace(Cluster.local(num_ranks, kind="cpu"), memory_bytes=_PLENTY_BYTES)


def plan_of(graph: LayerGraph, mode: Mode, num_ranks: int, microbatches_per_rank: int = 4) -> Plan:
    """The plan whose pipeline is measured for a mode."""
    return plan(
        graph,
        crowd(num_ranks),
        microbatches=microbatches_per_rank * num_ranks,
        schedule=FAMILIES[mode],
        stages=num_ranks,
        recompute="never",
    )


def factors_of(graph: LayerGraph, made: Plan, lap: Lap) -> Factors:
    """The factors with which the planner predicts what was measured.

    Args:
        made: what was run, by ``plan_of``.
    """
    planned = sum(layer.update_seconds for layer in graph.layers)
    updates = lap.ran.update_seconds / planned if planned and lap.ran.update_seconds else 1.0
    graph = paced(graph, lap.alone)

    def predicted_seconds(passes: float) -> float:
        return _candidate(graph, made, passes, updates).seconds

    place = bisect_left(_FACTORS[:-1], lap.ran.step_seconds, key=predicted_seconds)
    alone = made.num_microbatches * lap.alone.cpu_seconds
    by_cpu = (lap.ran.cpu_seconds - planned) / alone if alone else 1.0
    return Factors(_FACTORS[place], updates, max(by_cpu, _FACTORS[0]))


def _candidate(graph: LayerGraph, made: Plan, passes: float, updates: float) -> Candidate:
    contention = Contention(
        whole=passes, split=passes, stream=passes, update=updates, stream_update=updates
    )
    task = Task(replace(graph, contention=contention), crowd(made.num_ranks), made.num_microbatches)
    ranks = tuple(range(made.num_ranks))
    setting = Offer(made.schedule, ranks, made.versions, recompute="never").setting(task)
    cuts = accumulate((len(stage.layers) for stage in made.stages), initial=0)
    return with_cuts(task, setting, tuple(cuts))


def paced(graph: LayerGraph, alone: Alone) -> LayerGraph:
    """The profile with its passes scaled to what a pass through all layers took now.

    Args:
        graph: says how the time divides among layers.
        alone: says how much it is in all.
    """
    forward = sum(layer.forward_seconds for layer in graph.layers)
    backward = sum(layer.backward_seconds for layer in graph.layers)
    ahead = alone.forward_seconds / forward if forward and alone.forward_seconds else 1.0
    back = alone.backward_seconds / backward if backward and alone.backward_seconds else 1.0
    return replace(
        graph,
        layers=tuple(layer.paced(ahead, back) for layer in graph.layers),
        other_sizes=tuple(
            replace(other, layers=tuple(layer.paced(ahead, back) for layer in other.layers))
            for other in graph.other_sizes
        ),
    )
