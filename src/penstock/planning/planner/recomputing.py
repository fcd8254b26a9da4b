"""What stages run forward twice, given their cuts: no more than they need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import islice, product
from math import inf
from typing import NamedTuple

from penstock.planning.planner.candidate import Candidate
from penstock.planning.planner.setting import Setting
from penstock.planning.planner.task import Task
from penstock.planning.plans.stage_plan import RecomputeWay

_MOST_PATTERNS = 1_000
"""Of what all ranks together may recompute."""
_FEW_OPS = 20_000
FEW_RECOMPUTED = 4
"""Ways to recompute that are simulated where all ranks share a memory."""
Recomputes = tuple[RecomputeWay, ...]


def recomputing(
    task: Task, setting: Setting, cuts: tuple[int, ...], slack: float = 0.0, most: int = 1
) -> list[Candidate]:
    """Given cuts with no more recomputing than they need: the candidates that fit, but those that
    recompute all that another one does and more; none where none fits.

    Args:
        most: how many there are at most; those that recompute for the shortest time come first.
    """
    again = setting.recompute if setting.recompute in {"stage", "layers"} else "none"
    plain = Candidate(task, setting, cuts, (again,) * setting.num_stages)
    has_room = all(_has_room(plain, rank, slack) for rank in setting.unlike_ranks(task))
    if has_room and plain.excess.num_bytes <= slack:
        return [plain]
    if setting.recompute != "where-needed":
        return []
    fitting: list[Candidate] = []
    limits = [limit for _, limit in task.topology.shared_memories]
    choices = _patterns(plain, slack)
    if not all(choices) or not _fit_together(map(_least_shared, choices), limits, slack):
        return []
    for chosen in islice(_combined(choices), _MOST_PATTERNS):
        if not _fit_together([own.shared for own in chosen], limits, slack):
            continue
        how = {stage: way for own in chosen for stage, way in own.how.items()}
        recomputes = tuple(how[stage] for stage in range(setting.num_stages))
        if any(_is_part(less.recomputes, recomputes) for less in fitting):
            continue
        candidate = replace(plain, recomputes=recomputes)
        if candidate.excess.num_bytes <= slack:
            fitting.append(candidate)
        if len(fitting) == most:
            break
    return fitting


class _Pattern(NamedTuple):
    """What the stages of ranks that have the same ones may recompute.

    Attributes:
        how: by stage.
        seconds: that a microbatch then takes such a rank.
        shared: bytes that these ranks then need of each memory that several ranks share.
    """

    how: dict[int, RecomputeWay]
    seconds: float
    shared: tuple[int, ...]


def _least_shared(choices: Sequence[_Pattern]) -> tuple[int, ...]:
    """Bytes that ranks need of each shared memory, whatever they recompute."""
    return tuple(map(min, zip(*(own.shared for own in choices), strict=True)))


def _fit_together(parts: Iterable[tuple[int, ...]], limits: Sequence[float], slack: float) -> bool:
    """Whether shared memories have room for parts of what is in each of them."""
    for held, limit in zip(zip(*parts, strict=True), limits, strict=False):
        if sum(held) > limit + slack:
            return False
    return True


def _combined(choices: Sequence[Sequence[_Pattern]]) -> Iterator[tuple[_Pattern, ...]]:
    """A pattern for each of some ranks: first those with which no rank works long, and of these
    those with which all together work least.

    Args:
        choices: of each rank, those that take least first.
    """

    seconds_of = [[pattern.seconds for pattern in own] for own in choices]

    def promise(places: tuple[int, ...]) -> tuple[float, float]:
        seconds = [own[place] for own, place in zip(seconds_of, places, strict=True)]
        return max(seconds), sum(seconds)

    first = (0,) * len(choices)
    reached = {first}
    waiting = [(promise(places), places) for places in reached]
    while waiting:
        _, places = heappop(waiting)
        yield tuple([own[place] for own, place in zip(choices, places, strict=True)])
        for index, place in enumerate(places):
            further = (*places[:index], place + 1, *places[index + 1 :])
            if place + 1 < len(choices[index]) and further not in reached:
                reached.add(further)
                heappush(waiting, (promise(further), further))


def _patterns(plain: Candidate, slack: float) -> list[list[_Pattern]]:
    """What the stages of each rank may recompute so that it keeps its limit, that which takes least
    first; up to the first rank that can keep it in no way."""
    task, setting = plain.task, plain.setting
    place = {stage: k for own in setting.schedule.stages_of for k, stage in enumerate(own)}
    every = range(setting.num_stages)
    # All ranks try the same at once.
    tried = {
        pattern: replace(plain, recomputes=tuple(pattern[place[stage]] for stage in every))
        for pattern in _every_pattern(setting)
    }
    ranks_with: dict[tuple[int, ...], list[int]] = {}
    for rank in setting.unlike_ranks(task):
        ranks_with.setdefault(setting.stages_on(rank), []).append(rank)
    shared = bool(task.topology.shared_memories)
    choices: list[list[_Pattern]] = []
    for stages, ranks in ranks_with.items():
        patterns = {
            pattern[: len(stages)]: held
            for pattern, candidate in tried.items()
            if (held := _held_within(candidate, ranks, slack)) is not None
        }
        least = {
            own: held
            for own, held in patterns.items()
            if shared or not any(_is_part(less, own) for less in patterns.keys() - {own})
        }
        how = [(dict(zip(stages, own, strict=True)), held) for own, held in least.items()]
        every_way = (
            _Pattern(own, _busy_seconds(plain, own), _shared(plain, held)) for own, held in how
        )
        choices.append(sorted(every_way, key=lambda pattern: pattern.seconds))
        if not how:
            break
    return choices


def _shared(plain: Candidate, held: dict[int, int]) -> tuple[int, ...]:
    """Bytes of each memory that several ranks share, of those that some ranks hold."""
    task, devices = plain.task, plain.setting.devices
    return tuple(
        # Who shares layers with a rank shares its host's memory, too.
        sum(
            held[rank] * task.devices.num_behind(devices[rank])
            for rank in held
            if devices[rank] in host
        )
        for host, _ in task.topology.shared_memories
    )


def _busy_seconds(plain: Candidate, how: dict[int, RecomputeWay]) -> float:
    """For how long a microbatch keeps a rank busy with its stages."""
    task, setting, total = plain.task, plain.setting, 0.0
    for stage, way in how.items():
        bounds, devices = plain.cuts[stage : stage + 2], setting.devices_of[stage]
        pace = task.pace(devices, setting.devices, setting.mode).passes
        again = task.layers.sum("recompute_seconds", *bounds) if way != "none" else 0.0
        seconds = sum(task.layers.compute_seconds[slice(*bounds)]) + again
        total += pace * seconds / setting.replicas_of(stage)
    return total


def _held_within(candidate: Candidate, ranks: Iterable[int], slack: float) -> dict[int, int] | None:
    """What ranks hold; ``None`` where one of them does not keep its own limit."""
    if not all(_has_room(candidate, rank, slack) for rank in ranks):
        return None
    return {rank: candidate.held_on(rank) for rank in ranks}


def _has_room(candidate: Candidate, rank: int, slack: float) -> bool:
    """Whether a rank keeps its own limit."""
    limit = candidate.task.devices.limits[candidate.setting.devices[rank]]
    return limit == inf or candidate.held_on(rank) <= limit + slack


def _every_pattern(setting: Setting) -> Iterator[Recomputes]:
    """What the stages of a rank may recompute: all there is where ops are few, and otherwise the
    first ones, which hold most."""
    most = max(map(len, setting.schedule.stages_of))
    if setting.schedule.num_ops << most <= _FEW_OPS:
        yield from product(("none", "stage", "layers"), repeat=most)
    else:
        for how in ("stage", "layers"):
            for count in range(most + 1):
                yield (how,) * count + ("none",) * (most - count)


def _is_part(first: Recomputes, second: Recomputes) -> bool:
    """Whether the second recomputes all that the first does."""
    return all(own in ("none", other) for own, other in zip(first, second, strict=True))
