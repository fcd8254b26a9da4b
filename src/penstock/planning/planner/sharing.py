"""Where to cut for ranks that share a memory, however much one of them takes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from penstock.planning.partition.chain import Extra, Table, lightest, starts_of
from penstock.planning.planner.candidate import Candidate
from penstock.planning.planner.memory_limits import MemoryLimits
from penstock.planning.planner.setting import Setting
from penstock.planning.planner.task import Task

_PASSES = ("forward_seconds", "backward_input_seconds", "backward_weight_seconds")
_CLOSE = 0.002
"""Relative: of two stages that take as long, the simulator tells which cuts are better."""


class _Choice(NamedTuple):
    """What stages take that run forward again in a certain way, of all layers that they may have.

    Attributes:
        seconds: per microbatch; infinite for layers that may not be a stage.
        share: of the shared memories, what all ranks that have the stage need of them; infinite
            where one has no room for it.
    """

    seconds: Table
    share: Table


def sharing(
    task: Task, setting: Setting, memory: MemoryLimits, beside: Extra, slack: float
) -> Iterator[Candidate]:
    """The cuts whose slowest stage is as fast as possible while all ranks together need no more
    than they have, if any do.

    Stages that may take up to some time each need least with the lightest cuts, which tell whether
    any fit; the least such time is found by halving.

    Args:
        beside: what stages take besides the seconds of their layers.
        slack: bytes by which limits may be exceeded.
    """
    choices = _choices(task, setting, memory, beside)

    def within(limit: float) -> tuple[Candidate, float] | None:
        """The lightest candidate of stages that take so long at most, and how long one does."""

        def weights(stage: int) -> list[Table]:
            return [np.where(own.seconds <= limit, own.share, inf) for own in choices[stage]]

        num_layers = len(task.places) - 1
        cuts = lightest(
            num_layers, setting.num_stages, lambda stage: np.minimum.reduce(weights(stage))
        )
        if not cuts:
            return None
        slowest, ways = 0.0, []
        for stage, (start, stop) in enumerate(pairwise(cuts)):
            place = stop - start - 1, stop
            least = int(np.argmin([table[place] for table in weights(stage)]))
            slowest = max(slowest, float(choices[stage][least].seconds[place]))
            ways.append(memory.ways[least])
        inner = tuple(task.places[number] for number in cuts)
        candidate = Candidate(task, setting, inner, tuple(ways))
        return (candidate, slowest) if candidate.excess.num_bytes <= slack else None

    best = within(inf)
    if best is None:
        return
    too_fast = 0.0
    while best[1] - too_fast > _CLOSE * best[1]:
        limit = (best[1] + too_fast) / 2
        nearer = within(limit)
        if nearer is None:
            too_fast = limit
        else:
            best = nearer
    yield best[0]


def _choices(
    task: Task, setting: Setting, memory: MemoryLimits, beside: Extra
) -> Sequence[Sequence[_Choice]]:
    """What every stage takes, in each way that is allowed."""
    count = len(task.places) - 1
    starts = starts_of(count, count + 1)
    stops = np.broadcast_to(np.arange(count + 1), starts.shape)
    tables = task.layers.tables(count)
    once = sum(tables[name] for name in _PASSES)
    choices = []
    for stage, speed in enumerate(setting.speeds(task)):
        other, per_byte = beside(stage, starts, stops), _share_per_byte(task, setting, stage)
        passes = [
            once + (0.0 if how == "none" else tables["recompute_seconds"]) for how in memory.ways
        ]
        choices.append(
            [
                _Choice(
                    seconds / speed + other,
                    per_byte * needed if per_byte else np.where(needed < inf, 0.0, inf),
                )
                for seconds, needed in zip(passes, memory.within_limits(stage), strict=True)
            ]
        )
    return choices


def _share_per_byte(task: Task, setting: Setting, stage: int) -> float:
    """What each byte of a stage is of the memories that its ranks share with others."""
    devices = setting.devices_of[stage]
    return sum(
        sum(device in host for device in devices) / limit
        for host, limit in task.topology.shared_memories
    )
